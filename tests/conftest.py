"""Fixtures that many tests use: tiny random models, built once per test session."""

import atexit
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from dsreason.secrets import forget_secrets


def pytest_configure() -> None:
    """Let everything that a test starts, in any folder, find the packages that this process finds."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the cores are shared with other workers
    for number in (signal.SIGINT, signal.SIGHUP):  # ignored where the tests were started in the background
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    gc.disable()  # while the tests' modules import torch and transformers


def pytest_collection_finish() -> None:
    """The garbage collector need not look through the libraries, neither between tests nor at the end."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.freeze)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills",
        type=int,
        default=1,
        help="how often test_kills.py kills each kind of run, and test_eval.py an evaluation beside its start",
    )
    parser.addoption("--fuzz-seconds", type=float, default=60, help="how long tests/fuzz gives each reader new inputs")
    parser.addoption("--fuzz-round", type=int, default=0, help="the first round of tests/fuzz: the seed of its inputs")
    parser.addoption("--all", action="store_true", help="also the tests marked `long` or `nightly`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[item for item in items if not is_short(item)])
        items[:] = [item for item in items if is_short(item)]


def is_short(item: pytest.Item) -> bool:
    return not (item.get_closest_marker("long") or item.get_closest_marker("nightly"))


TRAINED = (
    "test_builtin_distillation.py",
    "test_builtin_dpo.py",
    "test_builtin_grpo.py",
    "test_builtin_sft.py",
    "test_trained_parity.py",
)
"""They look at the same trained models."""


class FilesTogether(LoadFileScheduling):
    """`--dist loadfile`, with the files that share trained models in one process: each model is trained once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "trained" if file.endswith(TRAINED) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def own_environment() -> None:
    """Forget the secrets of the previous test, also the cached ones, whose key is only the number of variables."""
    forget_secrets()


def _build(family: str, factory: pytest.TempPathFactory) -> Path:
    from dsreason.models.tiny import build_tiny

    return build_tiny(family, factory.mktemp("models") / family)


@pytest.fixture(scope="session")
def tiny_qwen2_5_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("qwen2_5_vl", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("qwen3_vl", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_cosmos3_omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("cosmos3_omni", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("qwen3_5", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_cosmos3_edge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("cosmos3_edge", tmp_path_factory)


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl", "cosmos3_edge"])
def tiny_of_each_architecture(request: pytest.FixtureRequest) -> Path:
    """The folder of a tiny model of each architecture, one after the other."""
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture(scope="session")
def tiny_qwen3_vl_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("qwen3_vl_moe", tmp_path_factory)


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl"])
def tiny(request: pytest.FixtureRequest) -> Path:
    """The folder of either family's tiny model, one after the other."""
    return request.getfixturevalue(f"tiny_{request.param}")
