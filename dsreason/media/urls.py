"""Images and videos in `data:` URIs or at `http(s)://` URLs, which are fetched into the cache once.

A row may come from a stranger, and its URL must not make this machine contact services that only its network can reach, such as
a cloud's metadata server. Therefore, only public addresses are contacted: every host, even after a redirect, is looked up once,
and the connection goes to the address that was checked.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import ipaddress
import mimetypes
import re
import socket
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from dsreason.errors import DataError, StorageError
from dsreason.files.cache import build_copy, convert_cache_errors, get_cache_dir
from dsreason.files.http import BadAnswer, HttpResponse, NoAnswer, send_request, wait_for
from dsreason.files.retries import run_with_retries
from dsreason.secrets import mask_credentials

MAX_BYTES = 256 * 1024**2
"""Maximum size of an image or a video at a URL or in a `data:` URI, in bytes; all of it is held in memory."""
LIMIT_S = 120.0
"""Time limit for a fetch in seconds, including redirects."""
ATTEMPTS = 3
MAX_REDIRECTS = 5
TRANSIENT = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which a retry may succeed."""
SHOWN_LETTERS = 200
"""Maximum length of a URL in a message or an id."""
DATA_URI = re.compile(r"(?P<head>data:(?P<type>[^,;]*)[^,]*),", re.IGNORECASE)
NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that a gateway translates to the IPv4 address in their last 32 bits."""


def is_url(text: str) -> bool:
    return text[:8].lower().startswith(("http://", "https://"))


def is_data_uri(text: str) -> bool:
    return text[:5].lower() == "data:"


def mask_url(url: str) -> str:
    """Mask a URL's user, password and query for messages and ids: `https://…@host/a.png?…`."""
    place, mark, _ = re.sub(r"(?<=://)[^/?#\s]*@", "…@", mask_credentials(url)).partition("?")
    return f"{place[:SHOWN_LETTERS]}{'?…' if mark else ''}"


# ---------------------------------------------------------------- data: URIs


def decode_data_uri(uri: str) -> tuple[bytes, str]:
    """Return the content of a base64 `data:` URI and the file suffix for its type ("" if the type is unknown).

    Raises:
        DataError: the URI is not base64, invalid, empty or too large; the message does not contain its payload.
    """
    match = DATA_URI.match(uri)
    if match is None:
        raise DataError(f"a data: URI of {len(uri):,} characters has no comma; write data:image/png;base64,…")
    payload = uri[match.end() :]
    description = f"{match['head']:.100},… ({len(payload):,} characters)"
    if not match["head"].lower().endswith(";base64"):
        raise DataError(f"{description}: is not base64; write data:image/png;base64,…")
    if len(payload) > MAX_BYTES * 4 // 3 + 4:
        raise DataError(
            f"{description}: exceeds the maximum of {MAX_BYTES:,} bytes; save it as a file, and use its path"
        )
    try:
        content = binascii.a2b_base64("".join(payload.split()), strict_mode=True)
    except ValueError:  # a2b_base64 also raises this for non-ASCII characters
        raise DataError(f"{description}: is not valid base64; encode the file again") from None
    if not content:
        raise DataError(f"{description}: is empty; encode the file again")
    return content, mimetypes.guess_extension(match["type"].strip().lower()) or ""


# ---------------------------------------------------------------- http(s):// URLs


def fetch_url(url: str, *, allow_private: bool) -> Path:
    """Return the cached copy of an image or a video at a URL, fetching it if the copy is missing or damaged.

    Several processes may call this function at the same time.

    Args:
        allow_private: whether to contact non-public hosts too, such as 127.0.0.1 and 10.0.0.1.

    Raises:
        DataError: the URL is invalid or not allowed, or the file cannot be fetched or is too large.
        StorageError: the cache cannot be written, which is not a fault in the data.
    """
    host, _ = split_url(url)
    key = hashlib.sha256(url.encode()).hexdigest()[:24]
    folder = get_cache_dir() / "urls" / f"{re.sub(r'[^a-z0-9.-]', '_', host)[:100]}-{key}"
    name = re.sub(r"[^\w.-]", "_", unquote(PurePosixPath(urlsplit(url).path).name))[-100:].lstrip(".") or "file"
    with convert_cache_errors(folder, "DSREASON_CACHE"):
        return build_copy(folder, lambda partial: _fetch(url, allow_private, partial / name)) / name


