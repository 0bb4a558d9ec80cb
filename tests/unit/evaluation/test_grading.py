"""Grading for each kind of question, scores of free-text answers, and scorers written by users."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsreason.answers.types import Parsed
from dsreason.config.schema_eval import EvaluationConfig
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, RewardError
from dsreason.evaluation.questions.grading import Grader
from dsreason.evaluation.types import Question

OPTIONS = {"A": "to the left", "B": "to the right"}


def asks(kind, answer, options=None, *, number=0):
    sample = Sample(f"clip{number}", [{"role": "user", "content": "?"}], answer=None)
    return Question(f"d/clip/{number}", "d", "clip", kind, sample, answer, options)


def grader_for(answer_type, **settings):
    return Grader(EvaluationConfig(answer_type=answer_type, **settings))


def is_right(kind, text, answer, options=None, **settings):
    return grader_for("reasoning", **settings).grade(asks(kind, answer, options), text).is_correct


# ---------------------------------------------------------------- right or wrong


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("<answer>A</answer>", "A", True),
        ("<think>B</think> (a) to the left", "A", True),
        ("to the left", "a", True),
        ("A", "To the left.", True),
        ("A", "<think>It is B.</think><answer>A</answer>", True),
        ("B", "A", False),
        ("A or B", "A", False),
        ("", "A", False),
        ("C", "C", False),
    ],
)
def test_multiple_choice_is_right_when_options_match(text, answer, right):
    assert is_right("multiple_choice", text, answer, OPTIONS) is right


@pytest.mark.parametrize(
    ("parser", "text", "right"),
    [
        ("default", "B", True),
        ("default", "<answer>nyc.</answer>", True),
        ("default", "York", False),
        ("default", "", False),
        ("compat", "<answer>B</answer>", True),
        ("compat", "<answer>C</answer>", False),
        ("compat", "", False),
    ],
)
def test_any_accepted_answer_is_right(parser, text, right):
    question = asks("open", "A")
    question = replace(question, sample=replace(question.sample, other_answers=("b", "NYC", " ", "")))
    assert grader_for("reasoning", parser=parser).grade(question, text).is_correct is right


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [("4", "4", True), ("It gets 4 of 5.", "4", True), ("3 balls: 4", "4", False), ("plausible", "4", False)],
)
def test_digit_parser_grades_the_first_rating(text, answer, right):
    assert is_right("ordinal", text, answer, parser="digit") is right


@pytest.mark.parametrize(
    ("kind", "text", "answer", "right"),
    [
        ("yes_no", "Yes, it does.", "yes", True),
        ("yes_no", "<answer>NO</answer>", "No.", True),
        ("yes_no", "No", "yes", False),
        ("yes_no", "maybe", "maybe", False),
        ("open", "<answer>Red  Car.</answer>", "red car", True),
        ("open", "red car", "<think>blue</think><answer>Red car.</answer>", True),
        ("open", "a red car", "red car", False),
        ("open", "", "", False),
        ("ordinal", "Score: 3", "3", True),
        ("ordinal", "3.0", "3", True),
        ("ordinal", "3.5", "3", False),
        ("ordinal", "three", "3", False),
        ("ordinal", "3", "three", False),
        ("free_text", "The arm turns.", "the arm turns", True),
        ("free_text", "The arm moves.", "the arm turns", False),
    ],
)
def test_non_choice_answers_must_equal_reference(kind, text, answer, right):
    assert is_right(kind, text, answer) is right


@pytest.mark.parametrize(
    ("kind", "text", "answer", "right"),
    [
        ("multiple_choice", "<answer>The answer is A</answer>", "A", False),
        ("multiple_choice", "<answer>A. left</answer>", "a", True),
        ("open", "<answer>Red</answer>", "Red", False),
        ("yes_no", "<answer>Yes</answer>", "y", True),
        ("multiple_choice", "nothing", "", True),
    ],
)
def test_compat_compares_first_capital_with_raw_reference(kind, text, answer, right):
    assert is_right(kind, text, answer, OPTIONS, parser="compat") is right


def test_parsed_answer_is_part_of_the_grade():
    graded = grader_for("letter").grade(asks("multiple_choice", "B", OPTIONS), "<think>r</think> (b)")
    assert graded.parsed == Parsed("B", "r", "only letter")
    assert graded.scores == {}


def test_each_response_is_graded_by_its_question():
    questions = [asks("multiple_choice", "A", OPTIONS), asks("yes_no", "no"), asks("open", "red")]
    graded = map(grader_for("letter").grade, questions, ["A", "yes", "red"])
    assert [grade.is_correct for grade in graded] == [True, False, True]


# ---------------------------------------------------------------- free texts


def test_free_texts_get_bleu_and_rouge():
    scores = grader_for("letter").grade(asks("free_text", "a red car turns left"), "the red car moves").scores
    # words 2/4, pairs 1/3, triples 0/2 → 1/4, fours 0/1 → 1/4 (smoothed); one word too short
    bleu = 100 * math.exp(1 - 5 / 4) * (2 / 4 * 1 / 3 * 1 / 4 * 1 / 4) ** (1 / 4)
    expected = {"bleu": bleu, "rouge1": 4 / 9, "rouge2": 2 / 7, "rougeL": 4 / 9}
    assert scores == pytest.approx(expected)


def test_free_texts_are_compared_with_tagged_answer():
    graded = grader_for("reasoning").grade(
        asks("free_text", "<think>x y</think><answer>red car</answer>"), "<answer>Red car</answer>"
    )
    assert graded.scores["rougeL"] == 1
    assert graded.is_correct


def test_unparsed_free_text_scores_zero():
    scores = grader_for("reasoning").grade(asks("free_text", "red car"), "<think>red car").scores
    assert scores == {"bleu": 0, "rouge1": 0, "rouge2": 0, "rougeL": 0}


def test_compat_does_not_score_texts():
    assert grader_for("letter", parser="compat").grade(asks("free_text", "red car"), "red car").scores == {}


# ---------------------------------------------------------------- semantic similarity


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random embedding model with 8 dimensions and a dozen words."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("embedding")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "red", "blue", "car", "arm", "turns", "stops"]
    (folder / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        initializer_range=1.0,
    )
    BertModel(config).save_pretrained(folder / "bert")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    transformer = Transformer(str(folder / "bert"))
    model = SentenceTransformer(modules=[transformer, Pooling(8, "mean")], device="cpu")
    model.save(str(folder / "model"))
    return folder / "model"


def test_similarity_is_the_cosine_of_the_embeddings(embedding_model):
    from sentence_transformers import SentenceTransformer

    pairs = [("the red car turns", "a blue arm stops"), ("a car", "a car"), ("the arm", "the red arm")]
    with grader_for("letter", similarity_model=str(embedding_model)) as grader:
        graded = [grader.grade(asks("free_text", right), text) for text, right in pairs]
    model = SentenceTransformer(str(embedding_model), device="cpu")
    for (text, right), grade in zip(pairs, graded, strict=True):
        item, other = model.encode([text, right]).astype(np.float64)
        cosine = float(np.sum(item * other) / math.sqrt(np.sum(item**2) * np.sum(other**2)))
        assert grade.scores["similarity"] == pytest.approx(cosine, abs=1e-12)
    assert graded[1].scores["similarity"] == pytest.approx(1)
    assert graded[0].scores["similarity"] < 0.99


def test_similarity_covers_only_parsed_free_texts(embedding_model):
    grader = grader_for("reasoning", similarity_model=str(embedding_model))
    texts = ["<answer>red</answer>", "<think>red car"]
    open_, unread = map(grader.grade, [asks("open", "red"), asks("free_text", "red car")], texts)
    assert "similarity" not in open_.scores
    assert unread.scores["similarity"] == 0


def test_missing_embedding_model_error_suggests_a_folder(tmp_path):
    with pytest.raises(
        ConfigError, match=r"similarity_model \S+nowhere: the folder does not exist.*set it to the folder of a sentence"
    ):
        grader_for("letter", similarity_model=str(tmp_path / "nowhere"))


def test_unloadable_embedding_model_error_names_folder(tmp_path):
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ConfigError, match=f"similarity_model {tmp_path}: cannot be loaded"):
        grader_for("letter", similarity_model=str(tmp_path))


def test_embedding_model_with_custom_code_is_rejected(tmp_path):
    (tmp_path / "modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "own.Model"}]')
    (tmp_path / "own.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(ConfigError, match="cannot be loaded: modules.json names the class own.Model"):
        grader_for("letter", similarity_model=str(tmp_path))


def test_missing_sentence_transformers_error_shows_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(
        ConfigError, match=r"requires sentence-transformers; run .*pip install .*'sentence-transformers>=5'"
    ):
        grader_for("letter", similarity_model=str(tmp_path))


# ---------------------------------------------------------------- the user's scorer


@pytest.fixture
def judge(tmp_path: Path) -> str:
    file = tmp_path / "judge.py"
    file.write_text(
        "def share(completion, sample):\n"
        "    if 'bang' in completion:\n"
        "        raise KeyError('no such thing')\n"
        "    words = sample.answer.split()\n"
        "    return sum(word in completion for word in words) / len(words), {'words': len(words)}\n"
    )
    return f"{file}:share"


@pytest.mark.parametrize(("threshold", "right"), [(0.5, [True, True, False, True]), (0.75, [True, False, False, True])])
def test_scorer_threshold_decides_correctness(judge, threshold, right):
    texts = ["red car", "red", "blue", "<think>red car</think> blue"]
    questions = [asks("open", "red car", number=i) for i in range(4)]
    with grader_for("letter", scorer=judge, scorer_threshold=threshold) as grader:
        graded = [grader.grade(question, text) for question, text in zip(questions, texts, strict=True)]
    assert [grade.scores for grade in graded] == [{"share": 1}, {"share": 0.5}, {"share": 0}, {"share": 1}]
    assert [grade.is_correct for grade in graded] == right
    assert {grade.graded_by for grade in graded} == {f"share >= {threshold}"}


@pytest.mark.parametrize(("scorer", "value"), [("format", 1.0), ("words", 8.0), ("always", 1.0)])
def test_scorer_without_threshold_does_not_affect_correctness(tmp_path, scorer, value):
    file = tmp_path / "own.py"
    file.write_text("def words(completion, sample):\n    return 8.0\ndef always(completion, sample):\n    return 1.0\n")
    texts = ["<think>It turns.</think> <answer>A</answer>", "<think>It turns.</think> <answer>B</answer>"]
    with grader_for("reasoning", scorer=scorer if scorer == "format" else f"{file}:{scorer}") as grader:
        graded = [grader.grade(asks("multiple_choice", "B", OPTIONS, number=i), text) for i, text in enumerate(texts)]
    assert [grade.is_correct for grade in graded] == [False, True]
    assert [(grade.scores, grade.graded_by) for grade in graded] == [({scorer: value}, "kind")] * 2


@pytest.mark.parametrize(
    ("scorer", "options", "text", "answer", "value"),
    [
        ("temporal_iou", {}, "<think>Early?</think> from 00:13 to 00:16", "[12.0, 15.0]", 0.5),
        ("box_iou", {"coordinates": "0-1000"}, "[[200, 100, 400, 200]]", "[100, 100, 300, 200]", 1 / 3),
        ("points", {"limit": 200.0}, "(530, 540)", '{"point_2d": [500, 500]}', 0.75),
        ("trajectory", {"limit": 4.0}, "[[2, 0], [4, 1]]", "[[2, 0], [4, 0]]", (1 + 0.75) / 2),
        ("numeric", {"absolute": 0.1}, "about 85 cm", "0.8 m", 1.0),
        ("json_fields", {}, '{"kind": "Cut-in.", "lane": 2}', '{"kind": "cut-in", "lane": 3}', 0.5),
    ],
)
def test_physical_ai_rewards_grade_with_options(scorer, options, text, answer, value):
    with grader_for("reasoning", scorer=scorer, scorer_options=options, scorer_threshold=0.4) as grader:
        graded = grader.grade(asks("open", answer), text)
    assert graded.scores == {scorer: pytest.approx(value)}
    assert graded.is_correct is (value >= 0.4)


def test_format_scorer_sees_the_opened_tag():
    text = "It turns.</think> <answer>B</answer>"
    with grader_for("reasoning", scorer="format") as grader:
        graded = [grader.grade(asks("open", "B"), text, opening) for opening in ("", "<think>\n")]
    assert [grade.scores for grade in graded] == [{"format": 0.0}, {"format": 1.0}]


def test_scorer_cannot_make_unparsed_answer_right(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def always(completion, sample):\n    return 1.0\n")
    texts = ["I cannot say.", "A or B", "", "<think>B", "A"]
    with grader_for("letter", scorer=f"{file}:always", scorer_threshold=0.5) as grader:
        graded = [grader.grade(asks("multiple_choice", "B", OPTIONS, number=i), text) for i, text in enumerate(texts)]
    assert [grade.is_correct for grade in graded] == [False, False, False, False, True]


def test_scorer_does_not_change_other_scores(judge):
    with grader_for("letter", scorer=judge) as grader:
        graded = grader.grade(asks("free_text", "a red car turns"), "red")
    assert (graded.scores["share"], graded.scores["rouge1"], graded.is_correct) == (0.25, pytest.approx(0.4), False)


def test_scorer_does_not_change_compat_verdict(judge):
    with grader_for("letter", parser="compat", scorer=judge, scorer_threshold=0.5) as grader:
        graded = grader.grade(asks("multiple_choice", "A"), "B, not A")
    assert (graded.scores, graded.is_correct) == ({"share": 1}, False)


def test_error_in_scorer_names_the_sample(judge):
    with grader_for("letter", scorer=judge) as grader, pytest.raises(RewardError, match=r"share(.|\n)*clip7"):
        grader.grade(asks("open", "red", number=7), "bang")


def test_missing_scorer_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.py"), grader_for("letter", scorer=str(tmp_path / "nowhere.py")):
        pass
