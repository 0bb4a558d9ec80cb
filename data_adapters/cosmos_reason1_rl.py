"""Adapter for Cosmos-Reason1 RL and benchmark rows: questions about a clip, most of them multiple choice.

    {"video": "clips/0123.mp4", "qa_pairs": {"question": "What does the robot do next?",
                                             "index2ans": {"A": "grasps the cup", "B": "opens the door"}, "answer": "A"}}

`data.path` is `nvidia/Cosmos-Reason1-RL-Dataset` (`data.split = "rl"`), `nvidia/Cosmos-Reason1-Benchmark`
(`data.split = "benchmark"`), a folder with the same layout (`<subset>/<subset>_rl_qa_pairs.json`), or a single such file.
`data.subset` is robovqa, agibot, bridgev2, holoassist or, in the benchmark, robofail. Clips are found as in the adapter
`cosmos_reason1`. A row may have an `image` instead of a video. If `qa_pairs` is a list of questions, each question counts as a
row. A question without `answer` can be used with rewards that need no reference answer.

The user's text is the same as in cosmos-rl except for its last line, which requests an answer format. Here, `data.system_prompt`
requests the format, so that you can change it together with `reward.options.format.pattern`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from data_adapters.cosmos_reason1 import find_clip
from dsreason.config.schema import SourceConfig
from dsreason.data.options import format_options, options_field, own_letter
from dsreason.data.rows import NamedRows, get_optional_text, read_rows, text_field
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError

REQUEST = "Answer with the option's letter from the given choices directly."


def rows(data: SourceConfig) -> NamedRows:
    return Questions(read_rows(data))


def to_sample(row: dict[str, Any], data: SourceConfig) -> Sample:
    kind = "image" if row.get("image") and not row.get("video") else "video"
    file = find_clip(text_field(row, kind), data, kind)
    choice = row["qa_pairs"]
    if not isinstance(choice, dict):
        raise DataError(f"field 'qa_pairs' must be an object with question, index2ans and answer; got {choice!r:.100}")
    options = options_field(choice.get("index2ans"), "qa_pairs.index2ans")
    answer_field = "correct_answer" if choice.get("correct_answer") else "answer"
    answer = (get_optional_text(choice, answer_field) or "").strip() or None
    lines = [text_field(choice, "question"), *format_options(options)]
    if options is not None:
        if answer is not None:
            answer = find_letter(answer, options)
        lines.append(REQUEST)
    content = [{"type": kind, kind: str(file)}, {"type": "text", "text": "\n".join(lines)}]
    messages: list[Message] = [{"role": "user", "content": content}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return Sample(str(row.get("id") or row[kind]), messages, answer=answer, options=options)


def find_letter(answer: str, options: dict[str, str]) -> str:
    letter = own_letter(answer, options)
    if letter is None:
        raise DataError(f"field 'qa_pairs.answer' must be one of {', '.join(options)}; got {answer!r}")
    return letter


class Questions(NamedRows):
    """Rows with one question each; a row whose `qa_pairs` is a list is split into its questions."""

    def __init__(self, rows: NamedRows) -> None:
        self.rows = rows
        counts = [count_questions(rows, index) for index in range(len(rows))]
        positions = [(index, number, count) for index, count in enumerate(counts) for number in range(count)]
        self.positions = np.array(positions, dtype=np.int64).reshape(-1, 3)  # row, question, questions in the row

    def __len__(self) -> int:
        return len(self.positions)

    def row(self, index: int) -> Any:
        row_index, number, _ = self.positions[index].tolist()
        row = self.rows[row_index]
        if not isinstance(row, dict) or not isinstance(row.get("qa_pairs"), list):
            return row
        return {**row, "qa_pairs": row["qa_pairs"][number] if row["qa_pairs"] else None}

    def describe_location(self, index: int) -> str:
        row_index, number, count = self.positions[index].tolist()
        return self.rows.describe_location(row_index) + (f", question {number + 1}" if count > 1 else "")


def count_questions(rows: NamedRows, index: int) -> int:
    """Return the number of questions in a row; 1 for an unusable row, whose error is raised when the row is used."""
    try:
        row = rows[index]
    except DataError:
        return 1
    questions = row.get("qa_pairs") if isinstance(row, dict) else None
    return max(1, len(questions)) if isinstance(questions, list) else 1
