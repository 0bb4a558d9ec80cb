"""Masking of keys and tokens in everything that is displayed, logged or written.

Logs, errors and tracebacks pass through `hide_secrets` when they are formatted (`HidingFormatter`, `failures.py`). The
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
from dsreason.secret_names import is_clearly_secret, is_secret_name, names_secret_variable

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
"""Environment variables with secret values, in addition to those that `is_secret_name` recognises by name."""
SHORTEST = 6
"""Minimum length of a value to hide. Shorter values would also occur in unrelated text."""
SHORTEST_BY_NAME = 8
"""Minimum length of a value to hide if only its name marks it as secret. Shorter values, such as `true`, may be settings."""
IDENTIFIER = re.compile("[a-z]+(_[a-z]+)*")
"""Pattern for plain words, such as a column's name, which are hidden everywhere only if their key is clearly secret."""
REQUEST = re.compile(r"(^|[._-])(headers|env|environ|environment|query)(\.\d+)*$", re.IGNORECASE)
"""Pattern for keys that hold headers, variables or URL parameters."""
ASSIGNMENT = re.compile(
    r"(?<!\\)(?P<quote>\\*['\"])(?P<quoted>[\w .$/-]{1,100})(?P=quote)(?P<colon>\s*[:=,]\s*)"
    r"|(?<![\w.-])(?P<name>[\w.-]+)(?P<sign>\s*[:=]\s*)"
    r"|(?<!\S)(?P<option>--[\w-]+) +"
)
"""Pattern for a name and the sign before its value, as in JSON, Python, TOML, URLs, command lines and HTTP headers."""
QUOTED = re.compile(
    r"[bfru]{0,2}(?:(\\+['\"])(.*?)(?:(?<!\\)\1|(?=\n)|$)"
    r"|'((?:[^'\\\n]|\\.)*+)(?:'|(?=\n)|$)|\"((?:[^\"\\\n]|\\.)*+)(?:\"|(?=\n)|$))"
)
"""Pattern for a value in quotes, which may be cut off."""
# Punctuation after the value belongs to the sentence and is kept.
BARE = re.compile(r"[^&\s'\"<\\](?:[^&\s'\"\\]*[^&\s'\").,:;}\]\\])?")
WEAK = re.compile(r"(?:\\*['\"])?((?=[^\s'\"\\]{0,199}\d)(?=[^\s'\"\\]{0,199}[^\W\d])[^\s'\"\\,;)}\]]{8,})")
"""Pattern for a value that looks like a secret. After a weak sign, as in `password: wrong`, any other value is ordinary text."""
LIST = re.compile(r"\[(\s*\\*['\"][^\]\n]*)")
NUMBER = re.compile(r"\d{4,}(?![\w.])")
HEADER = re.compile(r"(?:(?:basic|bearer|token|digest)\s+)?([^\s'\",]+)", re.IGNORECASE)
AUTHORIZATION = re.compile(
    HEADER.pattern.removesuffix(")") + r"(?:,? *\b\w+=(?:\"[^\"\n]*\"|[^\s'\",]+))*)", re.IGNORECASE
)
"""Pattern for a value with several fields, as in `AWS4-HMAC-SHA256 Credential=…, Signature=…`."""
COOKIES = re.compile(r"([^\n'\"]+)")
MARKUP = re.compile(r"<[^<>]*>")
"""Pattern for values that are not masked: names of variables (`<HF_TOKEN>`) and special tokens (`<|im_end|>`)."""
PREFIXES = r"hf_|sk-|gh[a-z]_|github_pat_|AKIA|xox[a-z]-|glpat-|AIza|nvapi-|[rs]k_(?:live|test)_"
PATTERNS = {
    re.compile(rf"\b({PREFIXES})[A-Za-z0-9_-]{{16,}}"): r"\1…",
    re.compile(r"\b(ASIA)[A-Z0-9]{16}\b"): r"\1…",
    re.compile(r"\b(eyJ)[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"): r"\1…",
    re.compile(r"(\bbearer\s+)[\w.~+/-]{16,}=*", re.IGNORECASE): r"\1…",
    re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[\s\S]*?(?=-----END|\Z)"): r"\1…",
}
"""Pattern for a secret that is recognised by its format → replacement."""
PAYLOAD = re.compile(r"(\bdata:[\w.+;=/-]{0,120},|['\"]base64['\"]: ['\"])[\w+/=%-]{16,}")
"""Pattern for encoded media in a text: a `data:` URI, or a part's field `base64`."""
EMBEDDED = re.compile(r"(['\"]bytes['\"]: b)(?:'(?:\\.|[^'\\])*'?|\"(?:\\.|[^\"\\])*\"?)")
"""Pattern for embedded media in a text: the field `bytes`, which may be cut off."""
RAW_BYTES = re.compile(
    r"(?<!\w)b(?:'(?=(?:[^'\\]|\\[^x])*\\x)(?:\\.|[^'\\])*'?|\"(?=(?:[^\"\\]|\\[^x])*\\x)(?:\\.|[^\"\\])*\"?)"
)
"""Pattern for the `repr` of a byte string with non-text bytes, which may be cut off."""
BASE64 = re.compile(r"(?<![\w+=-])(?=[\w+/-]*[0-9])(?=[\w+/-]*[A-Z])([\w+/-]{24})[\w+/-]{176,}={0,2}", re.ASCII)
"""Pattern for text that may be base64: at least 200 characters without a break, including digits and capital letters."""
PROXY_USER = re.compile(r"(?<![^\s'\"=(<,])[\w.~%+-]{1,100}:(?!//)[^\s'\"@]{1,200}(?=@[\w.-]{1,255}:\d{1,5}(?!\w))")
"""Pattern for the credentials in `user:password@proxy:3128`, a proxy without a scheme."""
ADDRESS = re.compile(r"\bhttps?://[^\s'\"]+")
MASK = re.compile(rf"\b(?:{PREFIXES}|ASIA|eyJ)…|\bbearer\s+…|PRIVATE KEY-----…|…@", re.IGNORECASE)
"""Pattern for the masks that `PATTERNS` and `mask_credentials` insert into a text."""
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
"""Loggers of libraries that log headers and signed URLs at the DEBUG or INFO level."""


