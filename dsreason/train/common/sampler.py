"""The rollout engine and the policy whose weights it gets: who of the two has the device's memory, and when."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from deepspeed import DeepSpeedEngine

from dsreason.config.schema import Phase
from dsreason.engine.merged import constant_names, merged_parameters
from dsreason.engine.offload import StateOffload
from dsreason.engine.offload_need import Offload, bytes_to_free
from dsreason.errors import ConfigError
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
    offload_mode: Offload = "always",
    share: float = 0.0,
) -> Sampler:
    """The rollout `engine`, started here, until `stack` closes, beside the policy's. Every rank calls it.

    Args:
        share: of the GPU's memory that vLLM uses while it is awake.

    Raises:
        ConfigError: nothing may be offloaded, and not everything fits.
    """
    offload = StateOffload(policy)
    if offload.is_active:
        total = torch.cuda.mem_get_info()[1]
        held = torch.cuda.memory_allocated() + offload.absent()
        try:
            offload.need = bytes_to_free(offload_mode, total=total, sampler=int(share * total), held=held)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    log.info(offload.describe())
    offload.offload()  # vLLM starts only where its share of the GPU is free
    rollout = stack.enter_context(engine)
    offload.reload()
    return Sampler(rollout, policy, offload, MemoryLedger(watchdog.world.device), bucket_mb, watchdog.phase)
