"""The questions of an evaluation, from benchmark folders in cosmos-reason1's layout or from the rows of any adapter.

    <ds>/<ds>_benchmark_qa_pairs.json    [{"video": "clips/7.mp4", "qa_pairs": {"question": "Which way?",
                                           "index2ans": {"A": "left", "B": "right"}, "answer": "A"}}, …]
    <ds>/clips/7.mp4

`qa_pairs` may be a list. The answer to a question without `index2ans` is yes, no or any other string. Errors in a file raise
DataError. A question whose clip is missing has a `problem` and counts as unanswered.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from dsreason.answers.correct import get_question_kind, get_reference
from dsreason.answers.parsing import parse
from dsreason.config.schema_data import SourceConfig
from dsreason.config.schema_eval import EvalConfig, EvalSourceConfig
from dsreason.data.messages import check_text, get_text, list_media_parts, prompt_messages
from dsreason.data.options import (
    find_option_letter,
    find_options_in_question,
    format_options,
    options_field,
    own_letter,
    with_options,
)
from dsreason.data.rows import read_rows, text_field
from dsreason.data.sources import open_source, select_vision_settings
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError
from dsreason.evaluation.questions.identity import (
    REASONING_REQUEST,
    REQUESTS,
    compute_question_key,
    make_question_id,
    name_medium,
)
from dsreason.evaluation.types import Question
from dsreason.files.archives import SUFFIXES as ARCHIVE_SUFFIXES
from dsreason.files.own_files import is_inside
from dsreason.problems import find_nearest
from dsreason.text import QuestionKind, split_response

ANNOTATIONS = "{}_benchmark_qa_pairs.json"
PUBLISHED = ("robovqa", "av", "agibot", "bridgev2", "holoassist", "robofail")
SYSTEM_PROMPT = "Answer the questions."


def load_questions(config: EvalConfig) -> list[Question]:
    """Load all questions, or `evaluation.limit` of them, in the order of the configuration and the files.

    A limit is divided among the data sets by `compute_even_shares`.

    Raises:
        ConfigError, DataError: a data set or adapter does not exist, there are no questions, a row cannot be read, or an
            answer is not among its options. The message names the file and the row.
    """
    limit = config.evaluation.limit
    question_lists = [iter_benchmark_questions(name, config) for name in config.datasets]
    question_lists += [iter_row_questions(source, config) for source in config.sources]
    datasets = [list(islice(questions, limit)) for questions in question_lists]
    shares = compute_even_shares([len(questions) for questions in datasets], limit)
    return [question for questions, share in zip(datasets, shares, strict=True) for question in questions[:share]]


def compute_even_shares(sizes: Sequence[int], limit: int | None) -> list[int]:
    """Compute how many questions to use from each data set so that the numbers add up to `limit`.

    Small data sets are used in full, and the others contribute equal shares. Example: the sizes 5, 1 and 9 and a limit of 8
    result in 3, 1 and 4.
    """
    shares, remaining = list(sizes), sum(sizes) if limit is None else limit
    for rank, place in enumerate(sorted(range(len(sizes)), key=lambda place: (sizes[place], -place))):
        shares[place] = min(sizes[place], remaining // (len(sizes) - rank))
        remaining -= shares[place]
    return shares


# ---------------------------------------------------------------- benchmark folders


def iter_benchmark_questions(name: str, config: EvalConfig) -> Iterator[Question]:
    folder = find_benchmark(name, Path(config.data_dir).expanduser().absolute())
    counts: Counter[str] = Counter()
    for location, video, pair in iter_benchmark_items(folder / ANNOTATIONS.format(name)):
        try:
            clip, problem = find_clip(folder, video)
            # For example, `clips/left/7.mp4` has the id `left/7`.
            video_id = os.path.splitext(os.path.relpath(clip, folder))[0].removeprefix("clips/")
            sample, kind = make_benchmark_sample(clip, video_id, pair, config)
        except KeyError as error:
            raise DataError(f"{location}: field {error} is missing") from error
        except DataError as error:
            raise DataError(f"{location}: {error}") from error
        yield to_question(name, video_id, kind, sample, problem, counts)


def find_benchmark(name: str, data_dir: Path) -> Path:
    """Return `<data_dir>/<name>` or `<data_dir>/benchmark/<name>`, whichever contains the questions."""
    places = [data_dir, data_dir / "benchmark"]
    for place in places:
        if (place / name / ANNOTATIONS.format(name)).is_file():
            return place / name
    subsets = sorted({f.parent.name for place in places for f in place.glob("*/" + ANNOTATIONS.format("*"))})
    if name in PUBLISHED and name not in subsets:
        advice = "run `dsreason data fetch` to download it"
    elif near := find_nearest(name, [*subsets, *PUBLISHED]):
        advice = f"did you mean {near}?"
    else:
        advice = "check datasets and data_dir"
    raise DataError(
        f"dataset {name}: {name}/{ANNOTATIONS.format(name)} was not found in {places[0]} or {places[1]}; {advice} "
        f"(available: {', '.join(subsets) or 'none'})"
    )


def iter_benchmark_items(file: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (location in the file, video, `qa_pairs` element) for each question."""
    rows = read_rows(SourceConfig(path=str(file)))
    if not len(rows):
        raise DataError(f"{file}: contains no questions")
    for index in range(len(rows)):
        item, location = rows[index], rows.describe_location(index)
        if not isinstance(item, dict) or not isinstance(item.get("video"), str) or "qa_pairs" not in item:
            raise DataError(f"{location}: must have video and qa_pairs; got {item!r:.200}")
        pairs = item["qa_pairs"] if isinstance(item["qa_pairs"], list) else [item["qa_pairs"]]
        if not pairs:
            raise DataError(f"{location} ({item['video']}): qa_pairs is empty; remove the row, or add a question")
        for number, pair in enumerate(pairs, start=1):
            place = (
                f"{location}, question {number} ({item['video']})"
                if len(pairs) > 1
                else f"{location} ({item['video']})"
            )
            if not isinstance(pair, dict):
                raise DataError(f"{place}: qa_pairs must have question, index2ans and answer; got {pair!r:.100}")
            yield place, item["video"], pair


