"""Loss and gradient of a complete optimizer step, compared with the papers' formulas for each clip in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsreason.job.ranks import World
from dsreason.monitor.memory import MemoryLedger
from dsreason.world.data import WorldDataset
from dsreason.world.families import FAMILIES
from dsreason.world.noise import draw_noise, make_generator
from dsreason.world.schema import WorldConfig
from dsreason.world.training import gradients, nft, rollout, update
from dsreason.world.training.clips import ClipShare, SampledClips
from dsreason.world.training.inputs import Inputs
from dsreason.world.training.velocity import ClipMaker
from dsreason.world.types import ClipSize, WorldRow

SHAPE = (3, 3, 4, 4)
STEPS, PROMPTS, GROUP, SCALE, KL, DATA, BETA = 4, 2, 3, 2.0, 0.1, 0.5, 0.7
ETA = 0.8
ALONE = World(0, 0, 1, torch.device("cpu"))
LEVELS = [3 * u / (1 + 2 * u) for u in (1.0, 0.75, 0.5, 0.25, 0.0)]


class Engine(nn.Module):
    """An engine for one rank with a small network that depends on all inputs of Cosmos' transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.text = (nn.Linear(size, 3, dtype=torch.float64) for size in (3, 4))
        self.time = nn.Parameter(torch.tensor([0.5, -1.0, 1.5], dtype=torch.float64))
        for number, parameter in enumerate((*self.mix.parameters(), *self.text.parameters())):
            parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        self.ends: list[bool] = []

    def forward(
        self, hidden_states: Tensor, condition_mask: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **_: Any
    ) -> tuple[Tensor]:
        x = self.mix(hidden_states.movedim(1, -1)) + self.text(encoder_hidden_states.mean(1))[:, None, None, None]
        times = timestep.double().view(len(x), -1, 1, 1, 1)
        return (torch.tanh(x + times * self.time + condition_mask.movedim(1, -1)).movedim(-1, 1),)

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        self.ends.append(last)

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        pass

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the reference's weights inside the context."""
        weights = [parameter.detach().clone() for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data.mul_(0.5)
        yield
        for parameter, saved in zip(self.parameters(), weights, strict=True):
            parameter.data.copy_(saved)


class Source:
    """Embeddings, latents and rewards that are computed from a row's number or from the latents."""

    def read(self, prompts: list[str]) -> Tensor:
        return torch.stack([text_of(prompt) for prompt in prompts])

    def encode(self, clips: Tensor) -> Tensor:
        return torch.stack([clean_of(int(clip[0, 0, 0, 0])) for clip in clips])

    def start(self, clips: Tensor, latents: Tensor, *_: Any) -> Any:
        return SimpleNamespace(result=lambda: SimpleNamespace(total=latents.mean(dim=(1, 2, 3, 4)), by_name={}))


def text_of(prompt: str) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(len(prompt)))


def clean_of(row: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(row))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rollout, gradients, update):
        monkeypatch.setattr(module, "gather_objects", lambda value: [value])
    monkeypatch.setattr(rollout, "share_errors", nullcontext)


def make_maker(settings: dict[str, Any]) -> ClipMaker:
    """Make clips of micro-batches of two: two prompts of three clips, with one or two given frames."""
    world = {"prompts_per_step": PROMPTS, "num_generations": GROUP, "sampling_steps": STEPS, "guidance_scale": SCALE}
    world |= {"schedule": "linear", "shift": 3.0}
    world |= {"kl_coef": KL, "sde": "cps", "noise_level": ETA, "conditional_frames": (1, 2), "nft_beta": BETA}
    config = WorldConfig.model_validate(
        {"world": {**world, **settings}, "train": {"micro_batch_size": 2}, "data": {"workers": 0}}
    )
    source: Any = Source()
    codec: Any = SimpleNamespace(decode=lambda latents: latents.sigmoid())
    return ClipMaker(
        config=config,
        family=FAMILIES["cosmos_predict2_5"],
        model_path=Path(),
        transformer=Engine(),
        codec=codec,
        inputs=Inputs(config, source, source, ClipSize(9, 32, 32, 16.0), SHAPE),
        share=ClipShare(0, 1),
        scorer=source,
        device=torch.device("cpu"),
    )


