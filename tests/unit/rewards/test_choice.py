"""Multiple-choice rewards: strict as in cosmos-rl, lenient, and with partial credit."""

from __future__ import annotations

import pytest

from dsreason.data.types import Sample
from dsreason.rewards import ordinal_choice, single_choice, single_choice_lenient

OPTIONS = {"A": "to the left", "B": "to the right", "C": "a car", "D": "A car and B"}


def asks(answer: str | None, options: dict[str, str] | None = None) -> Sample:
    return Sample("7", [], answer=answer, options=options)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("<answer>A</answer>", "A", 1),
        ("<answer> a </answer>", " A", 1),
        ("a", "A", 1),
        ("<answer>A</answer><answer>B</answer>", "B", 0),
        ("<answer>A. left</answer>", "A", 0),
        ("<answer>A", "A", 0),
        ("A", None, 0),
        ("<answer>A</answer>", "<think>x</think> <answer>A</answer>", 1),
        ("<think>B</think> <answer>A</answer>", "A", 1),
        ("<think>B</think> A", "A", 0),
        ("<answer>(A)</answer>", "A", 0),
        ("", "A", 0),
    ],
)
def test_single_choice_is_strict(completion, answer, expected):
    assert single_choice(completion, asks(answer)) == expected


@pytest.mark.parametrize(
    "completion",
    [
        "A",
        "a",
        "(A)",
        "[A]",
        "A.",
        "A)",
        "A:",
        "**A**",
        r"\boxed{A}",
        r"$\boxed{\text{A}}$",
        "A) to the left",
        "(A) to the left",
        "A. To the left.",
        "A - to the left",
        "A to the left",
        "A) something in other words",
        "to the left",
        "To the left.",
        "The answer is A",
        "The answer is (A).",
        "Answer: A",
        "Answer: A. to the left",
        "I choose option A",
        "The answer is to the left.",
        "<answer>(A)</answer>",
        "<think>Is it B? The answer is B.</think> <answer>A</answer>",
        "<think>B</think>\n\nA",
    ],
)
def test_lenient_choice_reads_common_phrasings(completion):
    assert single_choice_lenient(completion, asks("A", OPTIONS)) == 1
    assert single_choice_lenient(completion, asks("B", OPTIONS)) == 0


@pytest.mark.parametrize("answer", ["A", "(A)", "to the left", "A) to the left"])
def test_reference_is_parsed_like_the_completion(answer):
    assert single_choice_lenient("<answer>A</answer>", asks(answer, OPTIONS)) == 1


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "A bird",
        "A or B",
        "A, B",
        "(A) (B)",
        "A) to the right",
        "A/B",
        "no idea",
        "E",
        "Answer:",
        "AB",
        "the leftmost",
    ],
)
def test_lenient_choice_requires_a_single_option(completion):
    assert [single_choice_lenient(completion, asks(letter, OPTIONS)) for letter in OPTIONS] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("completion", "letter"), [("a car", "C"), ("A car.", "C"), ("a car and b", "D"), ("(C)", "C")]
)
def test_option_text_starting_with_letter_is_recognized(completion, letter):
    options = [key for key in OPTIONS if single_choice_lenient(completion, asks(key, OPTIONS))]
    assert options == [letter]


def test_letter_takes_precedence_over_option_text():
    assert single_choice_lenient("A", asks("A", {"A": "B", "B": "A"})) == 1


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("(c)", "C", 1),
        ("C. left", "C", 1),
        ("A left", "A", 0),
        ("left", "Left", 1),
        ("right", "left", 0),
        ("A", None, 0),
    ],
)
def test_choice_without_options_compares_letters_or_texts(completion, answer, expected):
    assert single_choice_lenient(completion, asks(answer)) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("<answer>4</answer>", "4", 1),
        ("<answer>3</answer>", "4", 0.5),
        ("<answer> 5 </answer>", "4", 0.5),
        ("<answer>2</answer>", "4", 0),
        ("<answer>4.0</answer>", "4", 0),
        ("4", "<answer>4</answer>", 1),
        ("four", "4", 0),
        ("<answer>B</answer>", "b", 1),
        ("A", "B", 0),
        ("4", None, 0),
        ("-1", "0", 0.5),
    ],
)
def test_ordinal_choice_compares_numbers(completion, answer, expected):
    assert ordinal_choice(completion, asks(answer)) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("5", 1), ("4", 0.75), (" 3\n", 0.5), ("2", 0.25), ("1", 0), ("5.", 0), ("Score: 5", 0), ("", 0)],
)
def test_ordinal_choice_scores_bare_ratings_by_distance(completion, expected):
    """VideoPhy-2's recipes: a quarter less per point of distance, and nothing for other replies."""
    assert ordinal_choice(completion, asks("5"), step=0.25) == expected


@pytest.mark.parametrize(
    ("completion", "expected"), [("A", 1), ("b", 0.75), ("C", 0.5), ("D", 0.25), ("E", 0), ("(A)", 0)]
)
def test_ordinal_choice_follows_option_order(completion, expected):
    assert ordinal_choice(completion, asks("A", OPTIONS), step=0.25) == expected
