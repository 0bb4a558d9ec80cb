"""The rollout engine and the policy whose weights it gets: who of the two has the device's memory, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from deepspeed import DeepSpeedEngine

from dsreason.config.schema import Phase
from dsreason.rollout.protocol import RolloutEngine
from dsreason.runtime.engine import frozen_names, full_parameters
from dsreason.runtime.memory import MemoryLedger
from dsreason.runtime.offload import StateOffload


@dataclass(frozen=True)
class Sampler:
    """What samples completions of a policy that is trained on the same devices."""

    rollout: RolloutEngine
    policy: DeepSpeedEngine
    offload: StateOffload
    memory: MemoryLedger
    bucket_mb: float = 512.0
    watch: Callable[[Phase], AbstractContextManager[object]] = nullcontext
    """The watchdog's `phase`."""

    @contextmanager
    def awake(self, version: int) -> Iterator[RolloutEngine]:
        """Inside, the engine holds the policy's weights, and the optimizer's state is out of the way. Collective.

        `version` is stamped on the weights, and on what is sampled with them.
        """
        with self.memory.phase("offload"):
            self.offload.offload()
        with self.memory.phase("wake"):
            self.rollout.wake()
        with self.watch("weight_sync"), self.memory.phase("sync"):
            kept = self.rollout.kept(frozen_names(self.policy))
            self.rollout.sync(full_parameters(self.policy, self.bucket_mb, without=kept), version, kept)
        with self.memory.phase("generate"):
            yield self.rollout
        with self.memory.phase("sleep"):
            self.rollout.sleep()
        with self.memory.phase("reload"):
            self.offload.reload()
