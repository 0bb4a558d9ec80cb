"""Locations of the caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsreason.files.archives import get_media_cache
from dsreason.files.cache import get_cache_dir

VARIABLES = ("DSREASON_CACHE", "COSMOS_CACHE", "XDG_CACHE_HOME")


@pytest.mark.parametrize(
    ("environment", "caches", "media"),
    [
        ({}, "/me/.cache/dsreason", "/me/.cache/dsreason"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/dsreason", "/x/dsreason"),
        ({"COSMOS_CACHE": "/large/cosmos", "XDG_CACHE_HOME": "/x"}, "/large/cosmos", "/large/cosmos"),
        ({"COSMOS_CACHE": "~/cosmos"}, "/me/cosmos", "/me/cosmos"),
        ({"DSREASON_CACHE": "/own", "COSMOS_CACHE": "/large/cosmos"}, "/own", "/large/cosmos"),
        ({"DSREASON_CACHE": "/own"}, "/own", "/own"),
    ],
)
def test_cache_variables_choose_cache_and_media_folders(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], caches: str, media: str
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (get_cache_dir(), get_media_cache()) == (Path(caches), Path(media))
