"""A cache entry is built once, by whoever comes first, and read by everybody.

Any number of ranks, nodes and runs may ask for the same entry at once, on one shared file system, and no
collective is held open while it is built:

1. the key is a hash of all that the content depends on, so equal keys mean equal content;
2. the first to create ``<key>.claim`` (O_EXCL) builds into ``<key>.tmp-...`` and publishes by one rename;
3. the others watch the claim: a builder on the same host is alive while its process is, one elsewhere while it
   keeps rewriting its claim; a claim whose builder has died is taken over (by a rename, which one waiter wins);
4. a reader checks every file against the manifest's hashes; a damaged entry is set aside and built anew.

Two builders at once, after a wrong takeover, would cost time but no harm: both build the same content, and only
one rename succeeds.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from allranks.errors import DataError, EnvironmentNotAble
from allranks.facts import host_name
from allranks.hang.pulse import pulse
from allranks.integrity import MANIFEST, damage, hash_files
from allranks.rundir import read_json, write_json

HEARTBEAT_S = 2.0
STALE_S = 90.0  # network file systems may show a rewritten claim a minute late

Log = Callable[[str], None]


def obtain(
    folder: Path, key: str, build: Callable[[Path], None], log: Log, wait_limit_s: float = 6 * 3600
) -> tuple[Path, str]:
    """The verified entry `key` under `folder`, built by `build(temporary_folder)` if it is not there.

    Returns:
        The entry's folder, and how it was got: ``"found"``, ``"built"``, ``"waited"`` or ``"rebuilt"``.

    Raises:
        EnvironmentNotAble: the folder cannot be written, or the builder took longer than `wait_limit_s`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentNotAble(
            f"cache {folder}: cannot be made: {error.strerror}; give another with --set cluster.cache=FOLDER"
        ) from None
    entry, how = folder / key, "found"
    deadline = time.monotonic() + wait_limit_s
    while True:
        if entry.is_dir():
            problem = damage(entry)
            if problem is None:
                return entry, how
            log(f"cache entry {entry} is damaged ({problem}); it is built anew")
            _set_aside(entry)
            how = "rebuilt"
        claim = folder / f"{key}.claim"
        if _claim(claim):
            try:
                if not entry.is_dir():
                    _build(folder, key, build, claim)
                    how = "rebuilt" if how == "rebuilt" else "built"
            finally:
                _release(claim)
            continue
        how = "waited" if how == "found" else how
        _wait(entry, claim, deadline, log)


def _claim(claim: Path) -> bool:
    try:
        fd = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    except OSError as error:
        raise EnvironmentNotAble(
            f"cache {claim.parent}: cannot be written: {error.strerror}; give another with --set cluster.cache=FOLDER"
        ) from None
    os.close(fd)
    _beat(claim)
    return True


def _place() -> str:
    """Where a process number means something: this boot of this machine, this process namespace (containers)."""
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


def _release(claim: Path) -> None:
    builder = read_json(claim)
    mine = isinstance(builder, dict) and builder.get("pid") == os.getpid() and builder.get("place") == _place()
    if mine:  # else it was taken over while this process slept
        claim.unlink(missing_ok=True)


def _build(folder: Path, key: str, build: Callable[[Path], None], claim: Path) -> None:
    _sweep(folder, key)
    temporary = folder / f"{key}.tmp-{_place_hash()}-{os.getpid()}-{secrets.token_hex(4)}"
    ended = threading.Event()

    def heart() -> None:
        while not ended.wait(HEARTBEAT_S):
            if claim.exists():
                _beat(claim)

    thread = threading.Thread(target=heart, daemon=True)
    thread.start()
    try:
        temporary.mkdir()
        build(temporary)
        write_json(temporary / MANIFEST, {"key": key, "files": hash_files(temporary)})
        try:
            temporary.rename(folder / key)
        except OSError:
            if not (folder / key).is_dir():  # not a rival who was faster
                raise
    except OSError as error:
        raise EnvironmentNotAble(f"cache {folder}: the prepared data cannot be written: {error.strerror}") from None
    finally:
        ended.set()
        thread.join()
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(folder: Path, key: str) -> None:
    """Remove what dead builders of this machine left behind, and anything a day old."""
    for left in folder.glob(f"{key}.tmp-*"):
        host, _, rest = left.name.removeprefix(f"{key}.tmp-").rpartition("-")[0].rpartition("-")
        dead_here = host == _place_hash() and rest.isdigit() and not psutil.pid_exists(int(rest))
        if dead_here or time.time() - left.stat().st_mtime > 86400:
            shutil.rmtree(left, ignore_errors=True)


def _wait(entry: Path, claim: Path, deadline: float, log: Log) -> None:
    """Until the entry is there, the claim is gone, or its builder is found dead and the claim removed."""
    last_beat, seen_at, said = None, time.monotonic(), False
    pause = 0.05
    while claim.exists() and not entry.is_dir():
        builder = read_json(claim)
        beat = builder.get("beat") if isinstance(builder, dict) else None
        if beat != last_beat:
            last_beat, seen_at = beat, time.monotonic()
        if _is_dead(builder, time.monotonic() - seen_at):
            _take_over(claim, beat, log)
            return
        if time.monotonic() > deadline:
            raise EnvironmentNotAble(
                f"cache {claim}: the builder {builder} did not finish in time; remove the file if it is gone"
            )
        if not said:
            said = True
            log(f"waiting for the data that {_who(builder)} is preparing")
        pulse.beat()  # it waits for a builder whose own life is looked at here
        time.sleep(pause)
        pause = min(pause * 1.5, 1.0)


def _who(builder: Any) -> str:
    return f"{builder.get('host')} pid {builder.get('pid')}" if isinstance(builder, dict) else "another process"


def _is_dead(builder: Any, silent_s: float) -> bool:
    if not isinstance(builder, dict):
        return silent_s > STALE_S  # claimed, and died before it said who it was
    if builder.get("place") != _place():
        return silent_s > STALE_S
    try:
        process = psutil.Process(int(builder["pid"]))
        same = abs(process.create_time() - builder["started"]) < 1
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return True


def _take_over(claim: Path, beat: Any, log: Log) -> None:
    grave = claim.with_name(f"{claim.name}.dead-{secrets.token_hex(4)}")
    try:
        claim.rename(grave)  # one waiter wins
    except FileNotFoundError:
        return
    found = read_json(grave)
    if isinstance(found, dict) and found.get("beat") != beat:
        # Somebody claimed anew between the look and the rename: give the claim back, if nobody has one.
        try:
            os.link(grave, claim)
        except FileExistsError:
            pass
    else:
        log(f"the process that was preparing the data ({_who(found)}) has died; its work is taken over")
    grave.unlink(missing_ok=True)


def _set_aside(entry: Path) -> None:
    grave = entry.with_name(f"{entry.name}.damaged-{secrets.token_hex(4)}")
    try:
        entry.rename(grave)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(
            f"cache entry {entry}: damaged, and cannot be set aside: {error.strerror}; remove it by hand"
        ) from None
    shutil.rmtree(grave, ignore_errors=True)
