"""`dsreason grpo` with the installed command: it writes all expected output, and resumes exactly."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dsreason.checkpoints.export import export_checkpoint
from dsreason.cli.main import main
from tests.distributed import run_on_ranks
from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration

CONFIG = """
[model]
path = "{model}"
gradient_checkpointing = false
[data]
adapter = "jsonl"
path = "{rows}"
workers = 1
vision.fps = 4.0
on_bad_row = "skip"
[optim]
lr = 3e-3
warmup = 0
schedule = "constant"
[train]
epochs = 3
max_steps = 4
micro_batch_size = 8
precision = "fp32"
[grpo]
preset = "dapo"
prompts_per_step = 6
num_generations = 4
optimizer_steps_per_rollout = 2
kl_coef = 0.05
reference_reset_every = 2
dynamic_tolerance = 1.0
max_refills = 2
overlong_filter = false
[rollout]
engine = "transformers"
max_completion_length = 6
temperature = 0.9
[reward.functions]
"rewards.py:vowels" = 1.0
[validation]
before_training = false
generate = false
[checkpoint]
every = 2
keep = -1
"""
REWARDS = """
import os, signal, sys, time
from pathlib import Path

HERE = Path(__file__).parent

def vowels(completion, sample, *, pwd="", headers=None, url=""):
    if list(HERE.glob("ending/rollouts/step_0.jsonl")):  # in the second rollout
        end()
    return sum(letter in 'aeiou' for letter in completion), {'seen': 1}

def same(completion, sample):
    return 0

def end():
    if os.environ["RANK"] == "0":
        (HERE / "rank_0").write_text(str(os.getppid()))
    elif (HERE / "fails").exists():
        raise ValueError("the scores are lost")
    else:  # hang, and stop the other rank, which then waits in a collective for this one
        while not (HERE / "rank_0").exists():
            time.sleep(0.1)
        time.sleep(2)
        (HERE / "signal").touch()
        os.kill(int((HERE / "rank_0").read_text()), signal.SIGTERM)
        time.sleep(600)
