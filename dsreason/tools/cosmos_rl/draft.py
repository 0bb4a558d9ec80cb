"""The parsed file of cosmos-rl, and the configuration that it becomes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dsreason.tools.cosmos_rl.keys.key import Key

Verdict = Literal["mapped", "left out", "differs", "not read", "error"]


@dataclass(frozen=True)
class KeyFinding:
    """The verdict on one key."""

    key: str
    value: Any
    verdict: Verdict
    text: str


def iter_flat(document: Mapping[str, Any], whole: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`("train.epoch", 1)` of every value; `whole` are keys whose values are tables."""
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in whole and value:
            yield from iter_flat(value, whole, f"{key}.")
        else:
            yield key, value


@dataclass(frozen=True)
class Settings:
    """The values of a file, with cosmos-rl's own where it has none."""

    document: dict[str, Any]
    keys: dict[str, Key]
    given: dict[str, Any]

    @classmethod
    def of(cls, document: dict[str, Any], keys: dict[str, Key]) -> Settings:
        """A key without a value (`null` of JSON and YAML) is one that the file does not have."""
        return cls(document, keys, {key: value for key, value in iter_flat(document, keys) if value is not None})

    def __getitem__(self, key: str) -> Any:
        return self.given.get(key, self.keys[key].default)

    def __contains__(self, key: str) -> bool:
        """Return whether the file has the key, or anything in the section of this name."""
        return key in self.given or any(name.startswith(f"{key}.") for name in self.given)


@dataclass
class Draft:
    """A configuration of ours in the making, with the findings about their keys."""

    trainer: str
    accepted: frozenset[str] = frozenset()
    """Keys whose nearest equivalent is good enough for the person who imports."""
    config: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, tuple[Verdict, str]] = field(default_factory=dict)
    """Findings by their key."""
    arguments: list[str] = field(default_factory=list)
    """Arguments of the command line."""
    num_gpus: int = 1

    def set(self, key: str, value: Any) -> None:
        """`optim.lr`; None leaves our default."""
        if value is None:
            return
        *sections, name = key.split(".")
        here = self.config
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = value

    def get(self, key: str) -> Any:
        """Return what was set, or None."""
        here: Any = self.config
        for name in key.split("."):
            if not isinstance(here, dict) or name not in here:
                return None
            here = here[name]
        return here

    def note_difference(self, key: str, text: str) -> None:
        """The run goes on, and is not quite the same."""
        self.notes[key] = ("differs", text)

    def wrong(self, key: str, text: str) -> None:
        """A value that cannot be used at all."""
        self.notes[key] = ("error", text)

    def refuse(self, key: str, text: str) -> bool:
        """Return what would change the result if it were left out; whether the person has accepted that."""
        accepted = key in self.accepted
        self.notes[key] = (
            ("differs", f"accepted: {text}") if accepted else ("error", f"{text} (or `dsreason import --accept {key}`)")
        )
        return accepted