def sample_rollout(maker: ClipMaker) -> list[list[SampledClips]]:
    """Sample the clips of the first step's prompts."""
    rows = [WorldRow(str(row), "x" * row, clip="x") for row in range(1, PROMPTS + 1)]
    dataset = WorldDataset(rows, lambda row, size: torch.full((3, 9, 2, 2), int(row.id), dtype=torch.uint8))
    phases: Any = SimpleNamespace(track_phase=lambda name: nullcontext())
    average: Any = SimpleNamespace(in_place=nullcontext)
    old = average if maker.config.world.algorithm == "nft" else None
    memory = MemoryLedger(maker.device)
    return rollout.sample_rollout(maker, dataset, range(PROMPTS), step=1, old=old, watchdog=phases, memory=memory)[0]


class Clip:
    """One clip computed with the formulas; only the random numbers come from dsreason."""

    def __init__(self, net: Engine, prompt: int, clip: int) -> None:
        self.net, self.place = net, {"prompt": prompt, "clip": clip}
        self.text, self.negative = (text_of(text)[None].double() for text in ("x" * (prompt + 1), ""))
        self.clean, self.noise = clean_of(prompt + 1)[None].double(), self.draw("start")
        self.given = int(make_generator(0, 1, prompt, "given frames").integers(1, 3))
        self.mask = (torch.arange(SHAPE[1]) < self.given).double().view(1, 1, -1, 1, 1)

    def draw(self, purpose: str) -> Tensor:
        return draw_noise(SHAPE, seed=0, step=1, purpose=purpose, **self.place)[None].double()

    def predicted(self, x: Tensor, s: float, noise: Tensor, text: Tensor) -> Tensor:
        v = self.net(
            self.mask * self.clean + (1 - self.mask) * x,
            self.mask.expand(-1, -1, -1, *SHAPE[2:]),
            self.mask * 1e-4 + (1 - self.mask) * s,
            text,
        )[0]
        return self.mask * (noise - self.clean) + (1 - self.mask) * v

    def velocity(self, x: Tensor, s: float, noise: Tensor) -> Tensor:
        positive, negative = (self.predicted(x, s, noise, text) for text in (self.text, self.negative))
        return negative + SCALE * (positive - negative)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the frames that are not given."""
        return values[:, :, self.given :].mean()

    def sample(self, noisy: list[int]) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """Return the final latents, and the latents before and after each noisy step."""
        x, remaining = self.noise, {}
        for i, (s, s_next) in enumerate(zip(LEVELS, LEVELS[1:], strict=False)):
            v = self.velocity(x, s, self.noise)
            x_next = x + (s_next - s) * v
            if i in noisy:
                mean, std = cps(x, v, s, s_next)
                fresh = mean + std * self.draw(f"sampling step {i}")
                x_next = torch.where(self.mask.bool(), x_next, fresh)
                remaining[i] = x, x_next
            x = x_next
        return torch.where(self.mask.bool(), self.clean, x), remaining


def cps(x: Tensor, v: Tensor, s: float, s_next: float) -> tuple[Tensor, float]:
    data, fully = x - s * v, x + (1 - s) * v
    return (1 - s_next) * data + s_next * math.cos(ETA * math.pi / 2) * fully, s_next * math.sin(ETA * math.pi / 2)


def advantages(clips: list[Clip], noisy: list[int]) -> list[float]:
    rewards = torch.stack([clip.sample(noisy)[0].mean() for clip in clips]).view(PROMPTS, GROUP)
    centred = rewards - rewards.mean(1, keepdim=True)
    return [float(a) for a in (centred / (rewards.std(1, keepdim=True) + 1e-4)).clamp(-5, 5).flatten()]


def reference_velocity(clip: Clip, x: Tensor, s: float, noise: Tensor) -> Tensor:
    with clip.net.in_place(), torch.no_grad():
        return clip.velocity(x, s, noise)


def sampled_loss(net: Engine, trained: list[int], kl: str, data: str, data_steps: list[int]) -> Tensor:
    """Return the loss of Flow-GRPO on policy, plus that of DDRL if `data_steps` is not empty."""
    clips = [Clip(net, prompt, clip) for prompt in range(PROMPTS) for clip in range(GROUP)]
    with torch.no_grad():
        values, samples = advantages(clips, trained), [clip.sample(trained)[1] for clip in clips]
    loss = torch.zeros((), dtype=torch.float64)
    for clip, value, remaining in zip(clips, values, samples, strict=True):
        for i, (x, x_next) in remaining.items():
            s, s_next = LEVELS[i], LEVELS[i + 1]
            v, v_ref = clip.velocity(x, s, clip.noise), reference_velocity(clip, x, s, clip.noise)
            (mean, std), (mean_ref, _) = cps(x, v, s, s_next), cps(x, v_ref, s, s_next)
            log_prob = clip.mean(-((x_next - mean) ** 2) / (2 * std**2))
            ratio = torch.exp(log_prob - log_prob.detach())
            far = (v - v_ref) ** 2 if kl == "velocity" else (mean - mean_ref) ** 2 / (2 * std**2)
            loss = loss + (KL * clip.mean(far) - value * ratio) / len(remaining)
        for i in data_steps:
            s, e = LEVELS[i], clip.noise if data == "rollout" else clip.draw(f"data {i}")
            v = clip.predicted((1 - s) * clip.clean + s * e, s, e, clip.text)
            loss = loss + DATA * clip.mean((v - (e - clip.clean)) ** 2) / len(data_steps)
    return loss / len(clips)


def nft_loss(net: Engine) -> Tensor:
    """Return the loss of DiffusionNFT in its first step, when the old policy is still the trained one."""
    clips = [Clip(net, prompt, clip) for prompt in range(PROMPTS) for clip in range(GROUP)]
    with torch.no_grad():
        values, finals = advantages(clips, []), [clip.sample([])[0] for clip in clips]
    loss = torch.zeros((), dtype=torch.float64)
    for clip, value, x0 in zip(clips, values, finals, strict=True):
        r = min(max(value / 5 / 2 + 0.5, 0), 1)
        order = make_generator(0, 1, clip.place["prompt"], clip.place["clip"], "times").permutation(STEPS)[: STEPS - 1]
        for number, i in enumerate(order):
            s, e = LEVELS[i], clip.draw(f"time {number}")
            x = (1 - s) * x0 + s * e
            v, v_ref = clip.velocity(x, s, e), reference_velocity(clip, x, s, e)
            old, parts = v.detach(), []
            for policy in (BETA * v + (1 - BETA) * old, (1 + BETA) * old - BETA * v):
                error = x - s * policy - x0
                parts.append(clip.mean(error**2) / clip.mean(error.detach().abs()).clamp(min=1e-5))
            policy_loss = 5 * (r * parts[0] + (1 - r) * parts[1]) / BETA
            loss = loss + (policy_loss + KL * clip.mean((v - v_ref) ** 2)) / len(order)
    return loss / len(clips)


def check_step(engine: Engine, metrics: dict[str, float], expected: Tensor) -> None:
    """Compare with a tolerance of 1e-5 for the rounding of float32 latents and log-probabilities."""
    gradient = {name: parameter.grad.clone() for name, parameter in engine.named_parameters()}
    assert engine.ends[-1] is True
    assert not any(engine.ends[:-1])
    engine.zero_grad()
    expected.backward()
    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-4)
    for name, parameter in engine.named_parameters():
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(gradient[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "trained", "data_steps"),
    [
        ({"algorithm": "flow_grpo"}, [0, 1, 2], []),  # the last step of cps adds no noise
        ({"algorithm": "flow_grpo", "trained_steps": (1, 2), "kl": "mean"}, [1, 2], []),
        ({"algorithm": "ddrl", "data_coef": DATA}, [0, 1, 2], [0, 1, 2]),
        (
            {"algorithm": "ddrl", "data_coef": DATA, "data_steps": "first", "data_noise": "fresh", "window": 2},
            [0, 1],
            [0],
        ),
    ],
)
def test_sampled_step_update_matches_the_formula(
    settings: dict[str, Any], trained: list[int], data_steps: list[int]
) -> None:
    maker = make_maker(settings)
    engine: Any = maker.transformer
    (part,) = update.add_reference(maker, engine, sample_rollout(maker))
    metrics = update.accumulate_gradients(maker, engine, part, rollout_step=1, world=ALONE)
    config = maker.config.world
    check_step(engine, metrics, sampled_loss(engine, trained, config.kl, config.data_noise, data_steps))
    assert metrics["policy/ratio_error"] < 1e-6
    assert metrics["policy/clip_fraction"] == 0


def test_final_clip_update_matches_the_formula() -> None:
    maker = make_maker({"algorithm": "nft"})
    engine: Any = maker.transformer
    (part,) = nft.add_reference(maker, engine, sample_rollout(maker), 1)
    metrics = nft.accumulate_gradients(maker, engine, part, rollout_step=1, world=ALONE)
    check_step(engine, metrics, nft_loss(engine))
    assert metrics["policy/old_distance"] == 0
    assert metrics["policy/kl"] > 0
