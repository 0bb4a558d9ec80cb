"""Layers of the package: imports point only to lower layers, even inside functions; no cycles and no overfull folders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FLOORS = [
    {"dsreason", "errors", "imports", "screen", "secret_names"},  # `dsreason` itself holds only the version
    {"problems", "secrets", "text", "families", "phases", "stopping"},
    {"user_code"},
    {"files"},
    {"config", "media"},
    {"monitor", "job"},
    {"data", "builtin_task"},
    {"answers", "losses", "models"},
    {"data_adapters", "rewards", "engine"},
    {"checkpoints", "rollout"},
    {"storage"},
    {"evaluation"},
    {"report"},
    {"train"},
    {"world"},
    {"tools"},
    {"cli"},
    {"__main__"},
]
"""Layers from bottom to top. A room (folder or module) may import from itself and from the layers below."""
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}
EXCEPTIONS = {("dsreason.data.adapters", "data_adapters")}
"""Allowed exceptions (module, room): the module that finds adapters by name must import the shipped ones."""
MOST_FILES = 16


def sources() -> list[Path]:
    return sorted(file for package in ("dsreason", "data_adapters") for file in (ROOT / package).rglob("*.py"))


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): file for file in sources()}


def room_of(module: str) -> str:
    """Return a module's room: `dsreason.data.chat` → `data`, `dsreason` → `dsreason`, `data_adapters.llava` → `data_adapters`."""
    first, _, remainder = module.partition(".")
    return remainder.partition(".")[0] or first if first == "dsreason" else first


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, full name) of every import in the source, also inside functions; `from a import b` yields `a.b`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            origin = ".".join([*parents, *filter(None, [node.module])])
            yield from ((node.lineno, f"{origin}.{name.name}") for name in node.names)


def target_room(name: str) -> str | None:
    """Return the room that an import refers to; None for a library. `from dsreason import __version__` → the package."""
    if name.partition(".")[0] not in ("dsreason", "data_adapters"):
        return None
    room = room_of(name)
    return room if room in FLOOR or (ROOT / "dsreason" / room).exists() else "dsreason"


def forbidden(source: str, module: str, *, is_package: bool = False) -> list[str]:
    package = module if is_package else module.rpartition(".")[0]
    local = room_of(module)
    result = ((line, name, target_room(name)) for line, name in imported(source, package))
    return [
        f"{module}:{line} ({local}) imports {name} ({room})"
        for line, name, room in result
        if room is not None and room != local and FLOOR[room] >= FLOOR[local] and (module, room) not in EXCEPTIONS
    ]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_only_to_lower_layers(module: str) -> None:
    file = MODULES[module]
    assert forbidden(file.read_text(), module, is_package=file.name == "__init__.py") == []


@pytest.mark.parametrize("module", MODULES)
def test_only_the_rollout_folder_imports_vllm(module: str) -> None:
    names = {name.partition(".")[0] for _, name in imported(MODULES[module].read_text(), module.rpartition(".")[0])}
    assert "vllm" not in names or room_of(module) == "rollout"


def test_every_folder_has_a_layer() -> None:
    assert {room_of(module) for module in MODULES} <= FLOOR.keys()


TRAINERS = [folder.name for folder in sorted((ROOT / "dsreason" / "train").iterdir()) if (folder / "loop.py").exists()]


@pytest.mark.parametrize("file", sorted((ROOT / "dsreason" / "train").rglob("*.py")), ids=module_name)
def test_trainers_do_not_import_each_other(file: Path) -> None:
    module, local = module_name(file), file.parent.name
    names = [name for _, name in imported(file.read_text(), module.rpartition(".")[0])]
    trainers = [name for name in TRAINERS if name != local]
    assert not [name for name in names if name.startswith(tuple(f"dsreason.train.{other}" for other in trainers))]


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def reached(module: str, file: Path) -> set[str]:
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names = (name for _, name in imported(file.read_text(), package))
    result = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    return {name for name in result if name in MODULES} - {module}


def test_no_files_import_each_other_in_cycle() -> None:
    assert circle({module: reached(module, file) for module, file in MODULES.items()}) == []


def test_import_cycle_is_detected() -> None:
    assert sorted(set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}))) == ["a", "b", "c"]


@pytest.mark.parametrize("folder", sorted({file.parent for file in sources()}), ids=lambda f: str(f.relative_to(ROOT)))
def test_folder_is_small_and_documented(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) - 1 <= MOST_FILES
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert text


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from dsreason.train.sft import loop", "dsreason.data.chat"),
        ("def f():\n    import dsreason.cli.main", "dsreason.train.sft"),
        ("from dsreason import engine", "dsreason.models.load"),
        ("from ..models import load", "dsreason.losses.kl"),
        ("from dsreason.evaluation import run", "data_adapters.llava"),
    ],
)
def test_import_from_higher_layer_is_detected(source: str, module: str) -> None:
    assert len(forbidden(source, module)) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import torch\nfrom pathlib import Path", "dsreason.data.chat"),
        ("from dsreason import __version__", "dsreason.cli.main"),
        ("from . import types\nfrom ..config import schema", "dsreason.data.chat"),
        ("from data_adapters import jsonl", "data_adapters.builtin"),
    ],
)
def test_imports_from_lower_layers_and_libraries_pass(source: str, module: str) -> None:
    assert forbidden(source, module) == []
