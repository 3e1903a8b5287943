"""Hostile entries of a shared cache: links, files of other users, pickles, arrays that do not fit."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("transformers")

from allranks.errors import AllranksError, DataError, EnvironmentNotAble
from allranks.rundir import shared_cache
from allranks.rundir.checkpoints import MANIFEST, hash_files
from allranks.rundir.files import write_json, write_text_atomic
from allranks.spec import parse_spec
from allranks.train.data import prepared

OTHER = 65534  # nobody
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="files of another user can be made by root only")


def build(folder: Path) -> None:
    (folder / "data.npy").write_bytes(b"ours")


def get(folder: Path) -> tuple[Path, str]:
    return shared_cache.get_or_build(folder, "key", build, lambda text: None, wait_limit_s=2)


def planted(folder: Path) -> Path:
    """An entry of the attacker's, with hashes that are right."""
    entry = folder / "key"
    entry.mkdir(parents=True)
    (entry / "data.npy").write_bytes(b"theirs")
    write_json(entry / MANIFEST, {"key": "key", "files": hash_files(entry)})
    return entry


def give_away(entry: Path) -> None:
    for path in (entry, *entry.rglob("*")):
        os.chown(path, OTHER, OTHER, follow_symlinks=False)


@AS_ROOT
@pytest.mark.parametrize("whole", [True, False])
def test_entry_or_file_of_another_user_in_a_folder_open_to_all_is_refused(tmp_path: Path, whole: bool) -> None:
    folder = tmp_path / "cache"
    entry = planted(folder)
    give_away(entry if whole else entry / "data.npy")
    folder.chmod(0o1777)
    with pytest.raises(EnvironmentNotAble, match="belongs to user" if whole else r"data\.npy in it belongs to user"):
        get(folder)


@AS_ROOT
def test_a_cache_of_a_group_is_shared(tmp_path: Path) -> None:
    """Who lets a group write to the cache trusts the group."""
    folder = tmp_path / "cache"
    give_away(planted(folder))
    folder.chmod(0o2775)
    assert get(folder)[1] == "found"


def test_entry_that_everybody_can_write_to_is_refused(tmp_path: Path) -> None:
    planted(tmp_path / "cache").chmod(0o777)
    with pytest.raises(EnvironmentNotAble, match="everybody can write"):
        get(tmp_path / "cache")


@pytest.mark.parametrize("target", ["../theirs/key", "nowhere", "/etc/passwd", "key"])
def test_entry_that_is_a_link_is_refused(tmp_path: Path, target: str) -> None:
    """A name that leads nowhere was neither found nor could be published: the builder tried again and again."""
    planted(tmp_path / "theirs")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "key").symlink_to(target)
    with pytest.raises(EnvironmentNotAble, match="symbolic link"):
        get(tmp_path / "cache")


def test_link_within_an_entry_is_refused(tmp_path: Path) -> None:
    entry = planted(tmp_path / "cache")
    (tmp_path / "secret").write_bytes(b"theirs")
    (entry / "data.npy").unlink()
    (entry / "data.npy").symlink_to(tmp_path / "secret")
    with pytest.raises(EnvironmentNotAble, match="symbolic link"):
        get(tmp_path / "cache")


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_entry_that_is_no_folder(tmp_path: Path, kind: str) -> None:
    (tmp_path / "cache").mkdir()
    os.mkfifo(tmp_path / "cache" / "key") if kind == "pipe" else (tmp_path / "cache" / "key").write_text("x")
    assert get(tmp_path / "cache")[1] == "rebuilt"


def test_manifest_and_files_that_are_pipes_are_damage(tmp_path: Path) -> None:
    entry = planted(tmp_path / "cache")
    (entry / MANIFEST).unlink()
    os.mkfifo(entry / MANIFEST)
    assert get(tmp_path / "cache")[1] == "rebuilt"
    entry = tmp_path / "cache" / "key"
    (entry / "data.npy").unlink()
    os.mkfifo(entry / "data.npy")
    write_json(entry / MANIFEST, {"key": "key", "files": {"data.npy": {"bytes": 0, "sha256": ""}}})
    assert get(tmp_path / "cache")[1] == "rebuilt"


def test_claim_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.mkfifo(tmp_path / "cache" / "key.claim")
    with pytest.raises(EnvironmentNotAble, match="did not finish in time"):
        get(tmp_path / "cache")


def test_writing_does_not_follow_a_planted_link(tmp_path: Path) -> None:
    """The temporary name could be guessed: a link there sent what was written into a file of the victim's."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".x.json.{os.getpid()}.tmp").symlink_to(victim)
    write_text_atomic(tmp_path / "x.json", "theirs")
    assert victim.read_text() == "mine" and (tmp_path / "x.json").read_text() == "theirs"


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("PWNED",)


def _array(name: str, value: object) -> Callable[[Path], None]:
    return lambda entry: np.save(entry / f"train.{name}.npy", np.asarray(value))


def _bytes(content: bytes) -> Callable[[Path], None]:
    return lambda entry: (entry / "train.ids.npy").write_bytes(content)  # type: ignore[return-value]


HEADER = b"{'descr':'<i4','fortran_order':False,'shape':(99999999999999,)}".ljust(117) + b"\n"
ATTACKS = {
    "a pickle in an array": _array("ids", np.array([Bomb()], dtype=object)),
    "a pickle as an array": _bytes(pickle.dumps(Bomb())),
    "an array larger than its file": _bytes(b"\x93NUMPY\x01\x00v\x00" + HEADER),
    "offsets beyond the end": _array("offsets", np.array([0, 10**12])),
    "negative offsets": _array("offsets", np.array([0, -5, 10])),
    "rows that are not there": _array("pack_rows", np.array([10**9])),
    "negative rows": _array("pack_rows", np.array([-1])),
    "another type": _array("ids", np.array([1.5])),
    "two dimensions": _array("ids", np.zeros((2, 2), np.int32)),
    "a short mask": _array("mask", np.zeros(1, np.uint8)),
    "no packs": _array("pack_offsets", np.zeros(0, np.int64)),
    "facts of another form": lambda entry: (entry / "facts.json").write_text('{"source": 1}'),
    "no facts": lambda entry: (entry / "facts.json").unlink(),
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_prepared_data_that_does_not_fit_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[[Path], None]
) -> None:
    """With right hashes, as an attacker writes. Nothing is executed, and nothing indexed beyond its end."""
    monkeypatch.chdir(tmp_path)
    data = {"source": "builtin:instructions", "subset": 20, "max_length": 64}
    spec = parse_spec({"model": {"name": "tiny:mistral"}, "data": data})
    made = prepared.prepare(spec, root, classifier=False, log=lambda text: None)
    assert len(made.train)
    shutil.copytree(root, tmp_path / "cache")
    entry = tmp_path / "cache" / "allranks" / "data" / made.folder.name
    attack(entry)
    write_json(entry / MANIFEST, {"key": entry.name, "files": hash_files(entry)})
    with pytest.raises((DataError, EnvironmentNotAble)) as error:
        prepared.prepare(spec, tmp_path / "cache", classifier=False, log=lambda text: None)
    assert isinstance(error.value, AllranksError) and "remove the entry" in str(error.value)
    assert not (tmp_path / "PWNED").exists()
