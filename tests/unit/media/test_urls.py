"""Media from `data:` URIs, and from URLs on a server in this process."""

from __future__ import annotations

import base64
import io
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dsreason.errors import ConfigError, DataError
from dsreason.files import retries
from dsreason.media import urls
from dsreason.media.urls import decode_data_uri, fetch_url, is_public, mask_url
from tests.unit.hostile.server import PIECE, Behaviour, content, drip, flood, head, misbehaving, silent


def make_png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28)).save(file, "PNG")
    return file.getvalue()


PNG = make_png()
SENDS_PNG = content(PNG)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSREASON_CACHE", str(tmp_path))
    monkeypatch.delenv("COSMOS_CACHE", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.001)
    return tmp_path


def fetch(url: str) -> Path:
    return fetch_url(url, allow_private=True)


def fail(url: str, *, allow_private: bool = True) -> str:
    with pytest.raises(DataError) as error:
        fetch_url(url, allow_private=allow_private)
    return str(error.value)


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """Apply the behaviours to successive requests; the last one also applies to all further requests."""
    waiting = list(behaviours)

    def act(connection: socket.socket, over: threading.Event) -> None:
        (waiting.pop(0) if len(waiting) > 1 else waiting[0])(connection, over)

    return act


def redirect(location: str) -> Behaviour:
    return content(b"", f"Location: {location}", status="302 Found")


