"""The rows that each step sees."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dsreason.data.order import StepOrder, WeightedRows
from dsreason.errors import DataError


def parts(*given: int | tuple[int, float]) -> list[WeightedRows]:
    """Build consecutively numbered rows per source, from a row count or from a count and a weight (default 1)."""
    result, first = [], 0
    for count, weight in (item if isinstance(item, tuple) else (item, 1.0) for item in given):
        result.append(WeightedRows(np.arange(first, first + count), weight))
        first += count
    return result


def test_unshuffled_epochs_repeat_rows_in_order():
    order = StepOrder(parts(20), batch_size=2, epochs=2, shuffle=False)
    assert order.num_steps == 20
    assert order.indices(3) == [6, 7]
    assert order.indices(12) == [4, 5]


def test_a_batch_may_span_two_epochs():
    order = StepOrder(parts(5), batch_size=3, epochs=2, shuffle=False)
    assert order.num_steps == 3
    assert [order.indices(step) for step in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_epochs_shuffle_differently_but_reproducibly():
    first, second, other = (StepOrder(parts(50), batch_size=50, epochs=2, seed=seed) for seed in (1, 1, 2))
    assert sorted(first.indices(0)) == sorted(first.indices(1)) == list(range(50))
    assert first.indices(0) != first.indices(1)
    assert first.indices(1) == second.indices(1)
    assert first.indices(0) != other.indices(0)


def test_weight_sets_row_frequency_per_epoch():
    order = StepOrder(parts(10, (10, 2.5), (10, 0.5)), batch_size=40)
    counts = Counter(order.indices(0))
    assert order.rows_per_epoch == 40
    assert all(counts[row] == 1 for row in range(10))
    assert sorted(counts[row] for row in range(10, 20)) == [2] * 5 + [3] * 5
    assert sorted(counts[row] for row in range(20, 30)) == [0] * 5 + [1] * 5


def test_weight_below_one_varies_rows_between_epochs():
    order = StepOrder(parts((100, 0.5)), batch_size=50, epochs=2)
    first, second = order.indices(0), order.indices(1)
    assert len(set(first)) == len(set(second)) == 50
    assert set(first) != set(second)


def test_max_steps_only_shortens_the_run():
    assert StepOrder(parts(20), batch_size=2, max_steps=3).num_steps == 3
    assert StepOrder(parts(20), batch_size=2, max_steps=99).num_steps == 10


def test_too_few_rows_for_batch_are_rejected():
    with pytest.raises(DataError, match=r"3 rows.*4"):
        StepOrder(parts(3), batch_size=4, epochs=10)
