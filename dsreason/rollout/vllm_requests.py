"""Functions that convert prompts to vLLM inputs, and vLLM outputs to completions."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerBase

from dsreason.data.media_plan import Medium
from dsreason.rollout.protocol import Completion, RolloutError, Sampling, check_no_media_tokens, make_single_turn

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput


class RolloutRequest(NamedTuple):
    """Prompt with its media and sampling settings, which is sent to all ranks of a tensor-parallel group."""

    sample_id: str
    prompt_ids: list[int]
    expanded_ids: list[int]
    media: list[Medium]
    sampling: Sampling
    seed: int


def make_request_seed(seed: int, stream: int) -> int:
    """Return vLLM's seed for a random stream; the seed has 63 bits, because vLLM uses signed 64-bit integers."""
    return int(np.random.SeedSequence((seed, stream)).generate_state(1, np.uint64)[0] >> 1)


def make_sampling_params(
    sampling: Sampling, seed: int, stop_ids: Sequence[int], banned_ids: Collection[int]
) -> SamplingParams:
    """Build vLLM's sampling parameters for a request. Completions end at `stop_ids` and never contain `banned_ids`."""
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
        logprobs=0,  # return the log-probability of the sampled token only
        ignore_eos=True,  # `stop_ids` come from the generation config; vLLM would use the tokenizer's
        stop_token_ids=list(stop_ids),
        # The bias is infinite, because vLLM divides it by the temperature, which would weaken a finite bias.
        logit_bias=dict.fromkeys(banned_ids, -float("inf")),
        detokenize=False,
    )


def to_inputs(requests: Sequence[RolloutRequest]) -> list[dict[str, Any]]:
    """Convert requests to vLLM's inputs: token ids with one placeholder per media item, and the resized and sampled media.

    vLLM processes each media item once and caches the result by its digest, which is the same in all requests for a prompt.
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
                    digests[id(medium)] = compute_digest(medium)
                kind = "image" if isinstance(medium, Image.Image) else "video"
                media.setdefault(kind, []).append(medium)
                names.setdefault(kind, []).append(digests[id(medium)])
            vllm_input |= {"multi_modal_data": media, "multi_modal_uuids": names}
            vllm_input["mm_processor_kwargs"] = {"do_resize": False}
        inputs.append(vllm_input)
    return inputs


def compute_digest(medium: Medium) -> str:
    """Compute a digest of all data that the processor reads: pixels, their layout, and a video's metadata."""
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
    request: RolloutRequest, output: RequestOutput, banned_ids: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise RolloutError if vLLM read a different prompt than the trainer, stopped abnormally, or sampled a media token."""
    engine_ids = list(output.prompt_token_ids)
    if engine_ids != request.expanded_ids:
        raise RolloutError(
            f"sample {request.sample_id!r}: the engine's prompt differs from the trainer's: "
            + describe_difference(engine_ids, request.expanded_ids, tokenizer)
        )
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise RolloutError(
            f"sample {request.sample_id!r}: the completion ended with finish_reason {completion.finish_reason!r}; it must be "
            "'stop' or 'length'"
        )
    check_no_media_tokens(request.sample_id, completion.token_ids, banned_ids, tokenizer)


def to_completion(output: RequestOutput, version: int, tokenizer: PreTrainedTokenizerBase) -> Completion:
    completion = output.outputs[0]
    ids = tuple(completion.token_ids)
    return make_single_turn(
        ids=ids,
        text=tokenizer.decode(ids, skip_special_tokens=True),
        logprobs=tuple(by_token[token].logprob for token, by_token in zip(ids, completion.logprobs, strict=True)),
        finish_reason=completion.finish_reason,
        version=version,
    )


def describe_difference(actual: Sequence[int], expected: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Describe how two lists of token ids differ: give both lengths, and the tokens around the first difference."""
    pairs = zip(actual, expected, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(actual), len(expected)))
    actual_text, expected_text = (
        " ".join(tokenizer.convert_ids_to_tokens(list(ids[max(0, index - 2) : index + 6])))
        for ids in (actual, expected)
    )
    return (
        f"it has {len(actual)} tokens instead of {len(expected)}, and around token {index} {actual_text!r} instead of "
        f"{expected_text!r}"
    )
