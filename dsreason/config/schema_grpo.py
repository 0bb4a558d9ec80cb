"""Schema for a GRPO run's configuration, which adds keys to `RunConfig`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dsreason.config.engine_options import ROLLOUT, check_owned
from dsreason.config.schema import RewardFunctionsConfig, RewardWeight, RunConfig, UpdateConfig
from dsreason.config.section import Section, choose_pronoun
from dsreason.errors import ConfigError

OffloadMode = Literal["auto", "always", "never"]


class AlgorithmConfig(Section):
    """Settings for the algorithm that computes updates from completions. Unset keys have the preset's values."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "grpo"
    """Published recipe that provides loss, advantages, clipping, KL and filters (`dsreason/losses/presets.py`)."""
    num_generations: int = Field(8, ge=1)
    """Number of completions per prompt. They form a group, within which rewards are compared. With a teacher and without
    rewards, 1 is enough."""
    prompts_per_step: int = Field(16, ge=1)
    """Number of prompts per rollout, over all ranks."""
    optimizer_steps_per_rollout: int = Field(1, ge=1)
    """Number of optimizer steps per rollout; each step uses an equal share of the rollout's completions."""
    advantage: Literal["group_normalized", "group_centered", "leave_one_out", "batch_normalized"] | None = None
    """Formula for a group's advantages, computed from its rewards."""
    clip_low: float | None = Field(None, ge=0)
    """Clipping range below 1: the probability ratio is clipped at 1 - clip_low."""
    clip_high: float | None = Field(None, ge=0)
    """Clipping range above 1: the probability ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Maximum probability ratio for negative advantages (usually 3). Unset: the ratio has no maximum."""
    correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = "token_truncate"
    """Type of importance weights, which correct for differences between the trainer's and the engine's log-probabilities."""
    correction_low: float | None = Field(None, ge=0)
    """Lower limit of the correction's importance weights. Unset: the published value."""
    correction_high: float | None = Field(None, gt=0)
    """Upper limit of the correction's importance weights. Unset: the published value."""
    kl_coef: float | None = Field(None, ge=0)
    """Weight of the KL divergence from the reference policy in the loss. 0: no reference policy is needed."""
    kl_estimator: Literal["k1", "k2", "k3", "bias_corrected_k3"] = "k3"
    """Estimator of the KL divergence from the reference policy."""
    kl_clamp: float | None = Field(None, gt=0)
    """Maximum k3 estimate per token (10 in cosmos-rl). Unset: the estimate has no maximum."""
    reference_reset_every: int = Field(0, ge=0)
    """Number of steps after which the current policy becomes the new reference. 0: the reference is always the initial model."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus in the loss."""
    overlong_filter: bool | None = None
    """Exclude completions that are truncated at the maximum length from training; reward statistics still include them."""
    dynamic_sampling: bool | None = None
    """Replace groups whose rewards are all equal with groups for different prompts."""
    dynamic_tolerance: float = Field(0.0, ge=0)
    """Maximum difference at which the rewards in a group still count as equal."""
    max_refills: int = Field(3, ge=1)
    """Maximum number of additional rollouts per batch under dynamic sampling."""

    @model_validator(mode="after")
    def check_parts(self) -> Self:
        if self.prompts_per_step % self.optimizer_steps_per_rollout:
            raise ValueError(
                f"prompts_per_step ({self.prompts_per_step}) must be a multiple of optimizer_steps_per_rollout "
                f"({self.optimizer_steps_per_rollout}); change one of them"
            )
        self.check_order("correction_low", "correction_high")
        if (self.correction_low, self.correction_high) != (None, None) and self.correction == "none":
            raise ValueError(
                'correction_low and correction_high have no effect, because correction is "none"; remove them'
            )
        return self

    @model_validator(mode="after")
    def check_unused(self) -> Self:
        differing = set(self.differing())
        if self.kl_coef == 0 and (unused := sorted(differing & {"kl_estimator", "kl_clamp", "reference_reset_every"})):
            raise ValueError(
                f"{', '.join(unused)} cannot be set if kl_coef is 0, because there is no KL term; remove "
                f"{choose_pronoun(unused)}, or increase kl_coef"
            )
        if self.dynamic_sampling is False and (unused := sorted(differing & {"dynamic_tolerance", "max_refills"})):
            raise ValueError(
                f"{', '.join(unused)} cannot be set if dynamic_sampling is false; remove {choose_pronoun(unused)}, or set "
                "dynamic_sampling = true"
            )
        return self

    @model_validator(mode="after")
    def check_loss(self) -> Self:
        if self.dual_clip is not None and self.preset in ("gspo", "cispo"):
            raise ValueError(f"dual_clip ({self.dual_clip}) is not defined for the preset {self.preset}; remove it")
        if self.kl_clamp is not None and self.kl_estimator not in ("k3", "bias_corrected_k3"):
            raise ValueError(
                f"kl_clamp ({self.kl_clamp}) applies only to k3 and bias_corrected_k3, but kl_estimator is "
                f"{self.kl_estimator}; remove it"
            )
        return self


