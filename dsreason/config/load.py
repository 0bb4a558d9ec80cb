"""Functions that load the run configuration from a TOML, YAML or JSON file, apply `--set a.b=v`, and validate the result."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from dsreason.config.keys import KeyPath, describe_unknown_key, find_synonyms, join_path, split_unknown
from dsreason.config.messages import find_document_path, translate_errors
from dsreason.config.schema_data import SourceConfig
from dsreason.config.shipped import find_file, get_shipped_file
from dsreason.errors import ConfigError
from dsreason.problems import build_config_error, describe_parse_error
from dsreason.secrets import hide_in_json, mask_credentials, register_secrets

S = TypeVar("S", bound=BaseModel)

RECIPES = "launch/recipes"
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 1024**2, 10_000, 32
"""Limits on a configuration file. Without them, a few lines of YAML aliases could expand to any number of values."""
MAX_NUMBER = 10**300
"""Maximum absolute value of an integer; TOML, YAML and JSON allow numbers that no float can represent."""
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError)
"""Errors that the parsers raise for impossible values, such as the date 2001-99-99 or a 5000-digit number."""


@dataclass(frozen=True)
class Override:
    """Parsed `--set` option, such as `data.sources.0.path=/videos`."""

    text: str
    path: KeyPath
    value: Any


def load_config(schema: type[S], path: Path | None, overrides: Sequence[str] = (), *, default_recipe: str) -> S:
    """Load the configuration from `path` (a file, or the bare name of a shipped recipe), and apply the overrides.

    Args:
        overrides: settings of the form `a.b=v`; `v` is a TOML value, `null`, or else a string. A number in the key is a
            list index.
        default_recipe: name of the shipped recipe to use if `path` is None.

    Raises:
        ConfigError: the configuration is invalid; the message lists all problems, each with the file or `--set` that caused it.
    """
    name = f"{default_recipe} (shipped)" if path is None else str(path)
    file_values = read_document(get_shipped_file(RECIPES, default_recipe), name) if path is None else read_config(path)
    return read_values(schema, file_values, name, overrides)


def read_values(schema: type[S], values: dict[str, Any], name: str, overrides: Sequence[str] = ()) -> S:
    """Build the configuration from `values` and apply the overrides; `name` is the origin of the values in error messages.

    Raises:
        ConfigError: the configuration is invalid; the message lists all problems.
    """
    parsed = [parse_override(text) for text in overrides]
    document = copy_json(values)
    for override in parsed:
        _apply(document, override, find_synonyms(schema, override.path))
    register_secrets(document)
    known_values, unknown = split_unknown(schema, document)
    problems = [(key, f"unknown key; {describe_unknown_key(schema, key)}") for key in unknown]
    try:
        config = schema.model_validate(known_values)
    except ValidationError as error:
        problems += translate_errors(schema, error.errors(include_url=False), known_values)
    if problems:
        raise build_config_error([_format_problem(name, key, text, values, parsed) for key, text in problems])
    return config


def dump_config(config: BaseModel) -> dict[str, Any]:
    """Convert the configuration to JSON values that can be loaded again; secrets are masked, even in `reward.options`."""
    document: dict[str, Any] = hide_in_json(config.model_dump(mode="json"))
    if document.get("data", {}).get("sources"):
        # If `sources` is set, the loader would reject keys of a single source in the section itself.
        document["data"] = {k: v for k, v in document["data"].items() if k not in SourceConfig.model_fields}
    return document


def read_config(path: Path) -> dict[str, Any]:
    """Read the file that `--config` names, by its path or by the bare name of a shipped recipe."""
    return read_document(find_file(str(path), RECIPES), str(path))


def read_document(file: Path, name: str) -> dict[str, Any]:
    """Read a TOML, YAML or JSON file, depending on its suffix, as a mapping; `name` is the file's name in error messages."""
    text = _read_text(file, name)
    try:
        document = _parse(text, file.suffix, name)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}; correct the file") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}: line {error.lineno} is not valid JSON: {error.msg}; correct the line") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(f"{name}: line {line} is not valid YAML: {error.problem}; correct the line") from None
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply; use at most {MAX_DEPTH} levels") from None
    except UNREADABLE as error:
        raise ConfigError(
            f"{name} contains a value that cannot be read ({describe_parse_error(error)}); correct the value"
        ) from None
    _check_extent(document, name)
    if document is None:  # an empty YAML file
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{name}: the file must consist of sections with keys; got a {type(document).__name__}")
    return document


def _read_text(file: Path, name: str) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{name} has more than {MAX_BYTES} bytes, the maximum for a configuration; choose another file"
            )
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}; choose a readable text file") from None


