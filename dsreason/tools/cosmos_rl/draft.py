"""The values of a file for cosmos-rl or cosmos-framework, and the unfinished dsreason configuration that is built from them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dsreason.tools.cosmos_rl.keys.key import Key

UNSET = "???"
"""Value of a key that cosmos-framework's users set on the command line."""
COSMOS_RL, COSMOS_FRAMEWORK = "cosmos-rl", "cosmos-framework"
"""Programs whose configurations can be imported."""
Verdict = Literal["mapped", "left out", "differs", "not read", "error"]


@dataclass(frozen=True)
class KeyFinding:
    """Verdict on one cosmos-rl key, with an explanation."""

    key: str
    value: Any
    verdict: Verdict
    text: str


def iter_flat(document: Mapping[str, Any], whole: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and value of every entry, such as `("train.epoch", 1)`; tables of the keys in `whole` stay tables."""
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in whole and value:
            yield from iter_flat(value, whole, f"{key}.")
        else:
            yield key, value


@dataclass(frozen=True)
class Settings:
    """Values in a file for cosmos-rl or cosmos-framework, with that program's defaults for missing keys."""

    document: dict[str, Any]
    keys: dict[str, Key]
    given: dict[str, Any]
    tool: str = COSMOS_RL
    """Name of the program that the file is for, as shown in messages."""

    @classmethod
    def of(cls, document: dict[str, Any], keys: dict[str, Key], tool: str = COSMOS_RL) -> Settings:
        """Read the values of a document; a key with the value `null` (JSON, YAML) counts as missing."""
        unset = (None, UNSET) if tool == COSMOS_FRAMEWORK else (None,)
        given = {key: value for key, value in iter_flat(document, keys) if value not in unset}
        return cls(document, keys, given, tool)

    def __getitem__(self, key: str) -> Any:
        return self.given.get(key, self.keys[key].default)

    def __contains__(self, key: str) -> bool:
        """Return whether the file has this key, or a section of this name that is not empty."""
        return key in self.given or any(name.startswith(f"{key}.") for name in self.given)


@dataclass
class Draft:
    """Unfinished dsreason configuration, and the notes on the cosmos-rl keys converted so far."""

    trainer: str
    accepted: frozenset[str] = frozenset()
    """cosmos-rl keys that the user passed to `--accept`, allowing them to be left out or approximated."""
    config: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, tuple[Verdict, str]] = field(default_factory=dict)
    """cosmos-rl key → verdict and explanation."""
    arguments: list[str] = field(default_factory=list)
    """Additional command-line arguments for the run."""
    num_gpus: int = 1

    def set(self, key: str, value: Any) -> None:
        """Set a dsreason key, such as `optim.lr`; None leaves the key at its default."""
        if value is None:
            return
        *sections, name = key.split(".")
        target = self.config
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value

    def get(self, key: str) -> Any:
        """Return the value of a dsreason key; None if it has not been set."""
        node: Any = self.config
        for name in key.split("."):
            if not isinstance(node, dict) or name not in node:
                return None
            node = node[name]
        return node

    def note_difference(self, key: str, text: str) -> None:
        """Note that the run is possible, but does something else than cosmos-rl for this key."""
        self.notes[key] = ("differs", text)

    def reject_value(self, key: str, text: str) -> None:
        """Report a value that is invalid, so that the user cannot accept it."""
        self.notes[key] = ("error", text)

    def refuse(self, key: str, text: str) -> bool:
        """Refuse a key that cannot be converted exactly, unless the user accepted the difference; return whether they did."""
        accepted = key in self.accepted
        self.notes[key] = (
            ("differs", f"accepted: {text}")
            if accepted
            else ("error", f"{text} (or accept it: `dsreason import --accept {key}`)")
        )
        return accepted
