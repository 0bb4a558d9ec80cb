"""The schema of a GRPO run's configuration: what it has beside `RunConfig`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dsreason.config.engine_options import ROLLOUT, check_owned
from dsreason.config.schema import RewardFunctionsConfig, RewardWeight, RunConfig, UpdateConfig
from dsreason.config.section import Section
from dsreason.errors import ConfigError

OffloadMode = Literal["auto", "always", "never"]


class AlgorithmConfig(Section):
    """How completions become an update. What is unset here is the preset's."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "grpo"
    """Loss, advantages, clipping, KL and filters as a paper defines them (`dsreason/losses/presets.py`)."""
    num_generations: int = Field(8, ge=1)
    """Completions of each prompt: a group, within which advantages are measured. One is enough for a teacher without rewards."""
    prompts_per_step: int = Field(16, ge=1)
    """Prompts of each rollout, over all ranks."""
    optimizer_steps_per_rollout: int = Field(1, ge=1)
    """Optimizer steps on the completions of one rollout, each with its share of them."""
    advantage: Literal["group_normalized", "group_centered", "leave_one_out", "batch_normalized"] | None = None
    """How the rewards of a group become advantages."""
    clip_low: float | None = Field(None, ge=0)
    """Lower clip of the ratio."""
    clip_high: float | None = Field(None, ge=0)
    """Upper clip of the ratio."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the ratio where the advantage is negative (3 is usual); unset: none."""
    correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = "token_truncate"
    """How the difference between the trainer's and the engine's log-probabilities is corrected."""
    correction_low: float | None = Field(None, ge=0)
    """Smallest weight of the correction; unset: that of the published form."""
    correction_high: float | None = Field(None, gt=0)
    """Largest weight of the correction; unset: that of the published form."""
    kl_coef: float | None = Field(None, ge=0)
    """Weight of the KL to the reference policy in the loss; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "bias_corrected_k3"] = "k3"
    """Estimator of the KL to the reference policy."""
    kl_clamp: float | None = Field(None, gt=0)
    """Largest k3 of a token (cosmos-rl: 10); unset: none."""
    reference_reset_every: int = Field(0, ge=0)
    """Steps after which the present policy becomes the reference; 0: it stays the model that training began with."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus in the loss."""
    overlong_filter: bool | None = None
    """Do not train completions that were cut off at their longest; they stay in the reward statistics."""
    dynamic_sampling: bool | None = None
    """Replace groups of equal rewards by groups of further prompts."""
    dynamic_tolerance: float = Field(0.0, ge=0)
    """Rewards of a group that span no more than this count as equal."""
    max_refills: int = Field(3, ge=1)
    """Most further rollouts of one batch when sampling dynamically."""

    @model_validator(mode="after")
    def check_parts(self) -> Self:
        if self.prompts_per_step % self.optimizer_steps_per_rollout:
            raise ValueError(
                f"prompts_per_step ({self.prompts_per_step}) must be a multiple of optimizer_steps_per_rollout "
                f"({self.optimizer_steps_per_rollout})"
            )
        self.check_order("correction_low", "correction_high")
        if (self.correction_low, self.correction_high) != (None, None) and self.correction == "none":
            raise ValueError('correction_low and correction_high need a correction; correction is "none"')
        return self

    @model_validator(mode="after")
    def check_unused(self) -> Self:
        differing = set(self.differing())
        if self.kl_coef == 0 and (unused := sorted(differing & {"kl_estimator", "kl_clamp", "reference_reset_every"})):
            raise ValueError(
                f"{', '.join(unused)} apply to the KL only, and kl_coef is 0; remove them or raise kl_coef"
            )
        if self.dynamic_sampling is False and (unused := sorted(differing & {"dynamic_tolerance", "max_refills"})):
            raise ValueError(f"{', '.join(unused)} apply to dynamic_sampling only, which is false; remove them")
        return self

    @model_validator(mode="after")
    def check_loss(self) -> Self:
        if self.dual_clip is not None and self.preset in ("gspo", "cispo"):
            raise ValueError(f"dual_clip ({self.dual_clip}) is not defined for the preset {self.preset}; remove it")
        if self.kl_clamp is not None and self.kl_estimator not in ("k3", "bias_corrected_k3"):
            raise ValueError(
                f"kl_clamp ({self.kl_clamp}) bounds k3, but kl_estimator is {self.kl_estimator}; remove it"
            )
        return self


