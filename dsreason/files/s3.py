"""Access to S3 through boto3, configured from the environment, with retries after transient errors and clear error messages.

`run_with_retries` replaces boto3's own retries, which are silent and do not cover damage that only an ETag reveals.
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
"""Seconds to wait for the next byte from the server."""
REQUEST_LIMIT_S = 120.0
"""Time limit for an entire request in seconds, even if bytes keep arriving."""
COMPLETION_LIMIT_S = 600.0
"""Time limit for `complete_multipart_upload` in seconds. The server joins the parts of a large file before it responds."""
SLOWEST = 10_000
"""Minimum speed in bytes per second. Time limits are extended by the time that the content takes at this speed."""
READ_BYTES = 32 * 1024**2
"""Number of bytes per read request, and thus the most that is fetched again if a connection breaks."""
MOST_PAGES = 10_000
"""Maximum number of pages in a listing of objects; each page has up to a thousand objects."""
TRANSIENT_CODES = (
    "RequestTimeout",
    "SlowDown",
    "BadDigest",
    "IncompleteBody",
    "XAmzContentSHA256Mismatch",
    "OperationAborted",
)
"""Error codes with a status below 500 for which a retry may succeed."""


@dataclass(frozen=True)
class S3Object:
    address: S3Address
    size: int
    etag: str
    version: str
    """ETag, size and modification time; at least one of them changes whenever the content does."""


COSMOS = "PROD_S3_CHECKPOINT_"
"""Prefix of cosmos-rl's environment variables ACCESS_KEY_ID, SECRET_ACCESS_KEY, ENDPOINT_URL and REGION_NAME."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", f"{COSMOS}ENDPOINT_URL")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION", f"{COSMOS}REGION_NAME")
"""Environment variables for the region; the first that is set is used. `ENDPOINTS` works in the same way."""


