"""Generated answers and their references: their metrics, their files, and how they are displayed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from dsreason.data.chat import EncodedPrompt
from dsreason.data.messages import get_text, list_media_parts
from dsreason.data.types import Sample
from dsreason.files.disk import write_report
from dsreason.files.step_names import format_step
from dsreason.job.ranks import World
from dsreason.monitor.metrics import Metrics
from dsreason.rewards.scoring import CompletionScores, Scorer
from dsreason.rewards.text import add_length, add_opening
from dsreason.rollout.protocol import Completion, Sampling


@dataclass(frozen=True)
class GeneratedAnswer:
    """A generated answer and the reference answer with which it is compared.

    Example: `GeneratedAnswer(row=3, id="7", modality="video", kind="direction", prompt="<|im_start|>user…", completion="left",
    reference="left", correct=True, finish_reason="stop", media=["/d/clips/7.mp4"])`.
    """

    row: int
    id: str
    modality: str
    """Modality of the sample: `text`, `image` or `video`. A sample with both images and videos counts as `video`."""
    kind: str | None
    """The sample's `meta["kind"]`; None if the sample has no kind."""
    prompt: str
    completion: str
    reference: str | None
    correct: bool | None
    """Whether the answer is correct; None if the row has no reference answer, in which case `reference` is None as well."""
    finish_reason: str
    media: list[str]
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Rewards by function name, with the weighted sum under ""; empty if the run has no rewards. A reward is None if
    its function does not apply to the row."""
    data_source: str | None = None
    """The sample's `meta["data_source"]`; None if the sample has no data source."""


@dataclass(frozen=True)
class ValidationResult:
    """The result of a validation, identical on all ranks. `sheets` maps row numbers of displayed answers to contact sheets."""

    metrics: dict[str, float]
    answers: list[GeneratedAnswer]
    sheets: dict[int, Image.Image]

    def summary(self, step: int) -> str:
        """Return a one-line summary for the log.

        Example: `validation at step 60: loss 0.1234, reward 1.4375, accuracy 93.8 % (image 95.3 %, video 92.2 %)`.
        """
        summary_keys = {"loss": "val/loss", "reward": "val/reward/mean"}
        texts = [f"{name} {self.metrics[key]:.4f}" for name, key in summary_keys.items() if key in self.metrics]
        if "val/accuracy" in self.metrics:
            modalities = sorted({answer.modality for answer in self.answers if answer.correct is not None})
            parts = ", ".join(f"{name} {self.metrics[f'val/accuracy/{name}']:.1%}" for name in modalities)
            texts.append(f"accuracy {self.metrics['val/accuracy']:.1%} ({parts})".replace("%", " %"))
        return f"validation at step {step}: {', '.join(texts)}"

    def write(self, output_dir: Path, step: int, metrics: Metrics, world: World) -> None:
        """On rank 0, write every answer to `validation/step_N.jsonl` and log the displayed answers to TensorBoard."""
        if not world.is_main or not self.answers:
            return
        write_rows(output_dir / "validation" / f"{format_step(step)}.jsonl", map(vars, self.answers))
        answers_with_sheets = [answer for answer in self.answers if answer.row in self.sheets]
        if answers_with_sheets:
            metrics.log_text(
                step,
                "val/answers",
                "\n\n".join(describe(a.prompt, a.completion, a.reference, a.correct) for a in answers_with_sheets),
            )
            metrics.log_images(step, "val/answers", [self.sheets[answer.row] for answer in answers_with_sheets])


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write `rows` to `file` as JSON Lines; create the folder if it does not exist."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_report(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def describe(prompt: str, completion: str, reference: str | None, correct: bool | None) -> str:
    if reference is None:
        return f"{prompt}\nanswer: {completion}"
    mark = "right" if correct else "wrong"
    return f"{prompt}\nanswer ({mark}): {completion}\nreference: {reference}"


def compute_accuracies(answers: Sequence[GeneratedAnswer]) -> dict[str, float]:
    """Compute `val/accuracy`, and `val/accuracy/<name>` for each modality and kind, over the answers that have a reference."""
    outcomes: dict[str, list[bool]] = {}
    for answer in answers:
        if answer.correct is None:
            continue
        names = ["val/accuracy", f"val/accuracy/{answer.modality}"]
        if answer.kind is not None:
            names.append(f"val/accuracy/{answer.kind}")
        for name in dict.fromkeys(names):  # a kind may have the same name as a modality
            outcomes.setdefault(name, []).append(answer.correct)
    return {name: sum(values) / len(values) for name, values in sorted(outcomes.items())}


def compute_mean_rewards(answers: Sequence[GeneratedAnswer]) -> dict[str, float]:
    """Compute `val/reward/mean`, and `val/reward/<function>/mean` for each reward function; see `summarise_rewards`."""
    return summarise_rewards(
        [answer.rewards for answer in answers], [answer.data_source for answer in answers], "val/reward"
    )


def summarise_rewards(
    rewards: Sequence[Mapping[str, float | None]], sources: Sequence[str | None], prefix: str
) -> dict[str, float]:
    """Compute mean rewards: `<prefix>/mean` for the weighted sum (whose key is ""), and `<prefix>/<function>/mean`.

    Completions without a reward (None) are excluded. `<prefix>/<function>/none_fraction` is the share of such completions;
    it is omitted if it is 0. Rows with a data source also count in `<prefix>/<function>/mean/<source>`.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for completion_rewards in rewards for name in completion_rewards):
        values = [completion_rewards[name] for completion_rewards in rewards]
        key = f"{prefix}/{name}" if name else prefix
        by_source: dict[str, list[float]] = {}
        for source, value in zip(sources, values, strict=True):
            if value is not None:
                by_source.setdefault(f"{key}/mean", []).append(value)
                if source is not None:
                    by_source.setdefault(f"{key}/mean/{source}", []).append(value)
        metrics |= {mean_key: sum(existing) / len(existing) for mean_key, existing in by_source.items()}
        if None in values:
            metrics[f"{key}/none_fraction"] = values.count(None) / len(values)
    return metrics


def add_facts(prompt: EncodedPrompt, completion: Completion, sampling: Sampling) -> Sample:
    """Return the prompt's sample with what `overlong` and `format` need: the lengths, and the tag that opens the thoughts."""
    sample = add_length(prompt.sample, completion.num_tokens, sampling.max_completion_length)
    return add_opening(sample, prompt.opening)


def score_completions(
    scorer: Scorer, prompts: Sequence[EncodedPrompt], completions: Sequence[Completion], sampling: Sampling
) -> CompletionScores:
    """Score one completion per prompt."""
    pairs = zip(prompts, completions, strict=True)
    samples = [add_facts(prompt, completion, sampling) for prompt, completion in pairs]
    texts, ids = [completion.text for completion in completions], [completion.ids for completion in completions]
    return scorer.score(texts, samples, ids)


def get_question(sample: Sample) -> str:
    return next((get_text(message) for message in reversed(sample.messages) if message["role"] == "user"), "")


def get_data_source(sample: Sample) -> str | None:
    """Return the name of the sample's data set, `meta["data_source"]`, by which metrics are broken down; None if unset."""
    source = sample.meta.get("data_source")
    return None if source is None else str(source)


def get_modality(sample: Sample) -> str:
    kinds = {part["type"] for part in list_media_parts(sample.messages)}
    return next((kind for kind in ("video", "image") if kind in kinds), "text")
