"""The `dsreason` command, and `python -m dsreason`, which torchrun and deepspeed start as well.

A Python file beside the user's data must not run because a library looks for a module of that name. So this file removes the
current folder from the import path before it imports anything else; `dsreason.user_code` finds the code that the
configuration names. Programs and shared libraries are not looked up in the current folder either. Two things cannot be
protected from here: what Python itself imports and loads before this file runs (`contextlib`, `warnings`; whatever an empty
entry of PYTHONPATH or LD_LIBRARY_PATH offers), and the launchers' own processes, for which you can set PYTHONSAFEPATH in the
environment of `torchrun` or `deepspeed`.
"""

import os
import sys

SEARCHED = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "COMPILER_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
"""Variables that list folders; an empty entry, as in `LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/x`, means the current folder."""


def remove_current_folder() -> None:
    """Remove the current folder from the import path of this process and its children, unless PYTHONPATH names it."""
    try:
        here = os.getcwd()
    except OSError:  # the folder was deleted, so Python did not find it either
        return
    variable = os.environ.get("PYTHONPATH", "")
    entries = variable.split(os.pathsep) if variable else []
    if entries[:1] == [here] and os.environ.get("CROSS_SIZE", "1") != "1":
        entries[0] = ""  # `deepspeed` inserts it when it starts several hosts
    usable = [path for path in entries if path]
    path = sys.path[1:] if sys.path[0] in ("", here) else sys.path  # `-m` and `-c` insert it
    if usable != entries:
        # An empty entry, as of `PYTHONPATH=$PYTHONPATH:/x`, means the current folder; nobody requested that.
        path = [entry for entry in path if entry != here]
    package_parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if here in map(os.path.abspath, usable) or (here == package_parent and here not in path):
        return  # a checkout that is not installed must run from its own folder
    sys.path[:] = path
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(usable)
    os.environ.setdefault("PYTHONSAFEPATH", "dsreason")  # any text works; this one shows reward workers who set it


def remove_empty_entries() -> None:
    """Keep child processes from looking for programs, shared libraries and headers in the current folder."""
    for name in SEARCHED:
        entries = os.environ.get(name, "").split(os.pathsep)
        if usable := [path for path in entries if path]:
            os.environ[name] = os.pathsep.join(usable)
        else:
            os.environ.pop(name, None)
    # OpenCV, which vLLM imports, prepends a folder and a colon, which leaves an empty entry if the variable is unset. This
    # folder holds no shared library, so it is safe as the value.
    os.environ.setdefault("LD_LIBRARY_PATH", os.path.dirname(os.path.abspath(__file__)))


remove_current_folder()
remove_empty_entries()

import signal  # noqa: E402


def end_at_signals() -> None:
    """End the process without a traceback if a signal arrives during the imports, which take a second.

    `signals.end_at_signals` replaces these handlers. A rank ends silently: its launcher reports what ended it.
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
