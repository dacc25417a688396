"""Errors that end a tuning run as a whole. A failed trial is no error: it is a result with a
status."""

from __future__ import annotations


class TuneError(Exception):
    """The run cannot start or go on. The message names the value at fault and what to do."""


class Interrupted(TuneError):
    """Ctrl-C or SIGTERM ended the run, and there is nothing new to be written. The message says what is left
    and how to go on."""


class BudgetError(TuneError):
    """The budget is too short for what was asked; more time is the remedy."""

    def __init__(self, reason: str, remedy: str = "give a longer --budget") -> None:
        super().__init__(reason, remedy)
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class JournalError(TuneError):
    """The journal cannot be written, read or continued."""


class DisturbedError(TuneError):
    """The machine is disturbed: others used it for so long that nothing could be measured."""


class TargetFailure(Exception):
    """A target could not do what was asked with these settings: costs one trial, never the run.

    Args:
        status: the `TrialStatus` it stands for, or its value, such as ``"invalid"``.
        message: one line for people.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class TargetLost(Exception):
    """The process that the target lives in cannot go on, as after an error that costs it the GPU. For whoever
    asked it is what a crash is: a new process, and these settings are not tried again."""


class TargetUnusable(TuneError):
    """The target cannot work at all: the model does not load, the device is not there."""