class RolloutConfig(Section):
    engine: Literal["vllm", "transformers"] = "vllm"
    """What samples the completions."""
    tensor_parallel_size: int = Field(1, ge=1, le=1024)
    """Ranks that hold one copy of vLLM's model together."""
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1)
    """Share of a GPU's memory that vLLM may use while it is awake."""
    offload: OffloadMode = "auto"
    """Whether the optimizer's state waits in CPU memory during rollouts: "auto" moves as much as vLLM's share needs, "always" all
    of it, "never" nothing. Beside the transformers engine, "auto" moves all of it."""
    sleep_level: Literal[1, 2] = 2
    """2 drops vLLM's weights while it sleeps; 1 keeps a copy in CPU memory."""
    enforce_eager: bool = False
    """vLLM: do without compiled graphs, which saves memory and start-up time and costs speed."""
    engine_options: Annotated[dict[str, Any], AfterValidator(partial(check_owned, owned=ROLLOUT))] = {}
    """Further arguments of vLLM's `LLM`, passed on as they are, such as `max_num_seqs` or `attention_backend`."""
    temperature: float = Field(1.0, ge=0.01)
    """Temperature of sampling."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the fewest tokens whose probability reaches this; needs `grpo.correction = "none"` below 1."""
    top_k: int = Field(0, ge=0)
    """Sample from this many most probable tokens, 0: all; needs `grpo.correction = "none"` above 0."""
    max_completion_length: int = Field(1024, ge=1)
    """Longest completion in tokens."""
    batch_size: int = Field(32, ge=1)
    """Completions that the transformers engine draws together on a rank; vLLM sees to that itself."""
    sync_bucket_mb: float = Field(512.0, gt=0)
    """Most MiB of weights that are gathered at a time to be sent to the engine."""
    show: int = Field(4, ge=0)
    """Completions shown with their media in TensorBoard."""
    show_every: int = Field(20, ge=0)
    """Steps between such completions; 0: never."""
    self_test: bool = True
    """Before training: disturb the engine's weights, sleep, wake and sync, and see its log-probabilities come back."""
    mismatch_warn: float = Field(0.02, ge=0)
    """Warn where `mismatch/kl`, the mean over tokens of KL(engine ‖ trainer), is above this."""
    mismatch_stop: float = Field(0.5, gt=0)
    """Stop where `mismatch/kl` is above this: the engine samples from another policy than the one being trained."""

    @property
    def samples_all_tokens(self) -> bool:
        """Whether completions are drawn from all tokens, so that their probabilities are comparable with the trainer's."""
        return self.top_p == 1 and self.top_k == 0

    @model_validator(mode="after")
    def check_together(self) -> Self:
        used = {"enforce_eager": self.enforce_eager, "engine_options": self.engine_options}
        if self.engine == "transformers" and (unused := {name: value for name, value in used.items() if value}):
            values = ", ".join(f"{name} ({value})" for name, value in unused.items())
            raise ValueError(f'{values}: used by vLLM only, and engine is "transformers"; remove them')
        self.check_order("mismatch_warn", "mismatch_stop")
        return self


class RemoteRewardConfig(Section):
    """The server of rewards named `remote:<score>`. Its token is read from the environment only."""

    url: str | None = None
    """Address; unset: REMOTE_REWARD_URL or WFM_REWARD_URL of the environment. Its query is masked where this is written."""
    batch_size: int = Field(64, ge=1)
    """Completions of one request."""
    concurrency: int = Field(4, ge=1)
    """Requests of one rank at the same time."""
    time_limit: float | None = Field(None, gt=0)
    """Seconds that one request may take; unset: REMOTE_REWARD_ENQUEUE_TIMEOUT_S, or 60."""
    retries: int = Field(4, ge=0)
    """Further attempts of a request that failed, after pauses that double."""


class DistillConfig(Section):
    """A teacher whose log-probabilities of the student's own completions are advantages, beside those of rewards or alone."""

    teacher: str | None = None
    """Model folder, name on the hub or `tiny:<name>`, as model.path; or the address of an OpenAI-compatible server
    (`http://host:8000/v1`) that gives the log-probabilities of a prompt, as vLLM does, for prompts without media. Its key is read
    from TEACHER_API_KEY. Unset: no teacher."""
    revision: str | None = None
    """Of a teacher on the hub."""
    coef: float = Field(1.0, gt=0)
    """Weight of log teacher - log student, a token's advantage by the teacher, beside that of the rewards."""
    discount: float = Field(0.0, ge=0, le=1)
    """A token is also given what the teacher says of those after it, times this for each token between; 0: of itself alone."""
    offload: bool = True
    """Keep the teacher's weights in CPU memory, from where each layer fetches them; else every rank keeps its share on its GPU,
    also during rollouts."""
    server_model: str | None = None
    """Name of the server's model."""
    time_limit: float = Field(120.0, gt=0)
    """Seconds that one request to the server may take."""
    retries: int = Field(4, ge=0)
    """Further attempts of a request that failed, after pauses that double."""
    concurrency: int = Field(8, ge=1)
    """Requests of one rank at the same time."""

    @property
    def by_server(self) -> bool:
        return self.teacher is not None and self.teacher.startswith(("http://", "https://"))

    @model_validator(mode="after")
    def check_teacher(self) -> Self:
        of_server, of_model = {"server_model", "time_limit", "retries", "concurrency"}, {"revision", "offload"}
        if self.teacher is None:
            kind, unused = "a teacher", set(type(self).model_fields)
        else:
            kind, unused = ("a model folder", of_model) if self.by_server else ("a server", of_server)
        fields = type(self).model_fields  # a written configuration has all of them
        if names_given := sorted(name for name in unused - {"teacher"} if getattr(self, name) != fields[name].default):
            raise ValueError(f"{', '.join(names_given)}: only {kind} has a use for it; remove it, or set teacher")
        if self.by_server and self.server_model is None:
            raise ValueError("teacher is a server: set server_model to the name of its model")
        return self


