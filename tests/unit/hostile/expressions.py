"""Regular expressions of the source code, their uses, and texts for which a slow one takes quadratic time or worse."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from re import _constants as codes
from re import _parser as parser
from types import ModuleType
from typing import Any

from dsreason.answers.choices import _Reader
from dsreason.answers.mentions import LONGEST
from dsreason.families import FAMILIES
from tests.fuzz.fuzzing import within_time

ROOT = Path(__file__).parents[3]
CALLS = {"match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
OF_USERS = {"pattern"}
"""Variables that hold a regular expression from a user's configuration or from a model family."""
READER = _Reader({"A": "left turn", "B": "turn"})
LOCAL = {
    "self": READER,
    "name": "H100",
    "phrase": "left turn",
    "task": "pick",
    "thousands": ",",
    "marks": r"(?<!\w)[(\[](A|B)[)\]]|\b(?:option|choice)\s+(A|B)\b",
}
"""Values of the variables from which expressions are built."""
SAMPLES = "a1 A\n-.,([{\"'\\/_*:<é"
"""Characters from which the sample for a character set is chosen."""
LENGTH, CPU_SECONDS = 20_000, 0.2
SHORT = {"ANSWERS": LONGEST, "COUNTS": LONGEST}
"""Expressions whose input is limited, with the maximum length."""
OF_PLAIN_TEXT = (": REASON", ": ANSWERS", ": COUNTS", ": aside", ": only_letter", ": only_one_right", ": _split")
"""Expressions that read texts in which `dsreason.answers` has replaced each run of white space with one character."""
OF_MARKED_TEXT = ("mentions.py: MARKED", "mentions.py: is_denied")
"""Expressions that read texts in which only dsreason inserts «."""
VARIANTS, LONGEST_PIECE, MOST_HEADS, MOST_TEXTS = 2, 4, 3, 45
METHODS = {name: {"fullmatch"} for name in ("AGIBOT", "HOLOASSIST", "BRIDGE")}
"""Methods that are called on expressions stored under several names."""


@dataclass(frozen=True)
class Use:
    place: str
    method: str
    pattern: re.Pattern[Any]

    def read(self, text: str) -> None:
        """Read the text as the source does, to the end."""
        value = text.encode("latin-1", "replace") if isinstance(self.pattern.pattern, bytes) else text
        if self.method in ("match", "fullmatch", "search"):
            getattr(self.pattern, self.method)(value)
        else:
            for _ in self.pattern.finditer(value):
                pass


def slow_text(use: Use) -> str:
    """Return a text for which the expression takes too long; "" if there is none."""
    for text in texts(use.pattern, SHORT.get(use.place.split()[-1], LENGTH)):
        if use.place.endswith(OF_PLAIN_TEXT):
            text = re.sub(r"(\s)\s+", r"\1", text)
        if use.place.endswith(OF_MARKED_TEXT):
            text = text.replace("«", "", text.count("«") - 1)
        try:
            within_time(use.read, text, CPU_SECONDS)
        except AssertionError:
            return text
    return ""


def uses() -> list[Use]:
    """Return every expression with each method that is called on it.

    If the code does not show the method, it is `finditer`, which does the most work.
    """
    files = [*ROOT.glob("dsreason/**/*.py"), *ROOT.glob("data_adapters/*.py")]
    trees = {file: ast.parse(file.read_text()) for file in sorted(files) if file.name != "__main__.py"}
    modules = {file: imported(file) for file, tree in trees.items() if imports_re(tree)}
    result: dict[tuple[re.Pattern[Any], str], Use] = {}
    for use in (*kept(modules, trees), *written_out(modules, trees), *of_families()):
        result.setdefault((use.pattern, use.method), use)  # many are also imported in other modules
    return list(result.values())


def kept(modules: dict[Path, ModuleType], trees: dict[Path, ast.Module]) -> Iterator[Use]:
    """Yield the uses of all compiled expressions, wherever they are stored."""
    local = {file: methods_by_name([tree]) for file, tree in trees.items()}
    anywhere = methods_by_name(trees.values())
    values = [(file, name, value) for file, module in modules.items() for name, value in vars(module).items()]
    values += [(imported_from(READER), name, value) for name, value in vars(READER).items()]
    for file, name, value in values:
        methods = METHODS.get(name) or local[file].get(name) or anywhere.get(name) or {"finditer"}
        for pattern in patterns_in(value):
            for method in sorted(methods):
                yield Use(f"{file.relative_to(ROOT)}: {name}", method, pattern)


def of_families() -> Iterator[Use]:
    """Yield the uses of expressions that rename the tensors of checkpoints."""
    for family in FAMILIES.values():
        rules = [rule for rule, _ in (*family.renames, *family.published)]
        for pattern in (*family.others, *rules):
            yield Use(f"family {family.name}", "search", re.compile(pattern))


def imported_from(value: object) -> Path:
    return Path(inspect.getfile(type(value)))


def imported(file: Path) -> ModuleType:
    return importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def imports_re(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Import) and any(name.name == "re" for name in node.names) for node in tree.body)


