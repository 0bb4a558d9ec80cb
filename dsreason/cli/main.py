"""The `dsreason` command, which runs a subcommand and converts a `DsReasonError` to a message and an exit code."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
from typing import Annotated

import typer

from dsreason import __version__
from dsreason.cli import checkpoint, demo, doctor, eval, export, import_, infer, plan, push
from dsreason.cli.data import commands as data
from dsreason.cli.data import unpickle
from dsreason.cli.job import find_trainers
from dsreason.cli.results import report, score
from dsreason.cli.reward import commands as reward
from dsreason.cli.reward import serve
from dsreason.errors import Stopped
from dsreason.job import launch, signals
from dsreason.job.failures import format_crash
from dsreason.screen import print_message, wrap_terminal, write
from dsreason.secrets import HidingFormatter, VisibleRecord
from dsreason.stopping import get_stop_signal

app = typer.Typer(
    help="Train reasoning vision-language models with DeepSpeed ZeRO-3.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for trainer in find_trainers().values():
    app.command(trainer.name, help=trainer.help)(trainer.command())
app.command()(export.export)
app.command("eval")(eval.evaluate)
app.command()(score.score)
app.command()(report.report)
app.command()(infer.infer)
data.app.command()(unpickle.unpickle)
app.add_typer(data.app, name="data")
app.command()(plan.plan)
app.command()(push.push)
app.add_typer(checkpoint.app, name="checkpoint")
app.command()(demo.demo)
app.command()(doctor.doctor)
app.command("import")(import_.import_)
app.add_typer(reward.app, name="reward")
app.command("reward-serve")(serve.reward_serve)


def show_version(requested: bool) -> None:
    if requested:
        print_message(f"dsreason {__version__}")
        raise typer.Exit


@app.callback()
def handle_global_options(
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
    show: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    # The deepspeed launcher inserts --local_rank=N before the subcommand; LOCAL_RANK is used instead.
    pass


def main() -> None:
    wrap_terminal()
    # Mask secrets in log lines and in threads' tracebacks, both before `setup_logs` is called and in commands without ranks.
    assert logging.lastResort is not None
    logging.lastResort.setFormatter(HidingFormatter())
    logging.setLogRecordFactory(VisibleRecord)
    threading.excepthook = lambda raised: write(format_crash(raised.exc_value or raised.exc_type()), file=sys.stderr)
    atexit.register(gc.freeze)  # a garbage collection at exit is useless and takes a second
    try:
        launch.check_rank_variables()
        if launch.is_rank():
            launch.enter_rank()
        else:
            signals.end_at_signals()
        app()
    except signals.Interrupted as stop:
        print_message(f"stopped by {stop}", err=True)
        sys.exit(Stopped.exit_code)
    except Exception as error:  # noqa: BLE001 (an excepthook would be replaced by Typer's own)
        if (name := get_stop_signal()) and not launch.is_rank():  # the error of a rank says what is saved
            print_message(f"stopped by {name}", err=True)
            sys.exit(Stopped.exit_code)
        sys.exit(launch.report(error))
