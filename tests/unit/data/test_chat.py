"""Tokens, labels and pixels that both families compute for generated media."""

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import Encoder, SampleTooLong
from dsreason.data.types import EncodedSample, Sample
from dsreason.errors import DataError
from dsreason.families import get_family
from dsreason.media import images, videos
from dsreason.models.mrope import compute_position_ids
from dsreason.train.dpo.pairs import build_pair_encoder
from dsreason.train.grpo.preflight import build_prompt_encoder
from tests.unit.media.videos import write_video

QWEN2_5_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


@pytest.fixture(scope="module")
def encoder(tiny_of_each_architecture: Path) -> Encoder:
    tiny = tiny_of_each_architecture
    config = AutoConfig.from_pretrained(tiny)
    family = get_family(config.model_type)
    positions = partial(compute_position_ids, family.grids, config=config)
    return Encoder(AutoProcessor.from_pretrained(tiny), family, positions, max_length=4096)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("media")
    generator = np.random.default_rng(0)
    for name, size in (("wide", (64, 200, 3)), ("small", (40, 40, 3))):
        Image.fromarray(generator.integers(0, 255, size, np.uint8)).save(folder / f"{name}.png")
    write_video(folder / "long.mp4", 60)
    write_video(folder / "short.mp4", 5)
    write_video(folder / "one.mp4", 1)
    return {path.stem: str(path) for path in folder.iterdir()}


def test_unanswered_sample_encodes_as_prompt_when_allowed(encoder, files):
    sample = Sample("1", [user(image(files["small"]), "Which way?")])
    with pytest.raises(DataError, match="neither an assistant message nor an answer"):
        encoder.encode(sample)
    asking = replace(encoder, needs_reply=False)
    encoded, prompt = asking.encode(sample), encoder.encode_prompt(sample).encoded
    assert encoded.input_ids.tolist() == prompt.input_ids.tolist()
    assert asking.measure(sample) == len(encoded)
    assert not encoded.loss_mask.any()
    answered = replace(sample, messages=[*sample.messages, assistant("left")])
    assert asking.encode(answered).loss_mask.tolist() == encoder.encode(answered).loss_mask.tolist()


def user(*parts: dict | str) -> dict:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def assistant(text: str | list) -> dict:
    return {"role": "assistant", "content": text}


def image(path: str, **settings: float) -> dict:
    return {"type": "image", "image": path, **settings}


def video(path: str, **settings: float) -> dict:
    return {"type": "video", "video": path, **settings}


def conversation(files: dict[str, str]) -> Sample:
    """Build a conversation of three turns with two images and two videos."""
    return Sample(
        id="talk",
        messages=[
            {"role": "system", "content": "Be brief."},
            user(image(files["wide"]), "Left of ", image(files["small"]), "?"),
            assistant("The ball is red."),
            user(video(files["long"], fps=1), "Which way?"),
            assistant([{"type": "text", "text": "It moves"}, {"type": "text", "text": " left"}]),
            user("And here?", video(files["short"], nframes=4)),
            assistant("\n\nup"),
        ],
    )


def runs(encoder: Encoder, encoded: EncodedSample) -> list[str]:
    """Return the text of each contiguous run of trained tokens."""
    result: list[list[int]] = []
    before = False
    for token, trained in zip(encoded.input_ids.tolist(), encoded.loss_mask.tolist(), strict=True):
        if trained and not before:
            result.append([])
        if trained:
            result[-1].append(token)
        before = trained
    return [encoder.processor.tokenizer.decode(ids) for ids in result]


def is_qwen2_5(encoder: Encoder) -> bool:
    return encoder.family.model_type == "qwen2_5_vl"


# ---------------------------------------------------------------- labels


def test_loss_mask_covers_only_assistant_turns(encoder, files):
    encoded = encoder.encode(conversation(files))
    assert runs(encoder, encoded) == ["The ball is red.<|im_end|>", "It moves left<|im_end|>", "\n\nup<|im_end|>"]


