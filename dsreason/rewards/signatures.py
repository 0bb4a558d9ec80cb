"""Signatures of reward functions: dsreason's own, and those of TRL, verl and ms-swift.

A function is recognised by the names of its parameters. Functions written for other tools are wrapped, so that the worker can
call all functions with positional arguments: `(completion, sample)`, or, if the function scores several completions per call,
`(completions, samples, completion_ids)`. Such a batch contains the completions of one prompt. `completion_ids` holds their token
ids, `list[list[int]]`; it is None if the completions were not sampled.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsreason.data.messages import get_text, prompt_messages
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DataError

ACCEPTED = (
    "fn(completion, sample) [dsreason], fn(prompts, completions, **columns) [TRL], "
    "compute_score(data_source, solution_str, ground_truth, extra_info) [verl], "
    "or a class with __call__(self, completions, **columns) [ms-swift]"
)
"""Description of all accepted signatures, for messages."""
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")
"""Argument names that receive the reference answer if the row has no column with that name."""
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids")
UNAVAILABLE = ("trainer_state", "log_extra", "log_metric", "environments", "rollout_infos")
"""Arguments that TRL's and ms-swift's trainers pass, but that are not available in worker processes."""

Build = Callable[..., dict[str, Any]]
"""Type of a function that builds a call's keyword arguments from the worker's positional arguments."""


def adapt_function(function: Any, options: Mapping[str, Any], name: str) -> Callable[..., Any] | None:
    """Wrap a function written for another tool so that the worker can call it; return None if its parameters match no such tool.

    A class is instantiated with the options as arguments; a function gets the options as keyword arguments in every call.
    The attribute `is_batched` of the wrapped function tells whether it scores batches.

    Raises:
        ConfigError: no value is available for a parameter without a default, or an option matches no parameter.
    """
    if inspect.isclass(function):
        return adapt_class(function, options, name)
    return wrap(function, options, name, passes_text=receives_text(function))


def adapt_class(reward_class: type[Any], options: Mapping[str, Any], name: str) -> Callable[..., Any]:
    try:
        instance = reward_class(**options)
    except Exception as error:
        arguments = ", ".join(f"{key}=…" for key in options)
        raise ConfigError(
            f'reward "{name}": {reward_class.__name__}({arguments}) raised {type(error).__name__}: {error}; set its arguments '
            "in reward.options"
        ) from error
    return wrap(instance, {}, name, passes_text=True) or instance


def wrap(function: Any, options: Mapping[str, Any], name: str, *, passes_text: bool) -> Callable[..., Any] | None:
    parameters = get_parameters(function)
    is_batched = bool(parameters.keys() & set(BATCH_ARGUMENTS))
    build: Build
    if "solution_str" in parameters:
        build, given = build_verl_arguments, {*VERL_ARGUMENTS, *options}
        missing = [key for key in list_required(parameters) if key not in given]
    elif is_batched:
        build = functools.partial(build_columns, passes_text=passes_text)
        missing = [key for key in list_required(parameters) if key in UNAVAILABLE and key not in options]
    else:
        return None
    if missing:
        raise ConfigError(
            f'reward "{name}" needs the argument {missing[0]}, which rewards do not get; give it a default value, or set it in '
            f"reward.options. Accepted signatures: {ACCEPTED}"
        )
    accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if unknown := [key for key in options if key not in parameters and not accepts_all]:
        raise ConfigError(
            f'reward "{name}" has no parameter {unknown[0]}, but reward.options sets it; its parameters are '
            f"{', '.join(parameters)}"
        )

    def build_arguments(*arguments: Any) -> dict[str, Any]:
        built = {**build(*arguments), **options}
        if absent := [key for key in list_required(parameters) if key not in built]:
            raise DataError(
                f"the function needs {absent[0]}, which this row does not have; it has {', '.join(sorted(built)) or 'nothing'}"
            )
        return built if accepts_all else {key: value for key, value in built.items() if key in parameters}

    wrapped = make_call(function, build_arguments)
    vars(wrapped)["is_batched"] = is_batched
    return wrapped


def make_call(function: Any, build_arguments: Build) -> Callable[..., Any]:
    """Return a function that passes its arguments to `build_arguments` and calls `function` with the result. It is async if
    `function` is."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        @functools.wraps(function)
        async def call_async(*arguments: Any) -> Any:
            return await function(**build_arguments(*arguments))

        return call_async

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return function(**build_arguments(*arguments))

    return call


def get_parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name; {} for objects without a signature, such as some builtins."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def list_required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [key for key, value in parameters.items() if value.default is value.empty and value.kind not in variadic]


def receives_text(function: Any) -> bool:
    """Return whether the function's `completions` are annotated as `list[str]`."""
    completions = get_parameters(function).get("completions")
    return completions is not None and str(completions.annotation).lower().removeprefix("typing.") == "list[str]"


def build_verl_arguments(completion: str, sample: Sample) -> dict[str, Any]:
    """Return the arguments that verl passes. Those that the row lacks are omitted, except that a missing `extra_info` is None."""
    model = sample.meta.get("reward_model")
    row_truth = model.get("ground_truth") if isinstance(model, dict) else None
    arguments = {"solution_str": completion, "extra_info": sample.meta.get("extra_info")}
    ground_truth = sample.answer if row_truth is None else row_truth
    if ground_truth is not None:
        arguments["ground_truth"] = ground_truth
    if "data_source" in sample.meta:
        arguments["data_source"] = sample.meta["data_source"]
    return arguments


def build_columns(
    completions: Sequence[str],
    samples: Sequence[Sample],
    completion_ids: Sequence[Sequence[int]] | None,
    *,
    passes_text: bool,
) -> dict[str, Any]:
    """Return the arguments that TRL and ms-swift pass, which are lists with one element per completion.

    Each completion or prompt is a list of messages; it is a string if `passes_text` is set or, as in TRL, if the rows' prompts
    are strings.
    """
    as_text = passes_text or all(sample.has_text_prompt for sample in samples)
    rows = [get_columns(sample) for sample in samples]
    columns = {key: [row[key] for row in rows] for key in rows[0] if all(key in row for row in rows)}
    prompts = [prompt_messages(sample) for sample in samples]
    columns["prompts"] = ["\n".join(filter(None, map(get_text, prompt))) for prompt in prompts] if as_text else prompts
    columns["completions"] = list(completions) if as_text else [to_messages(completion) for completion in completions]
    if passes_text:  # ms-swift also passes the full conversations
        pairs = zip(prompts, completions, strict=True)
        columns["messages"] = [[*prompt, *to_messages(completion)] for prompt, completion in pairs]
    if completion_ids is not None:
        columns["completion_ids"] = [list(ids) for ids in completion_ids]
    return columns


def to_messages(completion: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": completion}]


def get_columns(sample: Sample) -> dict[str, Any]:
    """Return a row's columns: its `meta`, the reference answer under its usual names, the other accepted answers and options."""
    answers: dict[str, Any] = {"other_answers": list(sample.other_answers)}
    if sample.answer is not None:
        answers |= dict.fromkeys(ANSWER_COLUMNS, sample.answer)
    if sample.options is not None:
        answers["options"] = sample.options
    return answers | {key: value for key, value in sample.meta.items() if key not in BATCH_ARGUMENTS}
