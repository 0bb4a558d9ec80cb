"""Kinds of questions, splitting of responses into thoughts and answer, and normalisation of texts for comparison."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal, NamedTuple

QuestionKind = Literal["multiple_choice", "yes_no", "open", "free_text", "ordinal"]
"""Kind of a question, which determines how its answer is graded. In this order: by option letter, by yes or no, by exact text
(ignoring case), by BLEU and ROUGE, or by number."""
TAG = re.compile(r"<\s?(/?)\s?(think|answer)\s?>", re.IGNORECASE)


class Response(NamedTuple):
    """The parts of a response: `<think>It turns.</think> <answer>C</answer>` is `Response("It turns.", "C", tagged=True)`."""

    thoughts: str
    answer: str
    tagged: bool
    """Whether the answer was inside `<answer>` tags."""


def split_response(text: str) -> Response:
    """Split a response into thoughts and answer, both stripped; any of the tags may be missing.

    The thoughts end at the last `</think>` or, without one, at the `<answer>` tag. A response that opens `<think>` but has
    neither of these tags consists only of thoughts. The answer is the last non-empty `<answer>` block (a model that corrects
    itself puts its final answer last) or, without such blocks, the text after the thoughts.
    """
    text = TAG.sub(lambda tag: f"<{tag[1]}{tag[2].lower()}>", text)
    thoughts, closed, answer_part = text.rpartition("</think>")
    if not closed:
        answer_part, _, thoughts = text.partition("<think>")
    if not answer_part.strip():  # the thoughts contain the answer or are never closed
        thoughts, tag, answer_part = thoughts.partition("<answer>")
        answer_part = tag + answer_part
    blocks = [block.strip() for block in re.findall(r"<answer>((?:(?!</?answer>).)*)", answer_part, re.DOTALL)]
    answer = next((block for block in reversed(blocks) if block), "") if blocks else answer_part
    # Remove unmatched closing tags, including a truncated one at the end.
    answer = re.sub(r"</[a-z]*\Z", "", TAG.sub("", answer))
    return Response(TAG.sub("", thoughts).strip(), answer.strip(), bool(blocks))


def normalize(text: str) -> str:
    """Normalise a text for comparison, ignoring case and the amount of white space."""
    return " ".join(text.split()).casefold()


def normalize_answer(text: str) -> str:
    """Normalise an answer for comparison, ignoring case, the amount of white space and a final full stop."""
    return normalize(text).removesuffix(".").rstrip()


def normalize_option(text: str) -> str:
    """Normalise an option's text: apply `normalize`, then remove final punctuation and enclosing parentheses or quotes."""
    plain = normalize(unicodedata.normalize("NFKC", text)).rstrip(" .!;,")
    return plain[1:-1] if re.fullmatch(r"\([^()]*\)|\"[^\"]*\"|'[^']*'", plain) else plain
