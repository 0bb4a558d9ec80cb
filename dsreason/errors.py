"""Errors that the user can fix. The command line prints their text without a traceback."""

import errno

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Values of `OSError.errno` that say: the disk is full or read-only, or the file too large (`ulimit -f`)."""


class DsReasonError(Exception):
    """Base class: `exit_code` is what the command returns when started plainly."""

    exit_code = 1
    label = "error: "
    """Printed before the message."""


class ConfigError(DsReasonError):
    """A wrong option, configuration file or combination of both."""

    exit_code = 2


class DataError(DsReasonError):
    """A data set, row or media file that cannot be used; the text names file, row and field."""

    exit_code = 2


class CheckpointError(DsReasonError):
    """A checkpoint, model folder or output folder that cannot be used."""

    exit_code = 2


class RewardError(DsReasonError):
    """A reward that raised, took too long, returned something else than a number or could not be reached.

    The text names function and sample.
    """


class SaveError(DsReasonError):
    """Output of a run could not be written."""


class Stopped(DsReasonError):
    """A job that was asked to end has saved what it had; the code is that of a temporary failure (sysexits.h)."""

    exit_code = 75
    label = ""


class StorageError(DsReasonError):
    """Storage (S3, the Hub) that refused or could not be reached; the text names the address and the answer.

    `status` is the HTTP status of the answer, if there was one; `transient`: the same request may succeed later.
    """

    def __init__(self, text: str, *, status: int | None = None, transient: bool = False) -> None:
        super().__init__(text)
        self.status, self.transient = status, transient