def connect() -> Any:
    """Return this process's boto3 client for the current environment.

    cosmos-rl's variables are used if AWS's variables provide no keys; AWS_ENDPOINT_URL and AWS_REGION still take precedence.
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
            f"{endpoints[0]} contains a user name and a password; remove them, and set {keys}ACCESS_KEY_ID and "
            f"{keys}SECRET_ACCESS_KEY"
        )
    if (key is None) != (secret is None):
        raise StorageError(f"only one of {COSMOS}ACCESS_KEY_ID and {COSMOS}SECRET_ACCESS_KEY is set; set both")
    # botocore itself reads only AWS_DEFAULT_REGION.
    region = next((variables[name] for name in REGIONS if name in variables), None)
    return _create_client(os.getpid(), endpoint, region, READ_LIMIT_S, key, secret)


@lru_cache(maxsize=1)
def _create_client(
    process: int, endpoint: str, region: str | None, read_limit: float, key: str | None, secret: str | None
) -> Any:
    """Create a client for one process, because a forked process must not use its parent's connections.

    If `key` is None, boto3 searches its default sources for credentials.
    """
    import boto3  # slow import: 0.25 s
    from botocore.config import Config

    quiet_libraries()
    settings: dict[str, Any] = {}
    if endpoint and "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ:
        # Many S3-compatible servers reject AWS's default checksum headers, so uploads are verified by ETag instead.
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
        check: function that raises StorageError if the response shows that the content was damaged.
        attempts: maximum number of calls; see `run_with_retries`.
        parameters: the call's parameters, except the bucket.

    Raises:
        StorageError: the call failed; the message contains the URL and the server's response.
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
    """Return all objects below the URL by relative path, except folder markers (keys that end with a slash)."""
    prefix = f"{address.key}/".lstrip("/")
    objects: dict[str, S3Object] = {}
    following: dict[str, Any] = {}
    for _ in range(MOST_PAGES):  # not boto3's paginator, which would restart at the first page after an error
        page = request("list_objects_v2", address, Prefix=prefix, **following)
        for entry in page.get("Contents", []):
            key, size = entry.get("Key", ""), entry.get("Size")
            if not key.endswith("/"):
                objects[key.removeprefix(prefix)] = _parse_object(S3Address(address.bucket, key), size, entry)
        if not page.get("IsTruncated"):
            return objects
        following = {"ContinuationToken": page.get("NextContinuationToken", "")}
    raise StorageError(
        f"{address}: the list of objects exceeds the maximum of {MOST_PAGES} pages; choose a folder with fewer files"
    )


def read_into(source: S3Object, file: Path) -> None:
    """Append the missing part of the object to `file`. If a connection breaks, at most READ_BYTES are fetched again.

    Raises:
        StorageError: the object cannot be read, or has changed since it was listed as `source`.
    """
    with file.open("ab") as target:
        while target.tell() < source.size:
            target.write(run_with_retries(lambda: _read(source, target.tell())))


def _read(source: S3Object, start: int) -> bytes:
    last = min(start + READ_BYTES, source.size) - 1
    location = {"Bucket": source.address.bucket, "Key": source.address.key}

    def part() -> bytes:
        answer = connect().get_object(**location, Range=f"bytes={start}-{last}", IfMatch=source.etag)
        return bytes(answer["Body"].read(last - start + 2))  # one extra byte reveals a server that ignores the range

    with convert_s3_errors(source.address):
        content = run_with_limit(REQUEST_LIMIT_S + READ_BYTES / SLOWEST, part)
    if len(content) > last - start + 1:
        raise StorageError(
            f"{source.address}: the server sent more than the {last - start + 1} bytes that were requested"
        )
    if len(content) != last - start + 1:
        raise StorageError(
            f"{source.address}: the server sent only {len(content)} of {last - start + 1} bytes, starting at byte {start}",
            transient=True,
        )
    return content


def _parse_object(address: S3Address, size: int | None, facts: Answer) -> S3Object:
    etag, time = facts.get("ETag"), facts.get("LastModified")
    if size is None or size < 0 or etag is None or time is None:
        raise StorageError(
            f"{address}: the response has no size, ETag or time; check that AWS_ENDPOINT_URL points to an S3 server"
        )
    return S3Object(address, size, etag, f"{etag} {size} {int(time.timestamp())}")


# ---------------------------------------------------------------- errors


@contextmanager
def convert_s3_errors(address: S3Address) -> Iterator[None]:
    """Convert boto3's errors to a StorageError. The original is not chained, because its message may contain secrets."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except TimeoutError as error:
        raise StorageError(f"{address}: {error} (the server is too slow, or its response does not end)") from None
    except RecursionError:  # boto3 calls itself for each redirect
        raise StorageError(f"{address}: the server redirects endlessly; check AWS_ENDPOINT_URL") from None
    except ClientError as error:
        raise build_refusal(address, error.response) from None
    except (OSError, ValueError, BotoCoreError, ResponseParserError) as error:
        raise build_unreachable_error(address, error) from None


def build_refusal(address: S3Address, response: Answer) -> StorageError:
    """Build a StorageError for a response with an error status."""
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code, message = response["Error"].get("Code", ""), response["Error"].get("Message", "")
    answer = " ".join(dict.fromkeys(part for part in (str(status), code, f"({message})" if message else "") if part))
    text = f"{address}: the server responds with {to_one_line(hide_secrets(answer))}{get_advice(status, code, address)}"
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
        return "; the object changed while it was being read: start again"
    if status in (401, 403):
        return "; these keys do not permit the request: check them and the bucket's policy"
    return ""


def build_unreachable_error(address: S3Address, error: Exception) -> StorageError:
    """Build a StorageError for a request that got no response."""
    from botocore.exceptions import NoCredentialsError, PartialCredentialsError

    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return StorageError(
            f"{address}: no credentials are set; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", status=401
        )
    text = hide_secrets((str(error).strip() or f"no response ({type(error).__name__})").splitlines()[0])
    return StorageError(f"{address}: {text}", transient=not isinstance(error, ValueError))
