"""Keys that only GRPO reads: `[train.train_policy]` with the type grpo, `[rollout]` and `[distillation]`."""

from __future__ import annotations

from dsreason.tools.cosmos_rl.keys.key import Key, make_copied, make_fixed, make_joint, make_unused, restrict_all
from dsreason.tools.cosmos_rl.keys.train import FRESH, SPEED

OWN_BATCHES = "vLLM forms its own batches"
NO_TURNS = "it applies to multi-turn rollouts, which are off"
NO_PIPELINE = "it applies to pipeline parallelism, which is off"
NO_SERVICE = "it applies to use_remote_reward, which is off"
ONE_TEACHER = "the teacher uses the ranks, the precision and the maximum sequence length of the policy"

POLICY: dict[str, Key] = {
    "variant": make_joint("grpo", "grpo.preset"),
    "algo": make_fixed("grpo", "grpo", because="it is the default", instead="select the algorithm with variant"),
    "loss_type": make_joint("token-mean", "grpo.preset"),
    "unbiased_loss_max_tokens": make_joint(None, "grpo.preset", takes="int"),
    "unbiased_advantage": make_joint(False, "grpo.advantage"),
    "epsilon_low": make_joint(0.2, "grpo.clip_low"),
    "epsilon_high": make_joint(0.2, "grpo.clip_high"),
    "lower_bound_ratio": make_joint(3.0, "grpo.dual_clip"),
    "kl_beta": make_copied(0.0, "grpo.kl_coef"),
    "unbiased_kl_estimate": make_joint(False, "grpo.kl_estimator"),
    "entropy_coeff": make_copied(0.0, "grpo.entropy_coef"),
    "reference_reset_interval": make_joint(None, "grpo.reference_reset_every", takes="int"),
    "reset_optimizer_with_reference": make_joint(True, "grpo.reference_reset_every"),
    "mu_iterations": make_fixed(
        1,
        1,
        because="each completion is trained on once",
        instead="each completion is trained on once; set it to 1, and batch_size_per_optimize for several updates per rollout",
    ),
    "batch_size_per_optimize": make_joint(None, "grpo.optimizer_steps_per_rollout", takes="int"),
    "prompt_column_name": make_joint("", "data.columns"),
    "response_column_name": make_joint("", "data.columns"),
    "reward_function": make_joint(None, "reward.functions", takes="rewards"),
    "filter_reward_metric": make_joint(None, "grpo.dynamic_sampling", takes="names"),
    "overlong_reward.enable_overlong_penalty": make_unused(
        False, 'cosmos-rl does not read it; the reward "overlong" enables the penalty'
    ),
    "overlong_reward.buffer_length": make_joint(4096, "reward.options"),
    "overlong_reward.penalty_factor": make_joint(1.0, "reward.options"),
    "use_remote_reward": make_fixed(
        False,
        False,
        because="it is off",
        instead='only `dsreason world` queries this service, for clips; for answers, add "remote:<score>" to reward.functions',
    ),
    "remote_reward.scale": make_unused(1.0, NO_SERVICE),
    "remote_reward.reward_fns": make_unused(None, NO_SERVICE, takes="any"),
    "remote_reward.reward_clip_min": make_unused(-5.0, NO_SERVICE, takes="number"),
    "remote_reward.reward_clip_max": make_unused(5.0, NO_SERVICE, takes="number"),
    "remote_reward.batch_size": make_unused(1, NO_SERVICE),
    "bypass_reward": make_fixed(
        False, False, because="it is off", instead="rewards are always computed; set it to false"
    ),
    "group_reward_calculation": make_fixed(
        False, False, because="it is off", instead="a reward function scores one completion at a time; set it to false"
    ),
    "temperature": make_joint(1.0, "rollout.temperature"),
    "advantage_low": make_unused(-5.0, "it applies to DiffusionNFT", takes="number"),
    "advantage_high": make_unused(5.0, "it applies to DiffusionNFT", takes="number"),
    "positive_nll_coef": make_fixed(
        None, None, 0, 0.0, because="it is off", instead="dsreason does not have this loss term; remove the key"
    ),
    "off_policy_masking_delta": make_fixed(
        None,
        None,
        because="it is off",
        instead='remove the key, and set grpo.correction = "geometric_mask", which masks sequences with a mismatch',
    ),
    "aipo_rho": make_fixed(
        None,
        None,
        because="it is off",
        instead='remove the key, and set grpo.preset = "cispo", which truncates the same weight',
    ),
    "min_filter_prefix_tokens": make_joint(None, "grpo.preset", takes="int"),
    "max_retry_for_on_policy": make_joint(10, "grpo.max_refills"),
    "use_decoupled_loss": make_joint(False, "grpo.correction"),
    "behav_imp_weight_cap": make_joint(None, "grpo.correction_high", takes="number"),
    "use_rollout_logprobs_for_loss": make_joint(False, "grpo.correction"),
    "collect_rollout_logprobs": make_unused(False, "the engine always returns log-probabilities"),
    "rollout_as_token_ids": make_unused(False, "training always uses the sampled token ids"),
    "allowed_outdated_steps": make_unused(4, FRESH),
    "on_policy": make_unused(False, FRESH),
    "outdated_rollout_fetch_batch_size": make_unused(1, FRESH),
    "max_inflight_steps": make_unused(None, FRESH),
    "uncentralized_training": make_unused(False, "every rank always reads its own prompts"),
}

