"""Keep the names that transformers finds in the sources of its models, so that only the first process reads them.

``import transformers`` reads some 2,500 files, which takes a fifth of the time that a rank needs for its imports, and more on a network
file system. The result depends on these files alone. It is kept in the user's private folder of the cache, under a name made of the
paths, sizes and modification times of all of them. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from allranks.rundir.files import make_folder, write_text_atomic
from allranks.utils.filesystem import hf_home, private_root
from allranks.utils.inputs import read_regular
from allranks.version import __version__

FOLDER = "imports"
MANY = 100  # folders: less is scanned as fast as it is read


def cached_scan(scan: Callable[[str], dict[Any, Any]], folder: str) -> dict[Any, Any]:
    """Return what `scan` finds in a folder of packages: from the cache if no file has changed since. A folder of few is always scanned.

    Args:
        scan: returns a nested dict with the keys str and frozenset[str]; the innermost values are sets of str.
    """
    try:
        if sum(entry.is_dir() for entry in os.scandir(folder)) < MANY:
            return scan(folder)
        own = private_root(hf_home()) / FOLDER
        file = own / f"transformers-{_fingerprint(folder)}.json"
    except OSError:
        return scan(folder)
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):  # absent, damaged, or not ours to read
        if file.stat().st_uid == os.geteuid() and (kept := _decoded(json.loads(read_regular(file)))):
            return kept
    found = scan(folder)
    with suppress(OSError, TypeError):  # a full or read-only disk, or a form that is not known here
        text = json.dumps(_encoded(found), separators=(",", ":"))
        old = list(own.glob("transformers-*.json")) if own.is_dir() else []
        write_text_atomic(make_folder(own) / file.name, text, private=True)
        for other in sorted(old, key=lambda path: path.stat().st_mtime)[:-3]:
            other.unlink(missing_ok=True)
    return found


def _fingerprint(folder: str) -> str:
    digest = hashlib.sha256(f"{__version__} {folder}".encode())
    for line in sorted(_files(folder)):
        digest.update(line.encode())
    return digest.hexdigest()[:24]


def _files(folder: str) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.name == "__pycache__":
            continue
        if entry.is_dir():
            yield from _files(entry.path)
        elif entry.name.endswith(".py"):
            found = entry.stat()
            yield f"{entry.path} {found.st_size} {found.st_mtime_ns}\n"


def _encoded(found: dict[Any, Any] | set[str]) -> Any:
    """Return a form that JSON can hold: a set as a list, a dict as pairs, whose key is a list if it was a frozenset."""
    if isinstance(found, set):
        return sorted(found)
    return {"": [[sorted(k) if isinstance(k, frozenset) else k, _encoded(v)] for k, v in found.items()]}


def _decoded(text: Any) -> Any:
    """Reverse `_encoded`. Other content raises TypeError, LookupError or ValueError."""
    if isinstance(text, list):
        return {str(name) for name in text}
    return {frozenset(map(str, k)) if isinstance(k, list) else str(k): _decoded(v) for k, v in text[""]}
