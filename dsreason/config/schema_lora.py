"""The schema of the adapters that are trained instead of a model's weights (LoRA, 2106.09685)."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from dsreason.config.section import Section, check_regex, choose_pronoun

LARGEST_RANK = 2**16
"""Upper bound for the rank of an adapter; no layer has more inputs."""
Pattern = Annotated[str, AfterValidator(check_regex)]


class AdapterConfig(Section):
    """The keys for adapters that are common to all kinds of models."""

    rank: int = Field(0, ge=0, le=LARGEST_RANK)
    """Rank of the adapters. 0: no adapters; all weights are trained."""
    alpha: float | None = Field(None, gt=0)
    """Numerator of the adapters' scale: their output is multiplied by alpha / rank. Unset: twice the rank."""

    @model_validator(mode="after")
    def check_rank(self) -> Self:
        """Reject adapter settings without a rank; an explicit rank of 0 turns off the adapters of a recipe."""
        differing = [f"{name} ({format_value(getattr(self, name))})" for name in self.differing()]
        if differing and "rank" not in self.model_fields_set:
            raise ValueError(
                f"{' and '.join(differing)} cannot be set without rank: there would be no adapters, and all weights would be "
                f"trained; set rank, or remove {choose_pronoun(differing)}"
            )
        return self

    @property
    def scale(self) -> float:
        """The effective alpha."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class LoRAConfig(AdapterConfig):
    """Adapters of a vision-language model."""

    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability of an adapter's inputs during training; sft only."""
    targets: tuple[Pattern, ...] = ()
    """Regular expressions for the names of the linear layers that get an adapter (`language_model.*\\.[qv]_proj`), searched
    anywhere in a name; each must match at least one. Empty: the attention and feed-forward layers of the language model."""
    vision: bool = False
    """Also add adapters to the linear layers of the vision tower and its mergers."""
    rslora: bool = False
    """Scale the output by alpha / sqrt(rank), so that high ranks learn as fast as low ranks (rsLoRA, 2312.03732)."""
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1, le=LARGEST_RANK)]] = {}
    """Ranks of individual layers, by regular expressions as in targets (`{"visual" = 4}`); the first match is used."""
    alpha_pattern: dict[Pattern, Annotated[float, Field(gt=0)]] = {}
    """Alpha of individual layers, by regular expressions as in targets; the first match is used. Layers without a match use
    `alpha`, even if `rank_pattern` matches them."""


def format_value(value: Any) -> str:
    """Format a value for messages: a list as its entries separated by commas, and 16.0 as 16."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
