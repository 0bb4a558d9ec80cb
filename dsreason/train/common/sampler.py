"""The rollout engine and the policy whose weights it gets: who of the two has the device's memory, and when."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

from deepspeed import DeepSpeedEngine

from dsreason.config.schema import Phase
from dsreason.engine.merged import constant_names, merged_parameters
from dsreason.engine.offload import StateOffload
from dsreason.job.watchdog import Watchdog
from dsreason.monitor.memory import MemoryLedger
from dsreason.rollout.protocol import RolloutEngine

log = logging.getLogger(__name__)

BUCKET_MB = 512.0


@dataclass(frozen=True)
class Sampler:
    """What samples completions of a policy that is trained on the same devices."""

    rollout: RolloutEngine
    policy: DeepSpeedEngine
    offload: StateOffload
    memory: MemoryLedger
    bucket_mb: float = BUCKET_MB
    watch: Callable[[Phase], AbstractContextManager[object]] = nullcontext
    """The watchdog's `phase`."""
    times: dict[str, float] = field(default_factory=dict)
    """`time/{wake,sync,sleep}` in seconds, of the last time."""

    @contextmanager
    def awake(self, version: int) -> Iterator[RolloutEngine]:
        """Inside, the engine holds the policy's weights, and the optimizer's state is out of the way. Collective.

        `version` is stamped on the weights, and on what is sampled with them.
        """
        with self.memory.phase("offload"):
            self.offload.offload()
        with self._timed("wake"):
            self.rollout.wake()
        with self.watch("weight_sync"), self._timed("sync"):
            retained = self.rollout.retained(constant_names(self.policy))
            self.rollout.sync(merged_parameters(self.policy, self.bucket_mb, without=retained), version, retained)
        with self.memory.phase("generate"):
            yield self.rollout
        with self._timed("sleep"):
            self.rollout.sleep()
        with self.memory.phase("reload"):
            self.offload.reload()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with self.memory.phase(name):
            yield
        self.times[f"time/{name}"] = time.perf_counter() - started


def open_sampler(
    policy: DeepSpeedEngine,
    engine: AbstractContextManager[RolloutEngine],
    watchdog: Watchdog,
    stack: ExitStack,
    *,
    bucket_mb: float = BUCKET_MB,
) -> Sampler:
    """The rollout `engine`, started here, until `stack` closes, beside the policy's. Every rank calls it."""
    offload = StateOffload(policy)
    log.info(offload.describe())
    offload.offload()  # vLLM starts only where its share of the GPU is free
    rollout = stack.enter_context(engine)
    offload.reload()
    return Sampler(rollout, policy, offload, MemoryLedger(watchdog.world.device), bucket_mb, watchdog.phase)
