"""The parsed cosmos-rl file, and the dsreason configuration that is built from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dsreason.tools.cosmos_rl.keys.key import Key

Verdict = Literal["mapped", "left out", "differs", "not read", "error"]


@dataclass(frozen=True)
class KeyFinding:
    """Verdict on one cosmos-rl key, with an explanation."""

    key: str
    value: Any
    verdict: Verdict
    text: str


def iter_flat(document: Mapping[str, Any], whole: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and value of every entry, such as `("train.epoch", 1)`; values of the keys in `whole` stay tables."""
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in whole and value:
            yield from iter_flat(value, whole, f"{key}.")
        else:
            yield key, value


@dataclass(frozen=True)
class Settings:
    """Values of a cosmos-rl file; for keys that the file lacks, cosmos-rl's defaults."""

    document: dict[str, Any]
    keys: dict[str, Key]
    given: dict[str, Any]

    @classmethod
    def of(cls, document: dict[str, Any], keys: dict[str, Key]) -> Settings:
        """Read the values of a document; a key with the value `null` (JSON, YAML) counts as missing."""
        return cls(document, keys, {key: value for key, value in iter_flat(document, keys) if value is not None})

    def __getitem__(self, key: str) -> Any:
        return self.given.get(key, self.keys[key].default)

    def __contains__(self, key: str) -> bool:
        """Return whether the file has the key, or any key in the section of this name."""
        return key in self.given or any(name.startswith(f"{key}.") for name in self.given)


@dataclass
class Draft:
    """Unfinished dsreason configuration, with the findings about the cosmos-rl keys so far."""

    trainer: str
    accepted: frozenset[str] = frozenset()
    """cosmos-rl keys that the user passed to `--accept`, allowing them to be left out or approximated."""
    config: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, tuple[Verdict, str]] = field(default_factory=dict)
    """Verdict and explanation by cosmos-rl key."""
    arguments: list[str] = field(default_factory=list)
    """Additional command-line arguments for the run."""
    num_gpus: int = 1

    def set(self, key: str, value: Any) -> None:
        """Set a dsreason key, such as `optim.lr`; None keeps its default."""
        if value is None:
            return
        *sections, name = key.split(".")
        here = self.config
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = value

    def get(self, key: str) -> Any:
        """Return the value of a dsreason key that was set, or None."""
        here: Any = self.config
        for name in key.split("."):
            if not isinstance(here, dict) or name not in here:
                return None
            here = here[name]
        return here

    def note_difference(self, key: str, text: str) -> None:
        """Note that the run is possible, but differs in this key."""
        self.notes[key] = ("differs", text)

    def wrong(self, key: str, text: str) -> None:
        """Report a value that cannot be used at all."""
        self.notes[key] = ("error", text)

    def refuse(self, key: str, text: str) -> bool:
        """Refuse a key whose omission would change the result, unless the user accepted that; return whether they did."""
        accepted = key in self.accepted
        self.notes[key] = (
            ("differs", f"accepted: {text}")
            if accepted
            else ("error", f"{text} (or accept it: `dsreason import --accept {key}`)")
        )
        return accepted
