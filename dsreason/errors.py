"""Errors that the user can fix. The command line prints their message without a traceback."""

import errno

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Values of `OSError.errno` for a full or read-only disk and for a file that is too large (`ulimit -f`)."""


class DsReasonError(Exception):
    """Base class; `exit_code` is the exit status of the command when it runs without a launcher."""

    exit_code = 1
    label = "error: "
    """Printed before the message."""


class ConfigError(DsReasonError):
    """An invalid option, configuration file or combination of both."""

    exit_code = 2


class DataError(DsReasonError):
    """A data set, row or media file that cannot be used; the message names the file, row and field."""

    exit_code = 2


class CheckpointError(DsReasonError):
    """A checkpoint, model folder or output folder that cannot be used."""

    exit_code = 2


class RewardError(DsReasonError):
    """A reward that raised, took too long, returned something other than a number or could not be reached.

    The message names the function and the sample.
    """


class SaveError(DsReasonError):
    """Output of a run that could not be written."""


class Stopped(DsReasonError):
    """The end of a job that was asked to stop and has saved its state; the exit code means a temporary failure (sysexits.h)."""

    exit_code = 75
    label = ""


class StorageError(DsReasonError):
    """Storage (S3, the Hub) that refused a request or could not be reached; the message names the URL and the response.

    `status` is the HTTP status of the response, None if no response arrived. `transient`: the same request may succeed later.
    """

    def __init__(self, text: str, *, status: int | None = None, transient: bool = False) -> None:
        super().__init__(text)
        self.status, self.transient = status, transient
