"""The run configuration: every key, its type, its bounds and what it means.

Validators are pure: no file, network, environment or torch. What depends on the number of ranks is checked by
`RunConfig.check_ranks`, once, at start-up.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from dsreason.config.schema_checkpoint import CheckpointConfig
from dsreason.config.schema_data import Count, DataConfig, Share
from dsreason.config.schema_data import SourceConfig as SourceConfig  # what adapters import from here
from dsreason.config.schema_lora import LoRAConfig
from dsreason.config.section import Section, check_regex, check_temperature
from dsreason.errors import ConfigError


class JobModelConfig(Section):
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more time."""


class ModelConfig(JobModelConfig):
    path: str = "tiny:qwen2_5_vl"
    """Hugging Face folder, hub name or `s3://…`; `tiny:qwen2_5_vl`, `tiny:qwen3_vl` and `tiny:cosmos3_omni` are small random
    models to try things, and `tiny:qwen2` and `tiny:qwen3` (Qwen2.5, Qwen3) such that read text alone."""
    revision: str | None = None
    """Hub revision."""
    max_length: int = Field(4096, ge=8)
    """Longest sample in tokens, media included."""
    on_too_long: Literal["error", "skip"] = "error"
    """What to do with a longer sample: stop and name it, or leave it out, count it and list it."""
    freeze: tuple[str, ...] = ()
    """Regular expressions, searched in parameter names (`visual`, `language_model\\.layers\\.[0-3]\\.`); each must match one."""
    quantize: Literal["nf4"] | None = None
    """Hold the matrices of the language model in 4 bits (`nf4`, QLoRA, 2305.14314): only beside adapters (`lora.rank`)."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """`auto` is our own, which takes the samples of a packed row apart: torch's flash attention on a GPU, its scaled-dot-product
    attention elsewhere. The others are transformers', for comparison; with them completions do not share their prompt."""
    fused_kernels: bool = True
    """On a GPU, compute RMSNorm, SwiGLU and rotary positions of training in one kernel each (torch, Liger-Kernel)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for code you have read."""

    @field_validator("freeze")
    @classmethod
    def check_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_regex, patterns))


class OptimConfig(Section):
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate. With `lora.rank`, if unset: 1e-4 in sft, 2e-5 in grpo and dpo."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon, added to the denominator."""
    weight_decay: float = Field(0.01, ge=0)
    """Applied to matrices, not to norms and biases. With `lora.rank`, if unset: 0 in sft, grpo and dpo."""
    warmup: Share | Count = 0.03
    """Warmup steps: a whole number (at most all steps), or a share (below 1) of all steps."""
    schedule: Literal["constant", "linear", "cosine", "sqrt", "wsd"] = "cosine"
    """After the warmup: hold, or decay (wsd: hold, then sqrt-decay over the last `decay_share`)."""
    decay_share: float | None = Field(None, gt=0, le=1)
    """Share of all steps, the last ones, that decays; before them the rate is held. Unset: all after the warmup (wsd: 0.2)."""
    min_lr_share: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end as a share of `lr`."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradient clipping; 0 only measures the norm."""

    @model_validator(mode="after")
    def check_decay(self) -> Self:
        if self.decay_share is not None and self.schedule == "constant":
            raise ValueError(
                f"decay_share ({self.decay_share:g}): the schedule is constant, which never decays; remove one"
            )
        return self


class JobTrainConfig(Section):
    """What every trainer has of `[train]`."""

    epochs: int = Field(1, ge=1)
    """Passes over the training rows."""
    max_steps: int | None = Field(None, ge=1)
    """Stop earlier, after this many steps."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of weights and activations; master weights, accumulation and reduction are always fp32."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A NaN or infinite loss or gradient: stop with the step's samples saved, or leave the step out."""
    seed: int = Field(0, ge=0)
    """Seed of the order of rows and of sampling. Which rows are held out does not depend on it."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Samples per forward on one rank (unset, and without a budget of tokens: see packing)."""


