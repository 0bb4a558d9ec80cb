"""Preference pairs: their tokens, refused pairs, and the division into micro-batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dsreason.config.schema_dpo import DPOConfig
from dsreason.data.chat import SampleTooLong
from dsreason.data.types import EncodedSample, Sample
from dsreason.errors import DataError
from dsreason.train.common.preflight import build_encoder
from dsreason.train.dpo.pairs import Pair, PairEncoder, check_answers_differ, cut_pairs
from dsreason.train.dpo.preflight import (
    build_pair_encoder,
    build_row_encoder,
    check_reference_logprobs,
    encode_row,
    open_reference_file,
)
from tests.unit.media.videos import write_video


def says(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


ASKED = [says("user", "Which way?")]
LEFT, RIGHT = says("assistant", "left"), says("assistant", "right, of course")


def preference(*chosen: dict[str, Any], rejected: list[dict[str, Any]], **meta: Any) -> Sample:
    return Sample("7", [*ASKED, *chosen], rejected=[*ASKED, *rejected], meta=meta)


@pytest.fixture(scope="module")
def encoder(tiny: Path) -> PairEncoder:
    return build_pair_encoder(build_encoder(DPOConfig(), tiny))


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("media")
    pixels = np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    write_video(folder / "b.mp4", 8)
    return [{"type": "image", "image": str(folder / "a.png")}, {"type": "video", "video": str(folder / "b.mp4")}]


def check_same(encoder: PairEncoder, sample: Sample, pair: Pair) -> None:
    """Check that prompt and answers match separately encoded conversations, up to the last trained token."""
    for answer, messages in ((pair.chosen, sample.messages), (pair.rejected, sample.rejected or [])):
        full = encoder.encode(replace(sample, messages=messages))
        assert answer.parent is pair.chosen.parent
        assert answer.parent is not None
        end = len(answer.parent) + len(answer)
        for name in ("input_ids", "position_ids", "mm_token_type_ids"):
            joined = torch.cat([vars(answer.parent)[name], vars(answer)[name]], dim=-1)
            assert joined.equal(vars(full)[name][..., :end]), name
        assert answer.loss_mask.equal(full.loss_mask[len(answer.parent) : end])
        assert not full.loss_mask[end:].any()
        assert answer.loss_mask[-1]


def test_both_answers_share_one_prompt_with_media(encoder: PairEncoder, media: list[dict[str, Any]]) -> None:
    prompt = [says("system", "Be short."), says("user", [*media, {"type": "text", "text": "Which way?"}])]
    sample = Sample("7", [*prompt, LEFT], rejected=[*prompt, RIGHT])
    pair = encoder.encode_pair(sample)
    check_same(encoder, sample, pair)
    assert pair.chosen.parent is not None
    assert {"pixel_values", "pixel_values_videos"} <= pair.chosen.parent.mm_kwargs.keys()
    assert encoder.measure(sample) == len(pair.chosen.parent) + len(pair.chosen) + len(pair.rejected)
    assert pair.lengths == (len(pair.chosen), len(pair.rejected))


def test_conversation_may_continue_after_differing_answer(encoder: PairEncoder) -> None:
    sample = preference(LEFT, says("user", "Sure?"), says("assistant", "yes"), rejected=[RIGHT])
    pair = encoder.encode_pair(sample)
    check_same(encoder, sample, pair)
    assert pair.lengths[0] < len(pair.chosen)  # the user's turn in between is not trained


def test_earlier_answers_belong_to_the_prompt(encoder: PairEncoder) -> None:
    second = says("user", "And now?")
    sample = preference(LEFT, second, LEFT, rejected=[LEFT, second, RIGHT])
    pair = encoder.encode_pair(sample)
    assert pair.chosen.parent is not None
    assert not pair.chosen.parent.loss_mask.any()
    assert encoder.processor.tokenizer.decode(pair.chosen.input_ids) == "left<|im_end|>"


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        (Sample("7", [*ASKED, LEFT]), "field 'rejected' is missing"),
        (preference(LEFT, rejected=[LEFT]), "fields 'chosen' and 'rejected' contain the same answer"),
        (preference(LEFT, rejected=[]), "field 'rejected' is only the beginning of the other"),
        (
            Sample("7", [*ASKED, LEFT], rejected=[says("user", "Which colour?"), RIGHT]),
            "field 'chosen', message 0: chosen and rejected diverge here",
        ),
        (preference(LEFT, LEFT, rejected=[LEFT, RIGHT]), "field 'chosen', message 2: chosen and rejected diverge"),
        (
            preference(LEFT, says("user", [{"type": "image", "image": "a.png"}]), LEFT, rejected=[RIGHT]),
            "field 'chosen': images and videos must come before",
        ),
        (preference(LEFT, rejected=[says("assistant", " ")]), "the assistant's text is empty"),
    ],
)
def test_invalid_preference_is_rejected(encoder: PairEncoder, sample: Sample, error: str) -> None:
    for use in (encoder.encode_pair, encoder.measure):
        with pytest.raises(DataError, match=f"sample '7'.*{error}"):
            use(sample)


def test_answers_equal_after_templating_are_rejected() -> None:
    with pytest.raises(DataError, match="sample '7': fields 'chosen' and 'rejected' contain the same answer"):
        check_answers_differ(preference(LEFT, rejected=[RIGHT]), [1, 2], [1, 2])


def test_pair_length_counts_prompt_and_answers(encoder: PairEncoder) -> None:
    sample = preference(LEFT, rejected=[RIGHT])
    size = encoder.measure(sample)
    replace(encoder, max_length=size).encode_pair(sample)
    with pytest.raises(
        SampleTooLong, match=rf"sample '7' has {size} tokens, but the maximum is {size - 1} \(model.max_length\)"
    ):
        replace(encoder, max_length=size - 1).encode_pair(sample)


@pytest.mark.parametrize(
    ("meta", "error"),
    [
        ({}, "fields ref_chosen_logprob and ref_rejected_logprob are missing"),
        ({"ref_chosen_logprob": -1.0}, "field 'ref_rejected_logprob' is None"),
        ({"ref_chosen_logprob": 0.5, "ref_rejected_logprob": -1.0}, "field 'ref_chosen_logprob' is 0.5"),
        ({"ref_chosen_logprob": -(10**400), "ref_rejected_logprob": -1.0}, "field 'ref_chosen_logprob' is -1000"),
        ({"ref_chosen_logprob": -1e308, "ref_rejected_logprob": -1.0}, "field 'ref_chosen_logprob' is -1e.308"),
        ({"ref_chosen_logprob": "-1", "ref_rejected_logprob": -1.0}, "field 'ref_chosen_logprob' is '-1'"),
        ({"ref_chosen_logprob": float("nan"), "ref_rejected_logprob": -1.0}, "field 'ref_chosen_logprob' is nan"),
    ],
)
def test_precomputed_values_must_be_log_probabilities(encoder: PairEncoder, meta: dict[str, Any], error: str) -> None:
    config = DPOConfig.model_validate({"dpo": {"reference": "precomputed"}})
    with pytest.raises(DataError, match=error):
        encode_row(config, None, encoder, preference(LEFT, rejected=[RIGHT], **meta))


def test_mismatched_reference_file_is_found_before_training(encoder: PairEncoder, tmp_path: Path) -> None:
    sample, file = preference(LEFT, rejected=[RIGHT]), tmp_path / "given.jsonl"
    line = {"id": "7", "chosen": -1.0, "rejected": -2.0, "fingerprint": encoder.encode_pair(sample).fingerprint}
    config = DPOConfig.model_validate({"dpo": {"reference": "precomputed", "reference_file": str(file)}})
    file.write_text(json.dumps(line))
    build_row_encoder(config, encoder)(sample)
    with pytest.raises(DataError, match=r"sample '7': the row has changed since dpo\.reference_file"):
        build_row_encoder(config, encoder)(preference(LEFT, rejected=[says("assistant", "up")]))
    with pytest.raises(DataError, match=r"sample '8': dpo\.reference_file \(.*\) has no line with this id; add it"):
        check_reference_logprobs(config, open_reference_file(config), replace(sample, id="8"))


def test_fingerprint_depends_on_texts_and_pixels(encoder: PairEncoder, tmp_path: Path) -> None:
    def of(colour: str, question: str, answer: str) -> str:
        Image.new("RGB", (60, 60), colour).save(tmp_path / "a.png")
        displayed = [{"type": "image", "image": str(tmp_path / "a.png")}, {"type": "text", "text": question}]
        prompt = [says("user", displayed)]
        sample = Sample("7", [*prompt, says("assistant", answer)], rejected=[*prompt, RIGHT])
        return encoder.encode_pair(sample).fingerprint

    assert of("red", "Which?", "left") == of("red", "Which?", "left")
    result = [of("red", "Which?", "left"), of("blue", "Which?", "left"), of("red", "What?", "left")]
    result.append(of("red", "Which?", "up"))
    assert len(set(result)) == 4


def make_pair(name: str, prompt: int, chosen: int, rejected: int) -> Pair:
    def tokens(length: int, parent: EncodedSample | None = None) -> EncodedSample:
        ids = torch.zeros(length, dtype=torch.int64)
        return EncodedSample(name, ids, ids == 0, ids.repeat(3, 1), ids, {}, parent=parent)

    parent = tokens(prompt)
    return Pair(name, tokens(chosen, parent), tokens(rejected, parent), "")


PAIRS = [make_pair("a", 10, 2, 3), make_pair("b", 20, 5, 5), make_pair("c", 4, 1, 2), make_pair("d", 6, 6, 1)]
"""Pairs of 15, 30, 7 and 13 tokens with a shared prompt.

