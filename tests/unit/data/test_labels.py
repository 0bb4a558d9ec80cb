"""Labels of rows, and the order that shows every label equally often."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsreason.config.schema_data import DataConfig
from dsreason.data.labels import (
    Label,
    balance_labels,
    build_order_parts,
    count_labels,
    count_labels_per_epoch,
    get_label,
    read_labels,
)
from dsreason.data.order import StepOrder, WeightedRows
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.tools.datasets.row_facts import collect_row_facts

ANSWERS = ["no"] * 8 + ["yes"] * 2


def config(folder: Path, answers: list[Any], question: str = "q", **keys: Any) -> DataConfig:
    rows = [
        {"id": str(i), "question": question, "answer": answer, "site": f"s{i % 5}"} for i, answer in enumerate(answers)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(adapter="jsonl", path=str(folder / "rows.jsonl"), **{"balance": "answer"} | keys)


def opened(data: DataConfig) -> SampleDataset:
    return open_datasets(data)[0]


def order(data: DataConfig, **options: Any) -> StepOrder:
    return StepOrder(build_order_parts(opened(data), data), **options)


def test_balanced_epoch_contains_labels_equally_often(tmp_path):
    counter = Counter(order(config(tmp_path, ANSWERS), batch_size=10).indices(0))
    assert sorted(counter[row] for row in range(8)) == [0, 0, 0, 1, 1, 1, 1, 1]
    assert sorted([counter[8], counter[9]]) == [2, 3]


def test_row_choice_varies_by_epoch_and_seed(tmp_path):
    data = config(tmp_path, ANSWERS)
    first, second, other = (order(data, batch_size=10, epochs=9, seed=seed) for seed in (1, 1, 2))
    assert [first.indices(step) for step in range(9)] == [second.indices(step) for step in range(9)]
    assert first.indices(8) != other.indices(8)
    choice = {frozenset(row for row in first.indices(step) if row < 8) for step in range(9)}
    assert len(choice) > 1
    assert len(frozenset.union(*choice)) == 8  # over time, every row is used


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_step_rows_do_not_depend_on_ranks(tmp_path, num_ranks):
    data = config(tmp_path, ANSWERS)
    at_once, resumed = order(data, batch_size=6, epochs=4), order(data, batch_size=6, epochs=4)
    assert at_once.num_steps == 6
    full = [at_once.indices(step) for step in range(6)]
    shares = [[resumed.indices(step)[rank::num_ranks] for rank in range(num_ranks)] for step in range(3, 6)]
    assert [sorted(row for share in step for row in share) for step in shares] == [sorted(rows) for rows in full[3:]]


def test_source_weights_are_kept_within_a_label():
    parts = [WeightedRows(np.arange(6)), WeightedRows(np.arange(6, 10), 2.0)]
    by_label = balance_labels(parts, ["a", "a", "b", "b", "b", "b", "a", "b", "b", "b"])
    assert count_labels(by_label) == {"a": Label(3, 7), "b": Label(7, 7)}  # (6 + 2 x 4) / 2 each
    displayed = {name: [part.per_epoch for part in result] for name, result in by_label.items()}
    assert displayed == {"a": [4, 3], "b": [3, 4]}  # a: 2 rows of weight 1, 1 of weight 2; b: 4 and 3 → 4 : 6 of 7


def test_balanced_epoch_rounds_up_rows_per_label(tmp_path):
    data = config(tmp_path, ["a"] * 8 + ["b", "c"])
    assert order(data, batch_size=10).rows_per_epoch == 12


def test_order_is_unchanged_without_balance(tmp_path):
    data = config(tmp_path, ANSWERS, balance=None)
    assert order(data, batch_size=10).indices(0) == StepOrder([WeightedRows(np.arange(10))], batch_size=10).indices(0)
    assert count_labels_per_epoch(opened(data), data) == {}


def test_held_out_rows_are_not_balanced(tmp_path):
    data = config(tmp_path, ANSWERS, validation=5)
    training, held_out = open_datasets(data)
    assert (len(training), len(held_out)) == (5, 5)
    assert sum(label.rows for label in count_labels_per_epoch(training, data).values()) == 5


def sample(answer: str | None, **meta: Any) -> Sample:
    return Sample("7", [{"role": "user", "content": "q"}], answer=answer, meta=meta)


@pytest.mark.parametrize(
    ("answer", "field", "label"),
    [
        ("B", "answer", "B"),
        ("<think>It turns.</think> <answer>yes</answer>", "answer", "yes"),
        ("B", "site", "north"),
        ("B", "label.weather", "rain"),
        ("B", "score", "3"),
        (None, "site", "north"),
    ],
)
def test_label_comes_from_answer_or_field(answer, field, label):
    assert get_label(sample(answer, site="north", label={"weather": "rain"}, score=3), field) == label


@pytest.mark.parametrize("answer", ["B", "(b)", "B.", "tunnel", "B) tunnel", "<answer>B</answer>", "The answer is B"])
def test_option_spellings_share_one_label(tmp_path, answer):
    data = config(tmp_path, [answer, "neither of them"], "What?\nA) ramp\nB) tunnel")
    assert read_labels(opened(data), data) == ["B", "neither of them"]
    assert collect_row_facts("", opened(data)[0], None).answer == "B"


def test_long_option_text_maps_to_its_letter(tmp_path):
    text = "It waits at the crossing until the tram has passed"
    data = config(tmp_path, [text, "A"], f"What?\nA) It goes\nB) {text}")
    assert read_labels(opened(data), data) == ["B", "A"]


def test_field_name_may_contain_a_dot():
    assert get_label(sample("B", **{"w.x": "rain", "label": {"a.b": "fog"}}), "w.x") == "rain"
    assert get_label(sample("B", label={"a.b": "fog"}), "label.a.b") == "fog"


def test_malformed_row_is_reported_without_traceback(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dsreason.data.types import Sample\n"
        "def to_sample(row): return Sample('7', [{'role': 'user', 'content': [{'text': 'q'}]}], answer='B')\n"
    )
    data = config(tmp_path, ["B"]).model_copy(update={"adapter": str(tmp_path / "mine.py")})
    with pytest.raises(DataError, match=r"row 1: data\.balance \(answer\): the type of a part must be .*; got None"):
        read_labels(opened(data), data)


def test_label_is_last_reply_when_answer_missing():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [{"type": "text", "text": "no"}]}]
    assert get_label(Sample("7", messages), "answer") == "no"


@pytest.mark.parametrize(
    ("answer", "field", "text"),
    [
        (None, "answer", r"^the row has no one-line answer of at most 40 characters"),
        ("It turns left at the crossing, then right again.", "answer", "no one-line answer of at most 40 characters"),
        (
            "B",
            "sight",
            r"^sample\.meta has no string or number named sight; .*available fields \(site, label\.weather\)$",
        ),
        ("B", "label", r"no string or number named label; .*available fields \(site, label\.weather\)$"),
    ],
)
def test_unlabelled_row_is_reported_with_available_fields(answer, field, text):
    with pytest.raises(DataError, match=text):
        get_label(sample(answer, site="north", label={"weather": "rain"}), field)


def test_label_comparison_ignores_case_and_full_stop(tmp_path):
    data = config(tmp_path, ["Yes", "yes.", "YES", "no"])
    assert read_labels(opened(data), data) == ["Yes", "Yes", "Yes", "no"]
    assert count_labels_per_epoch(opened(data), data) == {"Yes": Label(3, 2), "no": Label(1, 2)}


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_unlabelled_rows_stop_or_are_skipped(tmp_path, caplog, on_bad_row):
    data = config(tmp_path, ["yes", "no", None, {"a": 3}], on_bad_row=on_bad_row)
    if on_bad_row == "error":
        with pytest.raises(
            DataError, match=r"rows\.jsonl, row 3: data\.balance \(answer\): the row has no one-line answer"
        ):
            build_order_parts(opened(data), data)
        return
    assert sorted(order(data, batch_size=2).indices(0)) == [0, 1]
    assert "2 rows have no label and are skipped" in caplog.text
    assert "row 4: field 'answer' is {'a': 3}; it must be a string" in caplog.text


def test_unlabelled_rows_do_not_lengthen_epoch(tmp_path):
    data = config(tmp_path, ["yes", "no", "no"] + [None] * 97, on_bad_row="skip")
    assert order(data, batch_size=1).rows_per_epoch == 4  # 3, rounded up to a multiple of the 2 labels
    parts = [WeightedRows(np.arange(4), 1.5), WeightedRows(np.arange(4, 6))]
    labels = ["a", "b", None, None, "b", None]  # 2 x 1.5 + 1 rows have a label
    assert count_labels(balance_labels(parts, labels)) == {"a": Label(1, 2), "b": Label(2, 2)}


def test_unlabelled_rows_are_counted_by_cause(tmp_path, caplog):
    data = config(tmp_path, ["yes", None, None, {"a": 3}], on_bad_row="skip")
    read_labels(opened(data), data)
    _, *lines = caplog.messages[-1].splitlines()
    assert [re.sub(r"such as \S+/", "", line.split("; ")[0]) for line in lines] == [
        "  2 rows, rows.jsonl, row 2: the row has no one-line answer of at most 40 characters to use as a label",
        "  1 rows, rows.jsonl, row 4: field 'answer' is {'a': 3}",
    ]


def test_field_missing_in_all_rows_is_rejected(tmp_path):
    data = config(tmp_path, ANSWERS, balance="wether", on_bad_row="skip")
    with pytest.raises(
        DataError, match=r"no row has a usable label: 10 rows, such as .*row 1: .*named wether.*site"
    ) as error:
        build_order_parts(opened(data), data)
    assert str(error.value).count("data.balance") == 1


def test_rare_label_triggers_a_warning(tmp_path, caplog):
    data = config(tmp_path, ["no"] * 29 + ["yes"])
    build_order_parts(opened(data), data)
    assert "per epoch; add rows with these labels: 'yes' (1 rows, each 15 times)" in caplog.text


@pytest.mark.parametrize("balance", [True, ""])
def test_balance_must_name_a_field(balance):
    with pytest.raises(ValueError, match=r"balance"):
        DataConfig(balance=balance)
