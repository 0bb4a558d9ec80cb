"""Placement of a model's weights for inference: on one device, across several GPUs, or partly left in the files.

The library accelerate assigns modules to devices and moves inputs between devices.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory

from dsreason.families import Family, get_family
from dsreason.job.network import count_local_ranks
from dsreason.models.generation import read_generation_config
from dsreason.models.load import build_checked_model, fill_buffers, load_weights, map_parameters
from dsreason.models.media_features import patch_vision
from dsreason.models.weights import WeightFiles
from dsreason.monitor.memory import GIB, count_available_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

WEIGHTS_SHARE = 0.9
"""Fraction of a device's free memory that weights may use; the rest is left for activations and the key-value cache."""
FILES = "disk"
"""accelerate's name for weights that stay in their files and are read whenever their module is called."""
DeviceMap = dict[str, int | str]
"""Module name → GPU index, "cpu" or `FILES`; submodules of a listed module are omitted."""


def load_where_it_fits(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a model for inference, without gradients, onto `device` if it fits there.

    The layers of a larger model are distributed across all devices of this rank (see `list_devices`). Weights that fit on none
    of them stay in their files and are read again for every token, at best from the page cache. Inputs must be on `device`;
    outputs may be on another device.
    """
    model, weights = build_checked_model(path, dtype=dtype, attention=attention, trust_remote_code=trust_remote_code)
    family = get_family(model.config.model_type)
    size = sum(parameter.nbytes for parameter in model.parameters())
    if size <= compute_budget(device):
        load_weights(model, weights, dtype, device)
        patch_vision(model)
    else:
        devices = list_devices(device)
        device_map = plan_devices(
            model, family, {get_device_name(candidate): compute_budget(candidate) for candidate in devices}
        )
        log.warning("%s: %s", path, describe_placement(model, device_map, devices))
        distribute_weights(model, weights, device_map, dtype, device)
    model.generation_config = read_generation_config(path, model.config)
    return model.requires_grad_(False).eval()


def list_devices(device: torch.device) -> list[torch.device]:
    """Return `device` and the other GPUs that this rank may use: the first of 2 ranks on a host with 4 GPUs gets GPUs 0 and 2."""
    if device.type != "cuda":
        return [device]
    return [torch.device("cuda", i) for i in range(device.index or 0, torch.cuda.device_count(), count_local_ranks())]


def get_device_name(device: torch.device) -> int | str:
    """Return accelerate's name for a device."""
    return "cpu" if device.type == "cpu" else device.index or 0


def compute_budget(device: torch.device) -> int:
    """Return the number of bytes available for weights on a device. Host memory is divided among the ranks of the host."""
    free = (
        count_available_bytes() // count_local_ranks() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    )
    return int(WEIGHTS_SHARE * free)


def plan_devices(model: PreTrainedModel, family: Family, budgets: dict[int | str, int]) -> DeviceMap:
    """Choose a device for each module. Decoder layers and the vision tower are never split, and GPUs get about equal shares."""
    block_classes = [*model._no_split_modules, *get_vision_class(model, family)]
    balanced = get_balanced_memory(model, budgets, no_split_module_classes=block_classes)
    device_map: DeviceMap = infer_auto_device_map(
        model, balanced, no_split_module_classes=block_classes, clean_result=False
    )
    return device_map


def get_vision_class(model: PreTrainedModel, family: Family) -> list[str]:
    """Return a list with the class name of the vision tower, empty if the model has none."""
    tower = family.modules.vision_tower
    return [] if tower is None else [type(model.get_submodule(tower)).__name__]


def distribute_weights(
    model: PreTrainedModel, weights: WeightFiles, device_map: DeviceMap, dtype: torch.dtype, device: torch.device
) -> None:
    """Load the weights of an empty model onto the devices in the map, and make each module move its inputs to its device."""
    family = get_family(model.config.model_type)
    homes = {name: find_home(name, device_map) for name, _ in model.named_parameters(remove_duplicate=False)}
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
    index = {
        name: build_index_entry(weights, firsts[id(parameter)], dtype)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if homes[name] == FILES
    }
    map_parameters(model, weights, [name for name in firsts.values() if homes[name] != FILES])
    fill_buffers(model, device)
    for name, parameter in model.named_parameters():
        if homes[name] != FILES:
            parameter.data = parameter.data.to(homes[name], dtype, copy=True)
    patch_vision(model)  # must precede dispatch_model, which wraps the forwards
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # accelerate would repeat the caller's warning
    dispatch_model(
        model,
        device_map,
        main_device=get_device_name(device),
        offload_index=index,
        skip_keys="past_key_values",  # each layer's cache is on the layer's device
        preload_module_classes=get_vision_class(model, family),
        force_hooks=True,  # even if all weights are on one GPU, the inputs may be on another
    )


def find_home(name: str, device_map: DeviceMap) -> int | str:
    """Return the device of the module that owns the parameter."""
    while name not in device_map and name:
        name = name.rpartition(".")[0]
    return device_map[name]


def build_index_entry(weights: WeightFiles, name: str, dtype: torch.dtype) -> dict[str, str]:
    file, key = weights.places[name]
    return {"safetensors_file": str(file), "weight_name": key, "dtype": str(dtype).removeprefix("torch.")}


def describe_placement(model: PreTrainedModel, device_map: DeviceMap, devices: Sequence[torch.device]) -> str:
    """Return a warning that the model does not fit on the first of these devices, with the placement of its weights."""
    sizes: dict[int | str, int] = {}
    for name, parameter in model.named_parameters():
        home = find_home(name, device_map)
        sizes[home] = sizes.get(home, 0) + parameter.nbytes
    parts = [
        f"{sizes[get_device_name(device)] / GIB:.1f} GiB are placed on {device}"
        for device in devices
        if get_device_name(device) in sizes
    ]
    if FILES in sizes:
        parts.append(
            f"{sizes[FILES] / GIB:.1f} GiB stay in their files and are read again for every token, which is slow"
        )
        if devices[0].type == "cuda" and count_local_ranks() > 1:
            parts.append("use --nproc 1 to spread one copy of the model over all GPUs")
    total = sum(sizes.values())
    return f"the weights need {total / GIB:.1f} GiB and do not fit on {devices[0]}: {'; '.join(parts)}"
