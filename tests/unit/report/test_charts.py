"""Charts: coordinates, ticks and texts with hand-computed values."""

from __future__ import annotations

import pytest

from dsreason.report.charts import (
    Chart,
    Line,
    average_points,
    choose_ticks,
    describe_chart,
    draw_chart,
    format_value,
    widen,
)
from dsreason.report.curves import make_charts


def test_chart_places_points_between_margins() -> None:
    drawn = draw_chart(Chart("loss", "", [Line("training", [(0, 0.0), (10, 1.0)])]))
    assert drawn is not None
    # The axis covers -0.04 to 1.04, so 0 and 1 lie at 1/27 and 26/27 of the 158 units between y = 8 and y = 166.
    assert drawn.lines[0].path == "52.0,160.1 330.0,13.9"
    assert [tick.text for tick in drawn.x_ticks] == ["0", "5", "10"]
    assert [tick.text for tick in drawn.y_ticks] == ["0", "0.5", "1"]


def test_chart_without_points_is_not_drawn() -> None:
    assert draw_chart(Chart("loss", "", [Line("training", [])])) is None


def test_single_point_is_drawn_as_dot() -> None:
    drawn = draw_chart(Chart("loss", "", [Line("training", [(3, 2.0)])]))
    assert drawn is not None
    assert drawn.lines[0].dots == [(191.0, 87.0)]  # the centre of the plot area


def test_long_line_shows_means_of_steps() -> None:
    drawn = draw_chart(Chart("loss", "", [Line("training", [(step, float(step % 2)) for step in range(600)])]))
    assert drawn is not None and drawn.steps_per_point == 2
    assert len(drawn.lines[0].path.split()) == 300
    assert average_points([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == [(0.5, 2.0), (2.0, 5.0)]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.31, 0.92, [0.4, 0.6, 0.8]),
        (-3.0, 9.0, [0.0, 5.0]),
        (2e-7, 9e-7, [2e-7, 4e-7, 6e-7, 8e-7]),
        (5.0, 5.0, [5.0]),
    ],
)
def test_ticks_are_round_values(low: float, high: float, expected: list[float]) -> None:
    assert choose_ticks(low, high) == pytest.approx(expected)


def test_step_ticks_are_whole_numbers() -> None:
    assert choose_ticks(0, 3, whole=True) == [0, 1, 2, 3]


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (0.12345, "0.123"), (12345.6, "12,346"), (1.5e-5, "1.5e-05")])
def test_values_are_formatted(value: float, text: str) -> None:
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.0, 0.0, (-0.5, 0.5)), (2.0, 2.0, (1.0, 3.0)), (0, 1, (-0.04, 1.04))]
)
def test_axis_is_never_empty(low: float, high: float, expected: tuple[float, float]) -> None:
    assert widen(low, high) == pytest.approx(expected)


def test_chart_is_described_in_words() -> None:
    lines = [Line("training", [(1, 6.35), (640, 0.12)])]
    assert describe_chart("loss", lines) == "loss: training from 6.35 (step 1) to 0.12 (step 640)"


def test_metrics_become_charts() -> None:
    metrics = [
        {
            "step": 1,
            "train/loss": 2.0,
            "reward/mean": 0.5,
            "reward/a/mean": 0.2,
            "reward/b/mean": 0.3,
            "time/data": 1.0,
        },
        {"step": 2, "train/loss": None, "val/loss": 1.0, "memory/train/peak_gib": 3.0},
    ]
    charts = {chart.title: chart for section in make_charts(metrics, "sft").values() for chart in section}
    assert {"loss", "total reward", "reward: a", "reward: b", "time by phase", "peak memory by phase"} == charts.keys()
    assert [line.points for line in charts["loss"].lines] == [[(1, 2.0)], [(2, 1.0)]]


def test_policy_loss_has_its_own_chart() -> None:
    metrics = [{"step": 1, "train/loss": 0.01, "val/loss": 1.0}]
    sections = make_charts(metrics, "grpo")
    assert [chart.title for chart in sections["Learning"]] == ["loss of reference answers"]
    assert [chart.title for chart in sections["Health"]] == ["policy-gradient loss"]
