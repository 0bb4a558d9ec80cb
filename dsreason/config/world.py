"""Rules that depend on how many ranks there are."""

from __future__ import annotations

from dsreason.config.schema import SFTConfig


def check_world(config: SFTConfig, world_size: int) -> list[str]:
    """What a person should know about this configuration on this many ranks; one text each, none of them an error.

    Any global batch can be cut over any number of ranks: uneven shares are even in the loss, and a rank without a
    sample runs a stand-in that does not count. That only costs time.
    """
    train = config.train
    notes = []
    if train.global_batch_size < world_size:
        idle = world_size - train.global_batch_size
        notes.append(
            f"train.global_batch_size ({train.global_batch_size}) is smaller than the number of ranks ({world_size}): "
            f"{idle} of them train on nothing in every step; raise it, or start fewer ranks"
        )
    return notes
