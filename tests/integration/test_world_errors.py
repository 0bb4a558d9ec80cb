"""Errors in the middle of a world-model run: each ends the run with a single message that names the cause."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_on_ranks
from tests.integration.test_world import RUN, run_world, values
from tests.unit.world.data.test_clips import video

pytestmark = [pytest.mark.integration, pytest.mark.long]

SHORT: dict[str, Any] = {
    "train.max_steps": 2,
    "world.prompts_per_step": 2,
    "world.sampling_steps": 2,
    "validation.max_samples": 0,
    "checkpoint.every": 1,
    "checkpoint.keep_best": "false",
    "model.gradient_checkpointing": "false",
}
OWN = """
import os

def on_one_rank(clips, samples):
    if os.environ["RANK"] == "1":
        raise ValueError("no weights here")
    return [1.0] * len(samples)

def none(clips, samples):
    return [float("nan")] * len(samples)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create `run.toml`, rewards in `own.py`, `videos/` with one damaged video, and a run `started/` with a checkpoint."""
    folder = tmp_path_factory.mktemp("errors")
    (folder / "run.toml").write_text(RUN)
    (folder / "own.py").write_text(OWN)
    data = folder / "data"
    (data / "videos").mkdir(parents=True)
    (data / "metas").mkdir()
    for number in range(24):
        video(data / "videos" / f"{number:02}.mp4", frames=12, fps=16)
        (data / "metas" / f"{number:02}.txt").write_text(f"square {number}")
    (data / "videos" / "13.mp4").write_bytes(b"no video")
    run_on_ranks(run_world, 1, str(folder), "started", None, SHORT | {"train.max_steps": 1})
    return folder


def failure(folder: Path, name: str, changes: dict[str, Any], *, ranks: int = 1, resume: str | None = None) -> str:
    with pytest.raises(AssertionError) as caught:
        run_on_ranks(run_world, ranks, str(folder), name, resume, SHORT | changes)
    assert not (folder / name / "export").exists()
    return str(caught.value)


def test_reward_failure_on_one_rank_stops_all(folder: Path) -> None:
    changes = {"reward.functions": f'{{ "{folder / "own.py"}:on_one_rank" = 1.0 }}', "reward.workers": 0}
    result = failure(folder, "one_rank", changes, ranks=2)
    assert "RewardError" in result
    assert "raised ValueError: no weights here" in result


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("nan", {"reward.functions": '{{ "{folder}/own.py:none" = 1.0 }}'}, "returned nan for"),
        (
            "cut",
            {"model.max_prompt_length": 12},
            "have the same embedding as another prompt, because they differ only after model.max_prompt_length",
        ),
        (
            "down",
            {
                "reward.services": '[{{ name = "a", score_key = "b" }}]',
                "reward.enqueue_url": '"http://127.0.0.1:9/api/reward/enqueue"',
                "reward.fetch_url": '"http://127.0.0.1:9/api/reward/pull"',
                "reward.time_limit": 3.0,
            },
            "RewardError",
        ),
    ],
)
def test_run_fails_with_message_naming_cause(name: str, changes: dict[str, Any], text: str, folder: Path) -> None:
    filled = {key: value.format(folder=folder) if isinstance(value, str) else value for key, value in changes.items()}
    assert text in failure(folder, name, filled)


CLIPS = {
    "world.algorithm": '"sft"',
    "train.global_batch_size": 12,
    "data.format": '"folder"',
    "data.validation": 0,
    "data.workers": 1,
    "checkpoint.export": '"none"',
}


def test_unreadable_clip_is_reported(folder: Path) -> None:
    result = failure(folder, "unreadable", CLIPS | {"data.path": json.dumps(str(folder / "data"))})
    assert "DataError" in result
    assert "13.mp4" in result


def test_unreadable_clip_is_skipped_and_counted(folder: Path) -> None:
    changes = CLIPS | {"data.path": json.dumps(str(folder / "data")), "data.on_bad_row": '"skip"'}
    run_on_ranks(run_world, 1, str(folder), "skipped", None, SHORT | changes)
    assert [line["train/skipped_rows"] for line in values(folder / "skipped")][-1] == 1


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("algorithm", {"world.algorithm": '"nft"'}, "ConfigError: .*world.algorithm was 'flow_grpo' and is now 'nft'"),
        ("adapter", {"lora.rank": 4}, "ConfigError: .*lora.rank was 0 and is now 4"),
        ("average", {"train.ema_decay": 0.5}, "ConfigError: .*ema_decay was None and is now 0.5"),
    ],
)
def test_checkpoint_of_different_run_kind_is_rejected(
    name: str, changes: dict[str, Any], text: str, folder: Path
) -> None:
    assert re.search(text, failure(folder, name, changes, resume="started/checkpoints/step_1"))


def test_bfloat16_training_works_on_cpu(folder: Path) -> None:
    """Check that sampling and training round in the same way, so that the ratio is 1."""
    changes = {"train.precision": '"bf16"', "train.max_steps": 1, "checkpoint.export_dtype": '"auto"'}
    run_on_ranks(run_world, 1, str(folder), "bf16", None, SHORT | changes)
    assert values(folder / "bf16")[0]["policy/ratio_error"] < 1e-4
