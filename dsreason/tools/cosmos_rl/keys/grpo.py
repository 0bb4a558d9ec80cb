"""Keys of GRPO only: `[train.train_policy]` of the type grpo, `[rollout]`, `[distillation]`."""

from __future__ import annotations

from dsreason.tools.cosmos_rl.keys.key import Key, copied, joint, only, same_for, unused
from dsreason.tools.cosmos_rl.keys.train import FRESH, SPEED

OWN_BATCHES = "vLLM makes its own batches"
NO_TURNS = "it is of conversations in several turns, which are off"
NO_PIPELINE = "it is of pipeline parallelism, which is off"
NO_SERVICE = "it is of use_remote_reward, which is off"
ONE_TEACHER = "the teacher has the ranks, the precision and the longest rows of the policy"

POLICY: dict[str, Key] = {
    "variant": joint("grpo", "grpo.preset"),
    "algo": only("grpo", "grpo", because="it is the usual one", instead="choose the algorithm with variant"),
    "loss_type": joint("token-mean", "grpo.preset"),
    "unbiased_loss_max_tokens": joint(None, "grpo.preset", takes="int"),
    "unbiased_advantage": joint(False, "grpo.advantage"),
    "epsilon_low": joint(0.2, "grpo.clip_low"),
    "epsilon_high": joint(0.2, "grpo.clip_high"),
    "lower_bound_ratio": joint(3.0, "grpo.dual_clip"),
    "kl_beta": copied(0.0, "grpo.kl_coef"),
    "unbiased_kl_estimate": joint(False, "grpo.kl_estimator"),
    "entropy_coeff": copied(0.0, "grpo.entropy_coef"),
    "reference_reset_interval": joint(None, "grpo.reference_reset_every", takes="int"),
    "reset_optimizer_with_reference": joint(True, "grpo.reference_reset_every"),
    "mu_iterations": only(
        1,
        1,
        because="each completion is trained once",
        instead="each completion is trained once here; set it to 1, and batch_size_per_optimize for several updates of a rollout",
    ),
    "batch_size_per_optimize": joint(None, "grpo.optimizer_steps_per_rollout", takes="int"),
    "prompt_column_name": joint("", "data.columns"),
    "response_column_name": joint("", "data.columns"),
    "reward_function": joint(None, "reward.functions", takes="rewards"),
    "filter_reward_metric": joint(None, "grpo.dynamic_sampling", takes="names"),
    "overlong_reward.enable_overlong_penalty": unused(
        False, 'cosmos-rl does not read it: "overlong" among the rewards is what counts'
    ),
    "overlong_reward.buffer_length": joint(4096, "reward.options"),
    "overlong_reward.penalty_factor": joint(1.0, "reward.options"),
    "use_remote_reward": only(
        False,
        False,
        because="it is off",
        instead='`dsreason world` asks for rewards of clips; those of answers are "remote:<score>" in reward.functions',
    ),
    "remote_reward.scale": unused(1.0, NO_SERVICE),
    "remote_reward.reward_fns": unused(None, NO_SERVICE, takes="any"),
    "remote_reward.reward_clip_min": unused(-5.0, NO_SERVICE, takes="number"),
    "remote_reward.reward_clip_max": unused(5.0, NO_SERVICE, takes="number"),
    "remote_reward.batch_size": unused(1, NO_SERVICE),
    "bypass_reward": only(
        False, False, because="it is off", instead="rewards are always computed here; set it to false"
    ),
    "group_reward_calculation": only(
        False, False, because="it is off", instead="a reward sees one completion at a time here; set it to false"
    ),
    "temperature": joint(1.0, "rollout.temperature"),
    "advantage_low": unused(-5.0, "it is of DiffusionNFT", takes="number"),
    "advantage_high": unused(5.0, "it is of DiffusionNFT", takes="number"),
    "positive_nll_coef": only(
        None, None, 0, 0.0, because="it is off", instead="this term does not exist here; remove the key"
    ),
    "off_policy_masking_delta": only(
        None,
        None,
        because="it is off",
        instead='remove the key; grpo.correction = "geometric_mask" leaves out sequences that the engine sees otherwise',
    ),
    "aipo_rho": only(
        None, None, because="it is off", instead='remove the key; grpo.preset = "cispo" truncates the same weight'
    ),
    "min_filter_prefix_tokens": joint(None, "grpo.preset", takes="int"),
    "max_retry_for_on_policy": joint(10, "grpo.max_refills"),
    "use_decoupled_loss": joint(False, "grpo.correction"),
    "behav_imp_weight_cap": joint(None, "grpo.correction_high", takes="number"),
    "use_rollout_logprobs_for_loss": joint(False, "grpo.correction"),
    "collect_rollout_logprobs": unused(False, "they are always there"),
    "rollout_as_token_ids": unused(False, "what is trained are always the ids that were sampled"),
    "allowed_outdated_steps": unused(4, FRESH),
    "on_policy": unused(False, FRESH),
    "outdated_rollout_fetch_batch_size": unused(1, FRESH),
    "max_inflight_steps": unused(None, FRESH),
    "uncentralized_training": unused(False, "every rank always reads its own prompts"),
}

