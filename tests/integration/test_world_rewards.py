"""`dsreason reward-serve` as a process, and world-model data in S3 (moto's server), accessed with cosmos-rl's variables."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import torch
from moto.server import ThreadedMotoServer

from dsreason.errors import RewardError
from dsreason.files import remote, s3
from dsreason.world.data import open_world_data
from dsreason.world.data.builtin import Square, draw_clip
from dsreason.world.latents import LinearCodec
from dsreason.world.rewards.scorer import ClipScores, open_scorer
from dsreason.world.schema import WorldDataConfig, WorldRewardConfig
from dsreason.world.types import ClipSize, WorldRow
from tests.integration.command import COMMAND
from tests.unit.world.data.test_clips import SIZE, levels, pack, video

pytestmark = pytest.mark.integration

REWARDS = """
import os

from dsreason.world.rewards.pixels import brightness, follow

def length(clips, samples):
    return {"words": [len(s.prompt.split()) for s in samples], "fps": [s.meta["fps"] for s in samples]}

def broken(clips, samples):
    raise ValueError(f"no weights for {os.environ['SERVED_WITH']}: {{'Ocp-Apim-Subscription-Key': 'planted'}} pwd=planted")
"""
ROWS = [WorldRow("0", "a red square"), WorldRow("1", "a blue square moves")]
CLIPS = torch.stack(
    [draw_clip(Square(colour, "left", 1.0, 0.1, (0.5, 0.5)), ClipSize(9, 32, 32, 16.0)) for colour in ("red", "green")]
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LinearCodec]]:
    """Start the server; yield its URL up to `/api/reward/`, and the codec of its model folder."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "rewards.py").write_text(REWARDS)
    codec = LinearCodec.fit(CLIPS.float() / 127.5 - 1, channels=16)
    codec.save(folder / "model" / "vae")
    options = ("--port", "0", "--token-env", "SERVED_WITH", "--vae", "model")
    process = subprocess.Popen(
        [*COMMAND, "reward-serve", "rewards.py", *options],
        cwd=folder,
        env=os.environ | {"SERVED_WITH": "right-token"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(
        r"serving brightness, follow, length, broken at (http://\S+/api/reward/)enqueue and \S+pull\n", line
    )
    assert match, line
    yield match[1], codec
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def score(url: str, *scores: dict[str, Any], latents: torch.Tensor | None = None, **settings: Any) -> ClipScores:
    urls = {"enqueue_url": f"{url}enqueue", "fetch_url": f"{url}pull"}
    config = WorldRewardConfig.model_validate({"services": scores, "time_limit": 60, **urls, **settings})
    value = torch.zeros(2, 16, 3, 4, 4) if latents is None else latents
    with open_scorer(config) as scorer:
        return scorer.start(CLIPS, value, ROWS, 16.0).result()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("WFM_REWARD_TOKEN", "right-token")


def test_reward_file_scores_remote_pixels_and_latents(served: tuple[str, LinearCodec]) -> None:
    url, codec = served
    expected = (
        {"name": "follow", "score_key": "follow", "weight": 2.0},
        {"name": "length", "score_key": "words", "clip_max": 9},
    )
    scores = score(url, *expected)
    assert scores.by_name["follow/follow"].tolist() == pytest.approx([1, 0], abs=0.02)
    assert scores.by_name["length/words"].tolist() == [3, 4]
    assert scores.total.tolist() == pytest.approx([5, 4], abs=0.05)  # 2·1 + 3, and 0 + 4
    latents = codec.encode(CLIPS.float() / 127.5 - 1)
    sent = score(url, expected[0], latents=latents, media="latent")
    assert sent.by_name["follow/follow"].tolist() == pytest.approx([1, 0], abs=0.1)


def test_failing_function_error_includes_its_message(served: tuple[str, LinearCodec]) -> None:
    with pytest.raises(RewardError, match=r'"broken"(.|\n)*failed: ValueError: no weights') as error:
        score(served[0], {"name": "broken", "score_key": "broken"}, time_limit=2)
    assert "<SERVED_WITH>: {'Ocp-Apim-Subscription-Key': '…'} pwd=…" in str(error.value)
    assert "right-token" not in str(error.value)


def test_wrong_token_is_rejected_without_being_shown(
    served: tuple[str, LinearCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WFM_REWARD_TOKEN", "wrong-token")
    with pytest.raises(RewardError, match=r"status 401 .*the token is wrong.*check REMOTE_REWARD_TOKEN") as error:
        score(served[0], {"name": "follow", "score_key": "follow"})
    assert "wrong-token" not in str(error.value)


# ---------------------------------------------------------------- S3


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto.start()
    client = botocore.session.get_session().create_client(
        "s3",
        "us-east-1",
        endpoint_url="http://{}:{}".format(*moto.get_host_and_port()),
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    client.create_bucket(Bucket="clips")
    yield client
    client.close()
    moto.stop()


@pytest.fixture
def store(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open the bucket with only cosmos-rl's environment variables."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    result = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION_NAME": "us-east-1"}
    for name, value in {**result, "ENDPOINT_URL": bucket.meta.endpoint_url}.items():
        monkeypatch.setenv(f"PROD_S3_CHECKPOINT_{name}", value)
    monkeypatch.setenv("DSREASON_CACHE", str(tmp_path / "cache"))
    remote._fetch_copy.cache_clear()
    s3._create_client.cache_clear()
    yield bucket
    s3._create_client.cache_clear()


def test_folders_shards_and_prompts_load_from_s3(store: Any, tmp_path: Path) -> None:
    clip = video(tmp_path / "v.mp4").read_bytes()
    shard = pack(tmp_path / "0.tar", {"7.json": b'{"prompt": "of a shard"}', "7.mp4": clip}).read_bytes()
    objects = {
        "folder/videos/a.mp4": clip,
        "folder/metas/a.txt": b"of a folder",
        "folder/t5_xxl/a.pickle": b"not fetched",
        "shards/one/0.tar": shard,
        "shards/readme.md": b"",
        "prompts/p.jsonl": b'{"prompt": "of a file", "video": "../folder/videos/a.mp4"}\n{"prompt": "x", "video": "v/a.mp4"}\n',
        "prompts/v/a.mp4": clip,
    }
    for key, content in objects.items():
        store.put_object(Bucket="clips", Key=key, Body=content)
    for kind, path in (
        ("folder", "s3://clips/folder"),
        ("shards", "s3://clips/shards"),
        ("shards", "s3://clips/shards/one/0.tar"),
    ):
        rows, _ = open_world_data(WorldDataConfig(format=kind, path=path), 0)
        assert [row.prompt for row in rows.rows] == [f"of a {kind.rstrip('s')}"]
        assert rows[0].id.startswith("s3://clips/")
        assert levels(rows.read_clip(rows[0], SIZE)) == [0, 1, 2, 3, 4]
    assert not list(tmp_path.rglob("*.pickle"))
    rows, _ = open_world_data(
        WorldDataConfig(format="prompts", path="s3://clips/prompts/p.jsonl", on_bad_row="skip"), 0
    )
    assert [row.prompt for row in rows.rows] == ["x"]  # the path of the other row leads out of the folder
    assert levels(rows.read_clip(rows[0], SIZE)) == [0, 1, 2, 3, 4]
