"""Schema for the settings for checkpoints, exports and uploads."""

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
    """Resolved upload target, such as `UploadTarget(HubAddress("user/name"), what="final", include=("export",))`."""

    address: UploadAddress
    what: UploadWhat
    include: tuple[UploadKind, ...]


class UploadConfig(Section):
    """Upload target with its own selection of folders."""

    to: Address
    """Location to upload to: `s3://bucket/prefix` or `hub:user/name[@branch]`."""
    what: UploadWhat | None = None
    """Value that replaces `checkpoint.upload_what` for this target. Unset: `checkpoint.upload_what` applies."""
    include: UploadKinds | None = None
    """Value that replaces `checkpoint.upload_include` for this target. Unset: `checkpoint.upload_include` applies."""


class CheckpointConfig(Section):
    every: int = Field(500, ge=0)
    """Number of steps between checkpoints. 0: no checkpoints before the last step."""
    last: bool = True
    """Also write a checkpoint after the last step. If `last` and `keep_best` are false and `every` is 0, no checkpoint is ever
    written, even on a stop signal, and the run cannot be resumed. `export` does not depend on this key."""
    background: bool = True
    """Write checkpoints from a copy in host memory while training continues. If false, training waits until they are written."""
    keep: int = Field(2, ge=-1)
    """Number of most recent checkpoints to keep; -1 keeps all."""
    keep_best: bool = True
    """Also keep the best checkpoint according to `best_metric`."""
    best_metric: Literal["val/accuracy", "val/loss", "val/reward/mean", "val/preference_accuracy"] = "val/loss"
    """Metric that selects the best checkpoint; the reward is available only in grpo, and the preference accuracy only in dpo."""
    export: Literal["all", "final", "none"] = "final"
    """When to export the model as a Hugging Face folder: with every checkpoint, only after the last step, or never."""
    export_keep: int = Field(-1, ge=-1)
    """Number of most recent exports `export/step_N` to keep if `export = "all"`; -1 keeps all. `export/final` is always kept and,
    with `keep_best`, so is the export of the best step."""
    export_dtype: Literal["bf16", "fp32", "auto"] = "auto"
    """Data type of the exported weights; `auto` uses the type in `train.precision`."""
    max_shard_size: str = Field("4GB", pattern=r"^\d*[1-9]\d*(\.\d+)?\s*[KMG]B$")
    """Maximum size of one safetensors file."""
    upload: AddressOrNone | tuple[Address | UploadConfig, ...] = ""
    """Upload targets: `s3://bucket/prefix` or `hub:user/name[@branch]`, a list of such targets, or a table for each target
    (`[checkpoint.upload]` for a single target). Training continues during uploads. Empty: nothing is uploaded."""
    upload_what: UploadWhat = "final"
    """Folders to upload: only those for the last step, or every checkpoint and export."""
    upload_include: UploadKinds | None = None
    """Kinds of folders to upload. Checkpoints are about seven times as large as exports; logs are the configuration, the
    metrics and the log files of the ranks. Unset: exports, and also checkpoints if the target is on S3."""

    @field_validator("upload", mode="before")
    @classmethod
    def wrap_single_table(cls, upload: object) -> object:
        return (upload,) if isinstance(upload, dict | UploadConfig) else upload

    @field_validator("keep", "export_keep")
    @classmethod
    def check_keep(cls, keep: int) -> int:
        if keep == 0:
            raise ValueError("0 would delete each folder as soon as it is written; set 1 or more, or -1 to keep all")
        return keep

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.every > 0 or self.last or self.keep_best

    @property
    def targets(self) -> tuple[UploadTarget, ...]:
        """Upload targets with their selection of folders."""
        listed = (self.upload,) if isinstance(self.upload, str) and self.upload else tuple(self.upload)
        uploads = [UploadConfig(to=target) if isinstance(target, str) else target for target in listed]
        return tuple(self._build_target(parse_target(upload.to), upload) for upload in uploads)

    def _build_target(self, address: UploadAddress, upload: UploadConfig) -> UploadTarget:
        default: tuple[UploadKind, ...] = ("export",) if isinstance(address, HubAddress) else ("export", "checkpoint")
        return UploadTarget(address, upload.what or self.upload_what, upload.include or self.upload_include or default)

    @model_validator(mode="after")
    def check_targets(self) -> Self:
        addresses = [str(target.address.on_branch) for target in self.targets]
        if repeated := sorted({address for address in addresses if addresses.count(address) > 1}):
            raise ValueError(f"upload lists {repeated[0]} more than once; keep one entry")
        for target in self.targets:
            exports = "export" in target.include and self.export != "none"
            checkpoints = "checkpoint" in target.include and (self.last or (target.what == "all" and self.saves))
            if not (exports or checkpoints or "logs" in target.include):
                raise ValueError(
                    f"upload_include ({', '.join(target.include)}) with export = {self.export}, last = {str(self.last).lower()} "
                    f"and upload_what = {target.what} selects nothing to upload to {target.address}; change one of them"
                )
        return self
