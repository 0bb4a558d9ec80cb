"""Top-level keys that DeepSpeed 0.19 reads, and replacements for keys that it has removed."""

from __future__ import annotations

from typing import Literal

Kind = Literal["object", "flag", "number", "positive", "log level", "any"]

TOP_LEVEL: dict[str, Kind] = {
    "activation_checkpointing": "object",
    "aio": "object",
    "autotuning": "object",
    "bf16": "object",
    "bfloat16": "object",
    "checkpoint": "object",
    "checkpoint_writer": "any",
    "comet": "object",
    "comms_logger": "object",
    "communication_data_type": "any",
    "compile": "object",
    "csv_monitor": "object",
    "data_efficiency": "object",
    "data_types": "object",
    "dataloader_drop_last": "flag",
    "datastates_ckpt": "any",
    "disable_allgather": "flag",
    "disable_python_gc": "flag",
    "dump_state": "flag",
    "expert_parallel": "object",
    "flops_profiler": "object",
    "fp16": "object",
    "gradient_accumulation_steps": "any",
    "gradient_allreduce_op": "any",
    "gradient_clipping": "any",
    "gradient_predivide_factor": "positive",
    "hybrid_engine": "object",
    "log_level": "log level",
    "managed_gradient_accumulation": "any",
    "memory_breakdown": "flag",
    "optimizer": "object",
    "pipeline": "object",
    "prescale_gradients": "flag",
    "scheduler": "object",
    "seq_parallel_communication_data_type": "any",
    "sequence_parallel_size": "number",
    "steps_per_print": "positive",
    "tensor_parallel": "object",
    "tensorboard": "object",
    "timers": "any",
    "torch_autocast": "object",
    "train_batch_size": "any",
    "train_micro_batch_size_per_gpu": "any",
    "use_data_before_expert_parallelism": "flag",
    "vocabulary_size": "number",
    "wall_clock_breakdown": "flag",
    "wandb": "object",
    "weight_quantization": "object",
    "zero_allow_untested_optimizer": "any",
    "zero_force_ds_cpu_optimizer": "any",
    "zero_optimization": "object",
}
"""Key → kind of value; values of kind `any` are validated elsewhere or by DeepSpeed."""
FLOPS_PROFILER: dict[str, Kind] = {
    "detailed": "flag",
    "enabled": "flag",
    "module_depth": "number",
    "profile_step": "number",
    "recompute_fwd_factor": "number",
    "top_modules": "number",
}

REMOVED = {
    "elasticity": "to change the number of ranks, use --resume",
    "nebula": "checkpoints are now plain files",
    "compression_training": "train without compression",
    "amp": "train.precision sets the precision",
    "quantize_training": "train without quantization",
    "sparse_gradients": "gradients of embeddings are dense",
    "eigenvalue": "it was part of quantize_training",
    "sparse_attention": "model.attention selects the attention",
    "graph_harvesting": "it has no replacement",
    "curriculum_learning": "data.shuffle and data.sources determine the order",
    "progressive_layer_drop": "it has no replacement",
}

HOST_COPIES = (
    "zero_hpz_partition_size = ranks per host gives each host a copy of the weights; gradients and optimizer states remain "
    "partitioned across all ranks"
)
REMOVED_ZERO = {
    "mics_shard_size": HOST_COPIES,
    "mics_hierarchical_params_gather": HOST_COPIES,
    "zeropp_loco_param": "zero_quantized_gradients works without it",
}
"""Removed key of `zero_optimization` → advice on what to do instead."""