class RewardConfig(RewardFunctionsConfig):
    functions: dict[str, RewardWeight] = {}
    """Reward name (built in, `package.module:attr`, `file.py:attr` or `remote:<score>`) = weight."""
    options: dict[str, dict[str, Any]] = {}
    """Keyword arguments by reward name, such as `format.pattern`. Those named `api_key`, `token` … are written masked."""
    workers: int = Field(2, ge=1)
    """Processes per rank that score."""
    time_limit: float = Field(30.0, gt=0)
    """Seconds that one call may take."""
    remote: RemoteRewardConfig = RemoteRewardConfig()


class GRPOConfig(RunConfig):
    """Everything of one `dsreason grpo` run."""

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
        """Completions of one optimizer step, over all ranks."""
        return self.grpo.prompts_per_step * self.grpo.num_generations // self.grpo.optimizer_steps_per_rollout

    @property
    def batch_fact(self) -> str:
        return f"grpo.prompts_per_step x num_generations / optimizer_steps_per_rollout is {self.samples_per_step}"

    def check_ranks(self, num_ranks: int) -> list[str]:
        parallel = self.rollout.tensor_parallel_size
        if num_ranks % parallel:
            raise ConfigError(
                f"rollout.tensor_parallel_size ({parallel}) does not divide the number of ranks ({num_ranks}); lower it, "
                "or start another number"
            )
        return super().check_ranks(num_ranks)

    @model_validator(mode="after")
    def check_adapters(self) -> Self:
        if self.lora.rank and self.lora.dropout:
            raise ValueError(
                f"lora.dropout ({self.lora.dropout:g}): the rollout engine samples without it, from another policy than the one "
                "that would be trained; set it to 0"
            )
        if self.lora.rank and self.grpo.reference_reset_every:
            raise ValueError(
                f"grpo.reference_reset_every ({self.grpo.reference_reset_every}) with lora.rank ({self.lora.rank}): the "
                "reference is the model without its adapters, which takes no memory, and cannot be another one; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def check_rewards(self) -> Self:
        if not self.reward.functions and self.distill.teacher is None:
            raise ValueError(
                "reward.functions names no reward; give at least one with its weight, or a teacher (distill.teacher)"
            )
        if self.reward.functions and self.grpo.num_generations == 1:
            raise ValueError(
                "grpo.num_generations (1): rewards are compared within a group, and one completion has no other; set 2 or more"
            )
        if not self.reward.functions and self.checkpoint.best_metric == "val/reward/mean":
            raise ValueError(
                "checkpoint.best_metric (val/reward/mean) needs rewards, and reward.functions names none; set val/loss"
            )
        return self

    @model_validator(mode="after")
    def check_whole_rollouts(self) -> Self:
        steps, last = self.grpo.optimizer_steps_per_rollout, self.train.max_steps
        if last is not None and last % steps:
            raise ValueError(
                f"train.max_steps ({last}) must be a multiple of grpo.optimizer_steps_per_rollout ({steps}): a run cannot be "
                "resumed exactly inside of a rollout"
            )
        return self

    @model_validator(mode="after")
    def check_sampling(self) -> Self:
        if not self.rollout.samples_all_tokens and self.grpo.correction != "none":
            raise ValueError(
                f"rollout.top_p ({self.rollout.top_p}) and rollout.top_k ({self.rollout.top_k}) with grpo.correction "
                f"({self.grpo.correction}): the engine's probabilities then cover a part of the vocabulary only, and the "
                'correction would be biased; set grpo.correction = "none", or sample from all tokens (top_p 1, top_k 0)'
            )
        return self
