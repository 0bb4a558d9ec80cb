"""The toy trainer's configuration: a custom section, and the properties that every schema must have."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from dsreason.config.schema import RunConfig
from dsreason.config.section import Section


class ToySection(Section):
    batch_size: int = Field(2, ge=1)
    """Number of rows per step, over all ranks."""
    scale: float = Field(1.0, gt=0)
    """Factor by which the loss is multiplied."""


class ToyConfig(RunConfig):
    """Configuration of a `dsreason toy` run."""

    deciding_sections: ClassVar[tuple[str, ...]] = (*RunConfig.deciding_sections, "toy")

    toy: ToySection = ToySection()

    @property
    def samples_per_step(self) -> int:
        return self.toy.batch_size

    @property
    def batch_fact(self) -> str:
        return f"toy.batch_size is {self.toy.batch_size}"
