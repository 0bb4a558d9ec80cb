"""Media that take excessive time or memory: reading stops at a limit with an error that names the file."""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from dsreason.data.loader import run_in_workers
from dsreason.errors import ConfigError, DataError
from dsreason.media import time_limit
from dsreason.media.images import load_image, probe_image
from dsreason.media.videos import count_codec_threads, load_video, probe_video
from dsreason.tools.datasets.cutting import read_timing
from dsreason.tools.datasets.processes import run_tasks
from tests.unit.hostile.guard import guarded, refused
from tests.unit.hostile.inputs import chunk, png
from tests.unit.media.videos import write_video

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (900, 900, 3), np.uint8))
WORDS = ["of CPU time, but the limit for a file of", "save it in a common format, or raise DSREASON_MEDIA_SECONDS"]


def encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    NOISE.convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


READ_IN_PIECES: dict[str, Callable[[], bytes]] = {
    "PNG of many chunks": lambda: png(4, 4, None, *[chunk(b"prVt", b"")] * 1000),
    "JPEG of many comments": lambda: (lambda jpeg: jpeg[:2] + b"\xff\xfe\0\2" * 1000 + jpeg[2:])(encoded("JPEG")),
    "JPEG": partial(encoded, "JPEG", quality=100),
    "GIF": partial(encoded, "GIF", mode="L"),
    "PPM of many comments": lambda: b"P3\n" + b"#x\n" * 1000 + b"4 4\n255\n" + b"0 " * 48,
    "TIFF": partial(encoded, "TIFF", compression="tiff_lzw"),
    "ICO": lambda: encoded("ICO", sizes=[(size, size) for size in range(16, 256, 8)]),
    "BMP": lambda: encoded("BMP")[:-9],
    "PNG": partial(encoded, "PNG"),
    "WebP, in one call": partial(encoded, "WEBP"),
}


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every file exceed its time limit as soon as it is opened."""
    monkeypatch.setattr(time_limit, "compute_seconds", lambda file: 0.0)


@pytest.mark.usefixtures("no_time")
@pytest.mark.parametrize("name", READ_IN_PIECES)
def test_image_decoding_stops_at_time_limit(here: Path, name: str) -> None:
    (here / "a.png").write_bytes(READ_IN_PIECES[name]())
    refused(lambda: load_image(here / "a.png"), DataError, "a.png", *WORDS)


@pytest.mark.usefixtures("no_time")
@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts", "avi"])
@pytest.mark.parametrize(
    "use", [probe_video, lambda file: load_video(file, [9]), read_timing], ids=["probe", "load", "cut"]
)
def test_video_decoding_stops_at_time_limit(here: Path, suffix: str, use: Callable[[Path], object]) -> None:
    write_video(here / f"a.{suffix}", codec="mpeg4" if suffix == "avi" else "libx264")
    refused(lambda: use(here / f"a.{suffix}"), DataError, f"a.{suffix}", *WORDS)


@pytest.mark.usefixtures("no_time")
def test_data_worker_rejects_file_and_continues(here: Path) -> None:
    write_video(here / "a.mkv")

    def read(task: int) -> int:
        with pytest.raises(DataError, match="a.mkv: reading it took"):
            probe_video(here / "a.mkv")
        return task

    assert guarded(lambda: list(run_in_workers(read, [1, 2], workers=1))) == [1, 2]


def endless(task: object) -> None:
    """Imitate a decoder that never returns: C code that releases the interpreter lock."""
    with time_limit.time_limit(Path("a.mp4")):
        numbers = (ctypes.c_int * 10**6)()
        compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(("memcmp", ctypes.CDLL(None)))
        while True:
            ctypes.CDLL(None).qsort(numbers, 10**6, 4, compare)


@pytest.fixture
def impatient(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "a.mp4").write_bytes(bytes(9))
    monkeypatch.setattr(time_limit, "compute_seconds", lambda file: 0.0)
    monkeypatch.setattr(time_limit, "ENDLESS", 0)


@pytest.mark.usefixtures("impatient")
def test_data_worker_in_endless_call_names_file() -> None:
    with pytest.raises(DataError, match="^a.mp4: reading it took"):
        guarded(lambda: next(run_in_workers(endless, [0], workers=1)))


@pytest.mark.usefixtures("impatient")
def test_validation_continues_after_endless_call() -> None:
    def work(task: int) -> int:
        return task if task else endless(task) or 0

    result = dict(guarded(lambda: list(run_tasks(work, [0, 1], lambda task: f"row {task}", workers=1))))
    assert str(result[0]).startswith("row 0: a.mp4: reading it took")
    assert result[1] == 1


@pytest.mark.usefixtures("impatient")
def test_command_in_endless_call_names_file(here: Path) -> None:
    child = os.fork()
    if child == 0:
        multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
        os.dup2(os.open(here / "errors", os.O_CREAT | os.O_WRONLY), 2)
        endless(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == DataError.exit_code
    assert (here / "errors").read_text().startswith("error: a.mp4: reading it took")


def hungry(task: object) -> None:
    """Imitate a decoder that takes more and more memory."""
    with time_limit.time_limit(Path("a.mp4")):
        used = b"x" * (200 << 20)
        time.sleep(20 * time_limit.TICK if used else 0)


@pytest.fixture
def frugal(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "a.mp4").write_bytes(bytes(9))
    monkeypatch.setattr(time_limit, "MEMORY", 100 << 20)


@pytest.mark.usefixtures("frugal")
def test_growing_data_worker_ends_and_names_file() -> None:
    with pytest.raises(
        DataError, match="^a.mp4: reading it took more than 100 MiB of memory, which is the limit; save it"
    ):
        guarded(lambda: next(run_in_workers(hungry, [0], workers=1)))


@pytest.mark.usefixtures("frugal")
def test_busy_process_may_grow_by_half_memory() -> None:
    assert time_limit.compute_max_growth() == psutil.virtual_memory().total // 2
    with time_limit.time_limit(Path("a.mp4")):
        used = b"x" * (200 << 20)
        time.sleep(3 * time_limit.TICK)
    assert used


@pytest.mark.parametrize("padding", ["holes", "bytes"])
def test_padding_does_not_extend_time_limit(here: Path, padding: str) -> None:
    (here / "a.ppm").write_bytes(b"P6\n#" + b"x" * (0 if padding == "holes" else 3000))
    os.truncate(here / "a.ppm", 20 * 2**30 if padding == "holes" else 3000)
    most = 1000 if padding == "bytes" else 10**9
    with time_limit.time_limit(here / "a.ppm", most=most):
        (limit,) = time_limit._limits.values()
        assert limit.seconds == pytest.approx(30, abs=0.1)
    assert time_limit.get_size_on_disk(here / "a.ppm") <= 8192


def test_time_limit_scales_and_is_configurable(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (here / "a.mp4").open("wb") as file:
        file.truncate(5_000_000)
    assert time_limit.compute_seconds(5_000_000) == 80
    monkeypatch.setenv(time_limit.TIME_VARIABLE, "600")
    assert time_limit.compute_seconds(5_000_000) == 650
    monkeypatch.setenv(time_limit.TIME_VARIABLE, "long")
    with pytest.raises(ConfigError, match="DSREASON_MEDIA_SECONDS must be a whole number of seconds; got 'long'"):
        time_limit.compute_seconds(5_000_000)


def test_invalid_time_limit_is_config_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NOISE.save(here / "a.png")
    monkeypatch.setenv(time_limit.TIME_VARIABLE, "1e3")
    refused(
        lambda: load_image(here / "a.png"),
        ConfigError,
        "DSREASON_MEDIA_SECONDS must be a whole number of seconds; got '1e3'",
    )


def test_each_file_has_a_separate_limit(here: Path) -> None:
    (here / "a.png").write_bytes(png(4, 4))
    with time_limit.time_limit(here / "a.png"):
        assert probe_image(here / "a.png") == (4, 4)
        assert len(time_limit._limits) == 1
    assert time_limit._limits == {}
    assert count_codec_threads() >= 1
