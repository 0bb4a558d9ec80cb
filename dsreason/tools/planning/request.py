"""Input of a plan: a run's configuration, its model, and the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from dsreason.config.deepspeed import resolve_deepspeed
from dsreason.config.schema import RunConfig
from dsreason.config.schema_dpo import DPOConfig
from dsreason.tools.planning.architecture import Architecture, find_architecture
from dsreason.tools.planning.parameters import Parameters, build_meta_model, count_parameters
from dsreason.tools.planning.phases import GIB
from dsreason.tools.planning.pieces import Pieces, build_pieces
from dsreason.tools.planning.shape import ModelShape, read_shape

USABLE = 0.985
"""Ratio of a GPU's usable GiB to its nominal GB: an 80 GB H100 has 79.2 GiB, a 141 GB H200 has 139.8 GiB."""
GPUS_PER_HOST = 8

ZERO_DEFAULTS = {
    "stage": 0,
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "sub_group_size": 1e9,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
    "stage3_max_reuse_distance": 0,
    "contiguous_gradients": True,
}
"""DeepSpeed 0.19.8's defaults for missing keys, except that the default reuse distance is that of `config/deepspeed.py`."""


@dataclass(frozen=True)
class Machine:
    gpus: int
    gpu_memory: float = 80.0
    """Nominal memory of one GPU in GB."""
    gpus_per_host: int = GPUS_PER_HOST
    device: Literal["cuda", "cpu"] = "cuda"
    """Device for which the run is planned; plans for `cpu` can be compared with measurements on a CPU."""

    @property
    def gpu_bytes(self) -> int:
        return int(self.gpu_memory * USABLE * GIB)

    @property
    def ranks_per_host(self) -> int:
        return min(self.gpus, self.gpus_per_host)

    @property
    def hosts(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_host)


@dataclass(frozen=True)
class Zero:
    """The section `zero_optimization` of a DeepSpeed JSON, which determines where the training state is stored."""

    section: Mapping[str, Any]

    def number(self, key: str) -> int:
        return int(self.section.get(key, ZERO_DEFAULTS[key]))

    @property
    def stage(self) -> int:
        return self.number("stage")

    def offloads(self, what: Literal["optimizer", "param"]) -> bool:
        return bool((self.section.get(f"offload_{what}") or {}).get("device", "none") != "none")

    def pins(self, what: Literal["optimizer", "param"]) -> bool:
        return bool((self.section.get(f"offload_{what}") or {}).get("pin_memory", False))


@dataclass
class PlanRequest:
    """The run to plan: a trainer, its configuration, and the machine.

    Raises:
        ConfigError: the run would refuse to start with this configuration on this machine.
    """

    trainer: str
    config: RunConfig
    machine: Machine
    ds_config: str
    """Name or path of the DeepSpeed JSON."""
    config_name: str = "the run configuration"
    media_tokens: int | None = None
    """Media tokens per row on one rank; None: the maximum that the configuration allows."""
    trained_tokens: int | None = None
    """Trained tokens per row on one rank; None: all tokens."""
    architecture: Architecture = field(init=False)
    zero: Zero = field(init=False)

    def __post_init__(self) -> None:
        self.config.check_ranks(self.machine.gpus)
        document = resolve_deepspeed(
            self.ds_config,
            self.config,
            device=self.machine.device,
            world_size=self.machine.gpus,
            config_name=self.config_name,
        )
        self.zero = Zero(document["zero_optimization"])
        model = self.config.model
        self.architecture = find_architecture(model.path, model.revision, model.trust_remote_code)

    @cached_property
    def parameters(self) -> Parameters:
        return count_parameters(build_meta_model(self.architecture, self.config), self.config)

    @cached_property
    def pieces(self) -> Pieces:
        return build_pieces(self.architecture, self.config, self.parameters)

    @cached_property
    def shape(self) -> ModelShape:
        return read_shape(self.architecture.config)

    @property
    def width(self) -> int:
        """Bytes per weight."""
        return 2 if self.config.train.precision == "bf16" else 4

    @property
    def row_tokens(self) -> int:
        """Tokens per forward pass, summed over the ranks that share a row."""
        budget, _ = self.config.token_budget
        if budget is not None:
            return budget
        sequences = 2 if isinstance(self.config, DPOConfig) else 1
        return sequences * (self.config.train.micro_batch_size or 1) * self.config.model.max_length

    @property
    def tokens(self) -> int:
        """Tokens per forward pass on one rank."""
        return math.ceil(self.row_tokens / self.config.ranks_per_row)
