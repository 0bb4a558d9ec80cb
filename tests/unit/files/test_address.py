"""Storage addresses, and the secrets in them that are masked."""

from __future__ import annotations

import pytest

from dsreason.config.load import load_config
from dsreason.config.schema import SFTConfig
from dsreason.config.schema_checkpoint import CheckpointConfig
from dsreason.config.schema_data import SourceConfig
from dsreason.data.sources import open_source
from dsreason.errors import ConfigError, DataError
from dsreason.files.address import HubAddress, S3Address, UploadAddress, parse_s3, parse_target
from dsreason.secrets import hide_in_json, hide_secrets, mask_credentials


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", S3Address("bucket", "")),
        ("s3://bucket/", S3Address("bucket", "")),
        ("s3://my.bucket-1/a/b c/", S3Address("my.bucket-1", "a/b c")),
        ("hub:user/name", HubAddress("user/name")),
        ("hub:user/name@v1.2", HubAddress("user/name", "", "v1.2")),
        ("hub:user/name/runs/7@try/two", HubAddress("user/name", "runs/7", "try/two")),
    ],
)
def test_target_round_trips_through_text(text: str, expected: UploadAddress) -> None:
    assert parse_target(text) == expected
    assert str(expected) == text.rstrip("/")


def test_names_are_appended_to_address() -> None:
    assert str(S3Address("bucket") / "checkpoints/step_4") == "s3://bucket/checkpoints/step_4"
    assert str(S3Address("bucket", "runs") / "a") == "s3://bucket/runs/a"
    assert str(HubAddress("user/name", "", "dev") / "a") == "hub:user/name/a@dev"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://", "is not a valid bucket name"),
        ("s3://My_Bucket/a", "'My_Bucket' is not a valid bucket name"),
        ("s3://bucket/a//b", "must not contain '.', '..' or an empty component"),
        ("s3://bucket/../other", "must not contain '.', '..' or an empty component"),
        ("s3://bucket/a?versionId=1", "has no query"),
        ("hub:name", "use s3://bucket/prefix or hub:user/name"),
        ("hub:user/name/../other", "must not contain '.', '..' or an empty component"),
        ("user/name", "use s3://bucket/prefix or hub:user/name"),
        ("https://bucket/a", "use s3://bucket/prefix or hub:user/name"),
        ("gs://bucket/a", "use s3://bucket/prefix or hub:user/name"),
    ],
)
def test_invalid_target_error_explains_expected_form(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is looked at)
        parse_target(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIAKEY:sentinel@bucket/a",
        "s3://AKIAKEY:senti/nel@bucket/a",
        "https://user:sentinel@host/a",
        "hub:hf_sentinel/name",
        "hub:user/name@hf_sentinel",
        "hub:hf_sentinel@user/name",
    ],
)
def test_keys_in_target_are_rejected_and_hidden(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_target(text)
    assert "sentinel" not in str(caught.value)
    assert "senti/nel" not in str(caught.value)


def test_keys_in_s3_uri_rejected_and_hidden() -> None:
    with pytest.raises(ValueError, match="an S3 URI must not contain keys") as caught:
        parse_s3("s3://AKIAKEY:sentinel@bucket/a")
    assert "sentinel" not in str(caught.value)


def test_environment_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a/b+cd")
    expected = "Bearer <HF_TOKEN>, <AWS_SECRET_ACCESS_KEY>, ?key=<AWS_SECRET_ACCESS_KEY>"
    assert hide_secrets("Bearer hf_abc, a/b+cd, ?key=a%2Fb%2Bcd") == expected


@pytest.mark.parametrize("name", ["REMOTE_REWARD_TOKEN", "WFM_REWARD_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"])
def test_tokens_are_hidden_in_lists_and_tables(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "sentinel")
    assert hide_in_json({"a": ["--set", "b=sentinel"], "n": 1}) == {"a": ["--set", f"b=<{name}>"], "n": 1}


def test_common_value_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    assert hide_secrets("/data/tests") == "/data/tests"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("with hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ012345 in it", "with hf_… in it"),
        (
            "https://s3/x?X-Amz-Credential=AK%2F1&X-Amz-Signature=0a1b&n=1",
            "https://s3/x?X-Amz-Credential=…&X-Amz-Signature=…&n=1",
        ),
        ("hf_home and Signatures", "hf_home and Signatures"),
    ],
)
def test_secrets_in_known_formats_are_hidden(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--set a=http://me:pass/word@host/x", "--set a=http://…@host/x"),
        ("http://localhost:8000/v1 of a@b", "http://localhost:8000/v1 of a@b"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_only_credentials_are_hidden_in_urls(text: str, shown: str) -> None:
    assert mask_credentials(text) == shown


def test_config_checks_upload_targets() -> None:
    assert CheckpointConfig(upload="s3://bucket/run/").upload == "s3://bucket/run"
    with pytest.raises(ValueError, match="is not a valid upload target"):
        CheckpointConfig(upload="bucket/run/x")
    with pytest.raises(ValueError, match="export = none.* selects nothing to upload"):
        CheckpointConfig(upload="s3://bucket", upload_include=("export",), export="none")
    with pytest.raises(ValueError, match="s3://bucket/run more than once"):
        CheckpointConfig(upload=("s3://bucket/run", "s3://bucket/run/"))
    with pytest.raises(ValueError, match="hub:me/m@main more than once"):
        CheckpointConfig(upload=("hub:me/m", "hub:me/m@main"))
    assert len(CheckpointConfig(upload=("hub:me/m", "hub:me/m@new", "hub:me/m/folder")).targets) == 3


def targets_of(upload: object, **settings: object) -> list[tuple[str, str, tuple[str, ...]]]:
    config = CheckpointConfig.model_validate({"upload": upload, **settings})
    return [(str(target.address), target.what, target.include) for target in config.targets]


@pytest.mark.parametrize(
    ("upload", "settings", "expected"),
    [
        ("", {}, []),
        ("s3://b-1/x", {}, [("s3://b-1/x", "final", ("export", "checkpoint"))]),
        ("hub:me/m", {"upload_what": "all"}, [("hub:me/m", "all", ("export",))]),
        ({"to": "hub:me/m", "what": "all"}, {}, [("hub:me/m", "all", ("export",))]),
        ("hub:me/m", {"upload_include": ["checkpoint"]}, [("hub:me/m", "final", ("checkpoint",))]),
        (
            ["s3://b-1/x", {"to": "hub:me/m@new", "include": ["export", "logs"]}],
            {"upload_what": "all"},
            [("s3://b-1/x", "all", ("export", "checkpoint")), ("hub:me/m@new", "all", ("export", "logs"))],
        ),
        (
            [{"to": "s3://b-1/x", "what": "all"}, {"to": "s3://b-2", "include": ["logs"]}],
            {"upload_include": ["checkpoint"], "export": "none"},
            [("s3://b-1/x", "all", ("checkpoint",)), ("s3://b-2", "final", ("logs",))],
        ),
    ],
)
def test_target_settings_override_common_ones_and_defaults(
    upload: object, settings: dict[str, object], expected: list[tuple[str, str, tuple[str, ...]]]
) -> None:
    assert targets_of(upload, **settings) == expected


@pytest.mark.parametrize(
    ("settings", "saves"),
    [
        ({}, True),
        ({"every": 0}, True),
        ({"every": 0, "last": False}, True),  # the best checkpoint is saved
        ({"every": 9, "last": False, "keep_best": False}, True),
        ({"every": 0, "last": False, "keep_best": False}, False),
    ],
)
def test_config_saves_unless_every_checkpoint_is_disabled(settings: dict[str, object], saves: bool) -> None:
    assert CheckpointConfig.model_validate(settings).saves is saves


def test_upload_of_unwritten_checkpoints_is_rejected() -> None:
    none = {"every": 0, "last": False, "keep_best": False, "upload_include": ["checkpoint"]}
    with pytest.raises(ValueError, match="selects nothing to upload"):
        targets_of("s3://bucket", **none)
    assert targets_of("s3://bucket", **none | {"every": 5, "upload_what": "all"})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("upload=['s3://bucket/a', 'bucket/b']", "checkpoint.upload.1: 'bucket/b' is not a valid upload target"),
        ("upload=[{to = 's3://bucket/a', inclde = ['logs']}]", "did you mean checkpoint.upload.0.include?"),
        ("upload=[{to = 's3://bucket/a', include = ['log']}]", "did you mean logs?"),
        ("upload=[{what = 'all'}]", "checkpoint.upload.0: {'what': 'all'} has no 'to'; add it"),
        ("upload={what = 'all'}", "checkpoint.upload: {'what': 'all'} has no 'to'; add it"),
        ("upload={to = 'bucket/b'}", "checkpoint.upload.to: 'bucket/b' is not a valid upload target"),
        ("upload=[{to = ''}]", "checkpoint.upload.0.to"),
        ("export_keep=0", "checkpoint.export_keep: 0 would delete each folder as soon as it is written"),
    ],
)
def test_wrong_target_error_names_its_key(option: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SFTConfig, None, [f"checkpoint.{option}"], default_recipe="builtin_sft.toml")
    assert message in str(caught.value)


@pytest.mark.parametrize("where", ["s3://AKIAKEY:senti/nel@bucket", "https://me:sentinel@host/x"])
def test_rejected_set_option_hides_the_key(where: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint.upload: ") as caught:
        load_config(SFTConfig, None, [f"checkpoint.upload={where}"], default_recipe="builtin_sft.toml")
    assert "nel@" not in str(caught.value)


@pytest.mark.parametrize("key", ["path", "media_path"])
def test_data_url_outside_s3_is_rejected(key: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.{key}: https://…@host/x is a URL") as caught:
        open_source(SourceConfig(adapter="local_labels", **{key: "https://me:sentinel@host/x"}))
    assert "sentinel" not in str(caught.value)