def send_page(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: 6\r\n\r\n<html>")


# ---------------------------------------------------------------- fetching


def test_repeated_url_is_fetched_once() -> None:
    with misbehaving(SENDS_PNG) as server:
        files = [fetch(f"{server.url}/pictures/a.png") for _ in range(2)]
    assert len(server.requests) == 1
    assert files[0] == files[1]
    assert (files[0].name, files[0].read_bytes()) == ("a.png", PNG)


def test_concurrently_used_url_is_fetched_once() -> None:
    def answer_slowly(connection: socket.socket, over: threading.Event) -> None:
        time.sleep(0.1)
        SENDS_PNG(connection, over)

    with misbehaving(answer_slowly) as server:
        threads = [threading.Thread(target=fetch, args=(f"{server.url}/a.png",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(server.requests) == 1


def test_queries_are_sent_and_distinguish_files() -> None:
    with misbehaving(SENDS_PNG) as server:
        files = {fetch(f"{server.url}/a.png?id={number}&w=2") for number in (1, 2)}
    assert len(files) == 2
    assert [request.split()[1] for request in server.requests] == [b"/a.png?id=1&w=2", b"/a.png?id=2&w=2"]


@pytest.mark.parametrize(
    ("path", "name"),
    [("/photo", "photo"), ("/", "file"), ("", "file"), ("/%2e%2e", "file"), ("/a%2Fb%20c.png", "a_b_c.png")],
)
def test_cached_file_name_depends_on_url(cache: Path, path: str, name: str) -> None:
    with misbehaving(SENDS_PNG) as server:
        file = fetch(server.url + path)
    assert (file.name, file.read_bytes()) == (name, PNG)
    assert file.parent.parent == cache / "urls" and file.parent.name.startswith("127.0.0.1-")


def test_credentials_of_url_are_sent_but_masked() -> None:
    with misbehaving(in_turn(SENDS_PNG, content(b"", status="404 Not Found"))) as server:
        url = server.url.replace("://", "://me:very-secret@")
        fetch(f"{url}/a.png")
        message = fail(f"{url}/b.png?token-of-mine")
    assert b"Basic " + base64.b64encode(b"me:very-secret") in server.requests[0]
    assert message.startswith(f"{server.url.replace('://', '://…@')}/b.png?…: the server responds with 404 Not Found;")


def test_request_to_unavailable_server_is_retried() -> None:
    with misbehaving(in_turn(content(b"", status="503 Busy"), lambda *_: None, SENDS_PNG)) as server:
        assert fetch(f"{server.url}/a.png").read_bytes() == PNG
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("behaviour", "num_requests", "words"),
    [
        (content(b"", status="404 Not Found"), 1, "the server responds with 404 Not Found; correct the URL"),
        (content(b"", status="503 Busy"), 3, "the server responds with 503 Busy"),
        (content(b""), 1, "the file is empty (0 bytes)"),
        (send_page, 1, "sends a web page instead of an image"),
        (lambda connection, over: connection.sendall(head("200 OK", "Content-Length: 99") + b"x"), 3, "Error: "),
        (redirect("file:///etc/passwd"), 1, "is not an http:// or https:// URL"),
        (redirect("/a.png"), 6, "redirects more than 5 times; use the final URL"),
    ],
    ids=["404", "503", "empty", "web page", "cut off", "redirect to file", "redirect loop"],
)
def test_unusable_response_is_reported(behaviour: Behaviour, num_requests: int, words: str) -> None:
    with misbehaving(behaviour) as server:
        message = fail(f"{server.url}/a.png")
    assert message.startswith(f"{server.url}/a.png") and words in message
    assert len(server.requests) == num_requests


def test_failed_fetch_can_be_repeated() -> None:
    with misbehaving(in_turn(content(b"", status="404 Not Found"), SENDS_PNG)) as server:
        fail(f"{server.url}/a.png")
        assert fetch(f"{server.url}/a.png").read_bytes() == PNG


@pytest.mark.parametrize(
    "behaviour", [content(bytes(101)), partial(flood, head(), b" " * PIECE)], ids=["of known size", "endless"]
)
def test_large_file_is_rejected_early(monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour) -> None:
    monkeypatch.setattr(urls, "MAX_BYTES", 100)
    with misbehaving(behaviour) as server:
        assert "the response is longer than the maximum of 100 bytes" in fail(f"{server.url}/a.png")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "behaviour", [silent, partial(drip, head("200 OK", "Content-Length: 9999"), b"x")], ids=["silent", "slow body"]
)
def test_slow_server_times_out(monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour) -> None:
    monkeypatch.setattr(urls, "LIMIT_S", 0.15)
    with misbehaving(behaviour) as server:
        assert fail(f"{server.url}/a.png") == f"{server.url}/a.png: no response within 0.15 s"
    assert len(server.requests) == 1


def test_time_limit_includes_redirects(monkeypatch: pytest.MonkeyPatch) -> None:
    def redirect_slowly(connection: socket.socket, over: threading.Event) -> None:
        over.wait(0.1)
        redirect("/a.png")(connection, over)

    monkeypatch.setattr(urls, "LIMIT_S", 0.25)
    with misbehaving(redirect_slowly) as server:
        assert "no response within 0.25 s" in fail(f"{server.url}/a.png")
    assert len(server.requests) <= 3


@pytest.mark.parametrize("url", ["http://", "http://[", "http://host:99999/a.png", "https:///a.png", "http://\ud800/"])
def test_invalid_url_is_rejected(url: str) -> None:
    assert "is not a" in fail(url)


# ---------------------------------------------------------------- private addresses


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("172.31.255.255", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.100.100.200", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00:ec2::254", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", True),
        ("2002:7f00:1::", False),
    ],
)
def test_private_addresses_are_recognized(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]"])
def test_private_host_is_never_contacted(host: str) -> None:
    with misbehaving(SENDS_PNG) as server:
        message = fail(f"http://{host}:{server.url.rpartition(':')[2]}/a.png", allow_private=False)
    assert "is not a public address; if you trust the author of these rows, set data.allow_private_urls" in message
    assert server.requests == []


def as_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count 127.0.0.1, where the tests' servers listen, as a public address."""
    monkeypatch.setattr(urls, "is_public", lambda address: address == "127.0.0.1" or is_public(address))


@pytest.mark.parametrize(
    "target", ["http://127.0.0.2:{port}/b.png", "//10.0.0.1/b.png", "https://localhost.other/b.png"]
)
def test_redirect_to_private_address_is_refused(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    as_public(monkeypatch)
    resolve(monkeypatch, {"localhost.other": ["192.168.0.7"]})
    with misbehaving(SENDS_PNG) as other:
        target = target.format(port=other.url.rpartition(":")[2])
        with misbehaving(redirect(target)) as server:
            message = fail(f"{server.url}/a.png", allow_private=False)
    assert message.startswith(f"{server.url}/a.png → http") and "is not a public address" in message
    assert (len(server.requests), other.requests) == (1, [])


def test_redirect_to_public_address_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    as_public(monkeypatch)
    with misbehaving(in_turn(redirect("/b.png?x=1"), SENDS_PNG)) as server:
        assert fetch_url(f"{server.url}/a.png", allow_private=False).read_bytes() == PNG
    assert server.requests[1].startswith(b"GET /b.png?x=1 HTTP/1.1")


def resolve(monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]]) -> None:
    """Resolve these names without the network; each lookup returns the next address of the list."""
    real = socket.getaddrinfo

    def look_up(host: Any, *arguments: Any, **keywords: Any) -> Any:
        return real(addresses[host].pop(0) if host in addresses else host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_host_name_with_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, {"pictures.example": ["169.254.169.254"]})
    message = fail("https://pictures.example/a.png", allow_private=False)
    assert message.startswith("https://pictures.example/a.png: 169.254.169.254 is not a public address;")


