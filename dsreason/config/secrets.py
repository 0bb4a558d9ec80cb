"""Keeping keys and tokens out of everything that is shown, logged or written."""

from __future__ import annotations

import logging
import os
import re

VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Environment variables whose values nobody may see."""
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
        if value := os.environ.get(name):
            text = text.replace(value, f"<{name}>")
    return without_credentials(text)


def without_credentials(text: str) -> str:
    """`s3://key:secret@bucket` → `s3://…@bucket`. A secret may hold slashes."""
    return re.sub(r"(?<=://)[^\s'\"]*:[^\s'\"]*@", "…@", text)


def quiet_libraries() -> None:
    """Only warnings from `TALKATIVE`, whatever a debug setting of theirs (S3FS_LOGGING_LEVEL) says."""
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
