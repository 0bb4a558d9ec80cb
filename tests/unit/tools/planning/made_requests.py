"""Plan requests for tests, for published models whose shape is in the built-in table."""

from __future__ import annotations

from typing import Any

from dsreason.config.schema import RunConfig, SFTConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.tools.planning.request import Machine, PlanRequest

SEVEN = "nvidia/Cosmos-Reason1-7B"
REWARDS = {"functions": {"format": 1.0}}


def sft(path: str = SEVEN, gpus: int = 4, ds_config: str = "zero3.json", **sections: dict[str, Any]) -> PlanRequest:
    return made(SFTConfig, "sft", path, gpus, ds_config, sections)


def grpo(path: str = SEVEN, gpus: int = 4, ds_config: str = "zero3.json", **sections: dict[str, Any]) -> PlanRequest:
    return made(GRPOConfig, "grpo", path, gpus, ds_config, {"reward": REWARDS} | sections)


def made(
    schema: type[RunConfig], trainer: str, path: str, gpus: int, ds_config: str, sections: dict[str, Any]
) -> PlanRequest:
    document = {**sections, "model": {"path": path} | sections.get("model", {})}
    return PlanRequest(trainer, schema.model_validate(document), Machine(gpus), ds_config)
