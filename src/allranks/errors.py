"""Every error that allranks raises on purpose, with the exit code it ends in.

    AllranksError            1  the work failed
    +- RunFailed             1  training, a check or a proof failed
    |  +- ProofFailed        1  a proof found ranks that do not form one job, or whose weights differ
    |  +- NonFiniteLoss      1  a loss or gradient was not finite
    |  +- CheckpointError    1  a checkpoint could not be written or did not match when re-read
    |  +- FunctionFailed     1  a function that `allranks.launch` ran failed on a rank
    |     +- FunctionTimedOut 1  it did not end in time
    +- RequestError          2  the request is wrong
    |  +- SpecError          2  the spec: unknown key, wrong type, values that contradict each other
    |  +- DataError          2  the data: missing file, missing column, empty set
    |  +- RunNotFound        2  no such run, or several that match
    +- EnvironmentNotAble    3  a package, a right, a device or a program is missing

A message says what was wrong, where (file, key, node, rank) and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REQUEST = 2
EXIT_ENVIRONMENT = 3


class AllranksError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the command line ends with."""

    exit_code = EXIT_FAILED


class RunFailed(AllranksError):
    """The work failed."""


class ProofFailed(RunFailed):
    """The ranks are not the one job that was planned."""


class NonFiniteLoss(RunFailed):
    """A loss or a gradient was NaN or infinite.

    Args:
        step: the step, counted from 0; the weights are those before it.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class CheckpointError(RunFailed):
    """A checkpoint could not be written, or differed when it was read again."""


class FunctionFailed(RunFailed):
    """A function that `allranks.launch` ran failed on a rank; ``folder`` is the run folder, ``metrics`` its summary."""

    def __init__(self, message: str, folder: Path, metrics: dict[str, Any]) -> None:
        super().__init__(message)
        self.folder, self.metrics = folder, metrics


class FunctionTimedOut(FunctionFailed, TimeoutError):
    """A function that `allranks.launch` ran did not end in time."""


class RequestError(AllranksError):
    """The request is wrong."""

    exit_code = EXIT_REQUEST


class SpecError(RequestError):
    """The spec is wrong; the message names the file and the key."""


class DataError(RequestError):
    """The data cannot be used as requested; the message names the source."""


class RunNotFound(RequestError):
    """No run of that name, or more than one."""


class EnvironmentNotAble(AllranksError):
    """This machine cannot do it: a package, a permission, a device or a program is missing."""

    exit_code = EXIT_ENVIRONMENT
