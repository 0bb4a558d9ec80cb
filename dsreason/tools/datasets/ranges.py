"""Files on servers that answer ranges: downloads that continue where they were cut, and reading inside a large file."""

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
"""Bytes of a file that is read as a whole."""
SKIPPED = 4 * 1024**2
"""Bytes that are rather read and thrown away than left out by a new request."""
PAUSE_S = 1.0
"""Before a request is made again."""


class Version(NamedTuple):
    """The identity of a file on a server; a download of another version is not continued."""

    size: int
    tag: str
    """The server's `ETag`, else when the file was last modified; "" if it says neither."""


@dataclass(frozen=True)
class ServedFile:
    """A file on a server; the token in HF_TOKEN goes to the Hub only."""

    url: str
    on_hub: bool = False

    @contextmanager
    def open(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """The response with the bytes from `start` on, up to `stop`.

        Raises:
            HTTPError: of the server or the connection.
            TimeoutError: the server did not begin to answer in time.
            DataError: the server sends the whole file whatever is asked for.
        """
        headers = {**(build_hf_headers() if self.on_hub else {}), "Accept-Encoding": "identity"}
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        with open_response(self.url, headers) as response:
            if response.status_code != 206 and (start or stop is not None):
                raise DataError(f"{self.url}: the server does not support HTTP range requests")
            yield response

    def read(self) -> bytes:
        """The whole content, of a small file."""
        with self.open() as response:
            return b"".join(iter_pieces(response, SMALL))

    @cached_property
    def version(self) -> Version:
        """Asked for once."""
        with self.open(0, 1) as response:
            headers = response.headers
            size = headers.get("Content-Range", "").rpartition("/")[2]
            if not size.isdecimal():
                raise DataError(
                    f"{self.url}: the server does not report the size of the file ({size or 'no Content-Range'})"
                )
            return Version(int(size), headers.get("ETag", headers.get("Last-Modified", "")))


def is_transient(error: HTTPError) -> bool:
    """Return whether the same request may succeed later: the connection broke, or the server is busy or has a fault."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 503
    return status == 429 or status >= 500


class Patience:
    """Counts failed attempts in a row; anything that was received in between makes them start anew."""

    def __init__(self) -> None:
        self.failures = 0

    def note_progress(self) -> None:
        self.failures = 0

    def wait(self, error: HTTPError) -> None:
        """Before the next attempt; raises the error where there should be none."""
        self.failures += 1
        if self.failures == ATTEMPTS or not is_transient(error):
            raise error
        time.sleep(PAUSE_S)


def fetch_part(source: ServedFile, start: int, size: int, partial: Path, advance: Advance) -> None:
    """`size` bytes from `start` on into the file `partial`; what an earlier call left there is not fetched again.

    Raises:
        HTTPError: after several attempts without a new byte; what was received stays, to be continued.
        DataError: see `Source.open`.
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
                    f"{source.url}: ends after {start + get_size(partial)} bytes, {start + size} are expected"
                )


class RangedFile(io.RawIOBase):
    """A file on a server, to be read at any place. Forward it is read in one stream as long as the gaps are small.

    A tar of small files so takes few requests. The files of fsspec and `HfFileSystem` make one a block, and those of plain
    servers have other errors, no second attempts, and read on in silence behind an end that came too early.
    """

    def __init__(self, source: ServedFile) -> None:
        self.source = source
        self.length = source.version.size
        self.position = 0
        self.arrived = 0
        """Position of the open stream, with what is in `left`."""
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
        """Read at most `most` bytes at the position."""
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
                raise DataError(f"{self.source.url}: ends after {self.arrived} bytes, {self.length} are expected")
        piece = self.left[gap : gap + most]
        self.arrived, self.left = self.arrived + gap + len(piece), self.left[gap + len(piece) :]
        return piece

    def _drop(self) -> None:
        self.stack.close()
        self.pieces = None


def describe_failure(source: ServedFile, error: HTTPError) -> str:
    """Describe the failure, without the URL that a server may have redirected to."""
    if isinstance(error, HfHubHTTPError):
        return f"{source.url}: the server answers {error.response.status_code}"
    return f"{source.url}: {get_first_line(str(error)) or type(error).__name__}"
