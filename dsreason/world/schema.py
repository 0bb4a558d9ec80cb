"""The configuration schema of `dsreason world`, which extends `JobConfig`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dsreason.config.schema import (
    JobConfig,
    JobModelConfig,
    JobTrainConfig,
    JobValidationConfig,
    RewardFunctionsConfig,
    RewardWeight,
)
from dsreason.config.schema_checkpoint import CheckpointConfig
from dsreason.config.schema_data import Count, Share
from dsreason.config.schema_lora import AdapterConfig
from dsreason.config.section import Section, refuse_flag
from dsreason.errors import ConfigError


class WorldModelConfig(JobModelConfig):
    path: str = "tiny:cosmos_predict2_5"
    """Folder in diffusers' format, Hub name, `s3://…` URI, or a run's export. `tiny:cosmos_predict2_5`, `tiny:wan` and
    `tiny:squares` (with a codec for the built-in clips) are small random models."""
    revision: str | None = None
    """Hub revision, such as `diffusers/base/post-trained`. Unset: the default branch."""
    max_prompt_length: int = Field(512, ge=8)
    """Number of tokens to which each prompt is padded or truncated."""
    freeze_text_projection: bool = False
    """When training all weights, freeze Cosmos' first text layer, so that the cache needs 1 MB per prompt instead of 98 MB."""


class WorldLoRAConfig(AdapterConfig):
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter; empty selects the family's attention and feed-forward layers."""


