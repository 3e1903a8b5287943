"""The bundle: every part that nodes may lack, packed once into a store, known by the hash of what is in it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.caches import cache_root
from allranks.errors import EnvironmentNotAble, RunFailed
from allranks.rundir import write_json
from allranks.spec.records import RunSpec
from allranks.stage.archive import Packed, Refused, check, pack
from allranks.stage.environment import editable_packages, is_own, package_versions
from allranks.stage.source import Source
from allranks.stage.sources import sources
from allranks.stage.unpack import WHOLE_BYTES, identity
from allranks.stage.versions import clashes
from allranks.train.data.cache import obtain

FORMAT = "1"
KEPT_S = 30 * 86400
ENTRY = re.compile(r"^[a-z-]+-[0-9a-f]{24}$")
Log = Callable[[str], None]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One archive of a bundle; ``path`` is where nodes that need none have it, ``probe`` which files prove that."""

    name: str
    path: str
    probe: list[str]
    identity: str
    archive: str
    sha256: str
    bytes: int
    files: int
    unpacked_bytes: int
    how: str
    revision: str | None = None
    override: dict[str, str | None] = {}


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """What the packages need to be run: nodes must have it, it is not part of the bundle."""

    version: str
    soabi: str
    executable: str
    candidates: list[str]


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """All parts for one spec; ``key`` is a hash of the hashes of their archives."""

    key: str
    parts: list[Part]
    python: Interpreter
    packages: dict[str, str]
    seconds: float
    file: str

    def part(self, name: str) -> Part | None:
        """A part by name."""
        return next((part for part in self.parts if part.name == name), None)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def store_of(spec: RunSpec) -> Path:
    """Where this user's bundles are kept: below the spec's cache, HF_HOME, or the user's cache folder."""
    return cache_root(spec.cluster.cache).absolute() / "allranks" / f"stage-{os.getuid()}"


def build(spec: RunSpec, store: Path | None = None, *, packages: bool = True, log: Log = lambda _: None) -> Bundle:
    """Pack what is not packed yet, and verify all of it. Two builders at once share the work.

    Raises:
        SpecError, DataError: what the spec names is not there.
        EnvironmentNotAble: packages clash, something of the hub is not in the cache, or the store cannot be written.
    """
    return assemble(checked_sources(spec, packages=packages, log=log), store or store_of(spec), package_versions(), log)


def checked_sources(
    spec: RunSpec, *, packages: bool, without: Collection[str] = (), log: Log = lambda _: None
) -> list[Source]:
    """`sources`, and with the packages a check that they can run elsewhere.

    Raises:
        SpecError, DataError, EnvironmentNotAble: as `build` does.
    """
    found = clashes(package_versions()) if packages else []
    if found:
        raise EnvironmentNotAble("the packages here cannot be staged: " + "; ".join(map(str, found)))
    parts = sources(spec, packages=packages, without=without)
    for name, folder in editable_packages(Path(sysconfig.get_paths()["purelib"])).items() if packages else ():
        if name != "allranks" and not any(Path(folder) == part.path for part in parts):
            log(
                f"note: {name} is installed in editable mode from {folder} and is not in the bundle; pip install it whole"
            )
    return parts


def assemble(
    found: list[Source],
    store: Path,
    versions: dict[str, str],
    log: Log = lambda _: None,
    *,
    packed: Sequence[Part] = (),
) -> Bundle:
    """A bundle of these parts in a store, and of some that are packed already."""
    began = time.monotonic()
    try:
        store.mkdir(parents=True, exist_ok=True)
        store.chmod(0o700)  # code and data of one user, in a cache that others may share
    except OSError as error:
        raise EnvironmentNotAble(f"bundles cannot be kept in {store}: {error.strerror}; set cluster.cache") from None
    parts = [*(_part(source, store, log) for source in found), *packed]
    key = hashlib.sha256("".join(f"{part.name} {part.sha256}\n" for part in parts).encode()).hexdigest()[:32]
    file = store / "bundles" / f"{key}.json"
    bundle = Bundle(
        key=key,
        parts=parts,
        python=interpreter(),
        packages=versions,
        seconds=time.monotonic() - began,
        file=str(file),
    )
    _tidy(store, {Path(part.archive).parent.name for part in parts})
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, msgspec.to_builtins(bundle))
    return bundle


