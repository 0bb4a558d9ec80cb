"""`dsreason data fetch` with a stand-in for the Hub."""

import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsreason.errors import ConfigError, DataError
from dsreason.files.lock import hold_folder
from dsreason.tools.datasets import fetch as fetching
from dsreason.tools.datasets import hub as hub_files
from dsreason.tools.datasets.fetch import FetchPlan, fetch, plan_fetch
from tests.unit.tools.datasets.hub import COMMIT, Hub

QUESTIONS = json.dumps([{"video": "clips/a.mp4", "qa_pairs": []}]).encode()
CLIP = bytes(range(256)) * 40


def archive(*members: str, content: bytes = CLIP) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {
        ".gitattributes": b"x",
        "README.md": b"# card",
        "robovqa/robovqa_benchmark_qa_pairs.json": QUESTIONS,
        "robovqa/clips.tar.gz": archive("robovqa/clips/a.mp4", "b.mp4", "._b.mp4"),
        "agibot/agibot_benchmark_qa_pairs.json": QUESTIONS,
    }
    with Hub("nvidia/Cosmos-Reason1-Benchmark", files) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
        monkeypatch.setattr(hub_files.time, "sleep", lambda seconds: None)
        yield served


def names(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def plan(tmp_path: Path, **options: object) -> FetchPlan:
    return plan_fetch("benchmark", data_dir=tmp_path, **options)  # type: ignore[arg-type]


def test_files_and_clips_land_in_evaluation_folders(hub: Hub, tmp_path: Path) -> None:
    fetch(plan(tmp_path))
    assert names(tmp_path) == [
        "benchmark/.fetched.json",
        "benchmark/README.md",
        "benchmark/agibot/agibot_benchmark_qa_pairs.json",
        "benchmark/robovqa/clips/a.mp4",
        "benchmark/robovqa/clips/b.mp4",
        "benchmark/robovqa/robovqa_benchmark_qa_pairs.json",
    ]
    assert (tmp_path / "benchmark/robovqa/clips/a.mp4").read_bytes() == CLIP
    assert (tmp_path / "benchmark/robovqa/robovqa_benchmark_qa_pairs.json").read_bytes() == QUESTIONS


def test_only_requested_files_are_fetched(hub: Hub, tmp_path: Path) -> None:
    fetch(plan(tmp_path, datasets=["robovqa"], patterns=["*.json"]))
    assert [name for name, _ in hub.ranges] == ["robovqa/robovqa_benchmark_qa_pairs.json"]


def test_plan_lists_sizes_and_missing_clips(hub: Hub, tmp_path: Path) -> None:
    requested = plan(tmp_path, datasets=["robovqa", "agibot"])
    size = len(hub.files["robovqa/clips.tar.gz"])
    assert requested.revision == COMMIT
    assert requested.num_bytes == size + 2 * len(QUESTIONS)
    assert requested.disk_bytes == 2 * size + 2 * len(QUESTIONS)
    assert requested.without_clips == ["agibot"]
    assert hub.ranges == []


def test_filtered_clips_are_not_reported_missing(hub: Hub, tmp_path: Path) -> None:
    assert plan(tmp_path, datasets=["robovqa"], patterns=["*.json"]).without_clips == []


def test_second_fetch_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    fetch(plan(tmp_path))
    hub.ranges.clear()
    second = plan(tmp_path)
    fetch(second)
    assert second.missing == []
    assert hub.ranges == []


@pytest.mark.parametrize(
    ("path", "removed"),
    [
        ("robovqa/robovqa_benchmark_qa_pairs.json", "benchmark/robovqa/robovqa_benchmark_qa_pairs.json"),
        ("robovqa/clips.tar.gz", "benchmark/robovqa/clips"),
    ],
)
def test_removed_file_is_fetched_again(hub: Hub, tmp_path: Path, path: str, removed: str) -> None:
    fetch(plan(tmp_path))
    gone = tmp_path / removed
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    assert [file.path for file in plan(tmp_path).missing] == [path]


def test_changed_file_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    fetch(plan(tmp_path))
    hub.files["README.md"] = b"# CARD"
    fetch(plan(tmp_path))
    assert (tmp_path / "benchmark/README.md").read_bytes() == b"# CARD"


def test_broken_download_resumes(hub: Hub, tmp_path: Path) -> None:
    hub.cut_at = 5000
    fetch(plan(tmp_path, patterns=["*.tar.gz"]))
    assert hub.ranges == [("robovqa/clips.tar.gz", None), ("robovqa/clips.tar.gz", "bytes=5000-")]
    assert (tmp_path / "benchmark/robovqa/clips/b.mp4").read_bytes() == CLIP


def test_interrupted_download_is_continued(hub: Hub, tmp_path: Path) -> None:
    hub.cut_at, hub.refuse = 5000, 403
    with pytest.raises(DataError, match="the Hub responds with 403"):
        fetch(plan(tmp_path, patterns=["*.tar.gz"]))
    assert not (tmp_path / "benchmark/robovqa").exists()
    hub.refuse = None
    hub.ranges.clear()
    second = plan(tmp_path, patterns=["*.tar.gz"])
    assert second.num_bytes == len(hub.files["robovqa/clips.tar.gz"]) - 5000
    fetch(second)
    assert hub.ranges == [("robovqa/clips.tar.gz", "bytes=5000-")]
    assert (tmp_path / "benchmark/robovqa/clips/b.mp4").read_bytes() == CLIP
    assert not (tmp_path / "benchmark/.partial").exists()


def test_progress_counts_every_byte(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    class Tracked:
        def __enter__(self):
            return counts.append

        def __exit__(self, *exc: object) -> None: ...

    requested = plan(tmp_path)
    monkeypatch.setattr(fetching, "track", lambda name, total, unit: Tracked())
    fetch(requested)
    assert sum(counts) == requested.num_bytes


def test_damaged_content_is_refused_and_removed(hub: Hub, tmp_path: Path) -> None:
    requested = plan(tmp_path, patterns=["*.tar.gz"])
    hub.files["robovqa/clips.tar.gz"] = bytes(len(hub.files["robovqa/clips.tar.gz"]))
    with pytest.raises(DataError, match=r"robovqa/clips\.tar\.gz: the content's SHA-256 is"):
        fetch(requested)
    assert names(tmp_path) == []


def test_wrongly_sized_content_is_rejected_and_removed(hub: Hub, tmp_path: Path) -> None:
    requested = plan(tmp_path, patterns=["README.md"])
    hub.files["README.md"] = b"#"
    with pytest.raises(DataError, match=r"README\.md: received 1 bytes, but the Hub lists 6"):
        fetch(requested)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no archive" * 900, r"cannot be unpacked(?s:.*)run the same command again"),
        (archive("../../outside.mp4"), "outside the destination"),
        (archive("one/a.mp4", "two/a.mp4"), "2 files, but only 1 distinct names"),
    ],
)
def test_bad_archive_leaves_no_clips(hub: Hub, tmp_path: Path, content: bytes, words: str) -> None:
    hub.files["robovqa/clips.tar.gz"] = content
    with pytest.raises(DataError, match=words):
        fetch(plan(tmp_path, patterns=["*.tar.gz"]))
    assert not list(tmp_path.rglob("*.mp4"))


