"""The run configuration: every key, its type, its bounds and its meaning.

Validators are pure: no file, network, environment or torch. `RunConfig.check_ranks` checks once, at start-up, what depends
on the number of ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from dsreason.config.schema_checkpoint import CheckpointConfig
from dsreason.config.schema_data import Count, DataConfig, Share
from dsreason.config.schema_data import SourceConfig as SourceConfig  # adapters import it from here
from dsreason.config.schema_lora import LoRAConfig
from dsreason.config.section import Section, check_regex, check_temperature
from dsreason.errors import ConfigError


class JobModelConfig(Section):
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more time."""


class ModelConfig(JobModelConfig):
    path: str = "tiny:qwen2_5_vl"
    """Hugging Face folder, hub name or `s3://…`; `tiny:qwen2_5_vl`, `tiny:qwen3_vl` and `tiny:cosmos3_omni` are small random
    models for trials, `tiny:qwen2` and `tiny:qwen3` (Qwen2.5, Qwen3) their text-only counterparts."""
    revision: str | None = None
    """Hub revision."""
    max_length: int = Field(4096, ge=8)
    """Maximum length of a sample in tokens, media included."""
    on_too_long: Literal["error", "skip"] = "error"
    """Action for a longer sample: stop and name it, or skip it, count it and list it."""
    freeze: tuple[str, ...] = ()
    """Regular expressions, searched in parameter names (`visual`, `language_model\\.layers\\.[0-3]\\.`); each must match one."""
    quantize: Literal["nf4"] | None = None
    """Hold the matrices of the language model in 4 bits (`nf4`, QLoRA, 2305.14314); needs adapters (`lora.rank`)."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """`auto` is dsreason's attention, which separates the samples of a packed row: torch's flash attention on a GPU, its
    scaled-dot-product attention elsewhere. The others are those of transformers, for comparison; with them completions do not
    share their prompt."""
    fused_kernels: bool = True
    """Compute RMSNorm, SwiGLU and rotary positions in one kernel each when training on a GPU (torch, Liger-Kernel)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Enable it only for code that you have read."""

    @field_validator("freeze")
    @classmethod
    def check_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_regex, patterns))


class OptimConfig(Section):
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate. If unset with `lora.rank`: 1e-4 in sft, 2e-5 in grpo and dpo."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon, added to the denominator."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of matrices; norms and biases have none. If unset with `lora.rank`: 0 in sft, grpo and dpo."""
    warmup: Share | Count = 0.03
    """Warmup steps: a whole number (at most all steps), or a share (below 1) of all steps."""
    schedule: Literal["constant", "linear", "cosine", "sqrt", "wsd"] = "cosine"
    """Learning rate after the warmup: hold it, or decay it (wsd: hold, then sqrt-decay over the last `decay_share`)."""
    decay_share: float | None = Field(None, gt=0, le=1)
    """Share of all steps, at the end, over which the rate decays; it is held before. Unset: all after the warmup (wsd: 0.2)."""
    min_lr_share: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end as a share of `lr`."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Maximum gradient norm; larger gradients are clipped. 0 only measures the norm."""

    @model_validator(mode="after")
    def check_decay(self) -> Self:
        if self.decay_share is not None and self.schedule == "constant":
            raise ValueError(
                f"decay_share ({self.decay_share:g}): the schedule is constant, which never decays; remove one"
            )
        return self


class JobTrainConfig(Section):
    """The keys of `[train]` that all trainers share."""

    epochs: int = Field(1, ge=1)
    """Passes over the training rows."""
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many steps, even if epochs remain."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of weights and activations; master weights, accumulation and reduction are always fp32."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action for a NaN or infinite loss or gradient: save the step's samples and stop, or skip the step."""
    seed: int = Field(0, ge=0)
    """Seed of the order of rows and of sampling. The choice of held-out rows does not depend on it."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Samples per forward on one rank (unset, and without a token budget: see packing)."""


