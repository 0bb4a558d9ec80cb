"""Loading of a run configuration: three file formats, overrides, and error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.load import dump_config, load_config, parse_override, parse_value, read_values
from dsreason.config.schema import RunConfig, SFTConfig
from dsreason.config.schema_dpo import DPOConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError
from dsreason.world.schema import WorldConfig

RECIPE = "builtin_sft.toml"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str, name: str = "run.toml") -> SFTConfig:
    Path(name).write_text(text)
    return load_config(SFTConfig, Path(name), overrides, default_recipe=RECIPE)


def errors(text: str, *overrides: str, name: str = "run.toml") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides, name=name)
    lines = str(caught.value).splitlines()
    return lines if len(lines) == 1 else [line.strip() for line in lines[1:]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "run.toml",
            '[optim]\nlr = 1e-6\nbetas = [0.9, 0.95]\n[data]\nsplit = ["train", "test"]\n[data.vision]\nfps = 4',
        ),
        ("run.yaml", "optim: {lr: 1e-6, betas: [0.9, 0.95]}\ndata:\n  split: [train, test]\n  vision: {fps: 4}"),
        ("run.yml", "optim:\n  lr: 1.0e-6\n  betas: [9e-1, 95e-2]\ndata: {split: [train, test], vision: {fps: 4}}"),
        (
            "run.json",
            '{"optim": {"lr": 1e-6, "betas": [0.9, 0.95]}, "data": {"split": ["train", "test"], "vision": {"fps": 4}}}',
        ),
    ],
)
def test_toml_yaml_and_json_load_identically(name: str, text: str) -> None:
    config = load(text, name=name)
    assert config.optim.lr == 1e-6
    assert config.optim.betas == (0.9, 0.95)
    assert config.data.split == ("train", "test")
    assert config.data.vision.fps == 4.0
    assert config.train.global_batch_size == 32  # untouched default


def test_excessive_reward_weight_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"reward\.functions\.format: must be at most 10000; got 1e\+300"):
        read_values(GRPOConfig, {"reward": {"functions": {"format": 1e300}}}, "run.toml")


def test_yaml_exponents_without_point_are_numbers() -> None:
    assert load("optim: {warmup: 1e2}", name="run.yaml").optim.warmup == 100.0


def test_empty_yaml_file_yields_default_configuration() -> None:
    assert load("", name="run.yaml") == SFTConfig()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("3", 3),
        ("true", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ("{fps = 2}", {"fps": 2}),
        ('"3"', "3"),
        ("cosine", "cosine"),
        ("/videos/a b", "/videos/a b"),
        ("train[:100]", "train[:100]"),
        ("1\nb = 2", "1\nb = 2"),
        ("", ""),
    ],
)
def test_override_value_is_toml_or_string(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_override_value_keeps_equals_signs() -> None:
    assert parse_override("data.path=a=b").value == "a=b"


def test_last_override_wins_over_file() -> None:
    config = load("[optim]\nlr = 1e-3\neps = 1e-6", "optim.lr=1e-4", "optim.lr=1e-5", "model.freeze=['visual']")
    assert (config.optim.lr, config.optim.eps, config.model.freeze) == (1e-5, 1e-6, ("visual",))


@pytest.mark.parametrize("text", ['["a\\.b"]', "[1, 2", "{a = }"])
def test_malformed_list_or_table_override_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="is not valid TOML"):
        parse_value(text)


def test_null_override_unsets_value_from_file() -> None:
    config = load(
        "[train]\nmicro_batch_size = 4", "train.micro_batch_size=null", "train.max_tokens_per_micro_batch=512"
    )
    assert config.train.micro_batch_size is None
    assert config.train.max_tokens_per_micro_batch == 512


def test_number_in_override_key_indexes_list() -> None:
    text = '[[data.sources]]\npath = "a"\n[[data.sources]]\npath = "b"\nweight = 2'
    config = load(text, "data.sources.1.path=c", "data.sources.2.path=d")
    assert [(source.path, source.weight) for source in config.data.sources] == [("a", 1), ("c", 2), ("d", 1)]


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("", "optim.lr", "--set optim.lr: must have the form section.key=value, such as optim.lr=1e-5"),
        ("", "optim..lr=1", "--set optim..lr=1: must have the form section.key=value, such as optim.lr=1e-5"),
        (
            '[model]\npath="x"',
            "model.path.y=1",
            "--set model.path.y=1: model.path is a value ('x'), not a section; set model.path itself",
        ),
        (
            "",
            "data.sources.1.path=x",
            "--set data.sources.1.path=x: data.sources is a list of 0 entries, but 1 is not an index; use an index from 0 to 0",
        ),
        (
            '[model]\npath="x"',
            "model.0=1",
            "--set model.0=1: model is a section, not a list; use one of its keys instead of 0",
        ),
        ("", "optim.lr=fast", "--set optim.lr=fast: optim.lr: must be a number; got 'fast' (the default is 1e-05)"),
    ],
)
def test_invalid_override_is_named_in_error(text: str, override: str, message: str) -> None:
    assert errors(text, override) == [message]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[checkpoint]\nkep = 1", "run.toml: checkpoint.kep: unknown key; did you mean checkpoint.keep?"),
        ("[train]\nlr = 1", "run.toml: train.lr: unknown key; did you mean optim.lr?"),
        ("[train]\nmax_grad_nrm = 1", "run.toml: train.max_grad_nrm: unknown key; did you mean optim.max_grad_norm?"),
        ("[optim]\nlearning_rate = 1", "run.toml: optim.learning_rate: unknown key; did you mean optim.lr?"),
        ("[optimizer]\nlr = 1", "run.toml: optimizer: unknown key; did you mean optim?"),
        ("[data.vision]\nfsp = 1", "run.toml: data.vision.fsp: unknown key; did you mean data.vision.fps?"),
        (
            "[[data.sources]]\nwieght = 1",
            "run.toml: data.sources.0.wieght: unknown key; did you mean data.sources.0.weight?",
        ),
        (
            "[data.validation]\nlimt = 1",
            "run.toml: data.validation.limt: unknown key; did you mean data.validation.limit?",
        ),
        (
            "[monitor]\nzzz = 1",
            "run.toml: monitor.zzz: unknown key; the keys of [monitor] are log_every, phase_time_limit, phase_time_limits, "
            "profile, wandb, wandb_project, wandb_name",
        ),
    ],
)
def test_unknown_key_error_suggests_nearest_key(text: str, message: str) -> None:
    assert errors(text) == [message]


@pytest.mark.parametrize(
    ("key", "near"), [("timestep_fraction", ""), ("timesteps_fraction", ""), ("num_generation", "num_generations")]
)
def test_misspelt_world_key_is_rejected(key: str, near: str) -> None:
    """Reject misspelt world keys, which cosmos-rl ignores.

    cosmos-rl ignores the `timestep_fraction` of its shipped recipe, because the field has another name.
    """
    Path("run.toml").write_text(f"[world]\n{key} = 1")
    with pytest.raises(ConfigError, match=rf"run\.toml: world\.{key}: unknown key; .*{near}"):
        load_config(WorldConfig, Path("run.toml"), (), default_recipe="builtin_world.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[monitor]\nphase_time_limits = {exprt = 10}",
            "monitor.phase_time_limits.exprt: must be one of preflight, open_data, load_model, start_engine, "
            "self_test, data, rollout, weight_sync, reward, prepare, step, validation, checkpoint, export, other; "
            "got 'exprt'; did you mean export?",
        ),
        (
            "[optim]\nlr_multipliers = {visual = 0}",
            "optim.lr_multipliers.visual: must be greater than 0; got 0; to keep parameters unchanged, use model.freeze instead",
        ),
        ("[optim]\nlr = 0", "optim.lr: must be greater than 0; got 0"),
        ("[optim]\nlr = nan", "optim.lr: must be a finite number; got nan (the default is 1e-05)"),
        ("[optim]\nbetas = [0.9, 1.0]", "optim.betas.1: must be less than 1; got 1.0"),
        ("[optim]\nbetas = [0.9]", "optim.betas: [0.9] is incomplete; set all of its values"),
        ("[optim]\nwarmup = -1", "optim.warmup: must be at least 0; got -1"),
        (
            "[optim]\nwarmup = 1.5",
            "optim.warmup: must be less than 1; got 1.5 (a whole number is also allowed)",
        ),
        (
            "[data]\nvalidation = 1.5",
            "data.validation: must be less than 1; got 1.5 (a whole number or a section is also allowed)",
        ),
        (
            "[checkpoint]\nupload = ['s3://bucket/a', 'bad']",
            "checkpoint.upload.1: 'bad' is not a valid upload target; use s3://bucket/prefix or "
            "hub:user/name[/folder][@branch]",
        ),
        (
            "[checkpoint]\nupload = ['']",
            "checkpoint.upload.0: '' is not a valid upload target; use s3://bucket/prefix or "
            "hub:user/name[/folder][@branch]",
        ),
        (
            "[[checkpoint.upload]]\nto = ''",
            "checkpoint.upload.0.to: '' is not a valid upload target; use s3://bucket/prefix or "
            "hub:user/name[/folder][@branch]",
        ),
        (
            "[[checkpoint.upload]]\nto = 's3://bucket'\ninclude = []",
            "checkpoint.upload.0.include: [] is too short: the minimum length is 1; extend it, or remove the key",
        ),
        (
            "[data]\nbalance = ' '",
            "data.balance: must be \"answer\" or the name of a field in the rows; got ' '",
        ),
        (
            "[data]\nvalidation = true",
            "data.validation: must be a fraction or a number of rows, such as 0.1; got True",
        ),
        ("[lora]\nrank = 65537", "lora.rank: must be at most 65536; got 65537"),
        ("[optim]\nmin_lr_share = 2", "optim.min_lr_share: must be at most 1; got 2"),
        (
            "[train]\nglobal_batch_size = 'many'",
            "train.global_batch_size: must be a whole number; got 'many' (the default is 32)",
        ),
        ("[train]\nseed = 1.5", "train.seed: must be a whole number; got 1.5 (the default is 0)"),
        ("[data]\nshuffle = 'maybe'", "data.shuffle: must be true or false; got 'maybe' (the default is True)"),
        ("[model]\npath = 3", "model.path: must be a string; got 3 (the default is 'tiny:qwen2_5_vl')"),
        ("[model]\nfreeze = 'visual'", "model.freeze: must be a list; got 'visual'"),
        ("train = 3", "train: must be a section; got 3"),
        (
            "[data]\nvalidation = 'x'",
            "data.validation: must be a number or a whole number or a section; got 'x' (the default is 0)",
        ),
        ("[data.validation]\nlimit = 0", "data.validation.limit: must be at least 1; got 0"),
        ("[data]\nsplit = 1", "data.split: must be a string or a list; got 1 (the default is 'train')"),
        (
            "[optim]\nschedule = 'cosin'",
            "optim.schedule: must be one of constant, linear, cosine, sqrt, wsd; got 'cosin'; did you mean cosine?",
        ),
        ("[train]\nprecision = 'int8'", "train.precision: must be one of bf16, fp32; got 'int8'"),
        (
            "[checkpoint]\nmax_shard_size = '4'",
            "checkpoint.max_shard_size: must have the form of '4GB'; got '4'",
        ),
        (
            "[data.vision]\nfps = 2\nnframes = 4",
            "data.vision: fps (2.0) and nframes (4) are mutually exclusive; remove one",
        ),
        (
            "[train]\nmicro_batch_size = 2\nmax_tokens_per_micro_batch = 100",
            "train: micro_batch_size (2) and max_tokens_per_micro_batch (100) are mutually exclusive; remove one",
        ),
        (
            "[model]\nfreeze = ['(a']",
            "model.freeze: '(a' is not a valid regular expression "
            "(missing ), unterminated subpattern at position 0); correct it",
        ),
    ],
)
def test_wrong_value_error_shows_bound_and_remedy(text: str, message: str) -> None:
    assert errors(text) == [f"run.toml: {message}"]


def test_cross_section_error_names_the_file() -> None:
    text = "[checkpoint]\nbest_metric = 'val/accuracy'\n[validation]\ngenerate = false"
    assert errors(text) == [
        "run.toml: checkpoint.best_metric (val/accuracy) requires generated answers; set validation.generate = true"
    ]


def test_conflict_names_both_file_and_override() -> None:
    result = errors("[train]\nmicro_batch_size = 2", "train.max_tokens_per_micro_batch=100")
    assert result[0].startswith(
        "run.toml and --set train.max_tokens_per_micro_batch=100: train: micro_batch_size (2) and"
    )


def test_all_config_problems_are_reported_at_once() -> None:
    Path("run.toml").write_text("[optim]\nlr = 0\nlrr = 1\n[modle]\npath = 'x'\n[data.vision]\nfps = 2\nnframes = 3")
    with pytest.raises(ConfigError) as caught:
        load_config(SFTConfig, Path("run.toml"), ["train.seed=x"], default_recipe=RECIPE)
    assert caught.value.exit_code == 2
    assert str(caught.value).splitlines() == [
        "5 problems in the configuration",
        "  run.toml: optim.lrr: unknown key; did you mean optim.lr?",
        "  run.toml: modle: unknown key; did you mean model?",
        "  run.toml: optim.lr: must be greater than 0; got 0",
        "  --set train.seed=x: train.seed: must be a whole number; got 'x' (the default is 0)",
        "  run.toml: data.vision: fps (2.0) and nframes (3) are mutually exclusive; remove one",
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "run.toml",
            "[a\n",
            "run.toml is not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 3)",
        ),
        ("run.json", '{"a": 1,\n"b": }', "run.json: line 2 is not valid JSON: Expecting value"),
        ("run.yaml", "a: 1\nb: [", "run.yaml: line 2 is not valid YAML"),
        ("run.json", "[1]", "run.json: the file must consist of sections with keys; got a list"),
        ("run.yaml", "train: {seed: 1}\ntrain: {seed: 2}", "run.yaml: line 2 is not valid YAML: duplicate key 'train'"),
        (
            "run.json",
            '{"train": {"seed": 1, "seed": 2}}',
            "run.json: duplicate keys in the same section: seed; keep one of each",
        ),
        ("run.ini", "", "run.ini: unknown file type '.ini'; use .toml, .yaml or .json"),
    ],
)
def test_unparsable_file_is_reported_with_line(name: str, text: str, message: str) -> None:
    assert errors(text, name=name)[0].startswith(message)


def test_binary_configuration_file_is_rejected() -> None:
    Path("run.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"run\.toml cannot be read: .*; choose a readable text file"):
        load_config(SFTConfig, Path("run.toml"), default_recipe=RECIPE)


def test_missing_file_is_reported_with_path() -> None:
    with pytest.raises(ConfigError, match=r"configs/run\.toml does not exist; correct the path"):
        load_config(SFTConfig, Path("configs/run.toml"), default_recipe=RECIPE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '[model]\nfreeze = ["visual"]\n[data]\npath = "a"\nvalidation = 0.1\n[data.vision]\nfps = 2',
        '[[data.sources]]\npath = "a"\nweight = 2\n[data]\nworkers = 0\n[data.validation]\npath = "v"',
    ],
)
def test_dumped_config_loads_as_equal_config(text: str) -> None:
    config = load(text)
    document = json.dumps(dump_config(config))
    assert load(document, name="config.json") == config


def test_relative_paths_stay_relative() -> None:
    assert load('[data]\npath = "videos/a.json"').data.path == "videos/a.json"


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (GRPOConfig, {"grpo": {"kl_coef": 0.0}, "reward": {"functions": {"format": 1.0}}}),
        (GRPOConfig, {"grpo": {"dynamic_sampling": False}, "reward": {"functions": {"format": 1.0}}}),
        (DPOConfig, {"dpo": {"loss_weights": {"ipo": 0.5, "hinge": 0.5}}}),
    ],
)
def test_dump_with_exclusive_keys_can_be_reloaded(schema: type[RunConfig], values: dict[str, Any]) -> None:
    written = dump_config(read_values(schema, values, "a.toml"))
    assert dump_config(read_values(schema, written, "written.toml")) == written
