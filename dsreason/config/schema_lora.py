"""Schema for adapters, which are trained instead of a model's weights (LoRA, 2106.09685)."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from dsreason.config.section import Section, check_regex, choose_pronoun

LARGEST_RANK = 2**16
"""Maximum rank of an adapter; no layer has more inputs."""
Pattern = Annotated[str, AfterValidator(check_regex)]


class AdapterConfig(Section):
    """Adapter keys that are the same for all kinds of models."""

    rank: int = Field(0, ge=0, le=LARGEST_RANK)
    """Rank of the adapters. 0: no adapters are used, and all weights are trained."""
    alpha: float | None = Field(None, gt=0)
    """Numerator of the adapters' scale: an adapter's output is multiplied by alpha / rank. Unset: twice the rank."""

    @model_validator(mode="after")
    def check_rank(self) -> Self:
        """Reject adapter settings without a rank; an explicit rank of 0 is allowed, because it disables a recipe's adapters."""
        differing = [f"{name} ({format_value(getattr(self, name))})" for name in self.differing()]
        if differing and "rank" not in self.model_fields_set:
            raise ValueError(
                f"{' and '.join(differing)} cannot be set without rank: there would be no adapters, and all weights would be "
                f"trained; set rank, or remove {choose_pronoun(differing)}"
            )
        return self

    @property
    def scale(self) -> float:
        """Value of alpha, or twice the rank if alpha is unset."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class LoRAConfig(AdapterConfig):
    """Keys for a vision-language model's adapters."""

    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability with which an adapter's inputs are dropped during training; not supported by grpo."""
    targets: tuple[Pattern, ...] = ()
    """Regular expressions for the linear layers that get an adapter (`language_model.*\\.[qv]_proj`). An expression may match any
    part of a name, and must match at least one name. Empty: the language model's attention and feed-forward layers."""
    vision: bool = False
    """Also add adapters to the linear layers of the vision tower and its mergers."""
    rslora: bool = False
    """Scale the output by alpha / sqrt(rank), so that high ranks learn as fast as low ranks (rsLoRA, 2312.03732)."""
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1, le=LARGEST_RANK)]] = {}
    """Ranks for individual layers: regular expression, as in targets → rank (`{"visual" = 4}`). The first match applies."""
    alpha_pattern: dict[Pattern, Annotated[float, Field(gt=0)]] = {}
    """Alpha for individual layers: regular expression, as in targets → alpha. The first match applies. Layers without a match use
    `alpha`, even if `rank_pattern` matches them."""


def format_value(value: Any) -> str:
    """Format a value for messages: separate the entries of a list with commas, and write 16.0 as 16."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
