"""Classes that describe a model family: its tokens, vision settings, parameter names and tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin


class Grid(NamedTuple):
    """Size of a run of placeholder tokens, in tokens, and the distance between consecutive time steps, in mRoPE units."""

    frames: int
    height: int
    width: int
    time_step: float = 1.0


Grids = tuple[Iterable[Grid], Iterable[Grid]]
"""Runs of image placeholders and runs of video placeholders, both in order of appearance."""

GridRule = Callable[[dict[str, Any], Any], Grids]
"""Function `(mm_kwargs, config) -> Grids` that computes the grids of the media of one or more samples."""


def merge_grids(grid_thw: Any, merge_size: int) -> list[Grid]:
    """Convert a processor's `[media, 3]` grid of patches (frames, height, width) to grids of tokens; None gives an empty list."""
    if grid_thw is None:
        return []
    return [Grid(t, h // merge_size, w // merge_size) for t, h, w in grid_thw.tolist()]


def return_no_grids(mm_kwargs: dict[str, Any], config: Any) -> Grids:
    """Return no grids; this is the grid rule of text-only models."""
    return (), ()


class TowerShape(NamedTuple):
    """Sizes of a vision tower that families store under different names, or not at all, in `vision_config`."""

    depth: int
    """Number of blocks."""
    num_heads: int
    temporal_patch_size: int
    """Number of frames per patch."""
    is_rotary: bool = True
    """Whether the blocks' forward takes rotary positions."""


def read_tower_shape(vision: Any) -> TowerShape:
    """Read the shape from a `vision_config` with the names that Qwen's models use."""
    return TowerShape(vision.depth, vision.num_heads, vision.temporal_patch_size)


TowerLayout = Callable[[Any, "Tensor"], dict[str, Any]]
"""Function `(vision_config, grids [media, 3]) -> keyword arguments for the vision tower's forward`, which runs on the host."""


def return_grids(vision: Any, grids: Tensor) -> dict[str, Any]:
    """Return only the grids, from which the vision tower computes its other arguments."""
    return {"grid_thw": grids}


@dataclass(frozen=True)
class Tokens:
    """Texts of the tokenizer's special tokens. The media tokens of a text-only family without such tokens are empty.

    Example: `FAMILIES["qwen3_vl"].tokens`.
    """

    image: str
    """Placeholder for an image."""
    video: str
    """Placeholder for a video."""
    media_start: str
    """Token before the placeholders of a media item."""
    media_end: str
    turn_start: str
    turn_end: str
    padding: str
    unused_media: tuple[str, ...] = ()
    """Additional placeholders that no processor produces."""
    others: tuple[str, ...] = ()
    """Other special tokens, which users' texts may contain."""

    @property
    def media(self) -> tuple[str, ...]:
        """Tokens that are never sampled: a placeholder in a completion has no pixels, so the policy's forward would fail."""
        return tuple(filter(None, (self.image, self.video, *self.unused_media, self.media_start, self.media_end)))

    @property
    def control(self) -> tuple[str, ...]:
        """Tokens that a user's text must not contain, because they stand for media or for the start or end of a turn."""
        return (*self.media, self.turn_start, self.turn_end, self.padding)


@dataclass(frozen=True)
class TrainedSizes:
    """Ranges of media sizes on which a model was trained, in merged patches (tokens); the published processor accepts far wider
    ranges."""

    image: tuple[int, int]
    """Smallest and largest size of an image."""
    frame: tuple[int, int]
    """Smallest and largest size of a video frame."""
    video: int
    """Largest size of a video; the frames of one temporal patch count once."""


@dataclass(frozen=True)
class Vision:
    """Defaults for sampling and resizing media, used if the row, the configuration and the processor do not set a value."""

    bounds_are_per_video: bool
    """Whether the video processor's `size` limits the pixels of all sampled frames together (True) or of each frame (False)."""
    fps: float
    """Number of frames to sample per second of video."""
    min_frames: int
    max_frames: int
    max_frame_tokens: int
    """Maximum size of one video frame in merged patches, used if the processor limits only all frames together."""
    max_video_tokens: int
    """Maximum size of a video in merged patches, used if the processor limits only each frame."""
    caps_frames: bool = True
    """Whether the video processor can limit the pixels of each frame (`cap_pixels_per_frame`)."""
    trained_sizes: TrainedSizes | None = None
    """Limits that replace the processor's limits, unless the processor rejects the largest size; None keeps the processor's."""
    channels_last: bool = False
    """Whether the processor flattens patches with the channels of a pixel together; if False, with the pixels of a channel."""
    frames_have_marks: bool = False
    """Whether the start and end tokens that the chat template puts around a video are removed, because the processor adds them
    to each frame."""


@dataclass(frozen=True)
class Modules:
    """Names, or parts of names, of modules in the transformers model."""

    vision_tower: str | None
    """Path of the vision tower in the model; None for a text-only model."""
    head: str
    """Name of the output layer, which may be tied to the embedding."""
    norms: tuple[str, ...]
    """Texts, one of which is in the name of every weight that scales channels."""
    embeddings: tuple[str, ...]
    """Parts of the names of token and position embedding weights."""
    text_layers: str
    """Regular expression for the names of the language model's linear layers, which get LoRA adapters by default."""
    vision_layers: str = ""
    """Regular expression for the names of the linear layers in the vision tower and its mergers."""
    patch_embedding: str = ""
    """Part of the name of the vision tower's patch embedding, whose input needs no gradient."""
    vision_blocks: str = ""
    """Path of the list of the vision tower's blocks in the model."""
    merger: str = ""
    """Text that is in the name of every module of the vision tower, or outside it, that processes merged patches."""
    projector: str = ""
    """Path of the module that merges patches and projects them to the text model's hidden size. If it is not part of the
    vision tower, the tower's forward does not call it."""
    blocks: tuple[str, ...] = ()
    """Class names of the decoder layer and of the vision tower's block and merger; ZeRO-3 gathers each such module as a unit."""
    experts: str = ""
    """Regular expression for the names of the parameters `[experts, out, in]` that hold all experts of a decoder layer; empty for
    a dense model."""

    def is_expert(self, name: str) -> bool:
        """Return whether a parameter holds the experts of a decoder layer."""
        return self.experts != "" and re.search(self.experts, name) is not None

    def is_in_tower(self, name: str) -> bool:
        """Return whether a module or parameter belongs to the vision tower."""
        return self.vision_tower is not None and name.startswith(f"{self.vision_tower}.")

    def is_vision(self, name: str) -> bool:
        """Return whether a module or parameter belongs to the vision tower or to a projector outside it."""
        return self.is_in_tower(name) or (self.projector != "" and f"{name}.".startswith(f"{self.projector}."))

    @property
    def projects_outside_tower(self) -> bool:
        """Whether the features of the vision tower are patches, which the projector merges."""
        return self.projector != "" and not self.is_in_tower(self.projector)


@dataclass(frozen=True)
class Tiny:
    """Settings for building a tiny model of the family, with random weights (see `dsreason.models.tiny`)."""

    default_system: str | None
    """System message that the chat template adds to conversations that have none; None adds nothing."""
    config: Callable[[dict[str, Any], dict[str, Any], int, dict[str, Any]], PreTrainedConfig]
    """Function `(text sizes, vision sizes, head size, common settings) -> config`."""
    patch_size: int = 14
    """Side of a patch in pixels; two by two patches form a token."""
    processor: Callable[[PreTrainedTokenizerBase, int, dict[str, int]], ProcessorMixin] | None = None
    """Function `(tokenizer, pixels per token, patch sizes) -> processor`; the processor must accept media as small as one token.
    None for a text-only model, whose folder contains only a tokenizer."""
    others: tuple[str, ...] = ()
    """Names of tensors of other models that the tiny model's files also contain, to resemble the published files."""
    draw: Callable[[str, torch.Size, torch.Generator], Tensor | None] | None = None
    """Function `(name, shape, generator) -> values` for tensors that need special values; it returns None for all others."""


@dataclass(frozen=True)
class Family:
    """Model family, described by the properties in which families differ. Example: `FAMILIES["qwen3_vl"]`."""

    name: str
    """Name of the family for messages."""
    model_type: str
    """Value of `model_type` in `config.json`."""
    tokens: Tokens
    modules: Modules
    tiny: Tiny
    vision: Vision | None = None
    """Defaults for media; None for a text-only model."""
    grids: GridRule = return_no_grids
    """Picklable function that returns the grids of tokens from which mRoPE positions are computed."""
    tower_layout: TowerLayout = return_grids
    """Function that returns all arguments of the vision tower's forward except the pixels. The arguments should include all
    values that the tower would otherwise compute from the grids on the GPU, because the host would wait for them."""
    has_plain_layers: bool = True
    """Whether text layers use RMSNorm and rotary positions as Llama does; if False, their fused kernels are not used."""
    host_arguments: tuple[str, ...] = ()
    """Names of tensors in `tower_layout` that stay on the host, because the vision tower reads their values there."""
    tower_shape: Callable[[Any], TowerShape] = read_tower_shape
    """Function that reads the shape of the vision tower from `vision_config`."""
    has_text_positions: bool = True
    """Whether the model accepts a row of text positions besides those of mRoPE. Without it, transformers' own attention takes
    every media token for the start of a new sample in packed rows and, with flash attention, in all rows."""
    vision_windows: Callable[[Any], tuple[int, int]] | None = None
    """Function `vision_config -> (number of blocks with windowed attention, side of a window in merged patches)`; None if all
    blocks use full attention."""
    renames: tuple[tuple[str, str], ...] = ()
    """Pairs (regular expression, replacement): names in published checkpoints → names in memory; the first match applies."""
    published: tuple[tuple[str, str], ...] = ()
    """Pairs (regular expression, replacement): names in memory → names in published checkpoints; the first match applies."""
    keeps_published_names: bool = False
    """Whether exports and vLLM need the published names; if False, both use the in-memory names."""
    vllm_class: str | None = None
    """Name of vLLM's class for the family, in case config.json names only the transformers class, which vLLM would run with its
    generic backend. None keeps the class in config.json."""
    vllm_partitions: Mapping[str, int] = field(default_factory=dict)
    """Names of layers that fill several partitions of one of vLLM's fused layers, and the number of partitions."""
    weight_folders: tuple[str, ...] = ()
    """Subfolders of a published checkpoint that contain the weights if there are no weights next to config.json."""
    others: tuple[str, ...] = ()
    """Regular expressions for the published names of tensors that belong to another model in the same files."""
    transposes_experts: bool = False
    """Whether published files, exports and vLLM have the last two axes of the experts' parameters swapped."""
    fixed_settings: tuple[tuple[str, Any], ...] = ()
    """Settings of the language model that transformers does not read, because it supports only these values, but vLLM does."""

    def rename(self, name: str) -> str | None:
        """Convert the name of a tensor in a checkpoint to its in-memory name; None if the tensor belongs to another model."""
        return None if any(re.search(pattern, name) for pattern in self.others) else apply_renames(name, self.renames)

    def is_transposed(self, name: str) -> bool:
        """Return whether files and vLLM have the last two axes of a parameter, given by its in-memory name, swapped."""
        return self.transposes_experts and self.modules.is_expert(name)

    def swap_axes(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a tensor, given by its in-memory name, between the layout in memory and the layout in files and vLLM."""
        return tensor.mT if self.is_transposed(name) else tensor

    def to_published_name(self, name: str) -> str:
        """Convert a tensor's in-memory name to the name that published checkpoints use."""
        return apply_renames(name, self.published)

    def to_exported_name(self, name: str) -> str:
        """Convert a tensor's in-memory name to the name that exports and vLLM use."""
        return self.to_published_name(name) if self.keeps_published_names else name


def apply_renames(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    """Rename a tensor with the first rule that matches its name; if no rule matches, return the name unchanged."""
    for pattern, replacement in rules:
        new_name, count = re.subn(pattern, replacement, name)
        if count:
            return new_name
    return name
