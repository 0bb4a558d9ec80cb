"""The facts about a model family: its tokens, how it sees, the names of its parameters, and its tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin


class Grid(NamedTuple):
    """One run of placeholder tokens: its size in tokens, and how far apart two steps in time are (mRoPE units)."""

    frames: int
    height: int
    width: int
    time_step: float = 1.0


Grids = tuple[Iterable[Grid], Iterable[Grid]]
"""The runs of image and of video placeholders, each in the order in which they appear."""

GridRule = Callable[[dict[str, Any], Any], Grids]
"""`(mm_kwargs, config) -> Grids`, of the media of one sample or more."""


def merged_grids(grid_thw: Any, merge_size: int) -> list[Grid]:
    """A processor's `[media, 3]` grid of patches (frames, height, width) as grids of tokens; none for None."""
    if grid_thw is None:
        return []
    return [Grid(t, h // merge_size, w // merge_size) for t, h, w in grid_thw.tolist()]


def no_grids(mm_kwargs: dict[str, Any], config: Any) -> Grids:
    """Of a model that reads text alone."""
    return (), ()


TowerLayout = Callable[[Any, "Tensor"], dict[str, Any]]
"""`(vision_config, grids [media, 3]) -> keyword arguments` of a vision tower's forward, computed on the host."""


def grids_only(vision: Any, grids: Tensor) -> dict[str, Any]:
    """Let the tower compute everything else itself."""
    return {"grid_thw": grids}


@dataclass(frozen=True)
class Tokens:
    """The texts that the tokenizer knows as marks. Example: `FAMILIES["qwen3_vl"].tokens`."""

    image: str
    """Placeholder of an image."""
    video: str
    """Placeholder of a video."""
    media_start: str
    """Stands before a medium's placeholders."""
    media_end: str
    turn_start: str
    turn_end: str
    padding: str
    unused_media: tuple[str, ...] = ()
    """Further placeholders that no processor makes."""
    others: tuple[str, ...] = ()
    """Marks that a text may hold."""

    @property
    def media(self) -> tuple[str, ...]:
        """Never sampled: a placeholder in a completion has no pixels behind it, and the policy's forward would fail on it."""
        return (self.image, self.video, *self.unused_media, self.media_start, self.media_end)

    @property
    def control(self) -> tuple[str, ...]:
        """In a text they would be read as media or as the end of a turn."""
        return (*self.media, self.turn_start, self.turn_end, self.padding)


@dataclass(frozen=True)
class TrainedSizes:
    """Sizes of media in merged patches (tokens) that a model was trained with, and that its published processor does not
    state: its limits are far wider."""

    image: tuple[int, int]
    """Smallest and largest image."""
    frame: tuple[int, int]
    """Smallest and largest video frame."""
    video: int
    """Largest video; the frames of one temporal patch count once."""


@dataclass(frozen=True)
class Vision:
    """How much the model was trained to see of a medium, where neither its row, the configuration nor the processor says."""

    bounds_are_per_video: bool
    """What the `size` of the video processor bounds: the pixels of all sampled frames together, or else those of one."""
    fps: float
    """Frames taken per second of a video."""
    min_frames: int
    max_frames: int
    max_frame_tokens: int
    """Largest size of one video frame in merged patches, where the processor bounds all frames together."""
    max_video_tokens: int
    """Largest size of a video in merged patches, where the processor bounds one frame."""
    trained_sizes: TrainedSizes | None = None
    """Hold instead of the processor's limits, unless those allow less than the largest of these. None: the processor's."""


@dataclass(frozen=True)
class Modules:
    """Names of modules, or parts of them, in the transformers model."""

    vision_tower: str | None
    """None if the model reads text alone."""
    head: str
    """The output layer, which may be tied to the embedding."""
    norms: tuple[str, ...]
    """Parts of the names of weights that scale channels."""
    embeddings: tuple[str, ...]
    """Parts of the names of embedding weights, of tokens and positions."""
    text_layers: str
    """Regular expression, searched in names: the language model's linear layers, which get an adapter by default."""
    vision_layers: str = ""
    """The same of the vision tower and its mergers."""
    patch_embedding: str = ""
    """In the vision tower: its input needs no gradient."""
    merger: str = ""
    """In the vision tower: what works on merged patches."""
    blocks: tuple[str, ...] = ()
    """Class names of the decoder layer and of the vision tower's block and merger: ZeRO-3 gathers each as a whole."""


@dataclass(frozen=True)
class Tiny:
    """How a random model of the family is made that is small enough for a laptop; see `dsreason.models.tiny`."""

    default_system: str | None
    """What the chat template says where a conversation has no system message."""
    config: Callable[[dict[str, Any], dict[str, Any], int, dict[str, Any]], PreTrainedConfig]
    """`(text sizes, vision sizes, head size, the rest) -> config`."""
    patch_size: int = 14
    """In pixels; two by two patches make a token."""
    processor: Callable[[PreTrainedTokenizerBase, int, dict[str, int]], ProcessorMixin] | None = None
    """`(tokenizer, pixels behind one token, patch sizes) -> processor`, which takes media down to one token. None: the
    model reads text alone, and its folder has a tokenizer only."""
    others: tuple[str, ...] = ()
    """Tensors of other models that its files hold too, as published ones do."""


@dataclass(frozen=True)
class Family:
    """Example: `FAMILIES["qwen3_vl"]`."""

    name: str
    """As people call it."""
    model_type: str
    """As `config.json` calls it."""
    tokens: Tokens
    modules: Modules
    tiny: Tiny
    vision: Vision | None = None
    """None: the model reads text alone."""
    grids: GridRule = no_grids
    """The grids of tokens that the positions count over; a plain function, to be pickled."""
    tower_layout: TowerLayout = grids_only
    """What the vision tower's forward takes beside pixels; best all that it would otherwise compute from the grids, and so
    wait for the GPU."""
    vision_windows: Callable[[Any], tuple[int, int]] | None = None
    """`vision_config -> (blocks that attend within windows, a window's side in merged patches)`; None: all see all."""
    renames: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement): names in published checkpoints → names in memory; the first that matches counts."""
    published: tuple[tuple[str, str], ...] = ()
    """The same backwards."""
    keeps_published_names: bool = False
    """Whether exports and vLLM need the published names; else both take those in memory."""
    vllm_class: str | None = None
    """vLLM's class, where config.json may name transformers' alone, of which vLLM would take a generic form."""
    weight_folders: tuple[str, ...] = ()
    """Folders inside of a published checkpoint that hold its weights, if there are none beside config.json."""
    others: tuple[str, ...] = ()
    """Regular expressions, searched in the names of published checkpoints: what belongs to another model in the same files."""

    def rename(self, name: str) -> str | None:
        """The name in memory of a tensor in a checkpoint; None if it is another model's."""
        return None if any(re.search(pattern, name) for pattern in self.others) else renamed(name, self.renames)

    def published_name(self, name: str) -> str:
        """The name in published checkpoints of a tensor in memory."""
        return renamed(name, self.published)

    def exported_name(self, name: str) -> str:
        """The name of a tensor in memory that exports and vLLM have for it."""
        return self.published_name(name) if self.keeps_published_names else name


def renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name
