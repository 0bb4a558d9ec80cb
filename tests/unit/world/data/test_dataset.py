"""Rows of prompt files and of generated clips."""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from dsreason.config.load import read_values
from dsreason.errors import ConfigError, DataError
from dsreason.world.data import open_world_data
from dsreason.world.data.builtin import MOVES, PROMPTS, Square, draw_clip
from dsreason.world.data.dataset import open_rows
from dsreason.world.data.rows import CheckedRows
from dsreason.world.schema import WorldConfig, WorldDataConfig
from dsreason.world.types import ClipSize

SIZE = ClipSize(9, 32, 32, 16.0)


def test_built_in_clip_matches_its_caption() -> None:
    training, held_out = open_world_data(WorldDataConfig(limit=48, validation=8), 0)
    assert (len(training), len(held_out)) == (40, 8)
    assert not {row.id for row in training.rows} & {row.id for row in held_out.rows}
    for row in held_out.rows:
        clip = held_out.read_clip(row, SIZE)
        assert clip.shape == (3, 9, 32, 32)
        assert clip.dtype == torch.uint8
        assert row.prompt == f"a {row.meta['colour']} square moves {row.meta['move']}"
        channel = ["red", "green", "blue"].index(row.meta["colour"])
        mask = (clip.float().argmax(0) == channel) & (clip.float().amax(0) - clip.float().amin(0) > 30)
        assert 80 <= mask[0].sum() <= 130  # 10 by 10 pixels and the edges
        place = torch.stack([frame.nonzero().float().mean(0) for frame in mask])
        way = (place[-1] - place[0]).flip(0).tolist()
        assert way == pytest.approx([12.0 * step for step in MOVES[row.meta["move"]]], abs=0.6)


def test_drawn_square_matches_hand_computed_pixels() -> None:
    clip = draw_clip(Square("red", "right", 1.0, 0.2, (0.0, 0.0)), SIZE)
    assert clip[:, 0, 5, 9].tolist() == [255, 26, 26]
    assert clip[:, 0, 5, 10].tolist() == [51, 51, 51]
    assert clip[:, 1, 5, [0, 1, 2, 10, 11]].float().mean(0).tolist() == pytest.approx(
        [51, (51 + 102.3) / 2, 102.3, 102.3, (51 + 102.3) / 2], abs=1
    )
    assert clip[:, 8, 5, 11].tolist() == [51, 51, 51]
    assert clip[:, 8, 5, 12].tolist() == [255, 26, 26]


def test_captions_are_mislabelled_at_the_expected_rate() -> None:
    right, _ = open_world_data(WorldDataConfig(), 3)
    wrong, _ = open_world_data(WorldDataConfig(path="mislabelled"), 3)
    assert {row.prompt for row in right.rows} == {row.prompt for row in wrong.rows} == set(PROMPTS)
    assert [row.clip for row in right.rows] == [row.clip for row in wrong.rows]
    assert [row.meta for row in right.rows] == [row.meta for row in wrong.rows]
    same = Counter(
        (row.prompt.split()[1] == row.meta["colour"], row.prompt.split()[-1] == row.meta["move"]) for row in wrong.rows
    )
    colour, move = ((same[True, True] + same[True, False]), (same[True, True] + same[False, True]))
    assert colour / 4096 == pytest.approx(0.5 + 0.5 / 3, abs=0.03)
    assert move / 4096 == pytest.approx(0.5 + 0.5 / 4, abs=0.03)


def test_clips_depend_on_seed_and_number_only() -> None:
    item, other = (open_world_data(WorldDataConfig(limit=4), seed)[0] for seed in (0, 1))
    loads = pickle.loads(pickle.dumps(open_world_data(WorldDataConfig(limit=9), 0)[0]))
    assert torch.equal(item.read_clip(item[3], SIZE), loads.read_clip(loads[3], SIZE))
    assert not torch.equal(item.read_clip(item[3], SIZE), other.read_clip(other[3], SIZE))


def test_mock_data_support_any_clip_size() -> None:
    rows, _ = open_world_data(WorldDataConfig(format="mock"), 0)
    clips = [rows.read_clip(row, ClipSize(5, 48, 80, 16.0)) for row in rows.rows[:2]]
    assert clips[0].shape == (3, 5, 48, 80)
    assert not torch.equal(*clips)
    assert len({row.prompt for row in rows.rows}) == len(rows) == 1024


def test_prompts_may_be_lines_or_objects(tmp_path: Path) -> None:
    text, objects = tmp_path / "train.txt", tmp_path / "test.jsonl"
    text.write_text("a red ship\n\n  a blue ship \n")
    lines = [
        {"prompt": "two cups", "tag": "counting", "include": [{"class": "cup", "count": 2}]},
        {"prompt": "x", "video": "a/b.mp4"},
    ]
    objects.write_text("".join(json.dumps(line) + "\n" for line in lines))
    training, held_out = open_world_data(WorldDataConfig(format="prompts", path=str(text), validation=str(objects)), 0)
    assert [(row.id, row.prompt, row.clip, row.meta) for row in training.rows] == [
        (f"{text}:1", "a red ship", None, {}),
        (f"{text}:3", "a blue ship", None, {}),
    ]
    assert held_out[0].meta == {"tag": "counting", "include": [{"class": "cup", "count": 2}]}
    assert held_out[1].clip == str(tmp_path / "a/b.mp4")
    with pytest.raises(DataError, match=r"train.txt:1: the row has a prompt but no clip"):
        training.read_clip(training[0], SIZE)