def hide_secrets(text: str) -> str:
    """Replace the values of secret variables in a text with their names, and mask other secrets, such as `user:password@`.

    Media content is also omitted, because it would fill the screen.
    """
    for name, value in list_secret_variables(len(os.environ)):
        text = text.replace(value, f"<{name}>").replace(quote(value, safe=""), f"<{name}>")
    parts, done = [], 0
    for start, end in iter_secret_values(text):
        parts += [text[done:start], "…"]
        done = end
    text = "".join([*parts, text[done:]])
    for pattern, replacement in PATTERNS.items():
        text = pattern.sub(replacement, text)
    return mask_credentials(hide_payloads(text))


def iter_secret_values(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of every value that follows a secret name in a text: `token=…`, `"api_key": "…"`, `X-Api-Key: …`."""
    last_end = 0
    for match in ASSIGNMENT.finditer(text):
        name = match["quoted"] or match["name"] or match["option"]
        is_parameter = match.start() > 0 and text[match.start() - 1] in "?&"
        is_variable = "_" in name and name.isupper()
        if match.start() < last_end or not is_secret_name(name, ambiguous=is_parameter or is_variable):
            continue
        if value := find_value(text, match):
            last_end = value.end()
            yield value.span(value.lastindex or 0)


def find_value(text: str, name: re.Match[str]) -> re.Match[str] | None:
    """Return the match for the value after a name, or None. The match's last group, or all of it, is the part to mask."""
    sign = (name["colon"] or name["sign"] or "").strip()
    if name["option"] or sign == ",":  # `--password …`, or a pair in a list
        is_option = name["option"] or name["quoted"].startswith("--")
        return WEAK.match(text, name.end()) if is_option or is_clearly_secret(name["quoted"]) else None
    if value := QUOTED.match(text, name.end()):
        return None if MARKUP.fullmatch(value[value.lastindex or 0]) else value
    header = name["name"] and ("-" in name["name"] or name["name"].lower() in ("authorization", "cookie"))
    if name["name"] and name["name"].lower().endswith("authorization"):
        return AUTHORIZATION.match(text, name.end())
    if header and sign == ":":
        return (COOKIES if "cookie" in name["name"].lower() else HEADER).match(text, name.end())
    if name["quoted"]:
        return NUMBER.match(text, name.end()) or LIST.match(text, name.end())
    if sign == "=":
        return BARE.match(text, name.end())
    return WEAK.match(text, name.end()) if is_clearly_secret(name["name"]) else None


def hide_payloads(text: str) -> str:
    """Replace the content of encoded and embedded media in a text with an ellipsis: `data:image/png;base64,…`."""
    text = EMBEDDED.sub(r"\1'…'", PAYLOAD.sub(r"\1…", text))
    return BASE64.sub(r"\1…", RAW_BYTES.sub("b'…'", text))


_variables: set[str] = set()
"""Environment variables that the configuration or the command line declares secret."""
_values: dict[str, str] = {}
"""Secrets in the configuration: dotted key → value."""


def add_secret_variable(name: str) -> None:
    """Treat this environment variable's value as secret, whatever its name."""
    if name not in _variables:
        _variables.add(name)
        list_secret_variables.cache_clear()


def register_secrets(document: Any, place: str = "") -> None:
    """Register a configuration's secrets, and the environment variables that it declares secret, for `hide_secrets`."""
    for key, item, is_secret in iter_items(document, place):
        below = f"{place}.{key}" if place else key
        if names_secret_variable(key) and isinstance(item, str):
            add_secret_variable(item)
        elif not is_secret:
            register_secrets(item, below)
        elif isinstance(item, (dict, list)):
            register_secrets({f"{number}_secret": value for number, value in enumerate(iter_leaves(item))}, below)
        elif is_set(item) and len(text := str(item).strip()) >= SHORTEST_BY_NAME:
            if IDENTIFIER.fullmatch(text) and not is_clearly_secret(key):
                continue
            _values[below] = text
            list_secret_variables.cache_clear()


def forget_secrets() -> None:
    """Forget all registered secrets and variables."""
    _variables.clear()
    _values.clear()
    list_secret_variables.cache_clear()


@lru_cache(maxsize=1)
def list_secret_variables(count: int) -> list[tuple[str, str]]:
    """Return (name, value) for every secret in the environment and in the loaded configuration.

    Longer values come first, because they may contain shorter ones. The result is cached until the number of variables (`count`)
    changes, because user code may load keys.
    """
    values = {name: os.environ.get(name, "").strip() for name in (*VARIABLES, *_variables)}
    long_values = {name: value for name, value in values.items() if len(value) >= SHORTEST}
    for name, value in os.environ.items():
        # A path, such as that of a key file, is not secret; hiding it would mask part of every path below it.
        if is_secret_variable(name) and len(value.strip()) >= SHORTEST_BY_NAME and not value.startswith("/"):
            long_values.setdefault(name, value.strip())
    return sorted((_values | long_values).items(), key=lambda item: -len(item[1]))


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable's name marks its value as secret; even the bare name KEY does."""
    return name in _variables or name.upper().endswith("_HEADERS") or is_secret_name(name, ambiguous=True)


def hide_in_json(value: Any, place: str = "") -> Any:
    """Mask secrets in JSON values: within strings, in the query strings of URLs, and under secret names."""
    if isinstance(value, str):
        return ADDRESS.sub(strip_query, hide_secrets(value))
    if not isinstance(value, (dict, list, tuple)):
        return value
    items = {
        key: "…" if is_secret and is_set(item) else hide_in_json(item, f"{place}.{key}")
        for key, item, is_secret in iter_items(value, place)
    }
    return items if isinstance(value, dict) else [*items.values()]


def iter_items(value: Any, place: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield (key, value, whether the value belongs to a secret name) for each item in a dict or list.

    In `{name = "X-Api-Key", value = "…"}`, as in lists of headers, the secret is under `value`. In a command line, it is the item
    after an option such as `--password`.
    """
    if isinstance(value, dict):
        names = [value.get(key) for key in ("name", "key", "header")]
        is_pair = any(isinstance(name, str) and is_secret_name(name, ambiguous=True) for name in names)
        is_request = bool(REQUEST.search(place))
        for key, item in value.items():
            yield key, item, is_secret_name(key, ambiguous=is_request) or (is_pair and key == "value")
    elif isinstance(value, (list, tuple)):
        for number, (option, item) in enumerate(zip(["", *value], value, strict=False)):
            is_option = isinstance(option, str) and option.startswith("--") and "=" not in option
            is_value = isinstance(item, (str, int)) and not str(item).startswith("-")
            yield str(number), item, is_option and is_value and is_secret_name(option)


def iter_leaves(value: Any) -> Iterator[Any]:
    """Yield the values in nested dicts and lists that are neither dicts nor lists."""
    items = [item for _, item, _ in iter_items(value)]
    yield from (leaf for item in items for leaf in iter_leaves(item)) if isinstance(value, (dict, list)) else [value]


def iter_masked_keys(value: Any, place: str = "") -> Iterator[str]:
    """Yield the dotted keys of JSON values that `hide_in_json` has masked, such as `reward.options.judge.api_key`."""
    for key, item, is_secret in iter_items(value, place):
        below = f"{place}.{key}" if place else key
        yield from [below] if item == "…" and is_secret else iter_masked_keys(item, below)
    if isinstance(value, str):
        names = (*VARIABLES, *_variables, *_values, *filter(is_secret_variable, os.environ))
        masks = any(value[start:end].endswith("…") for start, end in iter_secret_values(value))
        queries = any("?…" in address for address in ADDRESS.findall(value))
        if masks or queries or MASK.search(value) or any(f"<{name}>" in value for name in names):
            yield place


def strip_query(address: re.Match[str]) -> str:
    place, mark, query = address[0].partition("?")
    return f"{place}?…" if query else place + mark


def is_header_safe(secret: str) -> bool:
    """Return whether an HTTP header can contain the secret.

    If it cannot, the client's error would quote the secret in an escaped form, which would not be masked.
    """
    return secret.isascii() and secret.isprintable()


def is_set(value: Any) -> bool:
    """Return whether a value may be a secret: it is set, and is neither a switch nor a float, such as a reward's weight."""
    return value is not None and value != "" and not isinstance(value, bool | float)


class VisibleRecord(logging.LogRecord):
    """A log record that masks secrets itself, because handlers from libraries print messages unchanged."""

    def getMessage(self) -> str:
        return format_message(hide_secrets(super().getMessage()))


class HidingFormatter(logging.Formatter):
    """A log formatter that masks secrets, escapes control characters and indents a message's continuation lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return format_message(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return escape_control(hide_secrets(super().format(record)))


def mask_credentials(text: str) -> str:
    """Mask the user, password or token in URLs: `s3://key:secret@bucket` → `s3://…@bucket`. The password may contain slashes.

    `user:password@` without a scheme is masked if a host and a port follow it.
    """

    def mask_user(match: re.Match[str]) -> str:
        user, at, remainder = match[0].rpartition("@")
        return f"…@{remainder}" if at and (":" in user or not set("/?#") & set(user)) else match[0]

    return PROXY_USER.sub("…", re.sub(r"(?<=://)[^\s'\"]+", mask_user, text))


def quiet_libraries() -> None:
    """Set the level of `VERBOSE_LOGGERS` to WARNING, whatever the libraries' own debug settings."""
    for name in VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
