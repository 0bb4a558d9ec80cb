"""The policy in its DeepSpeed engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from dsreason.config.schema import RunConfig
from dsreason.engine.engine import build_engine
from dsreason.models.freeze import freeze
from dsreason.models.load import enable_gradient_checkpointing, load_model
from dsreason.models.policy import Policy
from dsreason.train.common.preflight import DTYPES

log = logging.getLogger(__name__)


def build_policy_engine(config: RunConfig, deepspeed_config: dict[str, Any], model_path: Path) -> DeepSpeedEngine:
    """The model in its partitions, frozen where asked, with its optimizer."""
    log.info("loading %s", model_path)
    model = load_model(
        model_path,
        dtype=DTYPES[config.train.precision],
        attention=config.model.attention,
        deepspeed=deepspeed_config,
        trust_remote_code=config.model.trust_remote_code,
    )
    frozen = freeze(model, config.model.freeze)
    if frozen:
        log.info("%d parameters are frozen by model.freeze", frozen)
    if config.model.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return build_engine(Policy(model), config.optim, deepspeed_config)
