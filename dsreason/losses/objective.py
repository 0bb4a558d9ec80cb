"""Objective of a GRPO run, built from a preset and the overrides in the run's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from dsreason.config.schema_grpo import AlgorithmConfig
from dsreason.losses.advantages import ADVANTAGES
from dsreason.losses.corrections import CORRECTIONS
from dsreason.losses.kl import KL_ESTIMATORS, bias_corrected_k3
from dsreason.losses.policy import MicroBatchLoss
from dsreason.losses.presets import PRESETS


@dataclass(frozen=True)
class Objective:
    """Functions and coefficients that compute the loss from log-probabilities and rewards.

    Example: `build_objective(AlgorithmConfig(preset="dapo", clip_high=0.3)).loss` is `dapo_loss` with clip_high 0.3.
    """

    advantages: Callable[[Tensor], Tensor]
    """Rewards `[P, G]` → advantages `[P, G]`."""
    loss: Callable[..., MicroBatchLoss]
    """Loss function from `losses.policy`, with the clip bounds already set."""
    correction: Callable[[Tensor, Tensor], Tensor] | None
    """(log_ratio `[N]`, sequence `[N]`) → importance weights `[N]`; None disables the correction."""
    kl: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(logprobs, ref_logprobs, old_logprobs), each `[N]` → KL estimates `[N]`."""
    kl_coef: float
    entropy_coef: float
    overlong_filter: bool
    dynamic_sampling: bool

    def compute_penalty(
        self, logprobs: Tensor, ref_logprobs: Tensor | None, old_logprobs: Tensor, entropy: Tensor
    ) -> Tensor | None:
        """Compute kl_coef · KL - entropy_coef · H for each token, `[N]`; return None if both coefficients are 0."""
        terms = []
        if self.kl_coef and ref_logprobs is not None:
            terms.append(self.kl_coef * self.kl(logprobs, ref_logprobs, old_logprobs))
        if self.entropy_coef:
            terms.append(-self.entropy_coef * entropy)
        return sum(terms[1:], terms[0]) if terms else None


def build_objective(config: AlgorithmConfig) -> Objective:
    """Build the objective from the preset named in the config, whose other settings override the preset."""
    preset = PRESETS[config.preset]
    names = ("advantage", "clip_low", "clip_high", "kl_coef", "overlong_filter", "dynamic_sampling")
    overrides = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    preset = replace(preset, **overrides)
    clips = {"clip_low": preset.clip_low, "clip_high": preset.clip_high}
    if config.dual_clip is not None:
        clips["dual_clip"] = config.dual_clip
    return Objective(
        advantages=ADVANTAGES[preset.advantage],
        loss=partial(preset.loss, **clips),
        correction=build_correction(config),
        kl=build_kl_estimator(config),
        kl_coef=preset.kl_coef,
        entropy_coef=config.entropy_coef,
        overlong_filter=preset.overlong_filter,
        dynamic_sampling=preset.dynamic_sampling,
    )


def build_correction(config: AlgorithmConfig) -> Callable[[Tensor, Tensor], Tensor] | None:
    if config.correction == "none":
        return None
    bounds = {"low": config.correction_low, "high": config.correction_high}
    return partial(CORRECTIONS[config.correction], **{key: value for key, value in bounds.items() if value is not None})


def build_kl_estimator(config: AlgorithmConfig) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if config.kl_estimator == "bias_corrected_k3":
        return partial(bias_corrected_k3, clamp=config.kl_clamp)
    clamp = {} if config.kl_clamp is None else {"clamp": config.kl_clamp}
    estimate = partial(KL_ESTIMATORS[config.kl_estimator], **clamp)
    return lambda logprobs, ref_logprobs, old_logprobs: estimate(logprobs, ref_logprobs)
