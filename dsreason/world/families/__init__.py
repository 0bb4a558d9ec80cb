"""Families of video models, one per file. To add a family, add a file and an entry in `FAMILIES`."""

from __future__ import annotations

from pathlib import Path

from dsreason.errors import CheckpointError
from dsreason.world.families.components import read_json
from dsreason.world.families.cosmos_predict2_5 import COSMOS_PREDICT2_5
from dsreason.world.families.family import WorldFamily
from dsreason.world.families.wan import WAN

__all__ = ["FAMILIES", "WorldFamily", "find_family"]

FAMILIES: dict[str, WorldFamily] = {"cosmos_predict2_5": COSMOS_PREDICT2_5, "wan": WAN}


def find_family(folder: Path) -> WorldFamily:
    """Return the family of the model in a diffusers folder, based on the pipeline class in its model_index.json.

    Raises:
        CheckpointError: the file is missing, or the family or this kind of model is not supported.
    """
    file = folder / "model_index.json"
    index = read_json(file)
    for family in FAMILIES.values():
        if index.get("_class_name") in family.pipelines:
            if reason := family.unsupported(index):
                raise CheckpointError(f"{file}: {reason}")
            return family
    supported = ", ".join(f"{family.name} ({', '.join(family.pipelines)})" for family in FAMILIES.values())
    raise CheckpointError(f"{file}: {index.get('_class_name')} is not supported; use a model of {supported}")