ENGINE: dict[str, Key] = {
    "rollout.backend": joint("vllm", "rollout.engine"),
    "rollout.gpu_memory_utilization": joint(0.8, "rollout.gpu_memory_utilization"),
    "rollout.enforce_eager": joint(True, "rollout.enforce_eager"),
    "rollout.include_stop_str_in_output": unused(False, "the end of a completion is a token, and trained as one"),
    "rollout.enable_chunked_prefill": unused(False, SPEED),
    "rollout.max_response_length": copied(2048, "rollout.max_completion_length"),
    "rollout.n_generation": joint(16, "grpo.num_generations"),
    "rollout.n_generation_to_batch": unused(False, OWN_BATCHES),
    "rollout.n_generation_mini_batch": unused(None, OWN_BATCHES),
    "rollout.batch_size": unused(1, OWN_BATCHES),
    "rollout.quantization": only(
        "none",
        "none",
        "",
        because="it is off",
        instead='completions are sampled from the weights that are trained; set it to "none"',
    ),
    "rollout.seed": unused(None, "train.seed is that of sampling, too"),
    "rollout.sampling_config.temperature": joint(1.0, "rollout.temperature"),
    "rollout.sampling_config.top_p": copied(1.0, "rollout.top_p"),
    "rollout.sampling_config.top_k": copied(-1, "rollout.top_k", convert=lambda count: max(count, 0)),
    "rollout.sampling_config.repetition_penalty": only(
        1.0,
        1.0,
        because="1 is none",
        instead="with it the engine would sample from another policy than the one that is trained; set it to 1",
    ),
    "rollout.sampling_config.use_flashinfer": unused(False, SPEED),
    "rollout.vllm_use_flashinfer": unused(False, SPEED),
    "rollout.mode": unused("sync", FRESH),
    "rollout.async_config.max_concurrent_requests": unused(10, OWN_BATCHES),
    "rollout.async_r2r_sync": unused(False, FRESH),
    "rollout.prefetch_rollout": unused(False, FRESH),
    "rollout.prefetch_queue_maxsize": unused(2, FRESH),
    "rollout.broadcast_all_params": unused(False, "every tensor is sent, and checked, at every sync"),
    "rollout.multi_turn_config.enable": only(
        False, False, because="it is off", instead="a rollout is one answer here; set it to false"
    ),
    "rollout.multi_turn_config.enable_tools": unused(False, NO_TURNS),
    "rollout.multi_turn_config.enable_thinking": unused(False, NO_TURNS),
    "rollout.multi_turn_config.custom_chat_template_path": unused(None, NO_TURNS, takes="any"),
    "rollout.multi_turn_config.max_assistant_turns": unused(5, NO_TURNS),
    "rollout.multi_turn_config.add_generation_prompt": unused(True, NO_TURNS),
    "rollout.multi_turn_config.continue_final_message": unused(False, NO_TURNS),
    "rollout.parallelism.n_init_replicas": joint(1, "GPUs"),
    "rollout.parallelism.tp_size": joint(2, "rollout.tensor_parallel_size"),
    "rollout.parallelism.cp_size": unused(1, "vLLM shares a copy of the model by tensor parallelism"),
    "rollout.parallelism.ep_size": unused(1, "vLLM shares a copy of the model by tensor parallelism"),
    "rollout.parallelism.dp_shard_size": joint(-1, "GPUs"),
    "rollout.parallelism.dp_replicate_size": joint(1, "GPUs"),
    "rollout.parallelism.pp_size": joint(1, "GPUs"),
    "rollout.parallelism.pp_dynamic_shape": unused(False, NO_PIPELINE),
    "rollout.parallelism.pp_micro_batch_size": unused(1, NO_PIPELINE),
    "rollout.parallelism.pp_schedule": unused("Interleaved1F1B", NO_PIPELINE),
}

DISTILLATION: dict[str, Key] = (
    {
        "distillation.enable": joint(False, "distill.teacher"),
        "distillation.model_name_or_path": joint("", "distill.teacher", takes="string"),
        "distillation.model_revision": joint(None, "distill.revision", takes="string"),
        "distillation.kl_penalty_coef": joint(1.0, "distill.coef"),
        "distillation.kl_discount_factor": joint(0.0, "distill.discount"),
        "distillation.include_prompt": only(
            False,
            False,
            because="only completions are trained",
            instead="only completions are trained; set it to false",
        ),
        "distillation.top_k": joint(0, "distill.teacher"),
        "distillation.jsd_beta": unused(0.5, "it is of top_k, which is 0"),
        "distillation.batch_size_per_replica": unused(8, "the teacher reads the micro-batches of the policy"),
        "distillation.mini_batch": unused(1, "the teacher reads the micro-batches of the policy"),
        "distillation.trainer_token_ids_from_teacher": unused(True, "the ids are those that were sampled"),
        "distillation.rollout_top_k_recompute": unused(False, "it is of top_k, which is 0"),
    }
    | {
        f"distillation.{name}": unused(None, ONE_TEACHER, takes="any")
        for name in (
            *("model_max_length", "compile", "master_dtype", "param_dtype", "logprob_dtype", "fsdp_reduce_dtype"),
            *("fsdp_offload", "fsdp_reshard_after_forward", "seed"),
        )
    }
    | {
        f"distillation.parallelism.{name}": unused(default, ONE_TEACHER)
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

KEYS: dict[str, Key] = same_for(
    {f"train.train_policy.{name}": key for name, key in POLICY.items()} | ENGINE | DISTILLATION, "grpo"
)
