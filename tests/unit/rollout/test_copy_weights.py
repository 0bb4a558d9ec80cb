"""Weight syncs, which are either complete or raise an error that names the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

from dsreason.rollout.protocol import SyncError
from dsreason.rollout.transformers_engine import copy_weights
from dsreason.rollout.weight_sync import WeightStream


@pytest.fixture
def model() -> nn.Module:
    """Build a model with three parameters under four names: `head.weight` is tied to `embed.weight`."""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "inner": nn.Linear(2, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def sent(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors = {"embed.weight": torch.full((4, 2), 3.0), "inner.weight": torch.ones(2, 2), "inner.bias": torch.ones(2)}
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def copy(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    copy_weights(model, WeightStream(iter(weights), expected, torch.float32, torch.device("cpu")))


def test_every_tensor_is_copied_including_tied(model: nn.Module) -> None:
    copy(model, sent().items())
    assert model["head"].weight.eq(3).all()
    assert model["inner"].weight.eq(1).all()


def test_bfloat16_weights_are_cast_to_copy_dtype(model: nn.Module) -> None:
    copy(model, {name: tensor.bfloat16() for name, tensor in sent().items()}.items())
    assert model["inner"].bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inner__bias": None}, "inner.bias did not arrive"),
        ({"embed__weight": None}, "embed.weight did not arrive"),
        ({"inner__bias": None, "inner__b": torch.ones(2)}, r"inner.b is unknown; inner.bias did not arrive"),
        ({"inner__weight": torch.ones(2)}, r"inner.weight has shape \(2,\) instead of \(2, 2\)"),
    ],
)
def test_error_names_missing_unknown_or_misshapen_tensor(
    model: nn.Module, changes: dict[str, Tensor | None], text: str
) -> None:
    with pytest.raises(SyncError, match=text):
        copy(model, sent(**changes).items())


def test_iterator_is_exhausted_after_unknown_tensor(model: nn.Module) -> None:
    read = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for item in {"strange": torch.ones(1), **sent()}.items():
            read.append(item[0])
            yield item

    with pytest.raises(SyncError, match="strange"):
        copy(model, weights())
    assert read == ["strange", "embed.weight", "inner.weight", "inner.bias"]
