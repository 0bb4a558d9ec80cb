"""A real vLLM server, queried over HTTP: it reads the same prompts as the engine in this process, and gives the same answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import vllm.version
from PIL import Image

from dsreason.config.schema_eval import ServerConfig
from dsreason.config.schema_grpo import DistillConfig
from dsreason.data.types import Sample
from dsreason.errors import ConfigError
from dsreason.evaluation.ask.asking import QuestionRequest, Reply
from dsreason.evaluation.ask.engine import VERSION
from dsreason.evaluation.ask.server import ServerAnswerer
from dsreason.evaluation.ask.server_messages import build_request
from dsreason.evaluation.types import Question
from dsreason.models.load import load_model
from dsreason.models.processors.loading import open_encoder
from dsreason.rollout.protocol import Sampling, make_single_turn
from dsreason.rollout.transformers_engine import TransformersEngine
from dsreason.train.grpo.rollouts import Rollout
from dsreason.train.grpo.teacher_server import Client, check_server
from tests.unit.media.videos import write_video

pytestmark = [pytest.mark.integration, pytest.mark.long]

START_SECONDS = 600
GREEDY = Sampling(temperature=0.0, top_k=1, max_completion_length=12)


@dataclass(frozen=True)
class Server:
    url: str
    log: Path


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def server(tiny_qwen2_5_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_qwen2_5_vl)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "4", "--skip-mm-profiling"]
    if not vllm.version.__version__.startswith("0.26."):
        command += ["--trust-request-mm-kwargs"]  # vLLM 0.26 accepts a request's video settings without this option
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        # The server gets a separate session, so that its child, the engine, can be ended together with it.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            wait_until_up(f"http://127.0.0.1:{port}/health", process, log)
            yield Server(f"http://127.0.0.1:{port}", log)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with opener.open(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    folder = tmp_path_factory.mktemp("media")
    pixels = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    clip = write_video(folder / "clip.mp4", 24)
    parts = {
        "image": {"type": "image", "image": str(folder / "image.png")},
        "video at 4 fps": {"type": "video", "video": str(clip), "fps": 4},
        "video of 6 frames": {"type": "video", "video": str(clip), "nframes": 6},
        "video of all frames": {"type": "video", "video": str(clip), "nframes": 24},
        "part of a video": {"type": "video", "video": str(clip), "fps": 4, "video_start": 1.0},
    }
    question = {"type": "text", "text": "Which way does the ball move?"}
    requested = {name: [{"role": "user", "content": [part, question]}] for name, part in parts.items()}
    requested["text"] = [
        {"role": "system", "content": "Answer with one word."},
        {"role": "user", "content": "left or right?"},
    ]
    return {name: Sample(name, messages) for name, messages in requested.items()}


def answerer(server: Server, **settings: object) -> ServerAnswerer:
    return ServerAnswerer(ServerConfig.model_validate({"url": server.url, "max_retries": 1, **settings}))


def ask(asked: ServerAnswerer, samples: dict[str, Sample]) -> dict[str, Reply]:
    requests = [
        QuestionRequest(Question(name, "d", name, "open", sample, "left"), GREEDY) for name, sample in samples.items()
    ]
    return {request.question.id: reply for request, reply in asked.ask(requests)}


@pytest.fixture(scope="module")
def local(tiny_qwen2_5_vl: Path, samples: dict[str, Sample]) -> dict[str, tuple[int, str]]:
    """Return the lengths of the prompts and the greedy answers of the engine in this process."""
    encoder = open_encoder(tiny_qwen2_5_vl, dtype=torch.float32, max_length=2048, max_length_key="model.max_length")
    engine = TransformersEngine(
        tiny_qwen2_5_vl, encoder.processor.tokenizer, dtype=torch.float32, device=torch.device("cpu")
    )
    engine.load(VERSION)
    result = {}
    for name, sample in samples.items():
        prompt = encoder.encode_prompt(sample)
        [completion] = engine.generate([prompt], GREEDY, version=VERSION)
        result[name] = len(prompt.encoded), completion.text
    return result


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown model", "known model"])
def test_server_prompt_lengths_match_local_engine(
    server: Server, samples: dict[str, Sample], local: dict[str, tuple[int, str]], is_known: bool
) -> None:
    requested = answerer(server)
    encoder = requested.encoder if is_known else None
    lengths = {}
    for name, sample in samples.items():
        messages, fields = build_request(sample, "file", encoder)
        asking = {"model": requested.model, "messages": messages, "max_tokens": 1, **fields}
        response = httpx2.post(f"{requested.url}/chat/completions", json=asking, timeout=300, trust_env=False)
        lengths[name] = response.raise_for_status().json()["usage"]["prompt_tokens"]
    assert lengths == {name: length for name, (length, _) in local.items()}
    assert lengths["video at 4 fps"] > lengths["video of 6 frames"]


def test_image_and_text_answers_match_local_engine(
    server: Server, samples: dict[str, Sample], local: dict[str, tuple[int, str]]
) -> None:
    requested = answerer(server)
    assert requested.model == "tiny"
    exact = {name: samples[name] for name in ("image", "text")}
    replies = ask(requested, exact)
    assert {name: reply.text for name, reply in replies.items()} == {name: local[name][1] for name in exact}
    assert {reply.error for reply in replies.values()} == {None}


@pytest.mark.parametrize("form", ["file", "frames"])
def test_clips_can_be_sent_as_file_or_frames(server: Server, samples: dict[str, Sample], form: str) -> None:
    clips = {name: sample for name, sample in samples.items() if "video" in name}
    for reply in ask(answerer(server, video=form), clips).values():
        assert reply.error is None
        assert reply.completion_tokens > 0
        assert reply.finish_reason in ("stop", "length")


def test_too_long_prompt_fails_only_its_question(server: Server, samples: dict[str, Sample]) -> None:
    long = Sample("long", [{"role": "user", "content": "left " * 4000}])
    replies = ask(answerer(server), {"long": long, "text": samples["text"]})
    assert str(replies["long"].error).startswith("the server responds with 400: ")
    assert "2048" in str(replies["long"].error)
    assert replies["text"].error is None


def test_unknown_model_error_suggests_served_model(server: Server, samples: dict[str, Sample]) -> None:
    with pytest.raises(ConfigError, match="the server has no model 'tinny'.* The server has tiny; did you mean tiny"):
        ask(answerer(server, model="tinny"), {"text": samples["text"]})


def test_teacher_logprobs_match_local_forward(server: Server, tiny_qwen2_5_vl: Path) -> None:
    encoder = open_encoder(tiny_qwen2_5_vl, dtype=torch.float32, max_length=512, max_length_key="model.max_length")
    config = DistillConfig(teacher=f"{server.url}/v1", server_model="tiny")
    check_server(config, encoder.processor.tokenizer)
    prompt = encoder.encode_prompt(Sample("1", [{"role": "user", "content": "What colour is it?"}]))
    ids = (17, 301, 44, 9, 120)
    completion = make_single_turn(ids, "", (0.0,) * len(ids), "stop", version=0)
    result = Client(config).request_logprobs(Rollout(prompt, completion, 0.0, {}))

    model = load_model(tiny_qwen2_5_vl, dtype=torch.float32, attention="sdpa")
    tensor = torch.tensor([[*prompt.prompt_ids, *ids]])
    with torch.no_grad():
        logprobs = model(input_ids=tensor).logits[0].log_softmax(-1)
    places = range(len(prompt.prompt_ids), tensor.shape[1])
    expected = [float(logprobs[place - 1, tensor[0, place]]) for place in places]
    assert result == pytest.approx(expected, abs=1e-4)


def test_teacher_with_different_vocabulary_is_rejected(server: Server, tiny_qwen2_5_vl: Path) -> None:
    tokenizer = open_encoder(
        tiny_qwen2_5_vl, dtype=torch.float32, max_length=512, max_length_key="model.max_length"
    ).processor.tokenizer
    shifted: Any = SimpleNamespace(
        get_vocab=tokenizer.get_vocab,
        all_special_ids=tokenizer.all_special_ids,
        decode=lambda ids: tokenizer.decode([item + 1 for item in ids]),
    )
    with pytest.raises(ConfigError, match="the server's vocabulary differs from that of model.path: token "):
        check_server(DistillConfig(teacher=f"{server.url}/v1", server_model="tiny"), shifted)
