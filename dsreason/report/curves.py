"""The charts on a run's page, made from the run's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dsreason.report.charts import Chart, Line, Points

Metrics = Sequence[dict[str, Any]]
"""Lines of `metrics.jsonl`."""

FIXED = {
    "Learning": {
        "loss": ("nats per token", {"training": "train/loss", "held-out": "val/loss"}),
        "total reward": ("", {"training": "reward/mean", "held-out": "val/reward/mean"}),
        "accuracy of generated answers": ("", {"held-out": "val/accuracy"}),
        "preference accuracy": ("", {"training": "dpo/accuracy", "held-out": "val/preference_accuracy"}),
        "preference margin": ("", {"training": "dpo/margin", "held-out": "val/margin"}),
        "distance from the teacher": ("", {"KL": "distill/kl"}),
    },
    "Health": {
        "completion length": ("tokens", {"mean": "completion/length_mean", "longest": "completion/length_max"}),
        "share of truncated completions": ("", {"training": "completion/truncated_fraction"}),
        "share of prompts without signal": ("", {"training": "reward/zero_std_fraction"}),
        "entropy": ("nats", {"training": "policy/entropy"}),
        "distance from the reference": ("", {"KL": "policy/kl"}),
        "share of clipped tokens": ("", {"training": "policy/clip_fraction"}),
        "rollout engine compared with trainer, KL": ("", {"mismatch": "mismatch/kl"}),
        "rollout engine compared with trainer, largest": ("nats", {"mismatch": "mismatch/max_abs_logprob"}),
        "gradient norm": ("", {"training": "train/grad_norm"}),
        "learning rate": ("", {"training": "train/learning_rate"}),
        "skipped rows": ("rows", {"so far": "train/skipped_rows"}),
    },
    "Speed and memory": {
        "throughput": ("tokens/s", {"training": "perf/tokens_per_second", "rollout": "rollout/tokens_per_second"}),
        "model FLOPs utilisation": ("", {"training": "perf/mfu"}),
        "share of padding": ("", {"training": "perf/padding"}),
    },
}
"""Section → chart title → (unit, metrics by label)."""


def make_charts(metrics: Metrics, algorithm: str) -> dict[str, list[Chart]]:
    """Make the charts for each section, omitting charts without values.

    Args:
        algorithm: `sft`, `dpo` or `grpo`. GRPO's training loss is not comparable with the loss on held-out rows, so it gets a
            separate chart.
    """
    names = list(dict.fromkeys(name for line in metrics for name, value in line.items() if is_number(value)))
    sections = {
        section: [Chart(title, unit, make_lines(metrics, labels.items())) for title, (unit, labels) in charts.items()]
        for section, charts in FIXED.items()
    }
    if algorithm == "grpo":
        sections["Learning"][0] = Chart(
            "loss of reference answers", "nats per token", make_lines(metrics, [("held-out", "val/loss")])
        )
        sections["Health"].append(Chart("policy-gradient loss", "", make_lines(metrics, [("training", "train/loss")])))
    rewards = find_rewards(names)
    for reward in rewards if len(rewards) > 1 else ():  # a single reward equals the total, up to its weight
        labels = {"training": f"reward/{reward}/mean", "held-out": f"val/reward/{reward}/mean"}
        sections["Learning"].append(Chart(f"reward: {reward}", "", make_lines(metrics, labels.items())))
    parts = [(name.removeprefix("val/accuracy/"), name) for name in names if name.startswith("val/accuracy/")]
    sections["Learning"].append(Chart("accuracy by kind of row", "", make_lines(metrics, parts)))
    times = [(name.removeprefix("time/"), name) for name in names if name.startswith("time/")]
    sections["Speed and memory"].append(Chart("time by phase", "s", make_lines(metrics, times)))
    peaks = [(name.split("/")[1], name) for name in names if name.startswith("memory/") and name.endswith("/peak_gib")]
    sections["Speed and memory"].append(Chart("peak memory by phase", "GiB", make_lines(metrics, peaks)))
    with_values = {
        section: [chart for chart in charts if any(line.points for line in chart.lines)]
        for section, charts in sections.items()
    }
    return {section: charts for section, charts in with_values.items() if charts}


def find_rewards(names: Iterable[str]) -> list[str]:
    """Return the names of the reward functions, which are those with a metric `reward/<name>/mean`."""
    functions = (name.removeprefix("val/").split("/")[1:-1] for name in names if is_reward_mean(name))
    return sorted({"/".join(parts) for parts in functions if parts})


def is_reward_mean(name: str) -> bool:
    return name.startswith(("reward/", "val/reward/")) and name.endswith("/mean")


def make_lines(metrics: Metrics, labels: Iterable[tuple[str, str]]) -> list[Line]:
    return [Line(label, get_points(metrics, name), name.startswith("val/")) for label, name in labels]


def get_points(metrics: Metrics, name: str) -> Points:
    return [(line["step"], line[name]) for line in metrics if is_number(line.get(name))]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def list_other_metrics(metrics: Metrics, charts: dict[str, list[Chart]]) -> dict[str, float]:
    """Return the last value of each metric that is not in any chart."""
    last = {name: value for line in metrics for name, value in line.items() if is_number(value) and name != "step"}
    drawn = [line.points for section in charts.values() for chart in section for line in chart.lines]
    return {name: value for name, value in sorted(last.items()) if get_points(metrics, name) not in drawn}
