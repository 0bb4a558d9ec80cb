"""The `dsreason` command, and `python -m dsreason`, which torchrun and deepspeed start as well.

A Python file beside the user's data must not run because a library looks for a module of that name. So the current folder
leaves the import path here, before anything else is imported; code that the configuration names is found by
`dsreason.user_code`. Programs and shared libraries are not looked for there either. Out of reach are what Python itself
imports and loads to get here (`contextlib`, `warnings`; what an empty entry of PYTHONPATH or LD_LIBRARY_PATH offers) and the
launchers' own processes: PYTHONSAFEPATH in the environment of `torchrun` or `deepspeed` protects them too.
"""

import os
import sys

SEARCHED = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "COMPILER_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
"""Lists of folders in which an empty entry, as of `LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/x`, means the current folder."""


def leave_current_folder() -> None:
    """Take the current folder off the import path of this process and of those it starts, unless PYTHONPATH names it."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed; Python found no folder either
        return
    variable = os.environ.get("PYTHONPATH", "")
    given = variable.split(os.pathsep) if variable else []
    if given[:1] == [here] and os.environ.get("CROSS_SIZE", "1") != "1":
        given[0] = ""  # `deepspeed` puts it there on several hosts
    usable = [path for path in given if path]
    path = sys.path[1:] if sys.path[0] in ("", here) else sys.path  # `-m` and `-c` put it first
    if usable != given:
        # An empty entry, as of `PYTHONPATH=$PYTHONPATH:/x`, means the current folder; nobody asked for it.
        path = [entry for entry in path if entry != here]
    own_folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if here in map(os.path.abspath, usable) or (here == own_folder and here not in path):
        return  # a checkout that is not installed runs from its own folder
    sys.path[:] = path
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(usable)
    os.environ.setdefault("PYTHONSAFEPATH", "dsreason")  # any text will do; reward workers know this one as ours


def leave_empty_entries() -> None:
    """Programs, shared libraries and headers are not looked for in the current folder by the processes that this one starts."""
    for name in SEARCHED:
        given = os.environ.get(name, "").split(os.pathsep)
        if usable := [path for path in given if path]:
            os.environ[name] = os.pathsep.join(usable)
        else:
            os.environ.pop(name, None)
    # OpenCV, which vLLM imports, puts a folder and a colon before what it finds, which ends in an empty entry where it finds
    # nothing. There is no shared library in this folder.
    os.environ.setdefault("LD_LIBRARY_PATH", os.path.dirname(os.path.abspath(__file__)))


leave_current_folder()
leave_empty_entries()

import signal  # noqa: E402


def end_at_signals() -> None:
    """Until `signals.end_at_signals`: the imports take a second, and Python answers Ctrl-C in them with a traceback.

    A rank ends without a word: its launcher says what ended it.
    """

    def end(number: int, frame: object) -> None:
        try:
            os.write(2, f"stopped by {signal.Signals(number).name}\n".encode())
        finally:
            os._exit(75)  # as `Stopped` has it

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
