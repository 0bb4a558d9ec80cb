"""Schema of the run configuration, which defines the type, bounds and meaning of every key.

Validators are pure functions: they do not use files, the network, environment variables or torch. Settings that depend on the
number of ranks are checked once at start-up, by `RunConfig.check_ranks`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from dsreason.config.schema_checkpoint import CheckpointConfig
from dsreason.config.schema_data import Count, DataConfig, Share
from dsreason.config.schema_data import SourceConfig as SourceConfig  # re-exported for data adapters
from dsreason.config.schema_lora import LoRAConfig, Pattern
from dsreason.config.section import Section, check_multiplier, check_regex, check_temperature
from dsreason.errors import ConfigError


class JobModelConfig(Section):
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass, which saves memory, but makes a step take about a third longer."""


class ModelConfig(JobModelConfig):
    path: str = "tiny:qwen2_5_vl"
    """Hugging Face model: a folder, a name on the Hub, or `s3://…`. `tiny:<model_type>` is a small model with random weights for
    trials: `qwen2_5_vl`, `qwen3_vl`, `qwen3_vl_moe`, `qwen3_5`, `cosmos3_omni` or `cosmos3_edge`, or `qwen2` or `qwen3`
    (Qwen2.5, Qwen3), which read only text."""
    revision: str | None = None
    """Revision of the model on the Hub: a branch, tag or commit. Unset: the default branch."""
    max_length: int = Field(4096, ge=8)
    """Maximum length of a sample in tokens, including its media."""
    on_too_long: Literal["error", "skip"] = "error"
    """What to do with a sample that exceeds `max_length`: stop with an error that names the sample, or skip and list it."""
    freeze: tuple[str, ...] = ()
    """Regular expressions that select the parameters to freeze (`visual`, `language_model\\.layers\\.[0-3]\\.`). An expression
    may match any part of a name, and must match at least one name."""
    quantize: Literal["nf4"] | None = None
    """Store the weight matrices of the language model in 4 bits (`nf4`, QLoRA, 2305.14314); requires adapters (`lora.rank`).
    Unset: no quantization."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention implementation. `auto` is dsreason's, which separates the samples of a packed row; it uses torch's flash
    attention on a GPU, and torch's scaled-dot-product attention otherwise. The other values select implementations of the
    transformers library, for comparison; each completion is then computed with its own copy of the prompt."""
    fused_kernels: bool = True
    """Compute RMSNorm, SwiGLU and rotary embeddings with fused kernels (from torch and Liger-Kernel) when training on a GPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Set this to true only if you have read the code."""

    @field_validator("freeze")
    @classmethod
    def check_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_regex, patterns))


class OptimConfig(Section):
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate. If this is unset and `lora.rank` is set: 1e-4 in sft, and 2e-5 in grpo and dpo."""
    lr_multipliers: dict[Pattern, Annotated[float, AfterValidator(check_multiplier)]] = {}
    """Factors for the learning rate of parts of the model: regular expression for parameter names, as in `model.freeze` → factor
    (`{'visual' = 0.1, 'visual\\.merger' = 1.0}`). The narrowest matching expression applies; an adapter counts as the weight that
    it changes. An expression without effect is an error."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates for the first and second moments."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon, added to the denominator."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of matrices; norms and biases have none. If this is unset and `lora.rank` is set: 0 in sft, grpo and dpo."""
    warmup: Share | Count = 0.03
    """Length of the warmup: an integer is a number of steps (at most all steps of the run), and a number below 1 is a fraction
    of all steps."""
    warmup_start: float = Field(0.0, ge=0, le=1)
    """Learning rate of the first warmup step, as a fraction of `lr`."""
    schedule: Literal["constant", "linear", "cosine", "sqrt", "wsd"] = "cosine"
    """Schedule of the learning rate after the warmup: constant, or a form of decay (`wsd` is constant at first, and then a
    square-root decay during the last `decay_share`)."""
    decay_share: float | None = Field(None, gt=0, le=1)
    """Fraction of all steps, at the end of the run, during which the learning rate decays; until then, the rate is constant.
    Unset: all steps after the warmup (`wsd`: 0.2)."""
    min_lr_share: float = Field(0.0, ge=0, le=1)
    """Final learning rate, as a fraction of `lr`."""
    schedule_steps: int | None = Field(None, ge=1)
    """Length of warmup and schedule in steps. A shorter run ends within the schedule, and a longer one keeps the final learning
    rate. Unset: all steps of the run."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Maximum gradient norm, to which larger gradients are scaled down. 0: the norm is logged, but gradients are not clipped."""

    @model_validator(mode="after")
    def check_decay(self) -> Self:
        if self.decay_share is not None and self.schedule == "constant":
            raise ValueError(
                f"decay_share ({self.decay_share:g}) has no effect, because schedule is constant; remove it, or choose another "
                "schedule"
            )
        return self


