"""S3 through s3fs: keys, region and AWS_ENDPOINT_URL from the environment, refusals that may pass waited out, errors named.

s3fs and botocore would each try again by their own rules, so that one lost request became thirty; here both try once, and
`persist` decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dsreason.config.address import S3Address
from dsreason.config.retries import persist
from dsreason.config.secrets import hide_secrets, quiet_libraries, without_credentials
from dsreason.errors import StorageError

if TYPE_CHECKING:
    from s3fs import S3FileSystem

Answer: TypeAlias = Mapping[str, Any]

CONNECT_LIMIT_S = 10
READ_LIMIT_S = 60
"""Without a byte from the server."""
REQUEST_LIMIT_S = 300
"""Of one request with its content, at most a part of a file: a server that stops reading would hold it for ever."""
READ_BYTES = 32 * 1024**2
"""Asked for at once: what a cut connection costs."""
PASSING_CODES = (
    "RequestTimeout",
    "SlowDown",
    "BadDigest",
    "IncompleteBody",
    "XAmzContentSHA256Mismatch",
    "OperationAborted",
)
"""Refusals below status 500 that another try may mend."""


@dataclass(frozen=True)
class S3Object:
    """`version` changes whenever the content does: ETag, size and time of an object."""

    address: S3Address
    size: int
    version: str


def connect() -> S3FileSystem:
    """The connection of this process (fsspec keeps one of each kind, also after a fork)."""
    import s3fs  # half a second, for those who need it

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if without_credentials(endpoint) != endpoint:
        raise StorageError(
            "AWS_ENDPOINT_URL holds a user and a password; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    quiet_libraries()
    settings: dict[str, Any] = {
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": CONNECT_LIMIT_S,
        "read_timeout": READ_LIMIT_S,
    }
    if endpoint and "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ:
        # Many servers that speak S3 refuse the checksum headers that are AWS's default; uploads are compared by ETag.
        settings["request_checksum_calculation"] = "when_required"
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")  # botocore knows only the latter
    files = s3fs.S3FileSystem(
        endpoint_url=endpoint or None,
        client_kwargs={"region_name": region} if region else {},
        config_kwargs=settings,
        use_listings_cache=False,
    )
    files.retries = 1
    return files


def request(
    method: str,
    address: S3Address,
    *,
    check: Callable[[Answer], None] = lambda answer: None,
    attempts: int | None = None,
    **parameters: Any,
) -> Answer:
    """The answer to an S3 API call (`head_object`) on the bucket of `address`.

    Args:
        check: raises StorageError for an answer that shows damage.
        parameters: the call's own, but for the bucket.

    Raises:
        StorageError: names the address and the server's answer.
    """

    def once() -> Answer:
        with named_errors(address):
            answer: Answer = connect().call_s3(method, Bucket=address.bucket, timeout=REQUEST_LIMIT_S, **parameters)
        check(answer)
        return answer

    return persist(once, attempts)


def find_object(address: S3Address) -> S3Object:
    found = request("head_object", address, Key=address.key)
    return S3Object(
        address, found["ContentLength"], _version(found["ETag"], found["ContentLength"], found["LastModified"])
    )


def list_objects(address: S3Address) -> dict[str, S3Object]:
    """Everything below the address, by its path from there; folder marks (keys that end with a slash) left out."""
    prefix = f"{address.key}/".lstrip("/")
    found: dict[str, S3Object] = {}
    following: dict[str, Any] = {}
    while True:
        page = request("list_objects_v2", address, Prefix=prefix, **following)
        for entry in page.get("Contents", []):
            key, size = entry["Key"], entry["Size"]
            if not key.endswith("/"):
                version = _version(entry["ETag"], size, entry["LastModified"])
                found[key.removeprefix(prefix)] = S3Object(S3Address(address.bucket, key), size, version)
        if not page.get("IsTruncated"):
            return found
        following = {"ContinuationToken": page["NextContinuationToken"]}


def read_into(source: S3Object, file: Path) -> None:
    """Append to `file` what it lacks of the object; a cut connection costs at most READ_BYTES.

    Raises:
        StorageError: cannot be read, or was changed since `source` was made.
    """
    path = f"{source.address.bucket}/{source.address.key}"
    with file.open("ab") as target:
        # Asks for the object's ETag, and with each part for that version alone.
        remote = persist(lambda: _open(path, source))
        while target.tell() < source.size:
            target.write(persist(lambda: _read(remote, target.tell(), source)))


def _open(path: str, source: S3Object) -> Any:
    with named_errors(source.address):
        remote = connect().open(path, "rb", cache_type="none")
    details = remote.details
    if _version(details["ETag"], details["size"], details["LastModified"]) != source.version:
        raise StorageError(f"{source.address}: was changed while it was read; start again")
    return remote


def _read(remote: Any, start: int, source: S3Object) -> bytes:
    with named_errors(source.address):
        remote.seek(start)
        content = bytes(remote.read(READ_BYTES))
    if len(content) != min(READ_BYTES, source.size - start):
        raise StorageError(f"{source.address}: only {len(content)} bytes came from byte {start} on", passing=True)
    return content


def _version(etag: str, size: int, modified: Any) -> str:
    return f"{etag} {size} {int(modified.timestamp())}"


# ---------------------------------------------------------------- errors


@contextmanager
def named_errors(address: S3Address) -> Iterator[None]:
    """What the libraries raise, as a StorageError. Without its cause: those texts may hold what nobody should see."""
    from aiohttp import ClientError as HttpError
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (OSError, ValueError, BotoCoreError, ClientError, HttpError) as error:
        refusal: BaseException | None = error  # s3fs puts one or two of its own in front of it
        while refusal is not None and not isinstance(refusal, ClientError):
            refusal = refusal.__cause__
        if refusal is not None:
            raise refused(address, refusal.response) from None
        raise unreached(address, error) from None


def refused(address: S3Address, response: Answer) -> StorageError:
    """The error for an answer with an error status."""
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code, message = response["Error"].get("Code", ""), response["Error"].get("Message", "")
    told = " ".join(dict.fromkeys(part for part in (str(status), code, f"({message})" if message else "") if part))
    text = f"{address}: the server answers {hide_secrets(told)}{advice(status, code, address)}"
    passing = (status >= 500 and status != 501) or status in (408, 429) or code in PASSING_CODES
    return StorageError(text, status=status, passing=passing)


def advice(status: int, code: str, address: S3Address) -> str:
    if code == "NoSuchBucket":
        return f"; create the bucket {address.bucket}, or correct its name"
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"):
        return "; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed") or status == 301:
        return "; set AWS_REGION to the region of the bucket"
    if status == 412:
        return "; it was changed while it was read: start again"
    if status in (401, 403):
        return "; these keys may not do that there: check them, and the bucket's policy"
    return ""


def unreached(address: S3Address, error: Exception) -> StorageError:
    """The error where no answer came."""
    from botocore.exceptions import NoCredentialsError, PartialCredentialsError

    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return StorageError(f"{address}: no keys; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", status=401)
    text = hide_secrets((str(error).strip() or f"no answer ({type(error).__name__})").splitlines()[0])
    return StorageError(f"{address}: {text}", passing=not isinstance(error, ValueError))
