"""The parts of a response, the kinds of its answer, and texts without what does not count."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal, NamedTuple

QuestionKind = Literal["multiple_choice", "yes_no", "open", "free_text", "ordinal"]
"""How an answer is graded: a letter of the options, yes or no, the exact text (case aside), BLEU and ROUGE, a number."""
TAG = re.compile(r"<\s?(/?)\s?(think|answer)\s?>", re.IGNORECASE)


class Response(NamedTuple):
    """Example: `<think>It turns.</think> <answer>C</answer>` is `Response("It turns.", "C", tagged=True)`."""

    thoughts: str
    answer: str
    tagged: bool
    """Whether the answer stood in `<answer>` tags."""


def split_response(text: str) -> Response:
    """Thoughts and answer of a response, whichever of the tags are there; both without white space around them.

    Thoughts end at the last `</think>`; where they never end, at the `<answer>` tag, or else all of it is thoughts. The
    answer is the last `<answer>` block that is not empty (a model that corrects itself ends with what it means), or what
    follows the thoughts.
    """
    text = TAG.sub(lambda tag: f"<{tag[1]}{tag[2].lower()}>", text)
    thoughts, closed, answer_part = text.rpartition("</think>")
    if not closed:
        answer_part, _, thoughts = text.partition("<think>")
    if not answer_part.strip():  # thoughts that hold the answer, or that nothing closes
        thoughts, tag, answer_part = thoughts.partition("<answer>")
        answer_part = tag + answer_part
    blocks = [block.strip() for block in re.findall(r"<answer>((?:(?!</?answer>).)*)", answer_part, re.DOTALL)]
    answer = next((block for block in reversed(blocks) if block), "") if blocks else answer_part
    # Without closing tags that stand alone, one that was cut off included.
    answer = re.sub(r"</[a-z]*\Z", "", TAG.sub("", answer))
    return Response(TAG.sub("", thoughts).strip(), answer.strip(), bool(blocks))


def normalized(text: str) -> str:
    """Comparable: case and the amount of white space do not count."""
    return " ".join(text.split()).casefold()


def normalized_answer(text: str) -> str:
    """Comparable: case, the amount of white space and a final full stop do not count."""
    return normalized(text).removesuffix(".").rstrip()


def bare(text: str) -> str:
    """Comparable as an option's text: as `normalized`, without final punctuation or brackets and quotes around all of it."""
    plain = normalized(unicodedata.normalize("NFKC", text)).rstrip(" .!;,")
    return plain[1:-1] if re.fullmatch(r"\([^()]*\)|\"[^\"]*\"|'[^']*'", plain) else plain