class JobTrainConfig(Section):
    """Keys of `[train]` that all trainers share."""

    epochs: int = Field(1, ge=1)
    """Number of passes over the training rows."""
    max_steps: int | None = Field(None, ge=1)
    """Maximum number of steps, even if epochs remain. Unset: no limit."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of weights and activations; master weights, gradient accumulation and reduction are always in fp32."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do if a loss or gradient is NaN or infinite: save the step's samples and stop, or skip the step."""
    seed: int = Field(0, ge=0)
    """Random seed for the order of rows and for sampling. The choice of held-out rows does not depend on it."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Number of samples per forward pass on one rank. If neither this nor a token budget is set, `packing` determines the
    number."""


class UpdateConfig(JobTrainConfig):
    """Keys of `[train]` that all trainers of vision-language models share."""

    packing: bool = True
    """Concatenate the samples of a forward pass into one packed row without padding; completions of the same prompt share the
    prompt. The length of a row is limited by max_tokens_per_micro_batch or, if neither that nor micro_batch_size is set, by
    model.max_length. If false, samples are padded to the same length, and a forward pass has one sample if neither key is set."""
    max_tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Maximum number of tokens per forward pass on one rank, including padding; this replaces a fixed number of samples. If
    several ranks compute a packed row together, the limit applies to the entire packed row."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Number of ranks on one host that compute each packed row together, which allows samples that are too long for one GPU. 1:
    each rank has its own packed rows."""
    activation_offload: bool = False
    """Keep the layer inputs that are saved for the backward pass in host memory, which allows packed rows whose inputs do not fit
    on the GPU. Requires model.gradient_checkpointing."""
    router_loss_weight: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of a mixture of experts (2101.03961, equations 4 to 6), which is added to the loss. It is
    computed per forward pass. Unlike all other losses, it therefore depends on which samples share a row. 0: no such loss; the
    metrics `router/balance_loss` and `router/max_load` show the balance."""

    @model_validator(mode="after")
    def check_micro_batch(self) -> Self:
        self.check_exclusive("micro_batch_size", "max_tokens_per_micro_batch")
        return self

    @model_validator(mode="after")
    def check_packed(self) -> Self:
        if self.sequence_parallel_size > 1 and not self.packing:
            raise ValueError(
                f"sequence_parallel_size ({self.sequence_parallel_size}) requires packed rows, but packing is false; set "
                "packing = true, or sequence_parallel_size = 1"
            )
        return self


class TrainConfig(UpdateConfig):
    global_batch_size: int = Field(32, ge=1)
    """Number of samples per step, over all ranks. The number of gradient-accumulation steps follows from this number."""


class JobValidationConfig(Section):
    """Keys of `[validation]` that all trainers share."""

    every: int = Field(0, ge=0)
    """Number of steps between validations. 0: validate only before the first and after the last step."""
    before_training: bool = True
    """Also validate before the first step."""


class ValidationConfig(JobValidationConfig):
    micro_batch_size: int = Field(8, ge=1)
    """Number of samples per forward pass on one rank. The transformers engine answers at least this number of rows at a time, and
    more if they fit into memory."""
    generate: bool = True
    """Also generate answers and compare them with the references (`val/accuracy`)."""
    max_completion_length: int = Field(64, ge=1)
    """Maximum length of a generated answer in tokens."""
    media_memory_gib: float = Field(4.0, gt=0)
    """Host memory per rank for decoded media, in GiB. If all media fit, one call of the engine answers all rows; otherwise, each
    call contains at least the number of rows that the engine answers at a time."""
    max_samples: int | None = Field(None, ge=1)
    """Maximum number of held-out rows to use. Unset: all rows."""
    temperature: Annotated[float, AfterValidator(check_temperature)] = Field(0.0, ge=0)
    """Sampling temperature of the generated answers; 0 always picks the most probable token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only from the smallest set of most probable tokens whose total probability reaches this value."""
    show: int = Field(4, ge=0)
    """Number of generated answers to display in TensorBoard."""


