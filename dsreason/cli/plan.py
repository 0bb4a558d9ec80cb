"""`dsreason plan`: estimate whether a run fits on the GPUs, without needing any GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dsreason.cli.data.chosen_run import choose_trainer, load_run
from dsreason.cli.job import ConfigOption, DeepSpeedOption, SetOption
from dsreason.config.schema import RunConfig
from dsreason.errors import ConfigError
from dsreason.imports import make_imports_fast
from dsreason.job import launch
from dsreason.job.gpu import find_cuda_fault
from dsreason.monitor.console import open_console
from dsreason.screen import print_message, write
from dsreason.tools.cosmos_rl.loading import find_import

if TYPE_CHECKING:
    from dsreason.tools.planning.advice import Suggestion
    from dsreason.tools.planning.duration.estimate import Duration
    from dsreason.tools.planning.duration.rates import Rates
    from dsreason.tools.planning.plan import Plan
    from dsreason.tools.planning.request import Machine

LOG_WIDTH = 120
"""Width of tables, in characters, if the output is not a terminal."""
GPU_MEMORY, MOST_GPU_MEMORY = 80.0, 1e6


def plan(
    config: ConfigOption = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Number of GPUs; default: the number in the cosmos-rl file, or else on this machine."),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(metavar="GB", help="Memory of one GPU in GB; default: that of this machine's GPUs, or else 80."),
    ] = None,
    gpus_per_host: Annotated[int, typer.Option(min=1, help="GPUs per host, to estimate the memory per host.")] = 8,
    ds_config: DeepSpeedOption = None,
    overrides: SetOption = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="COMMAND",
            help="Command that the configuration is for; default: inferred from its sections.",
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="GPU for time estimates, such as h100; default: inferred from the memory.",
        ),
    ] = None,
    network_gbit: Annotated[
        float, typer.Option(min=0.1, help="Network speed per GPU between hosts, in Gbit/s.")
    ] = 400.0,
    tokens_per_sample: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens per sample or prompt, to estimate the time; default: a quarter of model.max_length."
        ),
    ] = None,
    media_share: Annotated[
        float, typer.Option(min=0, max=1, help="Fraction of the tokens in a sample or prompt that are media tokens.")
    ] = 0.5,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of training rows; needed to estimate the training time if train.max_steps is not set."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, in bytes and seconds, instead of tables.")
    ] = False,
) -> None:
    """Estimate the memory of an sft, grpo or dpo run by phase, whether it fits, and how long the run takes.

    Neither GPUs nor weights are needed; the model's config.json is enough. The exit code is 0 if the run fits. If it does
    not, the exit code is 1 and changes are suggested.
    """
    trainer = choose_trainer(config, overrides, command)
    if not issubclass(trainer.schema, RunConfig):
        name = config or "the shipped recipe"
        subject = f"{name}: is" if command is None else f"--for {command}: {name} is read as"
        raise ConfigError(
            f"{subject} a configuration for `dsreason {trainer.name}`, but only sft, grpo and dpo can be planned"
        )
    run = load_run(trainer, config, overrides)
    launch.prepare_environment()
    imported = find_import(config)
    machine = find_machine(gpus or (imported.num_gpus if imported else None), gpu_memory, gpus_per_host)
    with make_imports_fast():
        from dsreason.tools.planning.advice import list_suggestions
        from dsreason.tools.planning.duration.estimate import Load, estimate_duration
        from dsreason.tools.planning.duration.rates import GB
        from dsreason.tools.planning.plan import plan_run
        from dsreason.tools.planning.request import PlanRequest
        from dsreason.train.common.preflight import check_deepspeed

    name = str(config or f"{trainer.recipe} (shipped)")
    run = run.model_copy(update={"deepspeed": ds_config or run.deepspeed})
    request = PlanRequest(trainer.name, run, machine, run.deepspeed, name)
    check_deepspeed(run)
    planned = plan_run(request)
    load = Load(
        tokens_per_sample or max(1, run.model.max_length // 4), media_share, network_gbit / 8 * GB, num_samples=rows
    )
    duration = estimate_duration(planned, find_rates(card, machine), load)
    show(planned, list_suggestions(planned), duration, as_json=as_json)
    if not planned.fits:
        raise typer.Exit(1)


def find_machine(gpus: int | None, gpu_memory: float | None, gpus_per_host: int) -> Machine:
    """Return the machine to plan for; unset options default to this machine's values.

    Raises:
        ConfigError: `gpus` is None and this machine has no GPU, or `gpu_memory` is out of range.
    """
    with make_imports_fast():
        import torch

        from dsreason.tools.planning.phases import GIB
        from dsreason.tools.planning.request import USABLE, Machine

    if gpu_memory is not None and not 1 <= gpu_memory <= MOST_GPU_MEMORY:
        raise ConfigError(f"--gpu-memory ({gpu_memory:g}) must be from 1 to {MOST_GPU_MEMORY:.0f} GB")
    here = launch.count_gpus() if find_cuda_fault() is None else 0
    if gpus is None and here == 0:
        raise ConfigError("--gpus: this machine has no GPU; set the number of GPUs of the run, such as --gpus 4")
    if gpu_memory is None and here:
        gpu_memory = torch.cuda.get_device_properties(0).total_memory / GIB / USABLE
    return Machine(gpus or here, gpu_memory or GPU_MEMORY, gpus_per_host)


def find_rates(card: str | None, machine: Machine) -> Rates:
    """Return the rates for the named card, or else for the local card, or else for a card with the same memory."""
    import torch

    from dsreason.tools.planning.duration.rates import CARDS, find_card

    if card is None:
        name = torch.cuda.get_device_name() if find_cuda_fault() is None and launch.count_gpus() else ""
        return CARDS[find_card(name, machine.gpu_memory)]
    if card.lower() not in CARDS:
        raise ConfigError(f"--card must be one of {', '.join(CARDS)}; got {card!r}. Choose the most similar card")
    return CARDS[card.lower()]


def show(planned: Plan, suggestions: list[Suggestion], duration: Duration, *, as_json: bool) -> None:
    from dsreason.tools.planning import show as texts
    from dsreason.tools.planning.duration.show import describe_time, make_time_table, time_to_json

    if as_json:
        write(json.dumps(texts.to_json(planned, suggestions) | {"time": time_to_json(duration)}, indent=2))
        return
    console = open_console()
    if not console.is_terminal:
        console.width = LOG_WIDTH
    for line in texts.write_headline(planned):
        print_message(line)
    console.print(texts.make_phase_table(planned))
    console.print(texts.make_outside_table(planned))
    console.print(make_time_table(duration))
    for line in describe_time(duration):
        print_message(line)
    for note in planned.notes:
        print_message(f"note: {note}")
    for line in texts.write_verdict(planned, suggestions):
        print_message(line)
