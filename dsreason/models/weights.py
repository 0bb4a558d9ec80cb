"""Functions that read the tensors of a model folder one at a time from memory-mapped safetensors files.

Pickled weights (`.bin`, `.pt`) are never opened, because unpickling runs code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsreason.errors import CheckpointError
from dsreason.files.disk import check_link, read_small

STEM = "model"
"""Stem of the weight files: the weights are in `model.safetensors`, or in files that `model.safetensors.index.json` lists."""


@dataclass(frozen=True)
class WeightFiles:
    """Locations of a model folder's tensors; `places` maps an in-memory name to (file, name in that file)."""

    folder: Path
    places: dict[str, tuple[Path, str]]
    unlisted: tuple[Path, ...] = ()
    """Weight files in the subfolders that the index does not list, which are therefore not read."""
    transposed: frozenset[str] = frozenset()
    """In-memory names of the tensors whose last two axes are swapped in the files."""

    def read(self, names: list[str], take: Callable[[str, Tensor], None]) -> None:
        """Call `take(name, tensor)` for each of the `names`, file by file.

        The tensors have the layout of memory. They are views of the mapped files: until a tensor is modified, it uses the pages
        of the file (shared memory instead of anonymous memory). A view with swapped axes is not contiguous.
        """
        file_names: dict[Path, list[str]] = {}
        for name in names:
            file_names.setdefault(self.places[name][0], []).append(name)
        for file, members in file_names.items():
            with open_file(file) as tensors:
                for name in members:
                    tensor = tensors.get_tensor(self.places[name][1])
                    take(name, tensor.mT if name in self.transposed else tensor)

    def headers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return each tensor's shape in memory and dtype by in-memory name: `{"lm_head.weight": ((512, 64), "BF16")}`."""
        headers = {}
        for file in {place[0] for place in self.places.values()}:
            with open_file(file) as tensors:
                for name, (tensor_file, key) in self.places.items():
                    if tensor_file == file:
                        tensor = tensors.get_slice(key)
                        shape = tuple(tensor.get_shape())
                        if name in self.transposed:
                            shape = (*shape[:-2], *reversed(shape[-2:]))
                        headers[name] = (shape, tensor.get_dtype())
        return headers


def find_weights(
    folder: Path,
    rename: Callable[[str], str | None],
    stem: str = STEM,
    *,
    inside: Sequence[str] = (),
    is_transposed: Callable[[str], bool] = lambda name: False,
) -> WeightFiles:
    """Read the headers of `<stem>.safetensors`, or of the files listed in `<stem>.safetensors.index.json`.

    The index may also list files in the subfolders `inside`; files that it lists in other subfolders belong to other models and
    are omitted. If `folder` has no weight files, those in the subfolders `inside` are used. Tensors for which `rename` returns
    None are omitted. `is_transposed` returns whether the files have a tensor, given by its in-memory name, with its last two axes
    swapped.

    If a file is missing, damaged, in an unsupported format, or a link out of the folder, a CheckpointError names the file.
    """
    places: dict[str, tuple[Path, str]] = {}
    in_subfolders = [file for name in inside for file in sorted((folder / name).glob("*.safetensors"))]
    is_empty = next(folder.glob("*.safetensors*"), None) is None
    files = in_subfolders if is_empty and in_subfolders else list_tensor_files(folder, stem, inside)
    for file in files:
        if file.parent != folder and os.path.isfile(file):
            check_link(file, folder)
        with open_file(file) as tensors:
            keys = list(tensors.keys())
        for key in keys:
            name = rename(key)
            if name is None:
                continue
            if name in places:
                other, first = places[name]
                raise CheckpointError(
                    f"{folder}: {first} ({other.name}) and {key} ({file.name}) are both mapped to tensor {name}"
                )
            places[name] = (file, key)
    unlisted = tuple(file for file in in_subfolders if file not in files)
    return WeightFiles(folder, places, unlisted, frozenset(filter(is_transposed, places)))


def list_tensor_files(folder: Path, stem: str = STEM, inside: Sequence[str] = ()) -> list[Path]:
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(read_small(index))["weight_map"].values()), key=os.fspath)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index} is damaged ({type(error).__name__}: {error}); download it again") from error
        own = [name for name in names if Path(name).name == name or str(PurePosixPath(name).parent) in inside]
        others = [name for name in names if name not in own]
        if outside := [name for name in others if not inside or {"..", "/"} & {*PurePosixPath(name).parts}]:
            raise CheckpointError(
                f"{index} lists files outside its folder: {', '.join(outside)}; download the model again"
            )
        return [folder / name for name in own]
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} has only pickled weights ({', '.join(pickled[:3])}), which are not read because unpickling runs "
            f"code; convert them to safetensors, or use a revision of the model that has {single.name}"
        )
    raise CheckpointError(
        f"{folder} has neither {single.name} nor {index.name}; it must be a Hugging Face model folder with weights"
    )


def open_file(file: Path) -> safe_open:
    if not os.path.isfile(file):  # Path.is_file raises if the name is too long
        raise CheckpointError(f"{file} is missing, but is listed in the index; download the model again")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is truncated or damaged ({error}); download or export the model again"
        ) from error