ENGINE: dict[str, Key] = {
    "rollout.backend": make_joint("vllm", "rollout.engine"),
    "rollout.gpu_memory_utilization": make_joint(0.8, "rollout.gpu_memory_utilization"),
    "rollout.enforce_eager": make_joint(True, "rollout.enforce_eager"),
    "rollout.include_stop_str_in_output": make_unused(
        False, "a completion ends with a token, which is trained on like any other"
    ),
    "rollout.enable_chunked_prefill": make_unused(False, SPEED),
    "rollout.max_response_length": make_copied(2048, "rollout.max_completion_length"),
    "rollout.n_generation": make_joint(16, "grpo.num_generations"),
    "rollout.n_generation_to_batch": make_unused(False, OWN_BATCHES),
    "rollout.n_generation_mini_batch": make_unused(None, OWN_BATCHES),
    "rollout.batch_size": make_unused(1, OWN_BATCHES),
    "rollout.quantization": make_fixed(
        "none",
        "none",
        "",
        because="it is off",
        instead='completions are sampled from the weights that are trained; set it to "none"',
    ),
    "rollout.seed": make_unused(None, "train.seed also seeds sampling"),
    "rollout.sampling_config.temperature": make_joint(1.0, "rollout.temperature"),
    "rollout.sampling_config.top_p": make_copied(1.0, "rollout.top_p"),
    "rollout.sampling_config.top_k": make_copied(-1, "rollout.top_k", convert=lambda count: max(count, 0)),
    "rollout.sampling_config.repetition_penalty": make_fixed(
        1.0,
        1.0,
        because="1 disables it",
        instead="with a penalty, the engine would sample from a policy other than the one being trained; set it to 1",
    ),
    "rollout.sampling_config.use_flashinfer": make_unused(False, SPEED),
    "rollout.vllm_use_flashinfer": make_unused(False, SPEED),
    "rollout.mode": make_unused("sync", FRESH),
    "rollout.async_config.max_concurrent_requests": make_unused(10, OWN_BATCHES),
    "rollout.async_r2r_sync": make_unused(False, FRESH),
    "rollout.prefetch_rollout": make_unused(False, FRESH),
    "rollout.prefetch_queue_maxsize": make_unused(2, FRESH),
    "rollout.broadcast_all_params": make_unused(False, "every tensor is sent and checked at every sync"),
    "rollout.multi_turn_config.enable": make_fixed(
        False, False, because="it is off", instead="multi-turn rollouts are not supported; set it to false"
    ),
    "rollout.multi_turn_config.enable_tools": make_unused(False, NO_TURNS),
    "rollout.multi_turn_config.enable_thinking": make_unused(False, NO_TURNS),
    "rollout.multi_turn_config.custom_chat_template_path": make_unused(None, NO_TURNS, takes="any"),
    "rollout.multi_turn_config.max_assistant_turns": make_unused(5, NO_TURNS),
    "rollout.multi_turn_config.add_generation_prompt": make_unused(True, NO_TURNS),
    "rollout.multi_turn_config.continue_final_message": make_unused(False, NO_TURNS),
    "rollout.parallelism.n_init_replicas": make_joint(1, "GPUs"),
    "rollout.parallelism.tp_size": make_joint(2, "rollout.tensor_parallel_size"),
    "rollout.parallelism.cp_size": make_unused(1, "vLLM splits a copy of the model only by tensor parallelism"),
    "rollout.parallelism.ep_size": make_unused(1, "vLLM splits a copy of the model only by tensor parallelism"),
    "rollout.parallelism.dp_shard_size": make_joint(-1, "GPUs"),
    "rollout.parallelism.dp_replicate_size": make_joint(1, "GPUs"),
    "rollout.parallelism.pp_size": make_joint(1, "GPUs"),
    "rollout.parallelism.pp_dynamic_shape": make_unused(False, NO_PIPELINE),
    "rollout.parallelism.pp_micro_batch_size": make_unused(1, NO_PIPELINE),
    "rollout.parallelism.pp_schedule": make_unused("Interleaved1F1B", NO_PIPELINE),
}

