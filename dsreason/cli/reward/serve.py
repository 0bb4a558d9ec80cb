"""`dsreason reward-serve`: a server that scores clips for trainers on other machines, as cosmos-rl's reward service does."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from dsreason.errors import ConfigError
from dsreason.imports import make_imports_fast
from dsreason.job import launch, signals
from dsreason.screen import print_message
from dsreason.secrets import HidingFormatter, add_secret_variable
from dsreason.user_code import restore_script_folders

if TYPE_CHECKING:
    import torch

    from dsreason.world.rewards.server import RewardHTTPServer

GIB = 2**30


def reward_serve(
    functions: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Python file with functions fn(clips, samples); append :name to serve only that one."
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8080,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the token that clients must send.")
    ] = None,
    vae: Annotated[
        Path | None, typer.Option(help="Model folder whose VAE decodes latents; without it, only pixels are accepted.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the VAE: cpu, cuda, cuda:1 …")] = "cpu",
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Maximum number of requests in the queue; additional ones must wait.")
    ] = 60,
    max_body: Annotated[float, typer.Option(min=0.001, help="Maximum size of a request, in GiB.")] = 4.0,
    max_queue: Annotated[
        float, typer.Option(min=0.001, help="Maximum total size of the requests in the queue, in GiB.")
    ] = 16.0,
) -> None:
    """Serve reward functions to trainers on other machines until SIGTERM or Ctrl-C.

    Each public function of the file is a reward of the same name. The protocol is that of cosmos-rl's reward service.
    """
    token = read_token(token_env)
    launch.prepare_environment()
    restore_script_folders()  # for processes that the functions start
    show_logs()
    try:
        with make_imports_fast():
            from dsreason.world.rewards.jobs import find_functions
            from dsreason.world.rewards.server import Limits, RewardHTTPServer
    except ImportError as error:
        raise ConfigError(
            f"reward-serve needs fastapi and uvicorn ({error}); install them: pip install 'dsreason[world]'"
        ) from error
    served = find_functions(functions)
    decoder = None
    if vae is not None:
        import torch

        from dsreason.world.models import load_vae

        decoder = load_vae(vae, find_device(device), torch.float32)
    limits = Limits(max_waiting, int(max_body * GIB), int(max(max_queue, max_body) * GIB))
    try:
        server = RewardHTTPServer((host, port), served, token=token, decoder=decoder, limits=limits)
    except OSError as error:
        raise ConfigError(
            f"reward-serve: cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from error
    stop = watch_stop_signals()
    print_message(f"serving {', '.join(served)} at {server.url}enqueue and {server.url}pull")
    if token is None and host not in ("127.0.0.1", "localhost", "::1"):
        print_message(
            "warning: anyone who can reach this server can use it; require a token with --token-env NAME", err=True
        )
    serve(server, stop)


def find_device(name: str) -> torch.device:
    """Return the device; raise ConfigError if this machine lacks it or cannot allocate a tensor on it."""
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"reward-serve: --device {name!r} cannot be used: {reason:.200}; use cpu, cuda or a device such as cuda:1"
        ) from error
    return device


def show_logs() -> None:
    """Print log lines to stderr, with secrets masked."""
    handler = logging.StreamHandler()
    handler.setFormatter(HidingFormatter("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def read_token(variable: str | None) -> str | None:
    if variable is None:
        return None
    add_secret_variable(variable)
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"--token-env {variable}: the environment variable is unset or empty; set it")
    return token


def watch_stop_signals() -> threading.Event:
    """Return an event that is set when the process receives a stop signal."""
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in signals.select_not_ignored(signals.ASK_TO_STOP):
        signal.signal(number, end)
    return stop


def serve(server: RewardHTTPServer, stop: threading.Event) -> None:
    """Run the server until `stop` is set, without waiting for scores that are still being computed."""

    def run() -> None:
        try:
            server.run()
        finally:
            stop.set()

    thread = threading.Thread(target=run, name="reward server")
    thread.start()
    stop.wait()
    server.stop()
    thread.join()
    print_message("the server has stopped", err=True)