def test_connection_goes_to_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    as_public(monkeypatch)
    resolve(monkeypatch, {"pictures.example": ["127.0.0.1", "127.0.0.2"]})  # a second lookup would get another address
    with misbehaving(SENDS_PNG) as server:
        port = server.url.rpartition(":")[2]
        assert fetch_url(f"http://pictures.example:{port}/a.png", allow_private=False).read_bytes() == PNG
    assert f"Host: pictures.example:{port}".encode() in server.requests[0]


@pytest.mark.parametrize(
    ("errno", "words"), [(socket.EAI_NONAME, "does not exist"), (socket.EAI_AGAIN, "cannot be looked up at the moment")]
)
def test_unknown_host_is_reported(monkeypatch: pytest.MonkeyPatch, errno: int, words: str) -> None:
    def look_up(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(errno, "a reason")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert f"the host pictures.example {words}" in fail("http://pictures.example/a.png", allow_private=False)


@pytest.mark.parametrize(("host", "contacted"), [("pictures.invalid", True), ("10.0.0.1", False)])
def test_proxy_gets_names_but_no_private_address(monkeypatch: pytest.MonkeyPatch, host: str, contacted: bool) -> None:
    with misbehaving(SENDS_PNG) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        if contacted:
            assert fetch_url(f"http://{host}/a.png", allow_private=False).read_bytes() == PNG
        else:
            assert "is not a public address" in fail(f"http://{host}/a.png", allow_private=False)
    assert [request.split()[1] for request in proxy.requests] == [f"http://{host}/a.png".encode()] * contacted


def test_unusable_proxy_is_not_row_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "nonsense://proxy")
    with pytest.raises(ConfigError, match="requests cannot be sent"):
        fetch("http://127.0.0.1:1/a.png")


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a.png", "https://host/a.png"),
        ("https://host/a.png?sig=abcdef#x", "https://host/a.png?…"),
        ("https://me:pass/word@host/a.png", "https://…@host/a.png"),
        ("https://token@host:80/a.png", "https://…@host:80/a.png"),
        ("https://host/" + "a" * 300, "https://host/" + "a" * 187),
    ],
)
def test_urls_are_masked(url: str, shown: str) -> None:
    assert mask_url(url) == shown


# ---------------------------------------------------------------- data: URIs

ENCODED = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    ("head", "suffix"),
    [
        ("data:image/png;base64", ".png"),
        ("data:image/jpeg;base64", ".jpg"),
        ("data:video/mp4;base64", ".mp4"),
        ("DATA:Image/PNG;charset=utf-8;BASE64", ".png"),
        ("data:image/unknown;base64", ""),
        ("data:;base64", ""),
    ],
)
def test_data_uri_is_decoded(head: str, suffix: str) -> None:
    assert decode_data_uri(f"{head},{ENCODED}") == (PNG, suffix)
    assert decode_data_uri(f"{head},{ENCODED[:76]}\r\n{ENCODED[76:]}\n") == (PNG, suffix)  # wrapped as in e-mails


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("data:image/png;base64,", "data:image/png;base64,… (0 characters): is empty"),
        ("data:image/png;base64,iVBO!w0K", "data:image/png;base64,… (8 characters): is not valid base64"),
        ("data:image/png;base64,iVBORw0KG", "data:image/png;base64,… (9 characters): is not valid base64"),
        ("data:image/png;base64,iVBORw==iVBO", "data:image/png;base64,… (12 characters): is not valid base64"),
        ("data:image/png;base64,iVBOé", "data:image/png;base64,… (5 characters): is not valid base64"),
        ("data:image/svg+xml,%3Csvg%3E", "data:image/svg+xml,… (9 characters): is not base64"),
        ("data:image/png;base64" + "A" * 1000, "a data: URI of 1,021 characters has no comma"),
        (
            f"data:image/png;base64,{'A' * 2000}",
            "data:image/png;base64,… (2,000 characters): exceeds the maximum of 1,000",
        ),
    ],
)
def test_unusable_data_uri_is_rejected(monkeypatch: pytest.MonkeyPatch, uri: str, message: str) -> None:
    monkeypatch.setattr(urls, "MAX_BYTES", 1000)
    with pytest.raises(DataError) as error:
        decode_data_uri(uri)
    assert str(error.value).startswith(message)
