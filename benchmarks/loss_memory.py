"""Peak memory of forward and backward with the chunked loss, relative to full float32 logits.

    python benchmarks/loss_memory.py [--tokens 4096] [--vocabulary 151936] [--hidden 1024] [--device cpu|cuda]

Each side runs in a new process with the same inputs, and reports the memory that forward and backward add at their peak: resident
memory on a CPU (high-water mark, reset before the measurement), `max_memory_allocated` on CUDA. The gradients of the hidden
states and of the output embedding count on both sides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from dsreason.models.logprobs import compute_token_logprobs

GOAL = 0.25


def compute_plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss as in transformers' causal language models: cross entropy of the float32 logits of all tokens."""
    logits = (hidden @ weight.t()).float()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


def compute_chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return -compute_token_logprobs(hidden, weight, targets)[0].sum()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": compute_plain_loss,
    "chunked": compute_chunked_loss,
}


class PeakMemory:
    """Context manager that measures the peak memory of its block, in bytes above the memory in use on entry."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.added = device, 0

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # "5" resets the high-water mark to the current size
            self.before = read_status_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else read_status_bytes("VmHWM")
        self.added = peak - self.before


def read_status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.hidden, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(arguments.vocabulary, arguments.hidden, device=device, dtype=dtype) * 0.02).requires_grad_()
    targets = torch.randint(arguments.vocabulary, (arguments.tokens,), device=device)
    # Start with a small call, so that the libraries' one-time allocations are not counted.
    small = weight.detach()[:64].clone().requires_grad_()
    LOSSES[name](hidden.detach()[:8].clone().requires_grad_(), small, targets[:8] % 64).backward()
    start = time.perf_counter()
    with PeakMemory(device) as memory:
        loss = LOSSES[name](hidden, weight, targets)
        loss.backward()
        value = loss.item()
    seconds = time.perf_counter() - start
    return {"peak_bytes": memory.added, "seconds": seconds, "loss": value, "grad": weight.grad.float().norm().item()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, choices=("float32", "bfloat16"))
    parser.add_argument("--only", choices=LOSSES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments)))
        return
    results = {}
    for name in LOSSES:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
        results[name] = json.loads(output.splitlines()[-1])
        print(
            f"{name:8} peak {results[name]['peak_bytes'] / 2**20:9.1f} MiB  {results[name]['seconds']:7.2f} s  "
            f"loss {results[name]['loss']:.6g}  gradient norm {results[name]['grad']:.6g}",
            flush=True,
        )
    ratio = results["chunked"]["peak_bytes"] / results["plain"]["peak_bytes"]
    settings = f"{arguments.tokens} tokens, vocabulary {arguments.vocabulary}, hidden {arguments.hidden}"
    print(f"peak memory, chunked / plain: {ratio:.3f} (goal {GOAL}; {settings}, {arguments.dtype}, {arguments.device})")


if __name__ == "__main__":
    main()