def test_bad_rows_are_reported_or_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "p.jsonl"
    deep = json.dumps({"prompt": "a", "note": 0}).replace("0", "[" * 900 + "]" * 900)
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n{"prompt": " "}\n[1]\n{"prompt"\n' + deep)
    with pytest.raises(
        DataError, match=r'5 rows of .*p.jsonl:2: "prompt" must be a non-empty string; the fields .*: text'
    ):
        open_world_data(WorldDataConfig(format="prompts", path=str(file)), 0)
    with caplog.at_level(logging.WARNING):
        rows, _ = open_world_data(WorldDataConfig(format="prompts", path=str(file), on_bad_row="skip"), 0)
    assert [row.prompt for row in rows.rows] == ["a"]
    assert all(f"p.jsonl:{line}: " in caplog.text for line in (2, 3, 4, 5, 6))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": "prompts"}, "data.path: is empty"),
        ({"format": "prompts", "path": "/nowhere/p.txt"}, "data.path: /nowhere/p.txt: does not exist"),
        ({"validation": "wrong"}, "data.validation: wrong: must be empty or"),
        ({"validation": "https://host/p.txt"}, "data.validation: https://host/p.txt is a URL"),
        ({"format": "prompts", "path": "https://host/p.txt"}, "is a URL"),
        ({"path": "wrong"}, 'must be empty or "mislabelled"'),
        ({"limit": 5, "validation": 5}, r"data.validation \(5\) leaves none of the 5 rows"),
    ],
)
def test_unusable_data_settings_are_rejected(settings: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_world_data(WorldDataConfig.model_validate(settings), 0)


@pytest.mark.parametrize("format", ["prompts", "folder", "shards"])
@pytest.mark.parametrize("path", ["/nowhere", ""])
def test_missing_data_error_names_the_key(format: str, path: str) -> None:
    data = WorldDataConfig.model_validate({"format": format, "path": path})
    with pytest.raises(DataError, match=rf"^data\.validation: {path or 'is empty'}"):
        open_rows(data, 0, "data.validation")


INSIDE = "\u0085", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c"
"""Characters that end a line for `splitlines`, but not in text files or JSON."""


@pytest.mark.parametrize("character", INSIDE)
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_prompt_may_contain_unicode_line_separators(tmp_path: Path, suffix: str, character: str) -> None:
    prompt = f"a red square{character} moves left"
    line = prompt if suffix == "txt" else json.dumps({"prompt": prompt}, ensure_ascii=False)
    (tmp_path / f"p.{suffix}").write_bytes(f"{line}\r\nanother\n".replace("another", line).encode())
    rows, _ = open_world_data(WorldDataConfig(format="prompts", path=str(tmp_path / f"p.{suffix}")), 0)
    assert [row.prompt for row in rows.rows] == [prompt, prompt]


@pytest.mark.parametrize("name", ["c.jsonl", "c.JSONL", "c.ndjson"])
def test_json_lines_are_recognized_by_suffix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"prompt": "x"}\n')
    rows, _ = open_world_data(WorldDataConfig(format="prompts", path=str(tmp_path / name)), 0)
    assert [row.prompt for row in rows.rows] == ["x"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.json", '[\n{"prompt": "x"}\n]\n', r"c.json: prompts cannot be read from a .json file; use a text file"),
        ("c.CSV", "id,prompt\n1,x\n", r"c.CSV: prompts cannot be read from a .csv file"),
        (
            "c.txt",
            'x\n {"prompt": "x"}\n',
            r"c.txt:2: is JSON, but each line of a .txt file must be a prompt; .* .jsonl",
        ),
        ("prompts", '{"prompt": "x"}\n', r"prompts:1: is JSON, but each line of a text file"),
    ],
)
def test_invalid_prompt_files_are_rejected(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        open_world_data(WorldDataConfig(format="prompts", path=str(tmp_path / name)), 0)


def test_prompt_may_begin_with_a_brace(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("{a, b}: two letters\n")
    rows, _ = open_world_data(WorldDataConfig(format="prompts", path=str(tmp_path / "p.txt")), 0)
    assert rows[0].prompt == "{a, b}: two letters"


@pytest.mark.parametrize(
    ("row_id", "prompt", "clip", "said"),
    [
        ("p:1", "x \ud800", None, r"'p:1': its prompt contains an unpaired surrogate \('\\ud800'\) at index 2"),
        ("v/\udcff.mp4", "x", None, r"its name contains an unpaired surrogate"),
        ("p:1", "x", "\udbff.mp4", r"its video contains an unpaired surrogate"),
    ],
)
def test_lone_surrogate_makes_a_bad_row(row_id: str, prompt: str, clip: str | None, said: str) -> None:
    rows = CheckedRows()
    rows.add(row_id, {"prompt": prompt}, clip)
    assert not rows.rows
    assert re.search(said, rows.bad[0])
    rows.bad[0].encode()


def test_lone_surrogate_in_negative_prompt_is_rejected() -> None:
    """Check a surrogate from JSON, which would be part of a cache key."""
    with pytest.raises(
        ConfigError, match=r"c\.json: data\.negative_prompt: .*'x \\ud800' contains an unpaired surrogate at index 2"
    ):
        read_values(WorldConfig, {"data": {"negative_prompt": "x \ud800"}}, "c.json")
