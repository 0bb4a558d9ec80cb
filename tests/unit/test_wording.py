"""Names and docstrings follow "How we write" in CONTRIBUTING.md. The limits may only become stricter."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("dsreason", "data_adapters")

VAGUE = """
found one own told given asked said shown left whole seen meant wanted what kept taken named known chosen others
rest few once mine ours theirs its it that this these those such again there
"""
"""Names that do not say what a local variable holds."""
FRAGMENT_STARTS = """
of in by with for on as to what where which who whose how whether when from also none so that than but and or
"""
"""First words of docstrings that are neither sentences nor noun phrases."""
VERBS = """
accept accumulate add advance allocate allow answer append apply ask assemble assert assign attach average await
backward begin bind bound broadcast build cache calculate call cast catch change check choose chunk clamp clean
clear clip close collate collect combine compare compile complete compute concat configure connect consume
convert copy count cover create crop cut decode delete deliver dequantize describe destroy detach detect
determine disable discard discover dispatch display distribute divide download draw drop dump emit enable encode
end enqueue ensure enter escape estimate evaluate exchange execute exit expand expect explain export extend
extract fail fetch fill filter find finish fit fix flatten flush follow forget format forward free freeze gather
generate get give go grade group guess handle has hash hide hold import increment infer init initialize insert
inspect install interleave interpolate invert is iter join keep kill launch limit list listen load locate lock
log look lower make map mark mask match measure merge move multiply name needs normalize note notify number
observe offload open order override pack pad parse partition pause permute pick pin plan poll pop post prefetch
prepare preserve print process prompt propose prune publish pull push put quantize query queue quote raise rank
read rebuild receive recompute reconstruct record reduce refuse register reject release reload remember remove
rename render reorder repeat replace report request require resample rescale reserve reset reshape resize
resolve restart restore resume retry return reuse rewind rewrite roll rotate round run sample save say scale
scan schedule score search seed seek select send serve set setup shard share should show shuffle shut sign
simulate skip sleep slice sort spawn split stack start step stop store stream strip suggest sum summarize
summarise supports switch sync take test time to tokenize total trace track train transform translate trim
truncate try undo unpack unregister unwrap update upload use validate verify visit wait wake walk warn watch
weigh wrap write yield can does
"""

MAX_VAGUE_LOCALS = {"package": 0.005, "tests": 0.01}
"""Maximum fraction of assignments to vague names."""
MAX_FRAGMENTS = {"package": 0.03, "tests": 0.03}
"""Maximum fraction of docstrings that are fragments."""
MIN_VERBS = 0.85
"""Minimum fraction of the package's functions that start with a verb."""
MAX_TEST_WORDS = 7
"""Maximum median number of words in a test's name."""
MAX_DOUBLE_CLASSES = 0
"""Maximum number of class names that occur more than once in the package."""


@cache
def parse(kind: str) -> dict[Path, ast.Module]:
    """Parse the files of the package or of the tests."""
    folders = PACKAGES if kind == "package" else ("tests",)
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def iter_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the docstrings of a module, its classes, functions and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for number, statement in enumerate(body if isinstance(body, list) else []):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            follows = number == 0 or isinstance(body[number - 1], ast.Assign | ast.AnnAssign)
            if follows and isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value.strip()


def iter_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions, without properties, validators and special methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if not re.search("property|validator|setter", decorators):
                yield node


def check_share(places: list[str], total: int, limit: float, rule: str) -> None:
    assert len(places) <= limit * total, f"{rule}: {len(places)} of {total}, among them\n" + "\n".join(places[:40])


@pytest.mark.parametrize("kind", ["package", "tests"])
def test_locals_have_descriptive_names(kind: str) -> None:
    names = [
        (f"{path}:{node.lineno}: {node.id}", node.id)
        for path, tree in parse(kind).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    places = [place for place, name in names if name in VAGUE.split()]
    check_share(places, len(names), MAX_VAGUE_LOCALS[kind], "locals that do not name the thing")


@pytest.mark.parametrize("kind", ["package", "tests"])
def test_docstrings_are_sentences_or_noun_phrases(kind: str) -> None:
    docstrings = [
        (f"{path}:{line}: {text.splitlines()[0]}", text)
        for path, tree in parse(kind).items()
        for line, text in iter_docstrings(tree)
        if text
    ]
    places = [
        place for place, text in docstrings if re.split(r"\W", text, maxsplit=1)[0].lower() in FRAGMENT_STARTS.split()
    ]
    check_share(places, len(docstrings), MAX_FRAGMENTS[kind], "docstrings that are fragments")


def test_functions_start_with_a_verb() -> None:
    functions = [(path, node) for path, tree in parse("package").items() for node in iter_functions(tree)]
    places = [
        f"{path}:{node.lineno}: {node.name}"
        for path, node in functions
        if node.name.strip("_").split("_")[0] not in VERBS.split()
    ]
    check_share(places, len(functions), 1 - MIN_VERBS, "functions that do not start with a verb")


def test_test_names_are_short() -> None:
    names = [
        node.name for tree in parse("tests").values() for node in iter_functions(tree) if node.name.startswith("test_")
    ]
    assert median(name.count("_") for name in names) <= MAX_TEST_WORDS


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name for tree in parse("package").values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    doubles = [name for name, count in names.items() if count > 1]
    assert len(doubles) <= MAX_DOUBLE_CLASSES, doubles
