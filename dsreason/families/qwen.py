"""Settings that the families of Qwen's vision-language models share."""

from __future__ import annotations

from dsreason.families.family import Modules, Tokens, TrainedSizes, Vision

TOKENS = Tokens(
    image="<|image_pad|>",
    video="<|video_pad|>",
    media_start="<|vision_start|>",
    media_end="<|vision_end|>",
    turn_start="<|im_start|>",
    turn_end="<|im_end|>",
    padding="<|endoftext|>",
    unused_media=("<|vision_pad|>",),
    others=(
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
        "<|quad_start|>",
        "<|quad_end|>",
    ),
)

MODULES = Modules(
    vision_tower="model.visual",
    head="lm_head",
    patch_embedding="patch_embed",
    vision_blocks="model.visual.blocks",
    merger="merger",
    projector="model.visual.merger",
    norms=("norm", "ln_q"),
    embeddings=("embed_tokens", "pos_embed"),
    text_layers=r"\.language_model\..*\.(q|k|v|o|gate|up|down)_proj$",
    vision_layers=r"\.visual\.(blocks|merger|deepstack_merger_list)\.",
)


def build_vision_defaults(*, bounds_are_per_video: bool) -> Vision:
    """Return the defaults of qwen-vl-utils (`vision_process.py`), with which Qwen's vision-language models were trained."""
    return Vision(
        bounds_are_per_video=bounds_are_per_video,
        fps=2.0,
        min_frames=4,
        max_frames=768,
        max_frame_tokens=768,  # VIDEO_MAX_TOKEN_NUM
        max_video_tokens=115_200,  # 0.9 times MODEL_SEQ_LEN (128,000)
        trained_sizes=TrainedSizes(
            image=(4, 16_384),  # IMAGE_MIN_TOKEN_NUM, IMAGE_MAX_TOKEN_NUM
            frame=(128, 768),  # VIDEO_MIN_TOKEN_NUM, VIDEO_MAX_TOKEN_NUM
            video=115_200,
        ),
    )
