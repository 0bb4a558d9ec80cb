"""The schema of a `dsreason world` run's configuration: what it has beside `JobConfig`."""

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
    """Folder in diffusers' format, hub name or `s3://…`, or an export of a run; `tiny:cosmos_predict2_5`, `tiny:wan` and
    `tiny:squares` (with a codec for the built-in clips) are small random models."""
    revision: str | None = None
    """Hub revision, such as `diffusers/base/post-trained`."""
    max_prompt_length: int = Field(512, ge=8)
    """Prompts are padded, or cut, to this many tokens."""
    freeze_text_projection: bool = False
    """If all weights are trained, freeze Cosmos' first layer for text: 1 MB is then kept per prompt instead of 98 MB."""


class WorldLoRAConfig(AdapterConfig):
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get one; empty: those of attention and feed-forward, as the family names them."""


class WorldDataConfig(Section):
    format: Literal["builtin", "prompts", "folder", "shards", "mock"] = "builtin"
    """`builtin`: generated moving squares (with `path` "mislabelled", half of the captions have a random colour, half a random
    direction); `prompts`: a text file with a prompt a line, or JSONL; `folder`: `videos/` and `metas/`; `shards`: tar files in
    webdataset's layout; `mock`: random clips and prompts, to try a machine."""
    path: str = ""
    """File or folder, also on `s3://…`."""
    frames: int = Field(93, ge=1)
    """Frames of a clip, sampled and generated; one more than a multiple of 4."""
    height: int = Field(704, ge=16)
    """Height of a clip in pixels, a multiple of 16."""
    width: int = Field(1280, ge=16)
    """Width of a clip in pixels, a multiple of 16."""
    fps: float = Field(16.0, gt=0)
    """Frames per second of clips that are generated, and at which clips are read."""
    negative_prompt: str = ""
    """Prompt that guidance leads away from."""
    limit: int | None = Field(None, ge=1)
    """At most this many rows, from the first on."""
    validation: Share | Count | str = 0
    """Share (0 to 1) or number of rows held out of training, or another file or folder of the same format."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used: stop and name it, or leave it out, count it and list it; a clip in sft only."""
    workers: int = Field(2, ge=0)
    """Processes per rank that read clips; 0 reads in the training process."""
    prefetch: int = Field(2, ge=1)
    """Steps that are read ahead."""
    shuffle: bool = True
    """New order every epoch, derived from `train.seed`."""

    check_validation = field_validator("validation", mode="before")(refuse_flag)

    @field_validator("frames")
    @classmethod
    def check_frames(cls, frames: int) -> int:
        if frames % 4 != 1:
            raise ValueError(f"{frames} is not one more than a multiple of 4; give {frames // 4 * 4 + 1}")
        return frames

    @field_validator("negative_prompt")
    @classmethod
    def check_text(cls, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{text!r} has half of a character at {error.start}; correct it") from None
        return text

    @field_validator("height", "width")
    @classmethod
    def check_multiple(cls, size: int) -> int:
        if size % 16:
            raise ValueError(f"{size} is not a multiple of 16; give {round(size / 16) * 16}")
        return size


class WorldTrainConfig(JobTrainConfig):
    global_batch_size: int | None = Field(None, ge=1)
    """sft: clips per step, over all ranks (unset: 32). The other algorithms take `world.prompts_per_step`."""
    micro_batch_size: int = Field(1, ge=1)
    """Clips per forward on one rank, in sampling and in training."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that compute one clip together, each with a part of its tokens."""
    ema_decay: float | None = Field(None, ge=0, lt=1)
    """Keep a moving average of the trained weights with this decay; validation and export use it. Unset: none."""
    ema_every: int = Field(1, ge=1)
    """Steps between updates of that average."""


class WorldConfigSection(Section):
    algorithm: Literal["sft", "flow_grpo", "ddrl", "nft"] = "flow_grpo"
    """`sft`: flow matching on real clips; `flow_grpo`: policy gradients on sampled steps (arXiv 2505.05470); `ddrl`: that with a
    term on real clips (2512.04332); `nft`: DiffusionNFT on final samples (2509.16117)."""
    prompts_per_step: int = Field(8, ge=1)
    """Prompts of each rollout, over all ranks."""
    num_generations: int = Field(8, ge=2)
    """Clips of each prompt: a group, within which advantages are measured."""
    optimizer_steps_per_rollout: int = Field(1, ge=1)
    """Optimizer steps on the clips of one rollout, each with its share of the prompts."""
    sampling_steps: int = Field(10, ge=1)
    """Steps of a rollout from noise to clip."""
    schedule: Literal["family", "linear"] = "family"
    """Noise levels of the steps: the scheduler of the model's folder, or equal steps shifted by `shift`."""
    shift: float = Field(3.0, gt=0)
    """Shift of the linear schedule and of sft's noise levels: s → shift·s / (1 + (shift − 1)·s)."""
    guidance_scale: float = Field(1.0, ge=1)
    """Guidance of sampling and, equally, of training; 1 is without guidance. v + (scale − 1)·(v − v_negative).
    Cosmos' pipeline takes one less: its 7 is 8 here."""
    conditional_frames: tuple[int, int] = (0, 0)
    """Fewest and most latent frames of the row's clip that are given: 0 text, 1 image, 2 video; drawn once a group."""
    sde: Literal["flow", "cps", "dance", "ddim"] = "flow"
    """Noise that a trained step adds: Flow-GRPO's, coefficients-preserving (2509.05952), DanceGRPO's, DDIM's."""
    noise_level: float = Field(0.7, ge=0)
    """Eta of the noise: usually 0.7 (flow), 0.5 to 0.9 (cps), 0.3 (dance); at most 1 for cps and ddim."""
    trained_steps: tuple[int, ...] | None = Field(None, min_length=1)
    """Numbers of the steps that are noisy and trained, from 0; the others follow the ODE. Unset: all, or the window."""
    window: int = Field(0, ge=0)
    """Number of consecutive steps to train, drawn for each rollout from the first half of the steps; 0: `trained_steps`."""
    same_noise: bool = False
    """All clips of a group begin with the same noise, and differ by the noise of the steps only."""
    clip_range: float = Field(1e-4, gt=0)
    """Clip of the ratio at 1 ± this: log-probabilities are means over latent elements, so ratios are close to 1."""
    advantage_clip: float = Field(5.0, gt=0)
    """Advantages are clipped at ± this."""
    advantage_std: Literal["group", "batch"] = "group"
    """Divisor of a group's centred rewards: its own standard deviation, or that of the whole rollout."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the distance to the model that training began with; 0 needs no reference."""
    kl: Literal["velocity", "mean"] = "velocity"
    """Form of that distance: mean((v − v_ref)²), or that of a step's means over 2·std². The two weights are not comparable."""
    data_coef: float | None = Field(None, ge=0)
    """ddrl: weight of the velocity's error on real clips (unset: 0.01)."""
    data_noise: Literal["fresh", "rollout"] = "rollout"
    """ddrl: noise on the real clips: fresh, or that which the rollout began with."""
    data_steps: Literal["all", "first"] = "all"
    """ddrl: at every trained step, or at the first of them only."""
    exponential_advantages: bool = False
    """ddrl: A → −exp(−A)."""
    nft_beta: float = Field(1.0, gt=0)
    """nft: how far the implicit positive and negative policies are from the old one."""
    nft_times: int | None = Field(None, ge=1)
    """nft: noise levels of the sampler's that each clip is trained at, drawn anew; unset: 99 % of them, rounded down (9 of
    10)."""
    nft_decay: Literal["none", "slow", "late"] = "slow"
    """nft: how the old policy follows, old = d·old + (1 − d)·new, in step i: d = 0; min(0.001 i, 0.5); 0 before step 75, then
    min(0.0075 (i − 75), 0.999)."""

    @model_validator(mode="after")
    def check_steps(self) -> Self:
        if self.window and self.trained_steps is not None:
            raise ValueError(
                f"window ({self.window}) and trained_steps {self.trained_steps} exclude each other; remove one"
            )
        if self.sde in ("cps", "ddim") and self.noise_level > 1:
            raise ValueError(
                f"noise_level ({self.noise_level:g}) of sde {self.sde!r} is a share of the noise, at most 1"
            )
        steps = self.trained_steps or ()
        if wrong := [step for step in steps if not 0 <= step < self.sampling_steps]:
            raise ValueError(
                f"trained_steps names step {wrong[0]}; sampling_steps ({self.sampling_steps}) are 0 to {self.sampling_steps - 1}"
            )
        if self.window > max(1, self.sampling_steps // 2):
            raise ValueError(
                f"window ({self.window}) is longer than the first half of sampling_steps ({self.sampling_steps})"
            )
        return self


Weight = Annotated[float, Field(ge=0, le=1e6)]


class RewardServiceConfig(Section):
    """One score of the reward service."""

    name: str = Field(min_length=1)
    """Reward function of the service, such as `dance_grpo`."""
    score_key: str = Field(min_length=1)
    """Score of the function, such as `overall_reward`; several are added: `vq_reward+mq_reward`."""
    weight: Weight = 1.0
    """Factor of the score, after it was clipped."""
    clip_min: float = -5.0
    """The score is clipped at this before it is weighted."""
    clip_max: float = 5.0
    """The score is clipped at this before it is weighted."""

    @model_validator(mode="after")
    def check_clips(self) -> Self:
        self.check_order("clip_min", "clip_max")
        return self


class WorldRewardConfig(RewardFunctionsConfig):
    functions: dict[str, RewardWeight] = {}
    """Reward name (built in: `brightness`, `sharpness`, `motion`, `flicker`, `colour`, `solid`, `follow`, `red`, `red_solid`;
    yours: `package.module:attr` or `file.py:attr`) = weight."""
    options: dict[str, dict[str, Any]] = {}
    """Keyword arguments by reward name."""
    services: tuple[RewardServiceConfig, ...] = ()
    """Scores of a reward service, see `enqueue_url`."""
    scale: RewardWeight = 1.0
    """Factor of the weighted sum of the services' scores, after it was clipped at ± 5."""
    enqueue_url: str | None = None
    """URL to send clips to; unset: REMOTE_REWARD_ENQUEUE_URL or WFM_REWARD_ENQUEUE_URL of the environment."""
    fetch_url: str | None = None
    """URL to fetch scores from; unset: REMOTE_REWARD_FETCH_URL or WFM_REWARD_FETCH_URL."""
    media: Literal["video", "latent"] = "video"
    """Form of the clips that are sent: uint8 pixels, or float16 latents that the service decodes."""
    time_limit: float = Field(600.0, gt=0)
    """Seconds until the scores of one request must be there; then the run stops."""
    workers: int = Field(1, ge=0)
    """Processes per rank that call functions of yours; 0 calls them in the training process, as the built-in ones are."""


class WorldValidationConfig(JobValidationConfig):
    max_samples: int = Field(16, ge=0)
    """Clips sampled, of the held-out prompts (or, without those, of the training prompts), with noise that never changes."""
    sampling_steps: int | None = Field(None, ge=1)
    """Unset: `world.sampling_steps`."""
    guidance_scale: float | None = Field(None, ge=1)
    """Unset: `world.guidance_scale`."""
    show: int = Field(4, ge=0)
    """Clips shown in TensorBoard and kept for the page."""


class WorldCheckpointConfig(CheckpointConfig):
    best_metric: Literal["val/loss", "val/reward/mean"] = "val/reward/mean"
    """Metric that says which checkpoint is the best; sft without rewards has the loss only."""


class WorldConfig(JobConfig):
    """Everything of one `dsreason world` run."""

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
        """Clips of one optimizer step, over all ranks."""
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
                f"train.max_steps ({last}) must be a multiple of world.optimizer_steps_per_rollout ({steps}): a run cannot be "
                "resumed exactly inside of a rollout"
            )
        return self

    def check_ranks(self, num_ranks: int) -> list[str]:
        size = self.train.context_parallel_size
        if num_ranks % size:
            raise ConfigError(
                f"train.context_parallel_size ({size}) does not divide the number of ranks ({num_ranks}); lower it, or start "
                "another number"
            )
        return super().check_ranks(num_ranks // size)
