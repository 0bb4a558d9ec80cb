"""S3 through boto3: keys, region and AWS_ENDPOINT_URL from the environment, refusals that may pass waited out, errors named.

boto3 would try again in silence, and not after damage that only an ETag shows; here it tries once, and `with_retries` decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from dsreason.errors import StorageError
from dsreason.files.address import S3Address
from dsreason.files.deadline import within
from dsreason.files.retries import with_retries
from dsreason.screen import in_one_line
from dsreason.secrets import hide_secrets, quiet_libraries, without_credentials

Answer: TypeAlias = Mapping[str, Any]

CONNECT_LIMIT_S = 10
READ_LIMIT_S = 60
"""Without a byte from the server."""
REQUEST_LIMIT_S = 120.0
"""For all of one request, however steadily its bytes drip."""
COMPLETION_LIMIT_S = 600.0
"""For `complete_multipart_upload`, which joins the parts of a large file before it answers."""
SLOWEST = 10_000
"""Bytes a second: the limit is longer by what the content takes at this speed."""
READ_BYTES = 32 * 1024**2
"""Asked for at once: what a cut connection costs."""
MOST_PAGES = 10_000
"""Of a list of objects; a page has a thousand of them."""
TRANSIENT_CODES = (
    "RequestTimeout",
    "SlowDown",
    "BadDigest",
    "IncompleteBody",
    "XAmzContentSHA256Mismatch",
    "OperationAborted",
)
"""Refusals below status 500 that may pass on another try."""


@dataclass(frozen=True)
class S3Object:
    address: S3Address
    size: int
    etag: str
    version: str
    """Changes whenever the content does: ETag, size and time."""


COSMOS = "PROD_S3_CHECKPOINT_"
"""cosmos-rl's names of ACCESS_KEY_ID, SECRET_ACCESS_KEY, ENDPOINT_URL and REGION_NAME."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", f"{COSMOS}ENDPOINT_URL")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION", f"{COSMOS}REGION_NAME")
"""The first that is set counts."""


def connect() -> Any:
    """boto3's client in this process, of the environment as it is now.

    cosmos-rl's variables are read where AWS's name no keys; an AWS_ENDPOINT_URL or AWS_REGION wins over theirs.
    """
    variables = {name: value for name, value in os.environ.items() if value}  # an empty variable counts as unset
    if variables.keys() & {"AWS_ACCESS_KEY_ID", "AWS_PROFILE"}:
        variables = {name: value for name, value in variables.items() if not name.startswith(COSMOS)}
    key, secret = variables.get(f"{COSMOS}ACCESS_KEY_ID"), variables.get(f"{COSMOS}SECRET_ACCESS_KEY")
    endpoints = [name for name in ENDPOINTS if name in variables]
    endpoint = variables[endpoints[0]] if endpoints else ""
    if without_credentials(endpoint) != endpoint:
        keys = COSMOS if endpoints[0].startswith(COSMOS) else "AWS_"
        raise StorageError(
            f"{endpoints[0]} holds a user and a password; remove them, and set {keys}ACCESS_KEY_ID and {keys}SECRET_ACCESS_KEY"
        )
    if (key is None) != (secret is None):
        raise StorageError(f"{COSMOS}ACCESS_KEY_ID and {COSMOS}SECRET_ACCESS_KEY belong together; set both")
    # botocore knows only AWS_DEFAULT_REGION
    region = next((variables[name] for name in REGIONS if name in variables), None)
    return _client(os.getpid(), endpoint, region, READ_LIMIT_S, key, secret)


@lru_cache(maxsize=1)
def _client(
    process: int, endpoint: str, region: str | None, read_limit: float, key: str | None, secret: str | None
) -> Any:
    """Of one process: a fork must not write into its parent's connections. Without a key boto3 looks for one itself."""
    import boto3  # a quarter of a second, for those who need it
    from botocore.config import Config

    quiet_libraries()
    settings: dict[str, Any] = {}
    if endpoint and "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ:
        # Many servers that speak S3 refuse the checksum headers that are AWS's default; uploads are compared by ETag.
        settings["request_checksum_calculation"] = "when_required"
    one_attempt = {"total_max_attempts": 1, "mode": "standard"}
    config = Config(retries=one_attempt, connect_timeout=CONNECT_LIMIT_S, read_timeout=read_limit, **settings)
    session = boto3.session.Session(aws_access_key_id=key, aws_secret_access_key=secret)
    return session.client("s3", region, endpoint_url=endpoint or None, config=config)


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

    limit = COMPLETION_LIMIT_S if method == "complete_multipart_upload" else REQUEST_LIMIT_S
    limit += len(parameters.get("Body", b"")) / SLOWEST

    def once() -> Answer:
        with named_errors(address):
            answer: Answer = within(limit, lambda: getattr(connect(), method)(Bucket=address.bucket, **parameters))
        check(answer)
        return answer

    return with_retries(once, attempts)


