"""One HTTP request: it ends by its deadline, its answer has a bound, and nothing of it goes to another place.

httpx2 limits the time between two bytes, of which a server may send one a second, and unpacks all that comes. Here one limit
holds for everything from the look-up of the name to the last byte of the body, packed answers are unpacked piece by piece up
to a size, and redirects are not followed: they would carry the request and its token to an address that nobody has named.
"""

from __future__ import annotations

import asyncio
import os
import threading
import zlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from dsreason.errors import ConfigError
from dsreason.secrets import quiet_libraries

if TYPE_CHECKING:
    import ssl

    import httpx2

T = TypeVar("T")

PACKED = ("gzip", "x-gzip", "deflate")
"""Encodings that are read, though none is asked for."""
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
REDIRECTED = "redirects are not followed, since they would carry the request along; set the final address"


@dataclass(frozen=True)
class Answer:
    status: int
    reason: str
    """The words after the status."""
    headers: Mapping[str, str]
    """Names in any case."""
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace").strip()

    @property
    def retry_after(self) -> float:
        """Seconds that the server asks to wait; 0 if it does not say."""
        retry_after = self.headers.get("Retry-After", "")
        try:
            seconds = float(retry_after) if retry_after.isascii() else 0.0
        except ValueError:  # a date
            return 0.0
        return seconds if 0 < seconds < float("inf") else 0.0


class NoAnswer(Exception):
    """No connection, one that broke, or none in time: the same request may succeed later."""

    def __init__(self, text: str, *, late: bool = False) -> None:
        super().__init__(text)
        self.late = late
        """The time limit was over."""


class BadAnswer(Exception):
    """An answer that is too long or packed in an unknown way."""


async def answer_to(
    method: str, url: str, *, limit: float, max_bytes: int, content: bytes = b"", headers: Mapping[str, str] = {}
) -> Answer:
    """Return what the server answers, whatever its status.

    Args:
        limit: seconds until the whole answer must be there.
        max_bytes: of the answer's unpacked content.

    Raises:
        NoAnswer, BadAnswer: there is none, or one that cannot be used.
        ConfigError: the environment's proxies or certificates cannot be used.
    """
    import httpx2  # a fifth of a second, for those who need it

    quiet_libraries()  # its log lines hold the whole address
    sent = {"Accept-Encoding": "identity", **headers}
    try:
        async with (
            asyncio.timeout(limit),
            open_client() as client,
            client.stream(method, url, content=content, headers=sent) as response,
        ):
            found = await read(response, max_bytes)
    except TimeoutError:
        raise NoAnswer(f"no answer within {limit:g} s", late=True) from None
    except zlib.error as error:
        raise BadAnswer(f"the response cannot be unpacked ({error})") from None
    except (httpx2.RequestError, httpx2.InvalidURL, OSError, ValueError) as error:
        raise NoAnswer(f"{type(error).__name__}: {cause(error)}") from None
    return Answer(response.status_code, response.reason_phrase, response.headers, found)


def ask(
    method: str, url: str, *, limit: float, max_bytes: int, content: bytes = b"", headers: Mapping[str, str] = {}
) -> Answer:
    """As `answer_to`, waited for."""
    return wait_for(answer_to(method, url, limit=limit, max_bytes=max_bytes, content=content, headers=headers))


def wait_for(request: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, from any thread."""
    future = asyncio.run_coroutine_threadsafe(request, loop(os.getpid()))
    try:
        return future.result()
    except BaseException:  # such as a KeyboardInterrupt
        future.cancel()
        raise


@lru_cache(maxsize=1)
def loop(process: int) -> asyncio.AbstractEventLoop:
    """Of one process: a fork has its parent's loop, and not the thread that runs it.

    It never ends, since the end of a loop waits for look-ups of names, which nothing can interrupt.
    """
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, name="requests", daemon=True).start()
    return made


def cause(error: BaseException) -> str:
    """Return what asyncio's "All connection attempts failed" is about: `[Errno 111] Connection refused`."""
    inner: BaseException | None = error
    while inner is not None:
        error = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner
        inner = error.__cause__ or error.__context__
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return str(error)


def open_client() -> httpx2.AsyncClient:
    """It follows no redirects, and has no limit of its own."""
    import httpx2

    try:
        return httpx2.AsyncClient(verify=tls(), timeout=None)
    except (OSError, ValueError, ImportError, httpx2.InvalidURL) as error:
        raise ConfigError(
            f"no request can be sent: {cause(error)}; correct the environment's proxies (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, "
            "NO_PROXY) or certificates (SSL_CERT_FILE, SSL_CERT_DIR)"
        ) from None


@lru_cache(maxsize=1)
def tls() -> ssl.SSLContext:
    """Made once: it reads all certificates."""
    import httpx2

    return httpx2.create_ssl_context()


async def read(response: httpx2.Response, most: int) -> bytes:
    unpack = unpacker(response.headers.get("Content-Encoding", ""))
    content = bytearray()
    async for part in response.aiter_raw():
        content += unpack(part, most + 1 - len(content))
        if len(content) > most:
            raise BadAnswer(f"the response is longer than {most} bytes")
    return bytes(content)


def unpacker(encoding: str) -> Callable[[bytes, int], bytes]:
    """(packed bytes, the most that may come of them) → bytes."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return lambda part, most: part[:most]
    if name not in PACKED:
        raise BadAnswer(f"the response has the encoding {encoding[:80]!r}, which was not asked for")
    return zlib.decompressobj(GZIP_OR_ZLIB).decompress
