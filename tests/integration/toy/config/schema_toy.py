"""A custom section, and the parts that the run requires of every schema."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from dsreason.config.schema import RunConfig
from dsreason.config.section import Section


class ToySection(Section):
    batch_size: int = Field(2, ge=1)
    """Rows of a step, over all ranks."""
    scale: float = Field(1.0, gt=0)
    """Factor of the loss."""


class ToyConfig(RunConfig):
    """Everything of one `dsreason toy` run."""

    deciding_sections: ClassVar[tuple[str, ...]] = (*RunConfig.deciding_sections, "toy")

    toy: ToySection = ToySection()

    @property
    def samples_per_step(self) -> int:
        return self.toy.batch_size

    @property
    def batch_fact(self) -> str:
        return f"toy.batch_size is {self.toy.batch_size}"
