"""The tensors of a model folder, read one at a time from memory-mapped safetensors files.

Pickled weights (`.bin`, `.pt`) are never opened: unpickling runs code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsreason.errors import CheckpointError
from dsreason.files.disk import read_small

STEM = "model"
"""Weights are in `model.safetensors`, or in several files that `model.safetensors.index.json` names."""


@dataclass(frozen=True)
class Weights:
    """Where each tensor is: name in memory → (file, name in that file)."""

    folder: Path
    places: dict[str, tuple[Path, str]]

    def read(self, names: list[str], take: Callable[[str, Tensor], None]) -> None:
        """Call `take(name, tensor)` for each name, file by file.

        The tensors are views of the mapped files: their pages are the file's (shared, no anonymous memory) until
        somebody writes to them.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.places[name][0], []).append(name)
        for file, members in by_file.items():
            with open_file(file) as tensors:
                for name in members:
                    take(name, tensors.get_tensor(self.places[name][1]))

    def headers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each tensor, as the file calls it: `((512, 64), "BF16")`."""
        headers = {}
        for file in {place[0] for place in self.places.values()}:
            with open_file(file) as tensors:
                for name, (home, key) in self.places.items():
                    if home == file:
                        tensor = tensors.get_slice(key)
                        headers[name] = (tuple(tensor.get_shape()), tensor.get_dtype())
        return headers


def find_weights(
    folder: Path, rename: Callable[[str], str | None], stem: str = STEM, *, inside: Sequence[str] = ()
) -> Weights:
    """Reads the headers of `<stem>.safetensors`, or of the files in `<stem>.safetensors.index.json`.

    Where neither is there, those of all such files in the folders `inside`. Tensors for which `rename` gives no name are left
    out.

    CheckpointError names the file that is missing, damaged or of a kind that is not read.
    """
    places: dict[str, tuple[Path, str]] = {}
    for file in files_inside(folder, inside) or tensor_files(folder, stem):
        with open_file(file) as tensors:
            keys = list(tensors.keys())
        for key in keys:
            name = rename(key)
            if name is None:
                continue
            if name in places:
                other, first = places[name]
                raise CheckpointError(
                    f"{folder}: {first} ({other.name}) and {key} ({file.name}) are the same tensor, {name}"
                )
            places[name] = (file, key)
    return Weights(folder, places)


def files_inside(folder: Path, inside: Sequence[str]) -> list[Path]:
    """Of a folder without weights of its own."""
    weights_file = next(folder.glob("*.safetensors*"), None)
    return [] if weights_file else [file for name in inside for file in sorted((folder / name).glob("*.safetensors"))]


def tensor_files(folder: Path, stem: str = STEM) -> list[Path]:
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(read_small(index))["weight_map"].values()), key=os.fspath)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index} is damaged ({type(error).__name__}: {error}); download it again") from error
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointError(f"{index} names files outside its folder: {', '.join(outside)}")
        return [folder / name for name in names]
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} has pickled weights only ({', '.join(pickled[:3])}), which are not read because unpickling runs "
            f"code; convert them to safetensors or take a revision of the model that has {single.name}"
        )
    raise CheckpointError(
        f"{folder} has neither {single.name} nor {index.name}; it must be a Hugging Face model folder with weights"
    )


def open_file(file: Path) -> safe_open:
    if not os.path.isfile(file):  # unlike Path.is_file, False for a name that is too long
        raise CheckpointError(f"{file} is missing, though the index beside it names it; download the model again")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is truncated or damaged ({error}); download or export it again") from error
