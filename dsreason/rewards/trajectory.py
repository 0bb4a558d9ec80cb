"""A reward for waypoints: how far a trajectory is from the reference's, point by point and at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Len
from numpy.typing import NDArray

from dsreason.data.types import Sample
from dsreason.rewards.grounding import SLACK, nearness
from dsreason.rewards.options import NotNegative, Positive, Worth
from dsreason.rewards.reading.plain import answer_of
from dsreason.rewards.reading.shapes import METRES, PointForm, Shape, points
from dsreason.rewards.reference import reference

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
) -> Worth:
    """Nearness of waypoints, 0 to 1: the mean over them of 1 - distance / `limit`, not below 0 each.

    Distances are Euclidean, in `unit`. ADE is their mean and FDE the last one (Alahi et al. 2016, nuScenes); because no
    waypoint costs more than `limit`, leaving out the bad ones never pays. Waypoints are read as lists of (x, y), in JSON too.

    Args:
        error: of all waypoints, of the last one, or the mean of both worths.
        limit: from which distance on a waypoint is worth nothing.
        score: `exp` is exp(-distance / limit) instead.
        threshold: the reward is 1 where ADE (FDE; both) is at most this, else 0.
        lengths: of an answer with more or fewer waypoints than the reference: `missing` compares those that both have and
            gives nothing for the others, `resample` takes as many of both, evenly along their length (for traces without
            times), `equal` gives 0.
        axes: which numbers of a waypoint count: [0, 1] leaves out a third one, such as a heading.
        unit: of numbers without one; lengths with a unit are converted.
        metrics: also return `read` and, of what is as long as the reference, `ade` and `fde`.
    """
    form = PointForm(range(max(axes) + 1, max(axes) + 3), METRES.get(unit, 1.0))
    right = path(reference(sample, lambda text: points(text, form) or None, "waypoints; write [[x, y], …]"), axes)
    answer_points = points(answer_of(completion), form)
    answer_path = path(answer_points, axes) if answer_points else None
    if answer_path is not None and lengths == "resample":
        count = max(len(right), len(answer_path), 2)
        right, answer_path = resampled(right, count), resampled(answer_path, count)
    if answer_path is None or (lengths == "equal" and len(answer_path) != len(right)):
        worth = 0.0
    elif threshold is not None:
        worth = float(len(answer_path) == len(right) and max(errors(right, answer_path, error)) <= threshold + SLACK)
    else:
        worth = mean_worth(right, answer_path, error, limit, score)
    if not metrics:
        return worth
    same = answer_path is not None and len(answer_path) == len(right)
    ade, fde = errors(right, answer_path, "both") if answer_path is not None and same else (0.0, 0.0)
    return worth, {"read": float(answer_path is not None)} | ({"ade": ade, "fde": fde} if same else {})


def mean_worth(right: Path, given: Path, error: str, limit: float, score: Literal["linear", "exp"]) -> float:
    """Over all waypoints and of the last one; of what only one of the two has 0."""
    worths = [nearness(far, limit, score) for far in distances(right, given)]
    all_of_them = sum(worths) / max(len(right), len(given))
    last = worths[len(right) - 1] if len(given) >= len(right) else 0.0
    return {"ade": all_of_them, "fde": last, "both": (all_of_them + last) / 2}[error]


def errors(right: Path, given: Path, error: str) -> tuple[float, ...]:
    """ADE, FDE or both, of paths of one length."""
    far = distances(right, given)
    metrics = {"ade": sum(far) / len(far), "fde": far[-1]}
    return tuple(metrics.values()) if error == "both" else (metrics[error],)


def distances(right: Path, given: Path) -> list[float]:
    """Of the waypoints that both have."""
    return [math.dist(right_point, other) for right_point, other in zip(right, given, strict=False)]


def path(found: Sequence[Shape], axes: Sequence[int]) -> Path:
    return np.array([[shape.numbers[axis] for axis in axes] for shape in found[:MOST_WAYPOINTS]])


def resampled(waypoints: Path, count: int) -> Path:
    """So many points, evenly spaced along the path's length."""
    steps = np.linalg.norm(np.diff(waypoints, axis=0), axis=1)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    places = np.linspace(0.0, along[-1], count)
    return np.stack([np.interp(places, along, waypoints[:, axis]) for axis in range(waypoints.shape[1])], axis=1)
