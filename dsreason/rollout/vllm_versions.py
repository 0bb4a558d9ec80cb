"""Workarounds for specific versions of vLLM; all other code is the same for all versions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsreason.data.media_plan import convert_video_metadata


def read_weights_beside_config(path: Path) -> None:
    """Make vLLM read Cosmos3's weights from the folder with config.json, as in exports, instead of only from subfolders."""
    from vllm.model_executor.models.cosmos3 import Cosmos3ForConditionalGeneration
    from vllm.model_executor.models.cosmos3_edge import Cosmos3EdgeForConditionalGeneration

    if next(path.glob("*.safetensors"), None) is not None:
        Cosmos3ForConditionalGeneration.allow_patterns_overrides = None
        Cosmos3EdgeForConditionalGeneration.allow_patterns_overrides = None


def repack_experts(layers: Iterable[Any]) -> None:
    """Convert the weights of expert layers, which have just been reloaded, to the layout that vLLM's kernel on a CPU reads.

    vLLM 0.32 does that only when it loads the layers for the first time. After a reload, the kernel would take the values for
    other rows, without an error, because the layouts have the same shape.
    """
    for layer in layers:
        if layer.w13_weight.is_cpu and hasattr(layer.quant_method, "moe_kernel"):
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def keep_video_times() -> None:
    """Make vLLM 0.26 use the frame times of videos for Qwen2.5-VL; otherwise, vLLM would assume 24 frames per second.

    vLLM 0.32 uses the times itself. The positions of a video's tokens, and of all later tokens, depend on the times.
    """
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLMultiModalProcessor, Qwen2_5_VLProcessingInfo
    from vllm.model_executor.models.qwen2_vl import Qwen2VLMultiModalDataParser

    if "get_data_parser" in vars(Qwen2_5_VLProcessingInfo):
        return
    call = Qwen2_5_VLMultiModalProcessor._call_hf_processor

    class Parser(Qwen2VLMultiModalDataParser):
        def _parse_video_data(self, data: Any) -> Any:
            # The dummy videos with which vLLM profiles its memory have no timestamps.
            self.video_needs_metadata = isinstance(data, list) and all(isinstance(video, tuple) for video in data)
            return super()._parse_video_data(data)

    def get_data_parser(self: Any) -> Parser:
        merge_size = self.get_hf_config().vision_config.spatial_merge_size
        return Parser(merge_size, expected_hidden_size=self._get_expected_hidden_size())

    def call_with_times(self: Any, prompt: str, mm_data: dict[str, Any], mm_kwargs: Any, tok_kwargs: Any) -> Any:
        videos = mm_data.get("videos")
        if videos and isinstance(videos[0], tuple):
            times = [convert_video_metadata(metadata) for _, metadata in videos]
            mm_data = {**mm_data, "videos": [frames for frames, _ in videos], "video_metadata": times}
        return call(self, prompt, mm_data, mm_kwargs, tok_kwargs)

    Qwen2_5_VLProcessingInfo.get_data_parser = get_data_parser
    Qwen2_5_VLMultiModalProcessor._call_hf_processor = call_with_times