def test_gated_repository_error_names_page_and_token(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    words = rf"{hub.repo}: is gated; accept its terms on {hub.address}/datasets/{hub.repo}, .*HF_TOKEN.*it is not set"
    with pytest.raises(DataError, match=words):
        fetch(plan(tmp_path))


def test_token_grants_access_to_gated_repository(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated, hub.token = True, "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(DataError, match="the current one has no access") as caught:
        fetch(plan(tmp_path))
    assert "hf_" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(plan(tmp_path))
    assert plan(tmp_path).missing == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repo": "nvidia/Cosmos-Reason1-Bench"}, "does not exist on the Hub, or is private"),
        ({"repo": "a/b/c"}, "is not a valid repository name"),
        ({"revision": "v9"}, "has no revision 'v9'"),
        ({"datasets": ["robovqa", "av"]}, "has no data set av; it has agibot, robovqa"),
        ({"patterns": ["READNE.md"]}, r"matches none of the 4 files.*did you mean README\.md"),
        ({"datasets": ["agibot"], "patterns": ["*.tar"]}, r"--file \*\.tar: matches none of the 1 files"),
    ],
)
def test_requests_unknown_to_hub_are_rejected(hub: Hub, tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(DataError, match=words):
        plan(tmp_path, **options)


def test_path_outside_folder_is_rejected(hub: Hub, tmp_path: Path) -> None:
    hub.files["robovqa/../../x"] = b"x"
    with pytest.raises(DataError, match="is outside its folder"):
        plan(tmp_path)


def test_missing_connection_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DataError, match=r"check the connection.*run the same command again"):
        plan(tmp_path)


def test_insufficient_disk_is_reported_before_fetching(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=60_000_000)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        DataError, match=r"needs 0\.08 MB of disk space, but only 0\.1 GB are free; choose another --data-dir"
    ):
        fetch(plan(tmp_path))
    assert hub.ranges == []


def test_concurrent_fetch_into_a_folder_is_refused(hub: Hub, tmp_path: Path) -> None:
    """Refuse the second fetch, because both would append to the same partial downloads."""
    missing = plan(tmp_path)
    with hold_folder(missing.folder), pytest.raises(ConfigError, match="benchmark: is in use by process"):
        fetch(missing)
    assert names(tmp_path) == []
    fetch(missing)
    with hold_folder(missing.folder):
        fetch(plan(tmp_path))  # nothing is missing, so nothing is written