Phase = Literal[
    "preflight",
    "open_data",
    "load_model",
    "start_engine",
    "self_test",
    "data",
    "rollout",
    "weight_sync",
    "reward",
    "prepare",
    "step",
    "validation",
    "checkpoint",
    "export",
    "other",
]
"""Phases into which the time of a run is divided; `other` is the remaining time. The time of a nested phase counts separately."""


class MonitorConfig(Section):
    log_every: int = Field(1, ge=1)
    """Number of steps between entries in metrics.jsonl and TensorBoard."""
    phase_time_limit: float = Field(3600.0, gt=0, le=1e8)
    """Seconds that a phase (a rollout, a step, a checkpoint) may take before all stacks are dumped and the job is stopped."""
    phase_time_limits: dict[Phase, Annotated[float, Field(gt=0, le=1e8)]] = {}
    """Time limits for individual phases in seconds, such as `{export = 7200}`."""
    profile: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps to profile, such as `[3, 4]`. For each of them, a Perfetto trace and a table of times are written to `profile/`."""
    wandb: bool = False
    """Also send the metrics to Weights & Biases (`WANDB_MODE=offline` keeps them local)."""
    wandb_project: str = "dsreason"
    """Name of the project in Weights & Biases."""
    wandb_name: str | None = None
    """Name of the run in Weights & Biases; unset: the name of the output folder."""

    @field_validator("profile")
    @classmethod
    def check_profile(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if repeated := [step for step in steps if steps.count(step) > 1]:
            raise ValueError(f"step {repeated[0]} is listed twice; remove one")
        return steps


RewardWeight = Annotated[float, Field(ge=-10_000, le=10_000)]


class RewardFunctionsConfig(Section):
    """Keys of `[reward]` that all trainers with rewards share."""

    functions: dict[str, RewardWeight] = {}
    options: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def check_options(self) -> Self:
        unknown = sorted(self.options.keys() - self.functions.keys())
        if unknown:
            raise ValueError(
                f"options has entries for {', '.join(unknown)}, but functions does not; remove them from options"
            )
        return self


class JobConfig(Section):
    """Keys that all training commands share."""

    deciding_sections: ClassVar[tuple[str, ...]] = ("optim",)
    """Sections that determine what a run computes; a resumed run must have the same values in them."""

    output_dir: str | None = None
    """Folder of the run; unset: `outputs/<command>-<time>`."""
    deepspeed: str = "zero3.json"
    """DeepSpeed JSON: a path, or the name of a shipped file. The option `--ds-config` takes precedence."""
    model: JobModelConfig = JobModelConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    train: JobTrainConfig = JobTrainConfig()
    validation: JobValidationConfig = JobValidationConfig()

    @property
    @abstractmethod
    def samples_per_step(self) -> int:
        """Number of samples per optimizer step, over all ranks."""

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that compute the same samples together."""
        return 1

    @property
    @abstractmethod
    def batch_fact(self) -> str:
        """Setting that determines `samples_per_step`, in the wording of messages."""

    def check_ranks(self, num_ranks: int) -> list[str]:
        """Return warnings about a run on `num_ranks` ranks.

        Any global batch can be divided among any number of ranks: the loss compensates for uneven shares, and a rank without
        samples computes a placeholder, which takes time but does not affect the result.

        Raises:
            ConfigError: the trainer cannot run on this number of ranks.
        """
        if num_ranks % self.ranks_per_row:
            raise ConfigError(
                f"train.sequence_parallel_size ({self.ranks_per_row}) does not divide the number of ranks ({num_ranks}); change "
                "one of them"
            )
        num_groups = num_ranks // self.ranks_per_row
        idle = num_groups - self.samples_per_step
        if idle <= 0:
            return []
        groups = "ranks" if self.ranks_per_row == 1 else f"groups of {self.ranks_per_row} ranks"
        return [
            f"{self.batch_fact}, but the number of {groups} is {num_groups}, so {idle} of them have no samples in a step; "
            "increase the batch size, or start fewer ranks"
        ]


