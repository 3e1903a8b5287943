"""Write and read files of a run: atomic, private, not following links; refuse those of another allranks version."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.utils.inputs import read_regular
from allranks.version import __version__

SCHEMA_VERSION = 1
UNVERSIONED = 0
"""Version of files without a version, which are older than all others."""


def file_mode(folder: Path) -> int:
    """Return the permissions of a new file in a folder: only users who may enter the folder can read it.

    The process's umask applies. In a run folder (0700) files get 0600, in a shared folder what the umask leaves.
    """
    return 0o600 | (folder.stat().st_mode & 0o066)


def make_folder(path: Path) -> Path:
    """Create a folder and missing parents, each with permissions no wider than its parent's."""
    if not path.is_dir():
        parent = make_folder(path.parent)
        path.mkdir(0o700 | (parent.stat().st_mode & 0o077), exist_ok=True)
    return path


def open_append(path: Path) -> int:
    """Open a file of a run for appending, with the permissions of its folder; return the file descriptor."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, file_mode(make_folder(path.parent)))


def write_text_atomic(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text as `write_bytes_atomic` does."""
    write_bytes_atomic(path, text.encode(), private=private)


def write_bytes_atomic(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file atomically: readers never see a part of it.

    Args:
        private: only the owner may read it (0600), even in a shared folder.
    """
    # A unique name: a process of another user or node with the same process id may have left its file.
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        # O_EXCL: do not write through an existing name, for example another user's link to another file
        mode = 0o600 if private else file_mode(path.parent)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # do not leave partial files on a full disk
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None  # the user does not know the temporary file
        raise


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write `json_text` as `write_text_atomic` does."""
    write_text_atomic(path, json_text(value), private=private)


def json_text(value: Any) -> str:
    """Return indented, strict JSON (NaN is refused by the format, so it is written as null)."""
    return json.dumps(replace_non_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_node_json(path: Path, node: int, value: dict[str, Any]) -> Path:
    """Write a record of a node into a file named after its host; return its path, which has the node's number if
    another node has the file.

    Several agents that people start by hand can be on one host. Only one of them can create the file; each replaces its
    own.

    Args:
        value: the record; its ``node`` tells whose it is.
    """
    own = path.with_name(
        f"{path.name.removesuffix(''.join(path.suffixes[-2:]))}.node{node}{''.join(path.suffixes[-2:])}"
    )
    if own.exists() or read_record(path).get("node", node) != node or not _claim(path, node):
        path = own
    write_json(path, value)
    return path


def _claim(path: Path, node: int) -> bool:
    """Return whether this node has the file: it has created it now, or earlier."""
    draft = path.with_name(f".{path.name[:200]}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    write_json(draft, {"node": node})
    try:
        os.link(draft, path)  # fails if it exists, also over a network file system
    except FileExistsError:
        return read_record(path).get("node") == node
    except OSError:  # a file system without links
        return not path.exists()
    finally:
        draft.unlink(missing_ok=True)
    return True


def replace_non_finite(value: Any) -> Any:
    """Return the value with NaN and infinities replaced by None, because JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(item) for item in value]
    return value


def read_json(path: Path) -> Any:
    """Return a JSON file's content, or None if it is missing, damaged, too large or not a regular file."""
    try:
        return json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None


def read_record(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if `read_json` returns nothing or something else."""
    record = read_json(path)
    return record if isinstance(record, dict) else {}


def schema_version_of(record: Mapping[str, Any]) -> Any:
    """Return the version of a record, `UNVERSIONED` if it has none."""
    return record.get("schema_version", UNVERSIONED)


def is_current(record: Mapping[str, Any]) -> bool:
    """Return whether this program wrote a record, or one with the same schema version."""
    version = schema_version_of(record)
    return type(version) is int and version == SCHEMA_VERSION


def require_current(path: Path, record: Mapping[str, Any]) -> None:
    """Refuse a record of another schema version.

    Args:
        path: the file that holds it.

    Raises:
        RequestError: with the file, its version and this program's.
    """
    if is_current(record):
        return
    version = schema_version_of(record)
    had = (
        "no schema_version, as only older versions of allranks wrote"
        if version == UNVERSIONED
        else f"schema_version {version!r}"
    )
    writer = f" (allranks {record['allranks']})" if isinstance(record.get("allranks"), str) else ""
    raise RequestError(
        f"{path} has {had}{writer}; this program, allranks {__version__}, has schema_version {SCHEMA_VERSION}: "
        "use the version of allranks that wrote it, or start a new run"
    )
