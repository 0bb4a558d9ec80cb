"""Files of reference log-probabilities, which are read, continued or refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from dsreason.errors import ConfigError, DataError
from dsreason.train.dpo.loader import PairFacts
from dsreason.train.dpo.reference import (
    ReferenceLine,
    ReferenceRecord,
    StoredReference,
    append,
    open_stored,
    read_reference_file,
)

ROWS = [
    ReferenceRecord("training", 3, "7", "ab", -10.5, -9.25),
    ReferenceRecord("validation", 3, "8", "cd", -1.0, -2.0),
]


def facts(row: int = 3, name: str = "7", fingerprint: str = "ab") -> PairFacts:
    return PairFacts(row, name, f"rows.jsonl, row {row + 1}", fingerprint, (1, 1), None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has measured both rows."""
    append(open_stored(tmp_path, None, "model-1").file, ROWS)
    return tmp_path


def test_measurements_are_found_by_part_and_row(run: Path) -> None:
    stored = open_stored(run, None, "model-1")
    assert stored.get_logprobs(facts(), "training") == (-10.5, -9.25)
    assert stored.get_logprobs(facts(fingerprint="cd"), "validation") == (-1.0, -2.0)
    assert stored.list_missing("training", [5, 3, 4, 5]) == [4, 5]


@pytest.mark.parametrize("pair", [facts(fingerprint="xx"), facts(row=4)])
def test_changed_row_is_rejected(run: Path, pair: PairFacts) -> None:
    with pytest.raises(DataError, match=rf"{pair.where} \(sample '7'\): the row has changed since .*reference\.jsonl"):
        open_stored(run, None, "model-1").get_logprobs(pair, "training")


def test_changed_model_is_remeasured_or_rejected(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = run / "checkpoints" / "step_3"
    with pytest.raises(ConfigError, match=r"fingerprint model-2, but .* fingerprint model-1 \(.*reference\.jsonl\)"):
        open_stored(run, checkpoint, "model-2")
    with caplog.at_level(logging.WARNING):
        assert open_stored(run, None, "model-2").rows == {}
    assert "computing its rows again" in caplog.text
    assert (run / "reference.jsonl").read_text() == '{"model": "model-2"}\n'


def test_continued_run_copies_the_reference_file(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert open_stored(other, run / "checkpoints" / "step_3", "model-1").rows.keys() == {
        ("training", 3),
        ("validation", 3),
    }
    assert (other / "reference.jsonl").read_text() == (run / "reference.jsonl").read_text()


def test_unfinished_line_is_measured_again(run: Path) -> None:
    with (run / "reference.jsonl").open("a") as file:
        file.write('{"part": "training", "row": 9')
    assert open_stored(run, None, "model-1") == StoredReference(
        run / "reference.jsonl", {(item.part, item.row): item for item in ROWS}
    )
    append(run / "reference.jsonl", ROWS[:1])
    assert [json.loads(line) for line in (run / "reference.jsonl").read_text().splitlines()][1:] == [
        *map(vars, ROWS),
        vars(ROWS[0]),
    ]


def test_configured_reference_file_is_matched_by_id(run: Path, tmp_path: Path) -> None:
    value = read_reference_file(str(run / "reference.jsonl"))
    assert value.by_id == {"7": ReferenceLine(-10.5, -9.25, "ab"), "8": ReferenceLine(-1.0, -2.0, "cd")}
    assert value.get_logprobs(facts()) == (-10.5, -9.25)
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"id": 7, "chosen": -1, "rejected": -2.5}\n\n{"id": 8, "chosen": -3, "rejected": 0}')
    value = read_reference_file(str(plain))
    assert value.get_logprobs(facts()) == (-1.0, -2.5)
    assert value.get_logprobs(facts(name="8")) == (-3.0, 0.0)
    with pytest.raises(
        DataError, match=r"row 4 \(sample '9'\): dpo.reference_file \(.*\) has no line with this id; add it"
    ):
        value.get_logprobs(facts(name="9"))


def test_changed_answers_in_configured_file_are_rejected(run: Path) -> None:
    value = read_reference_file(str(run / "reference.jsonl"))
    with pytest.raises(
        DataError, match=r"row 4 \(sample '7'\): the row has changed.*\(its fingerprint is xx, but the file has ab\)"
    ):
        value.get_logprobs(facts(fingerprint="xx"))


def test_configured_file_of_another_model_warns(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    value = read_reference_file(str(run / "reference.jsonl"))
    value.warn_if_model_differs("model-1")
    assert not caplog.records
    value.warn_if_model_differs("model-2")
    assert "a model with fingerprint model-1, but training starts with model-2" in caplog.text


def test_unfinished_line_in_configured_file_is_skipped(run: Path) -> None:
    with (run / "reference.jsonl").open("a") as file:
        file.write('{"part": "training", "row": 9')
    assert read_reference_file(str(run / "reference.jsonl")).by_id.keys() == {"7", "8"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"id": "7", "chosen": -1}\n', "line 1: must have id, chosen and rejected"),
        ('{"id": "7", "chosen": "-1", "rejected": -2}\n', "line 1: must have id, chosen and rejected"),
        ('{"id": "7", "chosen": NaN, "rejected": -2}\n', "line 1: must have id, chosen and rejected"),
        *(
            (f'{{"id": "7", "chosen": {value}, "rejected": -2}}\n', "line 1: must have id, chosen and rejected")
            for value in ("5", "true", "-1e308", "-1" + 400 * "0")
        ),
        ("[1]\n", "line 1: is not a JSON object"),
        ("{}\n{\n", "line 2: is not JSON"),
        (
            '{"id": "7", "chosen": -1, "rejected": -2}\n{"id": 7, "chosen": -1, "rejected": -3}\n',
            "line 2: the id '7' occurs twice with different values",
        ),
    ],
)
def test_invalid_configured_file_is_rejected(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "given.jsonl").write_text(text)
    with pytest.raises(DataError, match=rf"given\.jsonl, {error}"):
        read_reference_file(str(tmp_path / "given.jsonl"))


def test_missing_configured_file_is_rejected() -> None:
    with pytest.raises(ConfigError, match="dpo.reference_file .*: does not exist"):
        read_reference_file("nowhere.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "7", "chosen": -1.0}',
        *(
            f'{{"part": "training", "row": 3, "id": "7", "fingerprint": "ab", "chosen": {value}, "rejected": -1}}'
            for value in ("NaN", '"-1"', "true", "1", "-1" + 400 * "0")
        ),
        '{"part": "training", "row": [3], "id": "7", "fingerprint": "ab", "chosen": -1, "rejected": -1}',
    ],
)
def test_unmeasured_line_in_run_file_is_rejected(tmp_path: Path, line: str) -> None:
    (tmp_path / "reference.jsonl").write_text(f'{{"model": "model-1"}}\n{line}\n')
    with pytest.raises(DataError, match=r"reference\.jsonl, line 2: .* is not a measured row; remove the file"):
        open_stored(tmp_path, None, "model-1")
