"""Every loader call states whether code from a model's folder may run, so no library asks the user."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_rooms import ROOT

LOADERS = {
    *("from_pretrained", "from_config", "_from_config", "from_single_file", "load_custom_generate"),
    *("SentenceTransformer", "CrossEncoder", "get_class_from_dynamic_module"),
}
"""Library functions that load models, tokenizers or processors, and accept `trust_remote_code`."""
WITHOUT_CODE = {
    "getattr(diffusers, name).from_config",  # these classes are diffusers' own, and from_config has no such argument
    "getattr(diffusers, family.transformer).from_config",
    "CosmosTransformer3DModel.from_config",
    "model_class._from_config",
}
FILES = sorted(file for room in ("dsreason", "data_adapters", "benchmarks") for file in (ROOT / room).rglob("*.py"))


def find_implicit_calls(source: str) -> Iterator[str]:
    """Yield the calls of loaders that leave the decision about code to the library."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) in WITHOUT_CODE:
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        decision = {word.arg: ast.unparse(word.value) for word in call.keywords}.get("trust_remote_code", "None")
        is_auto_call = isinstance(call.func, ast.Name) and name.startswith("Auto") and name != "AutoencoderKLWan"
        if (name in LOADERS or is_auto_call) and decision in ("None", "True"):
            yield f"{call.lineno}: {ast.unparse(call.func)}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_loader_states_trust_in_code(file: Path) -> None:
    assert [*find_implicit_calls(file.read_text())] == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("AutoTokenizer.from_pretrained(folder)", 1),
        ("AutoTokenizer.from_pretrained(folder, trust_remote_code=True)", 1),
        ("kind.from_pretrained(folder, trust_remote_code=None)", 1),
        ("(A if vision else B).from_config(config)", 1),
        ("SentenceTransformer(folder)", 1),
        ("AutoTokenizer.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)", 0),
        ("AutoTokenizer.from_pretrained(folder, trust_remote_code=False)", 0),
    ],
)
def test_implicit_trust_is_detected(source: str, count: int) -> None:
    assert len([*find_implicit_calls(source)]) == count


def test_datasets_without_loading_scripts_is_required() -> None:
    """Check that `load_dataset`, which takes no `trust_remote_code`, cannot run scripts: version 4 removed them."""
    assert '"datasets>=4' in (ROOT / "pyproject.toml").read_text()
