"""Failures that a person can mend. The command line prints their text without a traceback."""


class DsReasonError(Exception):
    """Base class: `exit_code` is what the command returns when started plainly."""

    exit_code = 1


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
    """A reward that raised, gave no number, took too long or could not be reached; the text names function and sample."""
