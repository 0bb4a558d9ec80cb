"""Rollout engine based on vLLM, which runs in the trainer's processes and sleeps while the policy trains."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dsreason.families import Family, get_family
from dsreason.families.layer_types import has_delta_nets
from dsreason.job.ranks import World, gather_objects
from dsreason.models.load import build_empty_model, read_model_config
from dsreason.problems import join_first
from dsreason.rollout.protocol import (
    Completion,
    RolloutEngine,
    RolloutError,
    Sampling,
    SyncError,
    TensorFingerprints,
    check_version,
    find_media_token_ids,
)
from dsreason.rollout.sleep_state import SleepState, find_pools, find_sleep_state
from dsreason.rollout.transformers_engine import read_stop_token_ids
from dsreason.rollout.vllm_arguments import VLLMSettings, build_engine_arguments, check_delta_nets
from dsreason.rollout.vllm_process import (
    preserve_process_state,
    release,
    rename_shared_memory,
    set_environment,
)
from dsreason.rollout.vllm_requests import (
    RolloutRequest,
    check_output,
    make_request_seed,
    make_sampling_params,
    to_completion,
    to_inputs,
)
from dsreason.rollout.vllm_versions import keep_video_times, read_weights_beside_config, repack_experts
from dsreason.rollout.weight_sync import (
    WeightStream,
    check_arrival,
    compute_fingerprint,
    compute_fingerprints,
    find_changed,
    find_complete_layers,
    find_different,
    find_expert_layers,
    find_slots,
    iter_engine_values,
    move_to_cpu,
    repair_tied_output,
)

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from dsreason.data.chat import EncodedPrompt

log = logging.getLogger(__name__)


def merge_overrides(family: Family, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options for vLLM, whose `hf_overrides` also contain the values that the family needs in config.json."""
    overrides: dict[str, Any] = {}
    if family.fixed_settings:
        overrides["text_config"] = dict(family.fixed_settings)
    if family.vllm_class is not None:
        overrides["architectures"] = [family.vllm_class]
    merged = {"hf_overrides": overrides | options.get("hf_overrides", {})} if overrides else {}
    return {**options, **merged}


