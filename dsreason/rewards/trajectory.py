"""A reward for waypoints: the distance between a trajectory and the reference, point by point or at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Len
from numpy.typing import NDArray

from dsreason.data.types import Sample
from dsreason.rewards.grounding import SLACK, compute_nearness
from dsreason.rewards.options import NotNegative, Positive, RewardValue
from dsreason.rewards.reading.plain import get_answer
from dsreason.rewards.reading.reference import read_reference
from dsreason.rewards.reading.shapes import METRES, PlaneShape, PointForm, read_points

Path = NDArray[np.float64]  # [waypoints, axes]
MOST_WAYPOINTS = 1000


def trajectory(
    completion: str,
    sample: Sample,
    *,
    error: Literal["ade", "fde", "both"] = "ade",
    limit: Positive = 2.0,
    score: Literal["linear", "exp"] = "linear",
    threshold: NotNegative | None = None,
    lengths: Literal["missing", "resample", "equal"] = "missing",
    axes: Annotated[list[Annotated[int, Ge(0)]], Len(1, 3)] = [0, 1],  # noqa: B006  it is only read
    unit: Literal["m", "cm", "mm", "km", "ft", "px"] = "m",
    metrics: bool = False,
) -> RewardValue:
    """Return the closeness of waypoints, 0 to 1: the mean of 1 - distance / `limit`, each term at least 0.

    Distances are Euclidean, in `unit`. The ADE is the mean distance, and the FDE is the distance at the last waypoint (Alahi et
    al. 2016, nuScenes). No waypoint scores worse than a missing one, so omitting bad waypoints never pays. Waypoints are parsed
    from lists of (x, y), including lists in JSON.

    Args:
        error: what is scored: all waypoints (`ade`), the last waypoint (`fde`), or the mean of these two scores (`both`).
        limit: distance at which a waypoint's score reaches 0.
        score: `linear` as described above; `exp` uses exp(-distance / limit).
        threshold: return 1 if the ADE (`fde`: the FDE; `both`: each of them) is at most this value, else 0.
        lengths: treatment of an answer with more or fewer waypoints than the reference. `missing` compares the waypoints that
            both have and scores the remaining ones 0; `resample` resamples both paths to the same number of evenly spaced
            points (for traces without timestamps); `equal` gives 0.
        axes: indices of the numbers in a waypoint to compare; [0, 1] ignores a third number, such as a heading.
        unit: unit to assume for numbers without one; lengths with a unit are converted to it.
        metrics: also return `read` (whether the answer was parsed) and, if it is as long as the reference, `ade` and `fde`.
    """
    form = PointForm(range(max(axes) + 1, max(axes) + 3), METRES.get(unit, 1.0))
    right = to_path(
        read_reference(sample, lambda text: read_points(text, form) or None, "waypoints; write [[x, y], …]"), axes
    )
    answer_points = read_points(get_answer(completion), form)
    answer_path = to_path(answer_points, axes) if answer_points else None
    if answer_path is not None and lengths == "resample":
        count = max(len(right), len(answer_path), 2)
        right, answer_path = resample(right, count), resample(answer_path, count)
    if answer_path is None or (lengths == "equal" and len(answer_path) != len(right)):
        reward = 0.0
    elif threshold is not None:
        reward = float(
            len(answer_path) == len(right) and max(compute_errors(right, answer_path, error)) <= threshold + SLACK
        )
    else:
        reward = compute_mean_score(right, answer_path, error, limit, score)
    if not metrics:
        return reward
    same_length = answer_path is not None and len(answer_path) == len(right)
    ade, fde = compute_errors(right, answer_path, "both") if answer_path is not None and same_length else (0.0, 0.0)
    return reward, {"read": float(answer_path is not None)} | ({"ade": ade, "fde": fde} if same_length else {})


def compute_mean_score(right: Path, answer: Path, error: str, limit: float, score: Literal["linear", "exp"]) -> float:
    """Return the mean score over all waypoints, the score of the last, or the mean of the two; unmatched waypoints score 0."""
    scores = [compute_nearness(far, limit, score) for far in compute_distances(right, answer)]
    mean = sum(scores) / max(len(right), len(answer))
    last = scores[len(right) - 1] if len(answer) >= len(right) else 0.0
    return {"ade": mean, "fde": last, "both": (mean + last) / 2}[error]


def compute_errors(right: Path, answer: Path, error: str) -> tuple[float, ...]:
    """Return the ADE, the FDE or both for paths of equal length."""
    far = compute_distances(right, answer)
    metrics = {"ade": sum(far) / len(far), "fde": far[-1]}
    return tuple(metrics.values()) if error == "both" else (metrics[error],)


def compute_distances(right: Path, answer: Path) -> list[float]:
    """Return the distances between corresponding waypoints, up to the end of the shorter path."""
    return [math.dist(right_point, point) for right_point, point in zip(right, answer, strict=False)]


def to_path(shapes: Sequence[PlaneShape], axes: Sequence[int]) -> Path:
    """Return the points' selected axes as an array `[waypoints, axes]`."""
    return np.array([[shape.numbers[axis] for axis in axes] for shape in shapes[:MOST_WAYPOINTS]])


def resample(waypoints: Path, count: int) -> Path:
    """Return `count` points that are evenly spaced along the path."""
    steps = np.linalg.norm(np.diff(waypoints, axis=0), axis=1)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    positions = np.linspace(0.0, along[-1], count)
    return np.stack([np.interp(positions, along, waypoints[:, axis]) for axis in range(waypoints.shape[1])], axis=1)