DISTILLATION: dict[str, Key] = (
    {
        "distillation.enable": make_joint(False, "distill.teacher"),
        "distillation.model_name_or_path": make_joint("", "distill.teacher", takes="string"),
        "distillation.model_revision": make_joint(None, "distill.revision", takes="string"),
        "distillation.kl_penalty_coef": make_joint(1.0, "distill.coef"),
        "distillation.kl_discount_factor": make_joint(0.0, "distill.discount"),
        "distillation.include_prompt": make_fixed(
            False,
            False,
            because="only completions are trained on",
            instead="only completions are trained on; set it to false",
        ),
        "distillation.top_k": make_joint(0, "distill.teacher"),
        "distillation.jsd_beta": make_unused(0.5, "it applies to top_k, which is 0"),
        "distillation.batch_size_per_replica": make_unused(8, "the teacher uses the policy's micro-batches"),
        "distillation.mini_batch": make_unused(1, "the teacher uses the policy's micro-batches"),
        "distillation.trainer_token_ids_from_teacher": make_unused(True, "the sampled token ids are always used"),
        "distillation.rollout_top_k_recompute": make_unused(False, "it applies to top_k, which is 0"),
    }
    | {
        f"distillation.{name}": make_unused(None, ONE_TEACHER, takes="any")
        for name in (
            *("model_max_length", "compile", "master_dtype", "param_dtype", "logprob_dtype", "fsdp_reduce_dtype"),
            *("fsdp_offload", "fsdp_reshard_after_forward", "seed"),
        )
    }
    | {
        f"distillation.parallelism.{name}": make_unused(default, ONE_TEACHER)
        for name, default in {
            "n_init_replicas": 1,
            "tp_size": 1,
            "cp_size": 1,
            "ep_size": 1,
            "pp_size": 1,
            "pp_dynamic_shape": False,
            "pp_micro_batch_size": 1,
            "dp_shard_size": 1,
            "dp_replicate_size": 1,
        }.items()
    }
)

KEYS: dict[str, Key] = restrict_all(
    {f"train.train_policy.{name}": key for name, key in POLICY.items()} | ENGINE | DISTILLATION, "grpo"
)
