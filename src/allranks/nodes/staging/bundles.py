"""Pack the parts of a spec into archives, stored under the hash of their content; refuse conflicting packages."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from allranks.errors import EnvironmentNotAble
from allranks.nodes.staging.node import identity
from allranks.nodes.staging.sources import PartFiles, is_allranks_file, package_versions, part_files
from allranks.rundir.checkpoints import MANIFEST
from allranks.rundir.files import read_record, write_json
from allranks.rundir.shared_cache import get_or_build
from allranks.spec.records import RunSpec
from allranks.utils.filesystem import cache_root, describe_os_error, owner_of, private_root, with_file_name
from allranks.utils.inputs import read_regular

# package, its first version that supports NumPy 2, the failure of older versions
_NUMPY_2 = (
    ("datasets", "2.21", "formatting calls np.array(copy=False), which NumPy 2 refuses: 'Unable to avoid copy while "
     "creating an array'"),
    ("torch", "2.3", "it was compiled against NumPy 1 and cannot exchange arrays: 'Numpy is not available'"),
    ("pandas", "2.2.2", "it was compiled against NumPy 1 and does not import: 'numpy.dtype size changed'"),
    ("pyarrow", "16.0", "it was compiled against NumPy 1 and does not import: '_ARRAY_API not found'"),
)  # fmt: skip


def package_conflicts(packages: Mapping[str, str]) -> list[str]:
    """Return every known conflict in a list of packages with their versions: both, the consequence, and the fix."""
    conflicts = []
    numpy = packages.get("numpy", "1")
    for name, first_good, problem in _NUMPY_2 if parse_release(numpy) >= (2,) else ():
        have = packages.get(name)
        if have is not None and parse_release(have) < parse_release(first_good):
            cure = f"pip install 'numpy<2', or '{name}>={first_good}'"
            conflicts.append(f"{name} {have} with numpy {numpy}: {problem}; {cure}")
    return conflicts


def parse_release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: ``2.3.1+cpu`` is (2, 3, 1)."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()


def pack(target: Path, files: Iterable[tuple[str, Path]]) -> None:
    """Write files under new names into a new tar file, without their owners. A link is packed as its target file.

    Times are kept, so that compiled Python files stay valid.
    """

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mode = 0o755 if entry.mode & 0o100 else 0o644
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = int(entry.mtime)
        return entry

    with with_file_name(target), tarfile.open(target, "x:", format=tarfile.PAX_FORMAT, dereference=True) as tar:
        for name, path in sorted(files):
            tar.add(path, name, recursive=False, filter=anonymous)


BUNDLE_FORMAT = "2"
ARCHIVE = "part.tar"
UNUSED_PART_S = 30 * 86400
PART_FOLDER = re.compile(r"^[a-z0-9-]+-[0-9a-f]{24}$")
Log = Callable[[str], None]


class BundlePart(msgspec.Struct, frozen=True, kw_only=True):
    """One archive of a bundle; ``path`` is its location on nodes that have it, ``probe`` the files that show this."""

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
    """The interpreter that the packages need: nodes must have it, it is not part of the bundle."""

    version: str
    soabi: str
    executable: str
    candidates: list[str]


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """All parts for one spec; ``key`` is a hash of the hashes of their archives."""

    key: str
    parts: list[BundlePart]
    python: Interpreter
    packages: dict[str, str]
    seconds: float
    file: str

    def part(self, name: str) -> BundlePart | None:
        """Return a part by name."""
        return next((part for part in self.parts if part.name == name), None)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def store_of(spec: RunSpec) -> Path:
    """Return the store of this user's bundles: below the spec's cache, HF_HOME, or the user's cache folder.

    Another user may have created the shared folder without access for this user.
    """
    root = cache_root(spec.cluster.cache).absolute()
    shared = root / "allranks"
    store = shared / f"stage-{os.getuid()}"
    usable = os.access(store if os.path.isdir(store) else shared, os.W_OK | os.X_OK)  # noqa: PTH112
    return store if usable or not os.path.isdir(shared) else private_root(root) / "stage"  # noqa: PTH112


def build(spec: RunSpec, store: Path | None = None, *, packages: bool = True, log: Log = lambda _: None) -> Bundle:
    """Pack what is not packed yet, and verify everything. Two concurrent builders share the work.

    Raises:
        SpecError, DataError: something in the spec does not exist.
        EnvironmentNotAble: packages conflict, something of the hub is not in the cache, or the store cannot be written.
    """
    return assemble(checked_sources(spec, packages=packages), store or store_of(spec), package_versions(), log)


def checked_sources(spec: RunSpec, *, packages: bool, without: Collection[str] = ()) -> list[PartFiles]:
    """Return `part_files`, after a check that the packages, if included, can run elsewhere.

    Raises:
        SpecError, DataError, EnvironmentNotAble: as `build` does.
    """
    conflicts = package_conflicts(package_versions()) if packages else []
    if conflicts:
        raise EnvironmentNotAble("the packages here cannot be staged: " + "; ".join(conflicts))
    return part_files(spec, packages=packages, without=without)


def assemble(
    part_files: list[PartFiles],
    store: Path,
    versions: dict[str, str],
    log: Log = lambda _: None,
    *,
    packed: Sequence[BundlePart] = (),
) -> Bundle:
    """Assemble a bundle of these parts in a store, and of some that are already packed."""
    began = time.monotonic()
    try:
        store.mkdir(parents=True, exist_ok=True)
        store.chmod(0o700)  # code and data of one user, in a cache that may be shared
    except OSError as error:
        raise EnvironmentNotAble(
            f"bundles cannot be kept in {store}: {error.strerror}: {owner_of(store)}; choose another with --set "
            "cluster.cache=FOLDER"
        ) from None
    parts = [*(_pack_part(source, store, log) for source in part_files), *packed]
    key = hashlib.sha256("".join(f"{part.name} {part.sha256}\n" for part in parts).encode()).hexdigest()[:32]
    file = store / "bundles" / f"{key}.json"
    bundle = Bundle(
        key=key, parts=parts, python=interpreter(), packages=versions, seconds=time.monotonic() - began, file=str(file)
    )
    _remove_old_parts(store, {Path(part.archive).parent.name for part in parts})
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, msgspec.to_builtins(bundle))
    return bundle


def _remove_old_parts(store: Path, used: set[str]) -> None:
    """Remove parts that no bundle has used for a month; those in use are marked."""
    for entry in store.iterdir():
        if entry.name in used:
            os.utime(entry)
        elif PART_FOLDER.match(entry.name) and time.time() - entry.stat().st_mtime > UNUSED_PART_S:
            shutil.rmtree(entry, ignore_errors=True)


def load_bundle(path: Path) -> Bundle:
    """Return a bundle that was built before.

    Raises:
        EnvironmentNotAble: the file is missing or damaged.
    """
    try:
        return msgspec.json.decode(read_regular(path), type=Bundle)
    except (OSError, msgspec.MsgspecError) as error:
        raise EnvironmentNotAble(f"{path} is not a bundle: {error}; build one with: allranks stage SPEC") from None


def interpreter() -> Interpreter:
    """Return the running interpreter as a requirement for nodes; ``candidates`` are the paths to try."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    base = getattr(sys, "_base_executable", None) or sys.executable
    near = [base, str(Path(sys.base_prefix) / "bin" / f"python{version}"), f"python{version}", "python3"]
    return Interpreter(
        version=version,
        soabi=str(sysconfig.get_config_var("SOABI")),
        executable=sys.executable,
        candidates=list(dict.fromkeys(near)),
    )


