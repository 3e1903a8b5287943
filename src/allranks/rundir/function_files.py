"""Write and read what `allranks.launch` exchanges with its ranks: the call, and each rank's value or exception.

Values are pickles, and reading a pickle can execute code. These are read only if they belong to this user and nobody
else may write them (`read_own`), in a run folder that only this user can write: whoever could change them could change
the user's programs as well. They come from the user's own function and go to the user's own process; nothing that
another user or the network has sent is unpickled.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import linecache
import os
import pickle
import platform
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

import msgspec

from allranks.errors import EnvironmentNotAble, RunFailed
from allranks.rundir.files import make_folder, write_bytes_atomic
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import open_regular
from allranks.utils.redaction import redact


class CallHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs before it can unpickle the function; a line of JSON in front of the pickle."""

    python: str
    """Version of the Python that pickled the function, as 3.12: code of one version does not run under another."""
    sources: dict[str, str] = {}
    """See `typed_sources`."""
    path: list[str]
    """Folders from which the caller imports modules, besides those of its environment."""
    init: str | None
    """Backend of the process group that exists when the function starts; None: the function makes its own."""
    timeout_s: int
    """Timeout of the collectives of that group."""


class RankError(msgspec.Struct, frozen=True, kw_only=True):
    """The exception with which the function ended on a rank."""

    type: str
    message: str
    traceback: str
    exception: bytes | None
    """The pickled exception; None if it cannot be rebuilt."""


def python_version() -> str:
    """Return major and minor version of this Python."""
    return ".".join(platform.python_version_tuple()[:2])


def has_cloudpickle() -> bool:
    """Return whether functions of notebooks, scripts and other functions can be pickled, too."""
    return importlib.util.find_spec("cloudpickle") is not None


def pickled(value: Any) -> bytes:
    """Return a pickle, by cloudpickle where it is installed. Raises any exception that a class of the value raises."""
    if not has_cloudpickle():
        return pickle.dumps(value)
    cloudpickle: Any = importlib.import_module("cloudpickle")

    class Pickler(cloudpickle.CloudPickler):
        """Keep the file names of code, which cloudpickle 3.1 replaces: tracebacks and stacks of ranks show them."""

        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, CodeType):
                return super().reducer_override(obj)
            make, parts = cloudpickle.CloudPickler.dispatch_table[CodeType](obj)
            return make, tuple(obj.co_filename if part == "<dynamic-code>" else part for part in parts)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def typed_sources() -> dict[str, str]:
    """Return the source of code that is in no file, such as the cells of a notebook, by the name in tracebacks."""
    cached = {name: entry for name, entry in linecache.cache.items() if len(entry) > 1 and not Path(name).is_file()}
    return {name: "".join(entry[2]) for name, entry in cached.items()}


def caller_path() -> list[str]:
    """Return the folders of `sys.path` that are not part of this Python's environment."""
    own = tuple(f"{prefix}/" for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix})
    folders = [str(Path(entry).absolute()) for entry in sys.path if Path(entry).is_dir()]
    return [folder for folder in folders if not f"{folder}/".startswith(own)]


def write_call(run: RunDir, header: CallHeader, function: bytes) -> None:
    """Write a call: header, and the pickled function with its arguments."""
    make_folder(run.function_call.parent)
    write_bytes_atomic(run.function_call, msgspec.json.encode(header) + b"\n" + function, private=True)


def read_call(run: RunDir) -> tuple[Any, tuple[Any, ...], dict[str, Any], CallHeader]:
    """Return function, arguments, keyword arguments and header; makes the caller's modules importable.

    Raises:
        EnvironmentNotAble: this Python has another version than the caller's.
    """
    line, _, function = read_own(run.function_call).partition(b"\n")
    header = msgspec.json.decode(line, type=CallHeader)
    if header.python != python_version():
        raise EnvironmentNotAble(
            f"the function was pickled by Python {header.python}, and this rank has Python {python_version()} "
            f"({sys.executable}): use the same version on both sides (cluster.python)"
        )
    for name, text in header.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    sys.path += [folder for folder in header.path if folder not in sys.path]
    function, args, kwargs = pickle.loads(function)  # noqa: S301 - see the top of this file
    return function, args, kwargs, header


def write_value(run: RunDir, attempt: int, rank: int, value: Any) -> None:
    """Write the value that the function returned.

    Raises:
        RunFailed: it cannot be pickled.
    """
    try:
        data = pickled(value)
    except Exception as error:  # noqa: BLE001 - any class may refuse, in its own way
        raise RunFailed(
            f"the value that the function returned on rank {rank}, of type {type(value).__name__}, cannot be sent "
            f"back: {type(error).__name__}: {error}; return numbers, texts, lists or tensors, or save it to a file"
        ) from None
    path = run.function_value(attempt, rank)
    make_folder(path.parent)
    write_bytes_atomic(path, data, private=True)


def read_value(run: RunDir, attempt: int, rank: int) -> Any:
    """Return the value of a rank.

    Raises:
        RunFailed: it is missing, or cannot be rebuilt here.
    """
    path = run.function_value(attempt, rank)
    try:
        return pickle.loads(read_own(path))  # noqa: S301 - see the top of this file
    except FileNotFoundError:
        raise RunFailed(f"rank {rank} succeeded, but its value {path} is missing") from None
    except RunFailed:
        raise
    except Exception as error:
        raise RunFailed(
            f"the value of rank {rank} ({path}) cannot be read here: {type(error).__name__}: {error}; return what this "
            "machine can hold, such as tensors on the CPU (tensor.cpu())"
        ) from error


def write_error(run: RunDir, attempt: int, rank: int, error: BaseException, skip: int) -> None:
    """Write the exception of a rank, without the first `skip` frames of its traceback."""
    frames = error.__traceback__
    for _ in range(skip):
        frames = frames.tb_next if frames is not None else None
    record = RankError(
        type=type(error).__name__,
        message=str(error),
        traceback=redact("".join(traceback.format_exception(type(error), error, frames))),
        exception=_rebuildable(error),
    )
    path = run.function_error(attempt, rank)
    make_folder(path.parent)
    write_bytes_atomic(path, msgspec.json.encode(record), private=True)


def _rebuildable(error: BaseException) -> bytes | None:
    """Return the pickled exception, if unpickling it gives the same text; others ask for arguments of their own."""
    if not isinstance(error, Exception):  # raised in the caller, SystemExit and KeyboardInterrupt would end it
        return None
    with suppress(Exception):  # any class may refuse, in its own way
        data = pickled(error)
        again = pickle.loads(data)  # noqa: S301 - what this process has just written
        return data if type(again) is type(error) and str(again) == str(error) else None
    return None


def read_error(run: RunDir, attempt: int, rank: int) -> tuple[RankError, Exception | None] | None:
    """Return a rank's error and the exception, if that can be rebuilt here; None if the rank wrote no error."""
    try:
        record = msgspec.json.decode(read_own(run.function_error(attempt, rank)), type=RankError)
    except (OSError, msgspec.DecodeError):
        return None
    error = None
    with suppress(Exception):  # its module may be missing here
        error = pickle.loads(record.exception) if record.exception else None  # noqa: S301 - as above
    return record, error if isinstance(error, Exception) else None


def read_own(path: Path) -> bytes:
    """Return the content of a file that only this user can have written.

    Raises:
        RunFailed: it belongs to another user, or others may write it.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise RunFailed(
                f"{path} belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}; it is not read, because "
                "others may have written it, and reading a pickle executes code"
            )
        return file.read()
