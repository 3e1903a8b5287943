"""Shared cache: the first process builds an entry once, and all others read it.

Any number of ranks, nodes and runs may request the same entry at once, on one shared file system, and no
collective waits while it is built:

1. the key is a hash of everything that the content depends on, so equal keys mean equal content;
2. the first process to create ``<key>.claim`` (O_EXCL) builds into ``<key>.tmp-...`` and publishes with one rename;
3. the others watch the claim: a builder on the same host is alive while its process exists, one on another host while
   it keeps rewriting its claim; the claim of a dead builder is taken over (by a rename, which one waiter wins);
4. a reader checks every file against the manifest's hashes; a damaged entry is moved aside and rebuilt;
5. an entry that an untrusted user may have written (`untrusted_reason`) is refused: hashes do not show who wrote it.

Several users may share a cache: entries get the permissions of the umask. If files of another user prevent this (an
entry that cannot be read, a folder that cannot be written, the claim of a dead builder that cannot be removed), the
entry is built in this user's own folder instead, and the log names the file, its owner and the fix.

Two builders at once, after a wrong takeover, only cost time: both build the same content, and one rename succeeds.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from allranks.errors import EnvironmentNotAble
from allranks.rundir.checkpoints import MANIFEST, find_damage, hash_files, untrusted_reason
from allranks.rundir.files import read_json, write_json
from allranks.rundir.heartbeat import heartbeat
from allranks.utils.filesystem import apply_umask, owner_of, user_name
from allranks.utils.machine import host_name

HEARTBEAT_S = 2.0
DAY_S = 86400
ANOTHER = "choose another with --set cluster.cache=FOLDER"
SHARING = "its owner runs chmod -R g+rwX FOLDER and fills it with umask 0002"
STALE_S = 90.0  # network file systems may show a rewritten claim a minute late

Log = Callable[[str], None]


class _Closed(Exception):
    """Files of another user, or their permissions, keep this user from using the cache folder."""


def get_or_build(
    folder: Path,
    key: str,
    build: Callable[[Path], None],
    log: Log,
    wait_limit_s: float = 6 * 3600,
    private: Path | None = None,
) -> tuple[Path, str]:
    """Return the verified entry `key` under `folder`; build it with `build(temporary_folder)` if it is missing.

    Args:
        private: this user's own folder, used if permissions of other users prevent access to `folder`.

    Returns:
        The entry's folder, and how it was obtained: ``"found"``, ``"built"``, ``"waited"`` or ``"rebuilt"``.

    Raises:
        EnvironmentNotAble: neither folder can be written, or the builder took longer than `wait_limit_s`.
    """
    deadline = time.monotonic() + wait_limit_s
    try:
        return _get_or_build(folder, key, build, log, deadline)
    except _Closed as closed:
        if private is None:
            raise EnvironmentNotAble(f"cache {closed}; {ANOTHER}") from None
        why = str(closed)
    log(f"cache {why}; {private} is used instead. To share the cache: {SHARING}")
    try:
        return _get_or_build(private, key, build, log, deadline)
    except _Closed as closed:
        also = "" if str(closed) == why else f". The private one cannot be used either: {closed}"
        raise EnvironmentNotAble(f"cache {why}{also}; {SHARING}, or {ANOTHER}") from None


def _get_or_build(folder: Path, key: str, build: Callable[[Path], None], log: Log, deadline: float) -> tuple[Path, str]:
    """Do the same as `get_or_build` in one folder.

    Raises:
        _Closed: permissions do not let this user read or write there.
        EnvironmentNotAble: as for `get_or_build`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(folder, "cannot be created", error) from None
    entry, origin = folder / key, "found"
    while True:
        if _exists(entry):
            if (why := untrusted_reason(entry)) is not None:
                raise EnvironmentNotAble(
                    f"cache entry {entry} is not used: {why}. Remove it if you did not expect it, and use a cache to "
                    "which only users whom you trust can write: --set cluster.cache=FOLDER"
                )
            problem = find_damage(entry)
            if problem is None:
                return entry, origin
            if unreadable := _unreadable(entry):
                raise _Closed(f"{entry}: {unreadable} cannot be read by {_me()}: {owner_of(unreadable)}")
            log(f"cache entry {entry} is damaged ({problem}); rebuilding it")
            _set_aside(entry)
            origin = "rebuilt"
        claim = folder / f"{key}.claim"
        if _claim(claim):
            try:
                if not _exists(entry):
                    _build(folder, key, build, claim)
                    origin = "rebuilt" if origin == "rebuilt" else "built"
            finally:
                _release(claim)
            continue
        origin = "waited" if origin == "found" else origin
        _wait(entry, claim, deadline, log)


