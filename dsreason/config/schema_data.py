"""The schema of the `data` section: the rows to read, and the sampling and resizing of their media."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dsreason.config.section import Section, choose_pronoun, refuse_flag

Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=0)]


class VisionConfig(Section):
    """Sampling and resizing of media. If a media item of a sample sets the same key, that value takes precedence."""

    fps: float | None = Field(None, gt=0)
    """Frames per second to sample from a video. The default is 2 if `nframes` is not set, either; a video given as frames is then
    shown whole."""
    nframes: int | None = Field(None, ge=1)
    """Number of frames to sample, instead of `fps`. It is rounded to a multiple of 2, because the models merge pairs of
    frames."""
    min_frames: int | None = Field(None, ge=1)
    """Minimum number of frames (with `fps`). Unset: 4, or `max_frames` if that is lower."""
    max_frames: int | None = Field(None, ge=1)
    """Maximum number of frames (with `fps`). Unset: 768, or `min_frames` if that is higher."""
    min_pixels: int | None = Field(None, ge=1)
    """Minimum number of pixels of an image or frame. Unset: the equivalent of 4 tokens for an image, and 128 for a frame."""
    max_pixels: int | None = Field(None, ge=1)
    """Maximum number of pixels of an image or frame. Unset: the equivalent of 16384 tokens for an image, and 768 for a
    frame."""
    total_pixels: int | None = Field(None, ge=1)
    """Maximum total number of pixels in the frames of one video, as far as min_pixels allows; two frames that the model
    merges count once. Unset: the equivalent of 115200 tokens."""
    video_start: float | None = Field(None, ge=0)
    """Start of the part of a video to use, in seconds. Unset: the beginning."""
    video_end: float | None = Field(None, gt=0)
    """End of the part of a video to use, in seconds. Unset: the end of the video."""

    @model_validator(mode="after")
    def check_together(self) -> Self:
        self.check_exclusive("fps", "nframes")
        self.check_order("min_frames", "max_frames")
        self.check_order("min_pixels", "max_pixels")
        self.check_order("video_start", "video_end")
        return self

    def override(self, defaults: VisionConfig) -> dict[str, Any]:
        """Return the keys that are set here or in `defaults`. `fps` or `nframes` set here replaces both of `defaults`."""
        own, base = (vision.model_dump(exclude_none=True) for vision in (self, defaults))
        if {"fps", "nframes"} & own.keys():
            base = {key: value for key, value in base.items() if key not in ("fps", "nframes")}
        return base | own

    def fill(self, defaults: VisionConfig) -> VisionConfig:
        """Return these settings with unset keys from `defaults`, except for bounds that contradict one that is set here."""
        settings = self.override(defaults)
        for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels"), ("video_start", "video_end")):
            if settings.keys() >= {low, high} and settings[low] > settings[high]:
                del settings[low if getattr(self, low) is None else high]
        return VisionConfig.model_validate(settings)


class SourceConfig(Section):
    """The settings of one data set."""

    adapter: str = "auto"
    """Name of a shipped adapter, `package.module:attr`, or a path to a Python file. `auto` finds the format of the rows by their
    columns; without `path`, it reads the built-in task."""
    path: str = ""
    """File, folder, hub name or `s3://…` that the adapter reads."""
    name: str | None = None
    """Name of the data set, which becomes the field `data_source` of its rows, unless they have one: for metrics by data set and
    for `reward.only`."""
    media_path: str = ""
    """Folder that relative media paths refer to. Empty: the folder of the annotation file."""
    allow_absolute_paths: bool | None = None
    """Allow absolute paths to media outside that folder. Unset: allowed, unless `media_path` is set or the data set comes
    from the hub, where others may have written it. The same applies to `s3://`, `http://` and `https://` URLs of media."""
    allow_private_urls: bool = False
    """Allow URLs of media on hosts without a public address, such as `http://10.0.0.1/a.png`, also after a redirect. Set it only
    if you trust the author of the rows: the URLs make your machine request services of your network."""
    subset: str | None = None
    """Hub configuration, or Cosmos-Reason1 subset (robovqa, av, …)."""
    revision: str | None = None
    """Hub revision."""
    split: str | tuple[str, ...] = "train"
    """One split, or several splits to concatenate. A range of rows is written as in `train[:100]`."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of rows, taken from the start. Unset: all rows."""
    columns: dict[str, str] = {}
    """Mapping from the adapter's field names to the column names in the data: `{question = "problem", answer = "solution"}`."""
    system_prompt: str = ""
    """System message for samples that have none. Empty: none is added."""
    question: str = "Describe what you see in this video."
    """Question to ask if a data set has only labels (adapter `local_labels`)."""
    video_pattern: str | None = None
    """Pattern of the file names of the videos that belong to the labels (adapter `local_labels`), such as
    `*.camera_front_wide_120fov.mp4`; `*` stands for the id of the label, and may be omitted before a dot. Unset: the only
    video named after the id, with or without the name of a camera."""
    vision: VisionConfig = VisionConfig()

    @field_validator("video_pattern")
    @classmethod
    def check_one_star(cls, pattern: str | None) -> str | None:
        if pattern is not None and pattern.startswith(".") and "*" not in pattern:
            return f"*{pattern}"
        if pattern is not None and pattern.count("*") != 1:
            raise ValueError(
                f"must contain exactly one * (for the id), such as *.camera_front_wide_120fov.mp4; got {pattern!r}"
            )
        return pattern