def test_text_tokens_and_loss_mask_match_chat_format(encoder):
    tokenizer = encoder.processor.tokenizer
    encoded = encoder.encode(Sample("1", [user("yes or no?"), assistant("no")]))
    before = (
        QWEN2_5_SYSTEM if is_qwen2_5(encoder) else ""
    ) + "<|im_start|>user\nyes or no?<|im_end|>\n<|im_start|>assistant\n"
    expected = [(token, False) for token in tokenizer(before)["input_ids"]]
    expected += [(token, True) for token in tokenizer("no")["input_ids"]]
    expected += [(tokenizer.eos_token_id, True)] + [(token, False) for token in tokenizer("\n")["input_ids"]]
    assert list(zip(encoded.input_ids.tolist(), encoded.loss_mask.tolist(), strict=True)) == expected


def test_vision_tokens_are_never_trained(encoder, files):
    encoded = encoder.encode(conversation(files))
    assert not (encoded.loss_mask & (encoded.mm_token_type_ids > 0)).any()
    merged = {key: int(encoded.mm_kwargs[key].prod(dim=1).sum()) // 4 for key in ("image_grid_thw", "video_grid_thw")}
    assert int((encoded.mm_token_type_ids == 1).sum()) == merged["image_grid_thw"]
    assert int((encoded.mm_token_type_ids == 2).sum()) == merged["video_grid_thw"]


@pytest.mark.parametrize("answer", ["left", "\nleft", "\n\n left\n", "  left", "<think>\na\n</think>\n\nb", "é ﬁ 🙂"])
def test_generation_prompt_is_prefix_of_training_ids(encoder, files, answer):
    sample = Sample("1", [user(video(files["long"], fps=1), "?"), assistant("up"), user("?"), assistant(answer)])
    prompt = encoder.encode_prompt(sample).encoded.input_ids.tolist()
    ids = encoder.encode(sample).input_ids.tolist()
    assert ids[: len(prompt)] == prompt
    answer_ids = encoder.processor.tokenizer(answer)["input_ids"]
    assert (
        ids[len(prompt) : len(prompt) + len(answer_ids)] == answer_ids
    )  # the ids that sampling the answer would produce


def test_ids_and_pixels_match_the_processor(encoder, files):
    sample = conversation(files)
    sample = replace(
        sample, messages=[*sample.messages[:-1], assistant("up")]
    )  # no line break to merge with the next token
    encoded, processor = encoder.encode(sample), encoder.processor
    loaded = encoder.encode_prompt(sample).media
    text = processor.apply_chat_template(_bare(sample.messages), tokenize=False)
    metadata = [{k: v for k, v in m[1].items() if k != "do_sample_frames"} for m in loaded if isinstance(m, tuple)]
    inputs = processor(
        text=[text],
        images=[m for m in loaded if isinstance(m, Image.Image)],
        videos=[m[0] for m in loaded if isinstance(m, tuple)],
        video_metadata=metadata,
        do_sample_frames=False,
        do_resize=False,
        return_metadata=True,
        return_mm_token_type_ids=True,
        return_tensors="pt",
    )
    del inputs["video_metadata"]
    assert inputs.pop("input_ids")[0].tolist() == encoded.input_ids.tolist()
    assert inputs.pop("mm_token_type_ids")[0].tolist() == encoded.mm_token_type_ids.tolist()
    del inputs["attention_mask"]
    assert set(inputs) == set(encoded.mm_kwargs)
    for key, value in inputs.items():
        assert torch.equal(torch.as_tensor(value), encoded.mm_kwargs[key]), key


def _bare(messages: list[dict]) -> list[dict]:
    def bare(content: str | list) -> str | list:
        return content if isinstance(content, str) else [{k: p[k] for k in ("type", "text") if k in p} for p in content]

    return [{"role": message["role"], "content": bare(message["content"])} for message in messages]


def with_template(encoder: Encoder, template: str) -> Encoder:
    copied = pickle.loads(pickle.dumps(encoder))
    copied.processor.chat_template = template
    return copied


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n%s<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEXT = "{{ m.content if m.content is string else m.content[0].text }}"


def test_template_may_drop_reasoning_except_in_training(encoder):
    dropped = "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else " + TEXT[3:-3] + " }}"
    changed = with_template(encoder, TURNS.replace("%s", dropped) + PROMPT)
    talk = Sample("talk", [user("a"), assistant("<think>x</think>one"), user("b"), assistant("<think>y</think>two")])
    with pytest.raises(
        DataError, match=r"'talk', message 1: the chat template changes the conversation.*renders 'one<"
    ):
        changed.encode(talk)
    assert "<think>" not in changed.processor.tokenizer.decode(changed.encode_prompt(talk).prompt_ids)
    last = Sample("last", talk.messages[2:])
    assert runs(changed, changed.encode(last)) == ["<think>y</think>two<|im_end|>"]


def test_trimming_template_trains_the_trimmed_text(encoder):
    changed = with_template(encoder, TURNS.replace("%s", "{{ (" + TEXT[3:-3] + ") | trim }}") + PROMPT)
    assert runs(changed, changed.encode(Sample("1", [user("a"), assistant(" yes \n")]))) == ["yes<|im_end|>"]


def test_reasoning_opened_by_prompt_is_not_trained(encoder):
    changed = with_template(encoder, TURNS.replace("%s", TEXT) + PROMPT.replace("assistant\n", "assistant\n<think>\n"))
    encoded = changed.encode(Sample("1", [user("a"), assistant("<think>\nx\n</think>\n\nyes")]))
    assert runs(changed, encoded) == ["x\n</think>\n\nyes<|im_end|>"]


def test_template_without_end_of_turn_is_rejected(encoder):
    changed = with_template(encoder, TURNS.replace("%s", TEXT).replace("<|im_end|>", "") + PROMPT)
    with pytest.raises(DataError, match=r"must end the assistant's turn with '<\|im_end\|>', but writes '\\n'"):
        changed.encode(Sample("1", [user("a"), assistant("b")]))


def test_template_omitting_media_is_rejected(encoder, files):
    changed = with_template(encoder, TURNS.replace("%s", "{{ m.content if m.role == 'assistant' }}") + PROMPT)
    with pytest.raises(DataError, match="omits some of the 1 media"):
        changed.encode(Sample("1", [user(image(files["small"])), assistant("b")]))


# ---------------------------------------------------------------- measuring


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [("image", "wide", {})],
        [("image", "wide", {"max_pixels": 4096}), ("image", "small", {"min_pixels": 40000}), ("image", "wide", {})],
        [("video", "long", {})],
        [("video", "long", {"fps": 0.5})],
        [("video", "long", {"fps": 4, "max_pixels": 5000})],
        [("video", "long", {"nframes": 6, "video_start": 1.0, "video_end": 4.5})],
        [("video", "short", {"total_pixels": 4000}), ("image", "small", {}), ("video", "long", {"fps": 1})],
        [("video", "one", {})],
    ],
)
def test_length_is_measured_exactly_without_decoding(encoder, files, parts, monkeypatch):
    make: dict[str, Callable] = {"image": image, "video": video}
    sample = Sample("1", [user(*(make[kind](files[name], **s) for kind, name, s in parts), "?"), assistant("yes")])
    length = len(encoder.encode(sample))

    def refuse(*args, **kwargs):
        raise AssertionError("decoded")

    monkeypatch.setattr(images, "load_image", refuse)
    monkeypatch.setattr(videos, "load_video", refuse)
    assert encoder.measure(sample) == length


