"""`dsreason reward`: commands that call reward functions without training."""

from __future__ import annotations

import typer

from dsreason.cli.reward.trial import try_rewards

app = typer.Typer(help="Try reward functions without training.", no_args_is_help=True, pretty_exceptions_enable=False)
app.command("try")(try_rewards)


@app.callback()
def keep_group() -> None:
    # With a callback, Typer keeps the name of the only command.
    pass
