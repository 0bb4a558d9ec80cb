"""The reasoner of Cosmos3: tensor names in its published files, other models in these files, and equality with transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from dsreason.config.schema import SFTConfig
from dsreason.config.schema_lora import LoRAConfig
from dsreason.data.collate import collate, join_parent, pack
from dsreason.data.sources import open_datasets
from dsreason.errors import CheckpointError
from dsreason.families import FAMILIES
from dsreason.models.load import load_model
from dsreason.models.lora import find_adapted_layers
from dsreason.models.policy import Policy
from dsreason.models.processors.loading import open_encoder
from dsreason.models.tiny import build_tiny
from dsreason.rollout.protocol import make_single_turn
from dsreason.train.grpo.rollouts import Rollout, build_training_sample
from tests.integration.rows import write_mixed_rows

FAMILY = FAMILIES["cosmos3_omni"]
NAMES = {
    "layers.3.self_attn.to_q.weight": "model.language_model.layers.3.self_attn.q_proj.weight",
    "layers.3.self_attn.to_out.weight": "model.language_model.layers.3.self_attn.o_proj.weight",
    "layers.3.self_attn.norm_k.weight": "model.language_model.layers.3.self_attn.k_norm.weight",
    "layers.3.mlp.up_proj.weight": "model.language_model.layers.3.mlp.up_proj.weight",
    "embed_tokens.weight": "model.language_model.embed_tokens.weight",
    "norm.weight": "model.language_model.norm.weight",
    "blocks.1.norm1.bias": "model.visual.blocks.1.norm1.bias",
    "blocks.1.attn.qkv.weight": "model.visual.blocks.1.attn.qkv.weight",
    "merger.linear_fc1.weight": "model.visual.merger.linear_fc1.weight",
    "patch_embed.proj.weight": "model.visual.patch_embed.proj.weight",
    "pos_embed.weight": "model.visual.pos_embed.weight",
    "deepstack_merger_list.0.norm.weight": "model.visual.deepstack_merger_list.0.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
"""Published tensor name → name in memory, from the mappings of transformers and vLLM."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("cosmos3_omni", tmp_path_factory.mktemp("models") / "cosmos3")


def test_renaming_tensors_round_trips() -> None:
    for published, in_memory in NAMES.items():
        assert FAMILY.rename(published) == in_memory
        assert FAMILY.to_exported_name(in_memory) == published
        assert FAMILY.rename(in_memory) == in_memory  # folders whose files already use these names


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.self_attn.add_q_proj.weight",
        "layers.0.self_attn.to_add_out.weight",
        "layers.0.self_attn.norm_added_q.weight",
        "layers.0.self_attn.to_q_moe_gen.weight",
        "layers.0.mlp_moe_gen.up_proj.weight",
        "norm_moe_gen.weight",
        "proj_in.weight",
        "time_embedder.linear_1.bias",
        "audio_proj_out.weight",
        "action_modality_embed",
    ],
)
def test_generator_tensors_are_not_loaded(name: str) -> None:
    assert FAMILY.rename(name) is None


def test_unexpected_tensor_in_files_is_rejected(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "more")
    file = tmp_path / "more/model.safetensors"
    save_file(load_file(file) | {"layers.0.self_attn.to_x.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"1 unexpected: .*layers\.0\.self_attn\.to_x\.weight"):
        load_model(tmp_path / "more", dtype=torch.float32)


def test_weights_load_from_published_folder_layout(folder: Path, tmp_path: Path) -> None:
    published = tmp_path / "published"
    shutil.copytree(folder, published, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(folder / "model.safetensors")
    tower = ("blocks", "merger", "patch_embed", "pos_embed", "deepstack_merger_list")
    parts = {"transformer": {}, "vision_encoder": {}, "vae": {"encoder.weight": torch.zeros(2)}}
    for name, tensor in tensors.items():
        parts["vision_encoder" if name.startswith(tower) else "transformer"][name] = tensor
    for name, local in parts.items():
        (published / name).mkdir()
        save_file(local, published / name / "diffusion_pytorch_model.safetensors")
    result, expected = (load_model(item, dtype=torch.float32).state_dict() for item in (published, folder))
    assert all(result[name].equal(expected[name]) for name in expected)


def test_mixed_media_logprobs_match_transformers(folder: Path, tmp_path: Path) -> None:
    """Compare with transformers, one sample at a time: packed rows, padded rows, and an answer that shares its prompt."""
    rows = write_mixed_rows(tmp_path, 4)
    config = SFTConfig.model_validate({"data": {"adapter": "jsonl", "path": str(rows), "vision": {"fps": 4.0}}})
    encoder = open_encoder(folder, dtype=torch.float32, max_length=512, max_length_key="model.max_length")
    samples, _ = open_datasets(config.data)
    encoded = [encoder.encode(samples[i]) for i in range(4)]
    assert any("pixel_values_videos" in item.mm_kwargs for item in encoded)
    from_pretrained = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    expected = []
    for item in encoded:
        inputs = {"input_ids": item.input_ids[None], "mm_token_type_ids": item.mm_token_type_ids[None]}
        with torch.no_grad():
            logits = from_pretrained(**inputs, **item.mm_kwargs).logits[0]
        places = item.loss_mask.nonzero().flatten()
        expected.append(logits.log_softmax(-1)[places - 1, item.input_ids[places]])
    with torch.no_grad():
        model = load_model(folder, dtype=torch.float32)
        policy = Policy(model)
        for batch in (pack(encoded), collate(encoded, pad_id=0)):
            torch.testing.assert_close(policy(batch), torch.cat(expected), rtol=0, atol=5e-6)
        prompt = encoder.encode_prompt(samples[2])
        answers = [
            build_training_sample(Rollout(prompt, make_single_turn(ids, "", (0.0,) * len(ids), "stop", 0), 0.0, {}))
            for ids in ((5, 6, 7), (8, 9))
        ]
        apart = torch.cat([policy(pack([join_parent(item)])) for item in answers])
        torch.testing.assert_close(policy(pack(answers)), apart, rtol=0, atol=5e-6)


def test_adapters_are_added_to_all_layers(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32)
    assert len(find_adapted_layers(model, LoRAConfig(rank=4))) == 2 * 7