Padded, they have 26, 50, 12 and 24 tokens; with a separate prompt for each answer, 25, 50, 11 and 19.
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"train": {"max_tokens_per_micro_batch": 30}}, ["b", "ad", "c"]),
        ({"train": {"max_tokens_per_micro_batch": 65}}, ["badc"]),
        ({"train": {"micro_batch_size": 3}}, ["bad", "c"]),
        ({"train": {"max_tokens_per_micro_batch": 70}, "model": {"attention": "sdpa"}}, ["bd", "ac"]),
        ({"train": {"packing": False, "max_tokens_per_micro_batch": 52}}, ["b", "ad", "c"]),
        ({"train": {"packing": False, "max_tokens_per_micro_batch": 1000}}, ["badc"]),
        ({"train": {"packing": False}}, ["b", "a", "d", "c"]),
        ({"model": {"max_length": 46}}, ["ba", "dc"]),
    ],
)
def test_pairs_are_batched_whole_within_limits(settings: dict[str, Any], expected: list[str]) -> None:
    groups = cut_pairs(PAIRS, DPOConfig.model_validate(settings))
    assert ["".join(pair.id for pair in group) for group in groups] == expected


def test_oversized_pair_is_named_in_error() -> None:
    config = DPOConfig.model_validate({"train": {"max_tokens_per_micro_batch": 29}})
    with pytest.raises(
        DataError, match=r"sample 'b': its pair has 30 tokens, but .* maximum is train.max_tokens_per_micro_batch \(29"
    ):
        cut_pairs(PAIRS, config)