def find_clip(folder: Path, video: str) -> tuple[Path, str | None]:
    """Return the clip's path, and the reason why the clip cannot be used (None if it can)."""
    clip = folder / video
    if not is_inside(clip.absolute(), folder.absolute()) or clip == folder:
        raise DataError(f"field 'video': {video!r} must be a file in {folder}")
    if os.path.isfile(clip):  # unlike Path.is_file, os.path.isfile does not raise for a path that is too long
        return clip, None
    packed = sorted(file.name for file in folder.iterdir() if file.name.lower().endswith(ARCHIVE_SUFFIXES))
    hint = f"; {packed[0]} in its folder is not unpacked: run `dsreason data fetch`" if packed else ""
    return clip, f"video: {clip} does not exist{hint}"


def make_benchmark_sample(
    clip: Path, video_id: str, pair: dict[str, Any], config: EvalConfig
) -> tuple[Sample, QuestionKind]:
    options = options_field(pair.get("index2ans"), "index2ans")
    if options is None and pair.get("index2ans") is not None:
        raise DataError(f"field 'index2ans' must have a string for each letter; got {pair['index2ans']!r:.100}")
    answer = pair["correct_answer"] if pair.get("correct_answer") is not None else pair["answer"]
    if not isinstance(answer, str | int | float) or isinstance(answer, bool) or not str(answer).strip():
        raise DataError(f"field 'answer' must be a non-empty string or a number; got {answer!r:.100}")
    meta = {key: pair[key] for key in ("question_kind",) if key in pair}
    question = text_field(pair, "question")
    asked: list[Message] = [{"role": "user", "content": question}]
    sample = check_answer(with_options(Sample(video_id, asked, str(answer).strip(), options, meta)))
    kind = check_kind(sample)
    check_reference(sample, kind)
    lines = [question, *format_options(options)]
    lines += [REQUESTS[kind]] if kind in REQUESTS else []
    text = "\n".join(lines)
    check_text(text)
    video = {"type": "video", "video": str(clip), **select_vision_settings({}, config.merge_vision(), "video")}
    messages: list[Message] = [{"role": "user", "content": [video, {"type": "text", "text": text}]}]
    system = SYSTEM_PROMPT if config.evaluation.system_prompt is None else config.evaluation.system_prompt
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return replace(sample, messages=add_format_request(messages, kind, config)), kind


# ---------------------------------------------------------------- rows of an adapter


