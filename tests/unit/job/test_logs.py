import os
import subprocess
import sys
from pathlib import Path

TOKEN = "hf_sentinel"
PROGRAM = """
import logging, os, sys, threading, warnings
from pathlib import Path
from dsreason.job.launch import report
from dsreason.job.logs import set_step, setup_logs

noisy = logging.getLogger("DeepSpeed")
noisy.propagate = False
noisy.addHandler(logging.StreamHandler(sys.stdout))

setup_logs(Path(sys.argv[1]), rank=int(sys.argv[2]))
ours = logging.getLogger("dsreason.train")
ours.info("before the loop")
set_step(7)
noisy.info("engine details")
noisy.warning("library warning")
warnings.simplefilter("always")
for _ in range(3):
    warnings.warn("deprecated thing")
ours.error("our error")
thread = threading.Thread(target=lambda: {}["thread key"])
thread.start()
thread.join()
ours.warning("a log line with %s", os.environ["HF_TOKEN"])
thread = threading.Thread(target=lambda: {}[os.environ["HF_TOKEN"]])
thread.start()
thread.join()
try:
    raise RuntimeError("a traceback with " + os.environ["HF_TOKEN"])
except RuntimeError:
    ours.exception("caught")
try:
    raise RuntimeError("the end with " + os.environ["HF_TOKEN"])
except RuntimeError as error:
    sys.exit(report(error))
"""


def run_program(folder: Path, rank: int) -> tuple[str, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(rank)],
        env=os.environ | {"HF_TOKEN": TOKEN},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    return done.stdout, done.stderr, (folder / "logs" / f"rank_{rank}.log").read_text()


def test_log_file_records_rank_and_step(tmp_path: Path) -> None:
    _, _, file = run_program(tmp_path, rank=1)
    assert " rank 1 INFO dsreason.train: before the loop" in file
    assert " rank 1 step 7 INFO DeepSpeed: engine details" in file
    assert file.count("UserWarning: deprecated thing") == 1  # not once per step
    assert "uncaught exception in thread Thread-1" in file
    assert "KeyError: 'thread key'" in file
    assert "uncaught RuntimeError" in file
    assert file.rstrip().endswith("RuntimeError: the end with <HF_TOKEN>")


def test_rank_0_shows_own_lines_and_warnings(tmp_path: Path) -> None:
    stdout, stderr, _ = run_program(tmp_path, rank=0)
    assert stdout == ""
    assert "before the loop" in stderr
    assert "library warning" in stderr
    assert "engine details" not in stderr
    assert "deprecated thing" not in stderr
    assert stderr.count("RuntimeError: the end with <HF_TOKEN>") == 1


def test_other_ranks_show_only_errors(tmp_path: Path) -> None:
    _, stderr, _ = run_program(tmp_path, rank=1)
    assert "our error" in stderr
    assert "before the loop" not in stderr
    assert "library warning" not in stderr
    assert "RuntimeError: the end with <HF_TOKEN>" in stderr


def test_log_lines_and_tracebacks_hide_tokens(tmp_path: Path) -> None:
    for message in run_program(tmp_path, rank=0):
        assert TOKEN not in message
    assert "a log line with <HF_TOKEN>" in message
    assert "a traceback with <HF_TOKEN>" in message