def test_too_long_sample_error_shows_both_lengths(encoder, files):
    short = replace(encoder, max_length=15)
    sample = Sample("r7", [user(image(files["wide"]), "?"), assistant("yes")])
    length = short.measure(sample)
    with pytest.raises(SampleTooLong, match=rf"'r7' has {length} tokens, but the maximum is 15 \(model.max_length\)"):
        short.encode(sample)
    assert len(replace(encoder, max_length=length).encode(sample)) == length
    with pytest.raises(SampleTooLong, match=rf"but the maximum is {length - 1} \(model.max_length\)"):
        replace(encoder, max_length=length - 1).encode(sample)


# ---------------------------------------------------------------- media


def test_each_file_is_decoded_once(encoder, files, monkeypatch):
    opened = []
    load_image, load_video = images.load_image, videos.load_video
    monkeypatch.setattr(images, "load_image", lambda path: opened.append(path) or load_image(path))
    monkeypatch.setattr(videos, "load_video", lambda path, *a, **k: opened.append(path) or load_video(path, *a, **k))
    encoder.encode(conversation(files))
    assert sorted(opened) == sorted(files[name] for name in ("wide", "small", "long", "short"))


@pytest.mark.parametrize("rows", ["training rows", "prompts of GRPO", "pairs of DPO"])
def test_videos_are_decoded_by_the_configured_library(encoder, files, monkeypatch, rows):
    load_video, decoders = videos.load_video, []

    def load(path, indices, *, size, decoder):
        decoders.append(decoder)
        return load_video(path, indices, size=size)

    monkeypatch.setattr(videos, "load_video", load)
    encoder = replace(encoder, video_decoder="torchcodec")
    if rows == "prompts of GRPO":
        config = {"reward": {"functions": {"format": 1.0}}, "rollout": {"max_completion_length": 9}}
        encoder = build_prompt_encoder(GRPOConfig.model_validate(config), encoder)
    elif rows == "pairs of DPO":
        encoder = build_pair_encoder(encoder)
    encoder.encode_prompt(Sample("1", [user(video(files["short"]), "?")]))
    assert decoders == ["torchcodec"]


