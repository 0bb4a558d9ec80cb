"""What NCCL needs between machines, in the image and in the Kubernetes manifest."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

LAUNCH = Path(__file__).parents[2] / "launch"


def test_the_image_has_the_libraries_of_rdma_and_compiled_bytecode() -> None:
    text = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ")
    (installed,) = re.findall(r"apt-get install ([^&]*)", text)
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(installed.split())
    calls = re.findall(r"uv pip (?:sync|install) [^&\n]*", text)
    assert len(calls) == 2
    assert all("--compile-bytecode" in call for call in calls)


def test_pods_may_lock_memory_for_rdma_and_share_more_than_64_mib() -> None:
    _, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    (shared,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    assert {"name": shared, "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in pod["volumes"]
