"""Schema of the section `[data]`, which selects the rows and determines how their media are sampled and resized."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from dsreason.config.section import Section, choose_pronoun, refuse_flag

Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=0)]
PASSED_BY_US = (
    *("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize", "return_assistant_tokens_mask", "return_tensors", "return_dict", "processor_kwargs"),
)
"""Names that a chat template, or transformers' function that renders it, gets from dsreason."""


def check_argument_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments unchanged; raise ValueError if dsreason itself passes one of these names to the chat template."""
    if names := [name for name in arguments if name in PASSED_BY_US]:
        raise ValueError(f"{names[0]} is passed to the chat template by dsreason; remove it")
    return arguments


TemplateArguments = Annotated[
    dict[str, StrictBool | StrictInt | StrictFloat | StrictStr], AfterValidator(check_argument_names)
]


class VisionConfig(Section):
    """Settings for sampling and resizing media. If a sample's media part sets the same key, its value takes precedence."""

    fps: float | None = Field(None, gt=0)
    """Frames per second to sample from a video. If neither this nor `nframes` is set, the default is 2, and all frames of a video
    that consists of image files are used."""
    nframes: int | None = Field(None, ge=1)
    """Number of frames to sample, as an alternative to `fps`. The number is rounded to a multiple of 2, because the models merge
    pairs of frames."""
    min_frames: int | None = Field(None, ge=1)
    """Minimum number of frames if `fps` is used. Unset: 4, or `max_frames` if that is lower."""
    max_frames: int | None = Field(None, ge=1)
    """Maximum number of frames if `fps` is used. Unset: 768, or `min_frames` if that is higher."""
    min_pixels: int | None = Field(None, ge=1)
    """Minimum number of pixels of an image or frame. Unset: the equivalent of 4 tokens for an image, and 128 for a frame."""
    max_pixels: int | None = Field(None, ge=1)
    """Maximum number of pixels of an image or frame. Unset: the equivalent of 16384 tokens for an image, and 768 for a
    frame."""
    total_pixels: int | None = Field(None, ge=1)
    """Maximum total number of pixels in the frames of one video, unless min_pixels requires more; two frames that the model
    merges count as one. Unset: the equivalent of 115200 tokens."""
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
        """Merge the keys that are set with `defaults`; if either `fps` or `nframes` is set, it replaces both defaults."""
        own, base = (vision.model_dump(exclude_none=True) for vision in (self, defaults))
        if {"fps", "nframes"} & own.keys():
            base = {key: value for key, value in base.items() if key not in ("fps", "nframes")}
        return base | own

    def fill(self, defaults: VisionConfig) -> VisionConfig:
        """Return a copy whose unset keys are filled from `defaults`, except for bounds that contradict an explicit bound."""
        settings = self.override(defaults)
        for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels"), ("video_start", "video_end")):
            if settings.keys() >= {low, high} and settings[low] > settings[high]:
                del settings[low if getattr(self, low) is None else high]
        return VisionConfig.model_validate(settings)


class SourceConfig(Section):
    """Settings of one data set."""

    adapter: str = "auto"
    """Name of a shipped adapter, `package.module:attr`, or the path of a Python file. `auto` determines the format of the rows
    from their columns; if `path` is empty, it reads the built-in task."""
    path: str = ""
    """Data that the adapter reads: a file, a folder, the name of a data set on the Hub, or `s3://…`."""
    name: str | None = None
    """Name of the data set. It is stored in the field `data_source` of rows that do not have one; `reward.only` and the metrics
    per data set use this field."""
    media_path: str = ""
    """Folder to which relative media paths refer. Empty: the folder of the annotation file."""
    allow_absolute_paths: bool | None = None
    """Allow media at absolute paths outside the media folder, and at `s3://`, `http://` and `https://` URLs. Unset: such media
    are allowed unless `media_path` is set or the data set comes from the Hub, where somebody else may have written it."""
    allow_private_urls: bool = False
    """Allow media URLs on hosts without a public address, such as `http://10.0.0.1/a.png`, and redirects to such hosts. Set this
    to true only if you trust the author of the rows, because the URLs make your machine send requests to services in your
    network."""
    subset: str | None = None
    """Configuration of a data set on the Hub, or a Cosmos-Reason1 subset (robovqa, av, …)."""
    revision: str | None = None
    """Revision of a data set on the Hub: a branch, tag or commit. Unset: the default branch."""
    split: str | tuple[str, ...] = "train"
    """Name of a split, or several splits to concatenate. A range selects rows of a split, as in `train[:100]`."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of rows to use, counted from the first row. Unset: all rows."""
    columns: dict[str, str] = {}
    """Field that the adapter reads → column of the data: `{question = "problem", answer = "solution"}`."""
    system_prompt: str = ""
    """System message for samples that have none. Empty: no system message is added."""
    question: str = "Describe what you see in this video."
    """Question for rows of a data set that has only labels (adapter `local_labels`)."""
    video_pattern: str | None = None
    """Pattern of the names of the video files that belong to labels (adapter `local_labels`), such as
    `*.camera_front_wide_120fov.mp4`. `*` stands for the label's id, and may be omitted before a dot. Unset: each label must have
    exactly one video named after its id, with or without the name of a camera."""
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
    """Number of times that each row appears in an epoch. With 0.5, half of the rows appear, chosen at random with the seed."""


class DataConfig(SourceConfig):
    sources: tuple[WeightedSourceConfig, ...] = ()
    """Data sets to combine, as an alternative to this section's keys for a single data set."""
    validation: Share | Count | SourceConfig = 0
    """Rows to hold out from training, as a fraction (0 to 1) or a number, or a separate data set for validation."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with an unusable row: stop with an error that names the row, or skip and list it."""
    workers: int = Field(2, ge=0, le=1024)
    """Number of processes per rank that decode media. 0: the training process decodes the media itself."""
    prefetch: int = Field(4, ge=1, le=10_000)
    """Number of steps whose media are decoded in advance."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, with a seed derived from `train.seed`."""
    video_decoder: Literal["pyav", "torchcodec"] = "pyav"
    """Library that decodes the videos of training and held-out rows; `dsreason eval`, `infer` and `world` always use pyav.
    torchcodec is a separate package, which needs the FFmpeg libraries and is not restricted to the formats that docs/security.md
    lists."""
    balance: str | None = None
    """Field whose values should be equally frequent in training: `answer`, or a field of the rows that the adapter stores in
    `sample.meta` (`label.weather` for a nested field). Unset: rows are not balanced. Held-out rows are never balanced."""

    template_arguments: TemplateArguments = {}
    """Arguments for the chat template, such as `{enable_thinking = false}`, wherever a conversation is rendered: in training,
    rollouts and validation. Exports record them, so `dsreason eval` and `infer` use the same arguments. Unset: the template's own
    defaults."""

    check_validation = field_validator("validation", mode="before")(refuse_flag)

    @field_validator("balance", mode="before")
    @classmethod
    def check_named(cls, balance: object) -> object:
        if isinstance(balance, bool) or (isinstance(balance, str) and not balance.strip()):
            raise ValueError(f'must be "answer" or the name of a field in the rows; got {balance!r}')
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