def test_sizes_beyond_processor_bounds_are_kept(encoder, files):
    factor = encoder.processor.image_processor.patch_size * 2
    pixels = 300 * factor**2  # the tiny processors resize to 256 cells at most
    prompt = encoder.encode_prompt(Sample("1", [user(image(files["small"], min_pixels=pixels), "?")]))
    assert prompt.media[0].width == prompt.media[0].height == 18 * factor
    assert prompt.encoded.mm_kwargs["image_grid_thw"].tolist() == [[1, 36, 36]]


def test_images_are_resized_like_the_processor(encoder, files):
    [resized] = encoder.encode_prompt(Sample("1", [user(image(files["wide"]), "?")])).media
    original = Image.open(files["wide"])
    assert resized.size != original.size
    expected = original.resize(resized.size, Image.Resampling.BICUBIC)
    assert np.array_equal(np.asarray(resized), np.asarray(expected))


def test_prompt_memory_counts_media_and_pixels(encoder, files):
    prompt = encoder.encode_prompt(Sample("1", [user(image(files["wide"]), video(files["short"], nframes=4), "?")]))
    picture, (frames, _) = prompt.media
    pixels = sum(tensor.nbytes for tensor in prompt.encoded.mm_kwargs.values())
    assert prompt.media_bytes == picture.width * picture.height * 3 + frames.size + pixels
    assert prompt.drop_pixels().media_bytes == prompt.media_bytes - pixels


def test_video_frame_times_follow_sampled_range(encoder, files):
    sample = Sample("1", [user(video(files["long"], nframes=6, video_start=1.0, video_end=3.9), "?"), assistant("a")])
    encoded = encoder.encode(sample)
    if is_qwen2_5(encoder):  # 6 frames in 3 s, 2 frames a group
        assert encoded.mm_kwargs["second_per_grid_ts"].tolist() == [1.0]
        assert encoded.mm_kwargs["second_per_grid_ts"].dtype == torch.float32
    else:  # frames 10 16 22 27 33 39 of a 10 fps video
        text = encoder.processor.tokenizer.decode(encoded.input_ids)
        times = {"qwen3_vl": ["1.3", "2.5", "3.6"], "cosmos3_edge": ["1.0", "1.6", "2.2", "2.7", "3.3", "3.9"]}
        assert re.findall(r"<([\d.]+) seconds>", text) == times[encoder.family.model_type]
        assert "second_per_grid_ts" not in encoded.mm_kwargs


