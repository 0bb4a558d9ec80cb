"""Fixtures for the tests of publicly reported faults, mostly of other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsreason.data.chat import Encoder
from tests.unit.reported.chats import build_encoder


@pytest.fixture(scope="package")
def qwen3_vl(tiny_qwen3_vl: Path) -> Encoder:
    return build_encoder(tiny_qwen3_vl)


@pytest.fixture(scope="package")
def qwen2_5_vl(tiny_qwen2_5_vl: Path) -> Encoder:
    return build_encoder(tiny_qwen2_5_vl)
