"""Keeping keys and tokens out of everything that is shown, logged or written.

Logs, errors and tracebacks go through `hide_secrets` where they become text (`HidingFormatter`, `failures.py`), what a run
writes of its configuration through `hidden`.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any
from urllib.parse import quote

VARIABLES = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "REMOTE_REWARD_TOKEN",
    "WFM_REWARD_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
)
"""Environment variables whose values nobody may see."""
SHORTEST = 6
"""Of a value that is looked for: `x` would be found everywhere."""
PATTERNS = {
    re.compile(r"\bhf_[A-Za-z0-9]{30,}"): "hf_…",
    re.compile(r"\b(X-Amz-(?:Signature|Credential|Security-Token)|Signature)=[^&\s'\"]+"): r"\1=…",
}
"""Secrets known by their form: tokens of the Hub, wherever they were kept, and signed addresses."""
TALKATIVE = (
    "botocore",
    "aiobotocore",
    "s3fs",
    "fsspec",
    "aiohttp",
    "urllib3",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
)
"""Loggers of libraries that tell headers and signed addresses on the levels DEBUG and INFO."""


def hide_secrets(text: str) -> str:
    """The text with the names of secret variables in place of their values, and without `user:password@`."""
    for name in VARIABLES:
        value = os.environ.get(name, "").strip()
        if len(value) >= SHORTEST:
            text = text.replace(value, f"<{name}>").replace(quote(value, safe=""), f"<{name}>")
    for pattern, shown in PATTERNS.items():
        text = pattern.sub(shown, text)
    return without_credentials(text)


def hidden(value: Any) -> Any:
    """JSON values with `hide_secrets` done to every text in them."""
    if isinstance(value, str):
        return hide_secrets(value)
    if isinstance(value, dict):
        return {key: hidden(item) for key, item in value.items()}
    return [hidden(item) for item in value] if isinstance(value, (list, tuple)) else value


class HidingFormatter(logging.Formatter):
    """Of log lines: neither message nor traceback shows a secret."""

    def format(self, record: logging.LogRecord) -> str:
        return hide_secrets(super().format(record))


def without_credentials(text: str) -> str:
    """`s3://key:secret@bucket` → `s3://…@bucket`. A secret may hold slashes."""
    return re.sub(r"(?<=://)[^\s'\"]*:[^\s'\"]*@", "…@", text)


def quiet_libraries() -> None:
    """Only warnings from `TALKATIVE`, whatever a debug setting of theirs (S3FS_LOGGING_LEVEL) says."""
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
