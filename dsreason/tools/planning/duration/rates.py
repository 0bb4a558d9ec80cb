"""Rates of GPU models, and the sources of the numbers. Edit this file when you have measured a card."""

from __future__ import annotations

from dataclasses import dataclass

from dsreason.monitor.flops import PEAK_TFLOPS, find_peak_flops

GB = 1e9
MEASURED = "measured on an H200, 2026-11-26 (benchmarks/RESULTS.md)"
TRAINED_SHARE = 0.316
"""Share of the peak FLOP/s that training on long rows reached on an H200; recomputation counts as work."""
INFERENCE_SHARE = 0.5
"""Assumed share of the peak FLOP/s in prefill and in forward passes without a backward pass."""


@dataclass(frozen=True)
class Rates:
    """Rates of one GPU and its host, in bytes or FLOPs per second."""

    card: str
    """Name of the card, a key of `PEAK_TFLOPS`."""
    memory: float
    """Bandwidth of the GPU memory."""
    to_host: float = 55 * GB
    """Bandwidth of copies between the GPU and pinned host memory, in each direction."""
    between_gpus: float = 360 * GB
    """Bandwidth from each GPU to the other GPUs of its host."""
    update: float = 660 * GB
    """Bytes of optimizer state that an optimizer step on the GPU processes per second."""
    host_update: float = 60 * GB
    """The same rate for optimizer state that is offloaded to the host; all GPUs of the host share it."""
    sync: float = 7.8 * GB
    """Rate of the weight sync to vLLM, including its check."""
    block_seconds: float = 0.0096
    """Seconds that the host needs per micro-batch for the forward, recomputation and backward of one block under ZeRO-3."""
    decode_seconds: float = 0.0047
    """Seconds that the host needs per decoding step, which appends one token to each sequence."""
    wake_seconds: float = 0.3
    """Seconds to wake vLLM and put it to sleep again."""
    source: str = "peak and memory bandwidth as published; the rest as " + MEASURED

    @property
    def peak(self) -> float:
        """Dense bf16 FLOP/s according to the data sheet."""
        return PEAK_TFLOPS[self.card] * 1e12

    @property
    def training(self) -> float:
        return TRAINED_SHARE * self.peak

    @property
    def inference(self) -> float:
        return INFERENCE_SHARE * self.peak


H200 = Rates("H200", memory=4200 * GB, source=MEASURED)
CARDS = {
    "h200": H200,
    "h100": Rates("H100", memory=3350 * GB),
    "a100": Rates("A100", memory=2039 * GB, to_host=25 * GB, between_gpus=240 * GB),
    "b200": Rates("B200", memory=8000 * GB, between_gpus=720 * GB),
    "l40s": Rates("L40S", memory=864 * GB, to_host=25 * GB, between_gpus=25 * GB),
}
"""Value of `--card` → rates. The bandwidths of memory and of links between GPUs are from NVIDIA's data sheets; links are assumed
to reach 80 % of theirs."""


def find_card(device_name: str, gpu_memory: float) -> str:
    """Return the key in `CARDS` for a local GPU or, if its model is unknown, for a card with a similar amount of memory (GB)."""
    if (peak := find_peak_flops(device_name)) is not None:
        known_rates = {key: rates for key, rates in CARDS.items() if rates.peak == peak and rates.card in device_name}
        if known_rates:
            return next(iter(known_rates))
    if gpu_memory > 150:
        return "b200"
    return "h200" if gpu_memory > 100 else "h100" if gpu_memory > 50 else "l40s"
