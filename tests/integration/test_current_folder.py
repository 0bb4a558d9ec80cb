"""Python files beside a person's rows stay unread, however a job is started; the reward that is named runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.command import metrics
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration

MODULES = (
    # packages that libraries look for; `pynvml` and `winreg` are looked for in every start
    *("apex", "torch_npu", "soundfile", "pynvml", "winreg", "cupy", "mpi4py", "flash_attn", "torchaudio", "intel_npu"),
    # of the standard library, imported by the launchers' agents, the ranks, and their workers
    *("token", "queue", "tempfile", "tarfile", "unittest", "multiprocessing", "pickle", "socket", "typing", "csv"),
)
PLUGINS = ("torch.backends", "vllm.general_plugins", "vllm.platform_plugins", "fsspec.specs")
"""Entry points that libraries call in whatever is installed."""

CONFIG = """
[model]
path = "{model}"
gradient_checkpointing = false
[data]
adapter = "own_adapter.py"
path = "rows.jsonl"
workers = 1
[train]
max_steps = 1
precision = "fp32"
"""
GRPO = """
[grpo]
preset = "dapo"
prompts_per_step = 2
num_generations = 2
overlong_filter = false
[rollout]
engine = "transformers"
max_completion_length = 4
[reward.functions]
"own_reward.py:short" = 1.0
"own_package.rewards:long" = 1.0
"""
FILES = {
    "own_adapter.py": "from shared import to_sample",
    "own_reward.py": "import shared\ndef short(completion, sample):\n    import late\n    return late.score(completion)\n",
    "own_package/rewards.py": "from shared import BASE\ndef long(completion, sample):\n    return BASE + len(completion)\n",
    "shared.py": "from data_adapters.jsonl import to_sample\nBASE = 1.0\n",
    "late.py": "def score(completion):\n    return -len(completion) / 100\n",
}


@pytest.fixture
def folder(tmp_path: Path, tiny_qwen3_vl: Path) -> Path:
    folder = tmp_path / "rows"
    write_mixed_rows(folder, count=4)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "sft.toml").write_text(CONFIG.format(model=tiny_qwen3_vl) + "global_batch_size = 2\n")
    (folder / "grpo.toml").write_text(CONFIG.format(model=tiny_qwen3_vl) + GRPO)
    (folder / "planted-1.0.dist-info").mkdir()
    (folder / "planted-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (folder / "planted-1.0.dist-info" / "entry_points.txt").write_text(
        "".join(f"[{group}]\nplanted = planted:run\n" for group in PLUGINS)
    )
    ran = tmp_path / "ran"
    for name in ("planted", *MODULES):
        (folder / f"{name}.py").write_text(
            f"import sys\nopen({str(ran)!r}, 'a').write(f'{name} in {{sys.orig_argv}}\\n')\nraise ImportError('planted')\n"
        )
    return folder


def run(folder: Path, command: list[str], config: str, **environment: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    kept |= {"DS_ACCELERATOR": "cpu", "PATH": "/usr/bin:/bin", **environment}
    arguments = [Path(config).stem, "--config", config, "--output-dir", "D"]
    ended = subprocess.run(
        [sys.executable, *command, *arguments], cwd=folder, env=kept, capture_output=True, text=True, timeout=600
    )
    ran = folder.parent / "ran"
    assert not ran.exists(), ran.read_text()
    assert ended.returncode == 0, ended.stderr
    assert [line["step"] for line in metrics(folder / "D")] == [1]


def test_a_plain_start_runs_only_what_is_named(folder: Path) -> None:
    """Parent, rank, data worker, checkpoint writer, reward workers."""
    run(folder, ["-m", "dsreason"], "grpo.toml", PYTHONPATH=f"{os.environ['PYTHONPATH']}:")


@pytest.mark.long
def test_a_rank_of_torchrun_runs_only_what_is_named(folder: Path) -> None:
    # The launcher itself is started like the installed `torchrun`, which has its own folder on the path.
    run(
        folder,
        ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "-m", "dsreason"],
        "sft.toml",
    )


@pytest.mark.long
def test_pythonsafepath_protects_the_processes_of_deepspeed_too(folder: Path) -> None:
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", "29519", "--module", "dsreason"]
    run(folder, launcher, "sft.toml", PYTHONSAFEPATH="1")
