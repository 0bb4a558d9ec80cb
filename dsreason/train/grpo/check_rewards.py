"""Checks on the rewards before sampling starts: their names and options, the server's URL, the rows and the prompts."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from dsreason.answers.compat import extract_hash_number
from dsreason.answers.parsing import parse
from dsreason.config.schema_grpo import GRPOConfig, RewardConfig
from dsreason.data.messages import get_text, prompt_messages
from dsreason.data.prompts import Check
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DataError, RewardError
from dsreason.rewards import BUILT_IN, READS_REFERENCE, WITHOUT_ANSWER
from dsreason.rewards.functions import REMOTE, check_references, check_reward, list_accepted
from dsreason.rewards.scoring import Scorer, applies, open_remote
from dsreason.rewards.text import FORMAT, REQUEST, add_length, compute_soft_overlong, describe_format_problem
from dsreason.train.grpo.teacher_server import check_no_media

log = logging.getLogger(__name__)


def check_functions(config: GRPOConfig) -> None:
    """Raise ConfigError if a reward cannot be loaded with its options, or if the settings for the reward server are invalid.

    No request is sent to the server.
    """
    for name in config.reward.functions:
        options = config.reward.options.get(name, {})
        if not name.startswith(REMOTE):
            check_reward(name, options)
        elif name == REMOTE:
            raise ConfigError(
                f'reward.functions: "{REMOTE}" must be followed by the name of a score of the server; write {REMOTE}<score>'
            )
        elif options:
            raise ConfigError(f'reward.options."{name}": a reward from a server has no options; remove it')
    open_remote(config.reward)
    buffer = config.reward.options.get("overlong", {}).get("buffer")
    if buffer is not None:
        try:
            compute_soft_overlong(0, config.rollout.max_completion_length, buffer)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"reward.options.overlong.buffer ({buffer!r}): {error}") from error


def build_row_check(config: GRPOConfig) -> Check:
    """Return a function that raises DataError if a training row does not suit the run's rewards or its teacher."""
    names = tuple(name for name in config.reward.functions if name in BUILT_IN)
    check_rewards = partial(check_selected, names, config.reward, check_answer)
    if not config.distill.by_server:
        return check_rewards

    def check(sample: Sample) -> None:
        check_no_media(sample)
        check_rewards(sample)

    return check


def build_held_out_check(config: GRPOConfig) -> Check:
    """Return a function that raises DataError if the reference answer of a held-out row is unusable.

    Without this check, such a row would stop the run at the first validation.
    """
    names = tuple(name for name in config.reward.functions if name in READS_REFERENCE)
    return partial(check_selected, names, config.reward, check_references)


def check_selected(
    names: Sequence[str],
    reward: RewardConfig,
    check: Callable[[Sequence[str], Mapping[str, Mapping[str, Any]], Sample], None],
    sample: Sample,
) -> None:
    """Apply `check` to a sample, passing only the rewards that score it (see `reward.only`)."""
    check([name for name in names if applies(reward.only, name, sample)], reward.options, sample)


def check_answer(rewards: Sequence[str], options: Mapping[str, Mapping[str, Any]], sample: Sample) -> None:
    """Raise DataError if one of the built-in `rewards` cannot use one of the sample's accepted answers.

    Args:
        options: name of a reward → its options.
    """
    for name in rewards:
        if name in WITHOUT_ANSWER:
            continue
        if not isinstance(sample.answer, str) or not sample.answer.strip():
            raise DataError(
                f"sample {sample.id!r}: field 'answer' is {sample.answer!r}, but the reward {name} compares with it; "
                "add it, skip such rows (data.on_bad_row), or use a reward that needs no answer"
            )
        for accepted in list_accepted(name, sample):
            answer = accepted.answer or ""
            problem = UNUSABLE[name](answer, sample.options or {}) if name in UNUSABLE else None
            if problem is not None:
                raise DataError(
                    f"sample {sample.id!r}: field 'answer' is {answer!r:.100}, but the reward {name} needs {problem}"
                )
    check_references(rewards, options, sample)


