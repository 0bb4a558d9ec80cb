"""Functions that look up keys in a configuration schema and suggest corrections for misspelt keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from dsreason.problems import find_nearest

KeyPath = tuple[str | int, ...]
"""Path to a key: `("data", "sources", 0, "path")` stands for `data.sources.0.path`."""


def join_path(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def find_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section type in a field's annotation, even in a list or a union; None if the field has only plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        if section := find_section(argument):
            return section
    return None


def list_aliases(field: FieldInfo) -> list[str]:
    """Return all names of a field that has aliases, including its own name; [] if it has no aliases."""
    alias = field.validation_alias
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else []


def find_field(schema: type[BaseModel], key: str) -> FieldInfo | None:
    """Return the section's field whose name or alias is `key`, or None if it has no such field."""
    return next((field for name, field in schema.model_fields.items() if key in (name, *list_aliases(field))), None)


def find_synonyms(schema: type[BaseModel], path: KeyPath) -> set[str]:
    """Return the other names for the key at `path`."""
    field = find_field_at(schema, path)
    return set(list_aliases(field)) - {str(path[-1])} if field else set()


def find_field_at(schema: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """Return the field at `path`, ignoring list indices; None if the schema has no such field."""
    section: type[BaseModel] | None = schema
    field = None
    for name in (part for part in path if isinstance(part, str)):
        field = find_field(section, name) if section else None
        if field is None:
            return None
        section = find_section(field.annotation)
    return field


def split_unknown(schema: type[BaseModel], document: dict[str, Any]) -> tuple[dict[str, Any], list[KeyPath]]:
    """Return the document without keys that are unknown to the schema, and the paths of the unknown keys."""
    known_values: dict[str, Any] = {}
    unknown: list[KeyPath] = []
    for key, value in document.items():
        field = find_field(schema, key)
        if field is None:
            unknown.append((key,))
            continue
        known_values[key], below = _split_value(find_section(field.annotation), value)
        unknown += [(key, *path) for path in below]
    return known_values, unknown


def _split_value(section: type[BaseModel] | None, value: Any) -> tuple[Any, list[KeyPath]]:
    if section is not None and isinstance(value, dict):
        return split_unknown(section, value)
    if section is not None and isinstance(value, list):
        parts = [_split_value(section, item) for item in value]
        return [part for part, _ in parts], [(i, *path) for i, (_, paths) in enumerate(parts) for path in paths]
    return value, []


def iter_keys(schema: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every key in every section; paths into lists contain no index."""
    for name, field in schema.model_fields.items():
        yield (*prefix, name)
        if section := find_section(field.annotation):
            yield from iter_keys(section, (*prefix, name))


def describe_unknown_key(schema: type[BaseModel], path: KeyPath) -> str:
    """Suggest a correction for an unknown key: the closest known key in the same section, or else in the entire schema."""
    word = str(path[-1])
    above = find_field_at(schema, path[:-1])
    section = (find_section(above.annotation) if above else None) or schema
    everywhere = sorted(iter_keys(schema), key=len)  # the sort is stable: keys of equal depth stay in schema order
    # A key that exists in another section is misplaced; a key that exists nowhere is misspelt.
    if homes := [join_path(key) for key in everywhere if key[-1] == word]:
        return f"did you mean {' or '.join(homes[:3])}?"
    initials = "".join(part[0] for part in word.split("_") if part)
    if homes := [join_path(key) for key in everywhere if key[-1] == initials and len(initials) > 1]:
        return f"did you mean {homes[0]}?"  # for example, learning_rate → lr
    if near := find_nearest(word, section.model_fields, cutoff=0.7):
        return f"did you mean {join_path((*path[:-1], near))}?"
    if near := find_nearest(word, (str(key[-1]) for key in everywhere)):
        return f"did you mean {next(join_path(key) for key in everywhere if key[-1] == near)}?"
    section_name = f"[{join_path(path[:-1])}]" if path[:-1] else "the configuration"
    return f"the keys of {section_name} are {', '.join(section.model_fields)}"
