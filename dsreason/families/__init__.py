"""Descriptions of the model families, in one file per family. To add a family, add a file and an entry in `FAMILIES`.

Importing this package imports neither torch nor transformers, so that commands start quickly and can check rows without them.
"""

from dsreason.errors import CheckpointError
from dsreason.families.cosmos3 import COSMOS3
from dsreason.families.cosmos3_edge import COSMOS3_EDGE
from dsreason.families.family import Family
from dsreason.families.qwen2_5_vl import QWEN2_5_VL
from dsreason.families.qwen3_5 import QWEN3_5
from dsreason.families.qwen3_vl import QWEN3_VL
from dsreason.families.qwen3_vl_moe import QWEN3_VL_MOE
from dsreason.families.qwen_text import QWEN2_5, QWEN3

__all__ = ["FAMILIES", "Family", "list_control_tokens", "get_family"]

FAMILIES = {
    family.model_type: family
    for family in (QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, COSMOS3, COSMOS3_EDGE, QWEN3_5, QWEN2_5, QWEN3)
}


def get_family(model_type: str) -> Family:
    """Return the family for the `model_type` in a `config.json`; raise CheckpointError if the type is not supported."""
    if model_type not in FAMILIES:
        supported = ", ".join(f"{family.name} ({key})" for key, family in FAMILIES.items())
        raise CheckpointError(
            f"model_type {model_type!r} is not supported; use a model of one of these families: {supported}"
        )
    return FAMILIES[model_type]


def list_control_tokens() -> list[str]:
    """Return the control tokens of all families, because rows are read before the model is known."""
    return list(dict.fromkeys(token for family in FAMILIES.values() for token in family.tokens.control))