class UpdateConfig(JobTrainConfig):
    """What SFT and GRPO share of `[train]`."""

    packing: bool = True
    """The samples of a forward are one row without padding, filled up to max_tokens_per_micro_batch, or to model.max_length
    where neither that nor micro_batch_size is set; completions of one prompt share it. Else they are padded rows, one of
    them where neither is set."""
    max_tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Tokens per forward on one rank, instead of a fixed number of samples; padding counts. Where several ranks compute a row
    together, the tokens of the whole row."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Ranks of one host that compute each row together, for samples that are too long for one GPU; 1: each its own rows."""
    activation_offload: bool = False
    """What waits for the backward pass, the input of each layer, lies in the host's memory: for rows so long that it does not
    fit the GPU. Needs model.gradient_checkpointing."""

    @model_validator(mode="after")
    def check_micro_batch(self) -> Self:
        self.check_exclusive("micro_batch_size", "max_tokens_per_micro_batch")
        return self

    @model_validator(mode="after")
    def check_packed(self) -> Self:
        if self.sequence_parallel_size > 1 and not self.packing:
            raise ValueError(
                f"sequence_parallel_size ({self.sequence_parallel_size}) needs packed rows, and packing is false; set "
                "packing = true, or sequence_parallel_size = 1"
            )
        return self


class TrainConfig(UpdateConfig):
    global_batch_size: int = Field(32, ge=1)
    """Samples per step, over all ranks. Accumulation steps are derived."""


class JobValidationConfig(Section):
    """What every trainer has of `[validation]`."""

    every: int = Field(0, ge=0)
    """Steps between validations; 0: only before the first and after the last step."""
    before_training: bool = True
    """Also validate before the first step."""


class ValidationConfig(JobValidationConfig):
    micro_batch_size: int = Field(8, ge=1)
    """Samples per forward on one rank; the transformers engine answers at least so many at a time, more where they fit."""
    generate: bool = True
    """Also let the model answer, and compare with the reference (`val/accuracy`)."""
    max_completion_length: int = Field(64, ge=1)
    """Longest generated answer in tokens."""
    media_memory_gib: float = Field(4.0, gt=0)
    """GiB of host memory on one rank for decoded media. Rows whose media fit are answered in one call of the engine; else
    a call has at least as many rows as the engine answers at a time."""
    max_samples: int | None = Field(None, ge=1)
    """At most this many held-out rows."""
    temperature: Annotated[float, AfterValidator(check_temperature)] = Field(0.0, ge=0)
    """Of the generated answers; 0 takes the most probable token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the fewest tokens whose probability reaches this."""
    show: int = Field(4, ge=0)
    """Generated answers shown in TensorBoard."""


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
"""What a run spends its time with; `other` is all that has no name. A phase inside another has a clock of its own."""


