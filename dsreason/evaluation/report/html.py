"""What the HTML pages share: the environment of their templates, their files, and the hash that permits a page's own script."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def make_environment(package: str, *, autoescape: bool = True, **options: Any) -> Environment:
    """Return an environment for the templates of a package; an undefined value is an error."""
    return Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


def read_template(package: str, name: str) -> str:
    """Read a file in the package's folder `templates`, such as a style sheet."""
    return (resources.files(package) / "templates" / name).read_text(encoding="utf-8")


def hash_script(script: str) -> str:
    """Return the base64 SHA-256 hash with which a content security policy permits an inline script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
