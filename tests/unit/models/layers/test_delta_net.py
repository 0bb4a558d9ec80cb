"""Delta nets in packed rows, compared with transformers' layer applied to each sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from dsreason.data.types import Segment
from dsreason.families.layer_types import has_delta_nets
from dsreason.models.layers.delta_net import LAYOUT, build_delta_layout, wrap_functions

LAYOUTS = {
    "one sample": [Segment(0, 70)],
    "samples of various lengths": [Segment(0, 3), Segment(3, 64), Segment(67, 65), Segment(132, 1), Segment(133, 130)],
    "a prompt": [Segment(0, 66), Segment(66, 5, parent=0), Segment(71, 0, parent=0), Segment(71, 70, parent=0)],
    "a prompt shorter than the kernel": [Segment(0, 2), Segment(2, 4, parent=0), Segment(6, 9, parent=0)],
    "prompts among samples": [
        Segment(0, 100),
        Segment(100, 7),
        Segment(107, 3, parent=1),
        Segment(110, 8, parent=0),
        Segment(118, 2),
        Segment(120, 4, parent=1),
    ],
}


@pytest.fixture(scope="module")
def layer() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    assert has_delta_nets(config)
    wrap_functions(modeling_qwen3_5.__name__)
    layer = modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        layer.A_log.zero_()
        layer.dt_bias.fill_(-5.0)  # the state forgets little, so that a leak from any sample shows
    return layer


def run_alone(layer: Any, hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Compute each segment without a layout, after the tokens of its parent, if it has one."""
    outputs = []
    for segment in segments:
        parts = [hidden[:, segment.start : segment.end]]
        if segment.parent is not None:
            parent = segments[segment.parent]
            parts.insert(0, hidden[:, parent.start : parent.end])
        if segment.length:
            outputs.append(layer(torch.cat(parts, dim=1))[:, -segment.length :])
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("segments", LAYOUTS.values(), ids=LAYOUTS)
def test_packed_row_matches_samples_run_individually(layer: Any, segments: list[Segment]) -> None:
    random = torch.Generator().manual_seed(1)
    hidden, weights = (torch.randn(1, segments[-1].end, 16, generator=random) for _ in range(2))
    layout = build_delta_layout(segments, layer.conv_kernel_size, torch.device("cpu"))
    results = []
    for run in (lambda inputs: layer(inputs, **{LAYOUT: layout}), lambda inputs: run_alone(layer, inputs, segments)):
        inputs = hidden.clone().requires_grad_()
        output = run(inputs)
        gradients = torch.autograd.grad((output * weights).sum(), [inputs, *layer.parameters()])
        results.append([output.detach(), *gradients])
    for packed, alone in zip(*results, strict=True):
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_row_without_layout_leaks(layer: Any) -> None:
    """Show that transformers needs the layout. If this test fails, its functions heed boundaries by themselves."""
    segments = [Segment(0, 20), Segment(20, 20)]
    hidden = torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(1))
    difference = (layer(hidden) - run_alone(layer, hidden, segments)).abs()[0].amax(1)
    assert difference[:20].max() < 1e-5
    assert difference[20:].min() > 1e-3


def test_segments_with_equal_chunks_form_batches() -> None:
    layout = build_delta_layout(LAYOUTS["prompts among samples"], 4, torch.device("cpu"))
    roots, long_root, children = layout.batches
    assert roots.tokens.tolist() == [list(range(100, 107)), [118, 119, *[124] * 5]]
    assert long_root.tokens.tolist() == [list(range(100))]
    assert children.tokens.shape == (3, 8) and children.parents is not None
    assert children.parents.tolist() == [0, 2, 0]  # the samples of 7, 100 and 7 tokens


def test_convolution_continues_the_prompt() -> None:
    layout = build_delta_layout([Segment(0, 2), Segment(2, 1, parent=0), Segment(3, 2)], 4, torch.device("cpu"))
    assert layout.context.tolist() == [5, 5, 5, 0, 1, 5, 0, 1, 2, 5, 5, 5, 3, 4]  # 5 stands for zeros
    assert layout.places.tolist() == [3, 4, 8, 12, 13]