class MonitorConfig(Section):
    log_every: int = Field(1, ge=1)
    """Steps between lines in metrics.jsonl and TensorBoard."""
    phase_time_limit: float = Field(3600.0, gt=0, le=1e8)
    """Seconds that a phase (a rollout, a step, a checkpoint) may take before all stacks are dumped and the job ends."""
    phase_time_limits: dict[Phase, Annotated[float, Field(gt=0, le=1e8)]] = {}
    """Of single phases, such as `{export = 7200}`."""
    profile: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps to profile, such as `[3, 4]`: each writes a trace for Perfetto and a table of times to `profile/`."""
    wandb: bool = False
    """Also send the metrics to Weights & Biases (`WANDB_MODE=offline` keeps them local)."""
    wandb_project: str = "dsreason"
    """Project in Weights & Biases."""
    wandb_name: str | None = None
    """Name of the run there; unset: that of the output folder."""

    @field_validator("profile")
    @classmethod
    def check_profile(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if repeated := [step for step in steps if steps.count(step) > 1]:
            raise ValueError(f"step {repeated[0]} is listed twice; remove one")
        return steps


RewardWeight = Annotated[float, Field(ge=-10_000, le=10_000)]


class RewardFunctionsConfig(Section):
    """What every trainer by rewards has of `[reward]`."""

    functions: dict[str, RewardWeight] = {}
    options: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def check_options(self) -> Self:
        unknown = sorted(self.options.keys() - self.functions.keys())
        if unknown:
            raise ValueError(f"options for {', '.join(unknown)}, which functions does not list")
        return self


class JobConfig(Section):
    """What every training command has."""

    deciding_sections: ClassVar[tuple[str, ...]] = ("optim",)
    """Sections that decide what a run computes: a resumed run must have the same."""

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
        """Samples of one optimizer step, over all ranks."""

    @property
    def ranks_per_row(self) -> int:
        """Ranks that compute the same samples together."""
        return 1

    @property
    @abstractmethod
    def batch_fact(self) -> str:
        """Which setting makes `samples_per_step`, for messages."""

    def check_ranks(self, num_ranks: int) -> list[str]:
        """Return what a person should know about this run on so many ranks; one text each, none of them an error.

        Any global batch can be cut over any number of ranks: uneven shares are even in the loss, and a rank without a
        sample runs a stand-in that does not count. That only costs time.

        Raises:
            ConfigError: the trainer cannot run on so many.
        """
        if num_ranks % self.ranks_per_row:
            raise ConfigError(
                f"train.sequence_parallel_size ({self.ranks_per_row}) does not divide the number of ranks ({num_ranks}); lower "
                "it, or start another number"
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
    """What the commands that train a vision-language model have."""

    deciding_sections: ClassVar[tuple[str, ...]] = ("model", "lora", "data", "optim")
    rows_need_answers: ClassVar[bool] = True
    """Whether a row that has nothing to train on is an error."""
    held_out_as_trained: ClassVar[bool] = False
    """Whether held-out rows must be fit to be trained on; else they are read as whole conversations."""
    adapter_lr: ClassVar[float] = 1e-4
    """The learning rate of adapters where none is set: they take ten times that of all weights."""

    model: ModelConfig = ModelConfig()
    lora: LoRAConfig = LoRAConfig()
    data: DataConfig = DataConfig()
    validation: ValidationConfig = ValidationConfig()
    train: UpdateConfig = UpdateConfig()

    @property
    def token_budget(self) -> tuple[int | None, str]:
        """Tokens of one forward on a rank, with the key that says so; None: it takes a number of samples."""
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
        """Whether the answers to a prompt are in one row with it; only our own attention can show it to all of them."""
        return self.train.packing and self.model.attention == "auto"

    @model_validator(mode="after")
    def check_attention(self) -> Self:
        if self.ranks_per_row > 1 and self.model.attention != "auto":
            raise ValueError(
                f"train.sequence_parallel_size ({self.ranks_per_row}) works with our own attention only, and model.attention is "
                f'"{self.model.attention}"; set model.attention = "auto", or train.sequence_parallel_size = 1'
            )
        return self

    @model_validator(mode="after")
    def check_offload(self) -> Self:
        if self.train.activation_offload and not self.model.gradient_checkpointing:
            raise ValueError(
                "train.activation_offload moves the inputs of layers that are computed again; set "
                "model.gradient_checkpointing = true"
            )
        return self

    @model_validator(mode="after")
    def fit_optim_to_adapters(self) -> Self:
        """What `[optim]` leaves open becomes what fits adapters, and stands so in the written configuration."""
        fitting = {"lr": self.adapter_lr, "weight_decay": 0.0}
        unset = {name: value for name, value in fitting.items() if name not in self.optim.model_fields_set}
        if not (self.lora.rank and unset):
            return self
        return self.model_copy(update={"optim": self.optim.model_copy(update=unset)})

    @model_validator(mode="after")
    def check_freeze(self) -> Self:
        if self.lora.rank and self.model.freeze:
            raise ValueError(
                f"model.freeze ({', '.join(self.model.freeze)}) with lora.rank ({self.lora.rank}): beside adapters all weights "
                "are frozen anyway; remove it, and say with lora.targets and lora.vision which layers get one"
            )
        return self

    @model_validator(mode="after")
    def check_quantize(self) -> Self:
        if self.model.quantize and not self.lora.rank:
            raise ValueError(
                f'model.quantize ("{self.model.quantize}") without lora.rank: weights in 4 bits cannot be trained, and '
                "adapters beside them can; set lora.rank, or remove model.quantize"
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
    """Everything of one `dsreason sft` run."""

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
