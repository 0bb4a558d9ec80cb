"""The `dsreason data …` commands: their files, output and exit codes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from dsreason.cli.data.commands import app
from dsreason.errors import ConfigError, DataError
from dsreason.files.lock import hold_folder
from dsreason.monitor import progress
from dsreason.tools.datasets import raw
from tests.unit.media.videos import write_video
from tests.unit.tools.datasets.hub import Hub
from tests.unit.tools.datasets.test_raw import tar_of

CLIP = "327-648642-head-3-8"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    questions = {"question": "Which?", "index2ans": {"A": "a", "B": "b"}, "answer": "B"}
    rows = json.dumps([{"video": f"clips/{CLIP}.mp4", "qa_pairs": questions}]).encode()
    files = {f"{name}/{name}_benchmark_qa_pairs.json": rows for name in ("agibot", "av")}
    with Hub("nvidia/Cosmos-Reason1-Benchmark", files) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield served


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def error_of(result: Result, kind: type[Exception]) -> str:
    assert isinstance(result.exception, kind), result.output
    return str(result.exception)


def write_rows(*rows: dict[str, str], model: Path | str = "tiny:qwen2_5_vl", more: str = "") -> None:
    Image.new("RGB", (56, 56)).save("a.png")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.toml").write_text(f'{more}\n[data]\nadapter = "jsonl"\npath = "rows.jsonl"\n[model]\npath = "{model}"\n')


GOOD = {"id": "0", "image": "a.png", "question": "What?", "answer": "a"}
GONE = {**GOOD, "id": "1", "image": "gone.png"}


# ---------------------------------------------------------------- fetch and clip


def test_fetch_reports_files_and_clips_to_cut(hub: Hub) -> None:
    result = call("fetch")
    assert result.exit_code == 0, result.output
    assert "nvidia/Cosmos-Reason1-Benchmark at aaaaaaaaaaaa → data/benchmark: 2 of 2 files to fetch" in result.output
    assert "agibot: its clips are not on the Hub" in result.output
    options = "--dataset agibot --task benchmark --data-dir data"
    assert f"dsreason data fetch --raw {options}, then dsreason data clip {options}" in result.output
    assert "av: the repository does not contain its clips" in result.output
    assert "hf_secret" not in result.output
    assert Path("data/benchmark/av/av_benchmark_qa_pairs.json").is_file()


def test_dry_run_lists_files_without_fetching(hub: Hub) -> None:
    result = call("fetch", "--dry-run", "--dataset", "av")
    assert result.exit_code == 0
    assert "av/av_benchmark_qa_pairs.json" in result.output and "agibot" not in result.output
    assert not Path("data").exists()


def test_repository_option_requires_a_single_task() -> None:
    result = call("fetch", "--repo", "a/b", "--task", "sft", "--task", "rl")
    assert "--repo a/b applies to a single --task" in error_of(result, ConfigError)


@pytest.mark.parametrize("arguments", [["--dataset", "robovq"], ["--task", "train"]])
def test_unknown_dataset_or_task_exits_with_2(arguments: list[str]) -> None:
    assert call("fetch", *arguments).exit_code == 2


def test_fetched_videos_are_cut_and_inspected(hub: Hub) -> None:
    assert call("fetch", "--dataset", "agibot").exit_code == 0
    missing = call("clip", "--dataset", "agibot", "--raw", ".", "--workers", "0")
    assert missing.exit_code == 1
    assert (
        f"{CLIP}: its raw video was not found at any of the 40 paths tried (for example, observations/327/648642/videos/head.mp4)"
        in missing.stdout
    )
    assert "0 cut, 0 already present, 1 without a raw video, 0 failed" in missing.stderr
    assert call("clip", "--dataset", "agibot", "--raw", ".", "--workers", "0", "--allow-missing").exit_code == 0
    Path("327/648642").mkdir(parents=True)
    write_video(Path("327/648642/head.mp4"), 20)
    cut = call("clip", "--dataset", "agibot", "--raw", ".", "--workers", "0")
    assert cut.exit_code == 0 and "1 cut" in cut.stderr
    rows = "data/benchmark/agibot/agibot_benchmark_qa_pairs.json"
    displayed = call(
        "inspect", "--adapter", "cosmos_reason1_rl", "--path", rows, "--benchmark", "data", "--json", "--workers=0"
    )
    document = json.loads(displayed.stdout)
    assert document["parts"]["training"]["media"]["video"]["seconds"]["max"] == pytest.approx(0.5)
    assert document["parts"]["training"]["letters"]["B"] == {"count": 1, "expected": 0.5}
    assert document["overlaps"] == [{"part": "agibot", "other": "training", "same_rows": 1, "same_media": 1}]


RECORDING = "R1_coarse_0_fine_4"


@pytest.fixture
def holoassist(hub: Hub, folder: Path) -> str:
    """Put annotations on the Hub, and return the URL of a server that offers only the recording R1."""
    rows = [
        {"video": f"clips/{name}.mp4", "qa_pairs": {"question": "?", "answer": "a"}}
        for name in (RECORDING, "R2" + RECORDING[2:])
    ]
    hub.files["holoassist/holoassist_benchmark_qa_pairs.json"] = json.dumps(rows[:1]).encode()
    hub.files["holoassist/more.json"] = json.dumps(rows).encode()
    video = write_video(folder / "made.mp4", 20).read_bytes()
    events = [{"label": "Fine grained action", "id": 4, "start": 0.2, "end": 1.0}]
    hub.plain = {
        "/holo/video_pitch_shifted.tar": tar_of(("R1/Export_py/Video_pitchshift.mp4", video)),
        "/holo/data-annotation-trainval-v1_1.json": json.dumps([{"video_name": "R1", "events": events}]).encode(),
    }
    return f"{hub.address}/holo"


def test_raw_videos_are_fetched_and_cut(holoassist: str) -> None:
    options = ["--dataset", "holoassist", "--file", "*_qa_pairs.json"]
    requested = call("fetch", *options, "--raw", "--raw-from", holoassist, "--dry-run")
    assert "fetch them first, without --raw" in requested.stdout
    fetched = call("fetch", *options, "--raw", "--raw-from", holoassist)
    assert fetched.exit_code == 0, fetched.output
    assert f"1 raw videos to fetch from {holoassist} → data/raw/holoassist, for 1 of 1 clips" in fetched.stdout
    assert "holoassist: next, cut its clips: dsreason data clip --dataset holoassist --task benchmark" in fetched.stdout
    cut = call("clip", "--dataset", "holoassist", "--workers", "0")
    assert cut.exit_code == 0 and "1 cut" in cut.stderr, cut.output
    second = call("fetch", *options, "--raw", "--raw-from", holoassist, "--dry-run")
    assert (
        "0 raw videos to fetch" in second.stdout
        and "manual download: download video_pitch_shifted.tar" in second.stdout
    )


def test_password_in_raw_video_url_is_masked(holoassist: str) -> None:
    place = holoassist.replace("://", "://bob:hunter2hunter@")
    result = call("fetch", "--dataset", "holoassist", "--raw", "--raw-from", place)
    assert "raw videos to fetch from http://…@127.0.0.1" in result.stdout
    assert "its raw video R2 was not found in http://…@" in result.stdout
    assert "hunter2" not in result.output


def test_failing_dataset_does_not_stop_the_others(holoassist: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(raw.ORIGINS, "holoassist", holoassist)
    monkeypatch.setitem(raw.ORIGINS, "agibot", "no/such")
    result = call("fetch", "--dataset", "agibot", "--dataset", "holoassist", "--raw")
    assert "agibot: no/such: " in error_of(result, DataError)
    assert "its raw video R2 was not found in" in result.stdout
    assert Path("data/raw/holoassist/videos/R1/Export_py/Video_pitchshift.mp4").is_file()


def test_suggested_commands_include_repository_and_quoted_paths(hub: Hub) -> None:
    place = ["--data-dir", "my data", "--repo", "nvidia/Cosmos-Reason1-Benchmark", "--revision", "main"]
    result = call("fetch", "--dataset", "agibot", *place)
    options = "--dataset agibot --task benchmark --data-dir 'my data'"
    assert (
        f"dsreason data fetch --raw {options} --repo nvidia/Cosmos-Reason1-Benchmark --revision main, "
        f"then dsreason data clip {options}" in result.stdout
    )


def test_unavailable_raw_videos_exit_with_1(holoassist: str) -> None:
    result = call("fetch", "--dataset", "holoassist", "--raw", "--raw-from", holoassist)
    assert result.exit_code == 1
    assert f"R2_coarse_0_fine_4: its raw video R2 was not found in {holoassist}" in result.stdout
    assert Path("data/raw/holoassist/videos/R1/Export_py/Video_pitchshift.mp4").is_file()


@pytest.mark.parametrize("arguments", [["--dataset", "agibot"], ["--raw"]])
def test_raw_from_requires_raw_and_one_dataset(arguments: list[str]) -> None:
    result = call("fetch", "--raw-from", "a/b", *arguments)
    assert "--raw-from a/b requires --raw and exactly one --dataset" in error_of(result, ConfigError)


def test_allow_missing_does_not_excuse_uncuttable_clips(hub: Hub) -> None:
    assert call("fetch", "--dataset", "agibot").exit_code == 0
    Path("327/648642").mkdir(parents=True)
    write_video(Path("327/648642/head.mp4"), 6)
    result = call("clip", "--dataset", "agibot", "--raw", ".", "--workers", "0", "--allow-missing")
    assert result.exit_code == 1
    assert "has 6 frames, but they do not cover the range 3 to 8 frames" in result.stdout


# ---------------------------------------------------------------- inspect


def test_two_inspections_into_a_folder_are_refused() -> None:
    write_rows(GOOD)
    with hold_folder(Path("out")):
        result = call("inspect", "--config", "run.toml", "--output", "out", "--workers", "0")
    assert isinstance(result.exception, ConfigError)
    assert "out: is in use by process" in str(result.exception)
    assert list(Path("out").iterdir()) == []


def test_inspect_writes_its_files_and_prints_tables() -> None:
    write_rows(GOOD, GONE, {**GOOD, "id": "2"})
    result = call("inspect", "--config", "run.toml", "--output", "out", "--workers", "0")
    assert result.exit_code == 1, result.output
    assert "problems.jsonl lists all 1 problems" in result.stderr
    assert "unusable rows: missing media" in result.stdout
    assert "gone.png" in result.stdout.replace("\n", "")  # a long folder name may wrap the line
    assert sorted(file.name for file in Path("out").iterdir()) == [
        "contact_sheet.png",
        "duplicates.jsonl",
        "inspection.json",
        "problems.jsonl",
    ]
    assert json.loads(Path("out/inspection.json").read_text())["parts"]["training"]["duplicates"] == 1
    assert [json.loads(line)["kind"] for line in Path("out/problems.jsonl").read_text().splitlines()] == [
        "missing media"
    ]


@pytest.mark.parametrize("bad", [GONE, {"id": "1"}, {**GOOD, "image": "broken.png"}])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_inspect_exits_with_1_on_bad_rows(bad: dict[str, str], options: list[str]) -> None:
    write_rows(GOOD, bad)
    Path("broken.png").write_text("not an image")
    result = call("inspect", "--path", "rows.jsonl", "--workers=0", *options)
    assert result.exit_code == 1, result.output
    assert "rows.jsonl, row 2" in result.stdout
    write_rows(GOOD)
    assert call("inspect", "--path", "rows.jsonl", "--workers=0", *options).exit_code == 0


def test_inspect_groups_problems_by_reason() -> None:
    write_rows(*[{**GOOD, "id": str(i), "image": f"gone {i}.png"} for i in range(1, 60)], {"id": "60"})
    result = call("inspect", "--path", "rows.jsonl", "--workers=0")
    printed = result.stdout[result.stdout.index("59 times: missing media: image: no such file: …") :]
    assert re.findall(r"rows\.jsonl, row (\d+)", printed) == ["1", "2", "3", "60"]


def test_inspect_measures_tokens_with_a_model(tiny_qwen2_5_vl: Path) -> None:
    write_rows(GOOD)
    arguments = ["--path", "rows.jsonl", "--model", str(tiny_qwen2_5_vl), "--json", "--workers", "0"]
    part = json.loads(call("inspect", *arguments).stdout)["parts"]["training"]
    assert part["tokens"]["max"] > 4 and part["too_long"] == 0


def test_inspect_reports_pixel_differences_from_cosmos_rl(tiny_qwen2_5_vl: Path) -> None:
    write_rows(GOOD)
    Image.new("RGB", (28, 28)).save("a.png")  # 1 token, fewer than the minimum of 4
    result = call("inspect", "--path", "rows.jsonl", "--model", str(tiny_qwen2_5_vl), "--workers", "0")
    printed = " ".join(result.stdout.split())
    assert "media whose pixels differ from cosmos-rl's" in printed and "1 of 1" in printed
    assert "training: pixels differ:" in printed and "; qwen-vl-utils:" in printed


def test_inspect_reports_label_counts_per_epoch() -> None:
    write_rows(*[{**GOOD, "id": str(i), "answer": "no" if i else "yes"} for i in range(4)])
    by_option = call("inspect", "--path", "rows.jsonl", "--balance", "answer", "--json", "--workers=0")
    assert json.loads(by_option.stdout)["balance"] == {
        "no": {"rows": 3, "per_epoch": 2},
        "yes": {"rows": 1, "per_epoch": 2},
    }
    by_key = call("inspect", "--config", "run.toml", "--set", "data.balance=answer", "--workers=0")
    assert re.search(r"training: data\.balance", by_key.output)
    assert re.search(r"yes\s+│\s+1\s+│\s+2\s+│\s+2\.00 times", by_key.output)


def test_inspect_accepts_rows_without_a_label() -> None:
    write_rows(GOOD, {key: GOOD[key] for key in ("id", "question")})
    result = call("inspect", "--path", "rows.jsonl", "--balance", "answer", "--json", "--workers=0")
    assert json.loads(result.stdout)["balance"] == {"a": {"rows": 1, "per_epoch": 1}}


def test_balance_option_with_config_is_rejected() -> None:
    write_rows(GOOD)
    result = call("inspect", "--config", "run.toml", "--balance", "answer")
    assert "with --config, use --set data.balance=answer" in error_of(result, ConfigError)


def test_set_option_works_with_adapter_options() -> None:
    for name in ("videos", "metas"):
        Path("drive", name).mkdir(parents=True)
    for camera in ("front", "rear"):
        write_video(Path(f"drive/videos/1.{camera}.mp4"))
    Path("drive/metas/1.label.json").write_text("{}")
    options = ["--adapter", "local_labels", "--path", "drive", "--json", "--workers=0"]
    document = json.loads(call("inspect", *options, "--output", "out").stdout)
    assert document["parts"]["training"]["unusable"] == {"other": 1}
    [problem] = map(json.loads, Path("out/problems.jsonl").read_text().splitlines())
    advised = re.search(r'data\.video_pattern, such as "(\S+)"', problem["reason"])
    assert advised
    document = json.loads(call("inspect", *options, "--set", f"data.video_pattern={advised[1]}").stdout)
    assert document["parts"]["training"]["media"]["video"]["files"] == 1


def test_invalid_set_option_is_reported() -> None:
    write_rows(GOOD)
    result = call("inspect", "--path", "rows.jsonl", "--set", "data.balence=answer")
    assert "--set data.balence=answer: data.balence: unknown key" in error_of(result, ConfigError)


def test_missing_balance_labels_are_reported_as_problem() -> None:
    write_rows({**GOOD, "answer": "It turns left at the crossing, then right again."})
    result = call("inspect", "--path", "rows.jsonl", "--balance", "answer", "--output", "out", "--workers=0")
    assert result.exit_code == 0, result.output
    [problem] = map(json.loads, Path("out/problems.jsonl").read_text().splitlines())
    assert problem["kind"] == "no labels" and "no one-line answer of at most 40 characters" in problem["reason"]
    assert problem["reason"].count("data.balance") == 1
    assert "no labels: all rows: data.balance (answer): no row has a usable label" in result.stdout


def test_inspect_measures_rows_without_an_answer(tiny_qwen2_5_vl: Path) -> None:
    write_rows({key: GOOD[key] for key in ("id", "question")})
    arguments = ["--path", "rows.jsonl", "--model", str(tiny_qwen2_5_vl), "--json", "--workers", "0"]
    assert json.loads(call("inspect", *arguments).stdout)["parts"]["training"]["tokens"]["max"] > 4


def test_inspect_compares_with_test_rows() -> None:
    write_rows(GOOD, {**GOOD, "id": "1", "question": "Why?"})
    Path("test.jsonl").write_text(json.dumps({**GOOD, "question": "what"}))
    document = json.loads(
        call("inspect", "--config", "run.toml", "--test", "test.jsonl", "--json", "--workers=0").stdout
    )
    assert document["overlaps"] == [{"part": "test", "other": "training", "same_rows": 1, "same_media": 1}]


@pytest.mark.parametrize("arguments", [[], ["--config", "run.toml", "--path", "rows.jsonl"]])
def test_inspect_takes_a_configuration_or_a_path(arguments: list[str]) -> None:
    write_rows(GOOD)
    assert "either --config, or --path" in error_of(call("inspect", *arguments), ConfigError)


def test_benchmark_folder_without_questions_is_rejected() -> None:
    write_rows(GOOD)
    result = call("inspect", "--config", "run.toml", "--benchmark", ".")
    assert "--benchmark .: contains no <dataset>/<dataset>_benchmark_qa_pairs.json" in error_of(result, ConfigError)


# ---------------------------------------------------------------- validate


def test_validate_exits_with_1_on_bad_rows(tiny_qwen2_5_vl: Path) -> None:
    write_rows(GOOD, GONE, model=tiny_qwen2_5_vl)
    result = call("validate", "--config", "run.toml", "--workers", "0")
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("rows.jsonl, row 2 (sample '1'): image: no such file: ")
    assert "2 rows rendered, of which 1 are unusable" in result.stderr


def test_validate_exits_with_0_for_valid_rows(tiny_qwen2_5_vl: Path) -> None:
    write_rows(GOOD, model=tiny_qwen2_5_vl)
    result = call("validate", "--config", "run.toml", "--workers", "0", "--all")
    assert result.exit_code == 0 and result.stdout == ""


def test_validate_reads_all_sources(tiny_qwen2_5_vl: Path) -> None:
    write_rows(GOOD, GONE)
    source = '[[data.sources]]\nadapter = "jsonl"\npath = "rows.jsonl"\n'
    Path("run.toml").write_text(f'{source}{source}[model]\npath = "{tiny_qwen2_5_vl}"\n')
    result = call("validate", "--config", "run.toml", "--workers", "0")
    assert "4 rows rendered, of which 2 are unusable" in result.stderr


def test_validate_checks_requirements_of_grpo_rewards(tiny_qwen2_5_vl: Path) -> None:
    options = {"A": "left", "B": "right"}
    write_rows(
        {**GOOD, "options": options, "answer": "B"},
        {**GOOD, "options": options, "answer": "C"},
        model=tiny_qwen2_5_vl,
        more="[reward.functions]\nsingle_choice = 1.0",
    )
    result = call("validate", "--config", "run.toml", "--workers", "0")
    assert result.exit_code == 1, result.output
    assert "row 2" in result.stdout and "one of the options A, B" in result.stdout
    assert "2 rows rendered, of which 1" in result.stderr


def test_for_option_overrides_trainer_inferred_from_sections() -> None:
    write_rows(GOOD, more="[reward.functions]\nformat = 1.0")
    assert "reward" in error_of(call("validate", "--config", "run.toml", "--for", "sft"), ConfigError)


def test_validate_all_writes_complete_list(tiny_qwen2_5_vl: Path) -> None:
    write_rows(*[{**GOOD, "id": str(i), "image": f"gone {i}.png"} for i in range(1, 6)], model=tiny_qwen2_5_vl)
    options = ["--config", "run.toml", "--workers=0"]
    result = call("validate", *options)
    assert result.stdout.splitlines()[0] == "5 times: image: no such file: …"
    assert [line.partition(" (")[0] for line in result.stdout.splitlines()[1:]] == [
        f"  rows.jsonl, row {i}" for i in (1, 2, 3)
    ]
    assert "--all lists all of them" in result.stderr and not Path("outputs").exists()
    result = call("validate", *options, "--all", "--limit", "4")
    file = result.stderr.splitlines()[-1].removesuffix(" lists all of them")
    assert [line.partition(" (")[0] for line in Path(file).read_text().splitlines()] == [
        f"rows.jsonl, row {i}" for i in (1, 2, 3, 4)
    ]


def test_missing_data_file_is_reported() -> None:
    write_rows(GOOD)
    Path("rows.jsonl").unlink()
    assert "rows.jsonl" in error_of(call("inspect", "--config", "run.toml"), DataError)


# ---------------------------------------------------------------- progress


def test_progress_lines_report_amount_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 5.0, 20.0, 25.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.track("cutting", 100, "clips") as advance:
        for count in (10, 30, 10):
            advance(count)
    assert capsys.readouterr().err == "cutting: 100 clips\ncutting: 40 of 100, 30 s left\n"


def test_progress_without_work_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.track("cutting", 0, "clips") as advance:
        advance(0)
    assert capsys.readouterr().err == ""
