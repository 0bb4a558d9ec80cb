"""Model folders with damaged weights, false claims, unbuildable configurations, or code."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsreason.errors import CheckpointError
from dsreason.models.load import load_model, read_model_config
from dsreason.models.processors.loading import load_processor
from dsreason.models.tiny import build_tiny
from tests.unit.hostile.guard import guarded, refused
from tests.unit.hostile.inputs import change_json, safetensors, tensor

Spoil = Callable[[Path], Any]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return build_tiny("qwen2_5_vl", folder, hidden_size=64, num_layers=1, vision_depth=1)


@pytest.fixture
def model(here: Path, base: Path) -> Iterator[Path]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Path(shutil.copytree(base, here / "model"))


def load(model: Path) -> torch.nn.Module:
    return load_model(model, dtype=torch.float32)


def weights(content: bytes) -> Spoil:
    return lambda model: (model / WEIGHTS).write_bytes(content)


def first_as(dtype: torch.dtype) -> Spoil:
    """Return a change that stores the first tensor in another dtype."""

    def spoil(model: Path) -> None:
        tensors = load_file(model / WEIGHTS)
        name = next(iter(tensors))
        save_file({**tensors, name: tensors[name].to(dtype)}, model / WEIGHTS)

    return spoil


def index(content: Any) -> Spoil:
    """Return a change that replaces the weights with an index: a weight map, or the text of the file."""
    text = content if isinstance(content, str) else json.dumps({"weight_map": content})
    return lambda model: ((model / WEIGHTS).unlink(), (model / INDEX).write_text(text))


def config(section: str = "", **values: Any) -> Spoil:
    def spoil(model: Path) -> None:
        change_json(model / "config.json", lambda document: (document[section] if section else document).update(values))

    return spoil


def text(name: str, content: str) -> Spoil:
    return lambda model: (model / name).write_text(content)


DAMAGED = "truncated or damaged"
LOAD: dict[str, tuple[Spoil, list[str]]] = {
    "header longer than the file": (weights((1 << 40).to_bytes(8, "little") + b"{}"), [DAMAGED, "header too large"]),
    "header of 2^63 bytes": (weights((1 << 63).to_bytes(8, "little") + b"{}"), [DAMAGED, "header too large"]),
    "header that is no JSON": (weights(safetensors(b"garbage!")), [DAMAGED, "invalid JSON"]),
    "header that is a list": (weights(safetensors([])), [DAMAGED]),
    "nested header": (weights(safetensors(b'{"a":' * 50_000)), [DAMAGED]),
    "overlapping tensors": (
        weights(
            safetensors({"a": tensor(shape=[2], offsets=[0, 8]), "b": tensor(shape=[2], offsets=[4, 12])}, bytes(12))
        ),
        [DAMAGED, "invalid offset"],
    ),
    "hole before a tensor": (
        weights(safetensors({"a": tensor(offsets=[8, 12])}, bytes(12))),
        [DAMAGED, "invalid offset"],
    ),
    "tensor beyond the file": (weights(safetensors({"a": tensor(shape=[9], offsets=[0, 36])}, bytes(4))), [DAMAGED]),
    "unknown dtype": (weights(safetensors({"a": tensor("F99")}, bytes(4))), [DAMAGED, "F99"]),
    "shape that overflows": (weights(safetensors({"a": tensor(shape=[1 << 40] * 2)}, bytes(4))), [DAMAGED, "overflow"]),
    "negative shape": (weights(safetensors({"a": tensor(shape=[-1])}, bytes(4))), [DAMAGED, "`-1`"]),
    "no tensors": (weights(safetensors({})), ["text_config.num_hidden_layers = 1", "0 tensors"]),
    "whole numbers": (first_as(torch.int64), ["1 with a dtype that cannot be trained", "(I64)"]),
    "flags": (first_as(torch.bool), ["1 with a dtype that cannot be trained", "(BOOL)"]),
    "complex numbers": (first_as(torch.complex64), ["1 with a dtype that cannot be trained", "(C64)"]),
    "quantised numbers": (first_as(torch.float8_e4m3fn), ["1 with a dtype that cannot be trained", "(F8_E4M3)"]),
    "index with a file elsewhere": (index({"a": "/etc/passwd"}), [INDEX, "outside its folder: /etc/passwd"]),
    "index with a file above": (index({"a": "../outside/flag"}), [INDEX, "outside its folder"]),
    "index with the folder above": (index({"a": ".."}), [".. is missing"]),
    "index with a number": (index({"a": 3}), [INDEX, "is damaged"]),
    "index with a list": (index({"a": ["b"]}), [INDEX, "is damaged"]),
    "index with kinds mixed": (index({"a": 3, "b": "c"}), [INDEX, "is damaged"]),
    "index with a long name": (index({"a": "a" * 5000}), ["aaa", "is missing"]),
    "index with NUL": (index({"a": "a\0b"}), ["is missing"]),
    "index with a pickle": (index({"a": "pytorch_model.bin"}), ["pytorch_model.bin is missing"]),
    "index that is a list": (index("[]"), [INDEX, "is damaged"]),
    "nested index": (index("[" * 100_000), [INDEX, "is damaged"]),
    "negative size": (config("text_config", hidden_size=-64), ["config.json has text_config.hidden_size = -64"]),
    "no heads": (config("text_config", num_attention_heads=0), ["config.json has text_config.num_attention_heads = 0"]),
    "size beyond memory": (
        config("text_config", hidden_size=1 << 40),
        ["config.json has text_config.hidden_size", "1099511627776"],
    ),
    "vocabulary of 2^26": (config("text_config", vocab_size=1 << 26), ["with a different shape", "67108864"]),
    "heads of 2^26": (config("text_config", head_dim=1 << 26), ["config.json requires 33554432 values", "inv_freq"]),
    "100 million layers": (config("vision_config", depth=10**8), ["vision_config.depth = 100000000", "32 tensors"]),
    "unknown activation": (config("text_config", hidden_act="evil"), ["config.json", "evil"]),
    "generation settings of rubbish": (text("generation_config.json", "{"), ["generation_config.json"]),
    "generation settings in a list": (text("generation_config.json", "[1]"), ["generation_config.json"]),
}
CONFIG: dict[str, tuple[Spoil, list[str]]] = {
    "rubbish": (text("config.json", "rubbish"), []),
    "a list": (text("config.json", "[]"), []),
    "a text": (text("config.json", '"qwen2_5_vl"'), []),
    "nested": (text("config.json", '{"a":' * 5000), ["valid JSON" if sys.version_info >= (3, 13) else "recursion"]),
    "a path as the type": (config(model_type="../../outside"), ["../../outside"]),
    "a number as the type": (config(model_type=3), []),
    "a list as the type": (config(model_type=["qwen2_5_vl"]), []),
    "a text as a size": (config("text_config", hidden_size="64"), ["hidden_size"]),
    "negative layers": (config("text_config", num_hidden_layers=-1), ["num_hidden_layers"]),
    "a list as a section": (config(text_config=[1]), ["text_config"]),
    "an unknown dtype": (config(dtype="evil"), ["evil"]),
    "a function as the dtype": (config(dtype="load"), []),
    "a text as quantisation": (config(quantization_config="x"), []),
    "a list of wrong layers": (config("text_config", layer_types=[3]), ["layer_types"]),
}


def processor_json(**values: Any) -> Spoil:
    """Return a change of values in the image processor's own file, without the section that would override them."""

    def spoil(model: Path) -> None:
        change_json(model / "processor_config.json", lambda document: document.pop("image_processor"))
        change_json(model / "preprocessor_config.json", lambda document: document.update(values))

    return spoil


