"""Masking of secrets in logs and in every configuration that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from dsreason.config.load import dump_config
from dsreason.config.output import check_output_dir, write_run_config
from dsreason.config.schema import SFTConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError
from dsreason.secrets import hide_in_json, hide_secrets, is_secret_key, iter_masked_keys


def judged(**reward: Any) -> GRPOConfig:
    return GRPOConfig.model_validate({"reward": {"functions": {"judge.py:f": 1.0}, **reward}})


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("ANTHROPIC_API_KEY", True),
        ("AZURE_STORAGE_KEY", True),
        ("AZURE_CLIENT_SECRET", True),
        ("AZURE_STORAGE_CONNECTION_STRING", True),
        ("VLLM_API_KEY", True),
        ("my_token", True),
        ("PGPASSWORD", True),
        ("TOKEN", True),
        ("KEYBOARD", False),
        ("MONKEY", False),
        ("TOKENIZERS_PARALLELISM", False),
    ],
)
def test_secret_variable_value_is_hidden(monkeypatch: pytest.MonkeyPatch, name: str, shown: bool) -> None:
    monkeypatch.setenv(name, "sentinel")
    assert hide_secrets("with sentinel in it") == (f"with <{name}> in it" if shown else "with sentinel in it")


def test_key_set_later_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hide_secrets("with sentinel in it") == "with sentinel in it"
    monkeypatch.setenv("OPENAI_API_KEY", "sentinel")
    assert hide_secrets("with sentinel in it") == "with <OPENAI_API_KEY> in it"


@pytest.mark.parametrize("value", ["1", "true", "disable", "/etc/keys/mine.pem"])
def test_plain_word_or_path_is_not_hidden(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MY_KEY", value)
    assert hide_secrets(f"it is {value}") == f"it is {value}"


def test_longer_secret_with_shared_prefix_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "sentinel")
    monkeypatch.setenv("B_KEY", "sentinel-longer")
    assert hide_secrets("sentinel-longer, sentinel") == "<B_KEY>, <A_KEY>"


@pytest.mark.parametrize("written", ["sen/ti+nel", "sen%2Fti%2Bnel"])
def test_secret_is_hidden_plain_and_url_quoted(monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.setenv("A_KEY", "sen/ti+nel")
    assert hide_secrets(f"with {written} in it") == "with <A_KEY> in it"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://a.blob/x?sv=2024&sig=Ab%2F1%3D&se=9", "https://a.blob/x?sv=2024&sig=…&se=9"),
        ("GET https://a/x?token=sentinel&n=1 failed", "GET https://a/x?token=…&n=1 failed"),
        ("https://a/x?key=sentinel", "https://a/x?key=…"),
        ("https://a/x?access_token=sentinel#top", "https://a/x?access_token=…"),
        ("Authorization: Bearer sentinel\n", "Authorization: Bearer …\n"),
        ("authorization: basic c2VudGluZWw=", "authorization: basic …"),
        ("{'Authorization': 'Bearer sentinel', 'n': 1}", "{'Authorization': '…', 'n': 1}"),
        ("sent b'authorization: Bearer sentinel'", "sent b'authorization: Bearer …'"),
        ('--set reward.options."judge.py:f".api_key=sk-sentinel', '--set reward.options."judge.py:f".api_key=…'),
        ("--set 'reward.options={a={api_key=\"sk-sentinel\"}}'", "--set 'reward.options={a={api_key=\"…\"}}'"),
        ("input_value={'api_key': 'sk-sentinel'}", "input_value={'api_key': '…'}"),
        ("server.url (http://h/v1?api-key=sentinel): none", "server.url (http://h/v1?api-key=…): none"),
        ("judge.api_key=sk-sentinel, that", "judge.api_key=…, that"),
        ("Judge(password='sentinel', n=1)", "Judge(password='…', n=1)"),
        ("max_tokens=5, token_count=7, token: wrong, sign=1", "max_tokens=5, token_count=7, token: wrong, sign=1"),
        ("eos_token='<|im_end|>'", "eos_token='<|im_end|>'"),
        ("Bearer of news", "Bearer of news"),
        ("https://a/x?design=1&monkey=2", "https://a/x?design=1&monkey=2"),
    ],
)
def test_secrets_are_hidden_by_surrounding_names(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown
    assert hide_secrets(shown) == shown
    assert [*iter_masked_keys(text)] == []
    assert [*iter_masked_keys({"a": [shown]})] == ([] if text == shown else ["a.0"])


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        *[(key, True) for key in ("api_key", "apikey", "API-Key", "token", "hf_token", "client.secret", "x-api-key")],
        *[(key, True) for key in ("password", "db_passwd", "credential", "credentials", "Authorization", "access_key")],
        *[(key, False) for key in ("max_tokens", "token_count", "max_completion_length", "api_key_env", "passworded")],
        *[(key, False) for key in ("judge.py:token", "keys", "monkey", "secretary", "")],
    ],
)
def test_key_ending_in_secret_word_is_secret(key: str, secret: bool) -> None:
    assert is_secret_key(key) == secret


def test_secrets_in_nested_reward_options_are_masked() -> None:
    options = {
        "api_key": "sk-sentinel",
        "max_tokens": 5,
        "server": {"headers": [{"Authorization": "Bearer sentinel"}], "credential": {"a": "sentinel"}},
        "password": 123456,
        "token": None,
        "secret": True,
    }
    config = judged(options={"judge.py:f": options})
    dumped = dump_config(config)
    assert dumped["reward"]["options"]["judge.py:f"] == {
        "api_key": "…",
        "max_tokens": 5,
        "server": {"headers": [{"Authorization": "…"}], "credential": "…"},
        "password": "…",
        "token": None,
        "secret": True,
    }
    assert config.reward.options["judge.py:f"]["api_key"] == "sk-sentinel"
    below = ("api_key", "server.headers.0.Authorization", "server.credential", "password")
    assert [*iter_masked_keys(dumped)] == [f"reward.options.judge.py:f.{key}" for key in below]
    assert [*iter_masked_keys(config.model_dump(mode="json"))] == []
    assert GRPOConfig.model_validate(dumped).reward.functions == config.reward.functions


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://judge/score?api_key=sentinel", "https://judge/score?…"),
        ("https://judge/score?k=sentinel&model=x#y", "https://judge/score?…"),
        ("https://judge/score", "https://judge/score"),
    ],
)
def test_reward_url_query_is_used_but_masked(url: str, shown: str) -> None:
    config = judged(remote={"url": url}, options={"judge.py:f": {"server": url}})
    reward = dump_config(config)["reward"]
    assert reward["remote"]["url"] == reward["options"]["judge.py:f"]["server"] == shown
    assert config.reward.remote.url == url
    assert len([*iter_masked_keys(reward)]) == (0 if url == shown else 2)


@pytest.mark.parametrize("text", ["s3://user:sentinel@bucket", "with sentinel in it", f"hf_{'a' * 30}"])
def test_masked_values_are_recognized(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("A_KEY", "sentinel")
    assert [*iter_masked_keys({"a": text})] == []
    assert [*iter_masked_keys({"a": hide_in_json(text)})] == ["a"]


@pytest.mark.parametrize("text", ["…", "and so on…", "what is it?…", "a <BIG_KEY> here", "x=…"])
def test_other_ellipses_do_not_count_as_masks(text: str) -> None:
    assert [*iter_masked_keys({"prompt": text})] == []


@pytest.mark.parametrize("schema", [SFTConfig, GRPOConfig, EvalConfig])
def test_schema_keys_are_not_secret(schema: type[BaseModel]) -> None:
    def names(document: Any) -> list[str]:
        return [*document.get("properties", {}), *sum(map(names, document.get("$defs", {}).values()), [])]

    result = names(schema.model_json_schema())
    assert "max_length" in result
    assert not [name for name in result if is_secret_key(name)]


def test_recorded_command_line_hides_secrets(tmp_path: Path) -> None:
    command = [
        "--set",
        'reward.options."judge.py:f".api_key=sentinel',
        "--set",
        "reward.remote.url=https://a/x?k=sentinel",
    ]
    write_run_config(tmp_path, judged(), {"command": command})
    assert "sentinel" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("prompt", ["Look at https://a/b?c=1", "Say token=abc", "My name is sentinel"])
def test_a_run_with_masked_values_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str) -> None:
    """Check that a run with masked values can be resumed, even if its record has values that this version masks."""
    options = {"judge.py:f": {"api_key": "sk-sentinel"}}
    config = judged(options=options, remote={"url": "https://judge/score?k=1"})
    config = config.model_copy(update={"data": config.data.model_copy(update={"system_prompt": prompt})})
    write_run_config(tmp_path, config, {})
    check_output_dir(tmp_path, config, "auto")
    (tmp_path / "config.json").write_text(json.dumps({"config": config.model_dump(mode="json")}))
    monkeypatch.setenv("MY_TOKEN", "sentinel")
    check_output_dir(tmp_path, config, "auto")
    other = config.model_copy(update={"data": config.data.model_copy(update={"system_prompt": "Another"})})
    with pytest.raises(ConfigError, match=r"data\.system_prompt"):
        check_output_dir(tmp_path, other, "auto")


@pytest.mark.parametrize("part", ["https://", "a:b@", "://a:", "token='", "?key=", "api_key_"])
def test_long_hostile_text_is_scanned_quickly(part: str) -> None:
    """Check for linear time; a pattern that scans the rest of the text from every position would take minutes."""
    long = part * (200_000 // len(part))
    assert "sentinel" not in hide_in_json(f"{long} api_key=sentinel")
    assert [*iter_masked_keys(f"{long} api_key=…")] == [""]