def _me() -> str:
    return user_name(os.geteuid())


def _refusal(path: Path, what: str, error: OSError) -> Exception:
    """Return the error for an unusable folder: `_Closed` if permissions are missing, else `EnvironmentNotAble`."""
    if isinstance(error, PermissionError):
        return _Closed(f"{path}: {what} by {_me()}: {error.strerror}: {owner_of(path)}")
    return EnvironmentNotAble(f"cache {path}: {what}: {error.strerror}; {_room(error)}{ANOTHER}")


def _room(error: OSError) -> str:
    return "free space there or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""


def _exists(entry: Path) -> bool:
    """Return whether the name exists, also as a dangling link, a file or a pipe."""
    try:
        entry.lstat()
        return True
    except FileNotFoundError:
        return False
    except PermissionError as error:
        raise _refusal(entry.parent, "cannot be entered", error) from None


def _unreadable(entry: Path) -> Path | None:
    """Return the first file or folder of an entry that this user cannot read."""
    for path in (entry, *entry.rglob("*")):
        folder = os.path.isdir(path)  # noqa: PTH112 - False, not an error, where its folder may not be entered
        if not os.access(path, os.R_OK | (os.X_OK if folder else 0)):
            return path
    return None


def _claim(claim: Path) -> bool:
    try:
        fd = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    except OSError as error:
        raise _refusal(claim.parent, "cannot be written", error) from None
    os.close(fd)
    try:
        _beat(claim)
    except OSError as error:
        with suppress(OSError):
            claim.unlink(missing_ok=True)  # otherwise others wait for it until it is stale
        raise _refusal(claim.parent, "cannot be written", error) from None
    return True


def _place() -> str:
    """Return where a process id is valid: this boot of this machine, this process namespace (containers)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{host_name()} {psutil.boot_time()}"


def _place_hash() -> str:
    return hashlib.sha256(_place().encode()).hexdigest()[:12]


def _beat(claim: Path) -> None:
    me = psutil.Process()
    started = me.create_time()
    write_json(
        claim, {"host": host_name(), "place": _place(), "pid": me.pid, "started": started, "beat": secrets.token_hex(4)}
    )


def _is_mine(claim: Path) -> bool:
    """Return whether the claim is still this process's; False if it was taken over while this process slept."""
    builder = read_json(claim)
    return isinstance(builder, dict) and builder.get("pid") == os.getpid() and builder.get("place") == _place()


def _release(claim: Path) -> None:
    if _is_mine(claim):
        with suppress(OSError):  # on a disk that is now read-only, the claim becomes stale instead
            claim.unlink(missing_ok=True)