class VLLMEngine(RolloutEngine):
    """`RolloutEngine` based on vLLM. Each group of `tensor_parallel_size` consecutive ranks shares one copy of the policy.

    All ranks must construct the engine together, after `init_world`. On a CPU, vLLM goes through the same states, but keeps its
    memory.

    Args:
        loaded_version: version number of the weights in the folder. If set, the engine starts awake, with these weights; if
            None, it starts asleep.
    """

    reads_pixels = False

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        world: World,
        settings: VLLMSettings,
        *,
        dtype: torch.dtype,
        loaded_version: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.tokenizer, self.world, self.dtype = tokenizer, world, dtype
        self.max_model_len, self.tensor_parallel_size = settings.max_model_len, settings.tensor_parallel_size
        self.sleep_level = settings.sleep_level
        self.stop_ids = read_stop_token_ids(path)
        self.version = loaded_version
        self.sent: dict[str, Tensor] = {}
        """Fingerprints of the tensors that the last sync sent."""
        self.buffers: dict[str, Tensor] = {}
        """Fingerprints of the model's buffers before the last sleep."""
        self.logged_lost_weights = False
        set_environment(world)
        with preserve_process_state(world), rename_shared_memory(world):
            config = read_model_config(path, trust_remote_code=trust_remote_code)
            check_delta_nets(config, dtype, world.device)
            self.family = get_family(config.model_type)
            self.banned_ids = find_media_token_ids(tokenizer, self.family)
            hf_model = build_empty_model(config, dtype, "auto", trust_remote_code)
            self.expected = {
                name: parameter.shape for name, parameter in hf_model.named_parameters()
            }  # tied parameters appear only once
            from vllm import LLM

            keep_video_times()
            sleep_mode = loaded_version is None
            arguments = build_engine_arguments(
                world, settings, dtype=dtype, sleep_mode=sleep_mode, trust_remote_code=trust_remote_code
            )
            if world.device.type == "cpu" and has_delta_nets(config.get_text_config()):
                arguments["enable_prefix_caching"] = False  # vLLM caches their states only with chunked prefill
            if self.family.vllm_class is not None:
                read_weights_beside_config(path)
            arguments |= merge_overrides(self.family, settings.engine_options)
            self.llm, self.max_num_seqs = LLM(str(path), **arguments), arguments["max_num_seqs"]
            (self.model,) = self.llm.apply_model(lambda model: model)
            self.slots = find_slots(self.model, list(self.expected), self.family)
            (runner,) = self.llm.collective_rpc(lambda worker: worker.model_runner)
            self.state = find_sleep_state(runner, find_pools())
            log.info(
                "%.2f GiB of vLLM's memory besides weights and KV cache are copied to the host while it sleeps",
                self.state.size_gib,
            )
            self.weights_awake = self.cache_awake = True
            if sleep_mode:
                self._sleep()

    @property
    def _group(self) -> dist.ProcessGroup:
        """Gloo process group of the ranks that share one copy of the policy; it transfers Python objects and CPU tensors."""
        from vllm.distributed.parallel_state import get_tp_group

        group: dist.ProcessGroup = get_tp_group().cpu_group
        return group

    @property
    def keeps_weights(self) -> bool:
        return self.sleep_level == 1

    # ------------------------------------------------------------ phases

    def wake(self) -> None:
        """Allocate memory for the weights. The KV cache is allocated by `sync`, after all weights have been gathered."""
        if not self.weights_awake:
            self._wake("weights")
            self.weights_awake = True
            if lost := find_changed(self.buffers, compute_fingerprints(self.model.named_buffers())):
                raise SyncError(f"{len(lost)} buffers lost their values during sleep: {join_first(lost)}")

    def find_retained(self, names: Collection[str]) -> set[str]:
        """Return the frozen weights that still have the sent values. Sleep level 2 discards weights, except on a CPU."""
        if not self.weights_awake:
            return set()
        frozen = self.sent.keys() & set(names)
        slots = [slot for slot in self.slots if slot.name in frozen]
        lost = {slot.name for slot in find_different(slots, self.sent, self._group)}
        complete_names = find_complete_layers(self.slots, frozen - lost)
        retained = set.intersection(*gather_objects(complete_names))
        if frozen - retained and not self.logged_lost_weights:
            self.logged_lost_weights = True
            log.info(
                "%d of %d frozen tensors are sent at every sync: %d are lost during sleep (rollout.sleep_level %d), and %d "
                "share a layer with lost or trained ones",
                *(len(frozen - retained), len(frozen), len(lost), self.sleep_level, len(frozen - retained - lost)),
            )
        return retained

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, retained: Collection[str] = ()) -> None:
        if not self.weights_awake:
            raise SyncError(f"weights (version {version}) were sent to a sleeping engine; wake it first")
        before = {name: self.sent[name] for name in retained if name in self.sent}
        reloaded_experts = find_expert_layers(self.slots, self.expected.keys() - before.keys())
        self.version, self.sent = None, {}  # a sync that fails halfway leaves no usable weights
        sending = WeightStream(weights, self.expected, self.dtype, self.world.device, before)
        with preserve_process_state(self.world):
            try:
                named_tensors = (
                    (self.family.to_exported_name(name), self.family.swap_axes(name, tensor))
                    for name, tensor in sending
                )
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_tensors})
            finally:
                sending.read_remaining()
            sending.finish()
            repair_tied_output(self.model)
            repack_experts(reloaded_experts)
        check_arrival(self.slots, sending.fingerprints, self._group)
        self._reset_cache()
        self.version, self.sent = version, sending.fingerprints

    @torch.no_grad()
    def fingerprints(self) -> TensorFingerprints:
        """Return the fingerprints of this rank's tensors; parameters are named `Hugging Face name (vLLM name)`."""
        parameters = {
            f"{slot.name} ({slot.engine_name})": compute_fingerprint(*iter_engine_values(slot)) for slot in self.slots
        }
        return TensorFingerprints(move_to_cpu(parameters), compute_fingerprints(self.model.named_buffers()))

    def iter_completions(
        self, prompts: Sequence[EncodedPrompt], samplings: Sequence[Sampling], *, version: int, streams: Sequence[int]
    ) -> Iterator[tuple[int, Completion]]:
        """Complete the prompts of all ranks in the tensor-parallel group together; yield this rank's completions."""
        shares = self._gather(prompts, samplings, version, streams)
        if not self.cache_awake:  # the last sleep kept the weights, and no sync has run since
            self._reset_cache()
        requests = [request for share in shares for request in share]
        self._check_room(requests)
        first = sum(len(share) for share in shares[: self.world.rank % self.tensor_parallel_size])
        for number, output in self._iter_outputs(requests):
            check_output(requests[number], output, self.banned_ids, self.tokenizer)
            if first <= number < first + len(prompts):
                yield number - first, to_completion(output, version, self.tokenizer)

    def _iter_outputs(self, requests: Sequence[RolloutRequest]) -> Iterator[tuple[int, RequestOutput]]:
        """Yield the index and output of each request as soon as the request is finished.

        At most `max_num_seqs` requests are enqueued at a time, because vLLM holds the pixels of all enqueued requests.
        """
        waiting = enumerate(zip(requests, to_inputs(requests), strict=True))
        running: dict[str, int] = {}
        try:
            while True:
                ended: list[RequestOutput] = []
                with preserve_process_state(self.world):
                    for number, (request, vllm_input) in islice(waiting, self.max_num_seqs - len(running)):
                        # Outputs contain the id from the counter, whereas enqueue returns a different id.
                        running[str(self.llm.request_counter.counter)] = number
                        params = make_sampling_params(request.sampling, request.seed, self.stop_ids, self.banned_ids)
                        self.llm.enqueue([vllm_input], [params], use_tqdm=False)
                    while running and not ended:
                        ended = [output for output in self.llm.llm_engine.step() if output.finished]
                if not running:
                    return
                for output in ended:
                    yield running.pop(output.request_id), output
        finally:
            if running:  # the caller has stopped iterating
                self.llm.llm_engine.abort_request(list(running))

    def sleep(self) -> None:
        if not self.keeps_weights:
            self.version = None
        if self.weights_awake:
            if not self.cache_awake:  # a sync has failed, and vLLM can put pools to sleep only if all are awake
                self._wake("kv_cache")
            with preserve_process_state(self.world):
                self._sleep()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def shutdown(self) -> None:
        """Shut down the engine and its process groups, but not the trainer's process groups. A second call does nothing."""
        if self.llm is None:
            return
        llm, self.llm, self.model, self.version = self.llm, None, None, None
        # The tensors in vLLM's pools must be freed before the pools themselves.
        self.slots, self.sent, self.buffers, self.state = [], {}, {}, SleepState()
        release(llm)
        del llm
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _wake(self, tag: str) -> None:
        """Wake the pool `tag` and check that it is awake, because vLLM only logs a warning if it is not."""
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # vLLM maps GPU memory itself and cannot use memory that torch has cached
        with preserve_process_state(self.world):
            self.llm.wake_up(tags=[tag])
            self.state.write_back(tag)
        asleep = self.llm.llm_engine.is_sleeping()
        if asleep != (tag == "weights"):
            raise RuntimeError(f"vLLM {'is still asleep' if asleep else 'is fully awake'} after waking its {tag}")

    def _sleep(self) -> None:
        self.buffers = compute_fingerprints(self.model.named_buffers())
        self.state.remember()
        self.llm.sleep(level=self.sleep_level)
        self.weights_awake = self.cache_awake = False

    def _reset_cache(self) -> None:
        """Discard keys, values and vision features computed with old weights; wake the KV cache if it is asleep."""
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        if not self.cache_awake:
            self._wake("kv_cache")
            self.cache_awake = True

    # ------------------------------------------------------------ prompts and completions

    def _gather(
        self, prompts: Sequence[EncodedPrompt], samplings: Sequence[Sampling], version: int, streams: Sequence[int]
    ) -> list[list[RolloutRequest]]:
        """Gather the requests of all ranks in the tensor-parallel group; return one list, which may be empty, per rank."""
        rank_requests = [
            RolloutRequest(
                prompt.sample.id,
                prompt.prompt_ids,
                prompt.encoded.input_ids.tolist(),
                prompt.media,
                sampling,
                make_request_seed(sampling.seed, stream),
            )
            for prompt, sampling, stream in zip(prompts, samplings, streams, strict=True)
        ]
        share = (rank_requests, version, self.version if self.weights_awake else None)
        shares: list[Any] = [share]
        if self.tensor_parallel_size > 1:
            shares = [None] * self.tensor_parallel_size
            dist.all_gather_object(shares, share, group=self._group)
        for _, requested_version, current in shares:
            check_version(requested_version, current)
        return [requests for requests, *_ in shares]

    def _check_room(self, requests: list[RolloutRequest]) -> None:
        for request in requests:
            num_prompt, longest = len(request.expanded_ids), request.sampling.max_completion_length
            if num_prompt + longest > self.max_model_len:
                raise RolloutError(
                    f"sample {request.sample_id!r}: {num_prompt} prompt tokens plus up to {longest} completion tokens exceed "
                    f"the engine's max_model_len ({self.max_model_len})"
                )
