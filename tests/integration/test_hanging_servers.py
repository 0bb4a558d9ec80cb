"""A stop signal while a run waits for a server: at its start, in a step, and in a validation."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from dsreason.train.common.run import UNVALIDATED
from tests.integration.command import COMMAND, metrics
from tests.integration.test_distillation import RUN as GRPO
from tests.integration.test_world import RUN as WORLD
from tests.quiet_server import QuietServer

pytestmark = pytest.mark.integration

STOPPED = 75
PATIENCE = 5.0
"""Seconds within which the tiny model must be saved after the signal. It takes a fraction of one."""
EXIT = 15.0
"""Seconds within which the processes must then have ended, on a busy machine."""


class Server(QuietServer):
    """A teacher, judge, reward server and reward service that answers a number of POST requests and then hangs.

    It hangs `before the answer`, `during the answer`, or `after the answer`, which asks the client to try again later.
    """

    daemon_threads = True
    phase = "before the answer"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.num_answers = 0
        self.hangs, self.over = threading.Event(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.num_answers -= 1
        if self.server.num_answers < 0:
            self.server.hangs.set()
            self.hang()
            return
        self.respond(200, json.dumps(self.answer(body)).encode())

    def hang(self) -> None:
        if self.server.phase == "during the answer":
            self.respond(200, b"{", missing_bytes=99)
        if self.server.phase == "after the answer":
            self.respond(503, b"{}")
        else:
            self.server.over.wait()

    def respond(self, status: int, content: bytes, missing_bytes: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) + missing_bytes))
        self.send_header("Retry-After", "30")
        self.end_headers()
        self.wfile.write(content)

    def answer(self, body: bytes) -> dict[str, Any]:
        if self.path.endswith("/enqueue"):
            return {"uuid": "job"}
        if self.path.endswith("/pull"):
            return {"scores": {"k": [0.5]}}
        if self.path.endswith("/scores"):
            return {"scores": {"s": [0.5] * len(json.loads(body)["completions"])}}
        if self.path.endswith("/chat/completions"):
            return {"choices": [{"message": {"content": '{"score": 3}'}}]}
        logprobs = [None, *({str(number): {"logprob": -1.0}} for number in json.loads(body)["prompt"][1:])]
        return {"choices": [{"prompt_logprobs": logprobs}]}

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def run_until_stopped(server: Server, folder: Path, *arguments: str) -> str:
    """Run a command, send it SIGTERM when the server hangs, and return what it says at the end."""
    command = [*COMMAND, *arguments, "--config", "run.toml", "--output-dir", "run"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    while not server.hangs.wait(0.1):
        assert process.poll() is None, process.stderr and process.stderr.read()
    time.sleep(1)  # so that all ranks wait: for the server, or for a rank that does
    process.send_signal(signal.SIGTERM)
    started = time.time()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == STOPPED, stderr
    assert time.time() - started < EXIT
    assert all(file.stat().st_mtime - started < PATIENCE for file in folder.glob("run/checkpoints/*/COMPLETE"))
    assert "Traceback" not in stderr
    assert stderr.count("stopped by") == 1
    return stderr.strip().splitlines()[-1]


@pytest.fixture
def grpo(tmp_path: Path, tiny_qwen3_vl: Path, server: Server) -> Callable[..., str]:
    rows = tmp_path / "data" / "rows.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(8)))
    config = GRPO.format(folder=tmp_path).replace(f'"{tmp_path}/student"', json.dumps(str(tiny_qwen3_vl)))
    config = config.replace(f'teacher = "{tmp_path}/teacher"', f'teacher = "{server.url}/v1"\nserver_model = "m"')
    config = config.replace("optimizer_steps_per_rollout = 2", "").replace("every = 2", "every = 0")
    (tmp_path / "run.toml").write_text(config)
    return lambda *options: run_until_stopped(server, tmp_path, "grpo", "--nproc", "1", *options)


STEP, VALIDATION = "a step", "the validation"
long = pytest.mark.long


@pytest.mark.parametrize(
    ("partner", "place", "phase"),
    [
        ("judge", STEP, "during the answer"),
        ("server", VALIDATION, "before the answer"),
        pytest.param("judge", VALIDATION, "after the answer", marks=long),
        pytest.param("judge", VALIDATION, "before the answer", marks=long),
        pytest.param("server", STEP, "after the answer", marks=long),
        pytest.param("server", STEP, "during the answer", marks=long),
    ],
)
def test_signal_while_reward_hangs_saves_last_step(
    server: Server, grpo: Callable[..., str], tmp_path: Path, partner: str, place: str, phase: str
) -> None:
    reward, option, requests_per_step = {
        "judge": ("judge", f'reward.options={{judge={{url="{server.url}/v1", model="m"}}}}', 4),
        "server": ("remote:s", f'reward.remote.url="{server.url}/scores"', 1),
    }[partner]
    server.phase = phase
    server.num_answers = requests_per_step
    validation = ("data.validation=1", "validation.generate=true", "validation.every=1")
    changes = (
        "distill={}",
        "grpo.num_generations=2",
        "grpo.prompts_per_step=2",
        f'reward.functions={{"{reward}"=1.0}}',
    )
    changes += (option, "reward.workers=1", *(validation if place == VALIDATION else ()))
    last = grpo(*(f"--set={change}" for change in changes))
    assert last == "stopped by SIGTERM after step 1, which is saved; continue with --resume auto"
    assert (tmp_path / "run/checkpoints/step_1/COMPLETE").exists()
    saved = json.loads((tmp_path / "run/checkpoints/step_1/trainer_state.json").read_text())
    assert saved["state"]["extra"].get(UNVALIDATED, False) is (place == VALIDATION)


@long
def test_signal_ends_start_while_teacher_hangs(server: Server, grpo: Callable[..., str]) -> None:
    assert grpo() == "stopped by SIGTERM"


@long
def test_signal_while_teacher_hangs_saves_last_step(server: Server, grpo: Callable[..., str], tmp_path: Path) -> None:
    server.num_answers = 1 + 4  # the check at the start, and the completions of the first step
    assert grpo() == "stopped by SIGTERM after step 1, which is saved; continue with --resume auto"
    assert (tmp_path / "run/checkpoints/step_1/COMPLETE").exists()


@long
def test_signal_while_service_hangs_in_validation(server: Server, tmp_path: Path) -> None:
    services = (
        f'[reward]\nenqueue_url = "{server.url}/enqueue"\nfetch_url = "{server.url}/pull"\n'
        'services = [{ name = "s", score_key = "k", weight = 1.0 }]\n'
    )
    config = WORLD.replace("[reward.functions]\nbrightness = 1.0\n", services)
    config = config.replace("max_steps = 4", "max_steps = 1").replace("micro_batch_size = 2", "micro_batch_size = 1")
    config = config.replace("max_samples = 3", "max_samples = 3\nbefore_training = false")
    (tmp_path / "run.toml").write_text(config)
    server.num_answers = 6 * 2  # the clips of the step, each enqueued and pulled
    last = run_until_stopped(server, tmp_path, "world", "--nproc", "2")
    assert last == "stopped by SIGTERM after step 1, which is saved; continue with --resume auto"
    assert (tmp_path / "run/checkpoints/step_1/COMPLETE").exists()
    assert not any("val/reward/mean" in line for line in metrics(tmp_path / "run"))

    server.num_answers = 1000
    command = [*COMMAND, "world", "--config", "run.toml", "--output-dir", "run", "--nproc", "2", "--resume", "auto"]
    resumed = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    assert [line["val/reward/mean"] for line in metrics(tmp_path / "run") if "val/reward/mean" in line] == [0.5]
