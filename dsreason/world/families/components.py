"""Functions that all families use to load components from a folder in diffusers' format. Nothing is unpickled."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsreason.errors import CheckpointError
from dsreason.files.disk import read_small
from dsreason.models.folder import explain_custom_code

WEIGHTS = "diffusion_pytorch_model"
"""Stem of the names of diffusers' weight files."""
WITHOUT_CODE = "world models never run code from a model's folder, so use the tokenizer of the original model"
SCHEDULERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file in a model folder. Raise CheckpointError if it is missing or not a JSON object."""
    try:
        content = json.loads(read_small(file))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file}: is missing; the folder must contain a model in diffusers' format, with model_index.json and a folder "
            "per component"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: is not a JSON object; download the model again")
    return content


def read_transformer_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the configuration of a folder's transformer; `name` is its class in diffusers.

    Keys that are missing from its config.json get the class's defaults.
    """
    import diffusers

    parameters = inspect.signature(getattr(diffusers, name)).parameters.values()
    defaults = {
        parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty
    }
    return defaults | read_json(folder / "transformer" / "config.json")


def load_scheduler(folder: Path) -> Any:
    """Load the solver that comes with the model. Raise CheckpointError if it is not a supported solver for rectified flow."""
    import diffusers

    file = folder / "scheduler" / "scheduler_config.json"
    config = read_json(file)
    name = config.get("_class_name")
    if name not in SCHEDULERS:
        raise CheckpointError(f"{file}: the scheduler {name} is not supported; use one of {', '.join(SCHEDULERS)}")
    if name == SCHEDULERS[0] and not (
        config.get("use_flow_sigmas") and config.get("prediction_type") == "flow_prediction"
    ):
        raise CheckpointError(
            f"{file}: use_flow_sigmas must be true and prediction_type 'flow_prediction', because only rectified-flow models "
            f"can be trained; got {config.get('use_flow_sigmas')} and {config.get('prediction_type')!r}"
        )
    if config.get("use_dynamic_shifting"):
        raise CheckpointError(
            f"{file}: use_dynamic_shifting is not supported; set world.schedule = 'linear' and world.shift"
        )
    return getattr(diffusers, name).from_config(config)


def read_sigmas(folder: Path, steps: int) -> Tensor:
    """Return the noise levels of the schedule that comes with the model: `[steps + 1]`, float64, decreasing to 0."""
    scheduler = load_scheduler(folder)
    scheduler.set_timesteps(steps)
    sigmas: Tensor = scheduler.sigmas.double().cpu()
    if not (sigmas[-1] == 0 and (sigmas.diff() < 0).all() and sigmas[0] <= 1):
        raise CheckpointError(
            f"{folder / 'scheduler'}: the noise levels of {steps} steps must decrease from at most 1 to 0, but they are "
            f"{sigmas[0]:g}, …, {sigmas[-1]:g}; change the number of steps, or set world.schedule = 'linear'"
        )
    return sigmas


def load_encoder(kind: Any, folder: Path, device: torch.device | str, dtype: torch.dtype) -> Any:
    """Load a frozen text encoder of class `kind`; its weights must be in safetensors files."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would overwrite the run's progress bar
    try:
        encoder = kind.from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": device},
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # transformers' errors for missing, damaged or pickled weights have no common base class
        raise CheckpointError(f"{folder}: the text encoder cannot be loaded: {error}") from error
    return encoder.eval().requires_grad_(False)


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' errors for missing or damaged files have no common base class
        problem = explain_custom_code(folder, error, "AutoTokenizer", WITHOUT_CODE)
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {problem or error}") from error


def free_memory() -> None:
    """Return a deleted model's GPU memory to the device; torch would otherwise keep it in its cache."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def write_index(folder: Path, pipeline: str, components: dict[str, tuple[str, str] | None]) -> None:
    """Write model_index.json.

    Args:
        components: component → (library, class), or None for a component that the folder lacks.
    """
    import diffusers

    index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": diffusers.__version__}
    index |= {name: list(place or (None, None)) for name, place in components.items()}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
