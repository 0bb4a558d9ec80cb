"""The table of a profile, built from events with fixed times."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dsreason.monitor.profile_table import (
    Timeline,
    TraceEvent,
    read_trace,
    render_report,
    split_nested,
    sum_operators,
    sum_phases,
    sum_union,
    sum_waits,
)
from dsreason.phases import PREFIX

PHASES = [
    TraceEvent(f"{PREFIX}step 3", "user_annotation", 0.0, 10.0),
    TraceEvent(f"{PREFIX}forward", "user_annotation", 1.0, 4.0),
    TraceEvent(f"{PREFIX}backward", "user_annotation", 4.0, 9.0),
]
OPERATORS = [
    TraceEvent("aten::linear", "cpu_op", 1.0, 3.0),
    TraceEvent("aten::mm", "cpu_op", 1.5, 2.0),
    TraceEvent("aten::mm", "cpu_op", 2.0, 2.75),
    TraceEvent("aten::item", "cpu_op", 5.0, 6.0),
    TraceEvent("aten::add", "cpu_op", 5.5, 7.0, thread=1),
]
CALLS = [
    TraceEvent("cudaLaunchKernel", "cuda_runtime", 1.6, 1.7, correlation=1),
    TraceEvent("cudaLaunchKernel", "cuda_runtime", 3.9, 4.0, correlation=2),
    TraceEvent("cudaLaunchKernel", "cuda_runtime", 4.1, 4.2, correlation=3),
    TraceEvent("cudaStreamSynchronize", "cuda_runtime", 5.25, 5.75, correlation=4),
    TraceEvent("cudaDeviceSynchronize", "cuda_runtime", 9.25, 9.5, correlation=5),
]
KERNELS = [
    TraceEvent("gemm", "kernel", 2.0, 5.0, thread=7, correlation=1),
    TraceEvent("gemm", "kernel", 4.0, 6.0, thread=8, correlation=2),
    TraceEvent("copy", "gpu_memcpy", 8.0, 8.5, thread=7, correlation=3),
]
EVENTS = [*PHASES, *OPERATORS, *CALLS, *KERNELS]


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0.0),
        ([(1.0, 2.0)], 1.0),
        ([(4.0, 6.0), (1.0, 2.0)], 3.0),
        ([(1.0, 5.0), (2.0, 3.0), (4.0, 7.0)], 6.0),  # their sum is 8
    ],
)
def test_union_counts_overlaps_once(intervals, expected):
    assert sum_union(intervals) == expected


def test_nested_blocks_are_cut_by_the_innermost():
    names = [(start, end, name.removeprefix(PREFIX)) for start, end, name in split_nested(PHASES)]
    assert names == [
        (0.0, 1.0, "step 3"),
        (1.0, 4.0, "forward"),
        (4.0, 9.0, "backward"),
        (9.0, 10.0, "step 3"),
    ]


@pytest.mark.parametrize(
    ("moment", "name"), [(-1.0, None), (0.5, "step 3"), (4.0, "backward"), (9.5, "step 3"), (10.0, None)]
)
def test_timeline_finds_the_innermost_block(moment, name):
    assert Timeline(PHASES).find(moment) == (None if name is None else PREFIX + name)


def test_phases_sum_host_wait_and_gpu_time():
    totals = {name.removeprefix(PREFIX): phase for name, phase in sum_phases(EVENTS, Timeline(PHASES)).items()}
    assert {name: phase.host_seconds for name, phase in totals.items()} == {
        "step 3": 2.0,
        "forward": 3.0,
        "backward": 5.0,
    }
    # The second kernel runs during the backward pass, but the forward pass launched it.
    assert {name: sum_union(phase.gpu) for name, phase in totals.items()} == {
        "step 3": 0.0,
        "forward": 4.0,
        "backward": 0.5,
    }
    assert {name: (phase.waits, phase.wait_seconds) for name, phase in totals.items()} == {
        "step 3": (1, 0.25),
        "forward": (0, 0.0),
        "backward": (1, 0.5),
    }


def test_operator_time_excludes_inner_operators():
    assert sum_operators(EVENTS) == [
        ("aten::add", 1.5, 1),
        ("aten::mm", 1.25, 2),
        ("aten::item", 1.0, 1),
        ("aten::linear", 0.75, 1),
    ]


def test_waits_are_attributed_to_their_operator():
    assert sum_waits(EVENTS) == [
        ("cudaStreamSynchronize in aten::item", 0.5, 1),
        ("cudaDeviceSynchronize in Python", 0.25, 1),
    ]


@pytest.mark.parametrize(
    ("copy", "waits"),
    [
        ("Memcpy DtoD (Device -> Device)", 0),
        ("Memcpy HtoD (Pinned -> Device)", 0),
        ("Memcpy DtoH (Device -> Pageable)", 1),
        ("Memcpy HtoD (Pageable -> Device)", 1),
    ],
)
def test_unpinned_asynchronous_copy_counts_as_wait(copy, waits):
    call = TraceEvent("cudaMemcpyAsync", "cuda_runtime", 2.0, 2.5, correlation=1)
    events = [*PHASES, call, TraceEvent(copy, "gpu_memcpy", 2.25, 2.75, thread=7, correlation=1)]
    assert sum(count for _, _, count in sum_waits(events)) == waits
    assert sum_phases(events, Timeline(PHASES))[f"{PREFIX}forward"].waits == waits


def test_long_kernel_name_keeps_numbers_readable():
    kernel = TraceEvent("void at::native::elementwise_kernel<" + "128, " * 100, "kernel", 2.0, 5.0, thread=7)
    lines = render_report([*PHASES, kernel]).splitlines()
    [line] = [line for line in lines if "elementwise" in line]
    assert line.startswith("│  3.0000 │     1 │ void at::native")
    assert len(line) == 110


def test_report_states_busy_time_and_lists_kernels():
    lines = render_report(EVENTS).splitlines()
    assert lines[0] == ("step 3: 10.000 s, GPU busy 4.500 s (45%), 2 waits for the GPU (0.750 s), 3 kernels and copies")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert ["forward", "3.000", "30%", "4.000", "0", "0.000"] in cells
    assert ["outside all phases", "2.000", "20%", "0.000", "1", "0.250"] in cells
    assert ["5.0000", "2", "gemm"] in cells


def test_report_without_gpu_omits_gpu_tables():
    report = render_report([*PHASES, *OPERATORS])
    assert report.splitlines()[0] == "step 3: 10.000 s"
    assert "aten::linear" in report
    assert "GPU kernels" not in report


def test_trace_events_are_converted_to_seconds(tmp_path: Path):
    entries = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "kernel", "name": "[gemm]", "ts": 2e6, "dur": 5e5, "tid": 7, "args": {"correlation": 9}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1e6, "dur": 1e6, "tid": 1, "args": {"External id": 3}},
        {"ph": "X", "cat": "Trace", "name": "Profiler", "ts": 1e6, "dur": 1e6, "tid": "a", "args": {}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1e6, "id": 9, "tid": 1},
    ]
    file = tmp_path / "step_1.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"deviceProperties": [{"id": 0}], "traceEvents": entries}).encode()))
    assert read_trace(file) == [
        TraceEvent("[gemm]", "kernel", 2.0, 2.5, 7, 9),
        TraceEvent("aten::mm", "cpu_op", 1.0, 2.0, 1, None),
    ]
