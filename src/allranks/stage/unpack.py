"""What staging reads and unpacks, on both sides. Standard library only, Python 3.8 or later: nodes get it as text."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from typing import BinaryIO, Iterator

WHOLE_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 16
BLOCK = 1 << 20


class Refused(Exception):
    """An archive, a folder or a node that is not as it must be; the message says how."""


def identity(root: str, names: list[str]) -> str | None:
    """What these files below `root` (or the file `root`, for the name "") are, as a hash; None if one is missing.

    Files above 1 MiB are known by their size and three samples: a network file system is not read whole.
    """
    digest = hashlib.sha256()
    try:
        for name in names:
            with open(os.path.join(root, name) if name else root, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{name}\0{size}\0".encode())
                if size <= WHOLE_BYTES:
                    digest.update(file.read())
                    continue
                for offset in (0, size // 2, size - SAMPLE_BYTES):
                    file.seek(offset)
                    digest.update(file.read(SAMPLE_BYTES))
    except OSError:
        return None
    return digest.hexdigest()


class _Hashing:
    """A file whose bytes are hashed as they are read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self.digest.update(block)
        self.bytes += len(block)
        return block


def members(archive: str, sha256: str, limit_bytes: int) -> Iterator[tuple[tarfile.TarInfo, BinaryIO | None]]:
    """Every entry of a tar file that is safe to unpack, read once from front to end; its hash is checked at the end.

    Raises:
        Refused: an entry that leaves the folder, is no plain file or folder, or comes twice; too many bytes; a wrong hash.
    """
    seen: set[str] = set()
    total = 0
    with open(archive, "rb") as raw:
        source = _Hashing(raw)
        try:
            with tarfile.open(fileobj=source, mode="r|", bufsize=BLOCK) as tar:  # type: ignore[call-overload]
                for entry in tar:
                    _check_entry(entry, seen)
                    total += entry.size
                    if total > limit_bytes:
                        raise Refused(f"holds more than the {limit_bytes} bytes that were announced")
                    yield entry, tar.extractfile(entry) if entry.isreg() else None  # type: ignore[misc]
        except (tarfile.TarError, EOFError, ValueError, UnicodeError) as error:
            raise Refused(f"is no whole tar file: {error}") from None
        while source.read(BLOCK):
            pass
    if source.digest.hexdigest() != sha256:
        raise Refused(f"is damaged: its SHA-256 is {source.digest.hexdigest()[:16]}..., not {sha256[:16]}...")


def _check_entry(entry: tarfile.TarInfo, seen: set[str]) -> None:
    name = entry.name
    if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        raise Refused(f"holds {name!r}, which is a link or a device; only files and folders are unpacked")
    if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise Refused(f"holds {name!r}, which leads out of the folder")
    plain = os.path.normpath(name)
    if plain in seen:
        raise Refused(f"holds {name!r} twice")
    seen.add(plain)


def unpack(archive: str, target: str, sha256: str, limit_bytes: int) -> int:
    """Unpack into the new folder `target`, which appears only once the whole archive had the right hash.

    Returns:
        How many files there were.
    """
    partial = target + ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.mkdir(partial, 0o700)
    count = 0
    try:
        for entry, content in members(archive, sha256, limit_bytes):
            path = os.path.join(partial, entry.name)
            os.makedirs(path if content is None else os.path.dirname(path), exist_ok=True)
            if content is None:
                continue
            mode = 0o755 if entry.mode & 0o100 else 0o644
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
                shutil.copyfileobj(content, file, BLOCK)
            os.utime(path, (entry.mtime, entry.mtime))
            count += 1
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return count


def make_venv(target: str, interpreter: str) -> None:
    """Make the unpacked packages a virtual environment of the node's own interpreter."""
    os.makedirs(os.path.join(target, "bin"))
    for name in ("python", "python3"):
        os.symlink(interpreter, os.path.join(target, "bin", name))
    with open(os.path.join(target, "pyvenv.cfg"), "w") as file:
        file.write(f"home = {os.path.dirname(interpreter)}\ninclude-system-site-packages = false\n")
