"""Options listed in a question's text, with the wordings of the seed data, and their effects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dsreason.answers.correct import get_question_kind, is_correct
from dsreason.config.schema_data import DataConfig
from dsreason.data.messages import get_text
from dsreason.data.options import find_option_letter, parse_listed_options, with_options
from dsreason.data.sources import open_datasets
from dsreason.data.types import Sample
from dsreason.rewards import ordinal_choice, single_choice, single_choice_lenient

QUESTION = "Who has right of way here?\nA) The van\nB) The tram\nC) The cyclist\nD) Nobody"
OPTIONS = {"A": "The van", "B": "The tram", "C": "The cyclist", "D": "Nobody"}
WIDE_LETTERS = {ord(letter): ord(letter) + 0xFEE0 for letter in "ABCD"}
LOWER, UPPER = "abcd", "ABCD"
MARKED = [
    (LOWER, [f". {text}" for text in OPTIONS.values()]),
    *((UPPER, [f" {dash} {text}" for text in OPTIONS.values()]) for dash in "-–—"),
]


def asks(question: str, answer: str | None = "B", **changes: Any) -> Sample:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer or "B"}]
    return Sample("7", messages, **{"answer": answer, **changes})


@pytest.mark.parametrize(
    "question",
    [
        QUESTION,
        QUESTION.replace(")", "."),
        QUESTION.replace(")", ":"),
        "Who has right of way here?\n(A) The van\n(B) The tram\n(C) The cyclist\n(D) Nobody",
        "Who has right of way here? A) The van B) The tram C) The cyclist D) Nobody",
        "Who has right of way here? A. The van, B. The tram, C. The cyclist, or D. Nobody",
        "Who has right of way here? (A) The van; (B) The tram; (C) The cyclist; (D) Nobody",
        f"{QUESTION}\nAnswer with the option's letter.",
        f"{QUESTION}\n\nPlease answer: A, B, C or D.",
        QUESTION.replace("\n", "\n   ").replace("tram", "tram  "),
        QUESTION.replace("A)", "**A)**").replace("B)", "**B)**").replace("C)", "**C)**").replace("D)", "**D)**"),
        f"Plan (A) or (B) is not what is asked. {QUESTION}",
        QUESTION.replace("\n", "\n- "),
        QUESTION.replace("\n", "\n* Option ").replace(")", ":"),
        QUESTION.replace("A)", "a)").replace("B)", "b)").replace("C)", "c)").replace("D)", "d)"),
        "Who has right of way here?\n(a) The van\n(b) The tram\n(c) The cyclist\n(d) Nobody",
        "Who has right of way here?\n[A] The van\n[B] The tram\n[C] The cyclist\n[D] Nobody",
        QUESTION.replace(") ", "."),
        QUESTION.replace(") ", "、"),
        *(QUESTION.replace(")", f"{mark}**").replace("\n", "\n**") for mark in ".:)"),
        *(QUESTION.replace(")", f"**{mark}").replace("\n", "\n**") for mark in ".:)"),
        *(QUESTION.replace(") ", mark) for mark in "）．："),
        QUESTION.replace(") ", "）").translate(WIDE_LETTERS),
        *(
            "\n".join([QUESTION[:27], *(f"{letter}{text}" for letter, text in zip(*marked, strict=True))])
            for marked in MARKED
        ),
        "Who has right of way here: A) The van B) The tram C) The cyclist or D) Nobody?",
    ],
)
def test_options_are_found_in_every_notation(question):
    assert parse_listed_options(question) == OPTIONS


@pytest.mark.parametrize(
    "question",
    [
        "",
        "Which way does it turn?",
        "Does this video show a collision? [Yes/No]",
        "Which is larger, (A) or (B)?",
        "Who is right? A) The van",
        "Who is right?\nB) The tram\nC) The cyclist",
        "Who is right?\nA) The van\nC) The cyclist",
        "Did J. A. Smith meet C. B. Jones?",
        "Is the U.S. A. B. C. network shown?",
        "Plan A - we go left. Plan B - we go right. Which one?",
        "Plan A - we go left.\nPlan B - we go right.\nWhich one?",
        "Does it have more vitamin a. Or more of vitamin b. Or of c.?",
        "Which of the edges is red?\nA - B\nB - C\nC - A",
        "Is 2**a. 2**b. shown?",
        "Which is right (see A) and (see B)?",
        "Who meets whom?\nA. Smith and\nC. Jones",
        "Is it at 3 a.m. or at 4 b.c.?",
    ],
)
def test_text_without_option_list_yields_none(question):
    assert parse_listed_options(question) is None


@pytest.mark.parametrize("between", ["\n", " "])
def test_option_text_may_refer_to_another_option(between):
    listed = between.join(["Who?", "A) The van (see B)", "B) The tram", "C) Both (A and B)"])
    assert parse_listed_options(listed) == {"A": "The van (see B)", "B": "The tram", "C": "Both (A and B)"}


def test_line_starts_outrank_letters_within_lines():
    assert parse_listed_options("Who?\n(A) as fast as (B) is\n(B) faster") == {"A": "as fast as (B) is", "B": "faster"}


def test_power_operator_keeps_its_asterisks():
    assert parse_listed_options("How many?\n**A)** 2**3\n**B)** 2 ** 4") == {"A": "2**3", "B": "2 ** 4"}
    assert find_option_letter("2**3", {"A": "2**3", "B": "2 ** 4"}) == "A"


def test_options_keep_their_question_marks():
    assert parse_listed_options("What is asked?\nA) Where?\nB) When?") == {"A": "Where?", "B": "When?"}


def test_letter_gap_ends_option_list():
    question = "Which?\nA) one\nB) two\nD) four"
    assert parse_listed_options(question) == {"A": "one", "B": "two"}
    assert with_options(asks(question, "D")).options is None


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        (" (b) ", "B"),
        ("B.", "B"),
        ("B) The tram", "B"),
        ("(B) the tram.", "B"),
        ("the tram", "B"),
        ("The answer is B", "B"),
        ("Answer: B.", "B"),
        ("Option B", "B"),
        ("**B**", "B"),
        ("[B]", "B"),
        (r"$\boxed{B}$", "B"),
        ("The answer is the tram.", "B"),
        ("The answer is B or C", None),
        ("<think>It comes from the right.</think> <answer>B</answer>", "B"),
        ("<think>It comes from the right, as A) does.</think>\nB", "B"),
        ("<think>It comes from the right.</think>\n\nThe answer is B.", "B"),
        ("B - The tram", "B"),
        ("B）The tram", "B"),
        ("Ｂ", "B"),
        ('"The tram"', "B"),
        ("<think>B", None),
        ("E", None),
        ("A) The tram", None),
        ("the red tram", None),
        ("The tram, since it comes from the right.", None),
        ("Yes", None),
        ("", None),
    ],
)
def test_answer_resolves_by_letter_or_text(answer, letter):
    assert find_option_letter(answer, OPTIONS) == letter
    assert with_options(asks(QUESTION, answer)).options == (OPTIONS if letter else None)


def test_text_shared_by_options_is_ambiguous():
    assert find_option_letter("left", {"A": "left", "B": "Left."}) is None


def test_option_worded_like_an_announcement_matches_literally():
    assert find_option_letter("option B", {"A": "Option B", "B": "Option A"}) == "A"
    assert find_option_letter("$5", {"A": "$5", "B": "5"}) == "A"


def test_empty_row_options_count_as_unset():
    assert with_options(asks(QUESTION, options={})).options == OPTIONS


def test_row_options_override_options_in_question():
    value = asks(QUESTION, options={"A": "yes", "B": "no"})
    assert with_options(value) is value


@pytest.mark.parametrize("kind", ["open", "free_text", "ordinal", "yes_no"])
def test_non_choice_questions_get_no_options(kind):
    assert with_options(asks(QUESTION, meta={"question_kind": kind})).options is None


def test_last_turn_decides_when_answer_is_missing():
    turns = ["Which?\nA) one\nB) two\nC) three", "A", QUESTION, "<think>x</think><answer>D</answer>"]
    roles = ["user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    assert with_options(Sample("7", messages)).options == OPTIONS


# ---------------------------------------------------------------- what follows from it


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    rows = [
        {"id": "1", "image": "a.png", "question": QUESTION, "answer": "B"},
        {"id": "2", "image": "a.png", "question": "Does this video show a collision? [Yes/No]", "answer": "No"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_datasets(DataConfig(adapter="jsonl", path=str(tmp_path / "rows.jsonl")))[0]


def test_options_are_read_without_changing_the_prompt(dataset):
    sample = dataset[0]
    assert (sample.options, sample.answer, get_question_kind(sample)) == (OPTIONS, "B", "multiple_choice")
    assert get_text(sample.messages[0]) == QUESTION


@pytest.mark.parametrize(
    "completion", ["B", "(B)", "The answer is B", "The tram", "B) The tram", "I think it is the tram."]
)
def test_validation_and_rewards_use_options_in_question(dataset, completion):
    assert is_correct(completion, dataset[0])
    assert single_choice_lenient(completion, dataset[0]) == 1


def test_ordinal_reward_scores_closer_letters_higher(dataset):
    assert not is_correct("C) The cyclist", dataset[0])
    assert [ordinal_choice(letter, dataset[0]) for letter in "ABCD"] == [0.5, 1, 0.5, 0]


@pytest.mark.parametrize("answer", ["The tram", "(B)", "The answer is B", "<think>x</think>\nB"])
def test_strict_rewards_resolve_reference_not_completion(answer):
    sample = with_options(asks(QUESTION, answer))
    assert get_question_kind(sample) == "multiple_choice"
    letters = [f"<answer>{letter}</answer>" for letter in "ABCD"]
    assert [single_choice(letter, sample) for letter in letters] == [0, 1, 0, 0]
    assert [ordinal_choice(letter, sample) for letter in letters] == [0.5, 1, 0.5, 0]
    assert single_choice("I think B", sample) == ordinal_choice("I think B", sample) == 0


def test_ordinal_reward_compares_numeric_options_by_value():
    sample = asks("How many?\nA) 1\nB) 2\nC) 5", "2", options={"A": "1", "B": "2", "C": "5"})
    assert [ordinal_choice(text, sample, step=0.25) for text in ("2", "5", "B", "C")] == [1, 0.25, 1, 0.75]


@pytest.mark.parametrize(
    ("completion", "right"), [("No", 1), ("No, there is none.", 1), ("Yes, one.", 0), ("no idea", 0)]
)
def test_yes_no_question_requires_clear_answer(dataset, completion, right):
    assert get_question_kind(dataset[1]) == "yes_no"
    assert is_correct(completion, dataset[1]) == bool(right)
    assert single_choice_lenient(completion, dataset[1]) == right
