"""A chat template that lets the model think by default, as that of Cosmos3-Edge does."""

from __future__ import annotations

import shutil
from pathlib import Path

TEMPLATE = """
{%- set enable_thinking = enable_thinking if enable_thinking is defined else true -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{{- ('' if '<think>' in message.content else '<think></think>') + message.content -}}
{%- elif message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{{- part.text if part.type == 'text' else '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '<think></think>') -}}
{%- endif -%}
"""


def write_thinking_model(source: Path, output: Path) -> Path:
    """Copy a tiny Qwen model, and replace its chat template."""
    shutil.copytree(source, output)
    (output / "chat_template.jinja").write_text(TEMPLATE)
    return output