class UpdateConfig(JobTrainConfig):
    """The keys of `[train]` that SFT and GRPO share."""

    packing: bool = True
    """Concatenate the samples of a forward into one row without padding, up to max_tokens_per_micro_batch (or up to
    model.max_length if neither that nor micro_batch_size is set); completions of one prompt share it. Else samples are padded
    rows, one per forward if neither key is set."""
    max_tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Tokens per forward on one rank, instead of a fixed number of samples; padding counts. If several ranks compute a row
    together, the tokens of the whole row."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Ranks of one host that compute each row together, for samples that are too long for one GPU; 1: each rank has its own
    rows."""
    activation_offload: bool = False
    """Keep the layer inputs that wait for the backward pass in host memory, for rows whose inputs do not fit the GPU. Needs
    model.gradient_checkpointing."""

    @model_validator(mode="after")
    def check_micro_batch(self) -> Self:
        self.check_exclusive("micro_batch_size", "max_tokens_per_micro_batch")
        return self

    @model_validator(mode="after")
    def check_packed(self) -> Self:
        if self.sequence_parallel_size > 1 and not self.packing:
            raise ValueError(
                f"sequence_parallel_size ({self.sequence_parallel_size}) needs packed rows, but packing is false; set "
                "packing = true, or sequence_parallel_size = 1"
            )
        return self


class TrainConfig(UpdateConfig):
    global_batch_size: int = Field(32, ge=1)
    """Samples per step, over all ranks. Accumulation steps are derived."""


class JobValidationConfig(Section):
    """The keys of `[validation]` that all trainers share."""

    every: int = Field(0, ge=0)
    """Steps between validations; 0: only before the first and after the last step."""
    before_training: bool = True
    """Validate before the first step, too."""


class ValidationConfig(JobValidationConfig):
    micro_batch_size: int = Field(8, ge=1)
    """Samples per forward on one rank; the transformers engine answers at least this many at a time, and more if they fit."""
    generate: bool = True
    """Generate answers, too, and compare them with the references (`val/accuracy`)."""
    max_completion_length: int = Field(64, ge=1)
    """Maximum length of a generated answer in tokens."""
    media_memory_gib: float = Field(4.0, gt=0)
    """GiB of host memory on one rank for decoded media. If all media fit, one call of the engine answers all rows; else each
    call has at least the rows that the engine answers at a time."""
    max_samples: int | None = Field(None, ge=1)
    """Maximum number of held-out rows to use."""
    temperature: Annotated[float, AfterValidator(check_temperature)] = Field(0.0, ge=0)
    """Temperature of the generated answers; 0 takes the most probable token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the fewest tokens whose total probability reaches this."""
    show: int = Field(4, ge=0)
    """Generated answers displayed in TensorBoard."""


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
"""Phases that a run's time is divided into; `other` is the remaining time. A phase inside another has its own clock."""


