"""Rendering of conversations with the chat template, in segments whose trained tokens are marked.

The text is cut before and after each assistant text, and the pieces are tokenized separately. Thus, the ids of a training sample
always start with those of its prompt, and an answer has the tokens that sampling would produce. If all text were tokenized at
once, a line break at the start of an answer would merge with the one at the end of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from transformers import ProcessorMixin

from dsreason.data.messages import check_characters, get_text
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError
from dsreason.families.family import Tokens


@dataclass(frozen=True)
class RenderedSegment:
    """Tokens of one piece of a rendered conversation; the first `num_trained` of them are trained."""

    ids: list[int]
    num_trained: int = 0

    @property
    def mask(self) -> list[bool]:
        return [position < self.num_trained for position in range(len(self.ids))]


def render_training(processor: ProcessorMixin, tokens: Tokens, sample: Sample) -> list[RenderedSegment]:
    """Render the complete conversation; the text of every assistant turn and the end-of-turn token after it are trained.

    Raises:
        DataError: the sample has no assistant turn, or the template changes an assistant's text.
    """
    messages = clean_messages(processor, tokens, sample)
    turns = _find_assistant_turns(messages)
    if not turns:
        raise DataError(
            f"sample {sample.id!r} has neither an assistant message nor an answer, so it has nothing to train on"
        )
    rendered = _render(processor, sample, messages, generate=False)
    spans = []
    for number in turns:
        prompt = _render(processor, sample, messages[:number], generate=True)
        span = _find_assistant_span(rendered, prompt, messages[number]["content"])
        if span is None:
            raise DataError(_describe_changed_text(sample, number, rendered, prompt, messages[number]["content"]))
        end_of_turn = processor.tokenizer.eos_token
        if not rendered.startswith(end_of_turn, span[1]):
            raise DataError(
                f"sample {sample.id!r}, message {number}: the chat template must end the assistant's turn with "
                f"{end_of_turn!r}, but continues with {rendered[span[1] : span[1] + 20]!r}; change the template"
            )
        spans.append(span)
    return _tokenize_segments(processor, rendered, spans)


def render_prompt(processor: ProcessorMixin, tokens: Tokens, sample: Sample) -> list[RenderedSegment]:
    """Render the complete conversation and the generation prompt for the next assistant turn; no token is trained."""
    messages = clean_messages(processor, tokens, sample)
    rendered = _render(processor, sample, messages, generate=True)
    prompts = {n: _render(processor, sample, messages[:n], generate=True) for n in _find_assistant_turns(messages)}
    spans = [_find_assistant_span(rendered, prompt, messages[n]["content"]) for n, prompt in prompts.items()]
    # A turn that the template shortens is not trained here, so it does not need separate token boundaries.
    segments = _tokenize_segments(processor, rendered, [span for span in spans if span is not None])
    return [RenderedSegment(segment.ids) for segment in segments]


def _find_assistant_turns(messages: list[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _tokenize_segments(processor: ProcessorMixin, rendered: str, spans: list[tuple[int, int]]) -> list[RenderedSegment]:
    """Tokenize `rendered`, cut at both ends of every span; the spans and the token after each of them are trained."""
    bounds = [0, *(bound for span in spans for bound in span), len(rendered)]
    texts = [rendered[start:stop] for start, stop in pairwise(bounds)]  # other, span, other, span, …, other
    ids = processor.tokenizer(texts, add_special_tokens=False)["input_ids"]
    segments = []
    for i, part in enumerate(ids):
        after_span = min(i, 1)  # the token after a span is the end of the turn and is trained with it
        segments.append(RenderedSegment(list(part), len(part) if i % 2 else after_span))
    return segments


def _find_assistant_span(rendered: str, prompt: str, content: str) -> tuple[int, int] | None:
    """Return the range of characters in `rendered` that the model writes after `prompt`; None if `content` does not follow."""
    if not rendered.startswith(prompt):
        return None
    # Some templates trim the text; others include its beginning ("<think>\n") in the generation prompt.
    for text in (content, content.strip()):
        for overlap in range(min(len(prompt), len(text)) + 1):
            if prompt.endswith(text[:overlap]) and rendered.startswith(text[overlap:], len(prompt)):
                return len(prompt), len(prompt) + len(text) - overlap
    return None


def _describe_changed_text(sample: Sample, number: int, rendered: str, prompt: str, content: str) -> str:
    difference = (
        repr(rendered[len(prompt) :][:80]) if rendered.startswith(prompt) else "different text before this turn"
    )
    return (
        f"sample {sample.id!r}, message {number}: the chat template changes the conversation (some drop the reasoning "
        f"of earlier turns): the assistant's text begins with {content[:80]!r}, but the template renders {difference}; "
        "split the conversation so that this is its last turn, or change the template"
    )


def _render(processor: ProcessorMixin, sample: Sample, messages: list[Message], *, generate: bool) -> str:
    try:
        text: str = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        return text
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"sample {sample.id!r}: the chat template rejects the roles {roles}: {error}") from error
    except Exception as error:  # the template is a program that comes with the model
        raise DataError(f"sample {sample.id!r}: the chat template failed: {type(error).__name__}: {error}") from error


# ---------------------------------------------------------------- message checks


def clean_messages(processor: ProcessorMixin, tokens: Tokens, sample: Sample) -> list[Message]:
    """Convert the messages to the form that chat templates expect: media parts without paths, assistant texts as single strings.

    Raise DataError if a message cannot be used.
    """
    if not sample.messages or sample.messages[0]["role"] == "assistant":
        raise DataError(f"sample {sample.id!r}: the first message must be from the user or the system")
    template_tokens = {tokens.turn_start, tokens.turn_end, tokens.media_start, tokens.media_end}
    reserved = template_tokens | {tokens.image, tokens.video, processor.tokenizer.eos_token}
    cleaned = []
    for number, message in enumerate(sample.messages):
        location = f"sample {sample.id!r}, message {number}"
        text = get_text(message)
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
            content = _join_assistant_text(location, content)
        cleaned.append({**message, "content": content})
    return cleaned


def _join_assistant_text(location: str, content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            raise DataError(f"{location}: an assistant message may contain only text; remove its images and videos")
        content = "".join(part["text"] for part in content)
    if not content.strip():
        raise DataError(f"{location}: the assistant's text is empty")
    return content
