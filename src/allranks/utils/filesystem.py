"""Handle permissions, owners and OSErrors, and locate the caches of Hugging Face's libraries and of allranks."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allranks.errors import AllranksError, EnvironmentNotAble, RequestError
from allranks.utils.text import format_bytes

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
"""The folder of the package allranks, as it is imported here."""
ELSEWHERE = "choose another folder (for runs: --set run_root=FOLDER)"
LOW_SPACE_BYTES = 32 << 20
FREE_SPACE = f"free space there or {ELSEWHERE}"
_CURES = {
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: f"remove some of your files there, ask for a larger quota, or {ELSEWHERE}",
    errno.EROFS: f"the file system is mounted read-only; {ELSEWHERE}",
    errno.EACCES: f"ask the owner for access or {ELSEWHERE}",
    errno.EPERM: f"ask the owner for access or {ELSEWHERE}",
    errno.ESTALE: "the network file system no longer knows this file; enter the folder again (cd) or "
    "remount it, then repeat",
    errno.EIO: f"the disk or the network file system failed (see dmesg); repeat once it works, or {ELSEWHERE}",
    errno.ENAMETOOLONG: "use a shorter name or folder",
    errno.EMFILE: "too many files are open in this process; raise the limit with: ulimit -n",
    errno.ENFILE: "too many files are open on this machine; ask its administrator to raise fs.file-max",
    errno.EAGAIN: "a limit of processes or memory is reached; see: ulimit -u",
    errno.ENOMEM: "the machine has no memory left; end other processes or use another machine",
    errno.ENOENT: "it does not exist, or was removed in the meantime; check the path",
    errno.ENOTDIR: "a part of the path is a file, not a folder; check the path",
    errno.EISDIR: "it is a folder, not a file; check the path",
    errno.EPIPE: "the process at the other end has ended; see its own message",
}
# Errors caused by a wrong path option; all others are caused by the machine.
_WRONG_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}


def describe_os_error(error: OSError) -> str:
    """Return a paragraph on an OSError: file, system's message, owner if permissions are missing, and what to do."""
    files = [os.fsdecode(f) for f in (error.filename, error.filename2) if isinstance(f, (str, bytes))]
    where = f"{' -> '.join(files)}: " if files else ""
    said = error.strerror or str(error) or type(error).__name__
    owner = ""
    if error.errno in (errno.EACCES, errno.EPERM) and files:
        owner = f" ({owner_of(files[0])})"
    return f"{where}{said}{owner}; {_CURES.get(error.errno or 0, 'run again with --debug to see where')}"


def environment_error(error: OSError) -> EnvironmentNotAble:
    """Return the error with which a command ends after an OSError that nothing else handles."""
    return EnvironmentNotAble(describe_os_error(error))


def write_error(path: Path, error: OSError, option: str) -> AllranksError:
    """Return the error for output that could not be written to the path given by `option` (such as ``--out``).

    Returns:
        RequestError if the path is wrong, else EnvironmentNotAble.
    """
    said = error.strerror or str(error)
    if error.errno in _WRONG_PATH:
        return RequestError(f"{path} cannot be written: {said}; choose another with {option}")
    owner = f" ({owner_of(path)})" if error.errno in (errno.EACCES, errno.EPERM) else ""
    room = "free space there or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return EnvironmentNotAble(f"{path} cannot be written: {said}{owner}; {room}choose another with {option}")


def low_space_text(folder: Path) -> str:
    """Return ``N MiB are free in FOLDER`` if so little is free that a failure may be due to it, else an empty text."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f"{format_bytes(free)} are free in {folder}" if free < LOW_SPACE_BYTES else ""


@contextmanager
def with_file_name(path: Path) -> Iterator[None]:
    """Add `path` to an OSError raised inside, because errors of ``write`` and ``close`` do not name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def owner_of(path: str | Path) -> str:
    """Return owner and mode of a path, or of its nearest accessible parent: ``/x is owned by ann, drwxr-xr-x``."""
    wanted = Path(path).absolute()
    for one in (wanted, *wanted.parents):
        try:
            status = one.lstat()
        except OSError:
            continue
        return f"{one} is owned by {user_name(status.st_uid)}, {stat.filemode(status.st_mode)}"
    return f"the owner of {wanted} is unknown"


def user_name(uid: int) -> str:
    """Return a user's name, or ``uid N`` if the machine has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def current_umask() -> int:
    """Return this process's umask without changing it, because other threads may be creating files."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("Umask:")).split()[1], 8)
    except (OSError, StopIteration, ValueError):
        mask = os.umask(0o077)  # without /proc, the only other way
        os.umask(mask)
        return mask


def apply_umask(folder: Path) -> None:
    """Set all regular files below `folder` to the mode of ``open()``: 0666 minus the umask; keep execute bits.

    Writers that use a temporary file (safetensors) leave 0600, which other users cannot read.
    """
    wanted = 0o666 & ~current_umask()
    for path in folder.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            mode = wanted | (status.st_mode & 0o111)
            if stat.S_IMODE(status.st_mode) != mode:
                path.chmod(mode)


def hf_home() -> Path:
    """Return HF_HOME, or the default of Hugging Face's libraries."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return _expanded(Path(os.environ.get("HF_HOME") or default))


def cache_root(given: str | None) -> Path:
    """Return ``cluster.cache`` of a spec, or `hf_home`; prepared data and bundles are below it."""
    return _expanded(Path(given)) if given else hf_home()


def hub_cache(given: str | None = None) -> Path:
    """Return the folder of hub models; `given` is ``cluster.cache``, which overrides the environment, as on ranks."""
    if given:
        return cache_root(given) / "hub"
    return _expanded(Path(os.environ.get("HF_HUB_CACHE") or hf_home() / "hub"))


def datasets_cache() -> Path:
    """Return the folder of prepared data sets of the hub."""
    return _expanded(Path(os.environ.get("HF_DATASETS_CACHE") or hf_home() / "datasets"))


def private_root(root: Path) -> Path:
    """Return this user's own folder in a cache, for private content, or if another user's folder is not accessible."""
    return root / f"allranks-{os.getuid()}"


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # the user id has no account, as in containers
        raise EnvironmentNotAble(
            f"{path}: this user (uid {os.getuid()}) has no home folder; set HOME, HF_HOME or cluster.cache to a folder"
        ) from None
