"""The reference policy of a step. Tests with real weights: tests/integration/test_reference.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import CheckpointError
from dsreason.train.grpo import reference as reference_module
from dsreason.train.grpo.reference import delete_unneeded, find_reference_step, load_reference


@pytest.mark.parametrize(
    ("step", "every", "expected"), [(99, 100, 0), (100, 100, 100), (250, 100, 200), (300, 100, 300), (250, 0, 0)]
)
def test_reference_is_policy_of_last_reset(step: int, every: int, expected: int) -> None:
    assert find_reference_step(step, every) == expected


def test_references_still_in_use_are_kept(tmp_path: Path) -> None:
    for name in ("reference/step_10", "reference/step_20", "reference/step_30", "reference/step_40"):
        (tmp_path / name).mkdir(parents=True)
    complete = tmp_path / "checkpoints/step_25"  # continues with the reference of step 20
    complete.mkdir(parents=True)
    (complete / "COMPLETE").touch()
    (tmp_path / "checkpoints/.saving_step_39").mkdir()
    delete_unneeded(tmp_path, 10, 40)
    assert sorted(path.name for path in (tmp_path / "reference").iterdir()) == ["step_20", "step_30", "step_40"]


def test_checkpoint_resumes_with_its_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_module, "run_on_rank_zero", lambda function: function())
    config = GRPOConfig.model_validate(
        {"reward": {"functions": {"format": 1.0}}, "grpo": {"reference_reset_every": 10}}
    )
    loaded: list[str] = []
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_vl"))
    engine = SimpleNamespace(module=SimpleNamespace(model=model))
    reference: Any = SimpleNamespace(engine=engine, load=lambda folder, rename: loaded.append(folder.name))
    (tmp_path / "reference/step_20").mkdir(parents=True)
    load_reference(reference, config, tmp_path / "checkpoints/step_25", tmp_path)
    load_reference(reference, config, tmp_path / "checkpoints/step_5", tmp_path)  # still uses the first model
    assert loaded == ["step_20"]
    with pytest.raises(CheckpointError, match=r"step_30 is missing \(grpo\.reference_reset_every = 10\)"):
        load_reference(reference, config, tmp_path / "checkpoints/step_30", tmp_path)
