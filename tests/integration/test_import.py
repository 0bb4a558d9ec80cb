"""cosmos-rl files are used unchanged for training: SFT on LLaVA's rows, GRPO on columns with other names, and a data script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs import ROOT, blocks
from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.long

SFT = """
redis = "12800"
[custom.dataset]
annotation_path = "rows.json"
media_path = "."
[custom.vision]
nframes = 4
max_pixels = 6272
[train]
output_dir = "outputs"
param_dtype = "float32"
train_batch_per_replica = 2
max_num_steps = 2
enable_validation = true
[policy]
model_name_or_path = "tiny:qwen2_5_vl"
model_max_length = 512
[policy.parallelism]
tp_size = 1
dp_shard_size = 2
[train.train_policy]
type = "sft"
mini_batch = 1
[train.ckpt]
enable_checkpoint = true
"""
GRPO = """
mode = "colocated_separated"
[train]
output_dir = "outputs"
param_dtype = "float32"
train_batch_per_replica = 8
max_num_steps = 2
[rollout]
backend = "example_hf"
n_generation = 4
max_response_length = 8
[policy]
model_name_or_path = "tiny:qwen3"
model_max_length = 128
[policy.parallelism]
tp_size = 1
[train.train_policy]
type = "grpo"
dataset.name = "rows.jsonl"
prompt_column_name = "problem"
response_column_name = "solution"
reward_function = {gsm8k = 1.0, "length.py:words" = 0.5}
temperature = 0.9
min_filter_prefix_tokens = 1
"""


def test_sft_runs_from_cosmos_rl_file(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in write_mixed_rows(tmp_path).read_text().splitlines()]
    llava = [
        {
            "id": row["id"],
            **{kind: row[kind] for kind in ("image", "video") if kind in row},
            "conversations": [{"from": "human", "value": row["question"]}, {"from": "gpt", "value": row["answer"]}],
        }
        for row in rows
    ]
    for row in llava:
        images = row["image"] if isinstance(row.get("image"), list) else [row["image"]] if "image" in row else []
        tags = "<image>\n" * len(images) + "<video>\n" * ("video" in row)
        row["conversations"][0]["value"] = tags + row["conversations"][0]["value"]
    (tmp_path / "rows.json").write_text(json.dumps(llava))
    (tmp_path / "cosmos.toml").write_text(SFT)
    ended = dsreason("sft", "--config", "cosmos.toml", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("What they mean") == 1
    assert "validation.enable was probably meant" in " ".join(ended.stderr.split())
    steps = metrics(tmp_path / "outputs")
    assert [item["step"] for item in steps if "train/loss" in item] == [1, 2]
    assert (tmp_path / "outputs/export/final/model.safetensors").is_file()
    written = json.loads((tmp_path / "outputs/config.json").read_text())["config"]
    assert (written["train"]["global_batch_size"], written["data"]["vision"]["nframes"]) == (4, 4)


@pytest.mark.long
def test_imported_grpo_file_supports_custom_columns(tmp_path: Path) -> None:
    rows = [{"problem": f"{i} + 1?", "solution": f"#### {i + 1}"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "length.py").write_text("def words(completion, sample):\n    return len(completion) % 3\n")
    (tmp_path / "cosmos.toml").write_text(GRPO)
    ended = dsreason("import", "cosmos.toml", "-o", "run.toml", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    ended = dsreason("grpo", "--config", "run.toml", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    steps = [metric for metric in metrics(tmp_path / "outputs") if "reward/mean" in metric]
    assert len(steps) == 2
    assert "reward/gsm8k/mean" in steps[0]


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Write videos and labels in the layout that cosmos-rl's guide describes."""
    write_mixed_rows(tmp_path, 12)
    for folder in ("videos", "metas"):
        (tmp_path / "train" / folder).mkdir(parents=True)
    for number, video in enumerate(sorted(tmp_path.glob("*.mp4"))):
        video.rename(tmp_path / "train/videos" / f"{number}.camera_front_wide_120fov.mp4")
        (tmp_path / "train/metas" / f"{number}.label.json").write_text(
            json.dumps({"weather": "rain", "number": number})
        )
    return tmp_path


def test_data_script_from_guide_works_as_adapter(labelled: Path) -> None:
    page = ROOT / "docs" / "moving-from-cosmos-rl.md"
    (script,) = blocks("python", page=page)
    (labelled / "avha_sft_single_caption.py").write_text(script.text)
    settings = [
        "data.adapter=avha_sft_single_caption.py",
        "data.path=train",
        "data.vision.nframes=4",
        "train.max_steps=1",
    ]
    settings += [
        "data.vision.max_pixels=6272",
        "train.global_batch_size=2",
        "train.precision=fp32",
        "data.validation=0",
    ]
    options = [option for setting in settings for option in ("--set", setting)]
    ended = dsreason("sft", *options, "--output-dir", "outputs", cwd=labelled)
    assert ended.returncode == 0, ended.stderr
    assert metrics(labelled / "outputs")[-1]["step"] == 1
