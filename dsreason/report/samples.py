"""Selection of the rollouts and answers to show on a run's page."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from dsreason.families import FAMILIES, list_control_tokens
from dsreason.report.run_files import Row, RunFiles

MOST_ROLLOUTS = 6
"""Maximum number of rollouts (steps) on the page: the first, the last, and evenly spaced rollouts in between."""
GROUPS_PER_ROLLOUT = 8
"""Maximum number of prompts per rollout."""
MOST_COMPLETIONS = 8
"""Maximum number of completions per prompt; half of them are the best, and half the worst."""
MOST_ANSWERS = 40
"""Maximum number of held-out rows."""
MOST_CHARACTERS = 6000
"""Maximum number of characters to show of a text; the page says how many it omits."""

TAGS = {
    "best": "best prompts of their step",
    "worst": "worst prompts of their step",
    "mixed": "completions with different rewards",
    "same": "all completions with the same reward",
    "truncated": "with truncated completions",
    "disagreeing": "reward functions disagree",
}
ANSWER_TAGS = {
    "gained": "wrong at first, right in the end",
    "lost": "right at first, wrong in the end",
    "wrong": "wrong in the end",
    "right": "right in the end",
    "truncated": "truncated",
}
WORDS = re.compile(r"\s+|\w+|[^\w\s]")


@dataclass(frozen=True)
class TextPart:
    """A part of a compared text. `kind` is `same`, `new` (only in the later text) or `old` (only in the earlier text)."""

    kind: str
    text: str


@dataclass(frozen=True)
class ShownCompletion:
    """A completion to show, and the number of the prompt's completions that are equal to it, including itself."""

    row: Row
    count: int


@dataclass(frozen=True)
class PromptGroup:
    """A prompt's completions at a step. `tags` are keys of `TAGS`."""

    step: int
    completions: Sequence[ShownCompletion]
    tags: Sequence[str]
    num_omitted: int
    """Number of completions that are not shown."""
    earlier_step: int | None = None
    """Earliest step with completions of the same prompt; None if no earlier chosen rollout has any."""
    changes: Sequence[TextPart] = ()
    """Differences between the best completion at `earlier_step` and the best completion at `step`."""

    @property
    def first(self) -> Row:
        return self.completions[0].row


@dataclass(frozen=True)
class AnswerHistory:
    """The answers to a held-out row in several validations, by step. `tags` are keys of `ANSWER_TAGS`."""

    answers: dict[int, Row]
    tags: Sequence[str]
    changes: Sequence[TextPart]
    """Differences between the first and the last answer."""

    @property
    def last(self) -> Row:
        return next(reversed(self.answers.values()))


def choose_evenly(steps: Sequence[int], count: int) -> list[int]:
    """Return at most `count` evenly spaced steps, including the first and the last."""
    count = min(count, len(steps))
    return [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]


def choose_groups(run: RunFiles) -> list[PromptGroup]:
    """Choose the prompts to show, newest step first."""
    steps = choose_evenly(run.list_steps("rollouts"), MOST_ROLLOUTS)
    rollouts = {step: run.read_rollouts(step) for step in steps}
    earliest: dict[tuple[str, str], tuple[int, list[Row]]] = {}
    for step in steps:
        for rows in rollouts[step]:
            earliest.setdefault(get_key(rows), (step, rows))
    chosen = []
    for step in reversed(steps):
        for group, tags in choose_telling(rollouts[step]):
            earlier_step, earlier = earliest[get_key(group)]
            chosen.append(build_group(step, group, tags, earlier_step, earlier))
    return chosen


def get_key(group: Sequence[Row]) -> tuple[str, str]:
    return group[0]["id"], group[0]["prompt"]


def choose_telling(groups: Sequence[Sequence[Row]]) -> list[tuple[Sequence[Row], list[str]]]:
    """Choose at most `GROUPS_PER_ROLLOUT` groups, taking one with each tag in `TAGS` in turn, so that every tag is shown."""
    tags = [find_tags(group) for group in groups]
    means = [compute_mean_reward(group) for group in groups]
    ranked = sorted((i for i, mean in enumerate(means) if mean is not None), key=lambda i: means[i] or 0.0)
    for name, numbers in (("worst", ranked[:2]), ("best", ranked[2:][-2:])):
        for i in numbers:
            tags[i].insert(0, name)
    queues = [[i for i, names in enumerate(tags) if name in names] for name in TAGS]
    chosen: list[int] = []
    while len(chosen) < GROUPS_PER_ROLLOUT and any(queues):
        for queue in queues:
            if queue and (i := queue.pop(0)) not in chosen and len(chosen) < GROUPS_PER_ROLLOUT:
                chosen.append(i)
    return [(groups[i], tags[i]) for i in chosen]


def find_tags(group: Sequence[Row]) -> list[str]:
    rewards = [row["reward"] for row in group if row["reward"] is not None]
    tags = ["mixed" if len(set(rewards)) > 1 else "same"]
    if any(row["finish_reason"] == "length" for row in group):
        tags.append("truncated")
    if do_rewards_disagree(group):
        tags.append("disagreeing")
    return tags


