"""Files shipped with the package, DeepSpeed JSON and recipes, in a checkout or an installed wheel."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from dsreason.errors import ConfigError
from dsreason.problems import instead_of_file, nearest


def shipped_root(package: Path | None = None) -> Path:
    """Return `dsreason/_shipped` of an installed wheel, else the root of the checkout."""
    package = package or Path(str(files("dsreason")))
    inside = package / "_shipped"
    return inside if inside.is_dir() else package.parent


def shipped_names(kind: str) -> list[str]:
    folder = shipped_root() / kind
    return sorted(file.name for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []


def shipped_file(kind: str, name: str) -> Path:
    """Return the path of one of the `shipped_names`; `kind` is `ds_configs` or `launch/recipes`."""
    return shipped_root() / kind / name


def find_file(name: str, kind: str) -> Path:
    """Find a file by path, or by bare name: first in the current folder, then among the shipped files of this kind."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{name}: is a folder; give a file in it")
    if path.exists():
        raise ConfigError(f"{name}: {instead_of_file(path)}; copy its content into a file, which every rank can read")
    if path.name != name:
        raise ConfigError(f"{name}: no such file; correct the path, or {_offer(kind, path.name)}")
    if name not in shipped_names(kind):
        raise ConfigError(f"{name}: neither in the current folder nor among the shipped files; {_offer(kind, name)}")
    return shipped_file(kind, name)


def _offer(kind: str, name: str) -> str:
    names = shipped_names(kind)
    suggestion = nearest(name, names)
    shipped = f"shipped in {kind}: {', '.join(names) or 'nothing'}"
    return f"did you mean {suggestion}? ({shipped})" if suggestion else shipped
