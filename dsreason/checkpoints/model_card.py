"""The model card of an export, a README.md whose metadata header the Hugging Face Hub reads."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

import dsreason
from dsreason.checkpoints.checkpoint_folder import CARD, STEPS
from dsreason.config.output import CONFIG_FILE, read_record
from dsreason.monitor.sinks.json_lines import read_lines

log = logging.getLogger(__name__)

TAG = "dsreason"
TASK = "image-text-to-text"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FILES = (".json", ".jsonl", ".parquet", ".csv", ".toml", ".yaml")
TEMPLATE = Path(__file__).with_name("templates") / "model_card.md.j2"


@dataclass(frozen=True)
class CardScore:
    """The accuracy of a model, between 0 and 1, in an evaluation with `count` questions."""

    dataset: str
    answer_type: str
    value: float
    count: int


def build_model_card(
    run: Path,
    step: int,
    *,
    dtype: str,
    scores: Sequence[CardScore] = (),
    library: str = "transformers",
    task: str = TASK,
    kind: str = "vision-language model",
    adapter: str = "",
    inputs: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Build the text of the README.md for an export of the weights after `step`.

    The content comes from `config.json` and `metrics.jsonl` in the folder `run`; without these files the card is short. It
    lists base models and data sets that are on the Hub. If the base model is itself an export by dsreason, their names come
    from the card of that export. `adapter` describes the adapter that was merged into the weights. `inputs` has additional rows.
    """
    record = read_run_record(run)
    config = record.get("config", {})
    bases, datasets = find_origins(config)
    validated = read_validation_metrics(run / "metrics.jsonl", step)
    results = [build_accuracy("held-out rows", validated["val/accuracy"])] if "val/accuracy" in validated else []
    results += [build_accuracy(f"{score.dataset} ({score.answer_type})", score.value) for score in scores]
    name, command = run.absolute().name, record.get("command", [])
    data = ModelCardData(
        base_model=bases,
        base_model_relation="finetune" if bases else None,
        datasets=datasets,
        library_name=library,
        pipeline_tag=task,
        tags=[TAG, *command[:1]],
        model_name=name,
        eval_results=results or None,
    )
    facts = {
        "base model": ", ".join(bases or []) or "not on the Hugging Face Hub",
        "data sets": ", ".join(datasets or []) or "not on the Hugging Face Hub",
        "command": f"`{shlex.join(['dsreason', *command])}`" if command else "unknown",
        STEPS: str(step),
        "weights": dtype,
        **({"adapter": adapter} if adapter else {}),
        **inputs,
        "versions": ", ".join(f"{name} {text}" for name, text in record.get("versions", {}).items())
        or f"dsreason {dsreason.__version__}",
    }
    card = ModelCard.from_template(
        data, str(TEMPLATE), name=name, kind=kind, facts=facts, validated=validated, scores=scores
    )
    return f"{card}\n"


def read_run_record(run: Path) -> dict[str, Any]:
    """Read `config.json` of a run; return {} if the file is missing or invalid."""
    file = run / CONFIG_FILE
    if not os.path.lexists(file):
        return {}
    try:
        return read_record(run)
    except (OSError, ValueError, RecursionError) as error:  # export the weights even if the card is incomplete
        log.warning("%s: is not the configuration of a run (%s); the model card omits it", file, error)
        return {}


def find_origins(config: dict[str, Any]) -> tuple[list[str] | None, list[str] | None]:
    """Return the Hub names of the base models and of the data sets, with None in place of an empty list."""
    data = config.get("data", {})
    path = config.get("model", {}).get("path", "")
    bases = [path] if is_hub_name(path) else []
    datasets = [source["path"] for source in data.get("sources") or [data] if is_hub_name(source.get("path", ""))]
    if not bases and (base_card := read_card(Path(path).expanduser())):
        bases, datasets = to_strings(base_card.base_model), [*to_strings(base_card.datasets), *datasets]
    return bases or None, list(dict.fromkeys(datasets)) or None


def is_hub_name(path: str) -> bool:
    is_name = HUB_NAME.fullmatch(path) is not None and not path.endswith(FILES)
    return is_name and not Path(path).exists()


def read_card(folder: Path) -> ModelCardData | None:
    """Read the header of an export's model card; return None unless dsreason wrote the card."""
    try:
        card = ModelCard((folder / CARD).read_text(encoding="utf-8"), ignore_metadata_errors=True)
    except (OSError, ValueError, TypeError):  # the library raises any of these for an invalid header
        return None
    data = card.data
    return data if isinstance(data, ModelCardData) and TAG in to_strings(data.tags) else None


def to_strings(value: Any) -> list[str]:
    """Return the strings in a header field, which may be a string, a list, or anything else because people edit headers."""
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def read_validation_metrics(file: Path, step: int) -> dict[str, float]:
    """Return the `val/…` metrics of the last validation at or before `step`."""
    try:
        lines = read_lines(file, last_step=step)
    except OSError as error:  # export the weights even if the card is incomplete
        log.warning("%s: cannot be read (%s); the model card omits the metrics", file, error.strerror)
        return {}
    for line in reversed(lines):
        if values := {name: value for name, value in line.items() if name.startswith("val/") and value is not None}:
            return values
    return {}


def build_accuracy(dataset: str, value: float) -> EvalResult:
    return EvalResult(
        task_type=TASK,
        dataset_type=re.sub(r"\W+", "-", dataset).strip("-").lower(),
        dataset_name=dataset,
        metric_type="accuracy",
        metric_value=round(value, 4),
    )
