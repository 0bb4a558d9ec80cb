"""The choice of vision settings and template arguments: the user's, then those with which dsreason trained the model."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsreason.checkpoints.checkpoint_folder import read_checkpoint
from dsreason.checkpoints.trained_template import format_arguments, read_template_arguments
from dsreason.checkpoints.trained_vision import TrainedVision, format_settings, read_run_vision, read_trained_vision
from dsreason.config.schema_data import VisionConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.evaluation.ask.answerers import resolve_model_folder
from dsreason.evaluation.ask.models import find_run_weights, is_checkpoint
from dsreason.evaluation.ask.server import ServerAnswerer


@dataclass(frozen=True)
class VisionChoice:
    """The vision settings and template arguments of an evaluation, and where they come from."""

    settings: VisionConfig
    user: VisionConfig
    """Settings that the user sets."""
    trained: TrainedVision | None
    """Settings that the model was trained with; None if they are unknown."""
    origin: str
    """Path of the model, for messages."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template in the model's training."""

    def describe(self) -> str:
        """Describe the settings in one line each."""
        return "\n".join([self._describe_vision(), *self._describe_template()])

    def _describe_template(self) -> list[str]:
        if not self.template_arguments:
            return []
        return [f"chat template arguments of training: {format_arguments(self.template_arguments)} ({self.origin})"]

    def _describe_vision(self) -> str:
        own = self.user.model_dump(exclude_none=True)
        kept = {key: value for key, value in self.settings.model_dump(exclude_none=True).items() if key not in own}
        parts = [f"{format_settings(own)} (set by you)"] if own else []
        if self.trained is None:
            unknown = f"{self.origin} has no vision settings of a training" if self.origin else "the model is unknown"
            parts.append(f"{format_settings(kept)} (default; {unknown})" if kept else unknown)
            return f"vision settings: {'; '.join(parts)}"
        if kept or not own:
            parts.append(f"{format_settings(kept) or 'defaults'} (as in training, {self.origin})")
        replaced = {
            key: value for key, value in self.trained.settings.items() if kept.get(key) != value != own.get(key)
        }
        if replaced:
            parts.append(f"training used {format_settings(replaced)} instead ({self.origin})")
        if self.trained.differing:
            parts.append(f"training used other settings for {', '.join(self.trained.differing)}")
        return f"vision settings: {'; '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON values, to be recorded with the results."""
        return {
            "used": self.settings.model_dump(exclude_none=True),
            "set": self.user.model_dump(exclude_none=True),
            "trained": None if self.trained is None else self.trained.settings,
            "model": self.origin,
        }


def choose_vision(
    user: VisionConfig,
    trained: TrainedVision | None,
    origin: str,
    defaults: VisionConfig,
    template_arguments: dict[str, Any] | None = None,
) -> VisionChoice:
    """Complete the user's settings with those used in training or, if these are unknown, with `defaults`."""
    base = defaults if trained is None else trained.to_config()
    return VisionChoice(user.fill(base), user, trained, origin, template_arguments or {})


def choose_evaluation_vision(config: EvalConfig) -> VisionChoice:
    """Choose the vision settings for all data sets. This downloads the model if it is not on this machine.

    Raises:
        DsReasonError: the model or the server does not exist.
    """
    user, defaults = config.set_vision(), VisionConfig(fps=config.evaluation.fps)
    if config.server.url is not None:
        with closing(ServerAnswerer(config.server)) as answerer:
            folder = answerer.folder
        if folder is None:
            return choose_vision(user, None, "", defaults)
        return choose_vision(user, read_trained_vision(folder), str(folder), defaults, read_template_arguments(folder))
    own_weights = find_run_weights(str(config.model.path))
    origin = str(own_weights or config.model.path)
    if own_weights is not None and is_checkpoint(own_weights):
        arguments = read_checkpoint(own_weights).state.template_arguments
        return choose_vision(user, find_checkpoint_vision(own_weights), origin, defaults, arguments)
    folder = resolve_model_folder(config, own_weights)
    return choose_vision(user, read_trained_vision(folder), origin, defaults, read_template_arguments(folder))


def find_checkpoint_vision(checkpoint: Path) -> TrainedVision | None:
    """Return the training's vision settings from a checkpoint or, if it is older, from its run's record; None if unknown."""
    trained = read_checkpoint(checkpoint).state.vision
    return read_run_vision(checkpoint.absolute().parent.parent) if trained is None else trained


def apply_choice(config: EvalConfig, choice: VisionChoice) -> EvalConfig:
    """Return the configuration with the vision settings and template arguments of training; unknown ones keep their defaults."""
    changes: dict[str, Any] = {"template_arguments": choice.template_arguments | config.evaluation.template_arguments}
    if choice.trained is None:
        return config.model_copy(update={"evaluation": config.evaluation.model_copy(update=changes)})
    # If no rate is set, training has its own default.
    if choice.settings.fps is None and choice.settings.nframes is None:
        changes["fps"] = None
    evaluation = config.evaluation.model_copy(update=changes)
    return config.model_copy(update={"vision": choice.settings, "evaluation": evaluation})
