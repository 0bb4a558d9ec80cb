"""Entry point for the `dsreason` command and for `python -m dsreason`, which torchrun and deepspeed start.

A Python file that happens to lie next to the user's data must not run just because a library imports a module of that name.
This file therefore removes the current folder from the import path before it imports anything else. It also prevents programs and
shared libraries from being looked up in that folder. `dsreason.user_code` finds the code named in the configuration.
Two things cannot be protected from here: whatever Python itself loads before this file runs (`contextlib`, `warnings`, and
anything found through an empty entry in PYTHONPATH or LD_LIBRARY_PATH), and the launchers' own processes. To protect the
latter, set PYTHONSAFEPATH in the environment of `torchrun` or `deepspeed`.
"""

import os
import sys

SEARCHED = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "COMPILER_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
"""Variables that list folders. An empty entry, as in `LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/x`, means the current folder."""


def remove_current_folder() -> None:
    """Remove the current folder from the import path of this process and its children, unless PYTHONPATH contains it."""
    try:
        here = os.getcwd()
    except OSError:  # the folder was deleted, so Python could not put it on the path either
        return
    variable = os.environ.get("PYTHONPATH", "")
    entries = variable.split(os.pathsep) if variable else []
    if entries[:1] == [here] and os.environ.get("CROSS_SIZE", "1") != "1":
        entries[0] = ""  # `deepspeed` prepends the current folder when it starts several hosts
    usable = [path for path in entries if path]
    path = sys.path[1:] if sys.path[0] in ("", here) else sys.path  # the entry is inserted by `-m` and `-c`
    if usable != entries:
        # An empty entry, as in `PYTHONPATH=$PYTHONPATH:/x`, means the current folder, but is there by accident.
        path = [entry for entry in path if entry != here]
    package_parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if here in map(os.path.abspath, usable) or (here == package_parent and here not in path):
        return  # a checkout that is not installed can only run from its own folder
    sys.path[:] = path
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(usable)
    os.environ.setdefault("PYTHONSAFEPATH", "dsreason")  # any value works; this one shows reward workers who set it


def remove_empty_entries() -> None:
    """Keep child processes from looking for programs, shared libraries and headers in the current folder."""
    for name in SEARCHED:
        entries = os.environ.get(name, "").split(os.pathsep)
        if usable := [path for path in entries if path]:
            os.environ[name] = os.pathsep.join(usable)
        else:
            os.environ.pop(name, None)
    # OpenCV, which vLLM imports, prepends a folder and a colon, which creates an empty entry if the variable is unset. The
    # package folder is a safe default, because it contains no shared libraries.
    os.environ.setdefault("LD_LIBRARY_PATH", os.path.dirname(os.path.abspath(__file__)))


remove_current_folder()
remove_empty_entries()

import signal  # noqa: E402


def end_at_signals() -> None:
    """End the process without a traceback if a signal arrives during the imports, which take a second.

    `signals.end_at_signals` replaces these handlers. A rank ends silently, because its launcher reports the signal.
    """

    def end(number: int, frame: object) -> None:
        try:
            os.write(2, f"stopped by {signal.Signals(number).name}\n".encode())
        finally:
            os._exit(75)  # the exit code of `Stopped`

    if "LOCAL_RANK" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # SIGHUP is ignored under `nohup`, SIGINT behind `&` in a script.
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


end_at_signals()

from dsreason.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
