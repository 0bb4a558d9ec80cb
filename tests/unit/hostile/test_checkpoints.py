"""Checkpoint files that contain code in pickles, belong to other runs, or are damaged."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dsreason.checkpoints.checkpoint import make_universal
from dsreason.checkpoints.checkpoint_folder import (
    TrainerState,
    choose_checkpoint,
    delete_folder,
    finish_interrupted,
    read_checkpoint,
    read_state,
)
from dsreason.checkpoints.digests import ALGORITHM
from dsreason.checkpoints.export import export_checkpoint
from dsreason.checkpoints.marker import check_content, check_sizes, write_marker
from dsreason.checkpoints.rng import load_rng_state
from dsreason.checkpoints.shards import UNREADABLE, assemble, check_names, iter_checkpoint_tensors
from dsreason.errors import CheckpointError
from tests.unit.hostile.guard import guarded, refused
from tests.unit.hostile.inputs import damaged, safetensors, tensor

OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
NAMES = ("layer.weight", "layer.bias")
SHAPES = {"layer.weight": [3, 2], "layer.bias": [3]}


def optimizer_state(rank: int) -> dict[str, Any]:
    """Return the rank's half of each parameter: 3 of 6 numbers, and 2 of 3 (padded)."""
    return {"optimizer_state_dict": {"fp32_flat_groups": [torch.arange(5.0) + 10 * rank]}}


def model_state() -> dict[str, Any]:
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    return {"param_shapes": [shapes], "frozen_param_shapes": {}, "frozen_param_fragments": {}}


@pytest.fixture
def saved() -> dict[str, Any]:
    parameters = {name: {"shape": shape, "trained": True} for name, shape in SHAPES.items()}
    state = {"step": 1, "model_path": "base"}
    return {"state": state, "world_size": 2, "zero_stage": 3, "precision": "bf16", "parameters": parameters}


@pytest.fixture
def checkpoint(here: Path, saved: dict[str, Any]) -> Path:
    """A ZeRO-3 checkpoint of two ranks in DeepSpeed's layout."""
    folder = here / "checkpoints" / "step_1"
    folder.mkdir(parents=True)
    for rank in range(2):
        torch.save(optimizer_state(rank), folder / OPTIMIZER.format(rank))
        torch.save(model_state(), folder / MODEL.format(rank))
    (folder / "trainer_state.json").write_text(json.dumps(saved))
    mark(folder)
    return folder


def mark(folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "COMPLETE"}
    (folder / "COMPLETE").write_text(json.dumps({"files": files}))


def tensors(checkpoint: Path) -> dict[str, list[Any]]:
    return {name: values.tolist() for name, values in iter_checkpoint_tensors(checkpoint, read_state(checkpoint))}


def test_undamaged_checkpoint_is_read(checkpoint: Path) -> None:
    assert tensors(checkpoint) == {"layer.weight": [[0, 1], [2, 10], [11, 12]], "layer.bias": [3, 4, 13]}
    check_names(checkpoint, read_state(checkpoint))


