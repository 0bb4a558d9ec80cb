"""Parameters assembled from hand-made parts of ranks. Files of real runs: tests/integration/test_checkpoint.py."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from dsreason.checkpoints.shards import assemble, slice_stage2, slice_stage3


def test_zero3_slices_are_padded_per_parameter() -> None:
    # Each of two ranks keeps 3 of the 5 values (the last is padding), 1 of the 2, and 2 of the 4 in the next group.
    groups = [{"a": torch.Size((5,)), "b": torch.Size((1, 2))}, {"c": torch.Size((2, 2))}]
    states = [
        {"fp32_flat_groups": [torch.tensor([1.0, 2, 3, 6]), torch.tensor([8.0, 9])]},
        {"fp32_flat_groups": [torch.tensor([4.0, 5, -1, 7]), torch.tensor([10.0, 11])]},
    ]
    result = slice_stage3(states, groups)
    full = {name: assemble(result[name], shape).tolist() for shapes in groups for name, shape in shapes.items()}
    assert full == {"a": [1, 2, 3, 4, 5], "b": [[6, 7]], "c": [[8, 9], [10, 11]]}


def test_zero1_and_zero2_slices_may_split_parameters() -> None:
    # The first rank's part ends within b.
    first = {"a": SimpleNamespace(start=0, numel=2), "b": SimpleNamespace(start=2, numel=1)}
    second = {"b": SimpleNamespace(start=0, numel=2), "c": SimpleNamespace(start=2, numel=1)}
    states = [
        {"single_partition_of_fp32_groups": [torch.tensor([1.0, 2, 3])], "param_slice_mappings": [first]},
        {"single_partition_of_fp32_groups": [torch.tensor([4.0, 5, 6])], "param_slice_mappings": [second]},
    ]
    result = {name: torch.cat(parts).tolist() for name, parts in slice_stage2(states).items()}
    assert result == {"a": [1, 2], "b": [3, 4, 5], "c": [6]}