"""


OPTIONS = (
    '{pwd="planted-one", headers={Ocp-Apim-Subscription-Key="planted-two"}, url="https://h/score?pw=planted-three"}'
)
WITH_SECRETS = ("--set", f'reward.options={{"rewards.py:vowels"={OPTIONS}}}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    """Train `whole/`: four steps, two per rollout, on 2 ranks with 3 prompts each; checkpoints at steps 2 and 4.

    One of the nine rows is unusable and skipped.
    """
    folder = tmp_path_factory.mktemp("grpo")
    rows = write_mixed_rows(folder / "data")
    with rows.open("a") as file:
        file.write('{"id": "bad", "question": "What colour?", "image": "missing.png", "answer": "red"}\n')
    (folder / "run.toml").write_text(CONFIG.format(model=tiny_qwen3_vl, rows=rows))
    (folder / "rewards.py").write_text(REWARDS)
    train(folder, "whole", *WITH_SECRETS)
    return folder


def train(folder: Path, name: str, *options: str) -> Path:
    ended = dsreason("grpo", "--config", "run.toml", "--output-dir", name, "--nproc", 2, *options, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    (folder / f"{name}.out").write_text(ended.stdout + ended.stderr)
    return folder / name


def test_no_file_of_a_run_contains_a_secret(folder: Path) -> None:
    files = [folder / "whole.out", *(file for file in (folder / "whole").rglob("*") if file.is_file())]
    assert {file.name for file in files} >= {"config.json", "metrics.jsonl"}
    assert [file for file in files if b"planted" in file.read_bytes()] == []
    options = json.loads((folder / "whole/config.json").read_text())["config"]["reward"]["options"]["rewards.py:vowels"]
    assert options == {
        "pwd": "…",
        "headers": {"Ocp-Apim-Subscription-Key": "…"},
        "url": "https://h/score?…",
    }


def rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("checkpoint", ["whole/checkpoints/step_2", "stopped/checkpoints/step_2"])
def test_resumed_run_matches_uninterrupted_run(folder: Path, stopped: float, checkpoint: str) -> None:
    resumed = train(folder, f"resumed_{checkpoint[:5]}", "--resume", checkpoint, *WITH_SECRETS)
    assert rollouts(resumed, 2) == rollouts(folder / "whole", 2)
    names = ("train/loss", "train/grad_norm", "reward/mean", "mismatch/kl", "policy/clip_fraction", "policy/kl")
    before, after = (
        [[line[name] for name in names] for line in metrics(run) if line["step"] > 2]
        for run in (folder / "whole", resumed)
    )
    assert before == after
    expected, result = (load_file(run / "export/final/model.safetensors") for run in (folder / "whole", resumed))
    assert all(expected[name].equal(result[name]) for name in expected)


def run_as_rank(folder: str) -> None:
    """Run `dsreason grpo` as one of its ranks does, without regular checkpoints."""
    from dsreason.cli.job import TrainingCommand, find_trainers, load_job

    os.chdir(folder)
    trainer = find_trainers()["grpo"]
    command = TrainingCommand(trainer, Path("run.toml"), overrides=("checkpoint.every=0", "reward.time_limit=300"))
    trainer.run(load_job(command), Path("ending"), None)


@pytest.fixture(scope="module")
def stopped(folder: Path) -> float:
    """Stop a run while the reward function of rank 1 hangs in the second rollout; return the seconds until its end."""
    with pytest.raises(AssertionError, match="Stopped: stopped by SIGTERM after step 2, which is saved; continue with"):
        run_on_ranks(run_as_rank, 2, str(folder), timeout=280)
    seconds = time.time() - (folder / "signal").stat().st_mtime
    (folder / "ending").rename(folder / "stopped")
    return seconds


@pytest.mark.long
def test_stop_during_reward_saves_last_step(folder: Path, stopped: float) -> None:
    assert stopped < 10  # including the end of the processes, on a busy machine
    assert [file.parent.name for file in folder.glob("stopped/checkpoints/*/COMPLETE")] == ["step_2"]


@pytest.mark.long
def test_last_step_is_saved_before_reward_error(folder: Path) -> None:
    (folder / "fails").touch()
    with pytest.raises(AssertionError, match="RewardError") as caught:
        run_on_ranks(run_as_rank, 2, str(folder), timeout=280)
    (folder / "ending").rename(folder / "failed")
    assert "the scores are lost" in str(caught.value)
    assert "The last finished step, 2, is saved; continue with --resume auto" in str(caught.value)
    assert [file.parent.name for file in folder.glob("failed/checkpoints/*/COMPLETE")] == ["step_2"]


def test_engine_and_trainer_logprobs_agree(folder: Path) -> None:
    steps = [line for line in metrics(folder / "whole") if "mismatch/kl" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    first_of_rollout = [line["mismatch/max_abs_logprob"] for line in steps]
    assert max(first_of_rollout) <= 1e-4


def test_completions_are_logged_with_reward_and_advantage(folder: Path) -> None:
    rows = rollouts(folder / "whole", 0)
    assert sum(row["trained"] for row in rows) == 6 * 4
    assert {row["version"] for row in rows} == {0}
    assert all(row["rewards"]["vowels"] == sum(c in "aeiou" for c in row["completion"]) for row in rows)
    for first in range(0, len(rows), 4):
        group = rows[first : first + 4]
        assert len({row["id"] for row in group}) == 1
        values = [row["reward"] for row in group]
        # The dapo preset drops groups whose rewards are too similar.
        assert group[0]["trained"] <= (max(values) - min(values) > 1.0)
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-4)
    assert len({row["completion"] for row in rows}) > 6


def test_skipped_rows_are_counted(folder: Path) -> None:
    counts = [line["train/skipped_rows"] for line in metrics(folder / "whole") if "train/loss" in line]
    assert counts == sorted(counts)
    assert counts[-1] > 0


def test_documented_metrics_are_logged(folder: Path) -> None:
    lines = [line for line in metrics(folder / "whole") if "train/loss" in line]
    missing = {
        *(
            "reward/mean",
            "reward/std",
            "reward/vowels/mean",
            "reward/vowels/seen",
            "reward/zero_std_fraction",
            "completion/length_mean",
        ),
        *("completion/truncated_fraction", "policy/entropy", "policy/clip_fraction", "policy/kl", "mismatch/kl"),
        *("mismatch/kl/text", "mismatch/kl/image", "mismatch/kl/video", "mismatch/max_abs_logprob", "time/rollout"),
        *("time/offload", "time/wake", "time/sync", "time/generate", "time/sleep", "time/reload"),
        *("time/reward", "rollout/tokens_per_second"),
        *("memory/sync/peak_gib", "memory/sleep/freed_gib", "perf/tokens_per_second"),
    } - {name for line in lines for name in line}
    assert not missing
    assert all(0 < line["policy/entropy"] < 10 for line in lines)
    # Every second step starts after an update, so the policy has left the reference.
    assert all(line["policy/kl"] > 0 for line in lines if line["step"] % 2 == 0)


def test_tensorboard_shows_completions_with_their_media(folder: Path) -> None:
    events = EventAccumulator(str(folder / "whole" / "tensorboard"))
    events.Reload()
    assert {"rollout/advantage", "reward/vowels"} <= set(events.Tags()["histograms"])
    assert len([tag for tag in events.Tags()["images"] if tag.startswith("rollout/completions/")]) == 4


def sampled(run: Path, step: int) -> list[tuple[str, str, float]]:
    return [(row["id"], row["completion"], row["reward"]) for row in rollouts(run, step)]


VLLM = ("--set", "rollout.engine=vllm", "--set", "rollout.self_test=false")


@pytest.fixture(scope="module")
def with_vllm(folder: Path) -> Path:
    return train(folder, "vllm", *VLLM)


def test_resumed_vllm_run_samples_identical_tokens(folder: Path, with_vllm: Path) -> None:
    resumed = train(folder, "vllm_resumed", "--resume", "vllm/checkpoints/step_2", *VLLM)
    assert sampled(resumed, 2) == sampled(with_vllm, 2)
    assert sampled(with_vllm, 0) != sampled(with_vllm, 2)
    assert max(line["mismatch/max_abs_logprob"] for line in metrics(with_vllm) if "mismatch/kl" in line) <= 1e-4


@pytest.mark.nightly
def test_gradient_checkpointing_with_tensor_parallelism_matches_baseline(folder: Path, with_vllm: Path) -> None:
    """Share one copy of the policy between both ranks and checkpoint gradients, as in the recipes for large models."""
    together = ("--set", "rollout.tensor_parallel_size=2", "--set", "model.gradient_checkpointing=true")
    shared = train(folder, "shared", *VLLM, *together, "--set", "train.max_steps=2")
    assert sampled(shared, 0) == sampled(with_vllm, 0)
    names = ("train/loss", "train/grad_norm", "policy/entropy", "policy/kl", "mismatch/kl")
    expected, result = ([[line[name] for name in names] for line in metrics(run)[:2]] for run in (with_vllm, shared))
    assert np.allclose(result, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_frozen_vision_tower_stays_unchanged(folder: Path, tiny_qwen3_vl: Path) -> None:
    run = train(folder, "frozen", "--set", 'model.freeze=["visual"]')
    initial, trained = load_file(tiny_qwen3_vl / "model.safetensors"), load_file(run / "export/final/model.safetensors")
    changed = {name.split(".")[1] for name in initial if not initial[name].equal(trained[name])}
    assert changed == {"language_model"}
    assert max(line["mismatch/max_abs_logprob"] for line in metrics(run) if "mismatch/kl" in line) <= 1e-4


@pytest.mark.long
def test_run_stops_if_no_completion_is_trainable(folder: Path) -> None:
    options = ("--set", "grpo.overlong_filter=true", "--set", "rollout.max_completion_length=1")
    ended = dsreason("grpo", "--config", "run.toml", "--output-dir", "cut", "--nproc", 1, *options, cwd=folder)
    assert ended.returncode == 3
    assert "10 consecutive rollouts had no completion to train on\n" in ended.stderr
    assert "completions (10 rollouts) were cut off at rollout.max_completion_length (1)" in ended.stderr
    assert not [line for line in metrics(folder / "cut") if "train/loss" in line]


def test_constant_reward_causes_warning(folder: Path) -> None:
    options = ("--set", "grpo.preset=dr_grpo", "--set", 'reward.functions={"rewards.py:same"=1.0}', "--max-restarts", 1)
    ended = dsreason("grpo", "--config", "run.toml", "--output-dir", "same", "--nproc", 2, *options, cwd=folder)
    assert ended.returncode == 3
    verdict = "nothing was learned in the 4 steps, so the model is no better than at the start"
    groups = sum(line["rollout/groups_without_signal"] for line in metrics(folder / "same") if line["step"] in (1, 3))
    cause = (
        f"grpo: in {groups:g} of {groups:g} groups (2 rollouts) all completions scored the same, so nothing was learned"
    )
    assert f"error: {verdict}\n  {cause}" in ended.stderr
    assert f"warning: {verdict}\nwarning: {cause}" in ended.stdout
    assert "restart 1" not in ended.stderr
    assert (folder / "same" / "export" / "final" / "model.safetensors").is_file()


def with_dead_sync(config: str, output_dir: str, *, self_test: bool) -> str:
    """Run GRPO with weight syncs that send nothing but their version number, and return how the run ends.

    `unsent.safetensors` has the last weights that were not sent.
    """
    from safetensors.torch import save_file

    from dsreason.config.load import load_config
    from dsreason.config.schema_grpo import GRPOConfig
    from dsreason.errors import DsReasonError
    from dsreason.rollout.transformers_engine import TransformersEngine
    from dsreason.train.grpo import loop as grpo

    first_sync = TransformersEngine.sync
    synced = []

    def sync(self: Any, weights: Any, version: int, kept: Any = ()) -> None:
        if not synced:
            synced.append(first_sync(self, weights, version, kept))
        save_file({name: tensor.clone() for name, tensor in weights}, f"{output_dir}/unsent.safetensors")
        self.version = version

    TransformersEngine.sync = sync  # type: ignore[method-assign]
    overrides = [f"rollout.self_test={str(self_test).lower()}", "rollout.mismatch_stop=1e-4", "rollout.mismatch_warn=0"]
    overrides += ["optim.lr=1e-2", "checkpoint.every=0"]
    settings = load_config(GRPOConfig, Path(config), overrides, default_recipe="")
    try:
        grpo.run(settings, output_dir=Path(output_dir))
    except DsReasonError as error:
        return f"{type(error).__name__}: {error}"
    return "the run went to its end"


@pytest.mark.parametrize(
    ("self_test", "expected"),
    [
        (True, "SelfTestError: the self-test of the rollout engine failed: a sync of changed weights left"),
        (False, "MismatchError: "),
    ],
)
def test_run_stops_if_sync_sends_no_weights(
    folder: Path, self_test: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (ended,) = run_on_ranks(partial(with_dead_sync, self_test=self_test), 1, "run.toml", f"dead_{self_test}")
    assert ended.startswith(expected)
    assert "model.visual" in ended or "rollout.mismatch_stop" in ended
    if not self_test:  # found in step 3, the first of the second rollout, after its gradient was computed
        assert ended.endswith("\nThe last finished step, 2, is saved; continue with --resume auto")
        run = folder / "dead_False"
        export_checkpoint(run / "checkpoints/step_2", run / "export/step_2", dtype="fp32")
        unsent, saved = (load_file(run / name) for name in ("unsent.safetensors", "export/step_2/model.safetensors"))
        assert unsent.keys() >= saved.keys() and all(saved[name].equal(unsent[name]) for name in saved)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", 'reward.functions={"vowles"=1.0}'], ["vowles"]),
        (["--set", "reward.functions={}"], ["reward.functions"]),
        (["--set", "model.max_length=20"], ["rows.jsonl", "max_completion_length"]),
        (["--set", "train.global_batch_size=8"], ["global_batch_size"]),
        (["--set", "grpo.num_generations=1"], ["num_generations"]),
        (["--set", "rollout.top_p=0.9"], ["rollout.top_p (0.9)", "grpo.correction"]),
        (["--set", "grpo.preset=gspo", "--set", "grpo.dual_clip=3.0"], ["dual_clip", "gspo"]),
        (["--set", "reward.options={exact_match={patern=1}}"], ["exact_match"]),
    ],
)
def test_mistakes_are_reported_before_ranks_start(
    folder: Path,
    options: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    command = ["dsreason", "grpo", "--config", "run.toml", "--output-dir", "bad", "--dry-run", *options]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert [word for word in words if word not in err] == [], err
    assert "Traceback" not in err
    assert not (folder / "bad").exists()
