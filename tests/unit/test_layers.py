"""Imports point one way: a lower layer never needs a higher one, not even inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BASE = {"dsreason", "errors", "config"}  # `dsreason` itself holds only the version
FAMILIES = BASE | {"families"}
DATA = FAMILIES | {"data"}
PURE = DATA | {"answers", "losses", "rewards"}
ROLLOUT = PURE | {"models", "runtime", "rollout"}
TOP = ROLLOUT | {"evaluation", "export", "train"}
ALLOWED = {
    "dsreason": set(),
    "errors": set(),
    "config": BASE,
    "families": FAMILIES,
    "data": DATA,
    "answers": DATA | {"answers"},
    "losses": PURE,
    "rewards": PURE,
    "models": DATA | {"models"},
    "runtime": FAMILIES | {"runtime"},
    "rollout": ROLLOUT,
    "evaluation": TOP,
    "export": TOP,
    "train": TOP,
    "cli": TOP | {"cli"},
    "__main__": {"cli"},
    "data_adapters": DATA | {"data_adapters"},
}
"""What each layer may import, itself included."""
EXCEPTIONS = {("dsreason.data.adapters", "data_adapters")}
"""(module, layer): the one that finds adapters by name has to see the shipped ones."""


def sources() -> list[Path]:
    return sorted(file for package in ("dsreason", "data_adapters") for file in (ROOT / package).rglob("*.py"))


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer_of(module: str) -> str:
    """`dsreason.data.chat` → `data`; `dsreason` → `dsreason`; `data_adapters.llava` → `data_adapters`."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] or first if first == "dsreason" else first


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, full name) of every import in the source, wherever it stands; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            origin = ".".join([*parents, *filter(None, [node.module])])
            yield from ((node.lineno, f"{origin}.{name.name}") for name in node.names)


def target_layer(name: str) -> str | None:
    """The layer that an import reaches; None for a library. `from dsreason import __version__` reaches the package."""
    if name.partition(".")[0] not in ("dsreason", "data_adapters"):
        return None
    layer = layer_of(name)
    return layer if layer in ALLOWED or (ROOT / "dsreason" / layer).exists() else "dsreason"


def forbidden(source: str, module: str, *, is_package: bool = False) -> list[str]:
    package = module if is_package else module.rpartition(".")[0]
    own = layer_of(module)
    found = ((line, name, target_layer(name)) for line, name in imported(source, package))
    return [
        f"{module}:{line} ({own}) imports {name} ({layer})"
        for line, name, layer in found
        if layer is not None and layer not in ALLOWED[own] and (module, layer) not in EXCEPTIONS
    ]


@pytest.mark.parametrize("file", sources(), ids=module_name)
def test_imports_point_to_lower_layers_only(file: Path) -> None:
    assert forbidden(file.read_text(), module_name(file), is_package=file.name == "__init__.py") == []


@pytest.mark.parametrize("file", sources(), ids=module_name)
def test_only_the_rollout_layer_imports_vllm(file: Path) -> None:
    module = module_name(file)
    names = {name.partition(".")[0] for _, name in imported(file.read_text(), module.rpartition(".")[0])}
    assert "vllm" not in names or layer_of(module) == "rollout"


TRAINERS = [folder.name for folder in sorted((ROOT / "dsreason" / "train").iterdir()) if (folder / "loop.py").exists()]


@pytest.mark.parametrize("file", sorted((ROOT / "dsreason" / "train").rglob("*.py")), ids=module_name)
def test_trainers_import_what_they_share_and_not_each_other(file: Path) -> None:
    module = module_name(file)
    own = file.parent.name
    names = [name for _, name in imported(file.read_text(), module.rpartition(".")[0])]
    others = [name for name in TRAINERS if name != own]
    assert not [name for name in names if name.startswith(tuple(f"dsreason.train.{other}" for other in others))]


def test_every_layer_is_known() -> None:
    assert {layer_of(module_name(file)) for file in sources()} <= ALLOWED.keys()


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from dsreason.train.sft.loop import run", "dsreason.data.chat"),
        ("def f():\n    import dsreason.cli.main", "dsreason.train.sft.loop"),
        ("from dsreason import runtime", "dsreason.models.load"),
        ("from ..models import load", "dsreason.runtime.engine"),
        ("from dsreason.models import load", "data_adapters.llava"),
    ],
)
def test_an_import_of_a_higher_layer_is_found(source: str, module: str) -> None:
    assert len(forbidden(source, module)) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import torch\nfrom pathlib import Path", "dsreason.data.chat"),
        ("from dsreason import __version__", "dsreason.cli.main"),
        ("from . import media\nfrom ..config import schema", "dsreason.data.chat"),
        ("from data_adapters import jsonl", "data_adapters.builtin"),
    ],
)
def test_imports_of_lower_layers_and_libraries_are_allowed(source: str, module: str) -> None:
    assert forbidden(source, module) == []
