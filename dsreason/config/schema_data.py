"""The section `data`: the rows to read, and how their media are sampled and resized."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dsreason.config.section import Section, refuse_flag

Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=0)]


class VisionConfig(Section):
    """Sampling and resizing of media. The same keys of a media item in a sample take precedence."""

    fps: float | None = Field(None, gt=0)
    """Frames per second to sample from a video. If neither this nor nframes is set: 2."""
    nframes: int | None = Field(None, ge=1)
    """Number of frames to sample, instead of `fps`; rounded to a multiple of 2, because the models merge pairs of frames."""
    min_frames: int | None = Field(None, ge=1)
    """Minimum number of frames (with `fps`). Unset: 4, or `max_frames` if that is less."""
    max_frames: int | None = Field(None, ge=1)
    """Maximum number of frames (with `fps`). Unset: 768, or `min_frames` if that is more."""
    min_pixels: int | None = Field(None, ge=1)
    """Minimum size of an image or frame, in pixels. Unset: 4 tokens of an image, 128 of a frame."""
    max_pixels: int | None = Field(None, ge=1)
    """Maximum size of an image or frame, in pixels. Unset: 16384 tokens of an image, 768 of a frame."""
    total_pixels: int | None = Field(None, ge=1)
    """Maximum number of pixels in all frames of one video, as far as min_pixels allows; two frames that the model merges count
    once. Unset: 115200 tokens."""
    video_start: float | None = Field(None, ge=0)
    """Start of the part of a video to use, in seconds."""
    video_end: float | None = Field(None, gt=0)
    """End of the part of a video to use, in seconds."""

    @model_validator(mode="after")
    def check_together(self) -> Self:
        self.check_exclusive("fps", "nframes")
        self.check_order("min_frames", "max_frames")
        self.check_order("min_pixels", "max_pixels")
        self.check_order("video_start", "video_end")
        return self


class SourceConfig(Section):
    """One data set."""

    adapter: str = "jsonl"
    """Name of a shipped adapter, `package.module:attr`, or a path to a Python file."""
    path: str = ""
    """File, folder, hub name or `s3://…` that the adapter reads."""
    media_path: str = ""
    """Folder that relative media paths are joined to; empty: the folder of the annotation file."""
    allow_absolute_paths: bool | None = None
    """Allow rows to name media outside that folder by absolute paths. Unset: allowed, except with a `media_path` or in data
    sets of the hub, which others have written."""
    subset: str | None = None
    """Hub configuration, or Cosmos-Reason1 subset (robovqa, av, …)."""
    revision: str | None = None
    """Hub revision."""
    split: str | tuple[str, ...] = "train"
    """One split, or several to concatenate; row ranges are written `train[:100]`."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of rows; the first ones are used."""
    columns: dict[str, str] = {}
    """Names that the rows use for fields of the adapter: `{question = "problem", answer = "solution"}`."""
    system_prompt: str = ""
    """System message for samples that have none."""
    question: str = "Describe what you see in this video."
    """Question for data sets that have only labels (adapter `local_labels`)."""
    video_pattern: str | None = None
    """File name of the videos that belong to the labels (adapter `local_labels`), such as `*.camera_front_wide_120fov.mp4`:
    `*` is the id of the label, and may be omitted before a dot. Unset: the only video named after the id, with or without a
    camera."""
    vision: VisionConfig = VisionConfig()

    @field_validator("video_pattern")
    @classmethod
    def check_one_star(cls, pattern: str | None) -> str | None:
        if pattern is not None and pattern.startswith(".") and "*" not in pattern:
            return f"*{pattern}"
        if pattern is not None and pattern.count("*") != 1:
            raise ValueError(f"{pattern!r} must have one *, for the id, such as *.camera_front_wide_120fov.mp4")
        return pattern


class WeightedSourceConfig(SourceConfig):
    weight: float = Field(1.0, gt=0)
    """Number of times that an epoch contains each row: 1 once, 2 twice, 0.5 a (seeded) half of the rows."""


class DataConfig(SourceConfig):
    adapter: str = "builtin"
    """Name of a shipped adapter, `package.module:attr`, or a path to a Python file."""
    sources: tuple[WeightedSourceConfig, ...] = ()
    """Several data sets, used instead of the keys of one data set in this section."""
    validation: Share | Count | SourceConfig = 0
    """Share (0 to 1) or number of rows held out of training, or a separate data set."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Action for a row that cannot be used: stop and name it, or skip it, count it and list it."""
    workers: int = Field(2, ge=0, le=1024)
    """Processes per rank that decode media; 0 decodes in the training process."""
    prefetch: int = Field(4, ge=1, le=10_000)
    """Number of steps to decode ahead."""
    shuffle: bool = True
    """Use a new order in every epoch, derived from `train.seed`."""
    video_decoder: Literal["pyav", "torchcodec"] = "pyav"
    """Library that decodes the videos of training and held-out rows; `dsreason eval`, `infer` and `world` use pyav. torchcodec
    is a separate package that needs the FFmpeg libraries, and is not restricted to the formats listed in docs/security.md."""
    balance: str | None = None
    """Field whose values are sampled equally often: `answer`, or a field of the rows that adapters keep in `sample.meta`
    (`label.weather` is nested). Unset: no balancing. Held-out rows are never balanced."""

    check_validation = field_validator("validation", mode="before")(refuse_flag)

    @field_validator("balance", mode="before")
    @classmethod
    def check_named(cls, balance: object) -> object:
        if isinstance(balance, bool) or (isinstance(balance, str) and not balance.strip()):
            raise ValueError(f"{balance!r} does not say what to balance; name answer, or a field of the rows")
        return balance

    @model_validator(mode="after")
    def check_sources(self) -> DataConfig:
        owned = set(SourceConfig.model_fields) & self.model_fields_set
        if self.sources and owned:
            raise ValueError(f"{', '.join(sorted(owned))} belong inside [[data.sources]] when that is used")
        return self

    def list_sources(self) -> tuple[WeightedSourceConfig, ...]:
        """Return the training sources: `sources`, or the section itself as the only one."""
        if self.sources:
            return self.sources
        return (WeightedSourceConfig(**{k: getattr(self, k) for k in SourceConfig.model_fields}),)
