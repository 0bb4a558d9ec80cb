"""The schema of adapters that are trained in place of a model's weights (LoRA, 2106.09685)."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from dsreason.config.section import Section, check_regex

LARGEST_RANK = 2**16
"""No layer has more inputs."""
Pattern = Annotated[str, AfterValidator(check_regex)]


class AdapterConfig(Section):
    """What adapters of every kind of model have."""

    rank: int = Field(0, ge=0, le=LARGEST_RANK)
    """Rank of the adapter; 0: all weights are trained."""
    alpha: float | None = Field(None, gt=0)
    """The adapter's output is scaled by alpha / rank. Unset: twice the rank."""

    @model_validator(mode="after")
    def check_rank(self) -> Self:
        """A rank of 0 that somebody wrote turns off the adapter of a recipe."""
        differing = [f"{name} ({shown(getattr(self, name))})" for name in self.differing()]
        if differing and "rank" not in self.model_fields_set:
            raise ValueError(
                f"{' and '.join(differing)} without rank: all weights would be trained, and no adapter; set rank, or remove "
                f"{'them' if len(differing) > 1 else 'it'}"
            )
        return self

    @property
    def scale(self) -> float:
        """The alpha that is used."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class LoRAConfig(AdapterConfig):
    """Of a vision-language model."""

    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that training leaves out; sft only."""
    targets: tuple[Pattern, ...] = ()
    """Regular expressions, searched in the names of linear layers (`language_model.*\\.[qv]_proj`); each must match one. Those
    that match any get an adapter. Empty: attention and feed-forward of the language model."""
    vision: bool = False
    """Also the linear layers of the vision tower and its mergers."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), which lets high ranks learn as fast as low ones (rsLoRA, 2312.03732)."""
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1, le=LARGEST_RANK)]] = {}
    """Ranks of some of the layers, by regular expressions as in targets; the first that matches counts (`{"visual" = 4}`)."""
    alpha_pattern: dict[Pattern, Annotated[float, Field(gt=0)]] = {}
    """The same of alpha. It has the alpha above where only its rank is another."""


def shown(value: Any) -> str:
    """For messages: a list by its entries, 16.0 as 16."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
