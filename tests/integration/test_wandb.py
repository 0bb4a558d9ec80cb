"""Weights & Biases without network access."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.long]

OFFLINE_RUN = """
import sys
from pathlib import Path
from dsreason.config.schema import MonitorConfig
from dsreason.monitor.metrics import open_metrics

folder, resume_step, step = Path(sys.argv[1]), *map(int, sys.argv[2:])
config = MonitorConfig(wandb=True, wandb_project="test")
with open_metrics(folder, rank=0, resume_step=resume_step or None, config=config, run_config={"a": 1}) as metrics:
    metrics.log_scalars(step, {"train/loss": 2.5})
    metrics.log_text(step, "val/answers", "left")
"""


def test_offline_wandb_run_keeps_id_when_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for resume_step, step in ((0, 1), (1, 2)):
        subprocess.run([sys.executable, "-c", OFFLINE_RUN, str(tmp_path), str(resume_step), str(step)], check=True)
    run_id = (tmp_path / "wandb" / "run_id").read_text()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


NO_KEY = """
from dsreason.config.schema import MonitorConfig
from dsreason.errors import ConfigError
from dsreason.monitor.sinks.wandb import check_wandb

check_wandb(MonitorConfig(wandb=False))
try:
    check_wandb(MonitorConfig(wandb=True))
except ConfigError as error:
    print(error)
"""


def test_missing_wandb_key_fails_without_prompt(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    command = [sys.executable, "-c", NO_KEY]
    output = subprocess.check_output(command, text=True, cwd=tmp_path, env={**environment, "HOME": str(tmp_path)})
    assert "no API key for Weights & Biases is set" in output
    assert "WANDB_MODE=offline" in output


ADDRESS = """
import wandb
from dsreason.config.schema import MonitorConfig
from dsreason.monitor.sinks.wandb import check_wandb

check_wandb(MonitorConfig(wandb=True))
print(wandb.setup().settings.base_url)
"""


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_local_wandb_settings_do_not_redirect_key(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    environment |= {"WANDB_MODE": "offline", "HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", ADDRESS]
    assert "127.0.0.1" not in subprocess.check_output(command, text=True, cwd=tmp_path, env=environment)
