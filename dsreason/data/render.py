"""Functions that render conversations with the chat template and split the text into segments that mark the trained tokens.

The rendered text is cut before and after each assistant text, and the pieces are tokenized separately. A training sample's ids
therefore always start with the ids of its prompt, and its answer has the same tokens as if it had been sampled. If the whole text
were tokenized at once, a line break at the start of an answer would merge with the line break at the end of the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from transformers import ProcessorMixin

from dsreason.data.messages import check_characters, get_text
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError
from dsreason.families.family import Tokens

NO_THOUGHTS = "<think>\n\n</think>\n\n"
"""Empty reasoning block that the templates of reasoning models put before an answer without reasoning. It is excluded from the
loss, because a model that learned to write it would stop reasoning."""


NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class RenderedSegment:
    """Tokens of one piece of a rendered conversation; the first `num_trained` of them count in the loss."""

    ids: list[int]
    num_trained: int = 0

    @property
    def mask(self) -> list[bool]:
        return [position < self.num_trained for position in range(len(self.ids))]


def render_training(
    processor: ProcessorMixin, tokens: Tokens, sample: Sample, arguments: Mapping[str, Any] = NO_ARGUMENTS
) -> list[RenderedSegment]:
    """Render the complete conversation for training; the trained tokens are each reply's text and the token that ends its turn.

    Replies whose message has `"trained": False` are excluded. `arguments` (`data.template_arguments`) are passed to the template.

    Raises:
        DataError: the conversation has no reply to train on, or the template changes such a reply.
    """
    messages = clean_messages(processor, tokens, sample)
    turns = _find_assistant_turns(messages)
    trained = [number for number in turns if sample.messages[number].get("trained", True)]
    if not turns:
        raise DataError(
            f"sample {sample.id!r} has neither an assistant message nor an answer, so it has nothing to train on"
        )
    if not trained:
        raise DataError(
            f'sample {sample.id!r}: every reply has "loss": false or belongs to the prompt, so no token would be trained'
        )
    rendered = _render(processor, sample, messages, arguments, generate=False)
    ends = list_turn_ends(processor, tokens)
    spans = []
    for number in turns:
        prompt = _render(processor, sample, messages[:number], arguments, generate=True)
        span = _find_assistant_span(rendered, prompt, messages[number], ends)
        if span is None and number not in trained:
            continue  # the template may drop the reasoning of earlier turns
        if span is None:
            raise DataError(_describe_changed_text(sample, number, rendered, prompt, messages[number]))
        if not rendered.startswith(ends, span[1]):
            raise DataError(
                f"sample {sample.id!r}, message {number}: the chat template must end the assistant's turn with "
                f"{' or '.join(map(repr, ends))}, but writes {rendered[span[1] : span[1] + 20]!r} instead; change the template"
            )
        spans += _list_spans(prompt, span, is_trained=number in trained)
    return _tokenize_segments(processor, rendered, spans)


def render_prompt(
    processor: ProcessorMixin, tokens: Tokens, sample: Sample, arguments: Mapping[str, Any] = NO_ARGUMENTS
) -> list[RenderedSegment]:
    """Render the complete conversation and the generation prompt for the next assistant turn, without trained tokens."""
    messages = clean_messages(processor, tokens, sample)
    rendered = _render(processor, sample, messages, arguments, generate=True)
    ends = list_turn_ends(processor, tokens)
    turns = _find_assistant_turns(messages)
    prompts = {n: _render(processor, sample, messages[:n], arguments, generate=True) for n in turns}
    spans = []
    for number, prompt in prompts.items():
        # No turns are trained on here, so turns that the template shortens need no token boundaries.
        if (span := _find_assistant_span(rendered, prompt, messages[number], ends)) is not None:
            spans += _list_spans(prompt, span, is_trained=False)
    return _tokenize_segments(processor, rendered, spans)


def list_turn_ends(processor: ProcessorMixin, tokens: Tokens) -> tuple[str, ...]:
    """Return the tokens that may end a turn: the family's end token and the tokenizer's, which differ for many base models."""
    return tuple(dict.fromkeys((tokens.turn_end, processor.tokenizer.eos_token)))


def find_opening(prompt: str) -> str:
    """Return the opening reasoning tag at the end of a generation prompt, such as `<think>\\n`; "" if the prompt has none."""
    opening = re.search(r"<think>\s*\Z", prompt)
    return opening[0] if opening else ""


def _find_assistant_turns(messages: list[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _tokenize_segments(
    processor: ProcessorMixin, rendered: str, spans: list[tuple[tuple[int, int], bool]]
) -> list[RenderedSegment]:
    """Cut `rendered` at both ends of every span and tokenize the pieces; a trained span includes the token that follows it."""
    bounds = [0, *(bound for span, _ in spans for bound in span), len(rendered)]
    texts = [rendered[start:stop] for start, stop in pairwise(bounds)]  # other, span, other, span, …, other
    ids = processor.tokenizer(texts, add_special_tokens=False)["input_ids"]
    segments = [RenderedSegment(list(ids[0]))]
    for (_, is_trained), reply, following in zip(spans, ids[1::2], ids[2::2], strict=True):
        segments.append(RenderedSegment(list(reply), len(reply) if is_trained else 0))
        segments.append(RenderedSegment(list(following), int(is_trained)))  # its first token ends the turn
    return segments


def _list_spans(prompt: str, span: tuple[int, int], *, is_trained: bool) -> list[tuple[tuple[int, int], bool]]:
    """Return an answer's span, preceded by an untrained span if an empty reasoning block separates prompt and answer."""
    thoughts = (len(prompt), span[0])
    return [(span, is_trained)] if span[0] == len(prompt) else [(thoughts, False), (span, is_trained)]


