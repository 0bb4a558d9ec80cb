"""Code and chat templates in the folder of a world model."""

from __future__ import annotations

import builtins
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dsreason.errors import CheckpointError
from dsreason.models.processors import template
from dsreason.world.families import FAMILIES, find_family
from dsreason.world.families.components import load_scheduler
from dsreason.world.models import check_components, load_transformer, load_vae
from tests.unit.hostile.guard import guarded, refused
from tests.unit.hostile.inputs import change_json
from tests.unit.hostile.test_templates import LIMIT, nested

CLASSES = ("AutoConfig", "AutoModel", "AutoModelForImageTextToText", "AutoProcessor", "AutoImageProcessor")
AUTO_MAP: dict[str, Any] = {**dict.fromkeys(CLASSES, "evil.Evil"), "AutoTokenizer": ["evil.Evil", "evil.EvilFast"]}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("worlds")
    for name, family in FAMILIES.items():
        family.build_tiny(folder / name)
    return {name: folder / name for name in FAMILIES}


@pytest.fixture
def world(here: Path, worlds: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(template, "CPU_SECONDS", 1)
    monkeypatch.setattr(template, "MEMORY_BYTES", 256 << 20)
    return Path(shutil.copytree(worlds["cosmos_predict2_5"], here / "world"))


def count(folder: Path) -> list[int]:
    return find_family(folder).count_tokens(folder, ["a red square"])


def embed(folder: Path) -> int:
    return find_family(folder).encode_text(folder, ["a red square"], 64, "cpu", torch.float32).shape[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_code_in_world_folder_never_runs(
    here: Path, worlds: dict[str, Path], executed: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Check that every component either loads without the code or is refused, and that no library asks at the terminal."""
    monkeypatch.setattr(builtins, "input", lambda *prompt: pytest.fail(f"asked {prompt}"))
    world = Path(shutil.copytree(worlds[name], here / "world"))
    code = f"open({str(executed)!r}, 'w').write('code ran')"
    for file in list(world.rglob("*config.json")):
        change_json(file, lambda document: document.update(auto_map=AUTO_MAP))
        (file.parent / "evil.py").write_text(code)
        (file.parent / "custom_generate").mkdir(exist_ok=True)
        (file.parent / "custom_generate/generate.py").write_text(code)
    for load in (
        *(check_components, count, embed, load_scheduler, lambda folder: load_transformer(folder, torch.float32)),
        lambda folder: load_vae(folder, "cpu", torch.float32),
    ):
        assert guarded(lambda load=load: load(world) is not False)
    change_json(world / "tokenizer/tokenizer_config.json", lambda document: document.update(tokenizer_class="Evil"))
    for load in (count, embed):
        words = ("tokenizer_config.json names the class evil.Evil", "world models never run code")
        refused(lambda load=load: load(world), CheckpointError, f"{world / 'tokenizer'}: ", "custom code", *words)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (nested(3, ""), LIMIT),
        ("{% if messages[0].role == 'system' %}" + nested(3, "") + "{% endif %}", LIMIT),
        ("{% if messages[1].content[0].text|length > 999 %}" + nested(3, "") + "{% endif %}", LIMIT),
        ("{{ 'a' * 10 ** 10 }}", LIMIT),
        ("{% include '/etc/passwd' %}", "TypeError: no loader"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ raise_exception('no prompts here') }}", "no prompts here"),
    ],
)
def test_bad_template_of_world_is_rejected(world: Path, source: str, words: str) -> None:
    (world / "tokenizer/chat_template.jinja").write_text(source)
    refused(lambda: count(world), CheckpointError, f"{world / 'tokenizer'}: the chat template", words)


def test_world_template_is_checked_before_encoding(world: Path) -> None:
    (world / "tokenizer/chat_template.jinja").write_text("{{ 'a' * 10 ** 10 }}")
    refused(lambda: embed(world), CheckpointError, f"{world / 'tokenizer'}: the chat template", LIMIT)


def test_missing_template_of_world_is_rejected(world: Path) -> None:
    (world / "tokenizer/chat_template.jinja").unlink()
    refused(lambda: count(world), CheckpointError, f"{world / 'tokenizer'}: the chat template is missing")