class MonitorConfig(Section):
    log_every: int = Field(1, ge=1)
    """Steps between lines in metrics.jsonl and TensorBoard."""
    phase_time_limit: float = Field(3600.0, gt=0, le=1e8)
    """Seconds that a phase (a rollout, a step, a checkpoint) may take before all stacks are dumped and the job ends."""
    phase_time_limits: dict[Phase, Annotated[float, Field(gt=0, le=1e8)]] = {}
    """Time limits of single phases, such as `{export = 7200}`."""
    profile: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps to profile, such as `[3, 4]`: each writes a Perfetto trace and a table of times to `profile/`."""
    wandb: bool = False
    """Send the metrics to Weights & Biases, too (`WANDB_MODE=offline` keeps them local)."""
    wandb_project: str = "dsreason"
    """Project in Weights & Biases."""
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
    """The keys of `[reward]` that all trainers with rewards share."""

    functions: dict[str, RewardWeight] = {}
    options: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def check_options(self) -> Self:
        unknown = sorted(self.options.keys() - self.functions.keys())
        if unknown:
            raise ValueError(f"options for {', '.join(unknown)}, which functions does not list; remove them")
        return self


class JobConfig(Section):
    """The keys that all training commands share."""

    deciding_sections: ClassVar[tuple[str, ...]] = ("optim",)
    """Sections that decide what a run computes: a resumed run must have the same values."""

    output_dir: str | None = None
    """Folder of the run; unset: `outputs/<command>-<time>`."""
    deepspeed: str = "zero3.json"
    """DeepSpeed JSON: a path, or the name of a shipped one (`--ds-config` wins)."""
    model: JobModelConfig = JobModelConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    train: JobTrainConfig = JobTrainConfig()
    validation: JobValidationConfig = JobValidationConfig()

    @property
    @abstractmethod
    def samples_per_step(self) -> int:
        """Samples per optimizer step, over all ranks."""

    @property
    def ranks_per_row(self) -> int:
        """Ranks that compute the same samples together."""
        return 1

    @property
    @abstractmethod
    def batch_fact(self) -> str:
        """The setting that determines `samples_per_step`, for messages."""

    def check_ranks(self, num_ranks: int) -> list[str]:
        """Return warnings about running on `num_ranks` ranks.

        Any global batch can be split over any number of ranks: the loss evens out uneven shares, and a rank without a
        sample runs a stand-in that does not count. That only costs time.

        Raises:
            ConfigError: the trainer cannot run on this number of ranks.
        """
        if num_ranks % self.ranks_per_row:
            raise ConfigError(
                f"train.sequence_parallel_size ({self.ranks_per_row}) does not divide the number of ranks ({num_ranks}); lower "
                "it, or start another number of ranks"
            )
        num_groups = num_ranks // self.ranks_per_row
        idle = num_groups - self.samples_per_step
        if idle <= 0:
            return []
        groups = "ranks" if self.ranks_per_row == 1 else f"groups of {self.ranks_per_row} ranks"
        return [
            f"{self.batch_fact}, less than the number of {groups} ({num_groups}): "
            f"{idle} of them train on nothing in every step; raise it, or start fewer ranks"
        ]


class RunConfig(JobConfig):
    """The keys that all commands that train a vision-language model share."""

    deciding_sections: ClassVar[tuple[str, ...]] = ("model", "lora", "data", "optim")
    rows_need_answers: ClassVar[bool] = True
    """True if a row without anything to train on is an error."""
    held_out_as_trained: ClassVar[bool] = False
    """True if held-out rows are read like training rows; else they are read as whole conversations."""
    adapter_lr: ClassVar[float] = 1e-4
    """Default learning rate of adapters: ten times that of training all weights."""

    model: ModelConfig = ModelConfig()
    lora: LoRAConfig = LoRAConfig()
    data: DataConfig = DataConfig()
    validation: ValidationConfig = ValidationConfig()
    train: UpdateConfig = UpdateConfig()

    @property
    def token_budget(self) -> tuple[int | None, str]:
        """Tokens per forward on a rank, and the key that sets them; None if a forward takes a fixed number of samples."""
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
        """True if a prompt and its answers share one row; only dsreason's attention lets all answers attend to the prompt."""
        return self.train.packing and self.model.attention == "auto"

    @model_validator(mode="after")
    def check_attention(self) -> Self:
        if self.ranks_per_row > 1 and self.model.attention != "auto":
            raise ValueError(
                f"train.sequence_parallel_size ({self.ranks_per_row}) needs dsreason's attention, but model.attention is "
                f'"{self.model.attention}"; set model.attention = "auto", or train.sequence_parallel_size = 1'
            )
        return self

    @model_validator(mode="after")
    def check_offload(self) -> Self:
        if self.train.activation_offload and not self.model.gradient_checkpointing:
            raise ValueError(
                "train.activation_offload moves the inputs of layers that are recomputed; set "
                "model.gradient_checkpointing = true"
            )
        return self

    @model_validator(mode="after")
    def fit_optim_to_adapters(self) -> Self:
        """Set unset keys of `[optim]` to values for adapters, so that the written configuration has them."""
        adapter_values = {"lr": self.adapter_lr, "weight_decay": 0.0}
        unset = {name: value for name, value in adapter_values.items() if name not in self.optim.model_fields_set}
        if not (self.lora.rank and unset):
            return self
        return self.model_copy(update={"optim": self.optim.model_copy(update=unset)})

    @model_validator(mode="after")
    def check_freeze(self) -> Self:
        if self.lora.rank and self.model.freeze:
            raise ValueError(
                f"model.freeze ({', '.join(self.model.freeze)}) with lora.rank ({self.lora.rank}): with adapters all weights "
                "are frozen anyway; remove it, and choose the layers that get adapters with lora.targets and lora.vision"
            )
        return self

    @model_validator(mode="after")
    def check_quantize(self) -> Self:
        if self.model.quantize and not self.lora.rank:
            raise ValueError(
                f'model.quantize ("{self.model.quantize}") without lora.rank: 4-bit weights cannot be trained, only '
                "adapters on top of them; set lora.rank, or remove model.quantize"
            )
        return self

    @model_validator(mode="after")
    def check_best_metric(self) -> Self:
        best = self.checkpoint.best_metric
        if best == "val/preference_accuracy":
            raise ValueError(f"checkpoint.best_metric ({best}) is measured by dpo only; set val/loss or val/accuracy")
        if best != "val/loss" and not self.validation.generate:
            raise ValueError(f"checkpoint.best_metric ({best}) needs validation.generate = true")
        return self


class SFTConfig(RunConfig):
    """The configuration of a `dsreason sft` run."""

    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def check_no_reward(self) -> Self:
        if self.checkpoint.best_metric == "val/reward/mean":
            raise ValueError(
                "checkpoint.best_metric (val/reward/mean) is measured by grpo only; set val/loss or val/accuracy"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        return self.train.global_batch_size

    @property
    def batch_fact(self) -> str:
        return f"train.global_batch_size is {self.samples_per_step}"
