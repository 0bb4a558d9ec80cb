"""Hostile chat templates, which are programs that come with a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsreason.data.render import render_prompt
from dsreason.data.types import Sample
from dsreason.errors import CheckpointError, DataError
from dsreason.families import FAMILIES
from dsreason.models.processors import template
from dsreason.models.processors.loading import load_processor
from dsreason.models.tiny import build_tiny
from tests.unit.hostile.guard import guarded, refused

SAMPLE = Sample("7", [{"role": "user", "content": "What is it?"}])
TOKENS = FAMILIES["qwen2_5_vl"].tokens
LIMIT = "takes more than 1 s or 256 MiB"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return build_tiny("qwen2_5_vl", folder, hidden_size=64, num_layers=1, vision_depth=1)


@pytest.fixture
def model(here: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(template, "CPU_SECONDS", 1)
    monkeypatch.setattr(template, "MEMORY_BYTES", 256 << 20)
    return Path(shutil.copytree(base, here / "model"))


def nested(levels: int, body: str) -> str:
    return "{% for i in range(99999) %}" * levels + body + "{% endfor %}" * levels


REFUSED = {
    "loops in loops": (nested(3, ""), LIMIT),
    "a long range": ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError: Range too big"),
    "gigabytes in one text": ("{{ 'a' * 10 ** 10 }}", LIMIT),
    "gigabytes in many texts": (nested(1, "{{ 'a' * 100000 }}"), LIMIT),
    "gigabytes of padding": ("{{ 'a'.center(10 ** 10) }}", LIMIT),
    "gigabytes of digits": ("{{ '%09999999999d' % 1 }}", LIMIT),
    "gigabytes in a list": ("{{ [1] * 10 ** 10 }}", LIMIT),
    "a number without end": ("{{ 10 ** (10 ** 9) }}", LIMIT),
    "loops after another turn": ("{% if messages|length > 1 %}" + nested(3, "") + "{% endif %}", LIMIT),
    "loops for a long text": ("{% if messages[0].content|length > 999 %}" + nested(3, "") + "{% endif %}", LIMIT),
    "loops for a conversation": ("{% if not add_generation_prompt %}" + nested(3, "") + "{% endif %}", LIMIT),
    "doubling": (
        "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        LIMIT,
    ),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "nested parentheses": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "RecursionError"),
    "a file": ("{% include '/etc/passwd' %}", "TypeError: no loader"),
    "a module": ("{% import 'os' as os %}", "TypeError: no loader"),
    "a parent": ("{% extends 'outside/flag' %}", "TypeError: no loader"),
    "all classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError: access to attribute '__class__'"),
    "a call of the system": ("{{ cycler.__init__.__globals__.os.mkdir('new') }}", "SecurityError"),
    "changed messages": ("{{ messages.append(1) }}", "SecurityError"),
    "division by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "text and number": ("{{ 'a' + 1 }}", "TypeError"),
    "half a statement": ("{% for %}", "TemplateSyntaxError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_template_is_rejected_at_model_loading(model: Path, name: str) -> None:
    source, words = REFUSED[name]
    (model / "chat_template.jinja").write_text(source)
    refused(lambda: load_processor(model), CheckpointError, f"{model}: the chat template", words)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_sandbox_blocks_hidden_attributes(model: Path, source: str) -> None:
    (model / "chat_template.jinja").write_text(source)

    def show() -> str:
        processor = load_processor(model)
        return processor.apply_chat_template(SAMPLE.messages, tokenize=False)

    try:
        assert guarded(show) == ""
    except CheckpointError as error:
        assert "SecurityError" in str(error)


def test_rejected_roles_are_reported_with_sample(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    processor = load_processor(model)
    refused(
        lambda: render_prompt(processor, TOKENS, SAMPLE), DataError, "'7'", "rejects the roles user", "no users here"
    )


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{% include 'x' %}", "{% for i in range(10**9) %}{% endfor %}"]
)
def test_late_template_failure_is_reported_with_sample(model: Path, source: str) -> None:
    (model / "chat_template.jinja").write_text("{% if messages|length > 1 %}" + source + "{% endif %}")
    processor = load_processor(model)
    longer = Sample("7", [*SAMPLE.messages, {"role": "assistant", "content": "red"}, *SAMPLE.messages])
    refused(lambda: render_prompt(processor, TOKENS, longer), DataError, "'7'", "the chat template failed")


def test_text_only_template_is_accepted(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0].content + '!' }}")
    assert guarded(lambda: load_processor(model).apply_chat_template(SAMPLE.messages, tokenize=False)) == "What is it?!"