class RolloutConfig(Section):
    engine: Literal["vllm", "transformers"] = "vllm"
    """Engine that samples the completions."""
    tensor_parallel_size: int = Field(1, ge=1, le=1024)
    """Number of ranks that share one copy of vLLM's model."""
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1)
    """Fraction of a GPU's memory that vLLM may use while it is awake, that is, during rollouts."""
    offload: OffloadMode = "auto"
    """How much of the optimizer state to move to host memory during rollouts: "auto" moves enough to make room for vLLM
    (everything for the transformers engine), "always" moves everything, and "never" moves nothing."""
    sleep_level: Literal[1, 2] = 2
    """Sleep level of vLLM between rollouts: 2 discards vLLM's weights, and 1 keeps a copy of them in host memory."""
    enforce_eager: bool = False
    """Run vLLM without compiled graphs, which saves memory and start-up time but makes vLLM slower."""
    engine_options: Annotated[dict[str, Any], AfterValidator(partial(check_owned, owned=ROLLOUT))] = {}
    """Additional arguments for vLLM's `LLM`, passed unchanged, such as `max_num_seqs` or `attention_backend`."""
    temperature: float = Field(1.0, ge=0.01)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only from the smallest set of most probable tokens whose total probability reaches this value; values below 1
    require `grpo.correction = "none"`."""
    top_k: int = Field(0, ge=0)
    """Sample only from the `top_k` most probable tokens; 0: all tokens. Values above 0 require `grpo.correction = "none"`."""
    max_completion_length: int = Field(1024, ge=1)
    """Maximum length of a completion in tokens."""
    batch_size: int = Field(32, ge=1)
    """Number of completions that the transformers engine samples together on a rank; vLLM forms its own batches."""
    sync_bucket_mb: float = Field(512.0, gt=0)
    """Maximum size, in MiB, of the weights that are gathered at a time and sent to the engine."""
    show: int = Field(4, ge=0)
    """Number of completions that TensorBoard displays with their media."""
    show_every: int = Field(20, ge=0)
    """Number of steps from one display of completions to the next. 0: completions are never displayed."""
    self_test: bool = True
    """Test the engine before training: perturb its weights, put it to sleep, wake it, sync the weights, and check that the
    original log-probabilities are restored."""
    mismatch_warn: float = Field(0.02, ge=0)
    """Value of `mismatch/kl`, the mean over tokens of KL(engine ‖ trainer), above which a warning is logged."""
    mismatch_stop: float = Field(0.5, gt=0)
    """Value of `mismatch/kl` above which the run is stopped, because the engine then samples from a different policy than the
    trained one."""

    @property
    def samples_all_tokens(self) -> bool:
        """Whether completions are sampled from all tokens, so that their probabilities are comparable with the trainer's."""
        return self.top_p == 1 and self.top_k == 0

    @model_validator(mode="after")
    def check_together(self) -> Self:
        used = {"enforce_eager": self.enforce_eager, "engine_options": self.engine_options}
        if self.engine == "transformers" and (unused := {name: value for name, value in used.items() if value}):
            values = ", ".join(f"{name} ({value})" for name, value in unused.items())
            raise ValueError(
                f'{values} can be set only for vLLM, but engine is "transformers"; remove {choose_pronoun(unused)}'
            )
        self.check_order("mismatch_warn", "mismatch_stop")
        return self


