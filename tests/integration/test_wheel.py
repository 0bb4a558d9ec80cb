"""The built wheel works without the checkout from any folder, because it contains the shipped files."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.integration.command import metrics

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the installed wheel instead of the checkout, from which the tests import."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment that contains the wheel and, except for dsreason, everything in this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--sdist", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr + built.stdout
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    site = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_trains_shipped_recipe_from_another_folder(python, tmp_path):
    short = ["--set", "train.max_steps=2", "--set", "validation.max_samples=16"]
    command = [
        python,
        "-m",
        "dsreason",
        "sft",
        "--ds-config",
        "zero3.json",
        "--nproc",
        "2",
        "--output-dir",
        "D",
        *short,
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    lines = metrics(tmp_path / "D")
    assert "val/accuracy" in lines[0]
    assert "val/accuracy" in lines[-1]
    assert (tmp_path / "D/export/final/config.json").is_file()


def test_wheel_is_imported_instead_of_checkout(python, tmp_path):
    where = subprocess.check_output(
        [python, "-c", "import dsreason; print(dsreason.__file__)"], text=True, cwd=tmp_path
    )
    assert str(python.parents[1]) in where


def test_license_is_included_in_both_packages(python):
    folder, text = python.parents[2], (ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("/licenses/LICENSE")]
        assert wheel.read(name) == text
        (metadata,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        assert "License-Expression: Apache-2.0" in wheel.read(metadata).decode()
    with tarfile.open(next(folder.glob("*.tar.gz"))) as source:
        (name,) = [name for name in source.getnames() if name.endswith("/LICENSE")]
        assert source.extractfile(name).read() == text
