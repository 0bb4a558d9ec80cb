"""The schema of checkpoints, exports and uploads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from dsreason.config.section import Section
from dsreason.files.address import HubAddress, UploadAddress, parse_target

UploadWhat = Literal["final", "all"]
UploadKind = Literal["export", "checkpoint", "logs"]
UploadKinds = Annotated[tuple[UploadKind, ...], Field(min_length=1)]
Address = Annotated[str, AfterValidator(lambda target: str(parse_target(target)))]
AddressOrNone = Annotated[str, AfterValidator(lambda target: str(parse_target(target)) if target else "")]


@dataclass(frozen=True)
class UploadTarget:
    """Example: `UploadTarget(HubAddress("user/name"), what="final", include=("export",))`."""

    address: UploadAddress
    what: UploadWhat
    include: tuple[UploadKind, ...]


class UploadConfig(Section):
    """One of several targets, with what goes there."""

    to: Address
    """`s3://bucket/prefix` or `hub:user/name[@branch]`."""
    what: UploadWhat | None = None
    """As `checkpoint.upload_what`, for this target; unset: that."""
    include: UploadKinds | None = None
    """As `checkpoint.upload_include`, for this target; unset: that."""


class CheckpointConfig(Section):
    every: int = Field(500, ge=0)
    """Steps between checkpoints; 0: none on the way."""
    last: bool = True
    """Save the last step, too. Where this and `keep_best` are off and `every` is 0, no checkpoint is written at all, not even
    for a stop signal, and nothing can be resumed; `export` does not depend on it."""
    background: bool = True
    """Write a checkpoint from a copy in host memory while training goes on; off: training waits."""
    keep: int = Field(2, ge=-1)
    """How many of the newest to keep; -1 keeps all."""
    keep_best: bool = True
    """Also keep the best by `best_metric`."""
    best_metric: Literal["val/accuracy", "val/loss", "val/reward/mean", "val/preference_accuracy"] = "val/loss"
    """Metric that says which checkpoint is the best; the reward is measured by grpo only, the last one by dpo only."""
    export: Literal["all", "final", "none"] = "final"
    """Write a Hugging Face folder for every checkpoint, for the last step, or never."""
    export_keep: int = Field(-1, ge=-1)
    """With `export = "all"`: how many of the newest `export/step_N` to keep; -1 keeps all. `export/final` always stays, and
    with `keep_best` that of the best step."""
    export_dtype: Literal["bf16", "fp32", "auto"] = "auto"
    """Of the exported weights; auto: `train.precision`."""
    max_shard_size: str = Field("4GB", pattern=r"^\d*[1-9]\d*(\.\d+)?\s*[KMG]B$")
    """Of one safetensors file."""
    upload: AddressOrNone | tuple[Address | UploadConfig, ...] = ""
    """Where to upload to while training goes on: `s3://bucket/prefix` or `hub:user/name[@branch]`, a list of such targets, or
    a table for each, of which one may be `[checkpoint.upload]`. Empty: nowhere."""
    upload_what: UploadWhat = "final"
    """Upload what the last step leaves, or every checkpoint and export."""
    upload_include: UploadKinds | None = None
    """Which kinds of folder; checkpoints are about seven times as large as exports, and the logs are the configuration, the
    metrics and what the ranks logged. Unset: exports, and to S3 the checkpoints, too."""

    @field_validator("upload", mode="before")
    @classmethod
    def list_of_one(cls, upload: object) -> object:
        return (upload,) if isinstance(upload, dict | UploadConfig) else upload

    @field_validator("keep", "export_keep")
    @classmethod
    def check_keep(cls, keep: int) -> int:
        if keep == 0:
            raise ValueError("0 would delete each one as it is written; give 1 or more, or -1 for all")
        return keep

    @property
    def saves(self) -> bool:
        """Whether a run writes checkpoints."""
        return self.every > 0 or self.last or self.keep_best

    @property
    def targets(self) -> tuple[UploadTarget, ...]:
        """Where uploads go, and what goes there."""
        listed = (self.upload,) if isinstance(self.upload, str) and self.upload else tuple(self.upload)
        uploads = [UploadConfig(to=target) if isinstance(target, str) else target for target in listed]
        return tuple(self._target(parse_target(upload.to), upload) for upload in uploads)

    def _target(self, address: UploadAddress, given: UploadConfig) -> UploadTarget:
        usual: tuple[UploadKind, ...] = ("export",) if isinstance(address, HubAddress) else ("export", "checkpoint")
        return UploadTarget(address, given.what or self.upload_what, given.include or self.upload_include or usual)

    @model_validator(mode="after")
    def check_targets(self) -> Self:
        places = [str(target.address.on_branch) for target in self.targets]
        if twice := sorted({place for place in places if places.count(place) > 1}):
            raise ValueError(f"upload names {twice[0]} twice; remove one")
        for target in self.targets:
            exports = "export" in target.include and self.export != "none"
            checkpoints = "checkpoint" in target.include and (self.last or (target.what == "all" and self.saves))
            if not (exports or checkpoints or "logs" in target.include):
                raise ValueError(
                    f"upload_include ({', '.join(target.include)}) leaves nothing to upload with export = {self.export}, "
                    f"last = {str(self.last).lower()} and upload_what = {target.what} to {target.address}; change one of them"
                )
        return self
