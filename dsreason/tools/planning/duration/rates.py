"""Rates of GPUs, and their sources. Edit this file when a card has been measured."""

from __future__ import annotations

from dataclasses import dataclass

from dsreason.monitor.flops import PEAK_TFLOPS, find_peak_flops

GB = 1e9
MEASURED = "measured on an H200, 2026-11-26 (benchmarks/RESULTS.md)"
TRAINED_SHARE = 0.316
"""Share of the peak that a training pass of long rows reached on an H200, recomputation counted."""
INFERENCE_SHARE = 0.5
"""Share of the peak in prefill and in forwards without a backward pass: assumed."""


@dataclass(frozen=True)
class Rates:
    """Rates of one GPU and its host; bytes and FLOPs per second."""

    card: str
    """A name of `PEAK_TFLOPS`."""
    memory: float
    """Bytes of GPU memory read and written."""
    to_host: float = 55 * GB
    """Copies to pinned memory and back, each way."""
    between_gpus: float = 360 * GB
    """Sent by each GPU to the others of its host."""
    update: float = 660 * GB
    """Bytes of optimizer state per second of an optimizer step on the GPU."""
    host_update: float = 60 * GB
    """The same of a host whose GPUs' optimizer state is offloaded, shared by them."""
    sync: float = 7.8 * GB
    """Weights into vLLM, checked."""
    block_seconds: float = 0.0096
    """Host time of a decoder layer or vision block per micro-batch: forward, recomputation and backward under ZeRO-3."""
    decode_seconds: float = 0.0047
    """Host time of a decoded token, of all sequences together."""
    wake_seconds: float = 0.3
    """Seconds to wake vLLM and put it to sleep again."""
    source: str = "published peak and memory; the rest as " + MEASURED

    @property
    def peak(self) -> float:
        """Dense bf16 FLOP/s of the data sheet."""
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
"""Rates by the name that `--card` takes. Memory and links between GPUs are those of NVIDIA's data sheets, links at 80 %."""


def find_card(device_name: str, gpu_memory: float) -> str:
    """Return the card that a local GPU is, or one of that memory (GB)."""
    if (peak := find_peak_flops(device_name)) is not None:
        known_rates = {key: rates for key, rates in CARDS.items() if rates.peak == peak and rates.card in device_name}
        if known_rates:
            return next(iter(known_rates))
    if gpu_memory > 150:
        return "b200"
    return "h200" if gpu_memory > 100 else "h100" if gpu_memory > 50 else "l40s"
