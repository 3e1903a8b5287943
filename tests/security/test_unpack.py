"""Archives whose entries cannot exist beside each other, or cannot exist at all, end in a clear refusal and leave nothing."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from allranks.nodes.staging.node import Refused, unpack

FOLDER = tarfile.DIRTYPE


def entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = kind
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def archive(entries: list[tarfile.TarInfo]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for made in entries:
            made.size = int(made.isreg())
            tar.addfile(made, io.BytesIO(b"x") if made.isreg() else None)
    return file.getvalue()


def take(folder: Path, content: bytes, limit: int = 10) -> int:
    (folder / "a.tar").write_bytes(content)
    return unpack(str(folder / "a.tar"), str(folder / "out"), hashlib.sha256(content).hexdigest(), limit)


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ([entry("a"), entry("a/b")], "below 'a', which is a file"),
        ([entry("a"), entry("a/b/c/d")], "below 'a', which is a file"),
        ([entry("a"), entry("a/b", FOLDER)], "below 'a', which is a file"),
        ([entry("a/b"), entry("a")], "twice"),
        ([entry("a", FOLDER), entry("a")], "twice"),
        ([entry("a"), entry("a", FOLDER)], "twice"),
        ([entry("a"), entry("x/../a")], "outside of the folder"),
        ([entry(".")], "cannot be created"),
        ([entry("a/")], "cannot be created"),
        ([entry("x" * 256)], "no file system supports"),
        ([entry("/".join(["y" * 200] * 30))], "no file system supports"),
        ([entry("m", mtime=1e40)], "an invalid file time"),
        ([entry("m", pax_headers={"mtime": "inf"})], "an invalid file time"),
        ([entry("m", pax_headers={"mtime": "nan"})], "an invalid file time"),
        ([entry("a", pax_headers={"size": "-5"})], "negative size"),
        ([entry("a", pax_headers={"path": "../../etc/x"})], "outside of the folder"),
        ([entry("s", tarfile.SYMTYPE, linkname="/etc"), entry("s/x")], "link or a device"),
        ([entry("s", tarfile.LNKTYPE, linkname="/etc/passwd")], "link or a device"),
        ([entry("c", tarfile.CONTTYPE)], "link or a device"),
        ([entry("a", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9" * 11})], ""),
        ([entry(str(i)) for i in range(20)], "more than the announced 10 bytes"),
    ],
)  # fmt: skip
def test_archive_is_refused_and_leaves_nothing(tmp_path: Path, entries: list[tarfile.TarInfo], word: str) -> None:
    with pytest.raises(Refused, match=word or None):
        take(tmp_path, archive(entries))
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar"]


def test_negative_size_does_not_pass_the_limit(tmp_path: Path) -> None:
    """A size of -1 in the header made room for one byte more than was announced."""
    content = bytearray(archive([entry("a")]))
    content[124:136] = b"\xff" * 12
    content[148:156] = b"%06o\0 " % (sum(content[:148]) + 8 * 32 + sum(content[156:512]))
    with pytest.raises(Refused, match="negative size"):
        take(tmp_path, bytes(content))


def test_names_that_one_file_system_takes_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where case is ignored, the second of A and a exists already."""
    real = os.open
    monkeypatch.setattr(
        "allranks.nodes.staging.node.os.open", lambda path, *a, **k: real(str(path).replace("/A", "/a"), *a, **k)
    )
    with pytest.raises(Refused, match="'A', which cannot be created here: File exists"):
        take(tmp_path, archive([entry("a"), entry("A")]))
    assert not (tmp_path / "out.partial").exists()


def test_a_pipe_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(Refused, match="not a regular file"):
        unpack(str(tmp_path / "a.tar"), str(tmp_path / "out"), "", 10)


def test_folders_may_come_twice(tmp_path: Path) -> None:
    assert take(tmp_path, archive([entry("d", FOLDER), entry("d/a"), entry("d", FOLDER), entry("d/b")])) == 2
