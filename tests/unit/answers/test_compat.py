"""The compatible parser gives what cosmos-reason1's evaluator gives. Expected values are those of its own functions."""

from __future__ import annotations

import pytest

from dsreason.answers.compat import extract_tagged_text
from dsreason.evaluation import parse


@pytest.mark.parametrize(
    ("text", "answer", "reasoning"),
    [
        ("<think>r</think>\n\n<answer>A</answer>", "A", "r"),
        ("<answer>(B)</answer>", "B", ""),
        ("<answer>The answer is B</answer>", "T", ""),
        ("<answer>b</answer>", "", ""),
        ("<answer>C. move</answer>", "C", ""),
        ("A", "", ""),
        ("<answer></answer>", "", ""),
        ("<think>\n r\ns \n</think>\n<answer>\n\nD\n</answer>", "D", "r\ns"),
        ("<answer>A</answer><answer>B</answer>", "A", ""),
        ("<answer>a</answer><answer>B</answer>", "", ""),
        ("<answer>B", "", ""),
        ("B</answer>", "", ""),
        ("<Answer>B</Answer>", "", ""),
        ("<answer><answer>B</answer></answer>", "B", ""),
        ("<answer>x <answer>y</answer> B</answer>", "", ""),
        ("<think>r <answer>C</answer>", "C", ""),
        ("<think>one</think><think>two</think><answer>A</answer>", "A", "one"),
        ("<think>use <answer>A</answer> tags</think><answer>B</answer>", "A", "use <answer>A</answer> tags"),
        ("<answer>Éa B</answer>", "B", ""),
        ("", "", ""),
    ],
)
def test_reasoning_is_the_first_capital_in_the_first_answer_block(text, answer, reasoning):
    parsed = parse(text, "reasoning", parser="compat")
    assert (parsed.answer, parsed.reasoning) == (answer, reasoning)
    assert parsed.rule == ("first capital in the answer tags" if answer else "none")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("A", "A"),
        ("B.", "B"),
        ("(C)", "C"),
        ("Answer: C", "A"),
        ("answer: C", "C"),
        ("b", ""),
        ("", ""),
        ("\n\nD\n", "D"),
        ("<think>R</think><answer>b</answer>", "R"),
        ("é É z Z", "Z"),
    ],
)
def test_a_letter_is_the_first_capital_anywhere(text, answer):
    rule = "first capital" if answer else "none"
    assert parse(text, "letter", parser="compat") == (answer, "", rule)


@pytest.mark.parametrize("kind", ["yes_no", "open", "free_text", "ordinal"])
def test_every_kind_of_question_is_read_in_the_same_way(kind):
    assert parse("Yes, 3", "letter", "compat", kind=kind, options={"A": "x"}).answer == "Y"


@pytest.mark.parametrize(
    ("text", "blocks", "around"),
    [
        ("<answer>A</answer>", {"answer": ["A"]}, [""]),
        ("<a>1</a><a>2</a>", {"a": ["1", "2"]}, ["", ""]),
        ("<think>x<answer>B</answer>", {"answer": ["B"]}, ["", "x"]),
        ("<a><b>x</b></a>", {"a": ["<b>x</b>"]}, [""]),
        ("no tags", {}, ["no tags"]),
        ("", {}, []),
        ("<Answer>x</answer>", {}, ["", "x</answer>"]),
        ("<a1>x</a1>", {}, ["<a1>x</a1>"]),
        ("<a>x</a> tail", {"a": ["x"]}, ["", " tail"]),
        ("<a>", {}, [""]),
        ("<a><a>x</a>", {"a": ["<a>x"]}, [""]),
        ("</a>x<b>", {}, ["</a>x"]),
        ("<>x</>", {"": ["x"]}, [""]),
        ("a < b <c>\n</c>\n", {"c": ["\n"]}, ["a < b ", "\n"]),
        (
            "Intro text\n<question>\nWhat is the capital of France?\n</question>\nMiddle text\n"
            "<answer>\nParis\n</answer>\nEnd text\n",
            {"question": ["\nWhat is the capital of France?\n"], "answer": ["\nParis\n"]},
            ["Intro text\n", "\nMiddle text\n", "\nEnd text\n"],
        ),
    ],
)
def test_tagged_text_and_what_is_around_it(text, blocks, around):
    assert extract_tagged_text(text) == (blocks, around)