def iter_row_questions(config: EvalSourceConfig, evaluation: EvalConfig) -> Iterator[Question]:
    system = config.system_prompt or evaluation.evaluation.system_prompt or ""
    vision = evaluation.merge_vision(config.vision)
    source = open_source(config.model_copy(update={"vision": vision, "system_prompt": system}))
    counts: Counter[str] = Counter()
    for index in range(len(source.rows)):
        sample, problem = source.read(index), None
        try:
            sample = source.fetch_media(sample)
        except DataError as error:
            problem = str(error)
        try:
            # The content of `<answer>`, or the full text if there are no tags.
            answer = split_response(get_reference(sample) or "").answer
            if not answer:
                raise DataError(
                    "the row has no reference answer; add one, or end the messages with an assistant message"
                )
            sample = check_answer(replace(sample, answer=answer), config.kind)
            kind = config.kind or check_kind(sample)
            check_reference(sample, kind)
            sample = replace(sample, messages=add_format_request(prompt_messages(sample), kind, evaluation))
        except DataError as error:
            raise DataError(f"{source.rows.describe_location(index)} (sample {sample.id!r}): {error}") from error
        yield to_question(config.dataset, sample.id, kind, sample, problem, counts)


# ---------------------------------------------------------------- shared by benchmark folders and adapter rows


def check_answer(sample: Sample, kind: QuestionKind | None = None) -> Sample:
    """Return the sample with its answer converted to the option's letter; raise DataError if the answer names no option.

    If the options come from the question's text, the answer may also be `(A)` or an option's text, and it is kept unchanged if
    the requested `kind` is not multiple choice.
    """
    if not sample.options:
        return sample
    letter = own_letter(sample.answer or "", sample.options)
    if letter is None and sample.options == find_options_in_question(sample):
        if kind not in (None, "multiple_choice"):
            return sample
        letter = find_option_letter(sample.answer or "", sample.options)
    if letter is None:
        raise DataError(f"the answer must be one of the options {', '.join(sample.options)}; got {sample.answer!r}")
    return replace(sample, answer=letter)


def add_format_request(messages: list[Message], kind: QuestionKind, config: EvalConfig) -> list[Message]:
    """Add a request for the reasoning format if the answer type is `reasoning` and no message requests it yet."""
    last = messages[-1] if messages else {}
    if last.get("role") != "user":
        raise DataError("the last message before the answer must be the user's question")
    if config.evaluation.answer_type != "reasoning" or any("<answer>" in get_text(message) for message in messages):
        return messages
    answer_name = "single letter answer" if kind == "multiple_choice" else "answer"
    return [*messages[:-1], add_line(last, REASONING_REQUEST.format(answer_name))]


def add_line(message: Message, line: str) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}\n{line}"}
    texts = [place for place, part in enumerate(content) if part["type"] == "text"]
    if not texts:
        return {**message, "content": [*content, {"type": "text", "text": line}]}
    last = content[texts[-1]]
    extended = {**last, "text": f"{last['text']}\n{line}"}
    return {**message, "content": [*content[: texts[-1]], extended, *content[texts[-1] + 1 :]]}


def to_question(
    dataset: str, video_id: str, kind: QuestionKind, sample: Sample, problem: str | None, seen: Counter[str]
) -> Question:
    """Build the question and its id. If `video_id` is empty, the key computed from the question's content takes its place."""
    words = "\n".join(get_text(message) for message in sample.messages if message["role"] != "system")
    key = compute_question_key(words, map(name_medium, list_media_parts(sample.messages)))
    video_id = video_id or key
    return Question(
        id=make_question_id(dataset, video_id, key, seen),
        dataset=dataset,
        video_id=video_id,
        kind=kind,
        sample=sample,
        answer=sample.answer or "",
        options=sample.options,
        problem=problem,
    )


def check_reference(sample: Sample, kind: QuestionKind) -> None:
    """Raise DataError if the reference does not suit the question's kind, because then no answer could be correct."""
    if parse(sample.answer or "", "reasoning", kind=kind, options=sample.options).answer == "":
        raise DataError(f"the answer {sample.answer!r} cannot be parsed as the answer to a question of kind {kind}")


def check_kind(sample: Sample) -> QuestionKind:
    """Return the row's kind of question. Raise DataError if `question_kind` is unknown, rather than grade it as another kind."""
    question_kind = sample.meta.get("question_kind")
    if question_kind is not None and question_kind not in get_args(QuestionKind):
        raise DataError(f"question_kind must be one of {', '.join(get_args(QuestionKind))}; got {question_kind!r}")
    return get_question_kind(sample)