class WeightedSourceConfig(SourceConfig):
    weight: float = Field(1.0, gt=0)
    """Number of times that an epoch contains each row: 1 is once, 2 is twice, and 0.5 is half of the rows (chosen by the
    seed)."""


class DataConfig(SourceConfig):
    sources: tuple[WeightedSourceConfig, ...] = ()
    """Data sets to combine; if set, it replaces this section's keys for a single data set."""
    validation: Share | Count | SourceConfig = 0
    """Share (0 to 1) or number of rows to hold out from training, or a separate data set."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Action for an unusable row: stop with an error that names it, or skip, count and list it."""
    workers: int = Field(2, ge=0, le=1024)
    """Number of processes per rank that decode media. 0: the training process decodes them."""
    prefetch: int = Field(4, ge=1, le=10_000)
    """Number of steps whose media are decoded in advance."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, with a seed derived from `train.seed`."""
    video_decoder: Literal["pyav", "torchcodec"] = "pyav"
    """Library that decodes the videos of training and held-out rows; `dsreason eval`, `infer` and `world` always use pyav.
    torchcodec is a separate package that needs the FFmpeg libraries; it is not restricted to the formats listed in
    docs/security.md."""
    balance: str | None = None
    """Field whose values are sampled equally often: `answer`, or a field of the rows that the adapter stores in `sample.meta`
    (`label.weather` for a nested field). Unset: no balancing. Held-out rows are never balanced."""

    check_validation = field_validator("validation", mode="before")(refuse_flag)

    @field_validator("balance", mode="before")
    @classmethod
    def check_named(cls, balance: object) -> object:
        if isinstance(balance, bool) or (isinstance(balance, str) and not balance.strip()):
            raise ValueError(f'must be "answer" or the name of a field of the rows; got {balance!r}')
        return balance

    @model_validator(mode="after")
    def check_sources(self) -> DataConfig:
        owned = set(SourceConfig.model_fields) & self.model_fields_set
        if self.sources and owned:
            raise ValueError(
                f"{', '.join(sorted(owned))} cannot be set together with sources; move {choose_pronoun(owned)} into "
                "[[data.sources]]"
            )
        return self

    def list_sources(self) -> tuple[WeightedSourceConfig, ...]:
        """Return the training sources: `sources`, or the section itself as the only source."""
        if self.sources:
            return self.sources
        return (WeightedSourceConfig(**{k: getattr(self, k) for k in SourceConfig.model_fields}),)
