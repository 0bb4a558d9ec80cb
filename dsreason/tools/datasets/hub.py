"""Access to the Hugging Face Hub: lists of a data set repository's files, and resumable downloads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import HTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from dsreason.errors import DataError
from dsreason.files.archives import SUFFIXES
from dsreason.files.deadline import Pace, run_with_limit
from dsreason.files.disk import compute_sha256
from dsreason.files.hub import convert_dataset_errors, convert_hub_error, get_hub_url
from dsreason.monitor.progress import Advance

ATTEMPTS = 5
"""Number of consecutive attempts without a new byte after which a download is abandoned."""
TIMEOUT = 60.0
"""Seconds without a byte after which a connection counts as broken."""
OPEN_LIMIT = 120.0
"""Seconds, including redirects, within which a response's content must begin."""
LIST_LIMIT = 600.0
"""Time limit in seconds for listing all files in a repository, page by page."""


@dataclass(frozen=True)
class RemoteFile:
    """A file in a repository; `content` identifies its bytes: the SHA-256 of an LFS file, or git's hash of any other file."""

    path: str
    size: int
    content: str
    sha256: str | None = None

    @property
    def is_archive(self) -> bool:
        place = PurePosixPath(self.path)
        of_clips = place.name.startswith("clips") or place.parent.name == "clips"
        return of_clips and place.name.lower().endswith(SUFFIXES)

    @property
    def clips(self) -> PurePosixPath:
        """Folder to which an archive's clips are unpacked: `robovqa/clips.tar.gz` → `robovqa/clips`."""
        parent = PurePosixPath(self.path).parent
        return parent if parent.name == "clips" else parent / "clips"


def list_files(repo: str, revision: str | None) -> tuple[str, list[RemoteFile]]:
    """Return a revision's commit hash and its files."""

    def ask() -> tuple[str, list[RemoteFile]]:
        api = HfApi(endpoint=get_hub_url())
        commit = str(api.dataset_info(repo, revision=revision).sha)
        tree = api.list_repo_tree(repo, recursive=True, revision=commit, repo_type="dataset")
        return commit, [make_remote_file(entry) for entry in tree if isinstance(entry, RepoFile)]

    with convert_dataset_errors(repo, revision):
        return run_with_limit(LIST_LIMIT, ask)


def make_remote_file(entry: RepoFile) -> RemoteFile:
    path = PurePosixPath(entry.path)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"the Hub lists the file {entry.path!r}, which is outside its folder; nothing was downloaded")
    sha256 = entry.lfs.sha256 if entry.lfs else None
    return RemoteFile(entry.path, entry.size, sha256 or entry.blob_id, sha256)


def download(repo: str, commit: str, file: RemoteFile, partial: Path, advance: Advance) -> None:
    """Download the complete content to `partial`; if the file exists, resume the download.

    `advance` is called with the number of bytes received, before they are written; an exception that it raises ends the
    download.

    Raises:
        DataError: the content does not match the Hub's list of files; the download is removed.
        HTTPError, OSError: see `convert_dataset_errors`; the received part is kept, so the download can be resumed.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    url = hf_hub_url(repo, file.path, repo_type="dataset", revision=commit, endpoint=get_hub_url())
    failures = 0
    while not partial.is_file() or partial.stat().st_size < file.size:
        before = get_size(partial)
        try:
            stream(url, partial, before, file.size, advance)
            break
        except HTTPError as error:
            failures = 0 if get_size(partial) > before else failures + 1
            if failures == ATTEMPTS or not convert_hub_error(error, repo).transient:
                raise
            time.sleep(1)
    check_content(repo, file, partial)


def check_content(repo: str, file: RemoteFile, partial: Path) -> None:
    """Check the downloaded content against the Hub's list; remove the file if they differ.

    Raises:
        DataError: the size or the SHA-256 differs.
    """
    size = partial.stat().st_size
    problem = f"received {size} bytes, but the Hub lists {file.size}" if size != file.size else None
    if problem is None and file.sha256 and (digest := compute_sha256(partial)) != file.sha256:
        problem = f"the content's SHA-256 is {digest}, but the Hub lists {file.sha256}"
    if problem is not None:
        partial.unlink()
        raise DataError(f"{repo}: {file.path}: {problem}; the file was removed, so run the same command again")


def stream(url: str, partial: Path, start: int, most: int, advance: Advance) -> None:
    """Download the content from byte `start` on; the complete file may have at most `most` bytes.

    huggingface_hub's own download is not used because it starts from the beginning in every process.
    """
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # a compressed stream cannot be resumed
    if start:
        headers["Range"] = f"bytes={start}-"
    with open_response(url, headers) as response:
        if start and response.status_code != 206:  # the server ignored the range and sends the whole file
            advance(-start)
            start = 0
        with partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            for chunk in iter_pieces(response, most - start):
                advance(len(chunk))
                file.write(chunk)


@contextmanager
def open_response(url: str, headers: Mapping[str, str]) -> Iterator[Any]:
    """Open a response without reading its content. huggingface_hub's session drops the token on a redirect to another host.

    Raises:
        HTTPError: the server returned an error, or the connection failed.
        TimeoutError: the server did not begin to respond in time.
    """

    def request() -> Any:
        response = stack.enter_context(
            get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT)
        )
        hf_raise_for_status(response)  # also reads the body of an error response
        return response

    with ExitStack() as stack:
        yield run_with_limit(OPEN_LIMIT, request)


def iter_pieces(response: Any, most: int) -> Iterator[bytes]:
    """Yield the content as it was sent, without decompression, because the requests ask for uncompressed content.

    Raises:
        DataError: the server sends more than `most` bytes.
        TimeoutError: the content arrives too slowly.
    """
    pace = Pace()
    for piece in response.iter_raw():
        pace.count(len(piece))
        most -= len(piece)
        if most < 0:
            raise DataError(
                f"{response.request.url}: the server sends more bytes than requested; the download was stopped"
            )
        yield piece


def get_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
