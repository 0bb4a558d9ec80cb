"""Adapter for the built-in task: generated clips and pictures of shapes, in the formats LLaVA, JSONL and Cosmos-Reason1-RL.

`data.path` is a folder written by `dsreason.builtin_task.clips.write_builtin`. If `data.path` is empty, the adapter uses a folder
in the cache, whose clips and pictures are generated on first use.

`data.split` is `train` or `validation`. With `data.subset = "mislabelled"`, most answers to two of the questions are wrong
(see `make_mislabelled`), so a model that learns them is right on only about half of the held-out rows. With
`data.subset = "preferences"`, each row has a correct and a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_adapters import jsonl, llava
from dsreason.builtin_task.clips import add_rejected, get_builtin_folder, make_mislabelled
from dsreason.data.types import Sample
from dsreason.errors import DataError

Row = dict[str, Any]
SUBSETS: dict[str, Callable[[list[Row]], list[Row]]] = {"mislabelled": make_mislabelled, "preferences": add_rejected}


def rows(data: Any) -> list[Row]:
    folder = (Path(data.path).expanduser().absolute() if data.path else get_builtin_folder()) / data.split
    if Path(data.path).is_file():
        raise DataError(
            f'{data.path}: data.adapter is "builtin", which reads only folders of the built-in task; to read your own '
            'rows, set data.adapter = "auto"'
        )
    if not (folder / "conversations.json").is_file():
        raise DataError(f"{folder} is not a split of the built-in task; set data.split to train or validation")
    rows_of_split = json.loads((folder / "conversations.json").read_text())
    for name in ("questions.jsonl", "choices.jsonl"):
        rows_of_split += [json.loads(line) for line in (folder / name).read_text().splitlines()]
    for row in rows_of_split:
        for kind in {"image", "video"} & row.keys():
            row[kind] = str(folder / row[kind])
    rows_of_split.sort(key=lambda row: row["id"])
    if data.subset and data.subset not in SUBSETS:
        subsets = ", ".join(map(repr, SUBSETS))
        raise DataError(f"data.subset must be one of {subsets} for the built-in task; got {data.subset!r}")
    return SUBSETS[data.subset](rows_of_split) if data.subset else rows_of_split


def to_sample(row: Row) -> Sample:
    sample = to_plain_sample(row)
    if "rejected" not in row:
        return sample
    return replace(sample, rejected=[*sample.messages[:-1], {"role": "assistant", "content": row["rejected"]}])


def to_plain_sample(row: Row) -> Sample:
    row = {key: value for key, value in row.items() if key != "rejected"}
    if "conversations" in row:
        return llava.to_sample(row)
    if "qa_pairs" in row:
        choice = row["qa_pairs"]
        common = {key: row[key] for key in ("id", "kind", "video")}
        question = {"question": choice["question"], "options": choice["index2ans"], "answer": choice["answer"]}
        return jsonl.to_sample(common | question)
    return jsonl.to_sample(row)
