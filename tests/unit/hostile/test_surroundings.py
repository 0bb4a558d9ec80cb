"""Names that no file can have, a current folder that is gone, variables that hold anything: a sentence and exit code 2."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsreason.checkpoints.export import check_target_empty, parse_size
from dsreason.cli import demo, main
from dsreason.errors import ConfigError, Stopped
from dsreason.files.cache import cache_dir
from dsreason.job import launch
from dsreason.job.failures import Failure, RankError, error_for_people
from dsreason.secrets import VisibleRecord
from dsreason.tools.doctor.network import read_hostfile
from tests.integration.command import COMMAND
from tests.unit.hostile.guard import refused

LONG = "a" * 300


def stopped(text: str) -> RankError:
    return RankError(Failure(0, text, Stopped.exit_code, user_fixable=True, time=0.0))


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*launch.NUMBERS, launch.ERROR_DIR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def call(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["dsreason", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    return int(caught.value.code or 0)


def told(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert sum(line.startswith("error: ") for line in printed.splitlines()) == 1
    return printed


@pytest.mark.parametrize(
    "arguments",
    [
        ("sft", "--output-dir", LONG),
        ("grpo", "--output-dir", LONG),
        ("sft", "--config", f"{LONG}.toml"),
        ("sft", "--ds-config", f"{LONG}.json"),
        ("sft", "--resume", LONG),
        ("sft", "--dry-run", "--set", f"model.path={LONG}"),
        ("sft", "--dry-run", "--set", f"data.adapter={LONG}.py"),
        ("sft", "--dry-run", "--set", "data.adapter=jsonl", "--set", f"data.path={LONG}"),
        ("import", f"{LONG}.toml"),
        ("import", "cosmos.toml", "-o", f"{LONG}.toml"),
        ("plan", "--gpus", "1", "--config", f"{LONG}.toml"),
        ("doctor", "--quick", "--hostfile", LONG),
        ("export", "--checkpoint", LONG, "--output", "x"),
        ("eval", "--model", LONG, "--dataset", "robovqa"),
        ("score", "--results-dir", LONG),
        ("push", LONG, "--to", "s3://bucket/x"),
        ("data", "inspect", "--adapter", "jsonl", "--path", LONG),
    ],
    ids=lambda arguments: " ".join(word.replace(LONG, "LONG") for word in arguments),
)
def test_a_name_that_no_file_can_have_is_a_mistake(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("cosmos.toml").write_text("[policy]\n[custom.dataset]\nannotation_path = 'x.json'")
    assert call(*arguments, monkeypatch=monkeypatch) == 2
    assert "file name too long" in told(capsys).lower()


def call_as_rank(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return call("sft", "--dry-run", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "two"),
        ("RANK", "x"),
        ("RANK", "-1"),
        ("LOCAL_RANK", ""),
        ("MASTER_PORT", "port"),
        ("WORLD_SIZE", "1e3"),
        ("WORLD_SIZE", "1" * 5000),
        ("RANK", "\u0661"),  # 1 in Arabic
        ("LOCAL_WORLD_SIZE", "x"),
    ],
)
def test_a_launchers_variable_that_is_no_number_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert call_as_rank(given | {name: value}, monkeypatch) == 2
    assert f"environment: {name}={value!r:.60}: must be whole numbers" in told(capsys)


@pytest.mark.parametrize(
    ("name", "value", "range_"),
    [
        ("WORLD_SIZE", "0", "1 to 1000000"),
        ("WORLD_SIZE", "100000000", "1 to 1000000"),
        ("RANK", "2", "0 to 1"),
        ("LOCAL_RANK", "1", "0 to 0"),
        ("LOCAL_WORLD_SIZE", "0", "1 to 2"),
        ("LOCAL_SIZE", "3", "1 to 2"),
        ("MASTER_PORT", "0", "1 to 65535"),
        ("MASTER_PORT", "99999", "1 to 65535"),
    ],
)
def test_a_launchers_number_that_does_not_fit_the_others_is_named(
    name: str, value: str, range_: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
    assert call_as_rank(given | {name: value}, monkeypatch) == 2
    assert f"{name}={value}: must be {range_}" in told(capsys)


def test_the_local_size_of_another_launcher_is_of_no_account() -> None:
    given = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_SIZE": "1"}
    assert launch.wrong_numbers(given) == []
    assert launch.wrong_numbers(given | {"WORLD_SIZE": "0"}) == ["WORLD_SIZE=0: must be 1 to 1000000"]


def test_an_error_that_a_library_made_of_a_signal_is_still_that_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imports() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except launch.Interrupted as stop:
            raise ModuleNotFoundError("transformers' words for whatever happens in an import") from stop

    before = [(number, signal.getsignal(number)) for number in launch.ASK_TO_STOP]
    monkeypatch.setattr(launch, "STOPPED_BY", [])
    monkeypatch.setattr(main, "app", imports)
    try:
        assert call(monkeypatch=monkeypatch) == Stopped.exit_code
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert capsys.readouterr().err == "stopped by SIGTERM\n"


def test_a_current_folder_that_is_gone_is_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = here / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        assert call("sft", "--dry-run", monkeypatch=monkeypatch) == 2
        assert "the current folder cannot be used" in told(capsys)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("place", [".", "glibc-hwcaps/x86-64-v3", "tls/x86_64/x86_64", "x86_64"])
@pytest.mark.parametrize(
    ("library", "use"),
    [("libcuda.so.1", "a library of NVIDIA's, which comes with torch, would run"), ("libgcc_s.so.1", "the l")],
)
def test_a_library_in_the_current_folder_is_not_loaded(
    library: str, use: str, place: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / place).mkdir(parents=True, exist_ok=True)
    os.mkfifo(here / place / library)
    assert call("sft", "--dry-run", monkeypatch=monkeypatch) == 2
    assert f"the current folder has {Path(place) / library}, which {use}" in told(capsys)


@pytest.mark.parametrize("home", ["/proc/none", "/dev/null"])
def test_a_home_that_cannot_be_written_is_told_with_what_helps(
    home: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DSREASON_CACHE", "COSMOS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home)
    assert call("sft", "--dry-run", monkeypatch=monkeypatch) in (1, 2)
    assert "set DSREASON_CACHE to another folder" in told(capsys)


def test_a_folder_whose_name_is_no_text_is_refused_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("sft", "--dry-run", "--output-dir", "\udcff", monkeypatch=monkeypatch) == 2
    assert r"\udcff: the name is not UTF-8; choose another folder" in told(capsys)


def test_a_cache_whose_name_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSREASON_CACHE", "\udcff")
    with pytest.raises(ConfigError, match="the name is not UTF-8; choose another folder"):
        cache_dir()


def test_an_export_whose_name_is_no_text_is_refused_before_it_is_written() -> None:
    with pytest.raises(ConfigError, match="the name is not UTF-8"):
        check_target_empty(Path("\udcff"))


@pytest.mark.parametrize("text", ["node-0 slots=" + "9" * 5000, "node-0 slots=-1", "\0", "node-0 slots=\u00b2"])
def test_a_hostfile_that_is_none_is_a_mistake(text: str, here: Path) -> None:
    (here / "hosts").write_text(text)
    refused(lambda: read_hostfile(here / "hosts"), ConfigError, "--hostfile ", "hosts: line 1 is ")
    refused(lambda: read_hostfile(Path("/dev/zero")), ConfigError, "--hostfile /dev/zero: cannot be read (")


def test_records_of_libraries_are_made_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    assert call("--version", monkeypatch=monkeypatch) == 0
    assert logging.getLogRecordFactory() is VisibleRecord


def test_links_in_a_circle_are_a_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").symlink_to("run.toml")
    assert call("sft", "--config", "run.toml", monkeypatch=monkeypatch) == 2
    told(capsys)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *(("DS_ACCELERATOR", value, "must be cpu or cuda") for value in ("", "xyz", "mps", "CPU")),
        *((name, "x", "whole number of seconds") for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")),
        ("GLOO_SOCKET_IFNAME", "nope0", "this machine has no 'nope0', only lo"),
    ],
)
def test_a_variable_that_a_library_would_stumble_over_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, words: str
) -> None:
    monkeypatch.setattr(launch.socket, "if_nameindex", lambda: [(1, "lo")])
    monkeypatch.setenv(name, value)
    assert call("--version", monkeypatch=monkeypatch) == 2
    printed = told(capsys)
    assert name in printed
    assert words in printed


def test_devices_of_this_machine_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert (
        launch.wrong_words({"GLOO_SOCKET_IFNAME": "lo,eth0", "HF_HUB_ETAG_TIMEOUT": "20", "DS_ACCELERATOR": "cuda"})
        == []
    )


@pytest.mark.parametrize("kind", ["file", "FIFO", "link", "open to all"])
def test_what_ranks_share_lies_where_this_user_alone_writes(
    here: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = here / f"dsreason-{os.getuid()}"
    make = {"file": folder.touch, "FIFO": lambda: os.mkfifo(folder), "link": lambda: folder.symlink_to(here)}
    make.get(kind, folder.mkdir)()
    if kind == "open to all":
        folder.chmod(0o777)
    monkeypatch.setattr(launch.tempfile, "gettempdir", lambda: str(here))
    refused(lambda: launch.shared_file("x"), ConfigError, f"{folder}: is no folder that this user alone can write to")


@pytest.mark.parametrize("ranks", [65 + 4 * 10**4, 10**21])
def test_more_ranks_than_any_machine_has_are_refused(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 8)
    for nproc, on_cpu in ((ranks, 1), (None, ranks)):
        with pytest.raises(ConfigError, match=rf"{ranks} ranks are more than this machine can have \(at most 64\)"):
            launch.rank_count(nproc, 0, on_cpu=on_cpu)
    assert launch.rank_count(64, 0) == 64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sft", "--nproc", "9" * 20), "--nproc"),
        (("eval", "--model", "m", "--data", "x", "--tensor-parallel-size", "9" * 11), "--tensor-parallel-size"),
        (("sft", "--set", "monitor.phase_time_limit=1e308"), "monitor.phase_time_limit"),
        (("sft", "--set", "monitor.phase_time_limits={step=1e308}"), "monitor.phase_time_limits"),
        (("sft", "--set", "data.prefetch=9007199254740992"), "data.prefetch"),
        (("sft", "--set", "data.workers=10000000"), "data.workers"),
        (("grpo", "--set", "rollout.tensor_parallel_size=1000000"), "rollout.tensor_parallel_size"),
        (("sft", "--set", 'output_dir="a\\u0000b"'), "NUL"),
        (("eval", "--data", "rows.pkl", "--server", "http://127.0.0.1:1/?a=b"), "server.url"),
        (("eval", "--data", "rows.pkl", "--server", "http://127.0.0.1:1/v1#c"), "server.url"),
        (
            ("eval", "--data", "rows.pkl", "--server", "http://127.0.0.1:1", "--results-dir", "rows.pkl"),
            "is a file, not",
        ),
        (("eval", "--data", "rows.pkl", "--set", 'results_dir=""'), "results_dir"),
        (("data", "inspect", "--path", "rows.pkl", "--output", "rows.pkl"), "rows.pkl is a file, not a folder"),
        (("export", "--checkpoint", "x", "--output", "rows.pkl/x"), "is a file, not a folder; choose another --output"),
        (("demo", "--output-dir", "."), ".: is not empty; choose another --output-dir"),
        (("demo", "--output-dir", "d", "--set", "optim"), "optim"),
        (("demo", "--output-dir", "d", "--set", "grpo.betta=1"), "grpo.betta"),
        (("demo", "--world", "--output-dir", "d", "--set", "world.algoritm=1"), "world.algoritm"),
        (("data", "unpickle", "rows.pkl", "--output", "rows.pkl"), "--output rows.pkl"),
        (("data", "unpickle", "rows.pkl", "--output", "/dev/null/x"), "--output /dev/null/x"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_a_value_beyond_all_bounds_is_refused_by_its_name(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    (here / "rows.pkl").write_bytes(pickle.dumps([1]))
    assert call(*arguments, monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ("sft", "--output-dir", ""),
        ("sft", "--output-dir="),
        ("sft", "--resume", "", "--dry-run"),
        ("sft", "--ds-config="),
        ("eval", "--results-dir", "", "--model", "m"),
        ("score", "--results-dir="),
        ("import", "x.toml", "-o", ""),
        ("doctor", "--hostfile", ""),
        ("infer", "--prompt", ""),
    ],
    ids=" ".join,
)
def test_an_option_without_a_value_is_not_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    option = next(one for one in reversed(arguments) if one.startswith("-") and one not in ("--model", "--dry-run"))
    assert call(*arguments, monkeypatch=monkeypatch) == 2
    assert f"error: {option.rstrip('=')}: its value is empty; give one" in told(capsys)


def test_values_that_may_be_empty_or_end_in_a_sign_are_taken() -> None:
    main.check_arguments(
        ["dsreason", "infer", "--system", "", "--media-path=", "--set=data.path=", "--prompt", "--answer="]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("sft", "--config", "ODD"),
        ("sft", "--dry-run", "--ds-config", "ODD"),
        ("sft", "--dry-run", "--set", "data.adapter=jsonl", "--set", "data.path=ODD"),
        ("sft", "--dry-run", "--set", "data.adapter=ODD.py"),
        ("grpo", "--dry-run", "--set", "reward.functions={'ODD.py:f'=1}"),
        ("world", "--dry-run", "--set", "data.format=prompts", "--set", "data.path=ODD"),
        ("import", "ODD"),
        ("data", "unpickle", "ODD", "--output", "x"),
        ("eval", "--model", "m", "--data", "ODD"),
        ("reward-serve", "ODD.py"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("kind", ["device", "FIFO"])
def test_what_is_no_file_is_told_as_what_it_is(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    kind: str,
) -> None:
    for name in ("ODD", "ODD.py"):
        (here / name).symlink_to("/dev/zero") if kind == "device" else os.mkfifo(here / name)
    assert call(*arguments, monkeypatch=monkeypatch) in (2, 3)
    assert f"is a {kind}, not a file" in told(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ("sft", "--dry-run", "--set", "data.adapter=ex.py"),
        ("grpo", "--dry-run", "--set", "reward.functions={'ex.py:f'=1}"),
        ("world", "--dry-run", "--set", "reward.functions={'ex.py:f'=1}"),
        ("data", "validate", "--set", "data.adapter=ex.py"),
        ("data", "inspect", "--adapter", "ex.py"),
        ("eval", "--model", "tiny:qwen3_vl", "--adapter", "ex.py"),
        ("reward-serve", "ex.py"),
    ],
    ids=" ".join,
)
def test_code_that_ends_the_program_is_no_success(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    (here / "ex.py").write_text("import sys\nsys.exit(0)\n")
    assert call(*arguments, monkeypatch=monkeypatch) == 2
    assert "ex.py does not import: it ends the program" in told(capsys)


def library_that_reads(variable: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> ValueError:
    """What is raised when a module is imported that takes a number from the environment."""
    (here / "library.py").write_text(f"import os\nint(os.environ['{variable}'])\n")
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "library", raising=False)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        importlib.import_module("library")
    return caught.value


def test_a_value_that_a_library_cannot_read_when_it_is_imported_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBRARY_SIZE", "n1")
    told = error_for_people(library_that_reads("LIBRARY_SIZE", here, monkeypatch))
    assert isinstance(told, ConfigError)
    assert str(told).startswith("environment: LIBRARY_SIZE: ")
    assert str(told).endswith(
        "library.py cannot read that (invalid literal for int() with base 10: 'n1'); correct or unset it"
    )


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"LOCAL_RANK": "1"}, "not enough values to unpack (expected 2, got 1)"),
        ({"COLUMNS": "96"}, "numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header"),
        ({"USER": "default"}, "mutable default <class 'list'> for field a is not allowed: use default_factory"),
        ({"EMPTY": ""}, "could not convert string to float: ''"),
    ],
)
def test_an_error_that_does_not_quote_a_variable_is_a_bug(
    here: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], error: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (here / "library.py").write_text(f"raise ValueError({error!r})\n")
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "library", raising=False)
    with pytest.raises(ValueError, match=re.escape(error)) as caught:
        importlib.import_module("library")
    assert error_for_people(caught.value) is caught.value


def test_a_variable_with_a_secret_is_named_without_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cr3t" * 10)
    told = str(error_for_people(library_that_reads("MY_KEY", here, monkeypatch)))
    assert "s3cr3t" not in told


def test_an_error_in_a_library_that_shows_no_variable_is_one_still(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBRARY_SIZE", "n1")
    error = library_that_reads("LIBRARY_SIZE", here, monkeypatch)
    monkeypatch.setenv("LIBRARY_SIZE", "1")
    assert error_for_people(error) is error
    outside = ValueError("invalid literal for int() with base 10: '1'")
    assert error_for_people(outside) is outside


@pytest.mark.parametrize("variable", ["TQDM_MININTERVAL", "SOURCE_DATE_EPOCH", "TORCH_LOGS"])
def test_commands_name_the_variable_that_a_library_stumbles_over(here: Path, variable: str) -> None:
    ended = subprocess.run(
        [*COMMAND, "sft", "--dry-run"],
        cwd=here,
        capture_output=True,
        text=True,
        env=os.environ | {variable: "nonsense"},
    )
    assert ended.returncode == 2
    assert f"error: environment: {variable}: " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (launch.Interrupted("SIGINT"), "SIGINT; what"),
        (launch.Interrupted("SIGINT; no step was under way, and --resume auto continues"), "SIGINT; what"),
        (
            stopped("stopped by SIGINT after step 3, which is saved; --resume auto continues there"),
            "stopped by SIGINT after",
        ),
    ],
)
def test_a_stop_of_the_demo_gives_no_advice_that_it_cannot_follow(raised: BaseException, told: str) -> None:
    with pytest.raises((launch.Interrupted, Stopped)) as caught, demo.told_of_the_demo(Path("d")):
        raise raised
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith("; what was written is in d, and the next demo begins anew")
    assert "--resume" not in str(caught.value)


@pytest.mark.parametrize("digits", ["9" * 400, "1." + "9" * 400])
def test_a_size_of_countless_digits_is_none(digits: str) -> None:
    with pytest.raises(ConfigError, match="is not a size; write 500MB or 4GB"):
        parse_size(f"{digits}GB")


@pytest.mark.parametrize("number", launch.ASK_TO_STOP)
def test_a_reward_server_ends_at_every_signal(here: Path, number: signal.Signals) -> None:
    (here / "rewards.py").write_text("def zero(clips, samples):\n    return [0.0] * len(samples)\n")
    with subprocess.Popen(
        [*COMMAND, "reward-serve", "rewards.py", "--port", "0"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("serving zero at")
        server.send_signal(number)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 0
    assert errors.splitlines()[-1] == "the server has ended"
