"""A stand-in for the Hugging Face Hub that accepts commits of small files, or refuses requests."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.integration.s3_server import serving

TOKEN = "hf_sentinelToken"
ACCOUNT = {"name": "user", "orgs": [{"name": "Team"}], "auth": {"accessToken": {"role": "write"}}}


@dataclass
class LocalHub:
    refuse: int | None = None
    """HTTP status of every response to `refused`, or only of the next `times` responses; None: nothing is refused."""
    refused: str = ""
    times: int = 10**6
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files of each repository and branch; the key has the form `user/name@main`."""
    created: list[dict[str, Any]] = field(default_factory=list)
    commits: list[list[str]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)


@contextmanager
def hub_server() -> Iterator[tuple[LocalHub, str]]:
    """Start the stand-in for the Hub; yield the stand-in and its URL."""
    hub = LocalHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(hub, self, b"")

        def do_HEAD(self) -> None:
            look(hub, self)

        def do_POST(self) -> None:
            answer(hub, self, self.rfile.read(int(self.headers["Content-Length"] or 0)))

        def log_message(self, format: str, *args: Any) -> None: ...

    with serving(Handler) as address:
        yield hub, address


def answer(hub: LocalHub, request: BaseHTTPRequestHandler, body: bytes) -> None:
    hub.seen.append(f"{request.command} {request.path}")
    if hub.refuse and hub.refused in request.path and hub.times > 0:
        hub.times -= 1
        return reply(request, hub.refuse, {"error": "said the test"})
    if request.headers["Authorization"] != f"Bearer {TOKEN}":
        return reply(request, 401, {"error": "Invalid username or password."})
    if request.path == "/api/whoami-v2":
        return reply(request, 200, ACCOUNT)
    if request.path == "/api/repos/create":
        return create(hub, request, json.loads(body))
    if request.path == "/api/validate-yaml":
        return reply(request, 200, {"errors": [], "warnings": []})
    match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(preupload|commit|branch|revision)/([^/?]+))?.*", request.path)
    if match is None:
        return reply(request, 404, {"error": "no such page"})
    repo, action, branch = match[1], match[2], match[3]
    if action == "branch":
        hub.repositories.setdefault(f"{repo}@{branch.replace('%2F', '/')}", {})
        return reply(request, 200, {})
    if action == "preupload" and f"{repo}@{branch.replace('%2F', '/')}" not in hub.repositories:
        return reply(request, 404, {"error": "Repository not found"})
    if action == "preupload":
        files = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
        ]
        return reply(request, 200, {"files": files})
    if action == "commit":
        return commit(hub, request, f"{repo}@{branch.replace('%2F', '/')}", body)
    if f"{repo}@main" not in hub.repositories:
        return reply(request, 404, {"error": "Repository not found"})
    return reply(request, 200, {"id": repo, "sha": "a" * 40, "siblings": [], "tags": [], "private": True})


def look(hub: LocalHub, request: BaseHTTPRequestHandler) -> None:
    """Answer a request that asks whether a file exists, such as `/user/name/resolve/main/config.json`."""
    match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+).*", request.path)
    place = f"{match[1]}@{match[2].replace('%2F', '/')}" if match else ""
    existing = match is not None and match[3] in hub.repositories.get(place, {})
    request.send_response(200 if existing else 404)
    if not existing:
        request.send_header("X-Error-Code", "EntryNotFound")
    for name, value in {"ETag": '"a"', "X-Repo-Commit": "a" * 40, "Content-Length": "0"}.items():
        request.send_header(name, value)
    request.end_headers()


def create(hub: LocalHub, request: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    name = f"{asked['organization']}/{asked['name']}"
    if f"{name}@main" in hub.repositories:
        return reply(request, 409, {"error": "You already created this model repo", "url": name})
    hub.created.append(asked)
    hub.repositories[f"{name}@main"] = {}
    return reply(request, 200, {"url": f"http://{request.headers['Host']}/{name}", "name": name})


def commit(hub: LocalHub, request: BaseHTTPRequestHandler, place: str, body: bytes) -> None:
    lines = [json.loads(line) for line in body.splitlines()]
    files = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
    }
    hub.repositories[place].update(files)
    hub.commits.append(sorted(files))
    repository = place.partition("@")[0]
    address = f"http://{request.headers['Host']}/{repository}/commit/{'a' * 40}"
    return reply(request, 200, {"commitUrl": address, "commitOid": "a" * 40, "hookOutput": "", "success": True})


def reply(request: BaseHTTPRequestHandler, status: int, document: Any) -> None:
    body = json.dumps(document).encode()
    request.send_response(status)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)
