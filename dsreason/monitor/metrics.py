"""Where a run's numbers go: metrics.jsonl, TensorBoard and, if asked, Weights & Biases, all under the same names."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import shlex
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsreason.config.schema import MonitorConfig
from dsreason.errors import CheckpointError, ConfigError, SaveError
from dsreason.files.atomic import write_file
from dsreason.files.disk import check_regular
from dsreason.imports import install_command

if TYPE_CHECKING:
    import wandb
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor

log = logging.getLogger(__name__)


class Metrics(AbstractContextManager["Metrics"]):
    """What the training loop sees on every rank; on those above 0 this class itself, which keeps nothing."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...
    def text(self, step: int, name: str, text: str) -> None: ...
    def images(self, step: int, name: str, images: Sequence[Image]) -> None: ...
    def video(self, step: int, name: str, gif: bytes) -> None: ...
    def histogram(self, step: int, name: str, values: Tensor | NDArray[Any]) -> None: ...
    def close(self) -> None: ...

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_metrics(
    output_dir: Path, *, rank: int, resume_step: int | None, config: MonitorConfig, run_config: dict[str, Any]
) -> Metrics:
    """The writer on rank 0, one that does nothing on the others. For the arguments see `MetricsWriter`."""
    if rank != 0:
        return Metrics()
    return MetricsWriter(output_dir, resume_step=resume_step, config=config, run_config=run_config)


