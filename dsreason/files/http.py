"""HTTP requests with a total time limit and a bounded response size, without redirects.

httpx2 limits only the time between two bytes, so a server that sends one byte per second never times out. It also decompresses
responses of any size. In this module, a single time limit covers everything from the name lookup to the last byte of the body,
and compressed responses are decompressed piece by piece, up to a maximum size. Redirects are not followed, because they would
send the request and its token to a URL that nobody has configured.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import zlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from dsreason.errors import ConfigError
from dsreason.secrets import quiet_libraries
from dsreason.stopping import wait_for_result

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

PACKED = ("gzip", "x-gzip", "deflate")
"""Compressed encodings that are accepted in responses, even though requests do not ask for compression."""
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
REDIRECTED = "redirects are not followed, because they would forward the request; set the final URL"


@dataclass(frozen=True)
class HttpResponse:
    status: int
    reason: str
    """Reason phrase that follows the status code."""
    headers: Mapping[str, str]
    """Response headers, with case-insensitive names."""
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace").strip()

    @property
    def retry_after(self) -> float:
        """Number of seconds that the server asks the client to wait; 0 if it does not."""
        retry_after = self.headers.get("Retry-After", "")
        try:
            seconds = float(retry_after) if retry_after.isascii() else 0.0
        except ValueError:  # the header contains a date instead
            return 0.0
        return seconds if 0 < seconds < float("inf") else 0.0


class NoAnswer(Exception):
    """Error for a missing, broken or late response; the same request may succeed later."""

    def __init__(self, text: str, *, late: bool = False) -> None:
        super().__init__(text)
        self.late = late
        """Whether the time limit was exceeded."""


class BadAnswer(Exception):
    """Error for a response that is too long, is damaged, or has an unknown encoding."""


async def send_request(
    method: str,
    url: str,
    *,
    limit: float,
    max_bytes: int,
    content: bytes = b"",
    headers: Mapping[str, str] = {},
    connect_to: str | None = None,
) -> HttpResponse:
    """Send a request and return the response, regardless of its status.

    Args:
        limit: seconds within which the entire response must arrive.
        max_bytes: maximum size of the decompressed content, in bytes.
        connect_to: IP address to use for the URL's host; if None, the host is looked up.

    Raises:
        NoAnswer: no complete response arrived in time.
        BadAnswer: the response is too long, is damaged, or has an unknown encoding.
        ConfigError: the proxies or certificates set in the environment cannot be used.
    """
    import httpx2  # slow import: 0.2 s

    quiet_libraries()  # httpx2 logs full URLs, which may contain secrets
    sent, extensions = {"Accept-Encoding": "identity", **headers}, {}
    try:
        target = httpx2.URL(url)
        if connect_to is not None:
            sent["Host"] = target.netloc.decode("ascii")
            extensions["sni_hostname"] = target.raw_host.decode("ascii")  # the certificate must match the URL's host
            target = target.copy_with(host=connect_to)
        async with (
            asyncio.timeout(limit),
            open_client() as client,
            client.stream(method, target, content=content, headers=sent, extensions=extensions) as response,
        ):
            body = await read(response, max_bytes)
    except TimeoutError:
        raise NoAnswer(f"no response within {limit:g} s", late=True) from None
    except zlib.error as error:
        raise BadAnswer(f"the response cannot be decompressed ({error})") from None
    except (httpx2.RequestError, httpx2.InvalidURL, OSError, ValueError) as error:
        raise NoAnswer(f"{type(error).__name__}: {find_cause(error)}") from None
    return HttpResponse(response.status_code, response.reason_phrase, response.headers, body)


def ask(
    method: str, url: str, *, limit: float, max_bytes: int, content: bytes = b"", headers: Mapping[str, str] = {}
) -> HttpResponse:
    """Send a request and wait for the response; arguments and errors are those of `send_request`."""
    return wait_for(send_request(method, url, limit=limit, max_bytes=max_bytes, content=content, headers=headers))


def wait_for(request: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the shared event loop, from any thread, and return its result.

    Raises:
        Stopped: this process was asked to stop; the request is cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(request, get_loop(os.getpid()))
    try:
        return wait_for_result(future)
    except BaseException:  # a stop request and KeyboardInterrupt must cancel the request, too
        future.cancel()
        raise


@lru_cache(maxsize=1)
def get_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return a process's event loop, starting it if needed.

    A forked process needs its own loop, because the thread that runs its parent's loop does not survive the fork. The loop is
    never closed, because closing it would wait for name lookups, which cannot be interrupted.
    """
    new_loop = asyncio.new_event_loop()
    threading.Thread(target=new_loop.run_forever, name="requests", daemon=True).start()
    return new_loop


def find_cause(error: BaseException) -> str:
    """Find an error's root cause: `[Errno 111] Connection refused` instead of "All connection attempts failed"."""
    inner: BaseException | None = error
    while inner is not None:
        error = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner
        inner = error.__cause__ or error.__context__
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno and error.errno > 0:
        return f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return str(error)


def open_client() -> httpx2.AsyncClient:
    """Open a client that does not follow redirects and has no time limit of its own."""
    import httpx2

    try:
        return httpx2.AsyncClient(verify=get_tls_context(), timeout=None)
    except (OSError, ValueError, ImportError, httpx2.InvalidURL) as error:
        raise ConfigError(
            f"requests cannot be sent: {find_cause(error)}; correct the environment variables for proxies (HTTP_PROXY, "
            "HTTPS_PROXY, ALL_PROXY, NO_PROXY) or certificates (SSL_CERT_FILE, SSL_CERT_DIR)"
        ) from None


@lru_cache(maxsize=1)
def get_tls_context() -> ssl.SSLContext:
    """Return the TLS context, which is cached because creating it reads all certificates."""
    import httpx2

    return httpx2.create_ssl_context()


async def read(response: httpx2.Response, max_bytes: int) -> bytes:
    unpack = make_unpacker(response.headers.get("Content-Encoding", ""))
    content = bytearray()
    async for part in response.aiter_raw():
        content += unpack(part, max_bytes + 1 - len(content))
        if len(content) > max_bytes:
            raise BadAnswer(f"the response is longer than the maximum of {max_bytes} bytes")
    return bytes(content)


def make_unpacker(encoding: str) -> Callable[[bytes, int], bytes]:
    """Return a function that decompresses an encoding: (compressed bytes, maximum length of the result) → bytes."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return lambda part, max_bytes: part[:max_bytes]
    if name not in PACKED:
        raise BadAnswer(f"the response has the encoding {encoding[:80]!r}, which was not requested")
    return zlib.decompressobj(GZIP_OR_ZLIB).decompress
