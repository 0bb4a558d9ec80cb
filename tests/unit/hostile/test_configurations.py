"""Run configurations (JSON, TOML, YAML) and DeepSpeed JSON with traps for parsers and people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsreason.config import load
from dsreason.config.deepspeed import resolve_deepspeed
from dsreason.config.load import load_config, parse_override
from dsreason.config.schema import SFTConfig
from dsreason.errors import ConfigError
from tests.unit.hostile.guard import guarded, refused
from tests.unit.hostile.inputs import laughs

DEEP, VALUES = "is nested too deeply; use at most 32 levels", "expands to more than 10000 values"
NO_VALUE = "contains a value that cannot be read"
COUNTLESS = f"{NO_VALUE} (a number of more than 4300 digits); correct the value"
DIGITS = "contains a number with more than 300 digits"


def read(name: str) -> SFTConfig:
    return load_config(SFTConfig, Path(name), default_recipe="builtin_sft.toml")


def resolve(name: str) -> dict[str, Any]:
    return resolve_deepspeed(name, SFTConfig(), device="cpu", world_size=1, config_name="run.toml")


JSON_CASES: dict[str, tuple[str | bytes, str]] = {
    "lists in lists": ("[" * 100_000, DEEP),
    "objects in objects": ('{"a":' * 900 + "1" + "}" * 900, DEEP),
    "5000 digits": ('{"train_batch_size": ' + "9" * 5000 + "}", COUNTLESS),
    "400 digits": ('{"train_batch_size": ' + "9" * 400 + "}", DIGITS),
    "200,000 keys": (
        "{" + ",".join(f'"{i}":1' for i in range(200_000)) + "}",
        "has more than 1048576 bytes",
    ),
    "30,000 keys": ("{" + ",".join(f'"{i}":1' for i in range(30_000)) + "}", VALUES),
    "a line of 10 MB": ('{"a": "' + "a" * 10**7 + '"}', "has more than 1048576 bytes"),
    "key twice": ('{"a": 1, "a": 2}', "duplicate keys in the same section: a"),
    "UTF-16": ("{}".encode("utf-16"), "cannot be read: 'utf-8' codec can't decode byte 0xff"),
    "NUL": ('{"a\0": 1}', "line 1 is not valid JSON: Invalid control character"),
    "NUL as an escape": ('{"a\\u0000": 1}', "key"),
    "half a character": ('{"\\ud800": 1}', "key"),
    "a list": ("[]", "must consist of sections with keys; got a list"),
    "a text": ('"a"', "must consist of sections with keys; got a str"),
    "nothing": ("", "line 1 is not valid JSON"),
}
TOML_CASES: dict[str, tuple[str | bytes, str]] = {
    "lists in lists": ("a = " + "[" * 5000, DEEP),
    "one dotted key": (".".join(["a"] * 500) + " = 1", DEEP),
    "tables in tables": ("".join(f"[{'.'.join(['a'] * i)}]\n" for i in range(1, 200)), DEEP),
    "5000 digits": ("a = " + "9" * 5000, COUNTLESS),
    "400 digits": ("[model.rl]\nkl_beta = -" + "9" * 400, DIGITS),
    "no number": ("[optim]\nlr = nan", "optim.lr: must be a finite number; got nan"),
    "endless": ("[optim]\nlr = inf", "optim.lr: must be a finite number; got inf"),
    "a date": ("[optim]\nlr = 2001-01-01", "optim.lr: must be a number; got datetime.date(2001, 1, 1)"),
    "key twice": ("a = 1\na = 2", "not valid TOML: Cannot overwrite a value"),
    "UTF-16": ("a = 1".encode("utf-16"), "cannot be read: 'utf-8' codec can't decode byte 0xff"),
    "NUL": ("a = \0", "not valid TOML"),
}
YAML_CASES: dict[str, tuple[str | bytes, str]] = {
    "a billion laughs": (laughs("[{}]", "[x,x,x,x,x,x,x,x,x]"), VALUES),
    "a billion merged keys": (laughs("{{'<<': [{}]}}", "{k: 1, l: 2}"), VALUES),
    "a list in itself": ("a: &a [*a]", DEEP),
    "a section in itself": ("a: &a\n  b: *a", DEEP),
    "lists in lists": ("[" * 3000, DEEP),
    "a call": ("a: !!python/object/apply:os.mkdir [../outside/new]", "line 1 is not valid YAML: could not determine"),
    "an object": ("!!python/object/new:pathlib.Path [a]", "line 1 is not valid YAML: could not determine"),
    "a module": ("a: !!python/module:antigravity", "line 1 is not valid YAML: could not determine"),
    "NUL": ("a: \0", NO_VALUE),
    "a list as a key": ("? [a]\n: b", "line 1 is not valid YAML: a key must be a string"),
    "a section as a key": ("? {a: 1}\n: b", "line 1 is not valid YAML: a key must be a string"),
    "month 99": ("a: 2001-99-99", NO_VALUE),
    "a number that is none": ("a: !!int foo", NO_VALUE),
    "a flag that is none": ("a: !!bool foo", NO_VALUE),
    "a time that is none": ("a: !!timestamp foo", NO_VALUE),
    "5000 digits": ("a: " + "9" * 5000, COUNTLESS),
    "5000 digits to the base of 16": ("a: 0x" + "f" * 5000, DIGITS),
    "two documents": ("a: 1\n---\nb: 2", "line 2 is not valid YAML"),
    "an unknown alias": ("a: *b", "line 1 is not valid YAML: found undefined alias"),
    "a merge of a text": ("<<: x", "line 1 is not valid YAML"),
    "key twice": ("a: 1\na: 2", "line 2 is not valid YAML: duplicate key 'a'"),
    "no number": ("optim: {lr: .nan}", "optim.lr: must be a finite number; got nan"),
}
CASES = [
    pytest.param(f"run.{kind}", *case, id=f"{kind}: {name}")
    for kind, cases in (("json", JSON_CASES), ("toml", TOML_CASES), ("yaml", YAML_CASES))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("name", "content", "words"), CASES)
def test_invalid_configuration_is_rejected(here: Path, name: str, content: str | bytes, words: str) -> None:
    (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(lambda: read(name), ConfigError, name, words)


@pytest.mark.parametrize("name", JSON_CASES)
def test_invalid_deepspeed_json_is_rejected(here: Path, name: str) -> None:
    content, words = JSON_CASES[name]
    (here / "ds.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(lambda: resolve("ds.json"), ConfigError, "ds.json", words)


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.json", '{"optim": {"lr": 0.5}}'), ("run.toml", "[optim]\nlr = 0.5"), ("run.yaml", "optim: {lr: 0.5}")],
)
def test_byte_order_mark_is_skipped(here: Path, name: str, text: str) -> None:
    (here / name).write_text("\ufeff" + text)
    assert read(name).optim.lr == 0.5


def test_ordinary_yaml_aliases_and_merges_work(here: Path) -> None:
    (here / "run.yaml").write_text("optim: &o {lr: 0.5}\ntrain: {seed: 3}\nvalidation: {}\n")
    assert read("run.yaml").optim.lr == 0.5
    (here / "run.yaml").write_text(
        "data: {vision: &v {fps: 3}, validation: {path: a, vision: {<<: *v, max_pixels: 9}}}"
    )
    assert read("run.yaml").data.validation.vision.fps == 3  # type: ignore[union-attr]


def test_endless_file_is_rejected_early(here: Path) -> None:
    (here / "run.toml").symlink_to("/dev/zero")
    refused(lambda: load.read_document(here / "run.toml", "run.toml"), ConfigError, "run.toml has more than")


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000])
def test_unparsable_override_is_rejected(value: str) -> None:
    try:
        override = guarded(lambda: parse_override(f"train.seed={value}"))
    except ConfigError as error:
        assert "train.seed" in str(error) or "--set" in str(error)
    else:
        assert override.value == value  # a string, which the schema refuses


@pytest.mark.parametrize("name", ["\N{GRINNING FACE}", "a\x7fb", 'a"b\\n', "a\n\tb", "é", ""])
def test_override_keeps_special_characters_in_name(name: str) -> None:
    assert parse_override(f"output_dir={load.to_toml(name)}").value == name


# ---------------------------------------------------------------- what DeepSpeed would do with it

ZERO = {"zero_optimization": {"stage": 3}}
BLOCKS: list[tuple[dict[str, Any], list[str]]] = [
    ({"nebula": {"enabled": True, "load_path": "/models"}}, ["nebula", "no longer supported"]),
    ({"compression_training": {"weight_quantization": {}}}, ["compression_training", "no longer supported"]),
    ({"data_efficiency": {"enabled": True}}, ["data_efficiency", "data.sources selects"]),
    ({"tensorboard": {"enabled": True, "output_path": "../outside"}}, ["tensorboard", "[monitor] selects"]),
    ({"csv_monitor": {"enabled": True, "output_path": "../outside"}}, ["csv_monitor", "[monitor] selects"]),
    ({"wandb": {"enabled": True, "team": "x"}}, ["wandb", "[monitor] selects"]),
    ({"comet": {"enabled": True}}, ["comet", "[monitor] selects"]),
    ({"autotuning": {"enabled": True, "results_dir": "../outside"}}, ["autotuning", "separate runs"]),
    ({"hybrid_engine": {"enabled": True}}, ["hybrid_engine", "[rollout] selects"]),
    ({"flops_profiler": {"enabled": True, "output_file": "../outside/x"}}, ["flops_profiler.output_file", "remove it"]),
    ({"optimizer": {"type": "os.system"}}, ['optimizer.type ("os.system") contradicts', "the optimizer is AdamW"]),
    ({"optimizer": {"params": {"foreach": True}}}, ["optimizer.params.foreach", "has no effect"]),
    (
        {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["os.x"]}},
        ["torch_autocast.enabled (true)"],
    ),
    ({"train_batch_size": 7}, ["train_batch_size (7) contradicts run.toml: train.global_batch_size is 32"]),
    ({"gradient_clipping": float("nan")}, ["gradient_clipping (NaN) contradicts run.toml"]),
    ({"activation_checkpointing": 3}, ["activation_checkpointing: must be an object ({…}); got 3"]),
    ({"checkpoint": "/etc"}, ['checkpoint: must be an object ({…}); got "/etc"']),
    ({"aio": []}, ["aio: must be an object ({…}); got []"]),
    ({"fp16": [True]}, ["fp16: must be an object ({…}); got [true]"]),
    ({"optimizer": "x" * 5000}, ["optimizer: must be an object", "xxx…"]),
    ({"wall_clock_breakdown": "yes"}, ['wall_clock_breakdown: must be true or false; got "yes"']),
    ({"dump_state": 1}, ["dump_state: must be true or false; got 1"]),
    ({"steps_per_print": "all"}, ['steps_per_print: must be a number; got "all"']),
    ({"steps_per_print": True}, ["steps_per_print: must be a number; got true"]),
    ({"vocabulary_size": {}}, ["vocabulary_size: must be a number; got {}"]),
    ({"sequence_parallel_size": [2]}, ["sequence_parallel_size: must be a number; got [2]"]),
    ({"zero_optimisation": {}}, ["zero_optimisation: DeepSpeed has no such key; did you mean zero_optimization?"]),
    ({"zero_optimization": {"stage": "auto"}}, ['zero_optimization.stage: is "auto"']),
    ({"zero_optimization": {"stage": [3]}}, ["zero_optimization.stage: is [3]"]),
    (
        {"zero_optimization": {"stage": 3, "offload_param": "/nvme"}},
        ['offload_param: must be an object such as {"device": "cpu"}; got "/nvme"'],
    ),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, ['"nvme" is not supported']),
]


@pytest.mark.parametrize(("block", "words"), BLOCKS, ids=[f"{next(iter(b))} {i}" for i, (b, _) in enumerate(BLOCKS)])
def test_unsupported_deepspeed_block_is_rejected(here: Path, block: dict[str, Any], words: list[str]) -> None:
    (here / "ds.json").write_text(json.dumps(ZERO | block))
    refused(lambda: resolve("ds.json"), ConfigError, "ds.json: ", *words)


@pytest.mark.parametrize(
    "block",
    [{"wandb": {"enabled": False}}, {"tensorboard": {"enabled": "auto"}}, {"steps_per_print": "auto"}, {"comet": {}}],
)
def test_disabled_deepspeed_block_is_accepted(here: Path, block: dict[str, Any]) -> None:
    (here / "ds.json").write_text(json.dumps(ZERO | block))
    assert guarded(lambda: resolve("ds.json"))["zero_optimization"]["stage"] == 3
