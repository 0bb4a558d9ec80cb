"""The table of deliberate faults, which must match the current code. `python -m tests.sabotage` checks that tests catch them."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.sabotage import ROOT, Fault, read_faults

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_changes_code_and_parses(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text()
    planted = fault.planted_in(source)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_tests_of_each_fault_exist(fault: Fault) -> None:
    assert fault.tests
    assert [name for name in fault.tests if not (ROOT / name).is_file()] == []


def test_fault_names_and_texts_are_unique() -> None:
    for values in ([fault.name for fault in FAULTS], [fault.what for fault in FAULTS]):
        assert [value for value, count in Counter(values).items() if count > 1] == []


def test_every_folder_has_a_fault() -> None:
    rooms = {folder.name for folder in (ROOT / "dsreason").iterdir() if (folder / "__init__.py").exists()}
    assert rooms - {fault.file.split("/")[1] for fault in FAULTS} == set()


def test_fault_list_covers_unit_and_rank_tests() -> None:
    for_unit_tests = [fault for fault in FAULTS if fault.is_for_unit_tests]
    assert len(FAULTS) >= 30
    assert 24 <= len(for_unit_tests) < len(FAULTS)


@pytest.mark.parametrize(("source", "count"), [("a = 1\n", 0), ("b = 1\nb = 1\n", 2)])
def test_fault_with_outdated_text_is_reported(source: str, count: int) -> None:
    fault = Fault("name", "what", "dsreason/x.py", old="b = 1", new="b = 2", tests=[])
    with pytest.raises(ValueError, match=f"name: dsreason/x.py has its text {count} times"):
        fault.planted_in(source)
