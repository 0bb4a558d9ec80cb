"""Parameters of a small model, counted by hand and on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from dsreason.config.schema import SFTConfig
from dsreason.tools.planning.architecture import Architecture, build_from_table
from dsreason.tools.planning.parameters import Parameters, PlannedParameter, build_meta_model, count_parameters

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
EMBEDDING = 512 * 64
ATTENTION = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64  # q, k, v with biases; o without
MLP = 3 * 64 * 128
LAYER = ATTENTION + MLP + 2 * 64  # two norms
ALL = EMBEDDING + 2 * LAYER + 64
MATRICES = 64 * 64 + 2 * 64 * 32 + 64 * 64 + MLP
"""Parameters of the matrices of one layer that get adapters."""


def counted(**sections: dict[str, Any]) -> Parameters:
    config = SFTConfig.model_validate(sections)
    return count_parameters(build_meta_model(Architecture(build_from_table(CONFIG), "here"), config), config)


def test_tied_embedding_is_counted_only_once() -> None:
    result = counted()
    assert (result.numel, result.num_trained) == (ALL, ALL)


def test_frozen_parameters_are_counted_separately() -> None:
    result = counted(model={"freeze": ["embed_tokens"]})
    assert (result.num_trained, result.count_kind("frozen")) == (ALL - EMBEDDING, EMBEDDING)


def test_adapter_has_two_matrices_per_layer() -> None:
    result = counted(lora={"rank": 4})
    ends = (64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128)  # q, k and v, o, the feed-forward
    assert result.num_trained == result.count_kind("adapter") == 2 * 4 * ends
    assert result.numel == ALL


def test_rank_pattern_changes_adapter_parameter_count() -> None:
    more = counted(lora={"rank": 4, "rank_pattern": {"q_proj": 8}}).num_trained - counted(lora={"rank": 4}).num_trained
    assert more == 2 * 4 * (64 + 64)


def test_nf4_takes_36_bytes_per_64_values() -> None:
    result = counted(lora={"rank": 4}, model={"quantize": "nf4"})
    in_bits = [item for item in result.all if item.kind == "nf4"]
    assert sum(in_bit.numel for in_bit in in_bits) == 2 * MATRICES
    assert sum(in_bit.nbytes for in_bit in in_bits) == 2 * MATRICES * 36 // 64


@pytest.mark.parametrize(("numel", "ranks", "share"), [(10, 1, 20), (10, 4, 6), (3, 4, 2)])
def test_last_rank_share_is_padded(numel: int, ranks: int, share: int) -> None:
    assert PlannedParameter("x", numel, "trained", 2).share(ranks) == share
