"""Reward functions of a file, and the queue of the server that offers them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsreason.errors import ConfigError
from dsreason.world.rewards import jobs
from dsreason.world.rewards.jobs import Jobs, find_functions
from dsreason.world.rewards.wire import ScoringRequest, build_enqueue_body, read_body

FILE = """
from os.path import join
from dsreason.world.rewards.pixels import motion

def one(clips, samples): ...
def two(clips, samples, weight=1.0): ...
def _hidden(clips, samples): ...
def helper(clip): ...
class Thing: ...
"""


def test_public_and_builtin_functions_are_served(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(FILE)
    assert list(find_functions(str(file))) == ["motion", "one", "two"]
    assert list(find_functions(f"{file}:two")) == ["two"]
    with pytest.raises(ConfigError, match=r"cannot be called as fn\(clips, samples\)"):
        find_functions(f"{file}:helper")
    file.with_name("none.py").write_text("def helper(clip): ...")
    with pytest.raises(ConfigError, match="has no function that can be called"):
        find_functions(str(file.with_name("none.py")))
    with pytest.raises(ConfigError, match="does not exist"):
        find_functions(str(file.with_name("absent.py")))


REQUEST = ScoringRequest(["a"], {"x": 1.0}, [{}], "video", np.zeros((1, 3, 1, 2, 2), np.uint8), {"geneval_tags": ["b"]})


def test_request_fields_are_read_unchanged() -> None:
    read = read_body(bytearray(build_enqueue_body(REQUEST)))
    assert np.array_equal(read.array, REQUEST.array)
    assert (read.prompts, read.reward_fn, read.video_infos, read.media_type, read.extra) == (
        ["a"],
        {"x": 1.0},
        [{}],
        "video",
        {"geneval_tags": ["b"]},
    )


def test_queue_keeps_newest_scores_and_waiting_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "KEPT", 2)
    queue = Jobs(10, 1000)
    names = []
    for _ in range(5):
        assert queue.reserve(10)
        names.append(queue.add(REQUEST, ["x"], 10))
    assert all(queue.find(name) for name in names)
    for _ in range(4):
        queue.finish(queue.take())
    assert queue.reserve(10)
    names.append(queue.add(REQUEST, ["x"], 10))
    assert [queue.find(name) is not None for name in names] == [False, False, False, True, True, True]


def test_old_responses_are_dropped_at_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "KEPT_BYTES", 2500)
    queue = Jobs(10, 1000)
    names = [queue.add(REQUEST, ["x", "y"], 0) for _ in range(4)]
    for _ in range(3):
        job = queue.take()
        for _ in range(5):
            queue.keep(job, "x", (200, {"scores": "s" * 1000}))  # the last response replaces the others
        queue.keep(job, "x", (500, {}), replace=False)
        assert job.answers["x"][0] == 200
        queue.finish(job)
    assert [queue.find(name) is not None for name in names] == [False, True, True, True]
    queue.keep(job, "y", (200, {"scores": "s" * 5000}))
    assert [queue.find(name) is not None for name in names] == [False, False, True, True]  # too long on its own
