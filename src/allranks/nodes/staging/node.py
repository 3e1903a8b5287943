"""Run staging on a node: verify and unpack archives. Standard library only, Python 3.8 or later: it is sent there as source text.

The text arrives on standard input, followed by one line of JSON, the request: ``ask`` (which parts are missing here),
``receive`` (receive parts, verify them, unpack them) or ``remove``. Answers are lines ``@allranks NODE I N FRAGMENT``: short,
because srun may mix long lines of several nodes. The login node verifies and unpacks with the same functions.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
from typing import Any, BinaryIO, Callable, Iterator

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


FRAGMENT = 600
ABOUT_PYTHON = (
    "import sys,sysconfig;"
    "print('%d.%d' % sys.version_info[:2],sysconfig.get_config_var('SOABI'),getattr(sys,'_base_executable',sys.executable),sep='\\n')"
)


def own_folder(path: str) -> None:
    """Create a folder that only this user can access; refuse one that another user created or could change."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise Refused(f"{path} is not a folder of this user alone (mode 0700); remove it or set another with TMPDIR")


def find_python(need: dict[str, Any]) -> str | None:
    """Return the first of the given interpreters that exists here with the version and build that the packages need."""
    for candidate in need["candidates"]:
        path = shutil.which(candidate)
        if path is None:
            continue
        try:
            done = subprocess.run(
                [path, "-I", "-c", ABOUT_PYTHON],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        said = done.stdout.decode().split("\n")
        if said[:2] == [need["version"], need["soabi"]]:
            return said[2]
    return None


def job_root() -> str:
    """Return the folder of this user's jobs on this node: below the first suitable of SLURM_TMPDIR, TMPDIR, /tmp, /var/tmp."""
    bases = [os.environ.get("SLURM_TMPDIR"), os.environ.get("TMPDIR"), "/tmp", "/var/tmp"]  # noqa: S108
    base = next((b for b in bases if b and will_do(b)), "/tmp")  # noqa: S108
    return os.path.join(base, f"allranks-{os.getuid()}")


def will_do(base: str) -> bool:
    """Return whether a folder is writable and libraries in it can be loaded."""
    if not os.path.isabs(base) or not os.access(base, os.W_OK | os.X_OK):
        return False
    return not os.statvfs(base).f_flag & os.ST_NOEXEC


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Return which parts this node lacks, and where it would store them; leave a mark there if it lacks any."""
    lacks = [] if not request["always"] else [part["name"] for part in request["parts"]]
    for part in request["parts"]:
        gone = identity(part["path"], part["probe"]) != part["identity"]
        gone = gone or (
            part["name"] == "env"
            and find_python({**request["python"], "candidates": [request["python"]["executable"]]}) is None
        )
        if gone and part["name"] not in lacks:
            lacks.append(part["name"])
    if request.get("only_look"):
        return {"lacks": lacks}
    root = job_root()
    answer: dict[str, Any] = {"lacks": lacks, "folder": os.path.join(root, request["job"])}
    if "env" in lacks:
        answer["python"] = find_python(request["python"])
    sweep(root, request)
    answer["here"] = [p["name"] for p in request["parts"] if os.path.exists(arrived(answer["folder"], p))]
    if lacks:
        os.makedirs(os.path.dirname(root), exist_ok=True)
        own_folder(root)
        own_folder(answer["folder"])
        with open(os.path.join(answer["folder"], f"on.{me()}"), "w") as file:
            file.write(me())
    return answer


def arrived(folder: str, part: dict[str, Any]) -> str:
    """Return the file that shows that this part is already unpacked here."""
    return os.path.join(folder, f"has.{part['name']}.{part['sha256']}")


def sweep(root: str, request: dict[str, Any]) -> None:
    """Remove files of this user's ended jobs of this cluster that were not removed (the jobs were killed)."""
    cluster, job, _ = request["job"].rsplit(".", 2)
    for name in os.listdir(root) if os.path.isdir(root) else []:
        parts = name.rsplit(".", 2)
        if len(parts) != 3 or parts[0] != cluster or not parts[1].isdigit() or name == request["job"]:
            continue
        ended = request["live"] is not None and int(parts[1]) < int(job) and parts[1] not in request["live"]
        if ended or (parts[1] == job and parts[2].isdigit()):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def receive(request: dict[str, Any], source: BinaryIO) -> dict[str, Any] | None:
    """Report that this node is ready, receive the parts (sent here, or through `source`), verify and unpack them."""
    folder = request["folder"]
    free = shutil.disk_usage(folder).free
    marks = [name[3:] for name in os.listdir(folder) if name.startswith("on.")]
    say({"ready": True, "step": os.environ.get("SLURM_STEP_ID", ""), "sees": marks, "free": free})
    for line in iter(source.readline, b""):
        order = json.loads(line)
        if order["do"] == "stream":
            with open(incoming(folder, order["part"]), "wb") as file:
                left = order["bytes"]
                while left:
                    block = source.read(min(left, BLOCK))
                    if not block:
                        raise Refused(f"part {order['part']} ended {left} bytes early")
                    file.write(block)
                    left -= len(block)
        else:
            return {"unpacked": {part["name"]: _take(folder, part, request) for part in request["parts"]}}
    return None


def incoming(folder: str, part: str) -> str:
    """Return where a part's archive arrives."""
    return os.path.join(folder, f"{part}.tar")


def _take(folder: str, part: dict[str, Any], request: dict[str, Any]) -> int:
    archive = incoming(folder, part["name"])
    try:
        return place(folder, part, archive, request["interpreters"][me()])
    finally:
        with contextlib.suppress(OSError):
            os.unlink(archive)


def place(folder: str, part: dict[str, Any], archive: str, interpreter: str | None) -> int:
    """Unpack a part to its final location, and record it."""
    target = os.path.join(folder, part["name"])
    shutil.rmtree(target, ignore_errors=True)  # left by an interrupted attempt
    try:
        count = unpack(archive, target, part["sha256"], part["unpacked_bytes"])
    except Refused as error:
        raise Refused(f"part {part['name']} {error}") from None
    if interpreter is not None and part["name"] == "env":
        make_venv(target, interpreter)
    with open(arrived(folder, part), "w"):
        return count


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the job's folder, and the user's folder if it is then empty."""
    folder = os.path.join(job_root(), request["job"])
    for _ in range(3):  # nodes may share the folder and remove it at once
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            break
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(folder))
    return {"gone": not os.path.lexists(folder)}


def me() -> str:
    """Return this node's name in Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def say(answer: dict[str, Any]) -> None:
    """Print one answer, in lines short enough not to be split."""
    text = json.dumps(answer)
    parts = [text[i : i + FRAGMENT] for i in range(0, len(text), FRAGMENT)]
    for number, part in enumerate(parts):
        sys.stdout.write(f"@allranks {me()} {number} {len(parts)} {part}\n")
    sys.stdout.flush()


def main() -> int:
    """Carry out the request on standard input."""
    source = sys.stdin.buffer
    request = json.loads(source.readline())
    verbs: dict[str, Callable[[], dict[str, Any] | None]] = {
        "ask": lambda: ask(request),
        "receive": lambda: receive(request, source),
        "remove": lambda: remove(request),
    }
    try:
        answer = verbs[request["verb"]]()
    except (Refused, OSError) as error:
        say({"error": str(error)})
        return 1
    if answer is not None:
        say(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
