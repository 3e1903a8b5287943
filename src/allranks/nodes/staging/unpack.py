"""Verify and unpack archives, on the login node and on nodes. Standard library only, Python 3.8 or later: nodes receive it as text."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tarfile
from typing import BinaryIO, Iterator

WHOLE_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 16
BLOCK = 1 << 20
MAX_NAME = 3000  # bytes, without the target folder
MAX_PART = 255
MAX_ENTRIES = 5_000_000
NAME_ERRORS = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)


class Refused(Exception):
    """An invalid archive, folder or node; the message gives the reason."""


def identity(root: str, names: list[str]) -> str | None:
    """Return a hash of these files below `root` (or of the file `root`, for the name ""); None if one is missing.

    Files above 1 MiB are identified by their size and three samples, so that a network file system is not read completely.
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
    """A file whose bytes are hashed while they are read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self.digest.update(block)
        self.bytes += len(block)
        return block


def members(archive: str, sha256: str, limit_bytes: int) -> Iterator[tuple[tarfile.TarInfo, BinaryIO | None]]:
    """Yield every entry of a tar file that is safe to unpack, read once from start to end; its hash is checked at the end.

    Raises:
        Refused: an entry outside of the folder, not a plain file or folder, or duplicate; too many bytes; a wrong hash.
    """
    seen: dict[str, bool] = {}
    total = 0
    if not stat.S_ISREG(os.stat(archive).st_mode):
        raise Refused("is not a regular file")
    with open(archive, "rb") as raw:
        source = _Hashing(raw)
        try:
            with tarfile.open(fileobj=source, mode="r|", bufsize=BLOCK) as tar:  # type: ignore[call-overload]
                for entry in tar:
                    _check_entry(entry, seen)
                    if entry.size < 0 or len(seen) > MAX_ENTRIES:
                        raise Refused(
                            "contains a file of negative size"
                            if entry.size < 0
                            else f"contains more than {MAX_ENTRIES} entries"
                        )
                    total += entry.size
                    if total > limit_bytes:
                        raise Refused(f"contains more than the announced {limit_bytes} bytes")
                    yield entry, tar.extractfile(entry) if entry.isreg() else None  # type: ignore[misc]
        except (tarfile.TarError, EOFError, ValueError, UnicodeError, OverflowError, RecursionError) as error:
            raise Refused(f"is not a complete tar file: {error}") from None
        while source.read(BLOCK):
            pass
    if source.digest.hexdigest() != sha256:
        raise Refused(f"is damaged: its SHA-256 is {source.digest.hexdigest()[:16]}..., not {sha256[:16]}...")


def _check_entry(entry: tarfile.TarInfo, seen: dict[str, bool]) -> None:
    """Refuse an entry that cannot be unpacked safely; `seen` has the earlier names, and whether each is a folder."""
    name = entry.name
    if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        raise Refused(f"contains {name!r}, which is a link or a device; only files and folders are unpacked")
    if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise Refused(f"contains {name!r}, which is outside of the folder")
    plain = os.path.normpath(name)
    if len(os.fsencode(plain)) > MAX_NAME or any(len(os.fsencode(part)) > MAX_PART for part in plain.split("/")):
        raise Refused(f"contains a name of {len(plain)} characters, {name[:60]!r}..., which no file system supports")
    if plain in seen and not (seen[plain] and entry.isdir()):
        raise Refused(f"contains {name!r} twice")
    parent = os.path.dirname(plain)
    while parent:
        if not seen.setdefault(parent, True):
            raise Refused(f"contains {name!r} below {parent!r}, which is a file")
        parent = os.path.dirname(parent)
    seen[plain] = entry.isdir()


def unpack(archive: str, target: str, sha256: str, limit_bytes: int) -> int:
    """Unpack into the new folder `target`, which is only created if the whole archive has the right hash.

    Returns:
        The number of files.
    """
    partial = target + ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.mkdir(partial, 0o700)
    count = 0
    try:
        for entry, content in members(archive, sha256, limit_bytes):
            path = os.path.join(partial, entry.name)
            try:
                os.makedirs(path if content is None else os.path.dirname(path), exist_ok=True)
                if content is None:
                    continue
                mode = 0o755 if entry.mode & 0o100 else 0o644
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            except OSError as error:
                if error.errno not in NAME_ERRORS:
                    raise
                # such as a name that differs from another only in case, on a case-insensitive file system
                raise Refused(f"contains {entry.name!r}, which cannot be created here: {error.strerror}") from None
            with open(fd, "wb") as file:
                shutil.copyfileobj(content, file, BLOCK)
            try:
                os.utime(path, (entry.mtime, entry.mtime))
            except (OverflowError, ValueError):
                raise Refused(f"contains {entry.name!r} with an invalid file time") from None
            count += 1
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return count


def make_venv(target: str, interpreter: str) -> None:
    """Turn the unpacked packages into a virtual environment of the node's own interpreter."""
    os.makedirs(os.path.join(target, "bin"))
    for name in ("python", "python3"):
        os.symlink(interpreter, os.path.join(target, "bin", name))
    with open(os.path.join(target, "pyvenv.cfg"), "w") as file:
        file.write(f"home = {os.path.dirname(interpreter)}\ninclude-system-site-packages = false\n")
