"""Fixtures that keep tests from querying the Hub: shapes of published models come from the built-in table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsreason.tools.planning import architecture


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def unreachable(name: str, revision: str | None) -> bytes:
        raise OSError("no connection")

    monkeypatch.setattr(architecture, "download_config", unreachable)
    monkeypatch.setattr(architecture, "try_to_load_from_cache", lambda *_, **__: None)
    architecture.find_architecture.cache_clear()
    yield
    architecture.find_architecture.cache_clear()