class RemoteRewardConfig(Section):
    """Settings for the server that computes rewards named `remote:<score>`. The token is read only from the environment."""

    url: str | None = None
    """URL of the server. Unset: the environment variable REMOTE_REWARD_URL or WFM_REWARD_URL. The query part is masked in
    saved configurations."""
    batch_size: int = Field(64, ge=1)
    """Number of completions per request."""
    concurrency: int = Field(4, ge=1)
    """Maximum number of concurrent requests per rank."""
    time_limit: float | None = Field(None, gt=0)
    """Time limit per request, in seconds. Unset: the environment variable REMOTE_REWARD_ENQUEUE_TIMEOUT_S, or else 60."""
    retries: int = Field(4, ge=0)
    """Maximum number of times a failed request is retried; the pause doubles after each retry."""


class DistillConfig(Section):
    """Settings for a teacher whose log-probabilities for the student's completions become advantages, with or without rewards."""

    teacher: str | None = None
    """Teacher: a model folder, a name on the Hub or `tiny:<name>`, as in model.path; or, for prompts without media, the URL of an
    OpenAI-compatible server (`http://host:8000/v1`) that can return a prompt's log-probabilities, such as vLLM. The server's API
    key is read from TEACHER_API_KEY. Unset: no teacher is used."""
    revision: str | None = None
    """Revision of the teacher on the Hub: a branch, tag or commit. Unset: the default branch."""
    coef: float = Field(1.0, gt=0)
    """Weight of a token's advantage from the teacher (log teacher - log student), which is added to the advantage from
    rewards."""
    discount: float = Field(0.0, ge=0, le=1)
    """Discount factor per token with which the teacher's advantages for later tokens are added to a token's advantage. 0: later
    tokens do not count."""
    offload: bool = True
    """Keep the teacher's weights in host memory and copy each layer to the GPU when needed. If false, every rank keeps its shard
    of the weights on the GPU, even during rollouts."""
    server_model: str | None = None
    """Name of the teacher on the server; required if the teacher is a URL."""
    time_limit: float = Field(120.0, gt=0)
    """Seconds that one request to the server may take."""
    retries: int = Field(4, ge=0)
    """Maximum number of times a failed request is retried; the pause doubles after each retry."""
    concurrency: int = Field(8, ge=1)
    """Maximum number of concurrent requests per rank."""

    @property
    def by_server(self) -> bool:
        return self.teacher is not None and self.teacher.startswith(("http://", "https://"))

    @model_validator(mode="after")
    def check_teacher(self) -> Self:
        server_keys, model_keys = {"server_model", "time_limit", "retries", "concurrency"}, {"revision", "offload"}
        if self.teacher is None:
            kind, unused = "set", set(type(self).model_fields)
        else:
            kind, unused = ("a model folder", model_keys) if self.by_server else ("the URL of a server", server_keys)
        fields = type(
            self
        ).model_fields  # values are compared with defaults, because a saved configuration sets all fields
        if names_given := sorted(name for name in unused - {"teacher"} if getattr(self, name) != fields[name].default):
            raise ValueError(
                f"{', '.join(names_given)} can be set only if teacher is {kind}; remove {choose_pronoun(names_given)}, or "
                "change teacher"
            )
        if self.by_server and self.server_model is None:
            raise ValueError(
                "teacher is the URL of a server, but server_model is not set; set it to the name of the model on the server"
            )
        return self


