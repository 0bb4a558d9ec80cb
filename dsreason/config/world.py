"""Rules that depend on how many ranks there are."""

from __future__ import annotations

from dsreason.config.schema import RunConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError


def check_world(config: RunConfig, world_size: int) -> list[str]:
    """What a person should know about this configuration on this many ranks; one text each, none of them an error.

    Any global batch can be cut over any number of ranks: uneven shares are even in the loss, and a rank without a
    sample runs a stand-in that does not count. That only costs time.

    Raises:
        ConfigError: the ranks cannot be cut into tensor-parallel groups.
    """
    if isinstance(config, GRPOConfig) and world_size % config.rollout.tensor_parallel_size:
        raise ConfigError(
            f"rollout.tensor_parallel_size ({config.rollout.tensor_parallel_size}) does not divide the number of ranks "
            f"({world_size}); lower it, or start another number"
        )
    notes = []
    if config.samples_per_step < world_size:
        idle = world_size - config.samples_per_step
        notes.append(
            f"{config.batch_fact}, less than the number of ranks ({world_size}): "
            f"{idle} of them train on nothing in every step; raise it, or start fewer ranks"
        )
    return notes