def _build(folder: Path, key: str, build: Callable[[Path], None], claim: Path) -> None:
    _sweep(folder, key)
    temporary = folder / f"{key}.tmp-{_place_hash()}-{os.getpid()}-{secrets.token_hex(4)}"
    ended = threading.Event()

    def heart() -> None:
        while not ended.wait(HEARTBEAT_S):
            with suppress(OSError):  # on a full disk, others take over after the claim is stale
                if _is_mine(claim):
                    _beat(claim)

    thread = threading.Thread(target=heart, daemon=True)
    thread.start()
    try:
        temporary.mkdir()
        build(temporary)
        apply_umask(temporary)
        write_json(temporary / MANIFEST, {"key": key, "files": hash_files(temporary)})
        try:
            temporary.rename(folder / key)
        except OSError:
            if not (folder / key).is_dir():  # unless another builder was faster
                raise
    except OSError as error:
        raise EnvironmentNotAble(
            f"cache {folder}: cannot build the entry: {error.filename or folder}: {error.strerror}; "
            f"{_room(error)}{ANOTHER}"
        ) from None
    finally:
        ended.set()
        thread.join()
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(folder: Path, key: str) -> None:
    """Remove leftovers of dead builders on this machine, and anything a day old, if permissions allow it."""
    for left in [*folder.glob(f"{key}.tmp-*"), *folder.glob(f"{key}.damaged-*"), *folder.glob(f".{key}.claim.*.tmp")]:
        host, _, rest = left.name.removeprefix(f"{key}.tmp-").rpartition("-")[0].rpartition("-")
        dead_here = host == _place_hash() and rest.isdigit() and not psutil.pid_exists(int(rest))
        with suppress(OSError):  # another builder may sweep at the same time
            if dead_here or time.time() - left.lstat().st_mtime > DAY_S:
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink()


def _wait(entry: Path, claim: Path, deadline: float, log: Log) -> None:
    """Wait until the entry exists, the claim is gone, or the claim of a dead builder was removed."""
    last_beat, seen_at, said = None, time.monotonic(), False
    pause = 0.05
    while claim.exists() and not entry.is_dir():
        if not os.access(claim, os.R_OK) and claim.exists():  # the entry will be unreadable, too
            raise _Closed(f"{entry}: {claim} cannot be read by {_me()}: {owner_of(claim)}")
        builder = read_json(claim)
        beat = builder.get("beat") if isinstance(builder, dict) else None
        if beat != last_beat:
            last_beat, seen_at = beat, time.monotonic()
        if _is_dead(builder, time.monotonic() - seen_at):
            _take_over(claim, beat, log)
            return
        if time.monotonic() > deadline:
            raise EnvironmentNotAble(
                f"cache {claim}: the builder {builder} did not finish in time; remove the file if the builder is not "
                "running"
            )
        if not said:
            said = True
            log(f"waiting for the data that {_who(builder)} is preparing")
        heartbeat.beat()  # waiting is progress: the builder's own state is checked here
        time.sleep(pause)
        pause = min(pause * 1.5, 1.0)


def _who(builder: Any) -> str:
    return f"{builder.get('host')} pid {builder.get('pid')}" if isinstance(builder, dict) else "another process"


def _is_dead(builder: Any, silent_s: float) -> bool:
    if not isinstance(builder, dict) or builder.get("place") != _place():  # it may have died before it wrote who it is
        return silent_s > STALE_S
    try:
        process = psutil.Process(int(builder["pid"]))
        same = abs(process.create_time() - builder["started"]) < 1
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:  # another user's: only the claim shows that it is alive
        return silent_s > STALE_S
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return True


def _take_over(claim: Path, beat: Any, log: Log) -> None:
    grave = claim.with_name(f"{claim.name}.dead-{secrets.token_hex(4)}")
    try:
        claim.rename(grave)  # one waiter wins
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refusal(claim, "its builder has died, and it cannot be removed", error) from None
    record = read_json(grave)
    if isinstance(record, dict) and record.get("beat") != beat:
        # Another process claimed the entry between the check and the rename: restore its claim, unless there is a new
        # one.
        with suppress(OSError):
            os.link(grave, claim)
    else:
        log(f"the process that was preparing the data ({_who(record)}) has died; this process takes over")
    with suppress(OSError):
        grave.unlink(missing_ok=True)


def _set_aside(entry: Path) -> None:
    grave = entry.with_name(f"{entry.name}.damaged-{secrets.token_hex(4)}")
    try:
        entry.rename(grave)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refusal(entry, "is damaged, and cannot be removed", error) from None
    if grave.is_dir():
        shutil.rmtree(grave, ignore_errors=True)
    else:  # rmtree would open it, which blocks for a named pipe
        grave.unlink(missing_ok=True)
