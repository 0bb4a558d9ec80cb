"""Files on servers that support HTTP range requests: resumable downloads, and random access to large files."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import build_hf_headers

from dsreason.errors import DataError
from dsreason.files.hub import get_first_line
from dsreason.monitor.progress import Advance
from dsreason.tools.datasets.hub import ATTEMPTS, get_size, iter_pieces, open_response

SMALL = 64 * 2**20
"""Maximum size in bytes of a file that is read into memory."""
SKIPPED = 4 * 1024**2
"""Largest gap in bytes that is read and discarded; a new request skips larger gaps."""
PAUSE_S = 1.0
"""Seconds between two attempts at a request."""


class Version(NamedTuple):
    """Version of a file on a server. A download is resumed only if the version has not changed."""

    size: int
    tag: str
    """The server's `ETag`, or else its `Last-Modified`; "" if the server sends neither."""


@dataclass(frozen=True)
class ServedFile:
    """A file on a server; the token in HF_TOKEN is sent only to the Hub."""

    url: str
    on_hub: bool = False

    @contextmanager
    def open(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Open a response that contains the bytes from `start` to `stop` (exclusive; None: the end of the file).

        Raises:
            HTTPError: the server returned an error, or the connection failed.
            TimeoutError: the server did not begin to respond in time.
            DataError: the server ignores range requests and sends the whole file.
        """
        headers = {**(build_hf_headers() if self.on_hub else {}), "Accept-Encoding": "identity"}
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        with open_response(self.url, headers) as response:
            if response.status_code != 206 and (start or stop is not None):
                raise DataError(f"{self.url}: the server does not support HTTP range requests")
            yield response

    def read(self) -> bytes:
        """Read the complete content of a small file."""
        with self.open() as response:
            return b"".join(iter_pieces(response, SMALL))

    @cached_property
    def version(self) -> Version:
        """Version of the file; the server is asked for it only once."""
        with self.open(0, 1) as response:
            headers = response.headers
            size = headers.get("Content-Range", "").rpartition("/")[2]
            if not size.isdecimal():
                raise DataError(
                    f"{self.url}: the server does not report the size of the file ({size or 'no Content-Range'})"
                )
            return Version(int(size), headers.get("ETag", headers.get("Last-Modified", "")))


def is_transient(error: HTTPError) -> bool:
    """Return whether a retry may succeed: the connection failed, or the server is overloaded or has an internal error."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 503
    return status == 429 or status >= 500


class Patience:
    """Counter of consecutive failed attempts; any received data resets the count."""

    def __init__(self) -> None:
        self.failures = 0

    def note_progress(self) -> None:
        self.failures = 0

    def wait(self, error: HTTPError) -> None:
        """Wait before the next attempt; raise the error if it is permanent or no attempts remain."""
        self.failures += 1
        if self.failures == ATTEMPTS or not is_transient(error):
            raise error
        time.sleep(PAUSE_S)


def fetch_part(source: ServedFile, start: int, size: int, partial: Path, advance: Advance) -> None:
    """Download `size` bytes from `start` on to the file `partial`; if the file exists, resume its download.

    Raises:
        HTTPError: several attempts in a row received nothing new; the received part is kept, so the download can be resumed.
        DataError: the file on the server ends too early; see also `ServedFile.open`.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    patience = Patience()
    while (done := get_size(partial)) < size:
        try:
            with source.open(start + done, start + size) as response, partial.open("ab") as file:
                for piece in iter_pieces(response, size - done):
                    advance(len(piece))
                    file.write(piece)
                    patience.note_progress()
        except HTTPError as error:
            patience.wait(error)
        else:
            if get_size(partial) < size:
                raise DataError(
                    f"{source.url}: ends after {start + get_size(partial)} bytes, but {start + size} were expected"
                )


class RangedFile(io.RawIOBase):
    """A seekable file on a server. Reading forward uses a single stream as long as the gaps are small.

    A tar of small files therefore takes few requests, whereas the file objects of fsspec and `HfFileSystem` make one request
    per block. For plain servers, fsspec's file objects also raise different errors, do not retry, and silently continue if
    the content ends too early.
    """

    def __init__(self, source: ServedFile) -> None:
        self.source = source
        self.length = source.version.size
        self.position = 0
        self.arrived = 0
        """Position in the file of the first byte in `left`, or of the next byte of the stream if `left` is empty."""
        self.left = b""
        self.pieces: Iterator[bytes] | None = None
        self.stack = ExitStack()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        return self.position

    def close(self) -> None:
        self.stack.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        if self.position >= self.length:
            return 0
        patience = Patience()
        while True:
            try:
                piece = self._read_next(len(buffer))
                break
            except HTTPError as error:
                self._drop()
                patience.wait(error)
        buffer[: len(piece)] = piece
        self.position += len(piece)
        return len(piece)

    def _read_next(self, most: int) -> bytes:
        """Return at most `most` bytes from the current position."""
        gap = self.position - self.arrived
        if self.pieces is None or not 0 <= gap <= SKIPPED:
            self._drop()
            response = self.stack.enter_context(self.source.open(self.position, self.length))
            self.pieces, self.arrived, self.left, gap = (
                iter_pieces(response, self.length - self.position),
                self.position,
                b"",
                0,
            )
        while len(self.left) <= gap:
            gap -= len(self.left)
            self.arrived += len(self.left)
            self.left = next(self.pieces, b"")
            if not self.left:
                raise DataError(f"{self.source.url}: ends after {self.arrived} bytes, but {self.length} were expected")
        piece = self.left[gap : gap + most]
        self.arrived, self.left = self.arrived + gap + len(piece), self.left[gap + len(piece) :]
        return piece

    def _drop(self) -> None:
        self.stack.close()
        self.pieces = None


def describe_failure(source: ServedFile, error: HTTPError) -> str:
    """Describe the failure, but leave out any URL that the server redirected to."""
    if isinstance(error, HfHubHTTPError):
        return f"{source.url}: the server responds with status {error.response.status_code}"
    return f"{source.url}: {get_first_line(str(error)) or type(error).__name__}"
