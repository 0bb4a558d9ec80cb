"""Rollouts from a vLLM engine that lives in the trainer's processes and sleeps while the policy trains."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dsreason.data.chat import Medium
from dsreason.models.load import model_config
from dsreason.rollout.protocol import (
    Completion,
    Held,
    RolloutError,
    Sampling,
    SyncError,
    check_drawn,
    check_version,
    media_token_ids,
)
from dsreason.rollout.transformers_engine import stop_token_ids
from dsreason.rollout.vllm_process import own_shared_memory, release, set_environment, undisturbed, without_zero3_flag
from dsreason.rollout.vllm_versions import keep_video_times
from dsreason.rollout.weight_sync import (
    Sending,
    changed,
    check_arrival,
    clear_deepstack,
    expected_shapes,
    find_different,
    find_places,
    fingerprint,
    fingerprints,
    held_values,
    listed,
    repair_tied_output,
    whole_layers,
)
from dsreason.runtime.world import World, gather_objects

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

    from dsreason.data.chat import EncodedPrompt

log = logging.getLogger(__name__)


class Request(NamedTuple):
    """A prompt on its way to the ranks of its tensor-parallel group."""

    sample_id: str
    prompt_ids: list[int]
    expanded_ids: list[int]
    media: list[Medium]
    seed: int


class VLLMEngine:
    """A `RolloutEngine` on vLLM. Every `tensor_parallel_size` consecutive ranks hold one copy of the policy together.

    All ranks construct it together, after `init_world`; it starts asleep. On a CPU vLLM keeps its memory, but goes
    through the same states. `sleep_level` 1 keeps a copy of the weights in host memory, 2 keeps nothing.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        world: World,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.4,
        sleep_level: int = 2,
        enforce_eager: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        if world.size % tensor_parallel_size:
            raise ValueError(f"{world.size} ranks cannot be cut into groups of {tensor_parallel_size}")
        self.tokenizer, self.world, self.dtype = tokenizer, world, dtype
        self.max_model_len, self.tensor_parallel_size = max_model_len, tensor_parallel_size
        self.sleep_level = sleep_level
        self.stop_ids = stop_token_ids(path)
        self.banned_ids = media_token_ids(tokenizer)
        self.version: int | None = None
        self.sent: dict[str, Tensor] = {}
        """Fingerprints of what the last sync sent."""
        self.said_what_is_lost = False
        self._stats: dict[str, float] = {}
        set_environment(world)
        with undisturbed(world), without_zero3_flag(), own_shared_memory(world):
            config = model_config(path, trust_remote_code=trust_remote_code)
            self.expected = expected_shapes(config, trust_remote_code=trust_remote_code)
            self.llm = self._start(path, gpu_memory_utilization, enforce_eager, trust_remote_code)
            (self.model,) = self.llm.apply_model(lambda model: model)
            self.places = find_places(self.model, list(self.expected))
            self._sleep()
        self.weights_awake = self.cache_awake = False

    def _start(self, path: Path, gpu_memory_utilization: float, enforce_eager: bool, trust_remote_code: bool) -> Any:
        on_cuda = self.world.device.type == "cuda"
        from vllm import LLM

        keep_video_times()
        memory: dict[str, Any] = {"enable_sleep_mode": True, "gpu_memory_utilization": gpu_memory_utilization}
        return LLM(
            str(path),
            dtype=str(self.dtype).removeprefix("torch."),
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=self.tensor_parallel_size,
            seed=self.world.rank // self.tensor_parallel_size,
            max_model_len=self.max_model_len,
            enforce_eager=enforce_eager or not on_cuda,
            logprobs_mode="processed_logprobs",
            mm_processor_cache_gb=0,
            use_tqdm_on_load=False,
            trust_remote_code=trust_remote_code,
            **(memory if on_cuda else self._whole_prompts()),
        )

    def _whole_prompts(self) -> dict[str, Any]:
        """On a CPU vLLM cannot rewind a request's random stream, as it does after each part of a prompt but the last."""
        return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, self.max_model_len)}

    @property
    def _group(self) -> dist.ProcessGroup:
        """The ranks that hold one copy together; gloo, for Python objects and tensors on the CPU."""
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().cpu_group

    @property
    def keeps_weights(self) -> bool:
        return self.sleep_level == 1

    # ------------------------------------------------------------ phases

    def wake(self) -> None:
        """Memory for the weights; that for keys and values follows at the end of `sync`, when gathers are over."""
        start = time.perf_counter()
        if not self.weights_awake:
            self._wake("weights")
            self.weights_awake = True
            clear_deepstack(self.model)
            if lost := changed(self.buffers, fingerprints(self.model.named_buffers())):
                raise SyncError(f"{len(lost)} buffers lost their values in sleep: {listed(lost)}")
        self._stats["time/wake"] = time.perf_counter() - start

    def kept(self, names: Collection[str]) -> set[str]:
        """Looks what is there: sleep at level 2 loses it on a GPU, and not on a CPU."""
        if not self.weights_awake:
            return set()
        frozen = self.sent.keys() & set(names)
        places = [place for place in self.places if place.name in frozen]
        lost = {place.name for place in find_different(places, self.sent, self._group)}
        whole = whole_layers(self.places, frozen - lost)
        kept = set.intersection(*gather_objects(whole))
        if frozen - kept and not self.said_what_is_lost:
            self.said_what_is_lost = True
            log.info(
                "%d of %d frozen tensors are sent at every sync: %d are lost in sleep (rollout.sleep_level %d), and %d are "
                "in one layer with such or with trained ones",
                *(len(frozen - kept), len(frozen), len(lost), self.sleep_level, len(frozen - kept - lost)),
            )
        return kept

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, kept: Collection[str] = ()) -> None:
        start = time.perf_counter()
        if not self.weights_awake:
            raise SyncError(f"weights version {version} were sent to a sleeping engine: wake it first")
        before = {name: self.sent[name] for name in kept if name in self.sent}
        self.version, self.sent = None, {}  # a sync that fails half-way leaves no usable weights
        sending = Sending(weights, self.expected, self.dtype, before)
        with undisturbed(self.world):
            try:
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(sending)})
            finally:
                sending.drain()
            sending.finish()
            repair_tied_output(self.model)
        check_arrival(self.places, sending.fingerprints, self._group)
        self._empty_cache()
        self.version, self.sent = version, sending.fingerprints
        self._stats["time/sync"] = time.perf_counter() - start

    @torch.no_grad()
    def held(self) -> Held:
        """Parameters by the name in the Hugging Face model and, where it lies elsewhere too, each place by its own."""
        parameters = {f"{place.name} ({place.engine_name})": fingerprint(*held_values(place)) for place in self.places}
        return Held(parameters, fingerprints(self.model.named_buffers()))

    def generate(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling: Sampling,
        *,
        version: int,
        streams: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Collective over the tensor-parallel group: its ranks complete all their prompts together, each keeps its own."""
        start = time.perf_counter()
        shares = self._gather(prompts, sampling, version, range(len(prompts)) if streams is None else streams)
        if not self.cache_awake:  # after a sleep that kept the weights
            self._empty_cache()
        requests = [request for share, _ in shares for request in share]
        params = [self._params(settings, request.seed) for share, settings in shares for request in share]
        self._check_room(shares)
        outputs: list[RequestOutput] = []
        if requests:
            inputs = [self._input(request) for request in requests]
            with undisturbed(self.world):
                outputs = self.llm.generate(inputs, params, use_tqdm=False)
        for request, output in zip(requests, outputs, strict=True):
            self._check_output(request, output)
        first = sum(len(share) for share, _ in shares[: self._place_in_group])
        completions = [self._completion(output) for output in outputs[first : first + len(prompts)]]
        seconds = time.perf_counter() - start
        tokens = sum(len(completion.ids) for completion in completions)
        self._stats |= {
            "time/generate": seconds,
            "rollout/tokens": tokens,
            "rollout/tokens_per_second": tokens / seconds,
        }
        return completions

    def sleep(self) -> None:
        start = time.perf_counter()
        if not self.keeps_weights:
            self.version = None
        if self.weights_awake:
            if not self.cache_awake:  # after a failed sync: vLLM sleeps as a whole
                self._wake("kv_cache")
            with undisturbed(self.world):
                self._sleep()
            self.weights_awake = self.cache_awake = False
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self._stats["time/sleep"] = time.perf_counter() - start

    def stats(self) -> dict[str, float]:
        """`time/{wake,sync,generate,sleep}` in seconds, `rollout/tokens` drawn and `rollout/tokens_per_second`."""
        return dict(self._stats)

    def shutdown(self) -> None:
        """Ends the engine and its process groups, and leaves the trainer's. Safe to call twice."""
        if self.llm is None:
            return
        release(self.llm)
        self.llm = self.model = None
        self.places, self.sent, self.buffers = [], {}, {}
        self.version = None
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _wake(self, tag: str) -> None:
        """vLLM only warns where it does not wake up, so its state is asked for."""
        with undisturbed(self.world):
            self.llm.wake_up(tags=[tag])
        asleep = self.llm.llm_engine.is_sleeping()
        if asleep != (tag == "weights"):
            raise RuntimeError(f"vLLM {'still sleeps' if asleep else 'is awake as a whole'} after waking its {tag}")

    def _sleep(self) -> None:
        self.buffers = fingerprints(self.model.named_buffers())
        self.llm.sleep(level=self.sleep_level)

    def _empty_cache(self) -> None:
        """Memory for what weights compute, without what the old ones did: keys and values, the vision tower's outputs."""
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        if not self.cache_awake:
            self._wake("kv_cache")
            self.cache_awake = True

    # ------------------------------------------------------------ prompts and completions

    @property
    def _place_in_group(self) -> int:
        return self.world.rank % self.tensor_parallel_size

    def _gather(
        self, prompts: Sequence[EncodedPrompt], sampling: Sampling, version: int, streams: Sequence[int]
    ) -> list[tuple[list[Request], Sampling]]:
        """Of every rank in the group, its prompts and settings. An empty share counts too: the group works as one."""
        own = [
            Request(
                prompt.sample.id,
                prompt.prompt_ids,
                prompt.encoded.input_ids.tolist(),
                prompt.media,
                request_seed(sampling.seed, stream),
            )
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        share = (own, sampling, version, self.version if self.weights_awake else None)
        shares: list[Any] = [share]
        if self.tensor_parallel_size > 1:
            shares = [None] * self.tensor_parallel_size
            dist.all_gather_object(shares, share, group=self._group)
        for _, _, asked, held in shares:
            check_version(asked, held)
        return [(requests, settings) for requests, settings, *_ in shares]

    def _check_room(self, shares: list[tuple[list[Request], Sampling]]) -> None:
        for requests, sampling in shares:
            for request in requests:
                length = len(request.expanded_ids) + sampling.max_completion_length
                if length > self.max_model_len:
                    raise RolloutError(
                        f"sample {request.sample_id!r}: {len(request.expanded_ids)} prompt tokens and "
                        f"{sampling.max_completion_length} for the completion are more than the engine's "
                        f"{self.max_model_len}"
                    )

    def _params(self, sampling: Sampling, seed: int) -> SamplingParams:
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
            logprobs=0,  # of the drawn token alone
            ignore_eos=True,  # the stop tokens are those of the generation config, not the tokenizer's as well
            stop_token_ids=self.stop_ids,
            # Added before the temperature divides: any finite number would let a hot sampler through.
            logit_bias=dict.fromkeys(self.banned_ids, -float("inf")),
            detokenize=False,
        )

    def _input(self, request: Request) -> dict[str, Any]:
        """What vLLM reads: ids with one placeholder a medium, and media that already have their size and frames."""
        images = [medium for medium in request.media if isinstance(medium, Image.Image)]
        videos = [medium for medium in request.media if not isinstance(medium, Image.Image)]
        given: dict[str, Any] = {"prompt_token_ids": request.prompt_ids}
        if images or videos:
            media = {"image": images, "video": videos}
            given["multi_modal_data"] = {kind: values for kind, values in media.items() if values}
            given["mm_processor_kwargs"] = {"do_resize": False}
        return given

    def _check_output(self, request: Request, output: RequestOutput) -> None:
        read = list(output.prompt_token_ids)
        if read != request.expanded_ids:
            raise RolloutError(
                f"sample {request.sample_id!r}: the engine read another prompt than the trainer does: "
                + difference(read, request.expanded_ids, self.tokenizer)
            )
        drawn = output.outputs[0]
        if drawn.finish_reason not in ("stop", "length"):
            raise RolloutError(f"sample {request.sample_id!r}: the completion ended with {drawn.finish_reason!r}")
        check_drawn(request.sample_id, drawn.token_ids, self.banned_ids, self.tokenizer)

    def _completion(self, output: RequestOutput) -> Completion:
        drawn = output.outputs[0]
        ids = tuple(drawn.token_ids)
        logprobs = tuple(at[token].logprob for token, at in zip(ids, drawn.logprobs, strict=True))
        return Completion(
            ids=ids,
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            logprobs=logprobs,
            finish_reason=drawn.finish_reason,
            version=self.version,
        )


def request_seed(seed: int, stream: int) -> int:
    """What names a random stream to vLLM: 63 bits, as its seeds are signed."""
    return int(np.random.SeedSequence((seed, stream)).generate_state(1, np.uint64)[0] >> 1)


def difference(read: Sequence[int], expected: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Lengths, the first place where two token lists part, and the tokens there."""
    pairs = zip(read, expected, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(read), len(expected)))
    found, wanted = (
        " ".join(tokenizer.convert_ids_to_tokens(list(ids[max(0, at - 2) : at + 6]))) for ids in (read, expected)
    )
    return f"{len(read)} tokens instead of {len(expected)}; around token {at} it has {found!r} instead of {wanted!r}"
