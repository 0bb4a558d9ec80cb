"""The reward that compares JSON answers field by field."""

from __future__ import annotations

import pytest

from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DataError
from dsreason.rewards import json_fields
from dsreason.rewards.functions import find_reward

REFERENCE = '{"action": "Turn left", "distance": 3.2, "objects": ["car", "truck"], "safe": true, "span": [10, 20]}'
SAMPLE = Sample("7", [], answer=REFERENCE)


@pytest.mark.parametrize(
    ("completion", "worth"),
    [
        (f"<answer>```json\n{REFERENCE}\n```</answer>", 1.0),
        (REFERENCE.replace("Turn left", "turn LEFT."), 1.0),
        (REFERENCE.replace("3.2", '"3.2 m"'), 1.0),
        (REFERENCE.replace('"car", "truck"', '"Truck", "car"'), 1.0),
        (REFERENCE.replace('"car", "truck"', '"car", "bus"'), (4 + 0.5) / 5),
        (REFERENCE.replace("true", "1"), 4 / 5),
        (REFERENCE.replace("[10, 20]", "[10.0, 20.0]"), 1.0),
        (REFERENCE.replace('"safe": true, ', ""), 4 / 5),
        ("{'action': 'turn left', 'distance': 3.2}", 2 / 5),
        ('{"action": "stop"} … no: {"action": "turn left"}', 1 / 5),
        ('{"action": "turn left", "note": "x"}', 1 / 5),
        ("turn left", 0.0),
        ("[1, 2]", 0.0),
        ("", 0.0),
    ],
)
def test_object_scores_its_share_of_fields(completion, worth):
    assert json_fields(completion, SAMPLE) == pytest.approx(worth)


def test_fields_have_separate_comparisons_options_and_weights():
    fields = {
        "distance": {"compare": "numeric", "relative": 0.1, "weight": 2.0},
        "span": "temporal_iou",
        "action": "exact",
    }
    value = '{"action": "turn left", "distance": "3.4 m", "span": "from 00:10 to 00:15"}'
    assert json_fields(value, SAMPLE, fields=fields) == pytest.approx((2 * 1 + 0.5 + 0) / 4)
    worth, metrics = json_fields(value, SAMPLE, fields=fields, metrics=True)
    assert metrics == {"read": 1.0, "distance": 1.0, "span": pytest.approx(0.5), "action": 0.0}


def test_dotted_name_selects_a_nested_field():
    sample = Sample("7", [], answer='{"car": {"colour": "red"}}')
    assert json_fields('{"car": {"colour": "Red"}}', sample, fields={"car.colour": "text"}) == 1.0
    assert json_fields('{"car": "red"}', sample, fields={"car.colour": "text"}) == 0.0


def test_threshold_requires_all_and_may_forbid_extras():
    assert json_fields(REFERENCE, SAMPLE, threshold=1.0) == 1.0
    assert json_fields('{"action": "turn left"}', SAMPLE, threshold=1.0) == 0.0
    more = REFERENCE.replace("{", '{"x": 1, ', 1)
    assert (json_fields(more, SAMPLE), json_fields(more, SAMPLE, no_others=True)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("answer", "fields", "text"),
    [
        (None, None, "no JSON object"),
        ("[1]", None, "no JSON object"),
        ("{}", None, "without fields"),
        ('{"a": 1}', {"b": "exact"}, "has no field b"),
        ('{"a": "far"}', {"a": "numeric"}, "sample '7, field a'.*no single number"),
        ('{"a": 1}', {"a": "set"}, "field a that is compared as a set, but is not a list"),
    ],
)
def test_unusable_reference_is_rejected(answer, fields, text):
    with pytest.raises(DataError, match=text):
        json_fields("", Sample("7", [], answer=answer), fields=fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "is empty"),
        ({"a": "numerik"}, "fields.a must be compared by one of exact, text.*; got 'numerik'; did you mean numeric"),
        ({"a": {"weight": 1}}, "fields.a must be compared by one of .*; got None"),
        ({"a": {"compare": "text", "weight": 0}}, r"fields.a.weight must be a number above 0"),
        (
            {"a": {"compare": "numeric", "relativ": 0.1}},
            "has the unknown option relativ; numeric accepts .*relative",
        ),
        (
            {"a": {"compare": "numeric", "relative": -1}},
            r"fields.a.relative \(-1\): input should be greater than or equal to 0",
        ),
    ],
)
def test_invalid_fields_are_rejected_at_startup(fields, text):
    with pytest.raises(ConfigError, match=text):
        find_reward("json_fields", {"fields": fields})