def identity_of(source: PartFiles) -> str:
    """Return the identity by which a node determines whether it has a part.

    Raises:
        EnvironmentNotAble: its files cannot be read here.
    """
    known = identity(str(source.path), list(source.probe))
    if known is None:
        raise EnvironmentNotAble(f"part {source.name}: files of {source.path} cannot be read")
    return known


def _pack_part(source: PartFiles, store: Path, log: Log) -> BundlePart:
    known = identity_of(source)

    def pack_it(folder: Path) -> None:
        log(f"packing {source.name}: {len(source.files)} files of {source.path}")
        try:
            pack(folder / ARCHIVE, source.files)
        except OSError as error:
            raise EnvironmentNotAble(f"part {source.name} cannot be packed: {describe_os_error(error)}") from None

    entry, origin = get_or_build(store, f"{source.name}-{_part_key(source, known)}", pack_it, log)
    archive = read_record(entry / MANIFEST)["files"][ARCHIVE]  # `get_or_build` has compared the hash with the file
    return BundlePart(
        name=source.name,
        path=str(source.path),
        probe=list(source.probe),
        identity=known,
        archive=str(entry / ARCHIVE),
        sha256=archive["sha256"],
        bytes=archive["bytes"],
        files=len(source.files),
        unpacked_bytes=sum(path.stat().st_size for _, path in source.files),
        how=origin,
        revision=source.revision,
        override=source.override or {},
    )


def _part_key(source: PartFiles, known: str) -> str:
    """Return a key of the archive's inputs: the node's view of their content, with sizes and times.

    For installed packages: the RECORD of each, and the names next to them.
    """
    digest = hashlib.sha256(f"{BUNDLE_FORMAT} {known}\n".encode())
    if source.name == "env":
        digest.update(f"{sysconfig.get_config_var('SOABI')} {sys.version_info[:3]}".encode())
        names = sorted(p.name for p in source.path.iterdir() if not is_allranks_file(p, source.path))
        digest.update("\n".join(names).encode())
        return digest.hexdigest()[:24]
    for name, path in source.files:
        status = path.stat()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_mode & 0o100}\n".encode())
    return digest.hexdigest()[:24]
