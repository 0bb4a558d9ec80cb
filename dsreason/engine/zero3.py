"""ZeRO-3 by whole blocks: one gather per decoder layer instead of one per module in it.

DeepSpeed records the order in which modules run and prefetches the parameters of the next ones. Its hooks cost host time
per module, and a new order costs a step without prefetching.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn


def gather_whole_blocks(model: nn.Module, blocks: Collection[str]) -> None:
    """Make the modules whose class name is in `blocks` leaf modules of ZeRO-3. Call it before the engine is built.

    DeepSpeed reduces the gradients of a leaf once the gradient of its input is computed. So the input of a leaf with trained
    parameters must require a gradient even if everything before it is frozen; otherwise DeepSpeed would reduce zeros.
    """
    for module in model.modules():
        if type(module).__name__ in blocks:
            set_z3_leaf_module(module, True)
            if any(parameter.requires_grad for parameter in module.parameters()):
                module.register_forward_pre_hook(require_input_gradient)


def require_input_gradient(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make the hidden states, a block's first argument, require a gradient (a forward pre-hook)."""
    hidden: Tensor = args[0]
    if hidden.requires_grad or not torch.is_grad_enabled():
        return args
    return (hidden.detach().requires_grad_(), *args[1:])


def release_gathered(engine: DeepSpeedEngine) -> None:
    """Partition the parameters again that are whole on this rank. Stages 1 and 2 do not partition parameters.

    DeepSpeed's `engine.empty_partition_cache` does this as well, but it also collects garbage and empties the GPU's cache, which
    takes half a second.
    """
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        engine.optimizer.empty_partition_cache()


def record_training_only(engine: DeepSpeedEngine) -> None:
    """Let DeepSpeed record the order of modules only in forwards that are followed by a backward pass.

    The recorded order of a forward without one (for old log-probabilities or validation) would end too early: training would
    run past it, and the next forward would be recorded again. The order of a whole step starts with that of its forward, so
    it also serves forwards without a backward pass.
    """
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()

    def discard_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if coordinator.is_record_trace() and not torch.is_grad_enabled():
            coordinator._invalidate_trace()

    engine.register_forward_hook(discard_forward)
