"""Save a rank's random-number states to a safetensors file and restore them from it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file


def take_rng_state(device: torch.device) -> Callable[[Path], None]:
    """Capture the current random-number states of Python, NumPy, torch and `device`; return a function that writes them."""
    version, python_words, python_gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    tensors = {
        "python": torch.tensor(python_words, dtype=torch.int64),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    scalars = {
        "python": [version, python_gauss],
        "numpy": [numpy_state["state"]["pos"], numpy_state["has_gauss"], numpy_state["gauss"]],
    }
    return lambda path: save_file(tensors, path, metadata={"scalars": json.dumps(scalars)})


def load_rng_state(path: Path, device: torch.device) -> None:
    """Restore the states that `take_rng_state` captured; skip a saved GPU state if `device` is not a GPU."""
    with safe_open(path, "pt") as file:
        scalars = json.loads(file.metadata()["scalars"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    version, gauss = scalars["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    np.random.set_state(("MT19937", tensors["numpy"].numpy().astype(np.uint32), *scalars["numpy"]))
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