def _tidy(store: Path, used: set[str]) -> None:
    """Remove parts that no bundle was built of for a month; those in use are marked as such."""
    for entry in store.iterdir():
        if entry.name in used:
            os.utime(entry)
        elif ENTRY.match(entry.name) and time.time() - entry.stat().st_mtime > KEPT_S:
            shutil.rmtree(entry, ignore_errors=True)


def probe_of(part: Part) -> dict[str, Any]:
    """What a node must know to tell whether it has a part."""
    return {name: getattr(part, name) for name in ("name", "path", "probe", "identity", "sha256")}


def load_bundle(path: Path) -> Bundle:
    """A bundle that was built before.

    Raises:
        EnvironmentNotAble: the file is not there or damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Bundle)
    except (OSError, msgspec.MsgspecError) as error:
        raise EnvironmentNotAble(f"{path} is no bundle: {error}; build one with: allranks stage SPEC") from None


def interpreter() -> Interpreter:
    """The running interpreter, as nodes must have it; ``candidates`` are the places to look for it."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    base = getattr(sys, "_base_executable", None) or sys.executable
    near = [base, str(Path(sys.base_prefix) / "bin" / f"python{version}"), f"python{version}", "python3"]
    return Interpreter(
        version=version,
        soabi=str(sysconfig.get_config_var("SOABI")),
        executable=sys.executable,
        candidates=list(dict.fromkeys(near)),
    )


def identity_of(source: Source) -> str:
    """By which a node knows whether it has a part.

    Raises:
        EnvironmentNotAble: its files cannot be read here.
    """
    known = identity(str(source.path), list(source.probe))
    if known is None:
        raise EnvironmentNotAble(f"part {source.name}: files of {source.path} cannot be read")
    return known


def _part(source: Source, store: Path, log: Log) -> Part:
    known = identity_of(source)

    def pack_it(folder: Path) -> None:
        log(f"packing {source.name}: {len(source.files)} files of {source.path}")
        try:
            packed = pack(folder / "part.tar", source.files)
        except OSError as error:
            raise EnvironmentNotAble(f"part {source.name} cannot be packed: {error}") from None
        write_json(folder / "part.json", msgspec.to_builtins(packed))

    entry, how = obtain(store, f"{source.name}-{_key(source, known)}", pack_it, log)
    packed = msgspec.json.decode((entry / "part.json").read_bytes(), type=Packed)
    archive = entry / "part.tar"
    if how != "found":
        try:
            check(archive, packed)
        except Refused as error:
            raise RunFailed(f"part {source.name}: {archive} {error}; remove its folder and build it again") from None
    return Part(
        name=source.name,
        path=str(source.path),
        probe=list(source.probe),
        identity=known,
        archive=str(archive),
        sha256=packed.sha256,
        bytes=packed.bytes,
        files=packed.files,
        unpacked_bytes=packed.unpacked_bytes,
        how=how,
        revision=source.revision,
        override=source.override or {},
    )


def _key(source: Source, known: str) -> str:
    """What the archive depends on: the content of small files; size and time of large ones, besides samples of them.

    For installed packages: the RECORD of each, and the names that lie beside them.
    """
    digest = hashlib.sha256(f"{FORMAT} {known}\n".encode())
    if source.name == "env":
        digest.update(f"{sysconfig.get_config_var('SOABI')} {sys.version_info[:3]}".encode())
        names = sorted(p.name for p in source.path.iterdir() if not is_own(p, source.path))
        digest.update("\n".join(names).encode())
        return digest.hexdigest()[:24]
    whole = [name for name, path in source.files if path.stat().st_size <= WHOLE_BYTES]
    root = source.path if source.probe != ("",) else source.path.parent
    digest.update(str(identity(str(root), whole)).encode())
    for name, path in source.files:
        status = path.stat()
        large = status.st_size > WHOLE_BYTES
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns if large else 0}\n".encode())
        digest.update(b"x" if status.st_mode & 0o100 else b"-")
    return digest.hexdigest()[:24]
