"""Handover of weights and GPU memory between the policy and the rollout engine on the same devices."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

from deepspeed import DeepSpeedEngine

from dsreason.config.schema import Phase
from dsreason.config.schema_grpo import OffloadMode
from dsreason.engine.merged import iter_merged_parameters, list_constant_names
from dsreason.engine.offload import StateOffload
from dsreason.engine.rollout_memory import EVERYTHING, NOTHING, OffloadAmount, choose_amount
from dsreason.errors import DsReasonError
from dsreason.job.ranks import gather_objects
from dsreason.job.watchdog import Watchdog
from dsreason.monitor.memory import MemoryLedger
from dsreason.rollout.protocol import RolloutEngine

log = logging.getLogger(__name__)

BUCKET_MB = 512.0


@dataclass(frozen=True)
class Sampler:
    """A rollout engine, together with the policy that is trained on the same devices."""

    rollout: RolloutEngine
    policy: DeepSpeedEngine
    offload: StateOffload
    memory: MemoryLedger
    bucket_mb: float = BUCKET_MB
    watch: Callable[[Phase], AbstractContextManager[object]] = nullcontext
    """The watchdog's `track_phase` method, which limits how long a phase may take."""
    times: dict[str, float] = field(default_factory=dict)
    """Durations of the last handover in seconds, by metric: `time/{offload,wake,sync,sleep,reload}`."""

    @contextmanager
    def awake(self, version: int) -> Iterator[RolloutEngine]:
        """Offload the training state and wake the rollout engine with the policy's weights; undo both on exit. Collective.

        Args:
            version: version of the weights, recorded in the completions that are sampled with them.
        """
        with self._time_phase("offload"):
            self.offload.offload()
        with self._time_phase("wake"):
            self.rollout.wake()
        with self.watch("weight_sync"), self._time_phase("sync"):
            retained = self.rollout.find_retained(list_constant_names(self.policy))
            self.rollout.sync(iter_merged_parameters(self.policy, self.bucket_mb, without=retained), version, retained)
        try:
            with self.memory.track_phase("generate"):
                yield self.rollout
        except DsReasonError:  # the last step may now be saved, which needs the complete training state
            self._rest()
            raise
        self._rest()

    def _rest(self) -> None:
        with self._time_phase("sleep"):
            self.rollout.sleep()
        with self._time_phase("reload"):
            self.offload.reload()

    @contextmanager
    def _time_phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with self.memory.track_phase(name):
            yield
        self.times[f"time/{name}"] = time.perf_counter() - started


def open_sampler(
    policy: DeepSpeedEngine,
    engine: AbstractContextManager[RolloutEngine],
    watchdog: Watchdog,
    stack: ExitStack,
    *,
    bucket_mb: float = BUCKET_MB,
    mode: OffloadMode = "always",
    vllm_share: float | None = None,
) -> Sampler:
    """Start the rollout `engine` on the policy's devices; it runs until `stack` closes. Every rank must call this.

    Args:
        engine: context manager that starts the rollout engine.
        bucket_mb: maximum MiB of weights that a weight sync gathers at a time.
        mode: value of `rollout.offload`.
        vllm_share: value of `rollout.gpu_memory_utilization`; None for an engine without a fixed share of the GPU.
    """
    offload = open_offload(policy, mode, vllm_share, int(bucket_mb * 2**20), watchdog.world.size)
    offload.offload()  # vLLM fails to start unless its share of the GPU is free
    rollout = stack.enter_context(engine)
    offload.reload()
    return Sampler(rollout, policy, offload, MemoryLedger(watchdog.world.device), bucket_mb, watchdog.track_phase)


def open_offload(
    policy: DeepSpeedEngine, mode: OffloadMode, vllm_share: float | None, bucket_bytes: int, num_ranks: int
) -> StateOffload:
    """Choose how much training state to offload (the most that any rank needs), and log the decision. Collective.

    Raises:
        ConfigError: the mode is "never", but vLLM's share of the GPU does not fit next to the training state.
    """
    offload = StateOffload(policy)
    if not offload.is_active or vllm_share is None:
        offload.amount = NOTHING if mode == "never" else EVERYTHING
        log.info(offload.describe())
        return offload
    memories = gather_objects(offload.measure(vllm_share, bucket_bytes, num_ranks))
    amounts = [choose_amount(mode, memory) for memory in memories]
    offload.amount = OffloadAmount(
        drop_gradients=any(amount.drop_gradients for amount in amounts),
        move_bytes=max(amount.move_bytes for amount in amounts),
    )
    fullest = max(memories, key=lambda memory: memory.needed - memory.total)
    log.info('%s (rollout.offload = "%s"; without offload: %s)', offload.describe(), mode, fullest.describe())
    return offload
