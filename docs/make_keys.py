"""Write `docs/keys.md`, the reference of all configuration keys, from the schemas: `python docs/make_keys.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dsreason.config.schema import JobConfig, RunConfig, SFTConfig
from dsreason.config.schema_dpo import DPOConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.world.schema import WorldConfig

FILE = Path(__file__).with_name("keys.md")
INTRODUCTION = """\
# All keys

Here you can look up every configuration key with its type, default, bounds and meaning. Configurations are TOML, YAML or JSON.
`--set section.key=value` changes one key on the command line, and `dsreason sft --dry-run` prints the result. An unknown key
is an error that names the nearest known key. The default "unset" means that no value is set; `null` on the command line unsets a
key. The [glossary](glossary.md) explains the terms. `make docs` generates this page from the schemas; a test checks that it is
current.
"""
PARTS: dict[str, tuple[type[BaseModel], type[BaseModel] | None]] = {
    "`dsreason sft`, `dsreason grpo` and `dsreason dpo`": (RunConfig, None),
    "`dsreason sft` only": (SFTConfig, RunConfig),
    "`dsreason grpo` only": (GRPOConfig, RunConfig),
    "`dsreason dpo` only": (DPOConfig, RunConfig),
    "`dsreason world`, in addition to the keys of all training commands": (WorldConfig, JobConfig),
    "`dsreason eval`": (EvalConfig, None),
}
"""Title → schema, and a schema whose identical keys are omitted because another part lists them."""
BOUNDS = {"minimum": "≥", "ge": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TYPES = {"boolean": "true or false", "integer": "integer", "number": "number", "string": "text", "object": "table"}


@dataclass(frozen=True)
class KeySection:
    """A table of the page: `KeySection("data.vision", "Sampling of media.", {"fps": {"type": "number", …}}, ())`."""

    path: str
    text: str
    keys: dict[str, dict[str, Any]]
    shared: tuple[str, ...]
    """Keys that the enclosing section has, too; they are not listed again."""

    @property
    def heading(self) -> str:
        if self.path.endswith(("sources", "upload")):
            return f"`[[{self.path}]]`"
        return f"`[{self.path}]`" if self.path else "Top-level keys"

    def lines(self, known: Iterable[str]) -> list[str]:
        """Return the table without the keys in `known`, which another part lists; empty if no keys remain."""
        rows = [row(name, key) for name, key in self.keys.items() if name not in known]
        if not rows:
            return []
        around = self.path.rpartition(".")[0]
        shared = f"It also takes these keys of {f'`[{around}]`' if around else 'the other sections'}: {names(self.shared)}.\n"
        notes = [f"{self.text}\n"] * bool(self.text) + [shared] * bool(self.shared)
        head = ["| key | type | default | bounds | meaning |", "|---|---|---|---|---|"]
        return [f"### {self.heading}\n", *notes, *head, *rows, ""]


def sections_of(schema: type[BaseModel]) -> list[KeySection]:
    """Return every section with its keys."""
    document = schema.model_json_schema()
    return list(_walk(document | {"description": ""}, document.get("$defs", {}), "", {}))


def _walk(schema: dict[str, Any], defs: dict[str, Any], path: str, around: dict[str, Any]) -> Iterator[KeySection]:
    fields = schema["properties"]
    shared = tuple(name for name, field in fields.items() if field == around.get(name))
    own = {name: field for name, field in fields.items() if name not in shared}
    plain = {name: field for name, field in own.items() if _inside(field)[1]}
    yield KeySection(path, " ".join(schema.get("description", "").split()), plain, shared)
    for name, field in own.items():
        inside, is_value = _inside(field)
        if inside:
            yield from _walk(defs[inside], defs, f"{path}.{name}".lstrip("."), fields if is_value else {})


def _inside(field: dict[str, Any]) -> tuple[str | None, bool]:
    """Return the section that a field holds, and whether the field can also be a value or a list."""
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2], False
    forms = [_inside(form)[0] for form in [field.get("items"), *field.get("anyOf", [])] if isinstance(form, dict)]
    return next(filter(None, forms), None), True


def shown_type(schema: dict[str, Any]) -> str:
    """Return the type as text: `{"anyOf": [{"type": "integer"}, {"type": "null"}]}` → `integer`."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(shown_type(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "$ref" in schema:
        return "section"
    if "prefixItems" in schema:
        return f"{len(schema['prefixItems'])} {shown_type(schema['prefixItems'][0])}s"
    if schema["type"] == "array":
        return f"list of {shown_type(schema['items'])}"
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and values.get("type") == "number":
        by = f" by {shown_type(schema['propertyNames'])}" if "propertyNames" in schema else ""
        return f"table of numbers{by}"
    return TYPES[schema["type"]]


def shown_bounds(schema: dict[str, Any]) -> str:
    """Return the bounds, such as `≥ 1` or `> 0, < 1`; empty without bounds."""
    found = [f"{sign} {schema[word]}" for word, sign in BOUNDS.items() if word in schema]
    found += [f"`{schema['pattern']}`"] if "pattern" in schema else []
    found += ["not empty"] if schema.get("minItems") and "items" in schema else []
    found.append(" or ".join(filter(None, (shown_bounds(one) for one in schema.get("anyOf", [])))))
    inside = [*schema.get("prefixItems", [])[:1], schema.get("additionalProperties")]
    found += [shown_bounds(one) for one in inside if isinstance(one, dict)]
    return ", ".join(dict.fromkeys(filter(None, found)))


def row(name: str, schema: dict[str, Any]) -> str:
    """Return a key's row of the table."""
    default = "required" if "default" not in schema else "unset"
    if schema.get("default") is not None:
        default = f"`{json.dumps(schema['default'])}`"
    meaning = re.sub(r"\s+", " ", schema.get("description", ""))
    cells = (f"`{name}`", shown_type(schema), default, shown_bounds(schema), meaning)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def reference() -> str:
    """Return the whole page."""
    lines = [INTRODUCTION]
    for title, (schema, other) in PARTS.items():
        elsewhere = {section.path: section.keys for section in sections_of(other)} if other else {}
        lines.append(f"## {title}\n")
        for section in sections_of(schema):
            other_keys = elsewhere.get(section.path, {})
            lines += section.lines([name for name, key in section.keys.items() if key == other_keys.get(name)])
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    FILE.write_text(reference(), encoding="utf-8")
