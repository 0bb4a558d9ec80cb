"""The masking of secrets in logs and in every configuration file that is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from dsreason.cli.reward.serve import read_token
from dsreason.config.load import dump_config, read_values
from dsreason.config.output import check_output_dir, write_run_config
from dsreason.config.schema import SFTConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError
from dsreason.evaluation.ask.server import read_key
from dsreason.secret_names import is_secret_name
from dsreason.secrets import hide_in_json, hide_secrets, iter_masked_keys


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


SECRETS = """
api_key apikey API-Key apiKey APIKey X-Api-Key x.api.key Ocp-Apim-Subscription-Key api_key_2 API_KEY_PROD AZURE_STORAGE_KEY
access_key accessKey AWSAccessKeyId AWS_ACCESS_KEY_ID private_key ssh-key AccountKey SharedAccessKey openai_key kms.key
token hf_token HF_TOKEN_READ authToken authtoken sas_token X-Amz-Security-Token per_user_token
api_keys access_tokens passwords auth_header
password db_passwd PGPASSWORD passphrase pwd userPwd DB_PWD pw db.pw smtp_pass password_base64 password_b64 dbpass userpass
secret client.secret clientsecret secrets credential credentials X-Amz-Credential creds
auth basic_auth OAuth oauth2 Authorization Proxy-Authorization bearer cookie Set-Cookie cookies login_session PHPSESSID
session_id session.key sas sig api_signature X-Amz-Signature sharedaccesssignature dsn SENTRY_DSN jwt otp
connection_string ConnectionString connection-string AZURE_STORAGE_CONNECTION_STRING conn_str slack_webhook SLACK_WEBHOOK_URL
GITHUB_PAT hf_pat API_KEY_V2 api_token_v2 private_key_pem credentials_json service_account_json token_string secret_text
secret_id api_key_str masterkey signingkey encryptionkey deploykey licensekey githubtoken usertoken mytoken hmac jwks
sas_url presigned_url auth_code access_code api_key_b64
"""
AMBIGUOUS = ["session", "signature", "pass", "key", "GH_TOKENS", "openai_keys"]
HARMLESS = """
tokenizer tokenizers max_tokens token_count max_completion_length tokens eos_token pad_token image_token cost_per_token
key keys key_frames keyframes keyword keyboard monkey num_key_value_heads score_key image_key answerKey primary_key
author authors authority pass_rate forward_pass passworded passed compass secretary signatures_file session_timeout
api_key_env token_env api_key_variable password_file auth_type cookie_policy design sign assign dsnoop sass judge.py:token
gold_key reward_fn_key my_fn_key problem_key solution_key options_key images_key videos_key target_key object_key call_token
assistant_token mean_token tests_pass function_signature session signature pass turkey bypass compass hotkey eostoken subtoken
token_file password_policy pattern path token_text_file
"""


@pytest.mark.parametrize(
    ("names", "secret"), [(SECRETS.split(), True), (HARMLESS.split(), False)], ids=["secret", "harmless"]
)
def test_name_decides_whether_value_is_secret(names: list[str], secret: bool) -> None:
    assert [name for name in names if is_secret_name(name) != secret] == []


@pytest.mark.parametrize("name", SECRETS.split())
def test_secret_is_hidden_in_every_form(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Check that one rule covers configurations, headers, URLs, JSON, Python and the environment."""
    assert "planted" not in json.dumps(
        hide_in_json({"a": [{name: "planted-1"}], "b": {"name": name, "value": "planted-2"}})
    )
    forms = ('{{"{}": "planted-1"}}', "{{'{}': 'planted-1'}}", "https://a/x?{}=planted-1", "--set a.{}=planted-1")
    texts = [form.format(name) for form in (*forms, "f({}='planted-1')", '{} = "planted-1"', '{}: "planted-1"')]
    assert [text for text in map(hide_secrets, [*texts, *map(json.dumps, texts)]) if "planted" in text] == []
    if name.replace("_", "").isalnum():
        monkeypatch.setenv(name, "planted-value")
        assert hide_secrets("got planted-value") == f"got <{name}>"


