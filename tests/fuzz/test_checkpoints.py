"""For any content, the files of a checkpoint or a model folder are either read, or rejected with an error that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from dsreason.checkpoints.checkpoint_folder import read_checkpoint, read_state
from dsreason.checkpoints.marker import check_sizes
from dsreason.checkpoints.rng import load_rng_state, take_rng_state
from dsreason.checkpoints.shards import UNREADABLE, check_names, iter_checkpoint_tensors
from dsreason.errors import CheckpointError
from dsreason.models.load import read_model_config
from dsreason.models.processors.loading import load_processor
from dsreason.models.tiny import build_tiny
from dsreason.rollout.transformers_engine import read_stop_token_ids
from tests.fuzz.fuzzing import Fuzz, changed, damaged, texts, values
from tests.unit.hostile.guard import guarded
from tests.unit.hostile.test_checkpoints import (
    MODEL,
    NAMES,
    OPTIMIZER,
    SHAPES,
    mark,
    model_state,
    optimizer_state,
)

pytestmark = [pytest.mark.integration, pytest.mark.long]

STATE = {
    "state": {
        "step": 1,
        "model_path": "base",
        "epoch": 0,
        "consumed_samples": 4,
        "best_metric": 0.5,
        "extra": {"a": [1]},
    },
    **{"world_size": 2, "zero_stage": 3, "precision": "bf16"},
    "parameters": {name: {"shape": shape, "trained": True} for name, shape in SHAPES.items()},
}
SETTINGS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
odd = st.one_of(
    values, texts, st.sampled_from(["../../outside", "/etc/passwd", 10**9, -1, 0, True, [], {}, {"a": 1}, "fp32", 3])
)


class Files:
    """A valid checkpoint of two ranks and a valid model; each test case changes one file, reads it, and restores it."""

    def __init__(self, here: Path) -> None:
        self.checkpoint, self.random_state = here / "checkpoints" / "step_1", here / "random"
        self.checkpoint.mkdir(parents=True)
        for rank in range(2):
            torch.save(optimizer_state(rank), self.checkpoint / OPTIMIZER.format(rank))
            torch.save(model_state(), self.checkpoint / MODEL.format(rank))
        (self.checkpoint / "trainer_state.json").write_bytes(as_json(STATE))
        mark(self.checkpoint)
        take_rng_state(torch.device("cpu"))(self.random_state)
        self.model = build_tiny("qwen3_vl", here / "model")
        self.settings = [self.model / name for name in SETTINGS if (self.model / name).exists()]

    def cases(self) -> st.SearchStrategy[tuple[Path, bytes, Callable[[], object]]]:
        """Draw a file, its new content, and the function that reads it."""
        state, sizes = self.checkpoint / "trainer_state.json", self.checkpoint / "COMPLETE"
        shards = [self.checkpoint / name for name in (OPTIMIZER.format(1), MODEL.format(0))]
        return st.one_of(
            with_content(state, odd_json(state), self.read_state),
            with_content(sizes, odd_json(sizes), lambda: check_sizes(self.checkpoint)),
            *(with_content(shard, damaged(st.just(shard.read_bytes())), self.read_tensors) for shard in shards),
            with_content(self.random_state, damaged(st.just(self.random_state.read_bytes())), self.read_random_state),
            st.sampled_from(self.settings).flatmap(lambda file: with_content(file, odd_json(file), self.read_model)),
        )

    def read_state(self) -> None:
        read_checkpoint(self.checkpoint)
        self.read_tensors()

    def read_tensors(self) -> None:
        saved = read_state(self.checkpoint)
        check_names(self.checkpoint, saved)
        assert {name for name, _ in iter_checkpoint_tensors(self.checkpoint, saved)} <= set(NAMES)

    def read_random_state(self) -> None:
        with suppress(*UNREADABLE):
            load_rng_state(self.random_state, torch.device("cpu"))

    def read_model(self) -> None:
        def read() -> None:
            read_model_config(self.model)
            load_processor(self.model)
            read_stop_token_ids(self.model)

        guarded(read)


def as_json(document: Any) -> bytes:
    return json.dumps(document).encode()


def odd_json(file: Path) -> st.SearchStrategy[bytes]:
    sound = file.read_bytes()
    return st.one_of(changed(json.loads(sound), odd).map(as_json), damaged(st.just(sound)))


def with_content(
    file: Path, contents: st.SearchStrategy[bytes], use: Callable[[], object]
) -> st.SearchStrategy[tuple[Path, bytes, Callable[[], object]]]:
    return st.tuples(st.just(file), contents, st.just(use))


def test_any_checkpoint_file_is_read_or_rejected(fuzz: Fuzz, here: Path) -> None:
    def check(case: tuple[Path, bytes, Callable[[], object]]) -> None:
        file, content, use = case
        sound = file.read_bytes()
        file.write_bytes(content)
        try:
            use()
        except CheckpointError as error:
            assert file.parent.name in str(error), str(error)
        finally:
            file.write_bytes(sound)

    fuzz(check, Files(here).cases())
