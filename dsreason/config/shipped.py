"""Functions that find the DeepSpeed JSON files and recipes shipped with the package, in a checkout or a wheel."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from dsreason.errors import ConfigError
from dsreason.problems import describe_missing_file, find_nearest


def find_shipped_root(package: Path | None = None) -> Path:
    """Return the folder that contains the shipped files: `dsreason/_shipped` in an installed wheel, or the checkout's root."""
    package = package or Path(str(files("dsreason")))
    inside = package / "_shipped"
    return inside if inside.is_dir() else package.parent


def list_shipped(kind: str) -> list[str]:
    folder = find_shipped_root() / kind
    return sorted(file.name for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []


def get_shipped_file(kind: str, name: str) -> Path:
    """Return the path of a shipped file; `kind` is `ds_configs` or `launch/recipes`."""
    return find_shipped_root() / kind / name


def find_file(name: str, kind: str) -> Path:
    """Find a file by its path, or by its bare name in the current folder or among the shipped files of `kind`."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{name} is a folder; specify a file in this folder")
    if path.exists():
        raise ConfigError(
            f"{name}: {describe_missing_file(path)}; copy its content to a regular file that every rank can read"
        )
    if path.name != name:
        raise ConfigError(
            f"{name} does not exist; correct the path, or pass the bare name of a shipped file; "
            f"{_describe_shipped(kind, path.name)}"
        )
    if name not in list_shipped(kind):
        raise ConfigError(
            f"{name} exists neither in the current folder nor among the shipped files; {_describe_shipped(kind, name)}"
        )
    return get_shipped_file(kind, name)


def _describe_shipped(kind: str, name: str) -> str:
    names = list_shipped(kind)
    suggestion = find_nearest(name, names)
    available = f"available in {kind}: {', '.join(names) or 'none'}"
    return f"did you mean {suggestion}? ({available})" if suggestion else f"choose one of those {available}"