def find_object(address: S3Address) -> S3Object:
    head = request("head_object", address, Key=address.key)
    return _object(address, head.get("ContentLength"), head)


def list_objects(address: S3Address) -> dict[str, S3Object]:
    """Everything below the address, by its path from there; folder marks (keys that end with a slash) left out."""
    prefix = f"{address.key}/".lstrip("/")
    objects: dict[str, S3Object] = {}
    following: dict[str, Any] = {}
    for _ in range(MOST_PAGES):  # boto3's paginator would start at the first page again after a refusal
        page = request("list_objects_v2", address, Prefix=prefix, **following)
        for entry in page.get("Contents", []):
            key, size = entry.get("Key", ""), entry.get("Size")
            if not key.endswith("/"):
                objects[key.removeprefix(prefix)] = _object(S3Address(address.bucket, key), size, entry)
        if not page.get("IsTruncated"):
            return objects
        following = {"ContinuationToken": page.get("NextContinuationToken", "")}
    raise StorageError(f"{address}: the list of what is below it has no end; name a folder with fewer files")


def read_into(source: S3Object, file: Path) -> None:
    """Append to `file` what it lacks of the object; a cut connection costs at most READ_BYTES.

    Raises:
        StorageError: cannot be read, or was changed since `source` was made.
    """
    with file.open("ab") as target:
        while target.tell() < source.size:
            target.write(with_retries(lambda: _read(source, target.tell())))


def _read(source: S3Object, start: int) -> bytes:
    last = min(start + READ_BYTES, source.size) - 1
    place = {"Bucket": source.address.bucket, "Key": source.address.key}

    def part() -> bytes:
        answer = connect().get_object(**place, Range=f"bytes={start}-{last}", IfMatch=source.etag)
        return bytes(answer["Body"].read(last - start + 2))  # one more, to see a server that sends all or without end

    with named_errors(source.address):
        content = within(REQUEST_LIMIT_S + READ_BYTES / SLOWEST, part)
    if len(content) > last - start + 1:
        raise StorageError(f"{source.address}: more than the {last - start + 1} bytes came that were asked for")
    if len(content) != last - start + 1:
        raise StorageError(f"{source.address}: only {len(content)} bytes came from byte {start} on", transient=True)
    return content


def _object(address: S3Address, size: int | None, facts: Answer) -> S3Object:
    etag, time = facts.get("ETag"), facts.get("LastModified")
    if size is None or size < 0 or etag is None or time is None:
        raise StorageError(
            f"{address}: the answer has no size, ETag or time; is AWS_ENDPOINT_URL that of a server of S3?"
        )
    return S3Object(address, size, etag, f"{etag} {size} {int(time.timestamp())}")


# ---------------------------------------------------------------- errors


@contextmanager
def named_errors(address: S3Address) -> Iterator[None]:
    """What boto3 raises, as a StorageError. Without its cause: those texts may hold what nobody should see."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except TimeoutError as error:
        raise StorageError(f"{address}: {error}: the server sends too slowly, or without end") from None
    except RecursionError:  # boto3 asks again for each of them
        raise StorageError(f"{address}: the server redirects without end; is AWS_ENDPOINT_URL right?") from None
    except ClientError as error:
        raise refused(address, error.response) from None
    except (OSError, ValueError, BotoCoreError, ResponseParserError) as error:
        raise unreached(address, error) from None


def refused(address: S3Address, response: Answer) -> StorageError:
    """The error for an answer with an error status."""
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code, message = response["Error"].get("Code", ""), response["Error"].get("Message", "")
    answer = " ".join(dict.fromkeys(part for part in (str(status), code, f"({message})" if message else "") if part))
    text = f"{address}: the server answers {in_one_line(hide_secrets(answer))}{advice(status, code, address)}"
    transient = (status >= 500 and status != 501) or status in (408, 429) or code in TRANSIENT_CODES
    return StorageError(text, status=status, transient=transient)


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
        return "; these keys have no permission for that: check them and the bucket's policy"
    return ""


def unreached(address: S3Address, error: Exception) -> StorageError:
    """The error where no answer came."""
    from botocore.exceptions import NoCredentialsError, PartialCredentialsError

    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return StorageError(f"{address}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", status=401)
    text = hide_secrets((str(error).strip() or f"no answer ({type(error).__name__})").splitlines()[0])
    return StorageError(f"{address}: {text}", transient=not isinstance(error, ValueError))