def _find_assistant_span(rendered: str, prompt: str, message: Message, ends: tuple[str, ...]) -> tuple[int, int] | None:
    """Return the character range in `rendered` that the model generates after `prompt`.

    Return None if the range does not contain the message's text. The format of tool calls depends on the template, so for a
    message with tool calls, the range extends to the token that ends its turn.
    """
    if not rendered.startswith(prompt):
        return None
    content: str = message["content"]
    start = _find_answer_start(rendered, prompt, content)
    if calls := message.get("tool_calls"):
        stops = [stop for end in ends if (stop := rendered.find(end, start)) >= 0]
        span = (start, min(stops, default=start))
        reply = rendered[span[0] : span[1]]
        # The prompt may end with the opening reasoning tag.
        expected = [content.strip().removeprefix("<think>").strip(), *(call["function"]["name"] for call in calls)]
        return span if all(text in reply for text in expected) else None
    # Some templates trim the text; others include its beginning ("<think>\n") in the generation prompt.
    for text in (content, content.strip()):
        for overlap in range(min(start, len(text)) + 1):
            if rendered.endswith(text[:overlap], 0, start) and rendered.startswith(text[overlap:], start):
                return start, start + len(text) - overlap
    return None


def _find_answer_start(rendered: str, prompt: str, content: str) -> int:
    """Return the character index at which the answer begins in `rendered`.

    The answer follows the prompt or, if it has no reasoning itself, the empty reasoning block that some templates add after the
    prompt. The prompt may already contain the beginning of this block.
    """
    if not content.lstrip().startswith("<think>"):
        for overlap in range(len(NO_THOUGHTS)):
            if prompt.endswith(NO_THOUGHTS[:overlap]) and rendered.startswith(NO_THOUGHTS[overlap:], len(prompt)):
                return len(prompt) + len(NO_THOUGHTS) - overlap
    return len(prompt)


def _describe_changed_text(sample: Sample, number: int, rendered: str, prompt: str, message: Message) -> str:
    location = f"sample {sample.id!r}, message {number}"
    if calls := message.get("tool_calls"):
        return (
            f"{location}: the chat template omits the tool call {calls[0]['function']['name']!r}; use a model whose "
            "template supports tool calls, or write the call into the text of the message"
        )
    content = message["content"]
    if find_opening(prompt) and "<think>" not in content:
        return (
            f"{location}: the chat template opens <think> before a reply, but this reply has no reasoning: it begins with "
            f"{content[:80]!r}; turn reasoning off with data.template_arguments, such as {{enable_thinking = false}}"
        )
    difference = (
        repr(rendered[len(prompt) :][:80]) if rendered.startswith(prompt) else "different text before this turn"
    )
    return (
        f"{location}: the chat template changes the conversation (some templates drop the reasoning "
        f"of earlier turns): the assistant's text begins with {content[:80]!r}, but the template renders {difference}; "
        "split the conversation so that this is its last turn, or change the template"
    )


def _render(
    processor: ProcessorMixin, sample: Sample, messages: list[Message], arguments: Mapping[str, Any], *, generate: bool
) -> str:
    try:
        text: str = processor.apply_chat_template(
            messages, tools=sample.tools, tokenize=False, add_generation_prompt=generate, **arguments
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"sample {sample.id!r}: the chat template rejects the roles {roles}: {error}") from error
    except Exception as error:  # the template is a program that comes with the model
        raise DataError(f"sample {sample.id!r}: the chat template failed: {type(error).__name__}: {error}") from error
    for tool in sample.tools or ():
        if (name := str(tool["function"].get("name"))) not in text:
            raise DataError(
                f"sample {sample.id!r}: the chat template omits the tool {name!r}; use a model whose template supports tools, "
                "or remove the row's tools"
            )
    return text


# ---------------------------------------------------------------- message checks


def clean_messages(processor: ProcessorMixin, tokens: Tokens, sample: Sample) -> list[Message]:
    """Convert the messages for the chat template: media parts without paths, and assistant texts as single strings.

    Raises:
        DataError: a message is empty, contains a special token, or is invalid in another way.
    """
    if not sample.messages or sample.messages[0]["role"] == "assistant":
        raise DataError(f"sample {sample.id!r}: the first message must be from the user or the system")
    template_tokens = {tokens.turn_start, tokens.turn_end, tokens.media_start, tokens.media_end}
    reserved = (template_tokens | {tokens.image, tokens.video, processor.tokenizer.eos_token}) - {""}
    cleaned = []
    for number, message in enumerate(sample.messages):
        location = f"sample {sample.id!r}, message {number}"
        calls = message.get("tool_calls")
        text = get_text(message) + (json.dumps(calls, ensure_ascii=False) if calls else "")
        try:
            check_characters(text)
        except DataError as error:
            raise DataError(f"{location}: {error}; remove it") from None
        for token in reserved:
            if token in text:
                raise DataError(f"{location}: the text contains the model's special token {token!r}; remove it")
        content = message["content"]
        if not isinstance(content, str):
            content = [part if part["type"] == "text" else {"type": part["type"]} for part in content]
        if message["role"] == "assistant":
            content = _join_assistant_text(location, content, may_be_empty="tool_calls" in message)
        cleaned.append({key: value for key, value in message.items() if key != "trained"} | {"content": content})
    return cleaned


def _join_assistant_text(location: str, content: str | list[dict[str, Any]], *, may_be_empty: bool) -> str:
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            raise DataError(f"{location}: an assistant message may contain only text; remove its images and videos")
        content = "".join(part["text"] for part in content)
    if not content.strip() and not may_be_empty:
        raise DataError(f"{location}: the assistant's text is empty")
    return content
