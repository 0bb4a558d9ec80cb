"""Checks of environment variables that affect runs, and of access tokens. Only a token's presence is reported, not its value."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from dsreason.tools.doctor.finding import DoctorFinding, report_failure, report_pass, report_warning

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}
"""Easily forgotten debugging variable → the value with which it slows down training."""
TOKENS = {
    "Hugging Face": ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    "Weights & Biases": ("WANDB_API_KEY",),
    "S3": ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "PROD_S3_CHECKPOINT_ACCESS_KEY_ID"),
    "reward server": ("REMOTE_REWARD_TOKEN", "WFM_REWARD_TOKEN"),
}
STORED = {
    "Hugging Face": ("~/.cache/huggingface/token",),
    "Weights & Biases": ("~/.netrc",),
    "S3": ("~/.aws/credentials",),
}
"""Service → files in which its client stores credentials."""
NEEDED_FOR = {
    "Hugging Face": "gated models and uploads",
    "Weights & Biases": "monitor.wandb",
    "S3": "s3:// URIs",
    "reward server": "rewards from a server",
}


def check_variables(variables: Mapping[str, str] = os.environ) -> Iterator[DoctorFinding]:
    problems = list(find_suspicious(variables))
    yield from problems or [
        report_pass("environment", "no problems with variables of the allocator, ranks, Hub, NCCL, vLLM and proxies")
    ]


def find_suspicious(variables: Mapping[str, str]) -> Iterator[DoctorFinding]:
    for name in ALLOCATOR:
        if "expandable_segments:true" in variables.get(name, "").lower().replace(" ", ""):
            cure = f"unset {name}, because vLLM's sleep mode cannot release such memory"
            yield report_failure("allocator", f"{name} has expandable_segments:True", cure)
    if ranks := [name for name in RANK_VARIABLES if name in variables]:
        yield report_failure(
            "environment", f"this shell sets {', '.join(ranks)}, so commands act as ranks of a job", "unset them"
        )
    if offline := [name for name in OFFLINE if variables.get(name, "0").lower() not in ("", "0", "false", "no")]:
        yield report_warning(
            "environment",
            f"this shell sets {' and '.join(offline)}, so nothing is downloaded",
            "unset it if models have to be downloaded",
        )
    for name, value in SLOW.items():
        if variables.get(name) == value:
            yield report_warning(
                "environment", f"{name}={value} slows down training", "unset it, unless you are debugging"
            )
    if vllm_variables := sorted(name for name in variables if name.startswith("VLLM_")):
        yield report_warning(
            "environment",
            f"this shell sets {', '.join(vllm_variables)}, so vLLM may behave differently than in our tests",
            "unset what you do not need",
        )
    if variables.get("PYTHONPATH"):
        yield report_warning(
            "environment",
            "PYTHONPATH is set, so its packages may hide the installed ones",
            "unset it if you do not need it",
        )
    proxies = sorted(name for name in variables if name.lower() in ("http_proxy", "https_proxy", "all_proxy"))
    if proxies and not any(name in variables for name in ("NO_PROXY", "no_proxy")):
        cure = "set NO_PROXY to localhost,127.0.0.1 and your reward and teacher servers"
        yield report_warning("environment", f"this shell sets {', '.join(proxies)}, but not NO_PROXY", cure)


def check_tokens(variables: Mapping[str, str] = os.environ) -> Iterator[DoctorFinding]:
    """Report for each service whether a token is present in a variable or file. The token's validity is not checked."""
    for name, token_variables in TOKENS.items():
        credentials = [variable for variable in token_variables if variables.get(variable)]
        credentials += [path for path in STORED.get(name, ()) if is_file(Path(path))]
        if credentials:
            yield report_pass(f"token: {name}", f"present ({', '.join(credentials)})")
        else:
            yield report_pass(f"token: {name}", f"absent; for {NEEDED_FOR[name]}, set {' or '.join(token_variables)}")


def is_file(path: Path) -> bool:
    try:
        return path.expanduser().is_file()
    except (OSError, RuntimeError):  # RuntimeError: the home folder is unknown
        return False
