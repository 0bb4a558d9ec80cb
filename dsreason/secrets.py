"""Masking of keys and tokens in everything that is displayed, logged or written.

Logs, errors and tracebacks pass through `hide_secrets` when they are formatted (`HidingFormatter`, `failures.py`); the
configuration that a run writes passes through `hide_in_json`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from dsreason.screen import escape_control, format_message

VARIABLES = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY",
    "PROD_S3_CHECKPOINT_ACCESS_KEY_ID",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "REMOTE_REWARD_TOKEN",
    "WFM_REWARD_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
)
"""Environment variables with secret values, in addition to those that match `SECRET_NAME`."""
SHORTEST = 6
"""Minimum length of a value to hide; a shorter one would also occur in unrelated text."""
SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|CREDENTIALS?|CONNECTION_STRING)$|PASSW(OR)?D$", re.IGNORECASE)
SHORTEST_BY_NAME = 8
"""Minimum length of a value to hide if its variable matches `SECRET_NAME`; a shorter one, such as `true`, may be a setting."""
WORD = r"(?<![^\W_])(?:(?:api|access|account|auth|private|secret)[-_]?key|token|secret|passw(?:or)?d|credentials?|authorization)"
"""Pattern of the last word in the name of a secret; it matches `hf_token`, but not `token_count`."""
SECRET_KEY = re.compile(rf"[\w .-]*{WORD}", re.IGNORECASE)
PATTERNS = {
    re.compile(r"\bhf_[A-Za-z0-9]{30,}"): "hf_…",
    re.compile(r"\b(X-Amz-(?:Signature|Credential|Security-Token)|Signature)=[^&\s'\"]+"): r"\1=…",
    # Punctuation after the value belongs to the sentence and is kept.
    re.compile(rf"((?:[?&](?:sig|key)|{WORD})=)[^&\s'\"<](?:[^&\s'\"]*[^&\s'\").,:;\]])?", re.IGNORECASE): r"\1…",
    re.compile(rf"({WORD}(?:['\"]\s*[:=]|\s*=)\s*)(['\"])(?!<).{{1,4096}}?\2", re.IGNORECASE): r"\1\2…\2",
    re.compile(r"(\bauthorization\s*[:=]\s*(?:basic|bearer|token)\s+)[^\s'\",]+", re.IGNORECASE): r"\1…",
}
"""Secrets that are recognised by their format or name (Hub tokens, signed URLs, `token=…`, headers): pattern → replacement."""
PAYLOAD = re.compile(r"(\bdata:[\w.+;=/-]{0,120},|['\"]base64['\"]: ['\"])[\w+/=%-]{16,}")
"""Pattern of encoded media in a text: a `data:` URI, or the field `base64` of a part."""
EMBEDDED = re.compile(r"(['\"]bytes['\"]: b)(?:'(?:\\.|[^'\\])*'?|\"(?:\\.|[^\"\\])*\"?)")
"""Pattern of embedded media in a text: the field `bytes`, which may be cut off."""
RAW_BYTES = re.compile(
    r"(?<!\w)b(?:'(?=(?:[^'\\]|\\[^x])*\\x)(?:\\.|[^'\\])*'?|\"(?=(?:[^\"\\]|\\[^x])*\\x)(?:\\.|[^\"\\])*\"?)"
)
"""Pattern of a byte string with bytes that are not text, as Python prints it; it may be cut off."""
BASE64 = re.compile(r"(?<![\w+=-])(?=[\w+/-]*[0-9])(?=[\w+/-]*[A-Z])([\w+/-]{24})[\w+/-]{176,}={0,2}", re.ASCII)
"""Pattern of an unbroken text of at least 200 characters that may be base64: it has digits and capital letters."""
ADDRESS = re.compile(r"\bhttps?://[^\s'\"]+")
MASK = re.compile(
    rf"\bhf_…|://…@|(?:Signature|Credential|Security-Token|[?&](?:sig|key)|{WORD})=…|{WORD}['\"]?\s*[:=]\s*['\"]…"
    r"|\bauthorization\s*[:=]\s*(?:basic|bearer|token)\s+…",
    re.IGNORECASE,
)
"""Pattern of the masks that `PATTERNS` and `mask_credentials` put into a text."""
VERBOSE_LOGGERS = (
    "boto3",
    "botocore",
    "fsspec",
    "aiohttp",
    "urllib3",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
)
"""Loggers of libraries that log headers and signed URLs at the levels DEBUG and INFO."""


def hide_secrets(text: str) -> str:
    """Replace the values of secret variables in a text with their names, and mask other secrets, such as `user:password@`.

    The content of media, which fills a screen, is left out as well.
    """
    for name, value in list_secret_variables(len(os.environ)):
        text = text.replace(value, f"<{name}>").replace(quote(value, safe=""), f"<{name}>")
    for pattern, replacement in PATTERNS.items():
        text = pattern.sub(replacement, text)
    return mask_credentials(hide_payloads(text))


def hide_payloads(text: str) -> str:
    """Replace the content of encoded and embedded media in a text with an ellipsis: `data:image/png;base64,…`."""
    text = EMBEDDED.sub(r"\1'…'", PAYLOAD.sub(r"\1…", text))
    return BASE64.sub(r"\1…", RAW_BYTES.sub("b'…'", text))


@lru_cache(maxsize=1)
def list_secret_variables(count: int) -> list[tuple[str, str]]:
    """Return the name and value of every environment variable that holds a secret.

    The longest value comes first, because it may contain a shorter one. The result is cached until the number of variables
    (`count`) changes, since user code may load keys.
    """
    values = {name: os.environ.get(name, "").strip() for name in VARIABLES}
    long_values = {name: value for name, value in values.items() if len(value) >= SHORTEST}
    for name, value in os.environ.items():
        # A path, such as that of a key file, is not secret; hiding it would mask part of every path below it.
        if SECRET_NAME.search(name) and len(value.strip()) >= SHORTEST_BY_NAME and not value.startswith("/"):
            long_values.setdefault(name, value.strip())
    return sorted(long_values.items(), key=lambda item: -len(item[1]))


def is_secret_variable(name: str) -> bool:
    """Return whether the environment variable's name marks its value as secret."""
    return name in VARIABLES or SECRET_NAME.search(name) is not None


