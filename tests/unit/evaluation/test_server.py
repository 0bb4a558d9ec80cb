"""Requests to a model server, and the handling of its errors, tested with a stand-in for the server."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dsreason.config.schema_eval import ServerConfig
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DsReasonError
from dsreason.evaluation.ask import server
from dsreason.evaluation.ask.asking import QuestionRequest, Reply
from dsreason.evaluation.ask.server import ServerAnswerer, complete_url
from dsreason.evaluation.types import Question
from dsreason.media.frames import write_frame_list
from dsreason.rollout.protocol import Sampling
from tests.unit.evaluation.stand_in import PROXIES, StandIn, chat, serving
from tests.unit.media.videos import number_frame, read_number, write_video

SAMPLING = Sampling(temperature=0.6, top_p=0.95, max_completion_length=64, seed=3)
KEY = "sk-very-secret"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for variable in (*PROXIES, "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    with serving() as state:
        yield state


def answerer(url: str, **server: Any) -> ServerAnswerer:
    return ServerAnswerer(ServerConfig.model_validate({"url": url, "max_retries": 0, "time_limit": 10} | server))


def ask(server: ServerAnswerer, *samples: Sample, sampling: Sampling = SAMPLING) -> list[Reply]:
    """Return the replies in the order of the samples."""
    replies = {request.question.id: reply for request, reply in server.ask(requests_of(samples, sampling))}
    return [replies[f"d/{place}/0"] for place in range(len(samples))]


def requests_of(samples: Sequence[Sample], sampling: Sampling = SAMPLING) -> list[QuestionRequest]:
    return [
        QuestionRequest(Question(f"d/{place}/0", "d", str(place), "multiple_choice", sample, "A", {"A": "a"}), sampling)
        for place, sample in enumerate(samples)
    ]


def text_sample(text: str = "Which?") -> Sample:
    return Sample("s", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}])


def media_sample(*parts: dict[str, Any]) -> Sample:
    return Sample("s", [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}])


# ---------------------------------------------------------------- what is sent and read


def test_question_is_sent_and_answer_is_read(stand_in: StandIn) -> None:
    [reply] = ask(answerer(stand_in.url), text_sample())
    assert (reply.text, reply.finish_reason, reply.completion_tokens, reply.error) == ("(A)", "stop", 5, None)
    assert reply.seconds > 0
    [sent] = stand_in.requests
    assert isinstance(sent.pop("seed"), int)
    assert sent == {
        "model": "stand-in",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which?"}],
        "temperature": 0.6,
        "top_p": 0.95,
        "max_tokens": 64,
    }


def test_template_arguments_are_sent(stand_in: StandIn) -> None:
    server = ServerAnswerer(ServerConfig(url=stand_in.url), {"enable_thinking": False})
    assert ask(server, text_sample())[0].error is None
    assert stand_in.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        (Sampling(temperature=0.0, top_k=1, max_completion_length=10), {"temperature": 0.0}),
        (Sampling(temperature=0.05, top_k=1, max_completion_length=10), {"temperature": 0.0}),
        (Sampling(temperature=0.9, top_k=20, max_completion_length=10), {"temperature": 0.9, "top_k": 20}),
        (
            Sampling(
                temperature=1.0,
                max_completion_length=10,
                repetition_penalty=1.05,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
            ),
            {"temperature": 1.0, "repetition_penalty": 1.05, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        ),
    ],
)
def test_only_non_default_sampling_settings_are_sent(
    stand_in: StandIn, sampling: Sampling, fields: dict[str, float]
) -> None:
    ask(answerer(stand_in.url), text_sample(), sampling=sampling)
    [sent] = stand_in.requests
    assert {k: v for k, v in sent.items() if k not in ("model", "messages", "seed", "max_tokens")} == fields


def test_seed_depends_only_on_question_and_attempt(stand_in: StandIn) -> None:
    server = answerer(stand_in.url, concurrency=1)
    ask(server, text_sample(), text_sample())
    ask(server, text_sample())
    ask(server, text_sample(), sampling=Sampling(max_completion_length=64, seed=4))
    first, second, repeated, retry = (request["seed"] for request in stand_in.requests)
    assert first == repeated
    assert len({first, second, retry}) == 3


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_stripped_by_server_are_restored(stand_in: StandIn, name: str) -> None:
    stand_in.respond = lambda path, body: chat("<answer>A</answer>", **{name: "It turns left."})
    assert ask(answerer(stand_in.url), text_sample())[0].text == "<think>It turns left.</think>\n<answer>A</answer>"


def test_answer_cut_within_thoughts_is_accepted(stand_in: StandIn) -> None:
    stand_in.respond = lambda path, body: chat(None, "length", reasoning="It turns")
    [reply] = ask(answerer(stand_in.url), text_sample())
    assert (reply.text, reply.finish_reason, reply.error) == ("<think>It turns</think>\n", "length", None)


def test_replies_match_requests_in_any_order(stand_in: StandIn) -> None:
    def respond(path: str, body: Any) -> tuple[int, Any]:
        question = body["messages"][-1]["content"]
        time.sleep(0.05 if question == "0" else 0)
        return chat(f"answer {question}")

    stand_in.respond = respond
    replies = ask(answerer(stand_in.url, concurrency=4), *(text_sample(str(i)) for i in range(12)))
    assert [reply.text for reply in replies] == [f"answer {i}" for i in range(12)]


def test_concurrency_sets_number_of_parallel_requests(stand_in: StandIn) -> None:
    barrier = threading.Barrier(3, timeout=10)

    def respond(path: str, body: Any) -> tuple[int, Any]:
        barrier.wait()  # breaks unless three requests arrive at the same time
        return chat("(A)")

    stand_in.respond = respond
    assert {reply.error for reply in ask(answerer(stand_in.url, concurrency=3), *[text_sample()] * 9)} == {None}
    assert stand_in.most_at_once == 3


# ---------------------------------------------------------------- media


def decoded(part: dict[str, Any]) -> tuple[str, bytes]:
    kind, _, content = part[part["type"]]["url"].removeprefix("data:").partition(";base64,")
    return kind, base64.b64decode(content)


def test_image_is_sent_with_exact_pixels(stand_in: StandIn, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "i.png")
    ask(answerer(stand_in.url), media_sample({"type": "image", "image": str(tmp_path / "i.png")}))
    part, text = stand_in.requests[0]["messages"][0]["content"]
    kind, content = decoded(part)
    assert (part["type"], kind) == ("image_url", "image/png")
    assert (np.asarray(Image.open(io.BytesIO(content))) == pixels).all()
    assert text == {"type": "text", "text": "Which?"}
    assert "media_io_kwargs" not in stand_in.requests[0]


def test_image_is_resized_when_settings_require_it(stand_in: StandIn, tmp_path: Path) -> None:
    Image.new("RGB", (560, 280)).save(tmp_path / "i.png")
    part = {"type": "image", "image": str(tmp_path / "i.png"), "max_pixels": 280 * 140}
    ask(answerer(stand_in.url), media_sample(part))
    _, content = decoded(stand_in.requests[0]["messages"][0]["content"][0])
    assert Image.open(io.BytesIO(content)).size == (280, 140)


@pytest.mark.parametrize(
    ("settings", "count"), [({"fps": 5}, 6), ({"nframes": 8}, 8), ({"nframes": 2, "max_pixels": 128 * 28**2}, 2)]
)
def test_clip_is_sent_with_its_frame_count(
    stand_in: StandIn, tmp_path: Path, settings: dict[str, Any], count: int
) -> None:
    clip = write_video(tmp_path / "v.mp4")  # 12 frames at 10 per second
    ask(answerer(stand_in.url), media_sample({"type": "video", "video": str(clip), **settings}))
    [sent] = stand_in.requests
    part = sent["messages"][0]["content"][0]
    assert part["type"] == "video_url"
    assert decoded(part) == ("video/mp4", clip.read_bytes())
    reading = {"video_backend": "qwen3_vl", "num_frames": count, "fps": -1, "min_frames": count, "max_frames": count}
    assert sent["media_io_kwargs"] == {"video": reading}
    assert "mm_processor_kwargs" not in sent  # vLLM refuses it unless it was started to trust requests


@pytest.mark.parametrize(
    ("settings", "frames", "among"),
    [
        ({"nframes": 12}, list(range(12)), 12),
        ({"nframes": 4, "video_start": 0.2}, [2, 5, 8, 11], 10),
    ],
)
def test_unusual_frames_are_sent_as_jpeg_video(
    stand_in: StandIn, tmp_path: Path, settings: dict[str, Any], frames: list[int], among: int
) -> None:
    clip = write_video(tmp_path / "v.mp4")
    ask(answerer(stand_in.url), media_sample({"type": "video", "video": str(clip), **settings}))
    [sent] = stand_in.requests
    part = sent["messages"][0]["content"][0]
    start, _, content = part["video_url"]["url"].partition(",")
    assert (part["type"], start) == ("video_url", "data:video/jpeg;base64")
    images = [Image.open(io.BytesIO(base64.b64decode(frame))) for frame in content.split(",")]
    assert [read_number(np.asarray(image)) for image in images] == frames
    assert sent["media_io_kwargs"]["video"] == {
        "num_frames": -1,
        "fps": 10.0,
        "frames_indices": frames,
        "total_num_frames": among,
        "duration": 1.2,
        "do_sample_frames": False,
    }


def test_video_file_request_preserves_training_frames(stand_in: StandIn, tmp_path: Path) -> None:
    video = pytest.importorskip("vllm.multimodal.video")
    clip = write_video(tmp_path / "v.mp4", 150)
    ask(answerer(stand_in.url), media_sample({"type": "video", "video": str(clip), "nframes": 4}))
    reading = stand_in.requests[0]["media_io_kwargs"]["video"]
    _, content = decoded(stand_in.requests[0]["messages"][0]["content"][0])
    frames, metadata = video.VIDEO_LOADER_REGISTRY.load(reading.pop("video_backend")).load_bytes(content, **reading)
    # (150 - 1) / 3 = 49.67, 99.33; vLLM's loader for Qwen2.5-VL would use 0, 37, 75 and 112.
    assert metadata["frames_indices"] == [0, 50, 99, 149]
    assert [read_number(frame) for frame in frames] == [0, 50, 99, 149]


@pytest.mark.parametrize(("family", "factor"), [("qwen2_5_vl", 28), ("qwen3_vl", 32)])
def test_frames_are_sent_in_sizes_of_known_model(
    stand_in: StandIn, tmp_path: Path, family: str, factor: int, request: pytest.FixtureRequest
) -> None:
    stand_in.models = {"data": [{"id": "mine", "root": str(request.getfixturevalue(f"tiny_{family}"))}]}
    clip = write_video(tmp_path / "v.mp4", frames=np.zeros((12, 250, 330, 3), np.uint8))
    Image.new("RGB", (330, 250)).save(tmp_path / "i.png")
    parts = [{"type": "image", "image": str(tmp_path / "i.png")}, {"type": "video", "video": str(clip), "nframes": 2}]
    ask(answerer(stand_in.url), media_sample(*parts))
    [sent] = stand_in.requests
    image, video, _ = sent["messages"][0]["content"]
    rounded = round(330 / factor) * factor, round(250 / factor) * factor
    assert Image.open(io.BytesIO(decoded(image)[1])).size == rounded
    frames = video["video_url"]["url"].partition(",")[2].split(",")
    assert [Image.open(io.BytesIO(base64.b64decode(frame))).size for frame in frames] == [rounded] * 2
    assert sent["mm_processor_kwargs"] == {"do_resize": False}


@pytest.mark.parametrize(
    ("times", "fps", "indices", "total", "duration"),
    [
        ({"fps": 4}, 4.0, [0, 1, 2, 2], 4, 0.75),
        ({"timestamps": [2, 2.5, 6]}, 1000.0, [2000, 2500, 6000, 6000], 8000, 6.0),
    ],
)
def test_given_frames_are_sent_with_their_times(
    stand_in: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    times: dict[str, Any],
    fps: float,
    indices: list[int],
    total: int,
    duration: float,
) -> None:
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path))
    files = [str(tmp_path / f"{number}.png") for number in range(3)]
    for number, file in enumerate(files):
        Image.fromarray(number_frame(number)).save(file)
    part = {"type": "video", "video": str(write_frame_list(files, times))}
    ask(answerer(stand_in.url), media_sample(part))
    [sent] = stand_in.requests
    content = sent["messages"][0]["content"][0]["video_url"]["url"].partition(",")[2]
    images = [Image.open(io.BytesIO(base64.b64decode(frame))) for frame in content.split(",")]
    assert [read_number(np.asarray(image)) for image in images] == [0, 1, 2, 2]
    assert sent["media_io_kwargs"]["video"] == {
        "num_frames": -1,
        "fps": fps,
        "frames_indices": indices,
        "total_num_frames": total,
        "duration": duration,
        "do_sample_frames": False,
    }


def test_clip_can_be_sent_as_sampled_frames(stand_in: StandIn, tmp_path: Path) -> None:
    clip = write_video(tmp_path / "v.mp4")
    part = {"type": "video", "video": str(clip), "nframes": 4, "video_start": 0.2}
    ask(answerer(stand_in.url, video="frames"), media_sample(part))
    [sent] = stand_in.requests
    frames = [decoded(part) for part in sent["messages"][0]["content"][:-1]]
    assert {kind for kind, _ in frames} == {"image/jpeg"}
    # Frames 2 to 11, first and last included: 2, 5, 8, 11.
    assert [read_number(np.asarray(Image.open(io.BytesIO(content)))) for _, content in frames] == [2, 5, 8, 11]
    assert "media_io_kwargs" not in sent


@pytest.mark.parametrize("form", ["file", "frames"])
def test_unusable_clip_fails_only_its_question(stand_in: StandIn, tmp_path: Path, form: str) -> None:
    clip = write_video(tmp_path / "v.mp4")
    bad = media_sample({"type": "video", "video": str(clip), "nframes": 50})
    error, good = ask(answerer(stand_in.url, video=form), bad, text_sample())
    assert str(error.error).startswith(f"{clip}: nframes is 50, but the video (or its chosen range) has only 12 frames")
    assert good.text == "(A)"
    assert len(stand_in.requests) == 1


def test_clips_with_different_frame_counts_are_rejected(stand_in: StandIn, tmp_path: Path) -> None:
    clips = [write_video(tmp_path / "v.mp4", 12), write_video(tmp_path / "w.mp4", 24)]
    parts = [{"type": "video", "video": str(clip), "fps": 5} for clip in clips]
    [reply] = ask(answerer(stand_in.url), media_sample(*parts))
    assert str(reply.error).startswith("the clips of this question need different frame settings")
    parts = [{"type": "video", "video": str(clip), "nframes": 6} for clip in clips]
    assert ask(answerer(stand_in.url), media_sample(*parts))[0].error is None


@pytest.mark.parametrize("form", ["file", "frames"])
def test_unreadable_clip_fails_only_its_question(stand_in: StandIn, tmp_path: Path, form: str) -> None:
    (tmp_path / "v.mp4").write_bytes(b"no video")
    bad = media_sample({"type": "video", "video": str(tmp_path / "v.mp4")})
    error, good = ask(answerer(stand_in.url, video=form), bad, text_sample())
    assert "v.mp4: is not a usable video" in str(error.error)
    assert (error.sent, good.sent) == (False, True)
    assert (error.text, good.text) == ("", "(A)")


# ---------------------------------------------------------------- what goes wrong with one question


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ((400, {"error": {"message": "the prompt is too long"}}), "the server responds with 400: "),
        ((500, "a page"), "the server responds with 500: "),
        ((200, "{not json"), "the server's response is not a chat completion: invalid JSON"),
        ((200, "<html>", {"content-type": "text/html"}), "the server's response is not a chat completion: invalid JSON"),
        ((200, {"choices": []}), "the server's response is not a chat completion: choices is []: list should have at least 1"),
        ((200, {"object": "error"}), "the server's response is not a chat completion: choices is missing"),
        ((200, {"choices": [{"message": {"content": 3}}]}), "the server's response is not a chat completion: choices.0.m"),
        (None, "the server does not respond: "),
    ],
)  # fmt: skip
def test_failed_request_fails_only_its_question(
    stand_in: StandIn, response: tuple[Any, ...] | None, error: str
) -> None:
    stand_in.respond = lambda path, body: response if body["messages"][-1]["content"] == "bad" else chat("(A)")
    bad, good = ask(answerer(stand_in.url), text_sample("bad"), text_sample())
    assert str(bad.error).startswith(error)
    assert (bad.text, bad.finish_reason, bad.completion_tokens) == ("", "", 0)
    assert (good.text, good.error) == ("(A)", None)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"choices": KEY}),
        (200, {"choices": "-" * 70 + KEY}),
        (400, {"error": {"message": KEY}}),
        *((400, {"error": {"message": "-" * before + KEY}}) for before in range(440, 500, 5)),
    ],
)
def test_error_does_not_reveal_the_key(
    stand_in: StandIn, status: int, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    stand_in.respond = lambda path, sent: (status, body)
    [reply] = ask(answerer(stand_in.url), text_sample())
    assert reply.error is not None
    assert KEY[:4] not in reply.error


def test_request_timeout_fails_only_its_question(stand_in: StandIn) -> None:
    released = threading.Event()

    def respond(path: str, body: Any) -> tuple[int, Any]:
        if body["messages"][-1]["content"] == "slow":
            released.wait(10)
        return chat("(A)")

    stand_in.respond = respond
    slow, good = ask(answerer(stand_in.url, time_limit=0.3), text_sample("slow"), text_sample())
    released.set()
    assert slow.error == "the server does not respond: the request takes longer than server.time_limit"
    assert good.text == "(A)"


@pytest.mark.parametrize(
    "response",
    [
        (429, {"error": {"message": "slow down"}}, {"retry-after": "0.01"}),
        (503, "loading", {"retry-after": "0.01"}),
        None,
    ],
)
def test_transient_failure_is_retried(stand_in: StandIn, response: tuple[Any, ...] | None) -> None:
    stand_in.respond = lambda path, body: response if len(stand_in.requests) < 3 else chat("(B)")
    [reply] = ask(answerer(stand_in.url, max_retries=2), text_sample())
    assert (reply.text, reply.error, len(stand_in.requests)) == ("(B)", None, 3)


def test_error_is_returned_after_last_retry(stand_in: StandIn) -> None:
    stand_in.respond = lambda path, body: (429, {"error": {"message": "slow down"}}, {"retry-after": "0.01"})
    [reply] = ask(answerer(stand_in.url, max_retries=2), text_sample())
    assert str(reply.error).startswith("the server responds with 429: ")
    assert "slow down" in str(reply.error)
    assert len(stand_in.requests) == 3


# ---------------------------------------------------------------- what concerns all questions


@pytest.mark.parametrize("status", [401, 403])
def test_rejected_key_is_reported_once_without_value(
    stand_in: StandIn, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    refused = (status, {"error": {"message": f"no access with {KEY}"}})
    stand_in.respond = lambda path, body: refused
    with pytest.raises(ConfigError) as caught:
        ask(answerer(stand_in.url, api_key_env="MY_KEY"), *[text_sample()] * 3)
    assert f"server.url ({stand_in.url}/v1): the server rejects the key in the environment variable MY_KEY" in str(
        caught.value
    )
    assert KEY not in str(caught.value)
    assert stand_in.headers[0]["authorization"] == f"Bearer {KEY}"

    stand_in.models_status, stand_in.models = refused
    with pytest.raises(ConfigError, match="rejects the key in the environment variable MY_KEY") as caught:
        answerer(stand_in.url, api_key_env="MY_KEY")
    assert KEY not in str(caught.value)


def test_missing_key_error_names_the_variable(stand_in: StandIn) -> None:
    stand_in.models_status, stand_in.models = 401, {"error": {"message": "no key"}}
    with pytest.raises(ConfigError, match="requires a key, but the environment variable OPENAI_API_KEY is not set"):
        answerer(stand_in.url)


def test_key_with_line_break_is_never_sent(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\nx")
    with pytest.raises(
        ConfigError, match="^the key in OPENAI_API_KEY contains characters that are not allowed in an HTTP header"
    ):
        answerer(stand_in.url)


def test_unknown_model_error_lists_available_models(stand_in: StandIn) -> None:
    stand_in.respond = lambda path, body: (404, {"error": {"message": "unknown model"}})
    with pytest.raises(ConfigError) as caught:
        ask(answerer(stand_in.url, model="stand-im"), text_sample())
    assert "the server has no model 'stand-im'" in str(caught.value)
    assert "The server has stand-in; did you mean stand-in?" in str(caught.value)


def test_listed_model_is_not_reported_as_missing(stand_in: StandIn) -> None:
    stand_in.respond = lambda path, body: (404, "Not Found")
    with pytest.raises(
        ConfigError, match=r"the server offers no chat completions at this URL \(404: Not Found\); correct server.url$"
    ):
        ask(answerer(stand_in.url), text_sample())


def test_slow_model_list_is_reported_with_limit(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.models_seconds = 1.0
    monkeypatch.setattr(server, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(server, "FIRST_PAUSE", 0.0)
    with pytest.raises(ConfigError, match=r"listing its models takes more than 0\.2 s\); start it"):
        answerer(stand_in.url)


@pytest.mark.parametrize(
    ("models", "text"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, "set server.model to the model to query; the server has a, b$"),
        ({"data": []}, "the server does not list its models$"),
        ("a page", "the server does not list its models$"),
    ],
)
def test_model_is_required_unless_unique_on_server(stand_in: StandIn, models: Any, text: str) -> None:
    stand_in.models = models
    with pytest.raises(ConfigError, match=text):
        answerer(stand_in.url)
    assert answerer(stand_in.url, model="b").model == "b"


def test_evaluation_ends_if_server_refuses_media_settings(stand_in: StandIn, tmp_path: Path) -> None:
    text = "Per-request media_io_kwargs are disabled by default"
    stand_in.respond = lambda path, body: (400, {"error": {"message": text}})
    clip = {"type": "video", "video": str(write_video(tmp_path / "v.mp4")), "nframes": 4}
    with pytest.raises(ConfigError) as caught:
        ask(answerer(stand_in.url), media_sample(clip))
    assert text in str(caught.value)
    assert str(caught.value).endswith('start vLLM with --trust-request-mm-kwargs, or set server.video = "frames"')
    [reply] = ask(answerer(stand_in.url, video="frames"), media_sample(clip))
    assert str(reply.error).startswith("the server responds with 400: ")


def test_unreachable_server_is_reported_with_url(stand_in: StandIn) -> None:
    with pytest.raises(ConfigError) as caught:
        answerer("http://127.0.0.1:9")
    assert str(caught.value).startswith("server.url (http://127.0.0.1:9/v1): the server does not respond (")
    assert "refused" in str(caught.value)


def test_server_failing_at_startup_is_reported(stand_in: StandIn) -> None:
    stand_in.models_status, stand_in.models = 400, {"error": {"message": "not here"}}
    with pytest.raises(ConfigError, match=r"the server responds with 400: .*not here"):
        answerer(stand_in.url)


def test_lost_server_connection_ends_the_evaluation(stand_in: StandIn) -> None:
    server = answerer(stand_in.url)

    def respond(path: str, body: Any) -> None:
        stand_in.models_status = 500

    stand_in.respond = respond
    with pytest.raises(
        DsReasonError, match=r"the server no longer responds .* run the same command again to continue$"
    ):
        ask(server, *[text_sample()] * 5)


def test_closing_replies_stops_further_requests(stand_in: StandIn) -> None:
    server = answerer(stand_in.url, concurrency=1)
    replies = server.ask(requests_of([text_sample()] * 50))
    next(replies)
    replies.close()
    server.close()
    assert len(stand_in.requests) < 10


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1", "http://h:1/v1"),
        ("https://h/api/v3/", "https://h/api/v3"),
    ],
)
def test_v1_is_added_to_url_without_path(given: str, used: str) -> None:
    assert complete_url(given) == used
