"""Checks of everything but the GPUs: compiler, memory, disks, resource limits, video decoding."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dsreason.files.cache import get_cache_dir
from dsreason.files.disk import find_existing
from dsreason.job.leftovers import make_temporary_folder
from dsreason.tools.doctor.finding import (
    DoctorFinding,
    find_last_line,
    report_failure,
    report_pass,
    report_warning,
    run_program,
)

GIB = 1024**3
LEAST_MEMORY, USUAL_MEMORY = 8, 64
LEAST_SHARED = 1
LEAST_DISK, USUAL_DISK = 5, 200
"""Thresholds in GiB. The `USUAL` ones suffice for a model of a few billion parameters, including its checkpoints."""
LEAST_FILES = 4096
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 60


def check_compiler() -> Iterator[DoctorFinding]:
    """Check that a C++ compiler works, because DeepSpeed and vLLM compile some of their code on the first run."""
    compiler_name = os.environ.get("CXX")
    compiler = shutil.which(compiler_name) if compiler_name else next(filter(None, map(shutil.which, COMPILERS)), None)
    cure = "install g++ (Debian: build-essential), or set CXX to a C++ compiler"
    if compiler is None:
        yield report_failure("C++ compiler", f"{compiler_name or ' or '.join(COMPILERS)} was not found", cure)
        return
    with make_temporary_folder() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <vector>\nint main() { return static_cast<int>(std::vector<int>{0}[0]); }\n")
        code, text = run_program([compiler, "-std=c++17", "-o", f"{folder}/probe", str(source)], COMPILE_SECONDS)
    if code:
        yield report_failure("C++ compiler", f"{compiler} cannot compile a test program: {find_last_line(text)}", cure)
    else:
        yield report_pass("C++ compiler", compiler)


def check_memory() -> Iterator[DoctorFinding]:
    from dsreason.monitor.memory import count_available_bytes

    free = count_available_bytes() / GIB
    description = f"{free:.0f} GiB are free for this job ({os.cpu_count()} cores)"
    if free < LEAST_MEMORY:
        yield report_failure(
            "memory",
            description,
            f"at least {LEAST_MEMORY} GiB are needed; stop other programs, or raise the container's memory limit",
        )
    elif free < USUAL_MEMORY:
        cure = "this is enough for tiny models; run `dsreason plan` to see what yours needs"
        yield report_warning("memory", description, cure)
    else:
        yield report_pass("memory", description)
    yield from check_shared_memory(Path("/dev/shm"))


def check_shared_memory(folder: Path) -> Iterator[DoctorFinding]:
    """Check the size of the shared memory that data workers and NCCL use to exchange data."""
    try:
        size = shutil.disk_usage(folder).total / GIB
    except OSError as error:
        yield report_failure("shared memory", f"{folder} is not usable: {error.strerror}", f"mount a tmpfs at {folder}")
        return
    if size < LEAST_SHARED:
        cure = "start the container with --shm-size=16g (Kubernetes: an emptyDir with medium: Memory)"
        yield report_failure(
            "shared memory", f"{folder} has {size * 1024:.0f} MiB, but at least {LEAST_SHARED} GiB is needed", cure
        )
    else:
        yield report_pass("shared memory", f"{folder} has {size:.0f} GiB")


def check_disks() -> Iterator[DoctorFinding]:
    folders = {"outputs": Path("outputs"), "cache": get_cache_dir(), "temporary files": Path(tempfile.gettempdir())}
    hub = os.environ.get("HF_HOME")
    folders["Hub models"] = Path(hub).expanduser() if hub else Path.home() / ".cache" / "huggingface"
    variables = {"cache": "DSREASON_CACHE", "temporary files": "TMPDIR", "Hub models": "HF_HOME"}
    for name, folder in folders.items():
        option = variables.get(name)
        yield check_disk(name, folder, f"set {option} to another folder" if option else "choose another --output-dir")


def check_disk(name: str, folder: Path, remedy: str) -> DoctorFinding:
    name = f"disk: {name}"
    try:
        existing_folder = find_existing(folder.absolute())
        free = shutil.disk_usage(existing_folder).free / GIB
        with tempfile.TemporaryFile(dir=existing_folder) as probe:
            probe.write(b"0" * 4096)
            probe.flush()
    except OSError as error:
        return report_failure(name, f"{folder}: cannot be written ({error.strerror})", remedy)
    description = f"{folder}: {free:.0f} GiB are free"
    if free < LEAST_DISK:
        return report_failure(name, description, f"free some space, or {remedy}")
    if free < USUAL_DISK and name != "disk: temporary files":
        return report_warning(
            name,
            description,
            f"each checkpoint of a model with 7 billion parameters takes 110 GB; free some space, or {remedy}",
        )
    return report_pass(name, description)


def check_limits() -> Iterator[DoctorFinding]:
    max_files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files < LEAST_FILES:
        cure = f"run `ulimit -n {min(65536, hard_limit)}` in the shell that starts the job"
        yield report_warning("open files", f"at most {max_files}", cure)
    else:
        yield report_pass("open files", f"at most {max_files}")
    for limit, name in (
        (resource.RLIMIT_AS, "-v (memory of a process)"),
        (resource.RLIMIT_FSIZE, "-f (size of a file)"),
    ):
        value, _ = resource.getrlimit(limit)
        if value != resource.RLIM_INFINITY:
            yield report_failure(
                "limits",
                f"ulimit {name} is {value / GIB:.1f} GiB",
                "set it to unlimited in the shell that starts the job",
            )


def check_videos() -> Iterator[DoctorFinding]:
    """Check that a short clip can be written and read back."""
    import av
    import numpy as np

    with make_temporary_folder() as folder:
        file = f"{folder}/clip.mp4"
        with av.open(file, "w") as container:
            stream = container.add_stream("mpeg4", rate=4)
            stream.width = stream.height = 64
            for brightness in range(8):
                frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 30 * brightness, np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        with av.open(file) as container:
            brightness_levels = [int(frame.to_ndarray(format="gray").mean()) for frame in container.decode(video=0)]
    is_increasing = (
        len(brightness_levels) == 8 and brightness_levels == sorted(brightness_levels) and brightness_levels[-1] > 150
    )
    if is_increasing:
        yield report_pass("videos", f"PyAV {av.__version__} writes and reads videos")
    else:
        yield report_failure(
            "videos",
            f"the 8 frames of a test clip should become brighter, but their brightness is {brightness_levels}",
            "reinstall PyAV (`make setup`)",
        )
