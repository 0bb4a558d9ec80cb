"""Files in the same folder as a user's rows are not run, however a job is started; only the reward named in the config is run.

The tests plant all standard-library modules that Python has not imported before the first line of `dsreason`, packages that
libraries look for, entry points, and programs that an empty entry of PATH would find.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.integration.command import metrics
from tests.integration.rows import write_mixed_rows

pytestmark = [pytest.mark.integration, pytest.mark.long]

PACKAGES = (
    # Libraries look for these packages, which are not installed; every start looks for `op_builder` and
    # `torch_supa_ext`.
    *("apex", "torch_npu", "soundfile", "pynvml", "winreg", "cupy", "mpi4py", "flash_attn", "torchaudio", "intel_npu"),
    *(
        "op_builder",
        "accelerator",
        "torch_supa_ext",
        "torch_xla",
        "torch_musa",
        "torch_mlu",
        "torch_sdaa",
        "torchcomms",
    ),
    *("brotli", "brotlicffi", "backports", "trio", "h2", "socks", "socksio", "chardet", "zstandard", "lz4", "snappy"),
    *("accimage", "librosa", "soxr", "timm", "onnxruntime", "kernels", "cutlass", "mlflow", "comet_ml", "tensorflow"),
    *("sitecustomize", "usercustomize", "conftest", "_distutils_system_mod", "annotationlib", "gmpy2", "OpenSSL"),
)
PROGRAMS = ("git", "g++", "gcc", "c++", "ninja", "uname", "file", "lscpu", "ldconfig", "ld", "as", "nvidia-smi", "sh")
PLUGINS = ("torch.backends", "vllm.general_plugins", "vllm.platform_plugins", "fsspec.specs")
"""Groups of entry points that libraries load from every installed package."""

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
    plant(folder, ("planted", *PACKAGES))
    for name in PROGRAMS:
        (folder / name).write_text(f"#!/bin/bash\necho {name} >> {tmp_path / 'ran'}\nexit 1\n")
        (folder / name).chmod(0o755)
    return folder


def plant(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / f"{name}.py").write_text(
            f"import sys\nopen({str(folder.parent / 'ran')!r}, 'a').write(f'{name} in {{sys.orig_argv}}\\n')\n"
            "raise ImportError('planted')\n"
        )


def late_modules(folder: Path) -> set[str]:
    """Return the standard-library modules not yet imported when a module run with `-m` begins."""
    (folder.parent / "shown.py").write_text("import sys\nprint(*{name.partition('.')[0] for name in sys.modules})")
    output = subprocess.check_output([sys.executable, "-m", "shown"], cwd=folder.parent, text=True)
    return sys.stdlib_module_names - set(output.split()) - {"__main__"}


def run(folder: Path, command: list[str], config: str, *options: str, **environment: str) -> None:
    arguments = [Path(config).stem, "--config", config, "--output-dir", "D", *options]
    ended = start(folder, [*command, *arguments], **environment)
    ran = folder.parent / "ran"
    assert not ran.exists(), ran.read_text()
    assert ended.returncode == 0, ended.stderr
    assert [line["step"] for line in metrics(folder / "D")] == [1]


def start(folder: Path, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    remaining = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    remaining |= {"DS_ACCELERATOR": "cpu", "PATH": ":/usr/bin:/bin", **environment}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=remaining, capture_output=True, text=True, timeout=600
    )


def test_plain_start_ignores_planted_modules(folder: Path) -> None:
    """Cover the parent, a rank, a data worker, the checkpoint writer and the reward workers."""
    plant(folder, late_modules(folder))
    for name in ("sitecustomize", "usercustomize"):
        # With an empty entry in PYTHONPATH, Python runs these modules before any other code.
        (folder / f"{name}.py").unlink()
    run(folder, ["-m", "dsreason"], "grpo.toml", PYTHONPATH=f"{os.environ['PYTHONPATH']}:")


@pytest.mark.nightly
def test_script_and_vllm_ignore_planted_modules(folder: Path) -> None:
    """Cover the processes that vLLM starts as well."""
    script = folder.parent / "dsreason"
    script.write_text("from dsreason.__main__ import main\nmain()\n")
    plant(folder, sys.stdlib_module_names)
    run(folder, [str(script)], "grpo.toml", "--set=rollout.engine=vllm")


@pytest.mark.parametrize(
    "command",
    [
        ["data", "validate", "--config", "grpo.toml", "--workers", "1"],
        ["plan", "--config", "grpo.toml", "--gpus", "1"],
        pytest.param(["doctor", "--quick"], marks=pytest.mark.nightly),
        pytest.param(["eval", "--model", "tiny:qwen2_5_vl", "--data", "rows.jsonl"], marks=pytest.mark.nightly),
    ],
    ids=lambda command: command[0],
)
def test_other_commands_ignore_planted_modules(folder: Path, command: list[str]) -> None:
    plant(folder, late_modules(folder))
    ended = start(folder, ["-m", "dsreason", *command])
    ran = folder.parent / "ran"
    assert not ran.exists(), ran.read_text()
    assert "Traceback" not in ended.stderr
    assert ended.returncode in (0, 1), ended.stderr


@pytest.mark.nightly
def test_torchrun_rank_ignores_planted_modules(folder: Path) -> None:
    # The launcher itself is started like the installed `torchrun`, which has its own folder on the path.
    plant(folder, late_modules(folder))
    run(
        folder,
        ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "-m", "dsreason"],
        "sft.toml",
        PATH="/usr/bin:/bin",
    )


DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", "29519", "--module", "dsreason")


@pytest.mark.nightly
def test_pythonsafepath_also_protects_deepspeed_processes(folder: Path) -> None:
    plant(folder, sys.stdlib_module_names)
    run(folder, [*DEEPSPEED], "sft.toml", PYTHONSAFEPATH="1", PATH="/usr/bin:/bin")


@pytest.mark.nightly
def test_without_pythonsafepath_only_deepspeed_launchers_are_vulnerable(folder: Path) -> None:
    # Otherwise, the launchers' import of torch would fail because of the planted entry points.
    shutil.rmtree(folder / "planted-1.0.dist-info")
    ended = start(folder, [*DEEPSPEED, "sft", "--config", "sft.toml", "--output-dir", "D"], PATH="/usr/bin:/bin")
    assert ended.returncode == 0, ended.stderr
    ran = (folder.parent / "ran").read_text().splitlines()
    assert [line for line in ran if "'deepspeed.launcher." not in line] == []