class Planted:
    """An object that writes the file `executed` when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.write_text, (Path("executed"), "code ran")


class Called:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


class Evaluated:
    def __reduce__(self) -> Any:
        return eval, ("open('executed', 'w')",)


@pytest.mark.parametrize("planted", [Planted, Called, Evaluated])
@pytest.mark.parametrize("file", [OPTIMIZER, MODEL])
@pytest.mark.parametrize("old", [False, True], ids=["zip", "the older format"])
def test_planted_code_is_not_executed(checkpoint: Path, executed: Path, file: str, planted: type, old: bool) -> None:
    path = checkpoint / file.format(1)
    torch.save({"optimizer_state_dict": planted()}, path, _use_new_zipfile_serialization=not old)
    refused(lambda: tensors(checkpoint), CheckpointError, str(path), "cannot be read")


def write(name: str, content: Any) -> Callable[[Path], Any]:
    return lambda folder: torch.save(content, folder / name)


def cut(name: str, keep: float) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: int(keep * (folder / name).stat().st_size)]
    )


RANK1, MODEL0 = OPTIMIZER.format(1), MODEL.format(0)
LARGER = {"optimizer_state_dict": {"fp32_flat_groups": [torch.zeros(2)]}}
FILES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (lambda folder: (folder / RANK1).unlink(), ["rank_1", "is missing"]),
    "no bytes": (cut(RANK1, 0), [RANK1, "cannot be read"]),
    "cut in the middle": (cut(RANK1, 0.5), [RANK1, "cannot be read"]),
    "cut at the end": (cut(RANK1, 0.99), [RANK1, "cannot be read"]),
    "a folder": (lambda folder: ((folder / RANK1).unlink(), (folder / RANK1).mkdir()), [RANK1, "cannot be read"]),
    "a list": (write(RANK1, [1]), [RANK1, "must contain a dict; got a list"]),
    "a tensor": (write(RANK1, torch.zeros(3)), [RANK1, "must contain a dict; got a Tensor"]),
    "nothing in it": (write(RANK1, {}), ["step_1", "are inconsistent (KeyError: 'optimizer_state_dict')"]),
    "no groups": (
        write(RANK1, {"optimizer_state_dict": {"fp32_flat_groups": []}}),
        ["are inconsistent (IndexError"],
    ),
    "shorter groups": (write(RANK1, LARGER), ["are inconsistent (RuntimeError"]),
    "groups of another kind": (
        write(RANK1, {"optimizer_state_dict": {"fp32_flat_groups": "x"}}),
        ["are inconsistent"],
    ),
    "other parameters": (
        write(MODEL0, {**model_state(), "param_shapes": [{"other": torch.Size([3, 2])}]}),
        ["parameter layer.weight is missing"],
    ),
    "shapes of another kind": (write(MODEL0, {**model_state(), "param_shapes": 3}), ["are inconsistent"]),
    "shapes of another run": (
        write(MODEL0, {**model_state(), "param_shapes": [{name: torch.Size([9, 9]) for name in NAMES}]}),
        ["are inconsistent (RuntimeError"],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_or_mismatched_file_is_named(checkpoint: Path, name: str) -> None:
    spoil, words = FILES[name]
    spoil(checkpoint)
    refused(lambda: tensors(checkpoint), CheckpointError, *words)


@pytest.mark.parametrize("foreign", ["../../../../outside/new", "/outside/new", "layer.other"])
@pytest.mark.parametrize("key", ["param_shapes", "frozen_param_shapes", "param_slice_mappings"])
def test_foreign_tensor_names_are_rejected(checkpoint: Path, foreign: str, key: str) -> None:
    if key == "param_slice_mappings":
        torch.save({"optimizer_state_dict": {key: [{foreign: 1}]}}, checkpoint / OPTIMIZER.format(1))
    else:
        value = {foreign: torch.Size([1])}
        torch.save({**model_state(), key: [value] if key == "param_shapes" else value}, checkpoint / MODEL.format(1))
    refused(lambda: check_names(checkpoint, read_state(checkpoint)), CheckpointError, "step_1", "rank 1", repr(foreign))


RNG: dict[str, bytes] = {
    "no bytes": b"",
    "rubbish": bytes(99),
    "no states": safetensors({"a": tensor()}, bytes(4)),
    "rubbish beside them": safetensors({"__metadata__": {"scalars": "{"}, "a": tensor()}, bytes(4)),
    "states in a list": safetensors({"__metadata__": {"scalars": "[]"}, "a": tensor()}, bytes(4)),
    "short states": safetensors(
        {
            "__metadata__": {"scalars": '{"python": [3, null], "numpy": [0, 0, 0.0]}'},
            "python": tensor("I64", [1], [0, 8]),
            "numpy": tensor("I64", [1], [8, 16]),
            "torch": tensor("U8", [4], [16, 20]),
        },
        bytes(20),
    ),
}


@pytest.mark.parametrize("name", RNG)
def test_damaged_random_states_raise_expected_error(here: Path, name: str) -> None:
    (here / "rng").write_bytes(RNG[name])

    def load() -> bool:
        with pytest.raises(UNREADABLE):
            load_rng_state(here / "rng", torch.device("cpu"))
        return True

    assert guarded(load)


@pytest.mark.parametrize("content", [b"", b"{", b"rubbish", b"\xff\xfe", b'{"state": '])
def test_damaged_state_is_named_in_error(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "trainer_state.json").write_bytes(content)
    refused(lambda: read_checkpoint(checkpoint), CheckpointError, "trainer_state.json: is not a valid checkpoint state")


STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "empty": lambda saved: {},
    "no state": lambda saved: saved.pop("state") and saved,
    "state with a foreign key": lambda saved: saved | {"state": {"stop": 1}},
    "state in a list": lambda saved: saved | {"state": [1]},
    "ranks in a text": lambda saved: saved | {"world_size": "2"},
    "no ranks": lambda saved: saved | {"world_size": 0},
    "ranks that are a truth": lambda saved: saved | {"world_size": True},
    "two and a half ranks": lambda saved: saved | {"world_size": 2.5},
    "a billion ranks": lambda saved: saved | {"world_size": 10**9},
    "10^30 ranks": lambda saved: saved | {"world_size": 10**30},
    "ranks here that are a number": lambda saved: saved | {"ranks": 3},
    "ranks here that are nothing": lambda saved: saved | {"ranks": None},
    "ranks here that are texts": lambda saved: saved | {"ranks": ["../0"]},
    "more ranks here than there are": lambda saved: saved | {"ranks": [0, 2]},
    "a step that is a text": lambda saved: saved | {"state": {"step": "x"}},
    "a step that is a fraction": lambda saved: saved | {"state": {"step": 1.5}},
    "a step that is a truth": lambda saved: saved | {"state": {"step": True}},
    "a step before the first": lambda saved: saved | {"state": {"step": -1}},
    "samples that are a list": lambda saved: saved | {"state": {"consumed_samples": [3]}},
    "an epoch that is a text": lambda saved: saved | {"state": {"epoch": "1"}},
    "a best value that is a text": lambda saved: saved | {"state": {"best_metric": "x"}},
    "a best step that is a fraction": lambda saved: saved | {"state": {"best_step": 1.5}},
    "a best name that is a number": lambda saved: saved | {"state": {"best_name": 3}},
    "a model that is a list": lambda saved: saved | {"state": {"model_path": ["base"]}},
    "extras that are a list": lambda saved: saved | {"state": {"extra": []}},
    "another stage": lambda saved: saved | {"zero_stage": 7},
    "another precision": lambda saved: saved | {"precision": "int8"},
    "parameters in a list": lambda saved: saved | {"parameters": ["layer.weight"]},
    "parameters without shapes": lambda saved: saved | {"parameters": {"layer.weight": {}}},
    "shapes of another kind": lambda saved: saved | {"parameters": {"layer.weight": {"shape": "x", "trained": True}}},
}


@pytest.mark.parametrize("name", STATES)
def test_malformed_trainer_state_is_named(checkpoint: Path, saved: dict[str, Any], name: str) -> None:
    (checkpoint / "trainer_state.json").write_text(json.dumps(STATES[name](saved)))
    mark(checkpoint)
    words = ["trainer_state.json: is not a valid checkpoint state"]
    refused(lambda: read_state(checkpoint), CheckpointError, *words)
    refused(lambda: export_checkpoint(checkpoint, checkpoint.parent / "out"), CheckpointError, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": 10**30}, [f"world_size is {10**30}", "less than or equal to 100000"]),
        ({"ranks": 3}, ["ranks is 3", "valid array"]),
        ({"ranks": [0, 2]}, ["ranks is [0, 2], but world_size is 2"]),
        ({"state": {"step": "x"}}, ["state.step is 'x'"]),
    ],
)
def test_wrong_value_in_state_is_named(
    checkpoint: Path, saved: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    (checkpoint / "trainer_state.json").write_text(json.dumps(saved | change))
    refused(lambda: read_state(checkpoint), CheckpointError, str(checkpoint / "trainer_state.json"), *words)


def test_complete_state_is_read(checkpoint: Path, saved: dict[str, Any]) -> None:
    scores = {"best_metric": float("nan"), "best_name": "loss", "best_step": 3, "extra": {"a": [1]}}
    for state in (asdict(TrainerState()), {"step": 4, "epoch": 1, "consumed_samples": 8, **scores}):
        (checkpoint / "trainer_state.json").write_text(json.dumps(saved | {"ranks": [1], "state": state}))
        assert read_state(checkpoint).state.step == state["step"]


@pytest.mark.parametrize("name", [".saving_step_2", ".saving_step_x", ".saving_step_01"])
def test_partial_checkpoint_of_other_step_is_deleted(checkpoint: Path, name: str) -> None:
    partial = checkpoint.rename(checkpoint.with_name(name))
    assert guarded(lambda: finish_interrupted(partial.parent)) == []
    assert not partial.exists()


def test_state_without_parameters_is_not_exported(checkpoint: Path, saved: dict[str, Any], here: Path) -> None:
    (checkpoint / "trainer_state.json").write_text(json.dumps(saved | {"parameters": {}}))
    write_marker(checkpoint)
    refused(lambda: export_checkpoint(checkpoint, here / "exported"), CheckpointError, "lists no parameters")
    assert not (here / "exported").exists()


@pytest.mark.parametrize("change", [{"world_size": 10**9}, {"world_size": None}, {"ranks": 3}, {"ranks": ["../0"]}])
def test_partial_checkpoint_with_bad_state_is_deleted(
    checkpoint: Path, saved: dict[str, Any], change: dict[str, Any]
) -> None:
    (checkpoint / "trainer_state.json").write_text(json.dumps(saved | change))
    (checkpoint / "COMPLETE").unlink()
    partial = checkpoint.rename(checkpoint.with_name(".saving_step_1"))
    assert guarded(lambda: finish_interrupted(partial.parent)) == []
    assert not partial.exists()


@pytest.mark.parametrize("content", ["[]", '"x"', "3", "[" * 100_000])
@pytest.mark.parametrize("file", ["trainer_state.json", "COMPLETE"])
def test_malformed_json_file_is_named(checkpoint: Path, file: str, content: str) -> None:
    (checkpoint / file).write_text(content)
    use = read_state if file == "trainer_state.json" else check_sizes
    refused(lambda: use(checkpoint), CheckpointError, f"{file}: ")


def test_names_outside_folder_never_reach_converter(checkpoint: Path) -> None:
    foreign = "../../../../../outside/new"
    torch.save({**model_state(), "param_shapes": [{foreign: torch.Size([1])}]}, checkpoint / MODEL.format(1))
    refused(lambda: make_universal(checkpoint, read_state(checkpoint)), CheckpointError, "rank 1", repr(foreign))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"../../../outside/flag": 9}, ["COMPLETE: lists '../../../outside/flag'"]),
        ({"/etc/passwd": 9}, ["COMPLETE: lists '/etc/passwd'"]),
        ({".": 9}, ["COMPLETE: lists '.'"]),
        ({"n" * 5000: 9}, ["nnn", "is missing"]),
        ({"a\0b": 9}, ["is missing"]),
        ({"\ud800": 9}, ["is missing"]),
        ({"gone.pt": 3}, ["gone.pt: is missing"]),
        ({"trainer_state.json": 3}, ["trainer_state.json: has", "COMPLETE lists 3"]),
        ({"trainer_state.json": "3"}, ["trainer_state.json: has", "COMPLETE lists '3'"]),
        ({"trainer_state.json": 214.0}, ["trainer_state.json: has", "COMPLETE lists 214.0"]),
        ({"trainer_state.json": None}, ["trainer_state.json: has", "COMPLETE lists None"]),
        ({}, ["does not list trainer_state.json"]),
        ([], ["does not list the checkpoint's files"]),
        ("all", ["does not list the checkpoint's files"]),
    ],
)
def test_mismatched_marker_is_named(checkpoint: Path, files: Any, words: list[str]) -> None:
    (checkpoint / "COMPLETE").write_text(json.dumps({"files": files}))
    refused(lambda: check_sizes(checkpoint), CheckpointError, str(checkpoint), *words)


@pytest.mark.parametrize(
    "name", ["step_1x", "step_", "step_-1", "step_01", "step_\u0661", "step_1/../step_1", ".saving_step_9"]
)
def test_folders_with_other_names_are_never_resumed(checkpoint: Path, name: str) -> None:
    folder = checkpoint.parent
    if "/" not in name:
        (folder / name).mkdir()
        (folder / name / "COMPLETE").write_text('{"files": {}}')
    assert guarded(lambda: choose_checkpoint(folder, "auto")) == checkpoint


def test_random_damage_is_an_error_or_harmless(checkpoint: Path) -> None:
    chance = random.Random(0)
    path = checkpoint / RANK1
    original = path.read_bytes()

    def read_damaged() -> None:
        for _ in range(150):
            path.write_bytes(damaged(original, chance, most=8))
            try:
                assert set(tensors(checkpoint)) == set(NAMES)
            except CheckpointError as error:
                assert "step_1" in str(error)

    guarded(read_damaged)


def compressed(folder: Path) -> None:
    """Rewrite the file in the format of torch.save, but with compressed members that inflate a thousandfold."""
    buffer, file = io.BytesIO(), folder / RANK1
    torch.save({"optimizer_state_dict": {"fp32_flat_groups": [torch.zeros(10**6)]}}, buffer)
    with zipfile.ZipFile(buffer) as sound, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in sound.namelist():
            packed.writestr(name, sound.read(name))


def test_compressed_file_is_rejected_unread(checkpoint: Path) -> None:
    compressed(checkpoint)
    refused(lambda: tensors(checkpoint), CheckpointError, RANK1, "data.pkl is compressed")


def test_tensor_larger_than_its_file_is_rejected() -> None:
    many = torch.zeros(4).as_strided([10**12], [0])
    with pytest.raises(ValueError, match="are larger than their storage"):
        assemble([many], torch.Size([10**12]))


@pytest.mark.parametrize("content", [{}, {"optimizer_state_dict": [1]}, {"optimizer_state_dict": None}])
def test_state_of_other_kind_never_reaches_converter(checkpoint: Path, content: Any) -> None:
    write(RANK1, content)(checkpoint)
    refused(lambda: make_universal(checkpoint, read_state(checkpoint)), CheckpointError, "step_1", "are inconsistent")


@pytest.fixture
def two(checkpoint: Path, saved: dict[str, Any]) -> tuple[Path, Path]:
    """Complete checkpoints of two steps, whose files have the same sizes."""
    write_marker(checkpoint)
    later = checkpoint.with_name("step_2")
    shutil.copytree(checkpoint, later)
    for rank in range(2):
        torch.save(optimizer_state(rank + 7), later / OPTIMIZER.format(rank))
        for folder in (checkpoint, later):
            (folder / f"rng_rank_{rank}.safetensors").write_bytes(folder.name.encode())
            (folder / f"average_ema_rank_{rank}.safetensors").write_bytes(bytes(10**5) + folder.name.encode())
    (later / "trainer_state.json").write_text(json.dumps(saved | {"state": {"step": 2, "model_path": "base"}}))
    for folder in (checkpoint, later):
        write_marker(folder)
        check_content(folder)
    return checkpoint, later


OF_ANOTHER = [
    *([OPTIMIZER.format(rank)] for rank in range(2)),
    [OPTIMIZER.format(rank) for rank in range(2)],
    ["rng_rank_1.safetensors"],
    ["average_ema_rank_0.safetensors"],
    ["trainer_state.json"],
    ["COMPLETE"],
    ["COMPLETE", "trainer_state.json"],
    ["COMPLETE", OPTIMIZER.format(0)],
]


@pytest.mark.parametrize("names", OF_ANOTHER, ids="+".join)
def test_swapped_files_of_equal_size_are_detected(two: tuple[Path, Path], names: list[str]) -> None:
    item, later = two
    for name in names:
        assert (item / name).stat().st_size == (later / name).stat().st_size
        shutil.copyfile(item / name, later / name)
    with pytest.raises(CheckpointError, match=rf"{later}/\S+: does not match its digest in COMPLETE"):
        check_content(later)
    with pytest.raises(CheckpointError, match=str(later)):
        export_checkpoint(later, later.parent / "out")


def test_checkpoint_named_for_other_step_is_rejected(two: tuple[Path, Path]) -> None:
    renamed = two[1].rename(two[1].with_name("step_9"))
    for use in (read_checkpoint, lambda folder: export_checkpoint(folder, folder.parent / "out")):
        with pytest.raises(CheckpointError, match="step_9: contains the checkpoint of step 2.* rename it to step_2"):
            use(renamed)


def test_files_of_other_rank_count_are_rejected(two: tuple[Path, Path]) -> None:
    shutil.copyfile(two[0] / OPTIMIZER.format(1), two[1] / OPTIMIZER.format(2))
    with pytest.raises(CheckpointError, match="contains .* of 3 ranks, but was written by 2 ranks"):
        check_names(two[1], read_state(two[1]))


def test_two_files_of_one_rank_are_rejected(two: tuple[Path, Path]) -> None:
    shutil.copyfile(two[0] / RANK1, two[1] / RANK1.removeprefix("bf16_"))
    with pytest.raises(CheckpointError, match=f"{RANK1} and {RANK1.removeprefix('bf16_')} both match"):
        tensors(two[1])


@pytest.mark.parametrize("key", ["ends", ALGORITHM])
@pytest.mark.parametrize("digests", [[], {}, {"trainer_state.json": "x"}, "all"])
def test_malformed_digests_are_rejected(two: tuple[Path, Path], key: str, digests: Any) -> None:
    marker = two[1] / "COMPLETE"
    marker.write_text(json.dumps({"files": json.loads(marker.read_text())["files"], key: digests}))
    with pytest.raises(CheckpointError, match=f"{marker}: lists digests and sizes of different files"):
        check_content(two[1])


def test_checkpoint_without_digests_is_complete(checkpoint: Path) -> None:
    assert len(check_content(checkpoint).sizes) == 5


@pytest.mark.parametrize("link", ["step_1", ".saving_step_3", ".deleting_step_3"])
def test_deletion_removes_link_and_not_its_target(here: Path, link: str) -> None:
    for target in (here.parent / "outside", here / "nowhere"):
        (here / link).symlink_to(target)
        finish_interrupted(here)
        delete_folder(here / "step_1")
        assert [path.name for path in here.iterdir()] == []