def test_encoded_prompt_has_media_and_frame_metadata(encoder, files):
    prompt = encoder.encode_prompt(conversation(files))
    processor = encoder.processor
    assert prompt.prompt_ids.count(processor.image_token_id) == 2
    assert prompt.prompt_ids.count(processor.video_token_id) == 2
    assert [type(m).__name__ for m in prompt.media] == ["Image", "Image", "tuple", "tuple"]
    frames, metadata = prompt.media[2]
    assert frames.dtype == np.uint8 and frames.shape[0] == len(metadata["frames_indices"]) == 6
    assert metadata["do_sample_frames"] is False and metadata["fps"] == pytest.approx(10)
    assert not prompt.encoded.loss_mask.any()


def test_prompt_includes_final_user_turn(encoder):
    requested = [user("a"), assistant("b"), user("c")]
    with_answer = encoder.encode_prompt(Sample("1", [*requested, assistant("d")]))
    assert encoder.encode_prompt(Sample("1", requested)).prompt_ids == with_answer.prompt_ids


def test_encoded_tensors_have_dtypes_for_forward(encoder, files):
    encoded = encoder.encode(conversation(files))
    assert encoded.input_ids.dtype == encoded.position_ids.dtype == encoded.mm_token_type_ids.dtype == torch.int64
    assert encoded.loss_mask.dtype == torch.bool
    assert encoded.position_ids.shape == (3, len(encoded))
    for key, value in encoded.mm_kwargs.items():
        assert value.dtype == (torch.int64 if key.endswith("_thw") else torch.float32), key


@pytest.mark.parametrize("kind", ["image", "video"])
def test_dummy_has_exactly_one_vision_token(encoder, kind):
    dummy = encoder.build_dummy(kind)
    processor = encoder.processor
    ids = dummy.input_ids.tolist()
    assert ids.count(processor.image_token_id if kind == "image" else processor.video_token_id) == 1
    # Before the first mark of Cosmos3-Edge's video is the time of the frame.
    first = "<" if (encoder.family.model_type, kind) == ("cosmos3_edge", "video") else "<|vision_start|>"
    assert processor.tokenizer.convert_ids_to_tokens([ids[0], ids[-1]]) == [first, "<|vision_end|>"]
    assert not dummy.loss_mask.any()
    assert dummy.mm_kwargs[f"{kind}_grid_thw"].tolist() == [[1, 2, 2]]


def test_forked_workers_encode_identically(encoder, files):
    samples = [conversation(files), Sample("2", [user("a"), assistant("b")])] * 2
    expected = [encoder.encode(sample) for sample in samples]
    loader = torch.utils.data.DataLoader(
        samples, batch_size=1, num_workers=2, collate_fn=partial(_encode_first, encoder), multiprocessing_context="fork"
    )
    for encoded, target in zip(loader, expected, strict=True):
        assert torch.equal(encoded.input_ids, target.input_ids)
        assert all(torch.equal(encoded.mm_kwargs[key], value) for key, value in target.mm_kwargs.items())


def _encode_first(encoder: Encoder, samples: list[Sample]) -> EncodedSample:
    return encoder.encode(samples[0])


def test_encoder_can_be_pickled(encoder, files):
    copied = pickle.loads(pickle.dumps(encoder))
    assert torch.equal(copied.encode(conversation(files)).input_ids, encoder.encode(conversation(files)).input_ids)


# ---------------------------------------------------------------- bad rows


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the first message must be from the user"),
        ([user("a")], "neither an assistant message"),
        ([assistant("a")], "the first message must be from the user"),
        ([user("a"), assistant(" ")], "message 1: the assistant's text is empty"),
        ([user("a\udcffb"), assistant("b")], r"message 0: .*half a character\): 'a\\udcffb'; remove it"),
        ([user("<|image_pad|>"), assistant("b")], r"message 0: .*special token '<\|image_pad\|>'"),
        ([user("a"), assistant("b<|im_end|>")], r"message 1: .*special token '<\|im_end\|>'"),
        (
            [user("a"), assistant([{"type": "image", "image": "x.png"}])],
            "message 1: an assistant message may contain only text",
        ),
        ([user(image("gone.png")), assistant("b")], "message 0: gone.png: no such file"),
        ([user(video("x.mp4", fps=1, nframes=4)), assistant("b")], "message 0: x.mp4: no such file"),
    ],
)
def test_errors_name_bad_sample_and_message(encoder, messages, message):
    with pytest.raises(DataError, match=rf"sample 'r1'.*{message}"):
        encoder.encode(Sample("r1", messages))


