"""Trial run of a model folder's chat template, which happens before rows are rendered."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import SecurityError

from dsreason.config.schema_data import PASSED_BY_US
from dsreason.data.render import NO_ARGUMENTS
from dsreason.errors import CheckpointError, ConfigError
from dsreason.problems import find_nearest

FORK = multiprocessing.get_context("fork")
CPU_SECONDS, MEMORY_BYTES = 10, 1024**3
"""Limits of CPU time and memory for the trial, which renders a few short conversations and normally takes milliseconds."""
LEAST_MEMORY_BYTES = 64 << 20
TEXT = "What is it?"
LONG_TEXT = 1000 * TEXT
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": [{"type": "image"}, {"type": "video"}, {"type": "text", "text": TEXT}]}],
    [{"role": "user", "content": TEXT}],
    [{"role": role, "content": LONG_TEXT} for role in ("system", "user", "assistant", "user")],
)
"""Conversations that a template must process within the limits; a template need not support all of them."""


STANDARD = (
    *("raise_exception", "strftime_now"),
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
"""Functions and tokens that transformers gives to every template."""


class GenerationTag(Extension):
    """Tag `{% generation %}…{% endgeneration %}`, with which templates mark replies."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_arguments(path: Path, processor: Any, arguments: Mapping[str, Any], key: str) -> None:
    """Raise ConfigError if the chat template does not use one of the `arguments`, the value of configuration key `key`."""
    if not arguments:
        return
    try:
        tree = Environment(extensions=[loopcontrols, GenerationTag]).parse(processor.chat_template)
    except (TemplateSyntaxError, RecursionError):
        return  # `check_template` reports the problem
    passed = {*PASSED_BY_US, *STANDARD, *processor.tokenizer.special_tokens_map}
    used = sorted(find_undeclared_variables(tree) - passed)
    if name := next((name for name in arguments if name not in used), None):
        near = find_nearest(name, used)
        raise ConfigError(
            f"{key}: {name} is not an argument of the chat template in {path}, which has "
            f"{', '.join(used) or 'no arguments'}; {f'did you mean {near}?' if near else 'remove it'}"
        )


def check_template(
    path: Path,
    processor: Any,
    conversations: Sequence[list[dict[str, Any]]] = CONVERSATIONS,
    *,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> None:
    """Raise CheckpointError if the chat template does not terminate, needs gigabytes or fails on all `conversations`.

    A template is a program that comes with the model. Jinja's sandbox denies it access to files and code, but does not prevent
    endless loops or huge strings, so the template is tested in a process with limits on time and memory. Errors that the template
    raises itself (`raise_exception`) may depend on the roles, so the test accepts them; if such an error occurs for a row later,
    the message names the row.
    """
    compute_memory_limit()
    reader, writer = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_try_template, args=(processor, conversations, arguments, writer))
    child.start()
    writer.close()
    try:
        problem = reader.recv()
    except EOFError:
        problem = f"takes more than {CPU_SECONDS} s or {compute_memory_limit() >> 20} MiB"
    child.join()
    if problem:
        raise CheckpointError(
            f"{path}: the chat template {problem} on a conversation of a few messages; restore the original template"
        )


def compute_memory_limit() -> int:
    """Return how many bytes of memory a template may use: `MEMORY_BYTES`, or less if the shell's limit (`ulimit -v`) is lower.

    Raises:
        ConfigError: the shell's limit leaves too little memory for any template.
    """
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory_limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard - read_address_space())
    if memory_limit < LEAST_MEMORY_BYTES:
        raise ConfigError(
            f"ulimit -v: the limit of {hard >> 20} MiB leaves {max(memory_limit, 0) >> 20} MiB for the chat template, but at "
            f"least {LEAST_MEMORY_BYTES >> 20} MiB are needed; raise the limit (`ulimit -v unlimited`)"
        )
    return memory_limit


def read_address_space() -> int:
    """Return the size of the current process's address space, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _try_template(
    processor: Any, conversations: Sequence[list[dict[str, Any]]], arguments: Mapping[str, Any], writer: Connection
) -> None:
    """Test the template in the child process, and send a description of the problem, or "" if the template works.

    If the template exceeds a limit, nothing is sent.
    """
    signal.alarm(
        6 * CPU_SECONDS
    )  # ends the child if it hangs on a lock that a thread of the parent held during the fork
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    seconds = CPU_SECONDS if hard == resource.RLIM_INFINITY else min(CPU_SECONDS, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    limit = read_address_space() + compute_memory_limit()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with suppress(MemoryError):
        problems = [_find_problem(processor, conversation, arguments) for conversation in conversations]
        writer.send(problems[0] if all(problems) else "")  # some templates support only text


def _find_problem(processor: Any, conversation: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
    try:
        for is_prompt in (True, False):  # training renders conversations, and generation prompts
            processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=is_prompt, **arguments)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (the template may raise anything)
        if isinstance(error, TemplateError) and not isinstance(error, SecurityError | TemplateSyntaxError):
            return ""
        return f"fails ({type(error).__name__}: {error!s:.200})"
    return ""
