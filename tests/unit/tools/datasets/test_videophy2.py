"""`dsreason data fetch-videophy2` with a stand-in for the Hub and for the server of the videos."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsreason.cli import main
from dsreason.config.schema_data import SourceConfig
from dsreason.data.sources import open_source
from dsreason.errors import DataError
from dsreason.tools.datasets.videophy2 import PROMPT, fetch_split, read_score, read_table
from tests.unit.tools.datasets.hub import Hub

REPO = "videophysics/videophy2_test"
TABLE = """caption,video_url,sa,pc
"A ball, red, falls",{url}/a.mp4,4,5
Water flows up,{url}/b.mp4,2,1.0
A lost clip,{url}/gone.mp4,3,3
No score,{url}/a.mp4,3,
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub(REPO, {"README.md": b"# card"}, plain={"/a.mp4": b"first", "/b.mp4": b"second"}) as served:
        served.files["videophy2_test.csv"] = TABLE.format(url=served.address).encode()
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
        monkeypatch.setenv("DSREASON_CACHE", str(tmp_path / "cache"))
        yield served


def test_split_has_the_published_layout(hub: Hub, tmp_path: Path) -> None:
    result = fetch_split("val", tmp_path, prompt="Score it.", allow_private=True)
    folder = tmp_path / "videophy2_val"
    assert (result.folder, result.num_rows, result.unused) == (folder, 2, ["caption", "sa"])
    assert json.loads((folder / "meta.json").read_text()) == [
        {"id": "0", "media": "media/video_0.mp4", "conversation": "text/conversation_0.json"},
        {"id": "1", "media": "media/video_1.mp4", "conversation": "text/conversation_1.json"},
    ]
    assert json.loads((folder / "text" / "conversation_1.json").read_text()) == {
        "conversations": [
            {"role": "user", "content": [{"type": "video", "video": "video_0"}, {"type": "text", "text": "Score it."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "1"}]},
        ]
    }
    assert [(folder / "media" / f"video_{name}.mp4").read_bytes() for name in "01"] == [b"first", b"second"]


def test_omitted_rows_are_reported(hub: Hub, tmp_path: Path) -> None:
    problems = fetch_split("val", tmp_path, allow_private=True).problems
    assert len(problems) == 2
    assert problems[0].startswith("row 4: must have a video_url and a pc from 1 to 5; got 'http")
    assert problems[1].startswith("row 3: http")
    assert "404" in problems[1]


def test_existing_videos_are_kept(hub: Hub, tmp_path: Path) -> None:
    video = tmp_path / "videophy2_val" / "media" / "video_0.mp4"
    video.parent.mkdir(parents=True)
    video.write_bytes(b"mine")
    fetch_split("val", tmp_path, allow_private=True, limit=1)
    assert video.read_bytes() == b"mine"
    assert [name for name, _ in hub.ranges] == ["videophy2_test.csv"]


def test_adapter_reads_the_result(hub: Hub, tmp_path: Path) -> None:
    folder = fetch_split("val", tmp_path, allow_private=True).folder
    sample = open_source(SourceConfig(adapter="conversation_files", path=str(folder))).sample(0)
    assert (sample.id, sample.answer) == ("0", "5")
    assert sample.messages[0]["content"] == [
        {"type": "video", "video": str(folder / "media" / "video_0.mp4")},
        {"type": "text", "text": PROMPT},
    ]


def test_private_host_is_not_contacted(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of 3 videos is available: row 4"):
        fetch_split("val", tmp_path)
    assert not (tmp_path / "videophy2_val" / "meta.json").exists()


def test_split_with_two_tables_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.files["other.csv"] = b"a\n1\n"
    with pytest.raises(DataError, match="has 2 CSV files"):
        fetch_split("val", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("url,pc\nx,1\n", "has no column video_url; its columns: url, pc"),
        ("", "its columns: none"),
        ('a,"b', "is not a CSV"),
    ],
)
def test_unusable_table_is_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_table(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("text", "score"), [("4", 4), ("1.0", 1), ("4.5", None), ("0", None), ("6", None), ("", None), ("high", None)]
)
def test_only_integer_scores_are_read(text: str, score: int | None) -> None:
    assert read_score(text) == score


def call(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["dsreason", "data", "fetch-videophy2", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    return int(caught.value.code or 0)


def test_command_reports_rows_and_exit_code(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--split", "val", "--data-dir", str(tmp_path), "--allow-private-urls"]
    assert call(*options, monkeypatch=monkeypatch) == 1
    printed = capsys.readouterr()
    assert f"{tmp_path}/videophy2_val: 2 rows, 2 left out; columns not used: caption, sa" in printed.err
    assert call(*options, "--allow-missing", monkeypatch=monkeypatch) == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file both set the question"),
        (["--repo", "a/b"], "--repo a/b applies to a single split"),
        (["--prompt", " "], "the question is empty"),
        (["--prompt-file", "gone.txt"], "--prompt-file gone.txt: cannot be read"),
    ],
)
def test_contradictory_options_are_refused(
    options: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*options, monkeypatch=monkeypatch) == 2
    assert text in capsys.readouterr().err
