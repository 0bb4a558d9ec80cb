"""Result files: `<results_dir>/<model>/<answer_type>/<dataset>/<video_id>.json`, each a JSON list of results.

Result files from cosmos-reason1, which have only the first eight fields of a `Result`, can also be read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dsreason.errors import DataError
from dsreason.evaluation.questions.identity import compute_question_key, make_question_id
from dsreason.evaluation.types import Result
from dsreason.files.atomic import write_file
from dsreason.files.disk import read_small
from dsreason.problems import describe_first_problem, describe_parse_error
from dsreason.text import QuestionKind

RUN_FILE = "run.json"
"""Name of the file with the evaluation's settings, next to its `<dataset>/` folders."""
SUMMARY_FILE = "summary.json"
OWN_FILES = (RUN_FILE, SUMMARY_FILE)

MOST_FOLDERS = 10_000
"""Maximum number of folders below a results folder, in which each model has one folder per data set."""
MOST_BYTES = 2**30
"""Maximum size of a result file in bytes, enough for thousands of long answers about a clip."""
MAX_NAME_BYTES = 200
FORBIDDEN = r"\x00-\x1f\x7f\ud800-\udfff/\\:*?\"<>|~"  # "~" marks generated names, so that they differ from plain ones
PLAIN_NAME = re.compile(rf"(?!\.)[^{FORBIDDEN}]*[^{FORBIDDEN} .]")

STORED = TypeAdapter(Result)


@dataclass(frozen=True)
class Run:
    """The result files for one model and answer type, from the requested data sets."""

    folder: Path
    files: tuple[Path, ...]
    left_out: tuple[str, ...] = ()
    """Names of folders that belong to data sets that were not requested."""

    @property
    def name(self) -> str:
        """The name of the run, `<model>/<answer_type>`."""
        return "/".join(self.folder.resolve().parts[-2:])


# ---------------------------------------------------------------- writing


def make_safe_name(text: str) -> str:
    """Convert any text to a file name without a suffix; different texts get different names.

    Plain names are returned unchanged. Other names (with slashes, a leading dot, more than 200 bytes, …) are reduced to their
    plain characters, followed by "~" and a hash.
    """
    is_plain = PLAIN_NAME.fullmatch(text) is not None and f"{text}.json" not in OWN_FILES
    if is_plain and len(text.encode()) <= MAX_NAME_BYTES:
        return text
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._")[:80]
    return f"{plain}~{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def locate_result_file(folder: Path, dataset: str, video_id: str) -> Path:
    """Return the path of a clip's result file in `folder`, which is `<results_dir>/<model>/<answer_type>`."""
    return folder / make_safe_name(dataset) / f"{make_safe_name(video_id)}.json"


