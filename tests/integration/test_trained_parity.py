"""vLLM compared with the policy on models that SFT has actually trained, after further optimizer steps of all weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed import run_on_ranks
from tests.integration.command import metrics
from tests.integration.test_vllm_engine import CASES, SETUPS, Explorer, Setup, slowed

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

TEMPERATURES = (1.5, 0.9)
STEPS = 3


@pytest.fixture(
    scope="module",
    params=SETUPS[1:],  # test_builtin_grpo.py covers the first setup
    ids=lambda s: f"{s.family}-tp{s.tensor_parallel_size}x{s.ranks}",
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the measurements of each rank."""
    setup: Setup = request.param
    run: Path = request.getfixturevalue(f"trained_{setup.family}")
    assert metrics(run)[-1]["val/loss"] < 1  # a random model would have a loss of 6.3
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(run / "export" / "final", folder / "model")
    if not setup.tied:
        untie(folder / "model")
    return run_on_ranks(explore, setup.ranks, setup, folder)


def untie(model: Path) -> None:
    """Give the model a separate output layer, with which it still computes the same function."""
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"].clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    for part in (config, config["text_config"]):
        part["tie_word_embeddings"] = False
    (model / "config.json").write_text(json.dumps(config))


def explore(setup: Setup, folder: Path) -> dict[str, Any]:
    explorer = Explorer(setup, folder)
    explorer.prompts = task_prompts(folder, explorer.world.rank, ("red", "blue"), "left")
    other_items = task_prompts(folder, explorer.world.rank, ("green", "yellow"), "right")
    assert ("model.lm_head.weight" in dict(explorer.policy.named_parameters())) != setup.tied
    engine = explorer.engine
    engine.wake()
    engine.sync(explorer.weights(), 1)
    result: dict[str, Any] = {"trained": explorer.differences(version=1)}
    result["tower moved"] = train(explorer)
    result["sync skipped"] = explorer.differences(version=1)
    engine.sync(explorer.weights(), 2)
    result["fresh"], result["wrong medium"] = {}, {}
    for temperature in TEMPERATURES:
        for name, completion in zip(CASES, explorer.generate(temperature=temperature), strict=True):
            result["fresh"][name, temperature] = explorer.difference(name, completion, temperature)
            if name != "text":
                pixels = other_items[name].encoded.mm_kwargs
                other = {key: value for key, value in pixels.items() if key.startswith("pixel")}
                result["wrong medium"][name, temperature] = explorer.difference(name, completion, temperature, **other)
    engine.shutdown()
    torch.distributed.barrier()
    return result


def task_prompts(folder: Path, rank: int, colours: tuple[str, str], direction: str) -> dict[str, Any]:
    """Return one prompt per case, with media of the task that the model has learned; their sizes do not depend on their
    content."""
    from dsreason.builtin_task import scenes
    from dsreason.builtin_task.clips import write_medium
    from dsreason.config.schema import SFTConfig
    from dsreason.data.types import Sample
    from dsreason.train.common.preflight import build_encoder

    encoder, rng = build_encoder(SFTConfig(), folder / "model"), np.random.default_rng(0)
    place = folder / f"{direction}_{rank}"
    for name in ("images", "clips"):
        (place / name).mkdir(parents=True)
    images = [
        {
            "type": "image",
            "image": str(place / write_medium(place, colour, scenes.draw_one_shape(rng, colour))["image"]),
        }
        for colour in colours
    ]
    clip = str(place / write_medium(place, direction, scenes.draw_moving_ball(rng, direction))["video"])
    fast, slow = ({"type": "video", "video": clip, "fps": fps} for fps in (4.0, 2.0))
    media = ([], images[:1], images, [fast], [slow], [fast], [images[1], slow])
    prompts = {}
    for name, parts in zip(CASES, media, strict=True):
        question = (
            "Which way does the ball move?" if "video" in name or "frames" in name else "What colour is the shape?"
        )
        content = [*parts, {"type": "text", "text": question}]
        prompts[name] = encoder.encode_prompt(Sample(id=name, messages=[{"role": "user", "content": content}]))
    prompts[CASES[5]] = slowed(encoder, prompts[CASES[5]], 1.0)
    return prompts


def train(explorer: Explorer) -> float:
    """Take the same optimizer steps on every rank, away from the sampled tokens; return the smallest change of a vision tower
    tensor."""
    from dsreason.data.collate import collate
    from tests.integration.test_rollout import completed

    policy = explorer.policy
    towers = {n: p.detach().clone() for n, p in policy.named_parameters() if "visual" in n}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    rows = [
        completed(explorer.prompts[name].encoded, item)
        for name, item in zip(CASES, explorer.generate(version=1), strict=True)
    ]
    for _ in range(STEPS):
        for row in rows:
            (policy(collate([row], pad_id=0), 1.0, explorer.banned).mean() / len(rows)).backward()
        for parameter in policy.parameters():  # all ranks train the same policy, but on different prompts
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return min(float((p.detach() - towers[n]).abs().max()) for n, p in policy.named_parameters() if n in towers)


def test_trained_policy_and_engine_logprobs_agree(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["tower moved"] > 1e-4
        wrong = {case: d for part in ("trained", "fresh") for case, d in rank[part].items() if not d <= 1e-4}
        assert not wrong


def test_stale_weights_or_wrong_media_break_agreement(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert not {case: d for case, d in rank["sync skipped"].items() if not d > 1e-3}
        # If the model is certain whatever it sees, sharpened probabilities hardly differ, but softened ones do.
        wrong = rank["wrong medium"]
        largest = {case: max(d for (name, _), d in wrong.items() if name == case) for case, _ in wrong}
        assert not {case: d for case, d in largest.items() if not d > 1e-3}
