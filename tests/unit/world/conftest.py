"""Tiny random world models, built once per test session."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the tiny models, by the name of their family."""
    from dsreason.world.families import FAMILIES

    folder = tmp_path_factory.mktemp("worlds")
    for name, family in FAMILIES.items():
        family.build_tiny(folder / name)
    return {name: folder / name for name in FAMILIES}
