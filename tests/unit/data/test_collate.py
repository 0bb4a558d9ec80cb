from dataclasses import replace
from unittest import mock

import pytest
import torch

from dsreason.data.collate import append_dummies, collate, pack
from dsreason.data.types import EncodedSample, Segment


def encoded(name: str, ids: list[int], trained: list[int], images: int = 0, start: int = 0) -> EncodedSample:
    """`images` one-patch images whose pixels carry the first token id."""
    length = len(ids)
    kwargs = {
        "pixel_values": torch.full((4 * images, 2), float(ids[0])),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * images).reshape(images, 3),
    }
    return EncodedSample(
        id=name,
        input_ids=torch.tensor(ids),
        loss_mask=torch.tensor([i in trained for i in range(length)]),
        position_ids=torch.arange(start, start + length).expand(3, -1).clone(),
        mm_token_type_ids=torch.tensor([1 if i < images else 0 for i in range(length)]),
        mm_kwargs=kwargs if images else {},
    )


def test_collated_rows_are_padded_on_the_right():
    batch = collate([encoded("a", [5, 6, 7], [2]), encoded("b", [8], [0])], pad_id=99)
    assert batch.ids == ("a", "b")
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 99, 99]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert (batch.predictors.tolist(), batch.targets.tolist()) == ([1], [2])  # nothing predicts a first token
    assert batch.position_ids.shape == (3, 2, 3)
    assert batch.position_ids[1].tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.mm_kwargs == {}


def test_media_are_joined_in_row_order():
    batch = collate([encoded("a", [5, 6], [], 1), encoded("t", [1], []), encoded("b", [7, 8], [], 2)], pad_id=0)
    assert batch.mm_kwargs["pixel_values"][:, 0].tolist() == [5.0] * 4 + [7.0] * 8
    assert batch.mm_kwargs["image_grid_thw"].shape == (3, 3)
    assert batch.media_numbers == {"image": (0, 1, 2)}
    assert batch.mm_token_type_ids.tolist() == [[1, 0], [0, 0], [1, 1]]


def test_dummies_follow_last_token_of_last_row():
    dummy = encoded("dummy", [50, 51], [0], 1)
    batch = collate([encoded("a", [5, 6, 7], [2]), encoded("b", [8, 9], [1], 1, start=10)], pad_id=99)
    assert (batch.predictors.tolist(), batch.targets.tolist()) == ([1, 3], [2, 4])
    batch = append_dummies(batch, [dummy, dummy], pad_id=99)
    assert batch.ids == ("a", "b")
    assert batch.input_ids.tolist() == [[5, 6, 7, 99, 99, 99], [8, 9, 50, 51, 50, 51]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]
    assert (batch.predictors.tolist(), batch.targets.tolist()) == ([1, 6], [2, 7])
    assert batch.position_ids[0, 1].tolist() == [10, 11, 12, 13, 14, 15]
    assert batch.mm_kwargs["pixel_values"][:, 0].tolist() == [8.0] * 4 + [50.0] * 4
    assert batch.media_numbers == {"image": (0, 1, 1)}


def test_shared_pixels_are_stored_once():
    first, second = encoded("a", [5, 6], [], 2), encoded("b", [7, 8], [], 1)
    rows = [first, second, replace(first, id="c"), replace(second, id="d"), replace(first, id="e")]
    batch = append_dummies(collate(rows, pad_id=0), [encoded("dummy", [50, 51], [], 1)], pad_id=0)
    assert batch.mm_kwargs["pixel_values"][:, 0].tolist() == [5.0] * 8 + [7.0] * 4 + [50.0] * 4
    assert batch.media_numbers == {"image": (0, 1, 2, 0, 1, 2, 0, 1, 3)}
    assert batch.mm_kwargs["image_grid_thw"].shape == (9, 3)
    assert batch.to(torch.device("cpu")).media_numbers == batch.media_numbers


def test_pixels_of_one_prompt_are_not_copied():
    prompt = encoded("a", [5, 6], [], 2)
    batch = collate([prompt, replace(prompt, id="b")], pad_id=0)
    assert batch.mm_kwargs["pixel_values"] is prompt.mm_kwargs["pixel_values"]


def test_dummies_are_separate_samples_in_packed_row():
    dummy = encoded("dummy", [50, 51], [0], 1)
    batch = append_dummies(pack([encoded("a", [5, 6, 7], [2]), encoded("b", [8, 9], [1], 1)]), [dummy], pad_id=99)
    assert batch.ids == ("a", "b")
    assert batch.attention_mask is None
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 50, 51]]
    assert batch.position_ids[:, 0].tolist() == [[0, 1, 2, 0, 1, 0, 1]] * 3
    assert batch.segments == (Segment(0, 3), Segment(3, 2), Segment(5, 2))
    assert (batch.predictors.tolist(), batch.targets.tolist()) == ([1, 3], [2, 4])
    assert batch.media_numbers == {"image": (0, 1)}


def test_first_token_of_packed_sample_is_untrained():
    batch = pack([encoded("a", [5, 6], [0, 1]), encoded("b", [8, 9], [0])])
    assert (batch.predictors.tolist(), batch.targets.tolist()) == ([0], [1])


@pytest.mark.parametrize("fields", [5, 6])
def test_tensors_are_pinned_before_gpu_transfer(fields):
    samples = [encoded("a", [5, 6], [], 1)]
    batch, moves = pack(samples) if fields == 5 else collate(samples, pad_id=0), []

    def pin(tensor):
        moves.append("pin")
        return tensor

    def to(tensor, device, non_blocking):
        moves.append((str(device), non_blocking))
        return tensor

    with mock.patch.object(torch.Tensor, "pin_memory", pin), mock.patch.object(torch.Tensor, "to", to):
        batch.to(torch.device("cuda"))
        batch.to(torch.device("cpu"))
    assert moves == ["pin", ("cuda", True)] * fields + [("cpu", True)] * fields


def test_dummies_do_not_change_earlier_logits(tiny):
    from functools import partial

    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    from dsreason.data.chat import Encoder
    from dsreason.data.types import Sample
    from dsreason.families import get_family
    from dsreason.models.mrope import compute_position_ids

    config = AutoConfig.from_pretrained(tiny)
    family = get_family(config.model_type)
    positions = partial(compute_position_ids, family.grids, config=config)
    encoder = Encoder(AutoProcessor.from_pretrained(tiny), family, positions, max_length=99)
    model = AutoModelForImageTextToText.from_pretrained(tiny, dtype=torch.float32).eval()
    sample = encoder.encode(Sample("1", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))

    def logits(dummies: list[EncodedSample]) -> torch.Tensor:
        batch = append_dummies(collate([sample], pad_id=encoder.pad_id), dummies, pad_id=encoder.pad_id)
        with torch.no_grad():
            return model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                position_ids=batch.position_ids,
                mm_token_type_ids=batch.mm_token_type_ids,
                **batch.mm_kwargs,
            ).logits[0, : len(sample)]

    with_dummies = logits([encoder.build_dummy("image"), encoder.build_dummy("video")])
    assert torch.allclose(with_dummies, logits([]), atol=1e-5)
