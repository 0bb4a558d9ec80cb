"""The description of a family of video models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dsreason.world.families.components import read_sigmas, read_transformer_config
from dsreason.world.types import Conditioning


class Embeddings(Protocol):
    def __call__(
        self, folder: Path, prompts: Sequence[str], max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """Yield each prompt's embedding as in the family's pipeline, `[1, max_length, D]`; free the encoder at the end.

        Prompts are encoded one by one, so an embedding does not depend on other prompts, and only one is in memory at a time.
        """


class CountTokens(Protocol):
    def __call__(self, folder: Path, prompts: Sequence[str]) -> list[int]:
        """Return each prompt's number of tokens before truncation."""


class ProjectText(Protocol):
    def __call__(self, folder: Path, device: torch.device | str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Load the transformer's first text layer, which makes embeddings smaller: `[B, L, D]` → `[B, L, d]`."""


class Velocity(Protocol):
    def __call__(
        self,
        transformer: nn.Module,
        x: Tensor,
        s: Tensor,
        text: Tensor,
        conditioning: Conditioning | None = None,
        initial_noise: Tensor | None = None,
    ) -> Tensor:
        """Return the predicted velocity, noise − data: `[B, C, T, h, w]`, float32.

        Args:
            transformer: the model, or the DeepSpeed engine that wraps it.
            x: latents `[B, C, T, h, w]`, float32.
            s: noise levels `[B]`, float32, from 0 (data) to 1 (noise).
            text: embeddings `[B, L, D]`, or `[B, L, d]` if they are projected.
            conditioning: given latent frames, whose velocity is `initial_noise` − `conditioning.latents`.
            initial_noise: value of `x` at s = 1; required with `conditioning`.
        """


class BuildTiny(Protocol):
    def __call__(self, folder: Path, seed: int = 0, num_layers: int = 2) -> None:
        """Write a complete model folder with small random weights. It uses the real classes, so the pipeline can load it."""


@dataclass(frozen=True)
class WorldFamily:
    """Models whose pipelines use the same classes. Latents, noise levels and velocities mean the same thing in all families."""

    name: str
    pipelines: tuple[str, ...]
    """Supported values of `_class_name` in model_index.json."""
    transformer: str
    """Class name of the transformer in diffusers."""
    blocks: tuple[str, ...]
    """Class names of the transformer's blocks; ZeRO-3 gathers each block's parameters together."""
    lora_targets: tuple[str, ...]
    """Names of the linear layers in attention and feed-forward blocks, which are the default LoRA targets."""
    max_conditional_frames: int
    """Maximum number of given latent frames; 0 if the models accept only text."""
    guidance_offset: float
    """Difference between `world.guidance_scale`, for which 1 means no guidance, and the pipeline's own `guidance_scale`."""
    embeddings: Embeddings
    count_tokens: CountTokens
    velocity: Velocity
    solver_times: Callable[[Any], Tensor]
    """Takes a scheduler after `set_timesteps`, and returns the noise levels `[steps]` that the pipeline passes to the
    transformer. Some pipelines round them."""
    parallelise: Callable[[nn.Module, Any], None]
    """Makes the transformer shard its tokens across the ranks of a group; see `world/context_parallel.py`."""
    build_tiny: BuildTiny
    text_width: Callable[[Mapping[str, Any], bool], int]
    """Returns the embeddings' width from a transformer's configuration: d if the bool is true (projected), otherwise D."""
    float32_vae: bool = False
    """Whether the autoencoder computes in float32 regardless of the training precision."""
    clean: Callable[[str], str] = lambda prompt: prompt
    """Normalizes a prompt as the pipeline does before encoding."""
    sigmas: Callable[[Path, int], Tensor] = read_sigmas
    """Returns the noise levels of the schedule in the model's folder: `[steps + 1]`, float64, decreasing to 0."""
    project_text: ProjectText | None = None
    """Loads the layer that projects embeddings that are too large to cache; None if the family has no such layer. It is used
    only if that layer is not trained and `projects_text` is true."""
    accept_projected: Callable[[nn.Module], None] = lambda transformer: None
    """Makes a transformer accept projected embeddings as well, without renaming its parameters."""
    unsupported: Callable[[dict[str, Any]], str] = lambda index: ""
    """Explains why a model with this model_index.json cannot be trained; returns an empty string if it can."""
    unsupported_transformer: Callable[[Mapping[str, Any]], str] = lambda config: ""
    """Explains why a transformer with this configuration cannot be trained; returns an empty string if it can."""

    def read_transformer_config(self, folder: Path) -> dict[str, Any]:
        """Return the transformer's config.json from a folder; missing keys get the defaults of its class."""
        return read_transformer_config(folder, self.transformer)

    def projects_text(self, folder: Path) -> bool:
        """Return whether the first text layer of the folder's transformer can be applied before embeddings are cached.

        The widths must differ, because the transformer recognizes projected embeddings by their width.
        """
        config = self.read_transformer_config(folder)
        return self.project_text is not None and self.text_width(config, True) != self.text_width(config, False)

    def encode_text(
        self, folder: Path, prompts: Sequence[str], max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> Tensor:
        """Return the embeddings of a few prompts: `[B, L, D]`."""
        return torch.cat(list(self.embeddings(folder, prompts, max_length, device, dtype)))