class RunConfig(JobConfig):
    """Keys that all commands that train a vision-language model share."""

    deciding_sections: ClassVar[tuple[str, ...]] = ("model", "lora", "data", "optim")
    rows_need_answers: ClassVar[bool] = True
    """Whether a row without anything to train on is an error."""
    held_out_as_trained: ClassVar[bool] = False
    """Whether held-out rows are read in the same way as training rows; if False, they are read as complete conversations."""
    adapter_lr: ClassVar[float] = 1e-4
    """Default learning rate for adapters, which is ten times the default for training all weights."""

    model: ModelConfig = ModelConfig()
    lora: LoRAConfig = LoRAConfig()
    data: DataConfig = DataConfig()
    validation: ValidationConfig = ValidationConfig()
    train: UpdateConfig = UpdateConfig()

    @property
    def token_budget(self) -> tuple[int | None, str]:
        """Maximum number of tokens per forward pass on a rank (None: a fixed number of samples), and the key that sets it."""
        if self.train.max_tokens_per_micro_batch is not None:
            return self.train.max_tokens_per_micro_batch, "train.max_tokens_per_micro_batch"
        if self.train.packing and self.train.micro_batch_size is None:
            return self.model.max_length, "model.max_length"
        return None, "train.micro_batch_size"

    @property
    def ranks_per_row(self) -> int:
        return self.train.sequence_parallel_size

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt and its answers share one row; only dsreason's attention lets all answers attend to the prompt."""
        return self.train.packing and self.model.attention == "auto"

    @model_validator(mode="after")
    def check_attention(self) -> Self:
        if self.ranks_per_row > 1 and self.model.attention != "auto":
            raise ValueError(
                f"train.sequence_parallel_size ({self.ranks_per_row}) requires dsreason's attention, but model.attention is "
                f'"{self.model.attention}"; set model.attention = "auto", or train.sequence_parallel_size = 1'
            )
        return self

    @model_validator(mode="after")
    def check_offload(self) -> Self:
        if self.train.activation_offload and not self.model.gradient_checkpointing:
            raise ValueError(
                "train.activation_offload applies only to recomputed layers, but model.gradient_checkpointing is false; set it "
                "to true"
            )
        return self

    @model_validator(mode="after")
    def fit_optim_to_adapters(self) -> Self:
        """Set unset keys of `[optim]` to their defaults for adapters, so that the saved configuration contains these values."""
        adapter_values = {"lr": self.adapter_lr, "weight_decay": 0.0}
        unset = {name: value for name, value in adapter_values.items() if name not in self.optim.model_fields_set}
        if not (self.lora.rank and unset):
            return self
        return self.model_copy(update={"optim": self.optim.model_copy(update=unset)})

    @model_validator(mode="after")
    def check_freeze(self) -> Self:
        if self.lora.rank and self.model.freeze:
            raise ValueError(
                f"model.freeze ({', '.join(self.model.freeze)}) has no effect with lora.rank ({self.lora.rank}), because all "
                "weights are frozen; remove it, and select the layers that get adapters with lora.targets and lora.vision"
            )
        return self

    @model_validator(mode="after")
    def check_quantize(self) -> Self:
        if self.model.quantize and not self.lora.rank:
            raise ValueError(
                f'model.quantize ("{self.model.quantize}") requires lora.rank: 4-bit weights cannot be trained, but adapters '
                "on top of them can; set lora.rank, or remove model.quantize"
            )
        return self

    @model_validator(mode="after")
    def check_best_metric(self) -> Self:
        best = self.checkpoint.best_metric
        if best == "val/preference_accuracy":
            raise ValueError(
                f"checkpoint.best_metric ({best}) is measured only by dpo; set it to val/loss or val/accuracy"
            )
        if best != "val/loss" and not self.validation.generate:
            raise ValueError(
                f"checkpoint.best_metric ({best}) requires generated answers; set validation.generate = true"
            )
        return self


class SFTConfig(RunConfig):
    """Configuration of a `dsreason sft` run."""

    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def check_no_reward(self) -> Self:
        if self.checkpoint.best_metric == "val/reward/mean":
            raise ValueError(
                "checkpoint.best_metric (val/reward/mean) is measured only by grpo; set it to val/loss or val/accuracy"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        return self.train.global_batch_size

    @property
    def batch_fact(self) -> str:
        return f"train.global_batch_size is {self.samples_per_step}"