def split_url(url: str) -> tuple[str, int]:
    """Return a URL's host and port. Raise DataError if it is invalid."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        url.encode()  # raises an error for a lone surrogate, which is half a character
    except ValueError as error:
        raise DataError(f"{mask_url(url)!a}: is not a valid URL ({type(error).__name__}); correct it") from None
    if not host or not is_url(url):
        raise DataError(f"{mask_url(url)}: is not an http:// or https:// URL with a host; correct it")
    return host, port


def _fetch(url: str, allow_private: bool, file: Path) -> None:
    try:
        response = run_with_retries(lambda: _request(url, allow_private), ATTEMPTS)
    except StorageError as error:
        raise DataError(str(error)) from None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(response.content)


def _request(url: str, allow_private: bool) -> HttpResponse:
    """Request a file. If it cannot be used, raise StorageError, which names the URL and the URLs it redirects to."""
    hops = [url]
    try:
        return wait_for(_follow(hops, allow_private))
    except (NoAnswer, BadAnswer, DataError) as error:
        transient = isinstance(error, NoAnswer) and not error.late
        raise StorageError(f"{' → '.join(map(mask_url, hops))}: {error}", transient=transient) from None


async def _follow(hops: list[str], allow_private: bool) -> HttpResponse:
    """Request the last URL in `hops`, following redirects and appending their targets to `hops`."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                host, port = split_url(hops[-1])
                address = None if allow_private else await find_public_address(hops[-1], host, port)
                response = await send_request("GET", hops[-1], limit=LIMIT_S, max_bytes=MAX_BYTES, connect_to=address)
                location = response.headers.get("Location")
                if location is None or not 300 <= response.status < 400:
                    check_response(response)
                    return response
                if len(hops) > MAX_REDIRECTS:
                    raise DataError(f"redirects more than {MAX_REDIRECTS} times; use the final URL")
                hops.append(urljoin(hops[-1], location))
    except TimeoutError:
        raise NoAnswer(f"no response within {LIMIT_S:g} s", late=True) from None


def check_response(response: HttpResponse) -> None:
    """Raise NoAnswer if a retry may succeed, and DataError if the response does not contain a file."""
    status = f"the server responds with {response.status} {response.reason}".rstrip()
    if response.status in TRANSIENT:
        raise NoAnswer(status)
    if not response.is_success:
        raise DataError(f"{status}; correct the URL, or remove the row")
    if not response.content:
        raise DataError("the file is empty (0 bytes)")
    if response.headers.get("Content-Type", "").lower().startswith("text/html"):
        raise DataError("the server sends a web page instead of an image or a video; use the URL of the file itself")


async def find_public_address(url: str, host: str, port: int) -> str | None:
    """Look up a URL's host and return the address to connect to; None if a proxy makes the connection.

    Raises:
        DataError: the host does not exist, or one of its addresses is not public.
        NoAnswer: the lookup may succeed later.
    """
    proxies = getproxies()
    has_proxy = bool(proxies.get(urlsplit(url).scheme) or proxies.get("all")) and not proxy_bypass(host)
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if has_proxy:
            return None
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            raise NoAnswer(f"the host {host} cannot be looked up at the moment ({error.strerror})") from None
        raise DataError(f"the host {host:.100} does not exist; correct the URL") from None
    addresses = [str(entry[4][0]) for entry in entries]
    if private := [address for address in addresses if not is_public(address)]:
        raise DataError(
            f"{private[0]} is not a public address; if you trust the author of these rows, set data.allow_private_urls = true"
        )
    return None if has_proxy else addresses[0]


def is_public(address: str) -> bool:
    """Return whether an IP address is public, that is, not private, shared, loopback, link-local or multicast."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else None
        ip = ip.ipv4_mapped or ip.sixtofour or translated or ip
    return ip.is_global and not ip.is_multicast
