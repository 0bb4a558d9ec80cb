"""Errors that users can fix. The command line prints their messages without a traceback."""

import errno

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Values of `OSError.errno` for a full or read-only disk and for a file that is too large (`ulimit -f`)."""


class DsReasonError(Exception):
    """Base class for errors that users can fix; `exit_code` is the command's exit code if it runs without a launcher."""

    exit_code = 1
    label = "error: "
    """Prefix of the printed message."""


class ConfigError(DsReasonError):
    """An invalid option or configuration file, or an invalid combination of settings."""

    exit_code = 2


class DataError(DsReasonError):
    """A data set, row or media file that cannot be used; the message names the file, row and field."""

    exit_code = 2


class CheckpointError(DsReasonError):
    """A checkpoint, model folder or output folder that cannot be used."""

    exit_code = 2


class RewardError(DsReasonError):
    """A reward function that raised, timed out, returned something other than a number, or could not be reached.

    The message names the function and the sample.
    """


class SaveError(DsReasonError):
    """A run's output that could not be written."""


class Stopped(DsReasonError):
    """The end of a job that was asked to stop and has saved its state. The exit code is EX_TEMPFAIL from sysexits.h."""

    exit_code = 75
    label = ""


class NothingLearned(DsReasonError):
    """The end of a run that cannot learn from its rows and rewards, so that a restart would not help."""

    exit_code = 3


class MismatchError(DsReasonError):
    """A difference between the log-probabilities of the rollout engine and the trainer that is too large.

    It means that the engine samples from a different policy.

    All ranks raise it before the optimizer step, so the weights are still those of the last finished step.
    """


class StorageError(DsReasonError):
    """A storage request (to S3 or the Hub) that was refused or got no response; the message names the URL and the response.

    `status` is the response's HTTP status, or None if no response arrived. `transient` is True if the same request may succeed
    later.
    """

    def __init__(self, text: str, *, status: int | None = None, transient: bool = False) -> None:
        super().__init__(text)
        self.status, self.transient = status, transient
