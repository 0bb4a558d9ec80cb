"""Equality of packed rows and single-sample rows, with dsreason's attention and with transformers' attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsreason.config.schema import SFTConfig
from dsreason.data.collate import append_dummies, collate, group_by_parent, join_parent, pack
from dsreason.data.sources import open_datasets
from dsreason.data.types import Batch, EncodedSample, Segment
from dsreason.errors import CheckpointError
from dsreason.models import attention
from dsreason.models.load import load_model
from dsreason.models.policy import Policy
from dsreason.train.common.preflight import build_encoder
from tests.integration.rows import write_mixed_rows


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def model_path(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"tiny_{request.param}")
    return path


@pytest.fixture(scope="module")
def samples(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[EncodedSample]:
    """Eight samples that alternate between text only, one image, and a video with two images."""
    rows = write_mixed_rows(tmp_path_factory.mktemp("rows"))
    data = {"adapter": "jsonl", "path": str(rows), "vision": {"fps": 4.0}}
    config = SFTConfig.model_validate({"data": data, "train": {"precision": "fp32"}})
    encoder, (result, _) = build_encoder(config, model_path), open_datasets(config.data)
    return [encoder.encode(result[i]) for i in range(len(result))]


@pytest.fixture(scope="module")
def completions(samples: list[EncodedSample]) -> list[EncodedSample]:
    """Three completions of 1 to 6 tokens for each of five prompts."""
    random = torch.Generator().manual_seed(0)
    result = []
    for prompt in samples[:5]:
        for _ in range(3):
            ids = torch.randint(5, 60, (int(torch.randint(1, 7, (), generator=random)),), generator=random)
            result.append(completion(prompt, ids))
    return result


def completion(prompt: EncodedSample, ids: Tensor) -> EncodedSample:
    return EncodedSample(
        id=prompt.id,
        input_ids=ids,
        loss_mask=torch.ones(len(ids), dtype=torch.bool),
        position_ids=(prompt.position_ids.max() + 1 + torch.arange(len(ids))).expand(3, -1),
        mm_token_type_ids=torch.zeros_like(ids),
        mm_kwargs={},
        parent=prompt,
    )


def policy(path: Path, kind: str = "auto") -> Policy:
    return Policy(load_model(path, dtype=torch.float32, attention=kind))


def results(policy: Policy, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities, and gradients of their weighted sum; each weight depends only on the token's position."""
    result = policy(batch)
    weights = torch.randn(len(result), generator=torch.Generator().manual_seed(1)) / len(result)
    (result * weights).sum().backward()
    return result.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm().clamp(min=1e-12)) for n in expected)