def hide_in_json(value: Any) -> Any:
    """Mask secrets in JSON values: within strings, in query strings of URLs, and as the values of secret keys."""
    if isinstance(value, str):
        return ADDRESS.sub(strip_query, hide_secrets(value))
    if isinstance(value, dict):
        return {key: "…" if is_secret_key(key) and is_set(item) else hide_in_json(item) for key, item in value.items()}
    return [hide_in_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def iter_masked_keys(value: Any, place: str = "") -> Iterator[str]:
    """Yield the dotted keys of JSON values that `hide_in_json` has masked, such as `reward.options.judge.api_key`."""
    if isinstance(value, dict):
        for key, item in value.items():
            below = f"{place}.{key}" if place else str(key)
            yield from [below] if item == "…" and is_secret_key(key) else iter_masked_keys(item, below)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from iter_masked_keys(item, f"{place}.{number}")
    elif isinstance(value, str):
        names = (*VARIABLES, *(name for name in os.environ if SECRET_NAME.search(name)))
        queries = any("?…" in address for address in ADDRESS.findall(value))
        if MASK.search(value) or queries or any(f"<{name}>" in value for name in names):
            yield place


def is_secret_key(key: str) -> bool:
    """Return whether a key names a secret: `api_key`, `hf_token` or `Authorization`, but not `max_tokens` or `judge.py:token`."""
    return SECRET_KEY.fullmatch(key) is not None


def strip_query(address: re.Match[str]) -> str:
    place, mark, query = address[0].partition("?")
    return f"{place}?…" if query else place + mark


def is_header_safe(secret: str) -> bool:
    """Return whether an HTTP header can contain the secret; if not, the client's error would quote it in an escaped form.

    The escaped form would not be masked.
    """
    return secret.isascii() and secret.isprintable()


def is_set(value: Any) -> bool:
    return value is not None and value != "" and not isinstance(value, bool)


class VisibleRecord(logging.LogRecord):
    """A log record that masks secrets itself, because the handlers of libraries print messages unchanged."""

    def getMessage(self) -> str:
        return format_message(hide_secrets(super().getMessage()))


class HidingFormatter(logging.Formatter):
    """A log formatter that masks secrets, escapes control characters and indents the continuation lines of a message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return format_message(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return escape_control(hide_secrets(super().format(record)))


def mask_credentials(text: str) -> str:
    """Mask the user and password in URLs: `s3://key:secret@bucket` → `s3://…@bucket`. The password may contain slashes."""

    def mask_user(match: re.Match[str]) -> str:
        user, at, remainder = match[0].rpartition("@")
        return f"…@{remainder}" if at and ":" in user else match[0]

    return re.sub(r"(?<=://)[^\s'\"]+", mask_user, text)


def quiet_libraries() -> None:
    """Set the level of `VERBOSE_LOGGERS` to WARNING, regardless of the libraries' own debug settings."""
    for name in VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
