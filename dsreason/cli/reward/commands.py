"""`dsreason reward`: commands that call reward functions without training."""

from __future__ import annotations

import typer

from dsreason.cli.reward.trial import try_rewards

app = typer.Typer(help="Try reward functions without training.", no_args_is_help=True, pretty_exceptions_enable=False)
app.command("try")(try_rewards)


@app.callback()
def keep_group() -> None:
    # Without a callback, Typer would drop the name of the subcommand, because there is only one.
    pass
