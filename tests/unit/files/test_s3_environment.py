"""Keys, endpoint and region for boto3, from AWS's environment variables or from those of cosmos-rl's recipes."""

from __future__ import annotations

from typing import Any

import pytest

from dsreason.errors import StorageError
from dsreason.files import s3

COSMOS = {
    "PROD_S3_CHECKPOINT_ACCESS_KEY_ID": "key",
    "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY": "secret",
    "PROD_S3_CHECKPOINT_ENDPOINT_URL": "https://store",
    "PROD_S3_CHECKPOINT_REGION_NAME": "here",
}
NAMES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
)
EMPTY = {name: "" for name in NAMES if name != "AWS_PROFILE"}  # boto3 itself looks for a profile called ""


@pytest.mark.parametrize(
    ("environment", "endpoint", "region", "keys"),
    [
        ({}, "", None, (None, None)),
        (COSMOS, "https://store", "here", ("key", "secret")),
        ({"AWS_ENDPOINT_URL": "https://own", **COSMOS}, "https://own", "here", ("key", "secret")),
        ({"AWS_ACCESS_KEY_ID": "own", **COSMOS}, "", None, (None, None)),
        ({"AWS_PROFILE": "own", "AWS_REGION": "there", **COSMOS}, "", "there", (None, None)),
        (EMPTY | COSMOS, "https://store", "here", ("key", "secret")),
        ({**COSMOS, "PROD_S3_CHECKPOINT_REGION_NAME": ""}, "https://store", None, ("key", "secret")),
    ],
)
def test_cosmos_variables_apply_without_aws_keys(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    endpoint: str,
    region: str | None,
    keys: tuple[str | None, str | None],
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    calls: list[Any] = []
    monkeypatch.setattr(s3, "_create_client", lambda process, *rest: calls.append(rest))
    s3.connect()
    assert calls == [(endpoint, region, s3.READ_LIMIT_S, *keys)]


def test_incomplete_key_pair_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PROD_S3_CHECKPOINT_ACCESS_KEY_ID", "key")
    with pytest.raises(StorageError, match="PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY is set; set both"):
        s3.connect()


@pytest.mark.parametrize(
    ("variable", "keys"),
    [
        ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (
            "PROD_S3_CHECKPOINT_ENDPOINT_URL",
            "PROD_S3_CHECKPOINT_ACCESS_KEY_ID and PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY",
        ),
    ],
)
def test_password_in_endpoint_url_is_rejected(monkeypatch: pytest.MonkeyPatch, variable: str, keys: str) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "https://user:hush@store")
    with pytest.raises(StorageError, match=rf"^{variable} contains a user name and a password; .* {keys}$") as raised:
        s3.connect()
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize("environment", [COSMOS, EMPTY | COSMOS])
def test_boto3_signs_with_cosmos_keys(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3._create_client.cache_clear()
    client = s3.connect()
    s3._create_client.cache_clear()
    assert client.meta.endpoint_url == "https://store"
    assert client.meta.region_name == "here"
    assert "Credential" in (url := client.generate_presigned_url("get_object", Params={"Bucket": "b", "Key": "k"})) or (
        "AWSAccessKeyId=key" in url
    )
    assert "key" in url
