"""Families of video models, one file each. To add one, add a file and a line in `FAMILIES`."""

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
    """Find the family of a folder in diffusers' format by the pipeline in its model_index.json.

    CheckpointError if the file is missing, or the family or kind is not supported.
    """
    file = folder / "model_index.json"
    index = read_json(file)
    for family in FAMILIES.values():
        if index.get("_class_name") in family.pipelines:
            if reason := family.unsupported(index):
                raise CheckpointError(f"{file}: {reason}")
            return family
    supported = ", ".join(f"{family.name} ({', '.join(family.pipelines)})" for family in FAMILIES.values())
    raise CheckpointError(f"{file}: {index.get('_class_name')} is not supported; supported are {supported}")
