"""Keeping keys and tokens out of everything that is shown, logged or written.

Logs, errors and tracebacks go through `hide_secrets` where they become text (`HidingFormatter`, `failures.py`), what a run
writes of its configuration through `hidden`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from dsreason.screen import as_message, visible

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
"""Environment variables whose values nobody may see, beside those with `SECRET_NAME`."""
SHORTEST = 6
"""Characters of a value that is hidden: a shorter one would be found everywhere."""
SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|CREDENTIALS?|CONNECTION_STRING)$|PASSW(OR)?D$", re.IGNORECASE)
SHORTEST_BY_NAME = 8
"""Characters of a value under such a name, which may mean something else: `1`, `true`."""
WORD = r"(?<![^\W_])(?:(?:api|access|account|auth|private|secret)[-_]?key|token|secret|passw(?:or)?d|credentials?|authorization)"
"""The last word in the name of a secret: `hf_token`, not `token_count`."""
SECRET_KEY = re.compile(rf"[\w .-]*{WORD}", re.IGNORECASE)
PATTERNS = {
    re.compile(r"\bhf_[A-Za-z0-9]{30,}"): "hf_…",
    re.compile(r"\b(X-Amz-(?:Signature|Credential|Security-Token)|Signature)=[^&\s'\"]+"): r"\1=…",
    # Not the marks behind it, which are those of the sentence around.
    re.compile(rf"((?:[?&](?:sig|key)|{WORD})=)[^&\s'\"<](?:[^&\s'\"]*[^&\s'\").,:;\]])?", re.IGNORECASE): r"\1…",
    re.compile(rf"({WORD}(?:['\"]\s*[:=]|\s*=)\s*)(['\"])(?!<).{{1,4096}}?\2", re.IGNORECASE): r"\1\2…\2",
    re.compile(r"(\bauthorization\s*[:=]\s*(?:basic|bearer|token)\s+)[^\s'\",]+", re.IGNORECASE): r"\1…",
}
"""Secrets known by their form or name: tokens of the Hub, wherever they were kept, signed addresses, `token=…`, headers."""
ADDRESS = re.compile(r"\bhttps?://[^\s'\"]+")
MASK = re.compile(
    rf"\bhf_…|://…@|(?:Signature|Credential|Security-Token|[?&](?:sig|key)|{WORD})=…|{WORD}['\"]?\s*[:=]\s*['\"]…"
    r"|\bauthorization\s*[:=]\s*(?:basic|bearer|token)\s+…",
    re.IGNORECASE,
)
"""What `PATTERNS` and `without_credentials` leave in a text."""
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
"""Loggers of libraries that show headers and signed addresses on the levels DEBUG and INFO."""


def hide_secrets(text: str) -> str:
    """The text with the names of secret variables in place of their values, and without `user:password@`."""
    for name, value in secret_variables(len(os.environ)):
        text = text.replace(value, f"<{name}>").replace(quote(value, safe=""), f"<{name}>")
    for pattern, replacement in PATTERNS.items():
        text = pattern.sub(replacement, text)
    return without_credentials(text)


@lru_cache(maxsize=1)
def secret_variables(count: int) -> list[tuple[str, str]]:
    """Name and value of every variable that holds a secret; the longest first, of which another may be a part.

    The environment is looked through once, and again when it has another `count` of variables: user code may load keys.
    """
    values = {name: os.environ.get(name, "").strip() for name in VARIABLES}
    long_values = {name: value for name, value in values.items() if len(value) >= SHORTEST}
    for name, value in os.environ.items():
        # A path, such as that of a file with the key, is no secret, and would be hidden in every path below it.
        if SECRET_NAME.search(name) and len(value.strip()) >= SHORTEST_BY_NAME and not value.startswith("/"):
            long_values.setdefault(name, value.strip())
    return sorted(long_values.items(), key=lambda item: -len(item[1]))


def hidden(value: Any) -> Any:
    """JSON values to be written: `hide_secrets` done to every text, addresses without their query, no value of a secret's key."""
    if isinstance(value, str):
        return ADDRESS.sub(without_query, hide_secrets(value))
    if isinstance(value, dict):
        return {key: "…" if holds_secret(key) and is_set(item) else hidden(item) for key, item in value.items()}
    return [hidden(item) for item in value] if isinstance(value, (list, tuple)) else value


def masked(value: Any, place: str = "") -> Iterator[str]:
    """The keys of those JSON values in which `hidden` has left a mask: `reward.options.judge.api_key`."""
    if isinstance(value, dict):
        for key, item in value.items():
            below = f"{place}.{key}" if place else str(key)
            yield from [below] if item == "…" and holds_secret(key) else masked(item, below)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from masked(item, f"{place}.{number}")
    elif isinstance(value, str):
        names = (*VARIABLES, *(name for name in os.environ if SECRET_NAME.search(name)))
        queries = any("?…" in address for address in ADDRESS.findall(value))
        if MASK.search(value) or queries or any(f"<{name}>" in value for name in names):
            yield place


def holds_secret(key: str) -> bool:
    """`api_key`, `hf_token`, `Authorization`; not `max_tokens`, nor a reward `judge.py:token`."""
    return SECRET_KEY.fullmatch(key) is not None


def without_query(address: re.Match[str]) -> str:
    place, mark, query = address[0].partition("?")
    return f"{place}?…" if query else place + mark


def fits_header(secret: str) -> bool:
    """Return whether an HTTP header can hold it. Otherwise the client's error would quote it, escaped, so that no mask fits."""
    return secret.isascii() and secret.isprintable()


def is_set(value: Any) -> bool:
    return value is not None and value != "" and not isinstance(value, bool)


class VisibleRecord(logging.LogRecord):
    """Of a log: libraries have handlers of their own, which print a message as it is."""

    def getMessage(self) -> str:
        return as_message(hide_secrets(super().getMessage()))


class HidingFormatter(logging.Formatter):
    """Of log lines: neither message nor traceback shows a secret or acts on the terminal, and no message begins a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return as_message(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return visible(hide_secrets(super().format(record)))


def without_credentials(text: str) -> str:
    """`s3://key:secret@bucket` → `s3://…@bucket`. A secret may hold slashes."""

    def masked(found: re.Match[str]) -> str:
        user, at, remainder = found[0].rpartition("@")
        return f"…@{remainder}" if at and ":" in user else found[0]

    return re.sub(r"(?<=://)[^\s'\"]+", masked, text)


def quiet_libraries() -> None:
    """Only warnings from `VERBOSE_LOGGERS`, whatever a debug setting of theirs says."""
    for name in VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
