"""S3 through boto3, configured from the environment, with retries of transient errors and messages that name the address.

boto3 would retry silently, but not after damage that only an ETag shows; here it tries once, and `run_with_retries` decides.
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
from dsreason.files.deadline import run_with_limit
from dsreason.files.retries import run_with_retries
from dsreason.screen import to_one_line
from dsreason.secrets import hide_secrets, mask_credentials, quiet_libraries

Answer: TypeAlias = Mapping[str, Any]

CONNECT_LIMIT_S = 10
READ_LIMIT_S = 60
"""Time limit without a byte from the server."""
REQUEST_LIMIT_S = 120.0
"""Time limit of a whole request, however steadily its bytes arrive."""
COMPLETION_LIMIT_S = 600.0
"""Time limit of `complete_multipart_upload`, which joins the parts of a large file before it answers."""
SLOWEST = 10_000
"""Bytes per second: the time limit is extended by the time that the content takes at this speed."""
READ_BYTES = 32 * 1024**2
"""Bytes per read request, which is the most that a broken connection costs."""
MOST_PAGES = 10_000
"""Maximum number of pages of a list of objects, with a thousand objects per page."""
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
    """ETag, size and time, which change whenever the content does."""


COSMOS = "PROD_S3_CHECKPOINT_"
"""Prefix of cosmos-rl's variables ACCESS_KEY_ID, SECRET_ACCESS_KEY, ENDPOINT_URL and REGION_NAME."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", f"{COSMOS}ENDPOINT_URL")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION", f"{COSMOS}REGION_NAME")
"""Environment variables of the region; the first that is set counts. The same holds for `ENDPOINTS`."""


def connect() -> Any:
    """Return boto3's client of this process for the current environment.

    cosmos-rl's variables are read if AWS's set no keys; AWS_ENDPOINT_URL and AWS_REGION take precedence over them.
    """
    variables = {name: value for name, value in os.environ.items() if value}  # an empty variable counts as unset
    if variables.keys() & {"AWS_ACCESS_KEY_ID", "AWS_PROFILE"}:
        variables = {name: value for name, value in variables.items() if not name.startswith(COSMOS)}
    key, secret = variables.get(f"{COSMOS}ACCESS_KEY_ID"), variables.get(f"{COSMOS}SECRET_ACCESS_KEY")
    endpoints = [name for name in ENDPOINTS if name in variables]
    endpoint = variables[endpoints[0]] if endpoints else ""
    if mask_credentials(endpoint) != endpoint:
        keys = COSMOS if endpoints[0].startswith(COSMOS) else "AWS_"
        raise StorageError(
            f"{endpoints[0]} holds a user and a password; remove them, and set {keys}ACCESS_KEY_ID and {keys}SECRET_ACCESS_KEY"
        )
    if (key is None) != (secret is None):
        raise StorageError(f"{COSMOS}ACCESS_KEY_ID and {COSMOS}SECRET_ACCESS_KEY belong together; set both")
    # botocore reads only AWS_DEFAULT_REGION.
    region = next((variables[name] for name in REGIONS if name in variables), None)
    return _create_client(os.getpid(), endpoint, region, READ_LIMIT_S, key, secret)


@lru_cache(maxsize=1)
def _create_client(
    process: int, endpoint: str, region: str | None, read_limit: float, key: str | None, secret: str | None
) -> Any:
    """Create the client of a process: a fork must not write into its parent's connections.

    Without a key boto3 looks for one itself.
    """
    import boto3  # importing it takes a quarter of a second
    from botocore.config import Config

    quiet_libraries()
    settings: dict[str, Any] = {}
    if endpoint and "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ:
        # Many S3-compatible servers refuse the checksum headers that are AWS's default; uploads are compared by ETag.
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
    """Make an S3 API call (such as `head_object`) on the bucket of `address`, and return the response.

    Args:
        check: raises StorageError for a response that shows damage.
        parameters: the parameters of the call, except the bucket.

    Raises:
        StorageError: the call failed; the message names the address and the server's response.
    """

    limit = COMPLETION_LIMIT_S if method == "complete_multipart_upload" else REQUEST_LIMIT_S
    limit += len(parameters.get("Body", b"")) / SLOWEST

    def once() -> Answer:
        with convert_s3_errors(address):
            answer: Answer = run_with_limit(
                limit, lambda: getattr(connect(), method)(Bucket=address.bucket, **parameters)
            )
        check(answer)
        return answer

    return run_with_retries(once, attempts)


def find_object(address: S3Address) -> S3Object:
    head = request("head_object", address, Key=address.key)
    return _parse_object(address, head.get("ContentLength"), head)


