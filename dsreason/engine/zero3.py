"""ZeRO-3 by whole blocks: one gather for a decoder layer instead of one for each of its modules.

DeepSpeed records the order in which modules run, and gathers the parameters of the next ones ahead. Its hooks cost the host
time for each module, and a new order costs a step without prefetching.
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
    """Make the modules whose class is named in `blocks` leaf modules of ZeRO-3, before the engine is built.

    The gradients of a leaf are reduced once the gradient of its input is computed. So a leaf with trained parameters gets an
    input that requires one, even if everything before it is frozen; else DeepSpeed would reduce zeros.
    """
    for module in model.modules():
        if type(module).__name__ in blocks:
            set_z3_leaf_module(module, True)
            if any(parameter.requires_grad for parameter in module.parameters()):
                module.register_forward_pre_hook(require_input_gradient)


def require_input_gradient(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hook for a block whose first argument is its hidden states."""
    hidden: Tensor = args[0]
    if hidden.requires_grad or not torch.is_grad_enabled():
        return args
    return (hidden.detach().requires_grad_(), *args[1:])


def release_gathered(engine: DeepSpeedEngine) -> None:
    """Cut parameters that are whole on this rank again; at stages 1 and 2 there are none.

    DeepSpeed's `engine.empty_partition_cache` does this too, but also collects garbage and empties the GPU's cache, which takes
    half a second.
    """
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        engine.optimizer.empty_partition_cache()


def record_training_only(engine: DeepSpeedEngine) -> None:
    """Let DeepSpeed record the order of modules in forwards that a backward pass follows.

    The order of a forward alone, of old log-probabilities or validation, ends before the backward pass: training would run
    past it, and the next forward would be recorded again. The order of a whole step begins with that of a forward, which
    it serves as well.
    """
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()

    def forget_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if coordinator.is_record_trace() and not torch.is_grad_enabled():
            coordinator._invalidate_trace()

    engine.register_forward_hook(forget_forward)