def patches(**values: Any) -> Spoil:
    """Return a change that sets these values in all processors and in config.json."""

    def change(document: dict[str, Any]) -> None:
        for section in (document, *(part for part in document.values() if isinstance(part, dict))):
            section.update({key: value for key, value in values.items() if key in section})

    def spoil(model: Path) -> None:
        for file in model.glob("*config.json"):
            change_json(file, change)
        vision = {"spatial_merge_size" if key == "merge_size" else key: value for key, value in values.items()}
        config("vision_config", **vision)(model)

    return spoil


def tokenizer_json(**values: Any) -> Spoil:
    return lambda model: change_json(model / "tokenizer.json", lambda document: document.update(values))


PROCESSOR: dict[str, tuple[Spoil, list[str]]] = {
    "tokenizer of rubbish": (text("tokenizer.json", "rubbish"), []),
    "tokenizer in a list": (text("tokenizer.json", "[]"), []),
    "nested tokenizer": (text("tokenizer.json", "[" * 100_000), ["recursion"]),
    "unknown model of a tokenizer": (tokenizer_json(model={"type": "Evil"}), []),
    "broken pattern": (
        tokenizer_json(normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
        ["unmatched parenthesis"],
    ),
    "tokenizer settings of rubbish": (text("tokenizer_config.json", "rubbish"), []),
    "tokenizer settings in a list": (text("tokenizer_config.json", "[]"), []),
    "processor of rubbish": (text("processor_config.json", "rubbish"), []),
    "processor that is a function": (
        lambda model: change_json(model / "processor_config.json", lambda d: d.update(processor_class="os.system")),
        ["no processor for images and videos"],
    ),
    "image processor that is a function": (processor_json(image_processor_type="os.system"), []),
    "patches of no size": (processor_json(patch_size=0), ["patch_size 0, but config.json has 14"]),
    "patches of another size": (processor_json(patch_size=16), ["patch_size 16, but config.json has 14"]),
    "negative merging": (processor_json(merge_size=-2), ["merge_size -2, but config.json has 2"]),
    "patches of no size, as in config.json": (patches(patch_size=0), ["vision_config.patch_size = 0"]),
    "no merging, as in config.json": (patches(merge_size=0), ["vision_config.spatial_merge_size = 0"]),
    "negative merging, as in config.json": (patches(merge_size=-2), ["vision_config.spatial_merge_size = -2"]),
    "huge patches, as in config.json": (
        patches(patch_size=10**7),
        ["patch_size 10000000, but it must be", "from 1 to 64"],
    ),
    "a fraction that is a whole number": (processor_json(patch_size=14.0), ["patch_size 14.0, but it must be"]),
    "huge frame groups, as in config.json": (
        patches(temporal_patch_size=10**7),
        ["temporal_patch_size 10000000, but it must be"],
    ),
    "a picture of 10^15 pixels at least": (
        processor_json(size={"shortest_edge": 10**15, "longest_edge": 10**15}),
        ["size.shortest_edge 1000000000000000, but it must be", "to 150000000"],
    ),
    "a picture of 10^400 pixels at most": (
        processor_json(size={"shortest_edge": 784, "longest_edge": 10**400}),
        ["size.longest_edge 1000", "but it must be", "to 1000000000000000"],
    ),
    "no pixels": (
        processor_json(size={"shortest_edge": 0, "longest_edge": 784}),
        ["size.shortest_edge 0, but it must be"],
    ),
    "pixels in a text": (
        processor_json(size={"shortest_edge": 784, "longest_edge": "784"}),
        ["size.longest_edge '784', but it must be"],
    ),
    "pixels that are no number": (
        processor_json(size={"shortest_edge": float("nan"), "longest_edge": 784}),
        ["size.shortest_edge nan, but it must be"],
    ),
    "limits of another kind": (processor_json(size={"height": 28, "width": 28}), ["shortest_edge"]),
}


@pytest.mark.parametrize("name", LOAD)
def test_invalid_model_is_rejected(model: Path, name: str) -> None:
    spoil, words = LOAD[name]
    spoil(model)
    refused(lambda: load(model), CheckpointError, str(model), *words)


@pytest.mark.parametrize("name", CONFIG)
def test_invalid_model_configuration_is_rejected(model: Path, name: str) -> None:
    spoil, words = CONFIG[name]
    spoil(model)
    refused(lambda: read_model_config(model), CheckpointError, f"{model}: config.json cannot be read", *words)


@pytest.mark.parametrize("name", PROCESSOR)
def test_invalid_processor_is_rejected(model: Path, name: str) -> None:
    spoil, words = PROCESSOR[name]
    spoil(model)
    refused(lambda: load_processor(model), CheckpointError, str(model), *words)


def test_nonfinite_weights_are_loaded(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    save_file({name: torch.full_like(values, torch.nan) for name, values in tensors.items()}, model / WEIGHTS)
    assert guarded(lambda: all(parameter.isnan().all() for parameter in load(model).parameters()))


CODE = """
open({sentinel!r}, "w").write("code ran")
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin
class Evil(PreTrainedConfig): model_type = "evil"
"""
CLASSES = (
    *("AutoConfig", "AutoModelForImageTextToText", "AutoProcessor", "AutoTokenizer", "AutoImageProcessor"),
    "AutoVideoProcessor",
)


@pytest.fixture
def with_code(model: Path, executed: Path) -> Path:
    """A model whose files all name classes in a script beside them."""
    (model / "evil.py").write_text(CODE.format(sentinel=str(executed)))
    for file in model.glob("*config.json"):
        change_json(file, lambda document: document.update(auto_map=dict.fromkeys(CLASSES, "evil.Evil")))
    return model


def test_unneeded_model_code_is_not_executed(with_code: Path) -> None:
    assert guarded(lambda: load(with_code) is not None and load_processor(with_code) is not None)


def test_required_model_code_is_not_executed(with_code: Path) -> None:
    config(model_type="evil")(with_code)
    refused(lambda: load(with_code), CheckpointError, "config.json cannot be read", "custom code")


def test_processor_code_is_not_executed(with_code: Path) -> None:
    change_json(with_code / "processor_config.json", lambda document: document.update(processor_class="Evil"))
    refused(lambda: load_processor(with_code), CheckpointError, "cannot be loaded", "custom code")


def test_tokenizer_code_is_not_executed(with_code: Path) -> None:
    change_json(with_code / "tokenizer_config.json", lambda document: document.update(tokenizer_class="Evil"))
    assert guarded(lambda: load_processor(with_code) is not None)  # config.json decides the class


class Planted:
    """An object that writes the file `executed` when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.write_text, (Path("executed"), "code ran")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_rejected_unread(model: Path, executed: Path, name: str) -> None:
    (model / WEIGHTS).unlink()
    torch.save({"a": Planted()}, model / name)
    refused(lambda: load(model), CheckpointError, f"only pickled weights ({name})")


def test_pickle_named_safetensors_is_not_unpickled(model: Path, executed: Path) -> None:
    torch.save({"a": Planted()}, model / WEIGHTS)
    refused(lambda: load(model), CheckpointError, WEIGHTS, DAMAGED)
