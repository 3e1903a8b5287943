"""Folders whose manifest holds the hash of every file in them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from allranks.rundir import read_json

MANIFEST = "manifest.json"


def damage(entry: Path) -> str | None:
    """What is wrong with an entry, or None if every file has the hash that the manifest says."""
    manifest = read_json(entry / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or not manifest["files"]:
        return "its manifest is missing or unreadable"
    for name, expected in manifest["files"].items():
        if not isinstance(expected, dict):
            return f"its manifest does not tell the size and hash of {name}"
        try:
            if (entry / name).stat().st_size != expected.get("bytes"):
                return f"{name} has the wrong size"
            if file_hash(entry / name) != expected.get("sha256"):
                return f"{name} has the wrong hash"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def file_hash(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file below a folder, by relative name."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": file_hash(p)} for p in files}
