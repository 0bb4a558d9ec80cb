"""The command line: its imports, options, errors and exit codes. No test starts a rank."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsreason import __version__
from dsreason.cli import demo, job, main, sft
from dsreason.config.load import load_config
from dsreason.config.schema import SFTConfig
from dsreason.errors import DataError
from dsreason.imports import make_imports_fast
from dsreason.job import launch
from dsreason.monitor.progress import CommandPart, read_part


@pytest.fixture(autouse=True)
def on_a_cpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", launch.ERROR_DIR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(launch, "count_gpus", lambda: 0)
    Path("run.toml").write_text("[train]\nglobal_batch_size = 8")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[SFTConfig]:
    """Configurations that were passed to the checks before the start."""
    recorded: list[SFTConfig] = []
    monkeypatch.setattr(job, "check_job", lambda trainer, config, resume: recorded.append(config))
    return recorded


@pytest.fixture
def started(checked: list[SFTConfig], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record how the ranks would have been started."""
    calls: list[dict[str, Any]] = []

    def start_ranks(arguments: Any, **options: Any) -> None:
        calls.append({"first": arguments(0), "again": arguments(1), **options})

    monkeypatch.setattr(launch, "start_ranks", start_ranks)
    return calls


def call(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `dsreason ARGUMENTS` and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["dsreason", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    return int(caught.value.code or 0)


HEAVY = {
    *("torch", "deepspeed", "vllm", "transformers", "datasets", "numpy", "av", "click", "huggingface_hub", "scipy"),
    *("sklearn", "pandas", "tensorboard", "boto3", "openai", "PIL"),
}


def imported_by(code: str, cwd: Path) -> set[str]:
    """Return the modules that a process has imported after running `code`."""
    code = f"import sys\n{code}\nprint('modules:', *sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(main.__file__).parents[2]), "DS_ACCELERATOR": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cwd, env=environment
    )
    return set(result.stdout.rpartition("modules:")[2].split())


def test_light_commands_import_no_heavy_library(tmp_path: Path) -> None:
    (tmp_path / "misspelt.toml").write_text("[optim]\nlrr = 1\n")
    (tmp_path / "eval.toml").write_text("[model]\npathh = 1\n")
    code = """
from dsreason.cli import main
codes = []
for arguments in ("--version", "--help", "sft --help", "sft --config=misspelt.toml", "grpo --config=missing.toml",
                  "sft --set optim.lr=fast", "eval --config=eval.toml", "sft --ds-config=missing.json"):
    sys.argv = ["dsreason", *arguments.split()]
    try:
        main.main()
    except SystemExit as ended:
        codes.append(ended.code)
assert codes == [0, 0, 0, 2, 2, 2, 2, 2], codes
"""
    assert {name.partition(".")[0] for name in imported_by(code, tmp_path)} & HEAVY == set()


def test_sft_rank_imports_no_unneeded_module(tmp_path: Path) -> None:
    unneeded = {"vllm", "datasets", "matplotlib", "openai", "s3fs", "math_verify", "wandb", "tensorboard"}
    unneeded |= {"torch._inductor.compile_fx", "dsreason.models.tiny", "dsreason.builtin_task.clips"}
    unneeded |= {"sklearn", "pandas", "diffusers", "peft"}
    start = (
        "from dsreason.imports import make_imports_fast\nwith make_imports_fast():\n    import dsreason.train.sft.loop"
    )
    assert imported_by(start, tmp_path) & unneeded == set()


def test_grpo_does_not_import_world_model_libraries(tmp_path: Path) -> None:
    start = (
        "from dsreason.imports import make_imports_fast\nwith make_imports_fast():\n    import dsreason.train.grpo.loop"
    )
    assert imported_by(start, tmp_path) & {"diffusers", "peft", "dsreason.world"} == set()


def test_hidden_modules_can_be_imported_after_start(tmp_path: Path) -> None:
    imports = "from dsreason.imports import make_imports_fast\nwith make_imports_fast():\n"
    code = f"{imports}    import transformers.generation\nimport sklearn"
    assert "sklearn" in imported_by(code, tmp_path)


def test_garbage_collector_is_paused_during_imports() -> None:
    with make_imports_fast():
        assert not gc.isenabled()
        cycle: list[object] = []
        cycle.append(cycle)
    assert gc.isenabled()
    assert not any(result is cycle for result in gc.get_objects()), "what was made inside is not looked through again"


def test_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == f"dsreason {__version__}\n"


def test_help_lists_commands_and_hides_local_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--help", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("sft", "export", "demo"))
    assert "local" not in out


@pytest.mark.parametrize("option", ["--local_rank=0", "--local-rank=0"])
def test_local_rank_of_deepspeed_launcher_is_accepted(
    option: str, checked: list[SFTConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(option, "sft", "--config", "run.toml", "--dry-run", monkeypatch=monkeypatch) == 0
    assert len(checked) == 1


@pytest.mark.parametrize(
    "arguments",
    [("sft", "--no-such"), ("sft", "--nproc", "0"), ("sft", "--max-restarts", "-1"), ("nothing",), ("export",)],
)
def test_invalid_option_exits_with_2(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(*arguments, monkeypatch=monkeypatch) == 2


def test_configuration_error_prints_only_its_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("sft", "--config", "run.toml", "--set", "optim.lr=0", monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: --set optim.lr=0: optim.lr: must be greater than 0; got 0\n"


def test_data_error_is_reported_before_the_start(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(trainer: object, config: SFTConfig, resume: str | None) -> None:
        raise DataError("a.jsonl, row 3: video missing.mp4 does not exist; correct the path")

    monkeypatch.setattr(job, "check_job", check)
    assert call("sft", "--config", "run.toml", monkeypatch=monkeypatch) == 2
    assert "error: a.jsonl, row 3: video missing.mp4 does not exist; correct the path\n" in capsys.readouterr().err
    assert started == []


def test_full_disk_is_reported_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(trainer: object, config: SFTConfig, resume: str | None) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "out/metrics.jsonl")

    monkeypatch.setattr(job, "check_job", check)
    assert call("sft", "--config", "run.toml", monkeypatch=monkeypatch) == 1
    text = capsys.readouterr().err
    assert "error: out/metrics.jsonl: No space left on device; free disk space" in text
    assert "Traceback" not in text


def test_unexpected_exceptions_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(trainer: object, config: SFTConfig, resume: str | None) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(job, "check_job", check)
    assert call("sft", "--config", "run.toml", monkeypatch=monkeypatch) == 1
    text = capsys.readouterr().err
    assert text.count("Traceback") == 1
    assert text.endswith("ZeroDivisionError: a bug of ours\n")


@pytest.mark.usefixtures("as_rank_1")
def test_failed_rank_leaves_traceback_for_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a separate process: typer installs an exception hook, and output goes to the rank's log."""
    program = (
        "from dsreason.cli import main, sft\n"
        "def run(*given): raise ZeroDivisionError('a bug of ours')\n"
        "sft.TRAINER.run = run\n"
        "main.main()\n"
    )
    monkeypatch.setenv(launch.ERROR_DIR, str(tmp_path))
    monkeypatch.setenv(launch.LOG_DIR, str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", program, "sft", "--config", "run.toml"], check=False)
    assert ended.returncode == 1
    document = json.loads((tmp_path / "rank_1.json").read_text())
    assert document["text"].endswith("ZeroDivisionError: a bug of ours\n")
    assert not document["user_fixable"]
    assert (tmp_path / "rank_1.log").read_text().count("ZeroDivisionError: a bug of ours\n") == 1


def test_dry_run_prints_configuration_and_writes_nothing(
    checked: list[SFTConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("sft", "--config", "run.toml", "--ds-config", "zero2.json", "--set", "optim.lr=1e-3", "--nproc", "2")
    assert call(*arguments, "--output-dir", "out", "--dry-run", monkeypatch=monkeypatch) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["train"]["global_batch_size"] == 8
    assert document["optim"]["lr"] == 1e-3
    assert document["deepspeed"] == "zero2.json"
    assert document["deepspeed_config"]["zero_optimization"]["stage"] == 2
    assert document["deepspeed_config"]["train_batch_size"] == 8
    assert document["output_dir"] == "out"
    assert checked[0].output_dir == "out"
    assert not Path("out").exists()


def test_ranks_share_options_and_output_folder(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("sft", "--config", "run.toml", "--ds-config", "zero2.json", "--set", "optim.lr=1e-3", "--nproc", "2")
    assert call(*arguments, "--max-restarts", "3", monkeypatch=monkeypatch) == 0
    (start,) = started
    python, folder = start["first"][:6], start["first"][6]
    assert python == ["-m", "dsreason", "sft", "--config=run.toml", "--ds-config=zero2.json", "--set=optim.lr=1e-3"]
    assert folder.startswith("--output-dir=outputs/sft-")
    assert start["again"] == [*start["first"], "--resume=auto"]
    assert (start["ranks"], start["max_restarts"]) == (2, 3)
    assert str(start["log_dir"]) == folder.removeprefix("--output-dir=") + "/logs"
    assert f"sft on 2 ranks, output in {start['log_dir'].parent}" in capsys.readouterr().err


def test_early_restart_resumes_from_requested_checkpoint(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("old/checkpoints/step_3").mkdir(parents=True)
    arguments = ("sft", "--config", "run.toml", "--resume", "old/checkpoints/step_3", "--output-dir", "new")
    assert call(*arguments, monkeypatch=monkeypatch) == 0
    assert started[0]["again"][-1] == "--resume=old/checkpoints/step_3"


def test_restart_after_rewinding_ignores_old_checkpoints(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 9):
        Path(f"out/checkpoints/step_{step}").mkdir(parents=True)
        Path(f"out/checkpoints/step_{step}/COMPLETE").write_text("{}")
    arguments = ("sft", "--config", "run.toml", "--resume", "out/checkpoints/step_3", "--output-dir", "out")
    assert call(*arguments, monkeypatch=monkeypatch) == 0
    assert started[0]["again"][-1] == "--resume=out/checkpoints/step_3"


def test_builtin_recipe_runs_without_a_config(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Path("run.toml").absolute()

    def load(
        trainer: str, schema: Any, path: Path | None, overrides: Any, *, default_recipe: str
    ) -> tuple[SFTConfig, None]:
        return load_config(schema, recipe if path is None else path, overrides, default_recipe=default_recipe), None

    monkeypatch.setattr(job, "load_run", load)
    assert call("sft", "--ds-config", "zero3.json", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().err.startswith("no --config: running the built-in recipe builtin_sft.toml\n")
    assert started[0]["ranks"] == 1


def test_more_ranks_than_gpus_are_refused(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "count_gpus", lambda: 2)
    assert call("sft", "--config", "run.toml", "--nproc", "3", monkeypatch=monkeypatch) == 2
    assert "--nproc 3 exceeds the number of GPUs of this machine (2); set it to at most 2" in capsys.readouterr().err
    assert call("sft", "--config", "run.toml", monkeypatch=monkeypatch) == 0
    assert started[0]["ranks"] == 2


def test_output_folder_of_another_run_is_rejected(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out/checkpoints").mkdir(parents=True)
    assert call("sft", "--config", "run.toml", "--output-dir", "out", monkeypatch=monkeypatch) == 2
    assert "error: out already contains a run (checkpoints)" in capsys.readouterr().err
    assert started == []


def test_deepspeed_contradiction_error_names_both_files(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}, "train_batch_size": 64}')
    assert call("sft", "--config", "run.toml", "--ds-config", "ds.json", monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err == (
        "error: ds.json: train_batch_size (64) contradicts run.toml: train.global_batch_size is 8; "
        'set it to "auto" or remove it\n'
    )


@pytest.fixture
def as_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "enter_rank", lambda: None)  # the original would end this process with its parent


@pytest.mark.usefixtures("as_rank_1")
def test_rank_trains_without_starting_more_ranks(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[tuple[SFTConfig, Path | None, str | None]] = []
    monkeypatch.setattr(sft.TRAINER, "run", lambda *given: runs.append(given))
    assert call("sft", "--config", "run.toml", "--output-dir", "out", "--resume", "auto", monkeypatch=monkeypatch) == 0
    assert call("sft", "--config", "run.toml", monkeypatch=monkeypatch) == 0
    assert [(str(folder), resume) for _, folder, resume in runs] == [("out", "auto"), ("None", None)]
    assert runs[0][0].train.global_batch_size == 8
    assert started == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("as_rank_1")
@pytest.mark.parametrize(
    ("option", "text"), [("--nproc", "started 2 ranks"), ("--max-restarts", "does not apply to ranks of a launcher")]
)
def test_launcher_options_are_rejected_under_a_launcher(
    option: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "should_print_error", lambda text: True)
    assert call("sft", "--config", "run.toml", option, "2", monkeypatch=monkeypatch) == 2
    assert text in capsys.readouterr().err


def test_demo_runs_all_stages_and_shows_accuracies(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exported: list[dict[str, Path]] = []

    def evaluate_export(folder: Path) -> Path:
        for part, values in {"sft": (0.0, 0.5), "grpo": (0.5, 0.9375)}.items():
            (folder / part).mkdir(parents=True)
            lines = [{"step": step, "val/accuracy": value, "val/loss": 1.0} for step, value in enumerate(values)]
            (folder / part / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder / "results"

    monkeypatch.setattr(demo, "export", lambda **given: exported.append(given))
    monkeypatch.setattr(demo, "evaluate_export", evaluate_export)
    monkeypatch.setattr(demo, "compute_accuracies", lambda results: {"val/accuracy": 0.875})
    arguments = ("--output-dir", "out", "--nproc", "2", "--set", "model.path=tiny:qwen3_vl")
    assert call("demo", *arguments, monkeypatch=monkeypatch) == 0
    assert [item["first"][2] for item in started] == ["sft", "grpo"]
    assert "--config=builtin_warm_start.toml" in started[0]["first"]
    paths = [[text for text in item["first"] if text.startswith("--set=model.path")] for item in started]
    assert [path[-1] for path in paths] == [
        "--set=model.path=tiny:qwen3_vl",
        '--set=model.path="out/sft/export/final"',
    ]
    assert exported == [{"checkpoint": Path("out/grpo"), "output": Path("out/export")}]
    out = capsys.readouterr().out
    rows = {line.split()[1]: line.split()[3::2] for line in out.splitlines() if line.startswith("│")}
    assert rows == {"all": ["0.0%", "50.0%", "93.8%", "87.5%"]}


def test_demo_announces_stages_with_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = (demo.Stage("SFT", 60, 20), demo.Stage("GRPO", 50, 30), demo.Stage("export", 0, 10))
    parts = []
    for number, spent in ((1, 0), (2, 160), (3, 320)):  # half as fast as planned
        monkeypatch.setattr(demo.time, "monotonic", lambda spent=spent: 1000.0 + spent)
        with demo.announce_stage(number, 1000.0, stages):
            parts.append(read_part())
    assert read_part() is None
    assert capsys.readouterr().err.splitlines() == [
        "1/3 SFT (about 0:02:50 left)",
        "2/3 GRPO (about 0:03:00 left)",
        "3/3 export (about 0:00:20 left)",
    ]
    # 110 s of other work follow the 60 s of SFT's steps, and 40 s follow the 50 s of GRPO's steps.
    assert parts == [CommandPart(1, 3, 1.833), CommandPart(2, 3, 0.8), CommandPart(3, 3, 0.0)]


def test_unmeasured_metrics_have_no_first_value(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 0, "train/loss": 1.0}\n')
    assert demo.read_first_and_last(tmp_path / "m.jsonl", prefix="val/") == ({}, {})


@pytest.mark.parametrize(
    "command",
    [
        *("sft", "grpo", "export", "eval", "score", "infer", "push", "demo"),
        *("data fetch", "data clip", "data inspect", "data validate"),
    ],
)
def test_every_documented_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.app([*command.split(), "--help"])
    assert ended.value.code == 0
    assert "--help" in capsys.readouterr().out
