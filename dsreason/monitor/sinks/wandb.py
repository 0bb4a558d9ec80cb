"""A sink that logs to Weights & Biases, used if `monitor.wandb` is true."""

from __future__ import annotations

import io
import logging
import os
import re
import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsreason.config.schema import MonitorConfig
from dsreason.errors import ConfigError
from dsreason.files.disk import read_small, write_report
from dsreason.imports import build_install_command
from dsreason.monitor.sinks.sink import Sink

if TYPE_CHECKING:
    import wandb
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor


log = logging.getLogger(__name__)


class WeightsAndBiases(Sink):
    """A W&B run with the step in a separate column, because W&B's own counter rejects steps that a resumed run repeats."""

    def __init__(
        self, output_dir: Path, config: MonitorConfig, run_config: dict[str, Any], resume_step: int | None
    ) -> None:
        self.run = open_wandb(output_dir, config, run_config, resumed=resume_step is not None)

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def log_text(self, step: int, name: str, text: str) -> None:
        import wandb

        self.run.log({"step": step, name: wandb.Table(columns=["step", "text"], data=[[step, text]])})

    def log_images(self, step: int, name: str, images: Sequence[Image]) -> None:
        import wandb

        self.run.log({"step": step, name: [wandb.Image(image) for image in images]})

    def log_video(self, step: int, name: str, gif: bytes) -> None:
        import wandb

        self.run.log({"step": step, name: wandb.Video(io.BytesIO(gif), format="gif")})

    def log_histogram(self, step: int, name: str, values: Tensor | NDArray[Any]) -> None:
        import wandb

        self.run.log({"step": step, name: wandb.Histogram(values)})  # type: ignore[arg-type]  # it also takes arrays

    def close(self) -> None:
        self.run.finish()


def check_wandb(config: MonitorConfig) -> None:
    """Raise ConfigError if W&B is enabled but cannot be used, because a rank must never wait at a login prompt."""
    if not config.wandb:
        return
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ConfigError(
            "monitor.wandb is true, but the package wandb is not installed; "
            f"install it with `{build_install_command('wandb')}`, or set monitor.wandb = false"
        ) from error
    # A file `wandb/settings` in the current folder could change the URL to which wandb sends the API key.
    with chdir("/"):
        mode = wandb.setup().settings.mode
    if mode != "online":
        return
    login = shlex.join([sys.executable, "-m", "wandb", "login"])
    advice = f"run `{login}`, set WANDB_API_KEY, or keep the metrics on this machine with WANDB_MODE=offline"
    try:
        logged_in = wandb.login(prompt=False)
    except wandb.Error as error:
        raise ConfigError(
            f"monitor.wandb is true, but the login to Weights & Biases failed ({error}); {advice}"
        ) from error
    if not logged_in:
        raise ConfigError(f"monitor.wandb is true, but no API key for Weights & Biases is set; {advice}")


def open_wandb(output_dir: Path, config: MonitorConfig, run_config: dict[str, Any], *, resumed: bool) -> wandb.Run:
    """Start a W&B run or, if this run is resumed, continue the W&B run whose id is stored in the output folder."""
    check_wandb(config)
    import wandb

    id_file = output_dir / "wandb" / "run_id"
    id_file.parent.mkdir(exist_ok=True)
    run_id = read_run_id(id_file) if resumed else None
    if run_id is None:
        run_id = uuid.uuid4().hex[:8]
        write_report(id_file, run_id)
    run = wandb.init(
        project=config.wandb_project,
        name=config.wandb_name or re.sub(r"\W+", "-", output_dir.name),
        id=run_id,
        resume="allow",
        dir=output_dir,
        config=run_config,
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def read_run_id(file: Path) -> str | None:
    """Return the id of the W&B run to continue; None if the file is missing or, with a warning, if it is damaged."""
    if not os.path.lexists(file):
        return None
    try:
        run_id = read_small(file).decode()
    except (OSError, ValueError) as error:
        run_id = str(error)
    if re.fullmatch("[0-9a-f]{8}", run_id):
        return run_id
    log.warning("%s does not contain the id of a W&B run (%.40r); starting a new W&B run", file, run_id)
    return None