class WorldDataConfig(Section):
    format: Literal["builtin", "prompts", "folder", "shards", "curator", "mock"] = "builtin"
    """`builtin`: generated moving squares (with `path` "mislabelled", half of the captions have a random colour, and half a
    random direction); `prompts`: a text file with one prompt per line, or JSONL; `folder`: a folder with `videos/` and `metas/`;
    `shards`: tar files in webdataset's layout; `curator`: JSON lines with the windows of each video (`vision_path`,
    `t2w_windows`); `mock`: random clips and prompts, for testing a machine."""
    path: str = ""
    """File or folder, or its `s3://…` URI."""
    frames: int = Field(93, ge=1)
    """Number of frames per clip, whether clips are read or generated; one more than a multiple of 4."""
    height: int = Field(704, ge=16)
    """Height of a clip in pixels, a multiple of 16."""
    width: int = Field(1280, ge=16)
    """Width of a clip in pixels, a multiple of 16."""
    fps: float = Field(16.0, gt=0)
    """Frame rate of clips in frames per second, whether they are read or generated."""
    negative_prompt: str = ""
    """Prompt that guidance steers away from."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of rows to use, counted from the first. Unset: no limit."""
    validation: Share | Count | str = 0
    """Share (0 to 1) or number of rows held out of training, or another file or folder in the same format."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Action for an unusable row: stop and name it, or skip, count and list it. Only `sft` can skip unusable clips."""
    workers: int = Field(2, ge=0)
    """Number of processes per rank that read clips; 0 reads in the training process."""
    prefetch: int = Field(2, ge=1)
    """Number of steps to read ahead."""
    shuffle: bool = True
    """Whether to reorder the rows every epoch, based on `train.seed`."""

    check_validation = field_validator("validation", mode="before")(refuse_flag)

    @field_validator("frames")
    @classmethod
    def check_frames(cls, frames: int) -> int:
        if frames % 4 != 1:
            raise ValueError(f"{frames} is not one more than a multiple of 4; use {frames // 4 * 4 + 1}")
        return frames

    @field_validator("negative_prompt")
    @classmethod
    def check_text(cls, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{text!r} contains an unpaired surrogate at index {error.start}; correct it") from None
        return text

    @field_validator("height", "width")
    @classmethod
    def check_multiple(cls, size: int) -> int:
        if size % 16:
            raise ValueError(f"{size} is not a multiple of 16; use {round(size / 16) * 16}")
        return size


class WorldTrainConfig(JobTrainConfig):
    global_batch_size: int | None = Field(None, ge=1)
    """Clips per step across all ranks (`sft` only); unset: 32. The other algorithms use `world.prompts_per_step`."""
    micro_batch_size: int = Field(1, ge=1)
    """Clips per forward pass on each rank, in sampling and training."""
    context_parallel_size: int = Field(1, ge=1)
    """Number of ranks that process each clip together by sharding its tokens."""
    ema_decay: float | None = Field(None, ge=0, lt=1)
    """Decay of a moving average of the trained weights, which validation and export use. Unset: no average."""
    ema_every: int = Field(1, ge=1)
    """Number of steps between updates of the moving average."""


class WorldConfigSection(Section):
    algorithm: Literal["sft", "flow_grpo", "ddrl", "nft"] = "flow_grpo"
    """`sft`: flow matching on real clips; `flow_grpo`: policy gradients on sampled steps (arXiv 2505.05470); `ddrl`: `flow_grpo`
    with an additional loss on real clips (2512.04332); `nft`: DiffusionNFT on final samples (2509.16117)."""
    prompts_per_step: int = Field(8, ge=1)
    """Prompts per rollout, across all ranks."""
    num_generations: int = Field(8, ge=2)
    """Clips per prompt. They form a group, within which rewards are compared."""
    optimizer_steps_per_rollout: int = Field(1, ge=1)
    """Optimizer steps per rollout. They split the rollout's prompts, and each step trains on the clips of its own prompts."""
    sampling_steps: int = Field(10, ge=1)
    """Sampler steps from noise to clip in a rollout."""
    schedule: Literal["family", "linear"] = "family"
    """Noise levels of the steps: from the scheduler in the model's folder, or equally spaced and shifted by `shift`."""
    shift: float = Field(3.0, gt=0)
    """Shift of the linear schedule and of `sft`'s noise levels: s → shift·s / (1 + (shift − 1)·s)."""
    guidance_scale: float = Field(1.0, ge=1)
    """Guidance scale for sampling and training: v + (scale − 1)·(v − v_negative); 1 disables guidance. The scale of Cosmos'
    pipeline is one less: its 7 corresponds to 8 here."""
    conditional_frames: tuple[int, int] = (0, 0)
    """Minimum and maximum number of latent frames that are given from the row's clip, drawn once per group: 0 generates from text
    only, 1 from an image, 2 from a video."""
    sde: Literal["flow", "cps", "dance", "ddim"] = "flow"
    """Kind of noise that trained steps add: Flow-GRPO, coefficients-preserving sampling (2509.05952), DanceGRPO or DDIM."""
    noise_level: float = Field(0.7, ge=0)
    """Scale (eta) of `sde`'s noise: usually 0.7 (flow), 0.5 to 0.9 (cps) or 0.3 (dance); at most 1 for cps and ddim."""
    trained_steps: tuple[int, ...] | None = Field(None, min_length=1)
    """Numbers, counted from 0, of the steps that add noise and that the model is trained on; the other steps follow the ODE.
    Unset: the steps of `window`, or all steps if `window` is 0."""
    window: int = Field(0, ge=0)
    """Number of consecutive steps to train on, drawn for each rollout from the first half of the steps; 0: see
    `trained_steps`."""
    same_noise: bool = False
    """Whether all clips in a group start from the same noise and differ only in the noise that the steps add."""
    clip_range: float = Field(1e-4, gt=0)
    """Ratios are clipped to 1 ± `clip_range`. They stay close to 1, because log-probabilities are means over latent elements."""
    advantage_clip: float = Field(5.0, gt=0)
    """Advantages are clipped to ± this value."""
    advantage_std: Literal["group", "batch"] = "group"
    """Divisor of a group's centred rewards: the standard deviation of the rewards in the group or in the full rollout."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the distance to the initial model; 0 disables the term, so that no reference is kept."""
    kl: Literal["velocity", "mean"] = "velocity"
    """Form of the distance that `kl_coef` weights: mean((v − v_ref)²), or the mean squared difference between the means of the
    two models' steps, divided by 2·std². The two forms need different weights."""
    data_coef: float | None = Field(None, ge=0)
    """Weight of the velocity error on real clips (`ddrl` only); unset: 0.01."""
    data_noise: Literal["fresh", "rollout"] = "rollout"
    """Noise added to the real clips (`ddrl` only): fresh noise, or the rollout's initial noise."""
    data_steps: Literal["all", "first"] = "all"
    """Trained steps that include the loss on real clips (`ddrl` only): all of them, or only the first."""
    exponential_advantages: bool = False
    """Whether to replace advantages A with −exp(−A) (`ddrl` only)."""
    nft_beta: float = Field(1.0, gt=0)
    """Distance of the implicit positive and negative policies from the old policy (`nft` only)."""
    nft_times: int | None = Field(None, ge=1)
    """Number of noise levels, drawn at random from the sampler's, at which the model is trained on each clip (`nft` only).
    Unset: 99 % of them, rounded down (9 of 10)."""
    nft_decay: Literal["none", "slow", "late"] = "slow"
    """Decay d of the old policy, old = d·old + (1 − d)·new, after step i (`nft` only). `none`: 0; `slow`: min(0.001 i, 0.5);
    `late`: 0 up to step 75, then min(0.0075 (i − 75), 0.999)."""

    @model_validator(mode="after")
    def check_steps(self) -> Self:
        if self.window and self.trained_steps is not None:
            raise ValueError(
                f"window ({self.window}) and trained_steps {self.trained_steps} are mutually exclusive; remove one"
            )
        if self.sde in ("cps", "ddim") and self.noise_level > 1:
            raise ValueError(
                f"noise_level ({self.noise_level:g}) must be at most 1 with sde = {self.sde!r}, which uses it as a share of "
                "the noise"
            )
        steps = self.trained_steps or ()
        if wrong := [step for step in steps if not 0 <= step < self.sampling_steps]:
            raise ValueError(
                f"trained_steps contains step {wrong[0]}, but with sampling_steps = {self.sampling_steps} it must be from 0 to "
                f"{self.sampling_steps - 1}"
            )
        if self.window > max(1, self.sampling_steps // 2):
            raise ValueError(
                f"window ({self.window}) must fit into the first half of sampling_steps ({self.sampling_steps}); set it to at "
                f"most {max(1, self.sampling_steps // 2)}"
            )
        return self


Weight = Annotated[float, Field(ge=0, le=1e6)]


class RewardServiceConfig(Section):
    """A score from the reward service."""

    name: str = Field(min_length=1)
    """Name of the service's reward function, such as `dance_grpo`."""
    score_key: str = Field(min_length=1)
    """Key of the function's score, such as `overall_reward`. Keys joined by + are added: `vq_reward+mq_reward`."""
    weight: Weight = 1.0
    """Weight of the clipped score."""
    clip_min: float = -5.0
    """Lower bound at which the score is clipped before it is weighted."""
    clip_max: float = 5.0
    """Upper bound at which the score is clipped before it is weighted."""

    @model_validator(mode="after")
    def check_clips(self) -> Self:
        self.check_order("clip_min", "clip_max")
        return self


class WorldRewardConfig(RewardFunctionsConfig):
    functions: dict[str, RewardWeight] = {}
    """Weights by reward name: a built-in reward from docs/world.md, or your own, `package.module:attr` or `file.py:attr`."""
    options: dict[str, dict[str, Any]] = {}
    """Keyword arguments by reward name."""
    services: tuple[RewardServiceConfig, ...] = ()
    """Scores to request from the reward service at `enqueue_url`."""
    scale: RewardWeight = 1.0
    """Factor applied to the weighted sum of the services' scores after it is clipped at ± 5."""
    enqueue_url: str | None = None
    """URL to send clips to. Unset: the environment's REMOTE_REWARD_ENQUEUE_URL or WFM_REWARD_ENQUEUE_URL."""
    fetch_url: str | None = None
    """URL to fetch scores from. Unset: the environment's REMOTE_REWARD_FETCH_URL or WFM_REWARD_FETCH_URL."""
    media: Literal["video", "latent"] = "video"
    """Form in which clips are sent: uint8 pixels, or float16 latents that the service decodes."""
    time_limit: float = Field(600.0, gt=0)
    """Seconds to wait for a request's scores before the run stops."""
    workers: int = Field(1, ge=0)
    """Number of processes per rank that call your own functions; 0 calls them in the training process, like built-in ones."""


class WorldValidationConfig(JobValidationConfig):
    max_samples: int = Field(16, ge=0)
    """Maximum number of clips to sample from held-out prompts, or from training prompts if none are held out. The noise is the
    same in every validation."""
    sampling_steps: int | None = Field(None, ge=1)
    """Sampler steps from noise to clip. Unset: `world.sampling_steps`."""
    guidance_scale: float | None = Field(None, ge=1)
    """Guidance scale for sampling. Unset: `world.guidance_scale`."""
    show: int = Field(4, ge=0)
    """Number of clips to show in TensorBoard and on the HTML page."""


class WorldCheckpointConfig(CheckpointConfig):
    best_metric: Literal["val/loss", "val/reward/mean"] = "val/reward/mean"
    """Metric that determines the best checkpoint; `sft` without rewards has only the loss."""


class WorldConfig(JobConfig):
    """Complete configuration of a `dsreason world` run."""

    deciding_sections = (*JobConfig.deciding_sections, "model", "lora", "data", "world", "reward")

    model: WorldModelConfig = WorldModelConfig()
    lora: WorldLoRAConfig = WorldLoRAConfig()
    data: WorldDataConfig = WorldDataConfig()
    train: WorldTrainConfig = WorldTrainConfig()
    world: WorldConfigSection = WorldConfigSection()
    reward: WorldRewardConfig = WorldRewardConfig()
    validation: WorldValidationConfig = WorldValidationConfig()
    checkpoint: WorldCheckpointConfig = WorldCheckpointConfig()

    @property
    def samples_per_step(self) -> int:
        """Number of clips per optimizer step, across all ranks."""
        if self.world.algorithm == "sft":
            return self.train.global_batch_size or 32
        return self.world.prompts_per_step * self.world.num_generations // self.world.optimizer_steps_per_rollout

    @property
    def batch_fact(self) -> str:
        if self.world.algorithm == "sft":
            return f"train.global_batch_size is {self.samples_per_step}"
        return f"world.prompts_per_step x num_generations / optimizer_steps_per_rollout is {self.samples_per_step}"

    @model_validator(mode="after")
    def check_whole_rollouts(self) -> Self:
        steps, last = self.world.optimizer_steps_per_rollout, self.train.max_steps
        if self.world.algorithm != "sft" and last is not None and last % steps:
            raise ValueError(
                f"train.max_steps ({last}) must be a multiple of world.optimizer_steps_per_rollout ({steps}), because a run "
                "cannot be resumed exactly in the middle of a rollout"
            )
        return self

    def check_ranks(self, num_ranks: int) -> list[str]:
        size = self.train.context_parallel_size
        if num_ranks % size:
            raise ConfigError(
                f"train.context_parallel_size ({size}) does not divide the number of ranks ({num_ranks}); set it to a divisor, "
                "or change the number of ranks"
            )
        return super().check_ranks(num_ranks // size)
