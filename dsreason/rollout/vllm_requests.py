"""Prompts as vLLM takes them, and its completions as ours."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerBase

from dsreason.data.media_plan import Medium
from dsreason.rollout.protocol import Completion, RolloutError, Sampling, check_no_media_tokens, single_turn

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput


class Request(NamedTuple):
    """A prompt on its way to the ranks of its tensor-parallel group."""

    sample_id: str
    prompt_ids: list[int]
    expanded_ids: list[int]
    media: list[Medium]
    sampling: Sampling
    seed: int


def request_seed(seed: int, stream: int) -> int:
    """Return what names a random stream to vLLM: 63 bits, as its seeds are signed."""
    return int(np.random.SeedSequence((seed, stream)).generate_state(1, np.uint64)[0] >> 1)


def make_sampling_params(
    sampling: Sampling, seed: int, stop_ids: Sequence[int], banned_ids: Collection[int]
) -> SamplingParams:
    """Make vLLM's parameters of a request. Completions end at `stop_ids` and never hold `banned_ids`."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        max_tokens=sampling.max_completion_length,
        seed=seed,
        logprobs=0,  # only of the sampled token
        ignore_eos=True,  # the stop tokens are those of the generation config, not the tokenizer's as well
        stop_token_ids=list(stop_ids),
        # Added before the temperature divides: any finite number would let a hot sampler through.
        logit_bias=dict.fromkeys(banned_ids, -float("inf")),
        detokenize=False,
    )


def to_inputs(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Return what vLLM reads: ids with one placeholder a medium, and media that already have their size and frames.

    vLLM processes a medium once and finds it again by its digest, which requests with the same prompt share.
    """
    digests: dict[int, str] = {}
    inputs = []
    for request in requests:
        vllm_input: dict[str, Any] = {"prompt_token_ids": request.prompt_ids}
        if request.media:
            media: dict[str, list[Medium]] = {}
            names: dict[str, list[str]] = {}
            for medium in request.media:
                if id(medium) not in digests:
                    digests[id(medium)] = digest(medium)
                kind = "image" if isinstance(medium, Image.Image) else "video"
                media.setdefault(kind, []).append(medium)
                names.setdefault(kind, []).append(digests[id(medium)])
            vllm_input |= {"multi_modal_data": media, "multi_modal_uuids": names}
            vllm_input["mm_processor_kwargs"] = {"do_resize": False}
        inputs.append(vllm_input)
    return inputs


def digest(medium: Medium) -> str:
    """Of everything that the processor reads: pixels, and what says how they lie; of a video its times as well."""
    if isinstance(medium, Image.Image):
        facts = repr((medium.mode, medium.size))
        pixels: bytes | memoryview = medium.tobytes()
    else:
        frames, metadata = medium
        facts = repr((frames.dtype.str, frames.shape, sorted(metadata.items())))
        pixels = np.ascontiguousarray(frames).data
    content = hashlib.sha256(facts.encode())
    content.update(pixels)
    return content.hexdigest()


def check_output(
    request: Request, output: RequestOutput, banned_ids: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise RolloutError if vLLM read another prompt than ours, or did not end the completion as asked."""
    read = list(output.prompt_token_ids)
    if read != request.expanded_ids:
        raise RolloutError(
            f"sample {request.sample_id!r}: the engine read another prompt than the trainer does: "
            + difference(read, request.expanded_ids, tokenizer)
        )
    drawn = output.outputs[0]
    if drawn.finish_reason not in ("stop", "length"):
        raise RolloutError(f"sample {request.sample_id!r}: the completion ended with {drawn.finish_reason!r}")
    check_no_media_tokens(request.sample_id, drawn.token_ids, banned_ids, tokenizer)


def to_completion(output: RequestOutput, version: int, tokenizer: PreTrainedTokenizerBase) -> Completion:
    drawn = output.outputs[0]
    ids = tuple(drawn.token_ids)
    return single_turn(
        ids=ids,
        text=tokenizer.decode(ids, skip_special_tokens=True),
        logprobs=tuple(at[token].logprob for token, at in zip(ids, drawn.logprobs, strict=True)),
        finish_reason=drawn.finish_reason,
        version=version,
    )


def difference(read: Sequence[int], expected: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Lengths, the first place where two token lists part, and the tokens there."""
    pairs = zip(read, expected, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(read), len(expected)))
    reported, wanted = (
        " ".join(tokenizer.convert_ids_to_tokens(list(ids[max(0, at - 2) : at + 6]))) for ids in (read, expected)
    )
    return f"{len(read)} tokens instead of {len(expected)}; around token {at} it has {reported!r} instead of {wanted!r}"