def methods_by_name(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Collect the methods of calls such as `NAME.search(…)` and `self.name.search(…)`: {"NAME": {"search"}, …}."""
    result: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in CALLS:
                if isinstance(node.value, ast.Name):
                    result[node.value.id].add(node.attr)
                elif isinstance(node.value, ast.Attribute):
                    result[node.value.attr].add(node.attr)
    return result


def patterns_in(value: Any) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        yield from patterns_in([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from patterns_in(item)


def written_out(modules: dict[Path, ModuleType], trees: dict[Path, ast.Module]) -> Iterator[Use]:
    """Yield the uses in calls such as `re.search(r"…", text)`, under the name of the function that contains the call."""
    for file, module in modules.items():
        functions = [node for node in ast.walk(trees[file]) if isinstance(node, ast.FunctionDef)]
        for name, tree in [*((function.name, function) for function in functions), ("", trees[file])]:
            for node in filter(is_call_of_re, ast.walk(tree)):
                if ast.unparse(node.args[0]) in OF_USERS:
                    continue
                flags = [part for part in (*node.args[1:], *(key.value for key in node.keywords)) if is_flag(part)]
                pattern = re.compile(value_of(node.args[0], module), sum(value_of(flag, module) for flag in flags))
                yield Use(f"{file.relative_to(ROOT)}: {name}", node.func.attr, pattern)


def is_call_of_re(node: Any) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {f"re.{name}" for name in CALLS}


def is_flag(node: ast.expr) -> bool:
    return "re." in ast.unparse(node) and isinstance(node, ast.Attribute | ast.BinOp)


def value_of(node: ast.expr, module: ModuleType) -> Any:
    return eval(compile(ast.Expression(node), module.__name__, "eval"), {**LOCAL, **vars(module)})


# ---------------------------------------------------------------- texts


def texts(pattern: re.Pattern[Any], length: int) -> Iterator[str]:
    """Yield texts that repeat a match of a part of the expression and then continue with something else.

    A match of the expression's beginning may precede the repetitions.
    """
    flags = pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, bytes) else pattern.flags
    tree = parser.parse(pattern.pattern, flags)
    heads = sorted({sample(tree[:i], 1) for i in range(len(tree) + 1)}, key=len)[:MOST_HEADS]
    repeated = sorted(pieces(tree) - {""}, key=lambda piece: (len(piece), piece))
    for i in range(0, len(repeated), 1 + len(repeated) * len(heads) // MOST_TEXTS):
        for head in heads:
            yield head + repeated[i] * (length // len(repeated[i])) + ("\0", "\n!")[i % 2]


def pieces(tree: Any) -> set[str]:
    return {
        sample(sequence[i:j], variant)
        for sequence in sequences(tree)
        for i in range(len(sequence))
        for j in range(i + 1, min(len(sequence), i + LONGEST_PIECE) + 1)
        for variant in range(VARIANTS)
    }


def sequences(tree: Any) -> Iterator[Any]:
    """Yield the expression and all its groups and alternatives."""
    yield tree
    for code, argument in tree:
        for inner in inner_sequences(code, argument):
            yield from sequences(inner)


def inner_sequences(code: Any, argument: Any) -> list[Any]:
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        return [argument[2]]
    if code is codes.SUBPATTERN:
        return [argument[3]]
    if code is codes.BRANCH:
        return list(argument[1])
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return [argument[1]]
    return [argument] if code is codes.ATOMIC_GROUP else []


def sample(tree: Any, variant: int) -> str:
    """Return a text that the expression roughly matches; back references and negative lookaheads are ignored."""
    return "".join(sample_of(code, argument, variant) for code, argument in tree)


def sample_of(code: Any, argument: Any, variant: int) -> str:
    if code is codes.LITERAL:
        return chr(argument)
    if code is codes.NOT_LITERAL:
        return next(character for character in SAMPLES[variant:] if ord(character) != argument)
    if code is codes.ANY:
        return SAMPLES[variant]
    if code is codes.IN:
        return one_of(argument, variant)
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        least, most, inner = argument
        return sample(inner, variant) * min(max(least, 1), most)
    if code is codes.BRANCH:
        return sample(argument[1][variant % len(argument[1])], variant)
    return "".join(sample(inner, variant) for inner in inner_sequences(code, argument) if code in GROUPS)


GROUPS = (codes.SUBPATTERN, codes.ATOMIC_GROUP)
CATEGORIES = {
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}


def one_of(items: Any, variant: int) -> str:
    """Return a character of a set such as `[^\\w.-]`."""
    denied = items[0][0] is codes.NEGATE
    local = [
        chr(argument if code is codes.LITERAL else argument[0])
        for code, argument in items
        if code in (codes.LITERAL, codes.RANGE)
    ]
    fitting = [
        character for character in (*local, *SAMPLES) if any(is_in(character, *item) for item in items) != denied
    ]
    return fitting[variant % len(fitting)]


def is_in(character: str, code: Any, argument: Any) -> bool:
    if code is codes.LITERAL:
        return ord(character) == argument
    if code is codes.RANGE:
        return bool(argument[0] <= ord(character) <= argument[1])
    return code is codes.CATEGORY and re.match(CATEGORIES[argument], character) is not None


if __name__ == "__main__":
    found = uses()
    for use in found:
        if text := slow_text(use):
            print(f"{use.place} {use.method}: {text[:60]!r}")
    print(len(found))