def list_objects(address: S3Address) -> dict[str, S3Object]:
    """Return all objects below the address by relative path, without folder marks (keys that end with a slash)."""
    prefix = f"{address.key}/".lstrip("/")
    objects: dict[str, S3Object] = {}
    following: dict[str, Any] = {}
    for _ in range(MOST_PAGES):  # boto3's paginator would restart at the first page after an error
        page = request("list_objects_v2", address, Prefix=prefix, **following)
        for entry in page.get("Contents", []):
            key, size = entry.get("Key", ""), entry.get("Size")
            if not key.endswith("/"):
                objects[key.removeprefix(prefix)] = _parse_object(S3Address(address.bucket, key), size, entry)
        if not page.get("IsTruncated"):
            return objects
        following = {"ContinuationToken": page.get("NextContinuationToken", "")}
    raise StorageError(f"{address}: the list of objects below it does not end; name a folder with fewer files")


def read_into(source: S3Object, file: Path) -> None:
    """Append the missing part of the object to `file`; a broken connection costs at most READ_BYTES.

    Raises:
        StorageError: the object cannot be read, or was changed since `source` was created.
    """
    with file.open("ab") as target:
        while target.tell() < source.size:
            target.write(run_with_retries(lambda: _read(source, target.tell())))


def _read(source: S3Object, start: int) -> bytes:
    last = min(start + READ_BYTES, source.size) - 1
    location = {"Bucket": source.address.bucket, "Key": source.address.key}

    def part() -> bytes:
        answer = connect().get_object(**location, Range=f"bytes={start}-{last}", IfMatch=source.etag)
        return bytes(answer["Body"].read(last - start + 2))  # one byte more detects a server that ignores the range

    with convert_s3_errors(source.address):
        content = run_with_limit(REQUEST_LIMIT_S + READ_BYTES / SLOWEST, part)
    if len(content) > last - start + 1:
        raise StorageError(
            f"{source.address}: the server sent more than the {last - start + 1} bytes that were requested"
        )
    if len(content) != last - start + 1:
        raise StorageError(
            f"{source.address}: the server sent only {len(content)} bytes from byte {start} on", transient=True
        )
    return content


def _parse_object(address: S3Address, size: int | None, facts: Answer) -> S3Object:
    etag, time = facts.get("ETag"), facts.get("LastModified")
    if size is None or size < 0 or etag is None or time is None:
        raise StorageError(
            f"{address}: the response has no size, ETag or time; check that AWS_ENDPOINT_URL is an S3 server"
        )
    return S3Object(address, size, etag, f"{etag} {size} {int(time.timestamp())}")


# ---------------------------------------------------------------- errors


@contextmanager
def convert_s3_errors(address: S3Address) -> Iterator[None]:
    """Raise boto3's errors as a StorageError, without their cause: their messages may hold secrets."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except TimeoutError as error:
        raise StorageError(f"{address}: {error}: the server sends too slowly, or without end") from None
    except RecursionError:  # boto3 calls itself for each redirect
        raise StorageError(f"{address}: the server redirects without end; check AWS_ENDPOINT_URL") from None
    except ClientError as error:
        raise build_refusal(address, error.response) from None
    except (OSError, ValueError, BotoCoreError, ResponseParserError) as error:
        raise build_unreached(address, error) from None


def build_refusal(address: S3Address, response: Answer) -> StorageError:
    """Build the error for a response with an error status."""
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code, message = response["Error"].get("Code", ""), response["Error"].get("Message", "")
    answer = " ".join(dict.fromkeys(part for part in (str(status), code, f"({message})" if message else "") if part))
    text = f"{address}: the server answers {to_one_line(hide_secrets(answer))}{get_advice(status, code, address)}"
    transient = (status >= 500 and status != 501) or status in (408, 429) or code in TRANSIENT_CODES
    return StorageError(text, status=status, transient=transient)


def get_advice(status: int, code: str, address: S3Address) -> str:
    if code == "NoSuchBucket":
        return f"; create the bucket {address.bucket}, or correct its name"
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"):
        return "; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed") or status == 301:
        return "; set AWS_REGION to the region of the bucket"
    if status == 412:
        return "; it was changed while it was being read: start again"
    if status in (401, 403):
        return "; these keys lack permission for that: check them and the bucket's policy"
    return ""


def build_unreached(address: S3Address, error: Exception) -> StorageError:
    """Build the error for a request without a response."""
    from botocore.exceptions import NoCredentialsError, PartialCredentialsError

    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return StorageError(f"{address}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", status=401)
    text = hide_secrets((str(error).strip() or f"no answer ({type(error).__name__})").splitlines()[0])
    return StorageError(f"{address}: {text}", transient=not isinstance(error, ValueError))
