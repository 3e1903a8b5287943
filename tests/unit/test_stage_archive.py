"""Archives of staging: files come back as they were, nothing outside the folder, no damage unnoticed."""

from __future__ import annotations

import io
import os
import py_compile
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from allranks.nodes.staging import node
from allranks.nodes.staging.bundles import pack
from allranks.nodes.staging.node import Refused, identity, unpack
from allranks.rundir.checkpoints import file_hash


def tree(folder: Path) -> list[tuple[str, Path]]:
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "a.py").write_text("A = 1\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o700)
    (folder / "ünï").write_text("x" * 5000)
    (folder / ("long-" * 30)).write_text("y")
    (folder / "link").symlink_to("run.sh")
    return [(str(p.relative_to(folder)), p) for p in folder.rglob("*") if p.is_file()]


def packed(target: Path, files: list[tuple[str, Path]]) -> str:
    pack(target, files)
    return file_hash(target)


def test_unpacking_gives_the_files_back(tmp_path: Path) -> None:
    files = tree(tmp_path / "one")
    sha256 = packed(tmp_path / "p.tar", files)
    assert packed(tmp_path / "again.tar", list(reversed(files))) == sha256, "in any order"
    out = tmp_path / "out"
    unpack(str(tmp_path / "p.tar"), str(out), sha256)
    assert len([path for path in out.rglob("*") if path.is_file()]) == 5 and out.stat().st_mode & 0o777 == 0o700
    assert (out / "pkg" / "a.py").read_text() == "A = 1\n"
    assert os.access(out / "run.sh", os.X_OK) and not os.access(out / "ünï", os.X_OK)
    assert not (out / "link").is_symlink() and (out / "link").read_text() == "#!/bin/sh\n"


def test_compiled_files_stay_valid_and_stale_ones_stale(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for name in ("good", "stale"):
        (site / f"{name}.py").write_text(f"NAME = {name!r}\n")
        py_compile.compile(str(site / f"{name}.py"))
    (site / "stale.py").write_text("NAME = 'other'\n")  # of the same size
    os.utime(site / "stale.py", (9, 9))
    os.utime(site / "good.py", (10**9, 10**9))
    py_compile.compile(str(site / "good.py"))
    sha256 = packed(tmp_path / "p.tar", [(str(p.relative_to(site)), p) for p in site.rglob("*") if p.is_file()])
    unpack(str(tmp_path / "p.tar"), str(tmp_path / "out"), sha256)
    code = "import good, stale; print(good.NAME, stale.NAME)"
    done = subprocess.run(
        [sys.executable, "-v", "-B", "-c", code], cwd=tmp_path / "out", capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "good other\n"
    assert any("matches" in line and "good" in line for line in done.stderr.splitlines())
    assert "bytecode is stale for 'stale'" in done.stderr


def hostile(*entries: tarfile.TarInfo, content: bytes = b"x") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for entry in entries:
            if entry.isreg():
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content) if entry.isreg() else None)
    return file.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python has no filter of archives")
@pytest.mark.parametrize(
    "entries",
    [
        [entry("../evil")], [entry("a/../../evil")],
        [entry("out", tarfile.SYMTYPE, "../.."), entry("out/evil")],
        [entry("hard", tarfile.LNKTYPE, "/etc/passwd")], [entry("null", tarfile.CHRTYPE)],
        [entry("pipe", tarfile.FIFOTYPE)],
    ],
)  # fmt: skip
def test_hostile_archives_are_refused_and_leave_nothing(tmp_path: Path, entries: list[tarfile.TarInfo]) -> None:
    """Even with the hash that was announced, which only the user's own bundles have."""
    archive, place = tmp_path / "evil.tar", tmp_path / "place"
    archive.write_bytes(hostile(*entries))
    place.mkdir()
    with pytest.raises(Refused, match="cannot be unpacked"):
        unpack(str(archive), str(place / "out"), file_hash(archive))
    assert list(place.iterdir()) == [] and not (tmp_path / "evil").exists()


@pytest.mark.parametrize("damage", [0.02, 0.5, 0.999, 0, 700, -512])
def test_a_changed_byte_and_a_cut_archive_are_found(tmp_path: Path, damage: float) -> None:
    """A share: the place of the byte; a whole number: where it is cut."""
    sha256 = packed(tmp_path / "p.tar", tree(tmp_path / "one"))
    content = bytearray((tmp_path / "p.tar").read_bytes())
    if isinstance(damage, float):
        content[int(len(content) * damage)] ^= 1
    else:
        del content[damage:]
    (tmp_path / "p.tar").write_bytes(content)
    with pytest.raises(Refused, match="is damaged"):
        unpack(str(tmp_path / "p.tar"), str(tmp_path / "out"), sha256)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_identity_sees_content_names_and_what_is_missing(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        tree(tmp_path / folder)
        (tmp_path / folder / "large").write_bytes(bytes(3 << 20))
    a, b, names = str(tmp_path / "a"), str(tmp_path / "b"), ["pkg/a.py", "large"]
    assert identity(a, names) == identity(b, names) is not None
    (tmp_path / "b" / "large").write_bytes(bytes((3 << 20) - 1) + b"x")
    assert identity(a, names) != identity(b, names) is not None and identity(a, ["no-such"]) is None
    assert identity(str(tmp_path / "a" / "run.sh"), [""]) == identity(str(tmp_path / "b" / "run.sh"), [""])


def test_a_folder_that_others_can_reach_is_refused(tmp_path: Path) -> None:
    node.own_folder(str(tmp_path / "mine"))
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "other").mkdir(mode=0o700)
    names = ["open", "link"]
    if os.getuid() == 0:
        os.chown(tmp_path / "other", 65534, 65534)
        names.append("other")
    for name in names:
        with pytest.raises(Refused, match="this user alone"):
            node.own_folder(str(tmp_path / name))


def test_only_folders_of_ended_jobs_are_swept(tmp_path: Path) -> None:
    names = ["box.7.0", "box.8.0", "box.9.0", "box.9.1", "box.12.0", "other.7.0", "x"]
    for name in names:
        (tmp_path / name).mkdir()
    node.sweep(str(tmp_path), {"job": "box.9.1", "live": ["8", "9"]})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["box.12.0", "box.8.0", "box.9.1", "other.7.0", "x"]
    shutil.rmtree(tmp_path / "box.8.0")
    (tmp_path / "box.7.0").mkdir()
    node.sweep(str(tmp_path), {"job": "box.9.1", "live": None})
    assert (tmp_path / "box.7.0").exists()


@pytest.fixture
def tmpdir_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.usefixtures("tmpdir_variable")
def test_nothing_is_removed_behind_a_link_that_somebody_else_made(tmp_path: Path) -> None:
    behind = tmp_path / "elsewhere" / "c.5.0"
    behind.mkdir(parents=True)
    root = Path(node.job_root())
    root.symlink_to(behind.parent)
    node.sweep(str(root), {"job": "c.9.0", "live": []})
    assert node.remove({"job": "c.5.0"}) == {"gone": True} and behind.is_dir()
    root.unlink()
    behind.parent.rename(root)
    root.chmod(0o700)
    assert node.remove({"job": "c.5.0"}) == {"gone": True} and not root.exists()


@pytest.mark.usefixtures("tmpdir_variable")
def test_where_a_node_takes_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node.job_root() == f"{tmp_path}/allranks-{os.getuid()}"
    for useless in (str(tmp_path / "gone"), "relative", ""):
        monkeypatch.setenv("TMPDIR", useless)
        assert node.job_root() == f"/tmp/allranks-{os.getuid()}"  # noqa: S108
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    assert node.job_root() == f"{tmp_path}/allranks-{os.getuid()}" and node.will_do(str(tmp_path))
    monkeypatch.setattr(node.os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert not node.will_do(str(tmp_path))