class RewardConfig(RewardFunctionsConfig):
    functions: dict[str, RewardWeight] = {}
    """Name of a reward (built in, `package.module:attr`, `file.py:attr` or `remote:<score>`) → its weight."""
    options: dict[str, dict[str, Any]] = {}
    """Name of a reward → keyword arguments, such as `format.pattern`. Values of `api_key`, `token` and similar keys are masked in
    saved configurations."""
    only: dict[str, dict[str, list[str | int | float | bool]]] = {}
    """Name of a reward → conditions for the rows that it scores. A condition names a field and its allowed values, such as
    `data_source = ["driving"]`; the adapter must store the field in `sample.meta` (`label.weather` is a nested field). A reward
    without conditions scores all rows."""
    workers: int = Field(2, ge=1)
    """Number of processes per rank that compute rewards."""
    time_limit: float = Field(30.0, gt=0)
    """Seconds that one call of a reward function may take."""
    remote: RemoteRewardConfig = RemoteRewardConfig()

    @model_validator(mode="after")
    def check_only(self) -> Self:
        if unknown := sorted(self.only.keys() - self.functions.keys()):
            raise ValueError(
                f"only has entries for {', '.join(unknown)}, but functions does not; remove them, or add the rewards to functions"
            )
        if empty := sorted(name for name, fields in self.only.items() if not fields or not all(fields.values())):
            raise ValueError(f"only.{empty[0]} selects no rows; name a field and its values, or remove the entry")
        return self


class GRPOConfig(RunConfig):
    """Configuration for a `dsreason grpo` run."""

    deciding_sections = (*RunConfig.deciding_sections, "grpo", "distill")
    rows_need_answers = False
    adapter_lr = 2e-5

    train: UpdateConfig = UpdateConfig()
    grpo: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    distill: DistillConfig = DistillConfig()

    @property
    def samples_per_step(self) -> int:
        """Number of completions per optimizer step, over all ranks."""
        return self.grpo.prompts_per_step * self.grpo.num_generations // self.grpo.optimizer_steps_per_rollout

    @property
    def batch_fact(self) -> str:
        return f"grpo.prompts_per_step x num_generations / optimizer_steps_per_rollout is {self.samples_per_step}"

    def check_ranks(self, num_ranks: int) -> list[str]:
        parallel = self.rollout.tensor_parallel_size
        if num_ranks % parallel:
            raise ConfigError(
                f"rollout.tensor_parallel_size ({parallel}) does not divide the number of ranks ({num_ranks}); change "
                "one of them"
            )
        return super().check_ranks(num_ranks)

    @model_validator(mode="after")
    def check_adapters(self) -> Self:
        if self.lora.rank and self.lora.dropout:
            raise ValueError(
                f"lora.dropout ({self.lora.dropout:g}) is not supported: the rollout engine samples without dropout, so it would "
                "sample from a policy other than the one being trained; set it to 0"
            )
        if self.lora.rank and self.grpo.reference_reset_every:
            raise ValueError(
                f"grpo.reference_reset_every ({self.grpo.reference_reset_every}) cannot be used with lora.rank "
                f"({self.lora.rank}): the reference is the model without its adapters and cannot be reset; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def check_rewards(self) -> Self:
        if not self.reward.functions and self.distill.teacher is None:
            raise ValueError(
                "reward.functions is empty; add at least one reward with its weight, or set distill.teacher"
            )
        if self.reward.functions and self.grpo.num_generations == 1:
            raise ValueError(
                "grpo.num_generations (1) is too small, because rewards are compared within a group; set it to 2 or more"
            )
        if not self.reward.functions and self.checkpoint.best_metric == "val/reward/mean":
            raise ValueError(
                "checkpoint.best_metric (val/reward/mean) requires rewards, but reward.functions is empty; set it to val/loss"
            )
        return self

    @model_validator(mode="after")
    def check_whole_rollouts(self) -> Self:
        steps, last = self.grpo.optimizer_steps_per_rollout, self.train.max_steps
        if last is not None and last % steps:
            raise ValueError(
                f"train.max_steps ({last}) must be a multiple of grpo.optimizer_steps_per_rollout ({steps}), because a run "
                "cannot be resumed exactly in the middle of a rollout; change one of them"
            )
        return self

    @model_validator(mode="after")
    def check_sampling(self) -> Self:
        if not self.rollout.samples_all_tokens and self.grpo.correction != "none":
            raise ValueError(
                f"rollout.top_p ({self.rollout.top_p}) and rollout.top_k ({self.rollout.top_k}) cannot be used with "
                f"grpo.correction ({self.grpo.correction}): the engine's probabilities would cover only part of the vocabulary, "
                'which biases the correction; set grpo.correction = "none", or sample from all tokens (top_p 1, top_k 0)'
            )
        return self
