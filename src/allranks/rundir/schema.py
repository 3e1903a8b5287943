"""Refuse to resume from files of a run folder that another version of allranks wrote.

``plan.json`` and the manifest of each checkpoint carry ``schema_version``. Increase `SCHEMA_VERSION` with every change of the
spec, the plan or the checkpoint after which a resume from older files would fail or have another meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.version import __version__

SCHEMA_VERSION = 1
UNVERSIONED = 0
"""Version of files without a version, which are older than all others."""


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