def test_exclusive_settings_error_names_sample_and_file(encoder, files):
    sample = Sample("r1", [user(video(files["long"], fps=1, nframes=4)), assistant("b")])
    with pytest.raises(DataError, match=r"sample 'r1', message 0: .*long\.mp4: fps \(1\) and nframes \(4\)"):
        encoder.measure(sample)


@pytest.mark.parametrize("use", [Encoder.encode, Encoder.encode_prompt, Encoder.measure])
def test_excessive_vision_tokens_are_rejected_before_expansion(encoder, files, monkeypatch, use):
    monkeypatch.setattr(Encoder, "_expand", None)
    large = [video(files["long"], nframes=60, min_pixels=150_000_000), image(files["small"], min_pixels=100_000_000)]
    sample = Sample("r1", [user("?", *large), assistant("b")])
    with pytest.raises(
        SampleTooLong, match=r"^sample 'r1' has \d{7} media tokens, but a sample may have only 1000000;"
    ):
        use(encoder, sample)


def test_media_in_assistant_message_are_rejected(encoder, files):
    sample = Sample("r1", [user("a"), assistant([image(files["small"])])])
    with pytest.raises(DataError, match="message 1: an assistant message may contain only text"):
        encoder.encode(sample)


# ---------------------------------------------------------------- untrained replies and tools


def test_reply_marked_untrained_is_not_trained(encoder):
    talk = [user("a"), {**assistant("no"), "trained": False}, user("b"), assistant("yes")]
    encoded = encoder.encode(Sample("1", talk))
    assert runs(encoder, encoded) == ["yes<|im_end|>"]
    trained = [user("a"), assistant("no"), user("b"), assistant("yes")]
    assert encoded.input_ids.tolist() == encoder.encode(Sample("1", trained)).input_ids.tolist()


def test_sample_without_trained_reply_is_rejected(encoder):
    with pytest.raises(DataError, match='every reply has "loss": false or belongs to the prompt'):
        encoder.encode(Sample("1", [user("a"), {**assistant("no"), "trained": False}]))


LAMP = {"type": "function", "function": {"name": "lamp", "parameters": {}}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "lamp", "arguments": {"on": 1}}}],
}
TOOL_TEXT = (
    "{{ " + TEXT[3:-3] + " }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
)
TOOL_LIST = "{% for t in tools or [] %}tool {{ t.function.name }}\n{% endfor %}"


def test_tool_call_is_trained_as_rendered(encoder):
    changed = with_template(encoder, TOOL_LIST + TURNS.replace("%s", TOOL_TEXT) + PROMPT)
    talk = [user("On."), CALL, {"role": "tool", "content": "done"}, assistant("It is on.")]
    encoded = changed.encode(Sample("1", talk, tools=[LAMP]))
    call = '<call>{"name": "lamp", "arguments": {"on": 1}}</call>'
    assert runs(changed, encoded) == [f"{call}<|im_end|>", "It is on.<|im_end|>"]
    text = changed.processor.tokenizer.decode(encoded.input_ids)
    assert text.startswith("tool lamp\n") and "<|im_start|>tool\ndone<|im_end|>" in text


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (Sample("1", [user("On."), CALL]), "omits the tool call 'lamp'"),
        (Sample("1", [user("On."), assistant("Yes.")], tools=[LAMP]), "omits the tool 'lamp'"),
    ],
)
def test_template_without_tools_is_rejected(encoder, sample, reason):
    with pytest.raises(DataError, match=reason):
        with_template(encoder, TURNS.replace("%s", TEXT) + PROMPT).encode(sample)
