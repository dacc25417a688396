"""The errors that end a tuning run. A failed trial is not an error, but a result with a status."""

from __future__ import annotations


class TuneError(Exception):
    """The run cannot start or continue. The message names the wrong value and what to do."""


class Interrupted(TuneError):
    """Ctrl-C or SIGTERM ended the run, and there is nothing new to write. The message says what exists and
    how to continue."""


class BudgetError(TuneError):
    """The budget is too short for the request. A longer budget is the remedy."""

    def __init__(self, reason: str, remedy: str = "give a longer --budget") -> None:
        super().__init__(reason, remedy)
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class JournalError(TuneError):
    """The journal cannot be written, read or continued."""


class DisturbedError(TuneError):
    """Other programs used the machine for so long that nothing could be measured."""


class TargetFailure(Exception):
    """An operation of a target failed with these settings. It ends one trial, but never the run.

    Args:
        status: The `TrialStatus` of the trial, or its value, such as ``"invalid"``.
        message: One line for people.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class TargetLost(Exception):
    """The process of the target cannot continue, for example after an error by which it lost the GPU. It
    counts as a crash: a new process starts, and these settings are not tried again."""


class TargetUnusable(TuneError):
    """The target does not work at all: the model does not load, or the device is missing."""
