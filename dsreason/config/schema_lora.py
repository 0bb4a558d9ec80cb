"""The schema of adapters that are trained instead of a model's weights (LoRA, 2106.09685)."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from dsreason.config.section import Section, check_regex

LARGEST_RANK = 2**16
"""Upper bound of ranks: no layer has more inputs."""
Pattern = Annotated[str, AfterValidator(check_regex)]


class AdapterConfig(Section):
    """The keys of adapters that all kinds of model share."""

    rank: int = Field(0, ge=0, le=LARGEST_RANK)
    """Rank of the adapters; 0: all weights are trained."""
    alpha: float | None = Field(None, gt=0)
    """Scale of the adapters: their output is multiplied by alpha / rank. Unset: twice the rank."""

    @model_validator(mode="after")
    def check_rank(self) -> Self:
        """Reject adapter settings without a rank; an explicit rank of 0 turns off the adapters of a recipe."""
        differing = [f"{name} ({format_value(getattr(self, name))})" for name in self.differing()]
        if differing and "rank" not in self.model_fields_set:
            raise ValueError(
                f"{' and '.join(differing)} without rank: all weights would be trained, without adapters; set rank, or remove "
                f"{'them' if len(differing) > 1 else 'it'}"
            )
        return self

    @property
    def scale(self) -> float:
        """Effective alpha."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class LoRAConfig(AdapterConfig):
    """Adapters of a vision-language model."""

    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that training drops; sft only."""
    targets: tuple[Pattern, ...] = ()
    """Regular expressions, searched in the names of linear layers (`language_model.*\\.[qv]_proj`); each must match one. Layers
    that match any of them get an adapter. Empty: attention and feed-forward of the language model."""
    vision: bool = False
    """Add adapters to the linear layers of the vision tower and its mergers, too."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), which lets high ranks learn as fast as low ones (rsLoRA, 2312.03732)."""
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1, le=LARGEST_RANK)]] = {}
    """Ranks of some layers, by regular expressions as in targets; the first match counts (`{"visual" = 4}`)."""
    alpha_pattern: dict[Pattern, Annotated[float, Field(gt=0)]] = {}
    """Alpha of some layers, likewise. A layer that only `rank_pattern` matches has the alpha above."""


def format_value(value: Any) -> str:
    """Format a value for messages: a list by its entries, 16.0 as 16."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