@pytest.mark.parametrize("name", HARMLESS.split())
def test_harmless_value_is_not_hidden(name: str) -> None:
    texts = [form.format(name) for form in ("{{'{}': 'visible'}}", "--set {}=visible", "f({}='visible')")]
    assert [hide_secrets(text) for text in texts if ":" not in name] == [text for text in texts if ":" not in name]
    assert hide_in_json({name: "visible"}) == {name: "visible"}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_name_is_secret_only_outside(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Check that it counts in variables, headers and URLs, but not in the configuration."""
    assert not is_secret_name(name)
    assert hide_in_json({name: "planted-1", "headers": [{name: "planted-2"}]}) == {
        name: "planted-1",
        "headers": [{name: "…"}],
    }
    assert hide_secrets(f"https://a/x?{name}=planted-1") == f"https://a/x?{name}=…"
    monkeypatch.setenv(name, "planted-value")
    assert hide_secrets("got planted-value") == f"got <{name}>"


@pytest.mark.parametrize(
    ("name", "hidden"), [("s3_key", False), ("auth", False), ("password", True), ("api_key", True)]
)
def test_plain_word_is_hidden_elsewhere_if_clearly_secret(name: str, hidden: bool) -> None:
    """Check that a column's name is not replaced in all output because its key may be secret."""
    options = {"judge.py:f": {name: "ground_truth"}}
    read_values(GRPOConfig, {"reward": {"functions": {"judge.py:f": 1.0}, "options": options}}, "run.toml")
    text = "field ground_truth is missing; tests: pass=30"
    assert (hide_secrets(text) != text) == hidden


@pytest.mark.parametrize(
    ("items", "shown"),
    [
        (["--password", "short", "--token", 123], ["--password", "…", "--token", "…"]),
        (["--api-key", "--verbose", "x"], ["--api-key", "--verbose", "x"]),
        (["--max-tokens", "512", "--session", "a"], ["--max-tokens", "512", "--session", "a"]),
    ],
)
def test_option_in_command_line_hides_next_item(items: list[Any], shown: list[Any]) -> None:
    assert hide_in_json({"args": items}) == {"args": shown}
    masked = [f"args.{number}" for number, item in enumerate(shown) if item == "…"]
    assert [*iter_masked_keys({"args": shown})] == masked


@pytest.mark.parametrize(
    "token",
    [
        "xoxb-123456789012-abcdefghijklmn",
        "glpat-abcdefghijklmnopqrst",
        "AIzaSyA1234567890abcdefghijklmnopqrstuv",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcdefghijk",
        "ASIAABCDEFGHIJKLMNOP",
        "sk_live_abcdefghijklmnop1234",
        "nvapi-abcdefghijklmnopqrstuvwxyz",
    ],
)
def test_key_is_recognized_by_its_format(token: str) -> None:
    shown = hide_secrets(f"got {token}.")
    assert shown.endswith("….")
    assert token[-10:] not in shown
    assert [*iter_masked_keys({"a": shown})] == ["a"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("X-Api-Key: sentinel, n", "X-Api-Key: …, n"),
        ("Cookie: a=sentinel; b=sentinel", "Cookie: …"),
        ("Proxy-Authorization: Basic sentinel", "Proxy-Authorization: Basic …"),
        ("Authorization=Bearer sentinel", "Authorization=Bearer …"),
        ("AccountName=a;AccountKey=sentinel==", "AccountName=a;AccountKey=…"),
        ("{'pin_pw': 123456}", "{'pin_pw': …}"),
        (r"'{\"pwd\": \"sen\\\"tinel\"}'", r"'{\"pwd\": \"…\"}'"),
        ("password='it\\'s sentinel', n", "password='…', n"),
        ("password='sentinel", "password='…"),
        ("pwd: wrong, cookie: none, session: 3", "pwd: wrong, cookie: …"),
        ("https://sentinel@host/a", "https://…@host/a"),
        ("-----BEGIN PRIVATE KEY-----\nsentinel\n-----END", "-----BEGIN PRIVATE KEY-----…-----END"),
        (f"the bearer {'sentinel' * 3}.", "the bearer …"),
        ("{'token': 0.5, 'session': 12}", "{'token': 0.5, 'session': 12}"),
        ("sorted(rows, key=sentinel)", "sorted(rows, key=sentinel)"),
        ("password: sentinel22\napi_key: 'sentinel'", "password: …\napi_key: '…'"),
        ("run --password sentinel22 --token 'sentinel22' now", "run --password … --token '…' now"),
        ("pass --token to it; unexpected token: step_00001", "pass --token to it; unexpected token: step_00001"),
        ("['--password', 'sentinel22'], ('password', \"sentinel22\")", "['--password', '…'], ('password', \"…\")"),
        ("'password', 'username' or 'session', 'state_0001'", "'password', 'username' or 'session', 'state_0001'"),
        ('{"X-Api-Key": ["sentinel", "sentinel"], "n": [1]}', '{"X-Api-Key": […], "n": [1]}'),
        ("Authorization: AWS4 Credential=sentinel, Signature=sentinel\nn=1", "Authorization: …\nn=1"),
        ("MY_PASS=sentinel, tests: pass=30, session=default", "MY_PASS=…, tests: pass=30, session=default"),
        ("no route to me:sen/ti:nel@proxy:3128", "no route to …@proxy:3128"),
        ("https_proxy=me:sentinel@proxy:3128.", "https_proxy=…@proxy:3128."),
        ("registry/image:tag@sha256:0123abcd, a:b@c", "registry/image:tag@sha256:0123abcd, a:b@c"),
    ],
)
def test_secret_is_hidden_in_unusual_text(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown
    assert hide_secrets(shown) == shown


def test_variable_named_by_configuration_is_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOO", "planted-value")
    monkeypatch.setenv("BAR", "/planted-other")
    monkeypatch.setenv("BAZ", "planted-third")
    monkeypatch.setenv("QUX", "visible")
    options = {
        "judge.py:f": {"token_env": "FOO", "apiKeyVariable": "BAR", "key_from_env": "BAZ", "image_key_env": "QUX"}
    }
    read_values(GRPOConfig, {"reward": {"functions": {"judge.py:f": 1.0}, "options": options}}, "run.toml")
    text = "got planted-value, /planted-other, planted-third, visible"
    assert hide_secrets(text) == "got <FOO>, <BAR>, <BAZ>, visible"
    assert [*iter_masked_keys({"a": hide_in_json("planted-value")})] == ["a"]


@pytest.mark.parametrize("read", [read_key, read_token])
def test_variable_that_is_read_is_secret(monkeypatch: pytest.MonkeyPatch, read: Callable[[str], object]) -> None:
    monkeypatch.setenv("FOO", "planted-value")
    assert read("FOO") == "planted-value"
    assert hide_secrets("got planted-value") == "got <FOO>"


def test_secret_option_values_are_masked_in_free_text() -> None:
    options = {"judge.py:f": {"pwd": "planted-1", "server": {"cookies": ["planted-2", 12345678]}, "field": "answer"}}
    values = {"reward": {"functions": {"judge.py:f": 1.0}, "options": options}}
    read_values(GRPOConfig, values, "run.toml", ["reward.remote.url=http://h"])
    text = hide_secrets("no login with planted-1, planted-2, 12345678 or answer")
    assert "planted" not in text
    assert "12345678" not in text
    assert text.endswith("or answer")


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
    assert not [name for name in result if is_secret_name(name)]


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
def test_run_with_masked_values_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str) -> None:
    """Check that a run with masked values can be resumed, even if its older record contains values that are masked now."""
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


@pytest.mark.parametrize(
    "part", ["https://", "a:b@", "://a:", "token='", "?key=", "api_key_", "=a:", "--a ", "'a', ", "a.eyJ"]
)
def test_long_hostile_text_is_scanned_quickly(part: str) -> None:
    """Require linear time: a pattern that scans the rest of the text from every position would take minutes."""
    long = part * (200_000 // len(part))
    assert "sentinel" not in hide_in_json(f"{long} api_key=sentinel")
    assert [*iter_masked_keys(f"{long} api_key=…")] == [""]
