"""Components that the small random models of all families share."""

from __future__ import annotations

from typing import Any


def build_tiny_vae() -> Any:
    """Build a small version of the autoencoder that Wan and Cosmos share; it also compresses by 4 in time and by 8 in space."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
