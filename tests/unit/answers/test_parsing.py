"""The default parser, which extracts the answer, the thoughts and the rule that applied from a response."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsreason.answers import mentions
from dsreason.answers import text as texts
from dsreason.answers.text import split_sentences
from dsreason.evaluation import Parsed, parse
from dsreason.text import split_response

OPTIONS = {"A": "to the left", "B": "to the right", "C": "a car", "D": "A car and B"}


def read(text, options=OPTIONS, **arguments):
    parsed = parse(text, "letter", options=options, **arguments)
    return parsed.answer, parsed.rule


# ---------------------------------------------------------------- where the answer stands


@pytest.mark.parametrize(
    ("text", "thoughts", "answer", "tagged"),
    [
        ("<think>r</think>\n\n<answer>A</answer>", "r", "A", True),
        ("<think>\nr\n\ns\n</think> <answer>\nA\n</answer>\n", "r\n\ns", "A", True),
        ("<think>r</think> A", "r", "A", False),
        ("r</think>A", "r", "A", False),
        ("A", "", "A", False),
        ("<answer>A", "", "A", True),
        ("<answer>A</ans", "", "A", True),
        ("A</answer>", "", "A", False),
        ("<think>r <answer>A", "r", "A", True),
        ("<think>r. The answer is A", "r. The answer is A", "", False),
        ("<think>r <answer>A</answer></think>", "r", "A", True),
        ("<answer>A</answer><answer>B</answer>", "", "B", True),
        ("<answer>A</answer> Wait. <answer>B</answer> <answer>", "", "B", True),
        ("<answer>A <answer>B</answer>", "", "B", True),
        ("<think>not <answer>A</answer></think><answer>B</answer>", "not A", "B", True),
        ("<think>a</think> b <think>c</think> D", "a b c", "D", False),
        ("<answer></answer>", "", "", True),
        ("Sure: <answer>A</answer>, not B", "", "A", True),
        ("< Think >r</ THINK ><ANSWER>A</Answer>", "r", "A", True),
        ("x < 3", "", "x < 3", False),
        ("", "", "", False),
    ],
)
def test_response_is_split_into_reasoning_and_answer(text, thoughts, answer, tagged):
    assert split_response(text) == (thoughts, answer, tagged)


@pytest.mark.parametrize("answer_type", ["letter", "reasoning"])
def test_reasoning_is_returned_but_not_parsed(answer_type):
    text = "<think>Is it A? The answer is A.</think> <answer>C. left</answer>"
    assert parse(text, answer_type) == Parsed("C", "Is it A? The answer is A.", "letter and text")


@pytest.mark.parametrize(
    ("text", "kind", "rule"),
    [
        ("<think>r</think> B", "multiple_choice", "only letter, without answer tags"),
        ("The answer is B", "multiple_choice", "answer is, without answer tags"),
        ("B", "open", "whole text, without answer tags"),
        ("<answer>B", "multiple_choice", "only letter"),
        ("<answer>B</answer>", "open", "tagged text"),
        ("no idea", "multiple_choice", "none"),
    ],
)
def test_rule_reports_missing_answer_tags(text, kind, rule):
    assert parse(text, "reasoning", kind=kind).rule == rule
    assert "without" not in parse(text, "letter", kind=kind).rule


# ---------------------------------------------------------------- multiple choice


@pytest.mark.parametrize(
    ("text", "letter", "rule"),
    [
        ("B", "B", "only letter"),
        ("b", "B", "only letter"),
        ("(b)", "B", "only letter"),
        ("**C**", "C", "only letter"),
        ('"B".', "B", "only letter"),
        ("<b>B</b>", "B", "only letter"),
        ("（Ｂ）", "B", "only letter"),
        ("option c", "C", "only letter"),
        ("Choice (C)", "C", "only letter"),
        (r"\boxed{B}", "B", "boxed"),
        (r"I tried \boxed{A}, so \[ \boxed{\text{(B)}} \]", "B", "boxed"),
        (r"$\boxed{\text{The answer is B}}$", "B", "boxed"),
        ("to the left", "A", "option text"),
        ("A car.", "C", "option text"),
        ("a car and b", "D", "option text"),
        ("Answer: C", "C", "answer is"),
        ("### Final Answer: **C**", "C", "answer is"),
        ("**Answer:**\n\n**C. a car**", "C", "answer is"),
        ("Answer – (B)", "B", "answer is"),
        ('{"answer": "B"}', "B", "answer is"),
        ("The answer is B", "B", "answer is"),
        ("The answer is most likely (b).", "B", "answer is"),
        ("The correct answer to the question is option D.", "D", "answer is"),
        ("The best answer would be D: A car and B", "D", "answer is"),
        ("The answer is a car", "C", "answer is"),
        ("So the answer is: to the left.", "A", "answer is"),
        ("The answer is B, not A.", "B", "answer is"),
        ("The answer is B because A is too slow.", "B", "answer is"),
        ("The answer is B. A is wrong.", "B", "answer is"),
        ("The answer is B, the robot turns.", "B", "answer is"),
        ("Answer: B. to the right\n\nA is wrong, and the answer is not C.", "B", "answer is"),
        ("The answer is A. Wait, no, the answer is B.", "B", "answer is"),
        ("If the answer is A, it moves. The answer must be C", "C", "answer is"),
        ("I am not sure, but the answer is B.", "B", "answer is"),
        ("A. to the left, B. to the right, C. a car. The answer is B.", "B", "answer is"),
        ("I'd go with option A.", "A", "answer is"),
        ("Option B is correct.", "B", "answer is"),
        ("It turns, so B is the best choice.", "B", "answer is"),
        ("C is the answer", "C", "answer is"),
        ("C. a car", "C", "letter and text"),
        ("Option C: a car", "C", "letter and text"),
        ("D. A car and B", "D", "letter and text"),
        ("A to the left", "A", "letter and text"),
        ("B, because A is too slow", "B", "letter and text"),
        ("C. move left", "C", "letter and text"),
        ("C.move left", "C", "letter and text"),
        ("C) It does not move.", "C", "letter and text"),
        ("B - the other way", "B", "letter and text"),
        ("C\n\nThe shape is a car, unlike option A.", "C", "own line"),
        ("It turns.\n\n- **B.**", "B", "own line"),
        ("A and D are wrong.\nB. to the right", "B", "own line"),
        ("Based on the video, (b).", "B", "only option named"),
        ("I'd pick the other one, option B", "B", "only option named"),
        ("I think B", "B", "conclusion"),
        ("It should be B", "B", "conclusion"),
        ("It turns. Therefore, C.", "C", "conclusion"),
        ("I think A is wrong, so B", "B", "conclusion"),
        ("The others do not fit, so it has to be (B).", "B", "conclusion"),
        ("C fits best", "C", "conclusion"),
        ("Option A: no. Option B: yes. Option C: no.", "B", "only one right"),
        ("B. The car turns left because A is blocked", "B", "letter and text"),
        ("C - the arm moves there; B would need it to move down", "C", "letter and text"),
        ("B! Because of the wheel.", "B", "letter and text"),
        ("答案是B。", "B", "only option named"),
        ("La respuesta correcta es la B.", "B", "only option named"),
        ("Looks blue to me (B)", "B", "only option named"),
        ("The robot turns to the left", "A", "option text named"),
        ("Is A right? No. (B) fits the arrows.", "B", "conclusion"),
        ("It does not. No. 3 is nearer. So B", "B", "conclusion"),
        ("B is likely.", "B", "conclusion"),
        ("B remains.", "B", "conclusion"),
        ("B fits best because A is not visible.", "B", "conclusion"),
        ("B is better supported by the arrows.", "B", "conclusion"),
        ("B makes the most sense because of the arrows", "B", "conclusion"),
        ("It does not turn to the right. It turns to the left.", "A", "option text named"),
    ],
)
def test_option_is_read_in_every_form(text, letter, rule):
    assert read(text) == (letter, rule)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no idea",
        "Answer:",
        "E",
        "Answer: E",
        r"\boxed{5}",
        "A bird",
        "A robot turns",
        "A or B",
        "A/B",
        "A, B",
        "(A) (B)",
        "A. to the left\nB. to the right",
        "A. to the left B. to the right",
        "A) to the right",
        "The answer is A. to the right",
        "The answer is A or B",
        "The answer is A or the answer is B",
        "The answer is A, no, B.",
        "The answer is a slow car",
        "The answer is a not so slow car",
        "The answer is not A",
        "I don't think the answer is A.",
        "I would not choose B.",
        "Is the answer B?",
        "B?",
        "Not A.",
        "(A) is wrong",
        "I rule out option A.",
        "Neither A nor B is correct",
        "Would you say that B is correct?",
        "It may be (B), and yet A turns too",
        "A) to the right\nA",
        "B because it turns\nA. to the left",
        "A. to the left\nNo, it is B",
        "B because it turns. No wait, it is A",
        "The answer is clearly visible (A or B)",
        "Pick up the object(s)",
        "e.g. the car",
        "Plan B is to wait",
        "It goes from point A to point B.",
        "I think A or B",
        "If it turned, it would be A.",
        "It is not B.",
        "Is it C?",
        "Maybe A, maybe B.",
        "Suppose A is true.",
        "A: no. B: yes. C: yes.",
        "B. It turns right, so A",
        "Let me first look at option A.",
        "A: unlikely.",
        "The answer is B. No wait, it is A",
        "There is a (A or B)",
        "It turns to the left or to the right",
        "It does not turn to the left",
        "Does it turn to the left?",
        "B is likely wrong.",
        "B is likely to be excluded.",
        "B matches nothing.",
        "B fits poorly.",
        "B fits as long as it is dark.",
        "B fits the arrows, but not the light.",
        "B applies to other cars.",
        "B remains unclear.",
        "B is left out.",
        "B makes sense only at night.",
        "B is best avoided.",
        "B is what many would say.",
        "The only option I exclude is B.",
    ],
)
def test_response_without_single_option_yields_nothing(text):
    assert read(text) == ("", "none")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("E", "E"),
        ("C. Does not move", "C"),
        ("A. to the right", "A"),
        ("U.S. troops", ""),
        ("I think so", ""),
        ("C. does not move", "C"),
        ("C. I think", "C"),
        ("İ", ""),
    ],
)
def test_any_letter_counts_if_options_are_unknown(text, letter):
    assert read(text, None)[0] == letter


@pytest.mark.parametrize(
    ("text", "options", "key"),
    [
        ("B", {"a": "left", "b": "right"}, "b"),
        ("2", {"1": "two", "2": "one"}, "2"),
        ("(2) one", {"1": "two", "2": "one"}, "2"),
        ("two", {"1": "two", "2": "one"}, "1"),
        ("2", {"A": "1", "B": "2"}, "B"),
        ("-2", {"A": "2", "B": "-2"}, "B"),
        ("$5", {"A": "$5", "B": "$6"}, "A"),
        ("A", {"A": "B", "B": "A"}, "A"),
        ("left", {"A": "left", "B": "left"}, ""),
        ("The answer is a car", {"A": "dog", "B": "a car", "C": "car"}, "B"),
        ("C. Wait for the car", {"A": "Go", "C": "Wait for the car"}, "C"),
        ("...", {"A": "", "B": "x"}, ""),
    ],
)
def test_answer_is_an_option_key(text, options, key):
    assert read(text, options)[0] == key


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("It moves left and then right.", "B"),
        ("It moves left.", "A"),
        ("It moves left and then", ""),
        ("left and then right, or left", ""),
        ("The left is free.", ""),
    ],
)
def test_longer_option_wins_over_contained_option(text, key):
    assert read(text, {"A": "left", "B": "left and then right"})[0] == key


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("Yes, the arm reaches it.", "A"),
        ("No, it does not.", "B"),
        ("I would say no.", "B"),
        ("There is no way to tell.", ""),
        ("yes and no", ""),
        ("B. No", "B"),
    ],
)
def test_yes_and_no_options_are_read(text, key):
    assert read(text, {"A": "Yes", "B": "No"})[0] == key


DRIVING = {"A": "Turn left", "B": "Turn right", "C": "Go straight", "D": "Stop"}


@pytest.mark.parametrize(
    "text",
    [
        "The driver failed to stop.",
        "The driver refuses to stop.",
        "The driver avoided the stop.",
        "It almost had to stop.",
        "The driver planned to stop but kept going.",
        "The driver would stop, had the light been red.",
        "It looks like a stop, but it is not a stop.",
        "If the light is red, then stop.",
        "The car passes the stop line.",
        "The car reached the bus stop.",
        "Type A personality drivers would turn left.",
    ],
)
def test_negated_or_embedded_option_text_is_ignored(text):
    assert read(text, DRIVING) == ("", "none")


@pytest.mark.parametrize(
    "text",
    [
        "The options include turn left.",
        "My first thought was turn left.",
        "The other car will stop.",
        "The passenger will stop.",
        "The passenger tells the driver to turn left.",
        "The instruction says: stop.",
        "The law says the car must stop.",
        "When the light is red, the car must stop.",
        "The car must stop. Then it moves on.",
        "The car must stop, then it moves on.",
        "The car must stop and then turn left.",
        "On a red light cars stop.",
        "It took a while to stop.",
    ],
)
def test_option_text_is_ignored_outside_answer_sentences(text):
    assert read(text, DRIVING) == ("", "none")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("There are 10 cars.", "A"),
        ("It is 10", "A"),
        ("The number of cars is 10.", "A"),
        ("Frame 10 shows it.", ""),
        ("The speed limit is 10.", ""),
        ("There are 10 seconds left.", ""),
        ("At 10 it starts.", ""),
        ("It is a cat.", "B"),
        ("It looks like a cat.", "B"),
        ("It is larger than a cat.", ""),
        ("The girl is chasing a cat.", ""),
        ("It used to be red.", ""),
        ("The car is red.", "C"),
        ("The man in the red jacket waves.", ""),
        ("Its colour is red.", "C"),
        ("Its lid is red.", ""),
    ],
)
def test_option_text_is_read_after_introduction(text, key):
    assert read(text, {"A": "10", "B": "a cat", "C": "red", "D": "20"})[0] == key


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("The car has to stop at the line.", "D"),
        ("I would say it has to stop.", "D"),
        ("The best thing to do is to stop.", "D"),
        ("The driver was supposed to stop. Instead, it will go straight.", "C"),
        ("Does it turn left? No. The car will turn right.", "B"),
        ("The lane is blocked, so the ego vehicle should turn left.", "A"),
        ("I would say the car has to turn left because of the cone.", "A"),
    ],
)
def test_option_text_asserted_by_clause_is_read(text, key):
    assert read(text, DRIVING) == (key, "option text named")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("At first glance the answer is A. Looking more closely at frame 12, it's C.", "C"),
        ("The user thinks the answer is A. I think it is B.", "B"),
        ("If the light were green, the answer would be C. It is red, though, so D.", "D"),
        ("If you look closely, the answer is B.", "B"),
        ("{'answer': 'C', 'confidence': 0.9}", "C"),
        ("Answer (A/B/C/D): C", "C"),
        ("Possibly B.", "B"),
    ],
)
def test_verdict_is_read_unless_sentence_retracts_it(text, key):
    assert read(text, DRIVING)[0] == key


@pytest.mark.parametrize(
    "text",
    [
        "Answer: B. On second thought, D.",
        "Answer: B. The car slows down, so D.",
        "The answer is B.\nD",
        "If we assume the arrow is right, the answer is B. But the lane makes it A.",
        "I initially chose B. After re-watching I changed my mind to D.",
        "You said the answer is A, but I see D.",
        "The letter on the door is B. The car stops. D",
        "A would be correct if it were dark.",
        "B is correct only at night.",
        "Grade: A",
        "They claim the answer is A.",
        "C is right when the light is green.",
        "Answer: A\n\nAfter checking again: B",
    ],
)
def test_contested_or_conditional_verdict_is_not_read(text):
    assert read(text, DRIVING) == ("", "none")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("It moves left.", "A"),
        ("The car heads to the left because of the cone.", "A"),
        ("The light is red.", "B"),
        ("The cup is in the left drawer.", ""),
        ("It passes a red light.", ""),
    ],
)
def test_one_word_option_is_direction_or_property(text, key):
    assert read(text, {"A": "Left", "B": "Red"})[0] == key


class CountingPattern:
    """A pattern that counts the characters it was asked to search."""

    def __init__(self, pattern):
        self.pattern, self.characters = pattern, 0

    def search(self, text, *place):
        self.characters += len(text)
        return self.pattern.search(text, *place)

    def fullmatch(self, text):
        self.characters += len(text)
        return self.pattern.fullmatch(text)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (mentions, "DENIAL"),
        (mentions, "POSSIBLY"),
        (mentions, "ANSWERS"),
        (texts, "ABBREVIATION"),
        (texts, "NUMBER_SIGN"),
    ],
)
@pytest.mark.parametrize(
    "words", ["Stop ", "stop and ", "stop, ", "Stop. ", "not stop ", "turn left but ", "No. ", "i.e. ", "No. 3 "]
)
def test_repetitive_response_is_scanned_only_few_times(monkeypatch, words, module, name):
    counting = CountingPattern(getattr(module, name))
    monkeypatch.setattr(module, name, counting)
    read(words * 200, DRIVING)
    assert counting.characters <= 5 * len(words * 200)


def test_long_sentence_is_not_matched_against_answers(monkeypatch):
    counting = CountingPattern(mentions.ANSWERS)
    monkeypatch.setattr(mentions, "ANSWERS", counting)
    assert read("so the car " * 1000 + "must stop", DRIVING) == ("", "none")
    assert counting.characters == 0


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It turns, see Fig. 2. So B.", ["It turns, see Fig. 2.", "So B."]),
        ("See no. 3. No. 4 turns.", ["See no. 3.", "No. 4 turns."]),
        ("Does it turn? No. The car stops.", ["Does it turn?", "No.", "The car stops."]),
        ("i.e. e.g. a car", ["i.e. e.g. a car"]),
        ("No.\nB", ["No.", "B"]),
        ("", []),
    ],
)
def test_sentences_do_not_end_at_abbreviations(text, sentences):
    assert split_sentences(text) == sentences


# ---------------------------------------------------------------- other kinds


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Yes", "yes"),
        ("no.", "no"),
        ("**No**", "no"),
        ("Yes, it does.", "yes"),
        ("No it does not", "no"),
        ("Yes, there is no obstacle.", "yes"),
        ("The arm moves.\n\nYes.", "yes"),
        ("It moves. So the answer is yes", "yes"),
        ("No, wait. The answer is yes.", "yes"),
        ("The answer is no. Sorry, the answer is yes.", "yes"),
        ("Yes, no doubt", "yes"),
        (r"\boxed{No}", "no"),
        ("<think>No.</think><answer>YES</answer>", "yes"),
        ("", ""),
        ("No idea", ""),
        ("No one is there", ""),
        ("There is no obstacle", ""),
        ("yes or no", ""),
        ("Yes/No", ""),
        ("Yes\nNo", ""),
        ("I don't think the answer is yes", ""),
        ("Noah", ""),
        ("I think so, yes.", "yes"),
        ("I would say no.", "no"),
        ("It stops too early, so no.", "no"),
        ("I do not think yes.", ""),
        ("There is no car, so no one is hurt", ""),
        ("No, wait, yes.", "yes"),
        ("No, wait, it does.", ""),
        ("Yes, it has to wait.", "yes"),
        ("Yes. Actually, no.", "no"),
        ("Yes, it stops. Wait, it does not.", ""),
        ("Yes, actually it does.", "yes"),
        ("Yes, sorry.", "yes"),
        ("Yes. No correction needed.", "yes"),
        ("Yes. (Sorry for the delay.)", "yes"),
        ("Sorry, yes.", "yes"),
        ("Yes. Sorry, it does not.", ""),
        ("Yes. Correction: no.", "no"),
        ("Yes. No, wait.", ""),
        ("At first the answer is no. On second thought, yes.", "yes"),
        ("If the light is red, the answer is no. It is green, so yes.", "yes"),
        ("No. 3 is the car.", ""),
        ("Yes-no", ""),
        ("Yes—it stops", "yes"),
        ("Does it stop? Yes.", "yes"),
        ("It stops. Yes. It turns. No.", ""),
        ("[Yes/No] Yes", "yes"),
        ("True", "yes"),
        ("False.", "no"),
        ("false positives abound", ""),
        ("Definitely not.", "no"),
        ("The statement is false.", "no"),
        ("I do not think the statement is true.", ""),
        ("I believe that's true.", "yes"),
    ],
)
def test_yes_or_no_answer_is_read(text, answer):
    assert read(text, None, kind="yes_no")[0] == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3", "3"),
        ("4.", "4"),
        ("**4**", "4"),
        ("-1", "-1"),
        ("3.5", "3.5"),
        ("4/5", "4"),
        ("[Score between 1 and 5.]\n\n3", "3"),
        ("3\n\nOkay", "3"),
        ("Score: 3", "3"),
        ("The score is 4.", "4"),
        ("I'd rate it 4 out of 5", "4"),
        ("The answer is 3", "3"),
        ("Score: 1. On second thought, score: 2.", "2"),
        (r"\boxed{2}", "2"),
        ("<think>1</think><answer> 5 </answer>", "5"),
        ("", ""),
        ("four", ""),
        ("I counted 2 cars", ""),
        ("Score: 3-4", ""),
        ("Score: 10%", ""),
        ("1. It moves\n2. It stops", ""),
        (".5", ""),
    ],
)
def test_ordinal_answer_is_read_as_number(text, answer):
    assert read(text, None, kind="ordinal")[0] == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "4"),
        ("I count 2 cars, so the score is 4.", "2"),
        ("4/5", "4"),
        ("Score: **3**", "3"),
        ("7, or rather 5", "5"),
        ("<think>1</think> 5", "5"),
        ("4.5", ""),
        ("10 of 30", ""),
        ("Q3", ""),
        ("0", ""),
        ("four", ""),
    ],
)
def test_digit_parser_takes_first_standalone_rating(text, answer):
    assert read(text, None, kind="ordinal", parser="digit") == ((answer, "first digit") if answer else ("", "none"))


def test_digit_parser_reads_other_kinds_by_default():
    assert read("4. It is B", parser="digit")[0] == read("4. It is B")[0] == "B"


@pytest.mark.parametrize("kind", ["open", "free_text"])
@pytest.mark.parametrize(
    ("text", "answer", "rule"),
    [
        ("<think>r</think>\n<answer> The arm\nturns. </answer>", "The arm\nturns.", "tagged text"),
        ("<think>r</think>\nThe arm turns.\n", "The arm turns.", "whole text"),
        ("<think>The arm turns", "", "none"),
        (" \n", "", "none"),
    ],
)
def test_open_answer_is_the_entire_text(kind, text, answer, rule):
    assert read(text, None, kind=kind) == (answer, rule)


# ---------------------------------------------------------------- the function itself


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("A", "letters"), "answer_type must be one of letter, reasoning; got 'letters'"),
        (("A", "letter", "strict"), "parser must be one of default, compat, digit; got 'strict'"),
    ],
)
def test_unknown_choice_is_rejected_with_valid_choices(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments)


def test_unknown_kind_is_rejected_with_valid_kinds():
    with pytest.raises(ValueError, match="kind must be one of multiple_choice, yes_no, open.*; got 'essay'"):
        parse("A", "letter", kind="essay")


def test_importing_the_parser_loads_no_heavy_package():
    code = "import sys, dsreason.evaluation; print(sorted({'torch', 'vllm', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
