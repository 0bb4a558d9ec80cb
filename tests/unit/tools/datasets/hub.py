"""A stand-in for the Hugging Face Hub that serves one data set repository on this machine."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "a" * 40


@dataclass
class Hub:
    """A repository of files by path; files above `large` bytes have a SHA-256, like files in Git LFS."""

    repo: str
    files: dict[str, bytes]
    large: int = 1000
    gated: bool = False
    token: str | None = None
    """Token that a request for a gated file must contain."""
    cut_at: int | None = None
    """Number of content bytes after which the next longer response is cut off."""
    refuse: int | None = None
    """Status of all requests for file contents after a response has been cut off."""
    tells_sizes: bool = True
    """Whether responses with a part of a file state the size of the whole file."""
    ranges: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Range header of every request for a file's content."""
    plain: dict[str, bytes] = field(default_factory=dict)
    """Files of another server, by the path in their URL."""
    tokens: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Authorization header of the same requests."""

    def __enter__(self) -> "Hub":
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                answer(hub, self)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def answer(hub: Hub, request: BaseHTTPRequestHandler) -> None:
    path = request.path.partition("?")[0]
    if match := re.fullmatch(f"/api/datasets/{hub.repo}(?:/revision/([^/]+))?", path):
        if match[1] not in (None, "main", COMMIT):
            return fail(request, 404, "RevisionNotFound")
        return reply(request, {"id": hub.repo, "sha": COMMIT, "siblings": [], "tags": [], "private": False})
    if path == f"/api/datasets/{hub.repo}/tree/{COMMIT}":
        return reply(request, [entry(hub, name, content) for name, content in hub.files.items()])
    if match := re.fullmatch(f"/datasets/{hub.repo}/resolve/{COMMIT}/(.+)", path):
        return send_file(hub, request, match[1], hub.files[match[1]], gated=hub.gated)
    if path in hub.plain:
        return send_file(hub, request, path, hub.plain[path], gated=False)
    return fail(request, 404, "RepoNotFound")


def entry(hub: Hub, name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    result: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": blob}
    if len(content) > hub.large:
        result["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return result


def send_file(hub: Hub, request: BaseHTTPRequestHandler, name: str, content: bytes, *, gated: bool) -> None:
    hub.ranges.append((name, request.headers["Range"]))
    hub.tokens.append((name, request.headers["Authorization"]))
    if gated and request.headers["Authorization"] != f"Bearer {hub.token}":
        return fail(request, 403 if request.headers["Authorization"] else 401, "GatedRepo")
    if hub.refuse and hub.cut_at is None:
        return fail(request, hub.refuse, "")
    full, start, tag = str(len(content)) if hub.tells_sizes else "*", 0, hashlib.sha256(content).hexdigest()
    if match := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers["Range"] or ""):
        start = int(match[1])
        content = content[: int(match[2]) + 1] if match[2] else content
    request.send_response(206 if match else 200)
    if match:
        request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{full}")
    request.send_header("Content-Length", str(len(content) - start))
    request.send_header("ETag", f'"{tag}"')
    request.send_header("X-Repo-Commit", COMMIT)
    request.end_headers()
    if hub.cut_at is None or len(content) - start <= hub.cut_at:
        request.wfile.write(content[start:])
    else:
        request.wfile.write(content[start : start + hub.cut_at])
        hub.cut_at = None
        request.close_connection = True
    return None


def reply(request: BaseHTTPRequestHandler, document: Any) -> None:
    body = json.dumps(document).encode()
    request.send_response(200)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def fail(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
    request.send_response(status)
    request.send_header("X-Error-Code", code)
    request.send_header("Content-Length", "0")
    request.end_headers()