def try_user_functions(
    config: GRPOConfig, rows: Sequence[tuple[str, Sample]], tokenize: Callable[[str], Sequence[int]]
) -> None:
    """Call each user-defined reward function once, on a row that it scores, with the row's reference answer as the
    completion.

    Servers are not queried, because they may be started later.

    Args:
        rows: the rows to choose from, as (location, sample).

    Raises:
        RewardError: a function raises, exceeds its time limit or returns an invalid value; the message names the row.
    """
    names_by_row: dict[int, list[str]] = {}
    for name in config.reward.functions:
        if name in BUILT_IN or name.startswith(REMOTE) or not rows:
            continue
        selected = (i for i, (_, sample) in enumerate(rows) if applies(config.reward.only, name, sample))
        number = next(selected, None)
        if number is None:
            log.warning(
                'reward "%s": reward.only selects none of the %d rows that were inspected, so it was not tried; check the '
                "names and values of the fields",
                name,
                len(rows),
            )
        else:
            names_by_row.setdefault(number, []).append(name)
    for number, names in names_by_row.items():
        location, sample = rows[number]
        text = sample.answer or ""
        ids = tokenize(text)
        measured = add_length(sample, len(ids), config.rollout.max_completion_length)
        try:
            with Scorer(select_functions(config.reward, names)) as scorer:
                scorer.score([text], [measured], [ids])
        except RewardError as error:
            raise RewardError(
                f"{location}: {error}\nThe reward was tried with the row's answer as completion ({text!r:.100}); correct it, and "
                "try it without training: dsreason reward try"
            ) from error


def select_functions(reward: RewardConfig, names: Sequence[str], *, workers: int = 1) -> RewardConfig:
    """Return a copy of the reward configuration that contains only the functions in `names`."""
    tables = {
        key: {name: value for name, value in getattr(reward, key).items() if name in names}
        for key in ("functions", "options", "only")
    }
    return reward.model_copy(update={**tables, "workers": workers})


def find_option_problem(answer: str, options: dict[str, str]) -> str | None:
    letter = parse(answer, "reasoning").answer
    is_known = letter in {"", *(key.upper() for key in options)} or parse(answer, "reasoning", options=options).answer
    return None if is_known or not options else f"one of the options {', '.join(options)}"


def find_number_problem(answer: str, options: dict[str, str]) -> str | None:
    is_bare = re.fullmatch(r"\s*-?[0-9.,]+\s*", answer) is not None
    return None if is_bare or extract_hash_number(answer) is not None else "a number, or a string with `#### number`"


def find_latex_problem(answer: str, options: dict[str, str]) -> str | None:
    is_plain = "\\" not in answer and "$" not in answer
    return f"LaTeX; write \\boxed{{{answer.strip():.20}}}, or use direct_math" if is_plain else None


UNUSABLE: dict[str, Callable[[str, dict[str, str]], str | None]] = {
    "single_choice": find_option_problem,
    "single_choice_lenient": find_option_problem,
    "ordinal_choice": find_option_problem,
    "gsm8k": find_number_problem,
    "boxed_math": find_latex_problem,
}
"""Reward → function that checks a reference answer, given the sample's options. The function returns None if the reward
can use the answer; otherwise, it returns a description of the answers that the reward can use."""


def check_format(config: GRPOConfig, samples: Iterable[Sample]) -> None:
    """Raise ConfigError if no prompt asks for a format that the reward `format` accepts.

    One matching prompt is enough, because the questions in other prompts may contain unrelated tags.
    """
    if "format" not in config.reward.functions:
        return
    pattern = config.reward.options.get("format", {}).get("pattern", FORMAT)
    try:
        problems = [describe_format_problem(get_prompt_text(sample), pattern) for sample in samples]
    except (TypeError, re.error) as error:
        raise ConfigError(
            f"reward.options.format.pattern ({pattern!r}) is not a regular expression: {error}"
        ) from error
    if problems and None not in problems:
        example = f", such as {REQUEST!r}" if describe_format_problem(REQUEST, pattern) is None else ""
        raise ConfigError(
            f"reward format with the pattern {pattern!r}: {problems[0]}, so a completion that follows the prompt gets no "
            f"reward; change reward.options.format.pattern, or request the format in data.system_prompt{example}"
        )


def get_prompt_text(sample: Sample) -> str:
    return "\n".join(get_text(message) for message in prompt_messages(sample) if message["role"] != "assistant")
