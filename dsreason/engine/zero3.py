"""ZeRO-3 for entire blocks: a decoder layer's parameters are gathered together instead of module by module.

DeepSpeed records the order in which modules run and prefetches the parameters of the next modules. Its hooks take host time
for each module, and if the order changes, nothing is prefetched for one step.
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
    """Turn the modules whose class names are in `blocks` into ZeRO-3 leaf modules. Call this before the engine is built.

    DeepSpeed reduces a leaf module's gradients once the gradient of its input has been computed. The input of a leaf with trained
    parameters must therefore require a gradient, even if all modules before it are frozen; otherwise, DeepSpeed would reduce
    zeros.
    """
    for module in model.modules():
        if type(module).__name__ in blocks:
            set_z3_leaf_module(module, True)
            if any(parameter.requires_grad for parameter in module.parameters()):
                module.register_forward_pre_hook(require_input_gradient)


def require_input_gradient(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook that makes the first argument of `block`, the hidden states, require a gradient."""
    hidden: Tensor = args[0]
    if hidden.requires_grad or not torch.is_grad_enabled():
        return args
    return (hidden.detach().requires_grad_(), *args[1:])


def release_gathered(engine: DeepSpeedEngine) -> None:
    """Release the parameters that are still gathered on this rank. At stages 1 and 2, which shard no parameters, do nothing.

    DeepSpeed's `engine.empty_partition_cache` would also release them, but takes half a second, because it also collects garbage
    and empties the GPU's cache.
    """
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        engine.optimizer.empty_partition_cache()


def record_training_only(engine: DeepSpeedEngine) -> None:
    """Make DeepSpeed record the order of modules only in forward passes that precede a backward pass.

    If a forward pass without a backward pass (for old log-probabilities or validation) were recorded, the recording would be too
    short: training would run past its end, and DeepSpeed would record the next forward pass again. Conversely, the recording of
    a training step begins with its forward pass, so it is also valid for forward passes without a backward pass.
    """
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()

    def discard_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if coordinator.is_record_trace() and not torch.is_grad_enabled():
            coordinator._invalidate_trace()

    engine.register_forward_hook(discard_forward)
