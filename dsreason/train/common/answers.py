"""Generated answers beside their references: what counts as right, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from dsreason.data.chat import EncodedPrompt
from dsreason.data.messages import media_parts, text_of
from dsreason.data.types import Sample
from dsreason.files.atomic import write_file
from dsreason.files.step_names import step_name
from dsreason.job.ranks import World
from dsreason.monitor.metrics import Metrics
from dsreason.rewards.scoring import Scorer, Scores
from dsreason.rewards.text import with_length
from dsreason.rollout.protocol import Completion, Sampling


@dataclass(frozen=True)
class Answer:
    """One generated answer beside its reference.

    Example: `Answer(row=3, id="7", modality="video", kind="direction", prompt="<|im_start|>user…", completion="left",
    reference="left", correct=True, finish_reason="stop", media=["/d/clips/7.mp4"])`.
    """

    row: int
    id: str
    modality: str
    """`text`, `image` or `video` (the latter also where there are images beside it)."""
    kind: str | None
    """`meta["kind"]` of the sample."""
    prompt: str
    completion: str
    reference: str | None
    correct: bool | None
    """None, as the reference, where the row has no answer."""
    finish_reason: str
    media: list[str]
    rewards: dict[str, float] = field(default_factory=dict)
    """By function, and under "" their weighted sum; empty if the run has no rewards."""


@dataclass(frozen=True)
class ValidationResult:
    """Equal on all ranks. `sheets` has the contact sheets of the shown answers by row number."""

    metrics: dict[str, float]
    answers: list[Answer]
    sheets: dict[int, Image.Image]

    def summary(self, step: int) -> str:
        """`validation at step 60: loss 0.1234, reward 1.4375, accuracy 93.8 % (image 95.3 %, video 92.2 %)`."""
        summary_keys = {"loss": "val/loss", "reward": "val/reward/mean"}
        texts = [f"{name} {self.metrics[key]:.4f}" for name, key in summary_keys.items() if key in self.metrics]
        if "val/accuracy" in self.metrics:
            modalities = sorted({answer.modality for answer in self.answers if answer.correct is not None})
            parts = ", ".join(f"{name} {self.metrics[f'val/accuracy/{name}']:.1%}" for name in modalities)
            texts.append(f"accuracy {self.metrics['val/accuracy']:.1%} ({parts})".replace("%", " %"))
        return f"validation at step {step}: {', '.join(texts)}"

    def write(self, output_dir: Path, step: int, metrics: Metrics, world: World) -> None:
        """`validation/step_N.jsonl` with every answer, and the shown ones in TensorBoard; rank 0 does it."""
        if not world.is_main or not self.answers:
            return
        write_rows(output_dir / "validation" / f"{step_name(step)}.jsonl", map(vars, self.answers))
        answers_with_sheets = [answer for answer in self.answers if answer.row in self.sheets]
        if answers_with_sheets:
            metrics.log_text(
                step,
                "val/answers",
                "\n\n".join(describe(a.prompt, a.completion, a.reference, a.correct) for a in answers_with_sheets),
            )
            metrics.log_images(step, "val/answers", [self.sheets[answer.row] for answer in answers_with_sheets])


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """JSON lines, in a folder that is made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def describe(prompt: str, completion: str, reference: str | None, correct: bool | None) -> str:
    if reference is None:
        return f"{prompt}\nanswer: {completion}"
    mark = "right" if correct else "wrong"
    return f"{prompt}\nanswer ({mark}): {completion}\nreference: {reference}"


def accuracies(answers: Sequence[Answer]) -> dict[str, float]:
    """`val/accuracy`, and `val/accuracy/<name>` of each modality and kind; of the answers that have a reference."""
    outcomes: dict[str, list[bool]] = {}
    for answer in answers:
        if answer.correct is None:
            continue
        names = ["val/accuracy", f"val/accuracy/{answer.modality}"]
        if answer.kind is not None:
            names.append(f"val/accuracy/{answer.kind}")
        for name in dict.fromkeys(names):  # a kind may be called like a modality
            outcomes.setdefault(name, []).append(answer.correct)
    return {name: sum(values) / len(values) for name, values in sorted(outcomes.items())}


def mean_rewards(answers: Sequence[Answer]) -> dict[str, float]:
    """`val/reward/mean`, and `val/reward/<function>/mean`."""
    names = dict.fromkeys(name for answer in answers for name in answer.rewards)
    return {
        f"val/reward/{name}/mean".replace("//", "/"): sum(answer.rewards[name] for answer in answers) / len(answers)
        for name in names
    }


def score_completions(
    scorer: Scorer, prompts: Sequence[EncodedPrompt], completions: Sequence[Completion], sampling: Sampling
) -> Scores:
    """The rewards of each completion of its prompt; the samples say how long they are, which `overlong` reads."""
    samples = [
        with_length(prompt.sample, completion.num_tokens, sampling.max_completion_length)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return scorer.score([completion.text for completion in completions], samples)


def question_of(sample: Sample) -> str:
    return next((text_of(message) for message in reversed(sample.messages) if message["role"] == "user"), "")


def modality_of(sample: Sample) -> str:
    kinds = {part["type"] for part in media_parts(sample.messages)}
    return next((kind for kind in ("video", "image") if kind in kinds), "text")
