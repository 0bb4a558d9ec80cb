"""dsreason's positions compared with a real vLLM engine: the positions are equal, and so are the log-probabilities for video.

One engine per family answers all cases. The tiny models' attention is sharpened, because a wrong position would otherwise have
little effect.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_on_ranks

pytestmark = pytest.mark.integration

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"

# Each case has a text, the sizes (height, width) of the images, and (frames, frames per second) of the videos.
CASES: dict[str, tuple[str, list[tuple[int, int]], list[tuple[int, float]]]] = {
    "text": ("which one falls?", [], []),
    "image": (f"{IMAGE}colour?", [(64, 128)], []),
    "three images": (f"{IMAGE} or {IMAGE}{IMAGE}?", [(64, 64), (128, 64), (64, 192)], []),
    "video at 0.5 fps": (f"{VIDEO}left or right?", [], [(6, 0.5)]),
    "video at 1 fps": (f"{VIDEO}left or right?", [], [(8, 1.0)]),
    "video at 3 fps": (f"{VIDEO}left or right?", [], [(30, 3.0)]),
    "video at 4 fps": (f"{VIDEO}left or right?", [], [(8, 4.0)]),
    "video at 7 fps": (f"{VIDEO}left or right?", [], [(16, 7.0)]),
    "video at 29.97 fps": (f"{VIDEO}left or right?", [], [(30, 29.97)]),
    "two videos": (f"{VIDEO}then{VIDEO}same?", [], [(8, 1.0), (6, 7.5)]),
    "image, video": (f"{IMAGE}and{VIDEO}same?", [(128, 64)], [(4, 2.0)]),
    "video, image, video, image": (
        f"{VIDEO}{IMAGE}{VIDEO}and{IMAGE}",
        [(64, 64), (128, 128)],
        [(4, 1.0), (4, 1.7)],
    ),
}
ROUNDED = "video at 7 fps"  # 2/7 s rounded to bfloat16 moves the eighth group of frames from position 4 to 3
VIDEOS = ("video at 1 fps", "video at 4 fps")
BATCH = ("text", "video, image, video, image", "image, video", "video at 4 fps", "image")


def sharpened_tiny(family: str, folder: Path) -> Path:
    """Create a tiny model whose attention depends strongly on positions, because its queries and keys are several times as
    long."""
    from safetensors.torch import load_file, save_file

    from dsreason.models.tiny import build_tiny

    build_tiny(family, folder)
    tensors = load_file(folder / "model.safetensors")
    ending = "_norm.weight" if family == "qwen3_vl" else "_proj.weight"
    for name in tensors:
        if name.endswith((f"q{ending}", f"k{ending}")):
            tensors[name] = tensors[name] * 6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build_case(name: str) -> tuple[str, list[np.ndarray], list[tuple[np.ndarray, dict[str, Any]]]]:
    text, sizes, clips = CASES[name]
    random = np.random.default_rng(len(name))
    images = [random.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in sizes]
    videos = []
    for frames, fps in clips:
        metadata = {
            "fps": fps,
            "total_num_frames": frames,
            "duration": frames / fps,
            "frames_indices": list(range(frames)),
        }
        videos.append((random.integers(0, 256, (frames, 64, 96, 3), dtype=np.uint8), metadata))
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\nthe blue one", images, videos


def encode(processor: Any, name: str) -> dict[str, torch.Tensor]:
    text, images, videos = build_case(name)
    media: dict[str, Any] = {"images": images} if images else {}
    if videos:
        media |= {"videos": [video for video, _ in videos], "video_metadata": [metadata for _, metadata in videos]}
        media["do_sample_frames"] = False
    encoded = processor(text=[text], **media, return_tensors="pt")
    return {key: value for key, value in encoded.items() if isinstance(value, torch.Tensor)}


def logprobs(model: torch.nn.Module, inputs: dict[str, torch.Tensor], positions: torch.Tensor | None) -> np.ndarray:
    """Return the log-probability of each token after the first from the trainer's forward pass.

    With `positions` = None, the model computes them.
    """
    with torch.no_grad():
        logits = model(**inputs, position_ids=positions).logits
    return logits.log_softmax(-1)[0, :-1].gather(1, inputs["input_ids"][0, 1:, None])[:, 0].numpy()


def padded_positions(model: torch.nn.Module, encoded: list[dict[str, torch.Tensor]], side: str) -> list[np.ndarray]:
    """Call the patched `get_rope_index` on a padded batch; for each row, return the positions of its tokens, and the delta
    last."""
    length = max(inputs["input_ids"].shape[1] for inputs in encoded)
    rows: dict[str, list[torch.Tensor]] = {"input_ids": [], "mm_token_type_ids": [], "attention_mask": []}
    for inputs in encoded:
        missing = length - inputs["input_ids"].shape[1]
        padding = (missing, 0) if side == "left" else (0, missing)
        for key, padded in rows.items():
            padded.append(torch.nn.functional.pad(inputs[key][0], padding))
    grids = {
        key: torch.cat([inputs[key] for inputs in encoded if key in inputs])
        for key in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        if any(key in inputs for inputs in encoded)
    }
    batch = {key: torch.stack(padded) for key, padded in rows.items()}
    positions, deltas = model.model.get_rope_index(**batch, **grids)
    assert deltas.shape == (len(encoded), 1)
    return [
        np.append(positions[:, row, remaining].numpy(), np.full((3, 1), deltas[row].item()), axis=1)
        for row, remaining in enumerate(batch["attention_mask"].bool())
    ]


def compare(folder: str) -> dict[str, Any]:
    """Return the results of the trainer and of the engine.

    Runs in a separate process, because vLLM reads its environment only once.
    """
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    from dsreason.families import get_family
    from dsreason.models.load import load_model
    from dsreason.models.mrope import compute_position_ids
    from dsreason.models.processors.loading import load_processor
    from tests.positions import patch_positions

    processor = load_processor(Path(folder))
    model = load_model(Path(folder), dtype=torch.float32).eval()
    patch_positions(model)
    family = get_family(model.config.model_type)
    result: dict[str, Any] = {"ours": {}, "logprobs": {}, "transformers": {}, "padded": {}}
    for name in CASES:
        inputs = encode(processor, name)
        kinds = inputs["mm_token_type_ids"][0]
        result["ours"][name] = compute_position_ids(family.grids, kinds, inputs, model.config).numpy()
        if name in VIDEOS:
            from_numpy = torch.from_numpy(result["ours"][name])[:, None]
            result["logprobs"][name] = [logprobs(model, inputs, from_numpy), logprobs(model, inputs, None)]
            del model.model.get_rope_index  # removes the override from the instance
            result["transformers"][name] = logprobs(model, inputs, None)
            patch_positions(model)
    encoded = [encode(processor, name) for name in BATCH]
    result["padded"] = {side: padded_positions(model, encoded, side) for side in ("left", "right")}
    result["generated"] = generate(model, processor)
    inputs = encode(processor, ROUNDED)
    model.config.dtype = torch.bfloat16
    result["ours bfloat16"] = compute_position_ids(
        family.grids, inputs["mm_token_type_ids"][0], inputs, model.config
    ).numpy()
    result["vllm bfloat16"] = ask_vllm(folder, "bfloat16", [ROUNDED])["vllm"][ROUNDED]
    return result | ask_vllm(folder, "float32", list(CASES))


def generate(model: torch.nn.Module, processor: Any) -> dict[str, list[int]]:
    """Return the greedy completions of the video cases, computed by `generate` of transformers on the patched model."""
    result = {}
    for name in VIDEOS:
        inputs = encode(processor, name)
        ids = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=-1)
        result[name] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return result


def ask_vllm(folder: str, dtype: str, cases: list[str]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    from dsreason.rollout.vllm_versions import keep_video_times

    keep_video_times()
    engine = LLM(
        folder,
        dtype=dtype,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 3, "video": 2},
        seed=0,
    )
    calls: list[tuple[np.ndarray, int]] = []

    def record(model: torch.nn.Module) -> None:
        original = model.get_mrope_input_positions

        def recording(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, int]:
            positions, delta = original(*args, **kwargs)
            calls.append((positions.numpy().copy(), delta))
            return positions, delta

        model.get_mrope_input_positions = recording

    engine.apply_model(record)
    sampling = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0, ignore_eos=True)
    result: dict[str, Any] = {"vllm": {}, "vllm_deltas": {}, "vllm_logprobs": {}, "vllm_generated": {}}
    for name in cases:
        text, images, videos = build_case(name)
        media: dict[str, Any] = {"image": images} if images else {}
        if videos:
            media["video"] = [(video, {**metadata, "do_sample_frames": False}) for video, metadata in videos]
        calls.clear()
        (answer,) = engine.generate({"prompt": text, "multi_modal_data": media}, sampling, use_tqdm=False)
        ((result["vllm"][name], result["vllm_deltas"][name]),) = calls
        result["vllm_logprobs"][name] = np.array(
            [next(iter(token.values())).logprob for token in answer.prompt_logprobs[1:]]
        )
        result["vllm_generated"][name] = list(answer.outputs[0].token_ids)
    return result


@pytest.fixture(scope="module", params=FAMILIES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = sharpened_tiny(request.param, tmp_path_factory.mktemp("positions") / request.param)
    return run_on_ranks(compare, 1, str(folder))[0] | {"family": request.param}


@pytest.mark.parametrize("case", CASES)
def test_positions_match_vllm(both: dict[str, Any], case: str) -> None:
    np.testing.assert_array_equal(both["ours"][case], both["vllm"][case])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_match_vllm_positions_and_deltas(both: dict[str, Any], side: str) -> None:
    for name, row in zip(BATCH, both["padded"][side], strict=True):
        np.testing.assert_array_equal(row[:, :-1], both["vllm"][name])
        assert row[0, -1] == both["vllm_deltas"][name]


@pytest.mark.parametrize("case", VIDEOS)
def test_video_logprobs_match_vllm(both: dict[str, Any], case: str) -> None:
    value, by_forward = both["logprobs"][case]
    np.testing.assert_allclose(value, both["vllm_logprobs"][case], atol=1e-4, rtol=0)
    np.testing.assert_allclose(by_forward, both["vllm_logprobs"][case], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", VIDEOS)
def test_patched_generate_matches_vllm(both: dict[str, Any], case: str) -> None:
    assert both["generated"][case] == both["vllm_generated"][case]


@pytest.mark.parametrize("case", VIDEOS)
def test_unpatched_transformers_positions_are_wrong(both: dict[str, Any], case: str) -> None:
    """Show that the positions of transformers are wrong for Qwen2.5-VL.

    If this test fails, transformers has been fixed; the test above still applies.
    """
    if both["family"] == "qwen3_vl":
        pytest.skip("transformers is right for Qwen3-VL")
    assert np.abs(both["transformers"][case] - both["vllm_logprobs"][case]).max() > 0.01


def test_bfloat16_positions_match_vllm(both: dict[str, Any]) -> None:
    """Check rounding: vLLM rounds the seconds between frames to the model's type, and so does dsreason if the config has that
    type."""
    np.testing.assert_array_equal(both["ours bfloat16"], both["vllm bfloat16"])
    differs = bool((both["vllm bfloat16"] != both["vllm"][ROUNDED]).any())
    assert differs == (both["family"] == "qwen2_5_vl")
