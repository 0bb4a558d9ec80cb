"""Results for tests; the default is a correct answer "A" to a question with the options A to C."""

from __future__ import annotations

from typing import Any

from dsreason.evaluation.types import Result

OPTIONS = {"A": "left", "B": "right", "C": "up"}
ASKED = "Which way?\n(A) left\n(B) right\n(C) up\nAnswer with the option's letter from the given choices directly."


def made(video_id: str = "v", number: int = 0, answer: str = "A", **changes: Any) -> Result:
    """Build a result; by default, `is_correct` is whether `answer` equals `correct_answer`."""
    dataset = changes.get("datasource", "robovqa")
    reference = changes.get("correct_answer", "A")
    fields: dict[str, Any] = {
        "datasource": dataset,
        "video_id": video_id,
        "prompt": ["Answer the questions.", ASKED],
        "correct_answer": reference,
        "reasoning": "",
        "answer": answer,
        "full_response": answer,
        "is_correct": answer == reference and "error" not in changes,
        "id": f"{dataset}/{video_id}/{number}",
        "kind": "multiple_choice",
        "options": OPTIONS,
        "media": [],
        "rule": "letter" if answer else "none",
        "attempts": 1,
        "finish_reason": "stop",
        "completion_tokens": 3,
        "seconds": 0.5,
    }
    return Result(**fields | changes)