def _check_extent(value: Any, name: str) -> None:
    """Raise ConfigError if the document has too many values or levels, or a number with too many digits.

    Each use of a YAML alias counts separately.
    """
    waiting, count = [(value, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{name}: is nested too deeply; use at most {MAX_DEPTH} levels")
        if count > MAX_VALUES:
            raise ConfigError(
                f"{name} expands to more than {MAX_VALUES} values, the maximum for a configuration; remove some values"
            )
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise ConfigError(f"{name} contains a number with more than 300 digits, which no key accepts; correct it")
        waiting += [(item, depth + 1) for item in _get_children(value)]


def _get_children(value: Any) -> Iterable[Any]:
    if isinstance(value, yaml.MappingNode):
        return [node for pair in value.value for node in pair]
    if isinstance(value, yaml.SequenceNode):
        return list(value.value)
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _parse(text: str, suffix: str, name: str) -> Any:
    match suffix.lower():
        case ".toml":
            return tomllib.loads(text)
        case ".yaml" | ".yml":
            return _parse_yaml(text, name)
        case ".json":
            return json.loads(text, object_pairs_hook=lambda pairs: _check_unique(pairs, name))
    raise ConfigError(f"{name}: unknown file type {suffix!r}; use .toml, .yaml or .json")


def _check_unique(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    if duplicates := sorted(key for key, count in counts.items() if count > 1):
        raise ConfigError(f"{name}: duplicate keys in the same section: {', '.join(duplicates)}; keep one of each")
    return dict(pairs)


def _parse_yaml(text: str, name: str) -> Any:
    """Parse YAML as users expect: unlike in PyYAML, `1e-6` is a number instead of a string, and a repeated key is an error."""
    node = yaml.compose(text, Loader=_YamlLoader)
    _check_extent(node, name)  # must precede yaml.load, which copies the targets of aliases and merges (`<<`)
    _reject_duplicates(node)
    return yaml.load(text, Loader=_YamlLoader)


_YamlLoader: Any = type("_YamlLoader", (yaml.SafeLoader,), {})
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _reject_duplicates(node: Any) -> None:
    if isinstance(node, yaml.MappingNode):
        used_keys: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a string", problem_mark=key.start_mark)
            if key.value in used_keys:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
            used_keys.add(key.value)
            _reject_duplicates(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _reject_duplicates(item)


def parse_override(text: str) -> Override:
    """Parse `optim.lr=1e-5` into `Override(path=("optim", "lr"), value=1e-5)`."""
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {text}: must have the form section.key=value, such as optim.lr=1e-5")
    return Override(text, tuple(int(part) if part.isdecimal() else part for part in parts), parse_value(value.strip()))


def to_toml(value: Any) -> str:
    """Format a value for `--set` as JSON without surrogate pairs, which TOML does not allow."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")


def parse_value(text: str) -> Any:
    """Parse a TOML value, or `null` for "unset"; return any other text unchanged.

    Raises:
        ConfigError: the text starts like a TOML list or table, but is not valid TOML.
    """
    if text == "null":
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:  # not only TOML errors: a 5000-digit number also raises ValueError
        if text.lstrip().startswith(("[", "{")):
            raise ConfigError(
                f'--set: {text} is not valid TOML ({describe_parse_error(error)}); double each backslash in "…", '
                "or use '…', where a backslash is literal"
            ) from None
        return text
    return copy_json(parsed["value"]) if len(parsed) == 1 else text


def copy_json(value: Any) -> Any:
    """Return a deep copy of JSON values with string keys, which overrides can modify without changing the original."""
    if isinstance(value, dict):
        return {str(key): copy_json(item) for key, item in value.items()}
    return [copy_json(item) for item in value] if isinstance(value, list) else value


def _apply(document: dict[str, Any], override: Override, replaced: Collection[str]) -> None:
    """Set an override's value in the document, and remove the key's synonyms `replaced` from the same section."""
    node: Any = document
    for depth, part in enumerate(override.path):
        is_last = depth == len(override.path) - 1
        _check_step(node, part, override, override.path[:depth])
        if isinstance(node, list) and part == len(node):
            node.append({})
        if is_last:
            for name in replaced:
                node.pop(name, None)
            node[part] = override.value
        elif isinstance(node, list):
            node = node[int(part)]
        else:
            following = override.path[depth + 1]
            node = node.setdefault(part, [] if isinstance(following, int) else {})


def _check_step(node: Any, part: str | int, override: Override, path: KeyPath) -> None:
    origin = f"--set {override.text}: {join_path(path)}"
    if isinstance(node, list):
        if not isinstance(part, int) or part > len(node):
            raise ConfigError(
                f"{origin} is a list of {len(node)} entries, but {part!r} is not an index; use an index from 0 to {len(node)}"
            )
    elif not isinstance(node, dict):
        raise ConfigError(f"{origin} is a value ({node!r}), not a section; set {join_path(path)} itself")
    elif isinstance(part, int):
        raise ConfigError(f"{origin} is a section, not a list; use one of its keys instead of {part}")


def _format_problem(
    name: str, key: KeyPath, text: str, file_values: dict[str, Any], overrides: Sequence[Override]
) -> str:
    line = f"{_find_origin(name, key, file_values, overrides)}: {join_path(key)}: {text}" if key else f"{name}: {text}"
    return mask_credentials(line)


def _find_origin(name: str, key: KeyPath, file_values: dict[str, Any], overrides: Sequence[Override]) -> str:
    """Return the file or `--set` that set a key, or all of them if the key is a section with several origins."""
    for override in reversed(overrides):
        if override.path == key[: len(override.path)]:
            return f"--set {override.text}"
    inside = [f"--set {override.text}" for override in overrides if override.path[: len(key)] == key]
    return " and ".join([name] * (find_document_path(file_values, key) == key) + inside) or name