@pytest.fixture(scope="module")
def apart(model_path: Path, samples: list[EncodedSample]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities and gradients of padded rows with transformers' attention."""
    return results(policy(model_path, "sdpa"), collate(samples, pad_id=0))


@pytest.mark.parametrize("kind", ["auto", "sdpa", "eager"])
def test_packed_row_matches_padded_rows(
    kind: str, model_path: Path, samples: list[EncodedSample], apart: tuple[Tensor, dict[str, Tensor]]
) -> None:
    logprobs, gradients = results(policy(model_path, kind), pack(samples))
    assert (logprobs - apart[0]).abs().max() <= 2e-6
    assert worst(gradients, apart[1]) <= 3e-6


def test_padded_rows_match_under_dsreason_attention(
    model_path: Path, samples: list[EncodedSample], apart: tuple[Tensor, dict[str, Tensor]]
) -> None:
    logprobs, gradients = results(policy(model_path), collate(samples, pad_id=0))
    assert (logprobs - apart[0]).abs().max() <= 2e-6
    assert worst(gradients, apart[1]) <= 3e-6


def test_recomputation_uses_the_same_sample_boundaries(
    model_path: Path, samples: list[EncodedSample], apart: tuple[Tensor, dict[str, Tensor]]
) -> None:
    from dsreason.models.policy import enable_gradient_checkpointing

    recomputing = policy(model_path)
    enable_gradient_checkpointing(recomputing.model)
    first = recomputing(pack(samples))
    recomputing(pack(samples[::-1]))  # another row of the same length, before the backward pass of the first
    weights = torch.randn(len(first), generator=torch.Generator().manual_seed(1)) / len(first)
    (first * weights).sum().backward()
    result = {name: p.grad for name, p in recomputing.named_parameters() if p.grad is not None}
    assert worst(result, apart[1]) <= 3e-6


@torch.no_grad()
def test_samples_never_attend_to_each_other(model_path: Path, samples: list[EncodedSample]) -> None:
    item = policy(model_path)
    before, counts = item(pack(samples)), [int(sample.loss_mask[1:].sum()) for sample in samples]
    changed = list(samples)
    pixels = changed[3].mm_kwargs["pixel_values"]
    changed[3] = replace(changed[3], mm_kwargs=changed[3].mm_kwargs | {"pixel_values": pixels + 1.0})
    result = zip(item(pack(changed)).split(counts), before.split(counts), strict=True)
    equal = [torch.equal(now, was) for now, was in result]
    assert equal == [number != 3 for number in range(len(samples))]


@torch.no_grad()
def test_completions_never_attend_to_each_other(model_path: Path, completions: list[EncodedSample]) -> None:
    item, counts = policy(model_path), [len(sample) for sample in completions]
    before = item(pack(completions)).split(counts)
    changed = list(completions)
    changed[4] = replace(changed[4], input_ids=changed[4].input_ids + 1)
    equal = [torch.equal(now, was) for now, was in zip(item(pack(changed)).split(counts), before, strict=True)]
    assert equal == [number != 4 for number in range(len(completions))]


def test_trailing_dummy_media_do_not_change_outputs(model_path: Path, samples: list[EncodedSample]) -> None:
    text = [samples[0], samples[4]]
    row = append_dummies(pack(text), [samples[1], samples[2]], pad_id=0)
    logprobs, gradients = results(policy(model_path), row)
    assert row.input_ids.shape[1] == sum(len(samples[number]) for number in (0, 4, 1, 2))
    expected, of_expected = results(policy(model_path), pack(text))
    assert (logprobs - expected).abs().max() <= 2e-6
    of_tower = {name for name in gradients if "visual" in name}
    assert of_tower and not any(gradients[name].any() for name in of_tower)
    assert worst({name: item for name, item in gradients.items() if name not in of_tower}, of_expected) <= 3e-6


def test_shared_prompt_matches_separate_prompts(model_path: Path, completions: list[EncodedSample]) -> None:
    logprobs, gradients = results(policy(model_path), pack(completions))
    expected, of_expected = results(policy(model_path, "sdpa"), collate(completions, pad_id=0))
    assert (logprobs - expected).abs().max() <= 2e-6
    assert worst(gradients, of_expected) <= 3e-6


def test_shared_row_contains_each_prompt_once(samples: list[EncodedSample], completions: list[EncodedSample]) -> None:
    batch = pack([*completions[9:], *completions[:9], *samples[5:]])
    assert batch.input_ids.shape[1] == sum(map(len, samples)) + sum(map(len, completions))
    assert batch.media_numbers == {"image": tuple(range(6)), "video": (0, 1)}


def test_completions_are_grouped_by_prompt(samples: list[EncodedSample]) -> None:
    first, second = (completion(samples[number], torch.tensor([7])) for number in (0, 1))
    other = completion(samples[0], torch.tensor([8, 9]))
    assert group_by_parent([first, second, other]) == [first, other, second]
    batch = pack([first, second, other])
    starts = len(samples[0]), len(samples[0]) + 3
    assert batch.segments == (
        Segment(0, len(samples[0])),
        Segment(starts[0], 1, parent=0),
        Segment(starts[0] + 1, 2, parent=0),
        Segment(starts[1], len(samples[1])),
        Segment(starts[1] + len(samples[1]), 1, parent=3),
    )
    assert batch.predictors.tolist() == [starts[0] - 1, starts[0] - 1, starts[0] + 1, batch.segments[3].end - 1]


@torch.no_grad()
def test_empty_completion_does_not_change_outputs(model_path: Path, completions: list[EncodedSample]) -> None:
    item = policy(model_path)
    empty = completion(completions[3].parent, torch.empty(0, dtype=torch.int64))  # type: ignore[arg-type]
    with_empty = item(pack([*completions[:4], empty, *completions[4:]]))
    assert torch.equal(with_empty, item(pack(completions)))


def test_packed_row_with_mask_is_rejected(model_path: Path, samples: list[EncodedSample]) -> None:
    batch = pack(samples)
    with pytest.raises(ValueError, match="packed row has an attention mask"):
        policy(model_path, "sdpa")(replace(batch, attention_mask=torch.ones_like(batch.input_ids)))


def test_transformers_gets_sample_starts_of_packed_row(model_path: Path, samples: list[EncodedSample]) -> None:
    attention_inputs = attention.build_attention_inputs(policy(model_path, "sdpa").model, pack(samples[:2]))
    lengths = [len(sample) for sample in samples[:2]]
    assert attention_inputs["attention_mask"] is None
    assert attention_inputs["position_ids"][0, 0].tolist() == [i for length in lengths for i in range(length)]
    with pytest.raises(ValueError, match=r"positions on 3 axes \(temporal, height, width\); got 4"):
        batch = pack(samples)
        four = torch.cat([batch.position_ids[:1], batch.position_ids])
        attention.build_attention_inputs(policy(model_path).model, replace(batch, position_ids=four))


def test_shared_prompts_are_rejected_with_transformers_attention(
    model_path: Path, completions: list[EncodedSample]
) -> None:
    with pytest.raises(ValueError, match=r'only model\.attention = "auto" supports'):
        policy(model_path, "sdpa")(pack(completions))


def reference_varlen(
    query: Tensor, key: Tensor, value: Tensor, call: attention.KernelCall, scaling: float | None, *, causal: bool
) -> Tensor:
    """Compute torch's variable-length attention as documented, one segment after another."""
    result = []
    for i in range(len(call.query_starts) - 1):
        requested = query[call.query_starts[i] : call.query_starts[i + 1]]
        local = slice(call.key_starts[i], call.key_starts[i + 1])
        keys, values = (tensor[local].repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", requested, keys) * (scaling or query.shape[2] ** -0.5)
        if causal:
            tril = torch.ones(len(requested), len(keys), dtype=torch.bool).tril(len(keys) - len(requested))
            scores = scores.masked_fill(~tril, -torch.inf)
        result.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        assert len(requested) <= call.longest_query and len(keys) <= call.longest_key
    return torch.cat(result)


LAYOUTS = {
    "samples": [Segment(0, 4), Segment(4, 1), Segment(5, 3)],
    "a prompt": [Segment(0, 3), Segment(3, 2, parent=0), Segment(5, 0, parent=0), Segment(5, 3, parent=0)],
    "prompts among samples": [
        Segment(0, 2),
        Segment(2, 3, parent=0),
        Segment(5, 4),
        Segment(9, 2),
        Segment(11, 1, parent=3),
        Segment(12, 2, parent=3),
    ],
}


@pytest.mark.parametrize("segments", LAYOUTS.values(), ids=LAYOUTS)
def test_kernel_call_matches_segments(segments: Sequence[Segment], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "call_varlen_kernel", reference_varlen)
    monkeypatch.setattr(attention, "copy_to_device", lambda tensor, device: tensor)
    random, length = torch.Generator().manual_seed(0), segments[-1].end
    query, key, value = (torch.randn(1, heads, length, 8, generator=random) for heads in (4, 2, 2))
    layout = attention.build_row_layout(segments, torch.device("cuda"))
    by_kernel = attention.attend_by_kernel(query, key, value, layout, None)
    expected = attention.attend_by_segment(query, key, value, segments, None)
    assert by_kernel.shape == expected.shape == (1, length, 4, 8)
    assert torch.allclose(by_kernel, expected, atol=1e-6)


def test_vision_tower_calls_attention_once_per_layer(model_path: Path, samples: list[EncodedSample]) -> None:
    item, calls = policy(model_path), []

    def counted(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        calls.append(module)
        return attention.attend_vision(module, *args, **kwargs)

    from transformers import AttentionInterface

    AttentionInterface.register(attention.VISION, counted)
    try:
        with torch.no_grad():
            item(pack([samples[2]]))
    finally:
        AttentionInterface.register(attention.VISION, attention.attend_vision)
    assert len(calls) == len(set(calls)) == item.model.config.vision_config.depth


def test_sliding_window_attention_is_rejected(model_path: Path) -> None:
    model = load_model(model_path, dtype=torch.float32, attention="sdpa")
    model.config.text_config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(CheckpointError, match=r'sliding-window attention.*set model\.attention = "sdpa"'):
        attention.use_segments(model)


def test_joined_prompt_and_completion_form_one_sample(completions: list[EncodedSample]) -> None:
    full = join_parent(completions[0])
    prompt = completions[0].parent
    assert prompt is not None
    assert len(full) == len(prompt) + len(completions[0])
    assert full.loss_mask.nonzero().flatten().tolist() == list(range(len(prompt), len(full)))
    assert full.parent is None
    assert full.mm_kwargs.keys() == prompt.mm_kwargs.keys()
    assert all(full.mm_kwargs[key] is pixels for key, pixels in prompt.mm_kwargs.items())