class MetricsWriter(Metrics):
    """Writes `metrics.jsonl` and `tensorboard/` in `output_dir`; every call is on disk when it returns.

    `resume_step` is the step of the loaded checkpoint, None for a fresh start: what a broken-off run wrote after that
    step is dropped. `run_config` is shown in TensorBoard and W&B; it must hold no secrets.
    """

    def __init__(
        self, output_dir: Path, *, resume_step: int | None, config: MonitorConfig, run_config: dict[str, Any]
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only rank 0 writes curves

        output_dir.mkdir(parents=True, exist_ok=True)
        self.wandb = open_wandb(output_dir, config, run_config, resumed=resume_step is not None)
        self.lines = StepLines(output_dir / "metrics.jsonl", resume_step=resume_step)
        self.folder = output_dir / "tensorboard"
        first_step = 0 if resume_step is None else resume_step + 1
        with self._board_errors():
            self.board = SummaryWriter(str(self.folder), purge_step=first_step if self.folder.exists() else None)
            self.board.add_text("config", as_code(json.dumps(run_config, indent=2, default=str)), first_step)

    @contextmanager
    def _board_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # its thread tells of its errors at any later call
            reason = error.strerror or str(error)
            raise SaveError(
                f"{self.folder}: the curves cannot be written ({reason}); the folder must stay, and be writable, while the run "
                "goes on"
            ) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` for `step`; several calls for one step share a line. Steps must not go backwards."""
        self.lines.add(step, values)
        with self._board_errors():
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()
        if self.wandb is not None:
            self.wandb.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        with self._board_errors():
            self.board.add_text(name, as_code(text), step)
        if self.wandb is not None:
            import wandb

            self.wandb.log({"step": step, name: wandb.Table(columns=["step", "text"], data=[[step, text]])})

    def images(self, step: int, name: str, images: Sequence[Image]) -> None:
        import numpy as np

        with self._board_errors():
            for i, image in enumerate(images):
                self.board.add_image(f"{name}/{i}", np.asarray(image.convert("RGB")), step, dataformats="HWC")
        if self.wandb is not None:
            import wandb

            self.wandb.log({"step": step, name: [wandb.Image(image) for image in images]})

    def video(self, step: int, name: str, gif: bytes) -> None:
        """An animated GIF. TensorBoard's own `add_video` writes just that, by a package that is not needed for it."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = (int.from_bytes(gif[at : at + 2], "little") for at in (6, 8))
        picture = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
        with self._board_errors():
            self.board._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=name, image=picture)]), step)
            self.board.flush()
        if self.wandb is not None:
            import wandb

            self.wandb.log({"step": step, name: wandb.Video(io.BytesIO(gif), format="gif")})

    def histogram(self, step: int, name: str, values: Tensor | NDArray[Any]) -> None:
        with self._board_errors():
            self.board.add_histogram(name, values, step)
        if self.wandb is not None:
            import wandb

            shown = wandb.Histogram(values)  # type: ignore[arg-type]  # it takes arrays, too
            self.wandb.log({"step": step, name: shown})

    def close(self) -> None:
        self.lines.close()
        with self._board_errors():
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


class StepLines:
    """A JSON-lines file with one object a step. The last line is rewritten while its step still gets values.

    NaN and infinities have no JSON form: their value is null, and `"nonfinite"` names them:
    `{"step": 3, "train/loss": null, "nonfinite": {"train/loss": "nan"}}`.
    """

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        entries = [] if resume_step is None else read_lines(path, last_step=resume_step)
        write_file(path, b"".join(map(encode_line, entries)))
        self.current: dict[str, Any] = entries[-1] if entries else {"step": -1}
        self.file = path.open("r+b")
        self.offset = self.file.seek(0, os.SEEK_END)  # where the line of `current` starts
        if entries:
            self.offset -= len(encode_line(self.current))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if step < self.current["step"]:
            raise ValueError(f"metrics of step {step} come after those of step {self.current['step']}")
        if step > self.current["step"]:
            self.offset = self.file.seek(0, os.SEEK_END)
            self.current = {"step": step}
        nonfinite = self.current.pop("nonfinite", {})
        for name, value in values.items():
            nonfinite.pop(name, None)
            self.current[name] = float(value) if math.isfinite(value) else None
            if not math.isfinite(value):
                nonfinite[name] = str(float(value))
        if nonfinite:
            self.current["nonfinite"] = nonfinite
        self.file.seek(self.offset)
        self.file.write(encode_line(self.current))
        self.file.truncate()
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def encode_line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def read_lines(path: Path, *, last_step: int) -> list[dict[str, Any]]:
    """The entries up to `last_step`. A line that is none, as a crash leaves it, is left out with a warning.

    Raises:
        CheckpointError: what is there is no file.
    """
    if not path.exists():
        return []
    try:
        check_regular(path, path)
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be continued ({error.strerror}); remove it") from None
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
        else:
            log.warning("%s:%d is no step and is dropped: %r", path, number, line[:80])
    return [entry for entry in entries if entry["step"] <= last_step]


def check_wandb(config: MonitorConfig) -> None:
    """Raise `ConfigError` where W&B is asked for and cannot be used: a rank must never stop at a login prompt."""
    if not config.wandb:
        return
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ConfigError(
            "monitor.wandb is true, and the package wandb is not installed; "
            f"install it with `{install_command('wandb')}`, or set monitor.wandb = false"
        ) from error
    # From `wandb/settings` in the current folder it would learn the address to which it sends the key.
    with chdir("/"):
        mode = wandb.setup().settings.mode
    if mode != "online":
        return
    login = shlex.join([sys.executable, "-m", "wandb", "login"])
    way_out = f"run `{login}`, set WANDB_API_KEY, or keep the metrics here with WANDB_MODE=offline"
    try:
        logged_in = wandb.login(prompt=False)
    except wandb.Error as error:
        raise ConfigError(
            f"monitor.wandb is true, and the login to Weights & Biases failed ({error}); {way_out}"
        ) from error
    if not logged_in:
        raise ConfigError(f"monitor.wandb is true, and there is no key for Weights & Biases; {way_out}")


def open_wandb(
    output_dir: Path, config: MonitorConfig, run_config: dict[str, Any], *, resumed: bool
) -> wandb.Run | None:
    """Start the W&B run, or go on with the one that this output folder began."""
    if not config.wandb:
        return None
    check_wandb(config)
    import wandb

    id_file = output_dir / "wandb" / "run_id"
    id_file.parent.mkdir(exist_ok=True)
    if not (resumed and id_file.exists()):
        write_file(id_file, uuid.uuid4().hex[:8])
    run = wandb.init(
        project=config.wandb_project,
        name=config.wandb_name or re.sub(r"\W+", "-", output_dir.name),
        id=id_file.read_text(),
        resume="allow",
        dir=output_dir,
        config=run_config,
    )
    # Steps are a column of ours: W&B's own counter would refuse the ones that a resumed run repeats.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def as_code(text: str) -> str:
    """TensorBoard shows Markdown; an indented block keeps line breaks and angle brackets."""
    return "".join(f"    {line}\n" for line in text.splitlines())