def write_results(folder: Path, dataset: str, video_id: str, results: Sequence[Result]) -> None:
    """Write all results for a clip atomically, replacing any existing results."""
    text = json.dumps([asdict(result) for result in results], indent=2, ensure_ascii=False)
    write_text(locate_result_file(folder, dataset, video_id), text + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a file atomically; characters that UTF-8 cannot encode become "?"."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, text.encode(errors="replace"))
    except OSError as error:
        raise DataError(
            f"{file}: cannot be written ({error.strerror}); make it writable, free up space, or choose another folder"
        ) from error


# ---------------------------------------------------------------- finding


def find_runs(results_dir: Path, dataset: Sequence[str] | None = None) -> list[Run]:
    """Find the runs in a folder at any level: the root of all results, or the folder of a model, a run or a data set.

    A result file is any `*.json` except `run.json`, `summary.json` and files in the same folder as a `run.json`. It is in the
    folder of a data set, whose parent (or `results_dir` itself) is the run folder.

    Args:
        dataset: data sets to include; None includes all.

    Raises:
        DataError: the folder is missing, or it contains no results at all or none for a requested data set.
    """
    if not results_dir.is_dir():
        raise DataError(f"{results_dir}: the folder does not exist; pass the --results-dir of an evaluation")
    files = [file for file in list_json_files(results_dir) if file.name not in OWN_FILES]
    files = [file for file in files if not (file.parent / RUN_FILE).exists()]
    if not files:
        raise DataError(f"{results_dir}: contains no results (<model>/<answer_type>/<dataset>/<video_id>.json)")
    wanted_folders = None if dataset is None else {make_safe_name(name): name for name in dataset}
    present = {_get_dataset_folder(file) for file in files}
    if wanted_folders is not None and (
        missing := [name for folder, name in wanted_folders.items() if folder not in present]
    ):
        raise DataError(
            f"{results_dir}: contains no results for {', '.join(missing)}, only for {', '.join(sorted(present))}"
        )
    runs: dict[Path, list[Path]] = {}
    for file in files:
        runs.setdefault(results_dir if file.parent == results_dir else file.parent.parent, []).append(file)
    found_runs = [_build_run(folder, files, wanted_folders) for folder, files in sorted(runs.items())]
    return [run for run in found_runs if run.files]


def find_run(results_dir: Path, dataset: Sequence[str] | None = None) -> Run:
    """Return the only run in a folder. Raise DataError if there are several, or for the same reasons as `find_runs`."""
    runs = find_runs(results_dir, dataset)
    if len(runs) > 1:
        names = ", ".join(str(run.folder) for run in runs)
        raise DataError(f"{results_dir}: contains {len(runs)} evaluations; pass the folder of one of them: {names}")
    return runs[0]


def list_dataset_files(folder: Path) -> list[Path]:
    """List the result files in a data set's folder, without reports that `dsreason score` may have written to it."""
    return sorted(file for file in folder.glob("*.json") if file.name not in OWN_FILES)


def list_json_files(results_dir: Path) -> list[Path]:
    """List all `*.json` files at any depth, sorted, except hidden files.

    Raises:
        DataError: there are more than `MOST_FOLDERS` folders, which may be due to circular links.
    """
    files_found: list[Path] = []
    for number, (folder, inside, files) in enumerate(os.walk(results_dir, followlinks=True)):
        if number > MOST_FOLDERS:
            raise DataError(
                f"{results_dir}: contains more than {MOST_FOLDERS} folders, the maximum; pass the --results-dir of an "
                "evaluation"
            )
        inside[:] = [name for name in inside if not name.startswith(".")]
        files_found += [Path(folder, name) for name in files if name.endswith(".json") and not name.startswith(".")]
    return sorted(files_found)


def _build_run(folder: Path, files: list[Path], requested: Iterable[str] | None) -> Run:
    if requested is None:
        return Run(folder, tuple(files))
    chosen_files = tuple(file for file in files if _get_dataset_folder(file) in requested)
    return Run(folder, chosen_files, tuple(sorted({_get_dataset_folder(file) for file in files} - set(requested))))


def _get_dataset_folder(file: Path) -> str:
    return file.parent.name or file.parent.resolve().name


# ---------------------------------------------------------------- reading


def read_run(run: Run) -> list[Result]:
    """Read a run's results, ordered by data set and clip; results for the same clip keep the order of its file.

    Raises:
        DataError: a file is not a JSON list of results, or two results have the same id. The message names the file and the
            item (counted from 1).
    """
    names: dict[str, str] = {}
    results = []
    for file in run.files:
        for number, result in enumerate(read_file(file), start=1):
            location = f"{file}: item {number}"
            first = names.setdefault(result.id, location)
            if first != location:
                raise DataError(
                    f"{location}: question {result.id!r} appears twice (first in {first}); remove one of them"
                )
            results.append(result)
    if not results:
        raise DataError(
            f"{run.folder}: all result files ({len(run.files)}) contain empty lists, so there is nothing to score"
        )
    return sorted(results, key=lambda result: (result.datasource, result.video_id))


def read_file(file: Path) -> list[Result]:
    """Read the results in a file, in order.

    Raises:
        DataError: the file is malformed; the message names the file and the item (counted from 1) that is not a result.
    """
    items = read_json(file)
    if not isinstance(items, list):
        raise DataError(
            f"{file}: must contain a list of results, but contains {_name_json_type(items)}; move it elsewhere"
        )
    counts: Counter[str] = Counter()
    return [_read_item(item, file, number, counts) for number, item in enumerate(items)]


def read_json(file: Path) -> Any:
    try:
        return json.loads(read_small(file, MOST_BYTES))
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: is not valid JSON ({describe_parse_error(error)}); remove it, or run the evaluation again"
        ) from error


def _read_item(item: Any, file: Path, number: int, seen: Counter[str]) -> Result:
    location = f"{file}: item {number + 1}"
    if not isinstance(item, dict):
        raise DataError(f"{location}: must be an object with a result; got {_name_json_type(item)}")
    try:
        return STORED.validate_python(_complete_item(item, file, number, seen))
    except ValidationError as error:
        raise DataError(
            f"{location}: {describe_first_problem(error)}; correct it, or score it with --compat"
        ) from error


def _complete_item(item: dict[str, Any], file: Path, number: int, seen: Counter[str]) -> dict[str, Any]:
    """Add defaults for fields that cosmos-reason1's results lack. Even of the eight fields that they have, only `is_correct` is
    required.

    Questions from cosmos-reason1 get the same ids as in dsreason, so that the results can be compared.
    """
    datasource = item.get("datasource", _get_dataset_folder(file))
    video_id = item.get("video_id", file.stem)
    prompt = _extract_texts(item.get("prompt") or [])
    if "id" not in item:
        last = prompt[-1] if isinstance(prompt, list) and prompt else None
        key = compute_question_key(last, [str(video_id)]) if isinstance(last, str) else str(number)
        item = item | {"id": make_question_id(datasource, video_id, key, seen)}
    texts = dict.fromkeys(("correct_answer", "reasoning", "answer", "full_response", "finish_reason"), "")
    defaults = texts | {
        "datasource": datasource,
        "video_id": video_id,
        "kind": _infer_kind(item.get("correct_answer")),
        "options": None,
        "media": [],
        "rule": "not recorded",
        "attempts": 1,
        "completion_tokens": 0,
        "seconds": 0.0,
    }
    return defaults | item | {"prompt": prompt}


def _extract_texts(prompt: Any) -> Any:
    """Return the texts of the messages that cosmos-reason1 stores, or `prompt` unchanged if it is not a list of messages."""
    try:
        return [_join_text(message["content"]) for message in prompt]
    except (TypeError, KeyError, AttributeError):
        return prompt


def _join_text(content: Any) -> str:
    """Join the texts of a message's parts, one per line. Unlike parts in a sample, these parts may lack `type`."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if part.get("text"))


def _infer_kind(reference: object) -> QuestionKind:
    is_letter = isinstance(reference, str) and re.fullmatch(r"\s*[A-Za-z]\s*", reference)
    return "multiple_choice" if is_letter else "open"


def _name_json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
