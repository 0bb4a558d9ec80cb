"""NCCL's requirements for several machines, in the container image and in the Kubernetes manifest."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[2] / "launch"


def test_image_has_rdma_libraries_and_compiled_bytecode() -> None:
    text = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ")
    (installed,) = re.findall(r"apt-get install ([^&]*)", text)
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(installed.split())
    calls = re.findall(r"uv pip (?:sync|install) [^&\n]*", text)
    assert len(calls) == 2
    assert all("--compile-bytecode" in call for call in calls)


@pytest.mark.parametrize(
    ("requirements", "extras", "expected"),
    [
        ("launch/requirements/cuda.txt", "", ["cuda.txt"]),
        ("launch/requirements/cuda.txt", "wandb", ["cuda.txt", "wandb.txt"]),
        ("launch/requirements/oldest/cuda.txt", "wandb similarity", ["cuda.txt", "wandb.txt", "similarity.txt"]),
    ],
)
def test_image_installs_requested_extras(requirements: str, extras: str, expected: list[str]) -> None:
    text = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^RUN /opt/uv/bin/uv pip sync (.*)$", text, re.MULTILINE)
    environment = {"PATH": os.environ["PATH"], "REQUIREMENTS": requirements, "EXTRAS": extras}
    completed = subprocess.run(
        ["sh", "-c", f"echo {command}"], env=environment, capture_output=True, text=True, check=True
    )
    files = [Path(word) for word in completed.stdout.split() if not word.startswith("--")]
    assert [file.name for file in files] == expected
    assert all(file.parent == Path(requirements).parent and (LAUNCH.parent / file).is_file() for file in files)


def test_image_accepts_custom_requirements_file() -> None:
    text = (LAUNCH / "Dockerfile").read_text()
    before, _, _ = text.partition("RUN /opt/uv/bin/uv pip sync")
    assert "COPY ${REQUIREMENTS} ${REQUIREMENTS}\n" in before


def test_uv_is_on_path_in_image() -> None:
    assert "ln -s /opt/uv/bin/uv /usr/local/bin/uv" in (LAUNCH / "Dockerfile").read_text()


def test_pods_may_lock_and_share_enough_memory() -> None:
    _, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    (shared,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    assert {"name": shared, "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in pod["volumes"]
