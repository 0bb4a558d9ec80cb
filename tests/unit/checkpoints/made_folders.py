"""Builders of small folders that look like checkpoints and exports."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

STATE, WEIGHTS = b"{}", b"weights"
EXPORT_BYTES = 2 + 72 + len(WEIGHTS)
"""Number of bytes in an export's two files: `{}`, and `WEIGHTS` behind the safetensors header."""


def make_checkpoint(folder: Path, weights: bytes = WEIGHTS) -> Path:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_bytes(STATE)
    (folder / "weights.pt").write_bytes(weights)
    sizes = {"trainer_state.json": len(STATE), "weights.pt": len(weights)}
    (folder / "COMPLETE").write_text(json.dumps({"files": sizes}))
    return folder


def make_export(folder: Path, weights: bytes = WEIGHTS) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(save({"weights": np.frombuffer(weights, np.uint8)}))
    return folder
