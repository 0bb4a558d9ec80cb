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
        """Yield `[1, max_length, D]` for each prompt, as the family's pipeline makes it; the encoder is freed at the end.

        Prompts are encoded one by one: an embedding does not depend on the others, and only one is in memory.
        """


class CountTokens(Protocol):
    def __call__(self, folder: Path, prompts: Sequence[str]) -> list[int]:
        """Yield the number of tokens of each prompt, as `Embeddings` would encode it without a limit."""


class ProjectText(Protocol):
    def __call__(self, folder: Path, device: torch.device | str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The transformer's own first layer for text, which makes embeddings smaller: `[B, L, D]` → `[B, L, d]`."""


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
        """The predicted velocity, noise − data: `[B, C, T, h, w]`, float32.

        Args:
            transformer: the model, or the DeepSpeed engine around it.
            x: latents `[B, C, T, h, w]`, float32.
            s: noise levels `[B]`, float32, from 0 (data) to 1 (noise).
            text: embeddings `[B, L, D]`, or `[B, L, d]` where they are projected.
            conditioning: latent frames that are given. The velocity there is `initial_noise` − `conditioning.latents`.
            initial_noise: what `x` is made of at s = 1; needed with `conditioning`.
        """


class BuildTiny(Protocol):
    def __call__(self, folder: Path, seed: int = 0, num_layers: int = 2) -> None:
        """A small random model with every class real: a complete folder, which the pipeline loads."""


@dataclass(frozen=True)
class WorldFamily:
    """Models that share a pipeline's classes. Latents, noise levels and velocities mean the same in all families."""

    name: str
    pipelines: tuple[str, ...]
    """`_class_name` in model_index.json."""
    transformer: str
    """Its class in diffusers."""
    blocks: tuple[str, ...]
    """Class names of the transformer's blocks: ZeRO-3 gathers each as a whole."""
    lora_targets: tuple[str, ...]
    """Names of the linear layers of attention and feed-forward."""
    max_conditional_frames: int
    """Latent frames that can be given."""
    guidance_offset: float
    """Number to add to the pipeline's own `guidance_scale` to get ours, in which 1 is without guidance."""
    embeddings: Embeddings
    count_tokens: CountTokens
    velocity: Velocity
    solver_times: Callable[[Any], Tensor]
    """The noise levels `[steps]` that the pipeline gives to the transformer, of a scheduler after `set_timesteps`. Some
    pipelines round them."""
    parallelise: Callable[[nn.Module, Any], None]
    """Make the transformer share its tokens among the ranks of a group, see `world/context_parallel.py`."""
    build_tiny: BuildTiny
    text_width: Callable[[Mapping[str, Any], bool], int]
    """D of embeddings, or d where they are projected, by the transformer's config.json."""
    float32_vae: bool = False
    """The autoencoder computes in float32 whatever the type of training is."""
    clean: Callable[[str], str] = lambda prompt: prompt
    """Turns a prompt into what the encoder gets."""
    sigmas: Callable[[Path, int], Tensor] = read_sigmas
    """The noise levels of the folder's own schedule: `[steps + 1]`, float64, falling, the last one 0."""
    project_text: ProjectText | None = None
    """Projection for embeddings that are too large to keep. Used only if this layer is not trained, and `projects_text`."""
    accept_projected: Callable[[nn.Module], None] = lambda transformer: None
    """Make a transformer take projected embeddings, too; the names of its parameters stay."""
    unsupported: Callable[[dict[str, Any]], str] = lambda index: ""
    """Why a folder with this model_index.json cannot be trained; empty if it can."""
    unsupported_transformer: Callable[[Mapping[str, Any]], str] = lambda config: ""
    """Why a transformer of this configuration cannot be trained; empty if it can."""

    def read_transformer_config(self, folder: Path) -> dict[str, Any]:
        """The config.json of a folder's transformer, with its class's defaults for what is not in it."""
        return read_transformer_config(folder, self.transformer)

    def projects_text(self, folder: Path) -> bool:
        """Whether the transformer of a folder has a first layer for text that makes embeddings smaller. What is projected is
        known by its width."""
        config = self.read_transformer_config(folder)
        return self.project_text is not None and self.text_width(config, True) != self.text_width(config, False)

    def encode_text(
        self, folder: Path, prompts: Sequence[str], max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> Tensor:
        """The embeddings of a few prompts: `[B, L, D]`."""
        return torch.cat(list(self.embeddings(folder, prompts, max_length, device, dtype)))