def do_rewards_disagree(group: Sequence[Row]) -> bool:
    """Return whether, for any two completions, one reward function prefers the first and another function the second."""
    for scores, other_scores in combinations([row["rewards"] for row in group], 2):
        pairs = [(scores[name], other_scores[name]) for name in scores if name and name in other_scores]
        signs = {one > other for one, other in pairs if None not in (one, other) and one != other}
        if len(signs) == 2:
            return True
    return False


def compute_mean_reward(group: Sequence[Row]) -> float | None:
    rewards = [row["reward"] for row in group if row["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else None


def build_group(
    step: int, group: Sequence[Row], tags: Sequence[str], earlier_step: int, earlier: Sequence[Row]
) -> PromptGroup:
    ranked = merge_equal(sort_by_reward(group))
    half = MOST_COMPLETIONS // 2
    shown = ranked if len(ranked) <= MOST_COMPLETIONS else [*ranked[:half], *ranked[-half:]]
    num_omitted = len(group) - sum(item.count for item in shown)
    if earlier_step == step:
        return PromptGroup(step, shown, tags, num_omitted)
    changes = compare_texts(sort_by_reward(earlier)[0]["completion"], ranked[0].row["completion"])
    return PromptGroup(step, shown, tags, num_omitted, earlier_step, changes)


def merge_equal(rows: Iterable[Row]) -> list[ShownCompletion]:
    """Merge completions that would look the same on the page."""
    merged: dict[str, ShownCompletion] = {}
    for row in rows:
        key = repr(
            [row["completion"], row["rewards"], row["advantage"], row["length"], row["finish_reason"], row["trained"]]
        )
        merged[key] = ShownCompletion(row, merged[key].count + 1 if key in merged else 1)
    return list(merged.values())


def sort_by_reward(group: Iterable[Row]) -> list[Row]:
    return sorted(group, key=lambda row: (row["reward"] is None, -(row["reward"] or 0.0)))


def choose_answers(run: RunFiles) -> list[AnswerHistory]:
    """Choose the held-out rows to show, taking one with each tag in `ANSWER_TAGS` in turn."""
    steps = choose_evenly(run.list_steps("validation"), 3)
    by_step = {step: {answer["row"]: answer for answer in run.read_answers(step)} for step in steps}
    by_step = {step: answers for step, answers in by_step.items() if answers}
    if not by_step:
        return []
    histories = [
        build_history({step: answers[row] for step, answers in by_step.items() if row in answers})
        for row in by_step[max(by_step)]
    ]
    queues = [[history for history in histories if history.tags[0] == name] for name in ANSWER_TAGS]
    queues.append([history for history in histories if history.tags[0] not in ANSWER_TAGS])
    chosen: list[AnswerHistory] = []
    while len(chosen) < MOST_ANSWERS and any(queues):
        chosen += [queue.pop(0) for queue in queues if queue]
    return chosen[:MOST_ANSWERS]


def build_history(answers: dict[int, Row]) -> AnswerHistory:
    first, last = answers[min(answers)], answers[max(answers)]
    tags = [] if last["correct"] is None else ["right" if last["correct"] else "wrong"]
    if tags and first["correct"] is not None and first["correct"] != last["correct"]:
        tags.insert(0, "gained" if last["correct"] else "lost")
    if last["finish_reason"] == "length":
        tags.append("truncated")
    changes = compare_texts(first["completion"], last["completion"]) if len(answers) > 1 else ()
    return AnswerHistory(answers, tags or ["ungraded"], changes)


def find_question(prompt: str) -> str:
    """Return the text of the last non-empty turn in a rendered prompt, without control tokens and the role."""
    starts = {family.tokens.turn_start for family in FAMILIES.values()}
    turns = re.split("|".join(map(re.escape, starts)), prompt)
    for turn in reversed(turns):
        _, _, text = turn.partition("\n") if len(turns) > 1 else ("", "", turn)
        for token in list_control_tokens():
            text = text.replace(token, "")
        if text.strip():
            return text.strip()
    return prompt


def compare_texts(old: str, new: str) -> list[TextPart]:
    """Compare two texts word by word; equal texts result in a single part of kind `same`."""
    old_words, new_words = WORDS.findall(old[:MOST_CHARACTERS]), WORDS.findall(new[:MOST_CHARACTERS])
    changes = []
    matcher = difflib.SequenceMatcher(None, old_words, new_words, autojunk=False)
    for operation, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if operation == "equal":
            changes.append(TextPart("same", "".join(new_words[new_start:new_end])))
            continue
        if old_end > old_start:
            changes.append(TextPart("old", "".join(old_words[old_start:old_end])))
        if new_end > new_start:
            changes.append(TextPart("new", "".join(new_words[new_start:new_end])))
    return changes
