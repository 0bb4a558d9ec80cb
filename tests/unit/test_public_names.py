"""The stability of names that users' adapters, rewards and scripts import, and of commands that they call."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsreason.cli.main import app
from dsreason.data.types import Sample

NAMES = {
    "dsreason": ["__version__"],
    "dsreason.data.types": ["Sample", "Message"],
    "dsreason.data.options": ["format_options", "option_lines", "options_field", "own_letter", "with_options"],
    "dsreason.data.rows": ["option_lines", "options_field", "only_train", "own_letter", "read_rows", "text_field"],
    "dsreason.config.schema": ["SourceConfig", "SFTConfig"],
    "dsreason.config.schema_dpo": ["DPOConfig"],
    "dsreason.config.schema_grpo": ["GRPOConfig"],
    "dsreason.errors": ["ConfigError", "DataError"],
    "dsreason.evaluation": ["Parsed", "parse"],
    "dsreason.rewards": [
        "boxed_math",
        "direct_math",
        "exact_match",
        "format",
        "gsm8k",
        "ordinal_choice",
        "overlong",
        "single_choice",
        "single_choice_lenient",
    ],
}
ADAPTERS = ["builtin", "conversations", "cosmos_reason1", "cosmos_reason1_rl", "jsonl", "llava", "local_labels"]
COMMANDS = ["sft", "grpo", "dpo", "export", "eval", "infer", "score", "push", "data", "demo"]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_public_name_exists(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_sample_fields_keep_their_order() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Sample)}
    first = ["id", "messages", "answer", "options", "meta", "rejected", "other_answers", "tools"]
    assert list(fields) == [*first, "has_text_prompt"]
    assert (fields["answer"], fields["options"]) == (None, None)
    assert Sample("1", []).meta == {}


@pytest.mark.parametrize("name", ADAPTERS)
def test_shipped_adapter_defines_to_sample(name: str) -> None:
    module = importlib.import_module(f"data_adapters.{name}")
    if name != "conversations":  # a key that two of the formats share
        assert next(iter(inspect.signature(module.to_sample).parameters)) == "row"


def test_help_lists_every_command() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    assert [name for name in COMMANDS if f" {name} " not in output] == []


def test_user_script_can_import_public_names(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from data_adapters import jsonl\n"
        "from dsreason.data.types import Sample\n"
        "from dsreason.evaluation import parse\n"
        "from dsreason.rewards import format, single_choice\n"
        "def to_sample(row):\n"
        "    return Sample(id=row['id'], messages=[{'role': 'user', 'content': row['q']}], answer=row['a'],"
        " options={'A': 'left', 'B': 'right'})\n"
        "sample = to_sample({'id': '1', 'q': 'Where to?', 'a': 'B'})\n"
        "text = '<think>It turns.</think><answer>B</answer>'\n"
        "print(format(text, sample), single_choice(text, sample), parse(text, 'letter', options=sample.options).answer)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["1.0", "1.0", "B"], "")
