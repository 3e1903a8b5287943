"""Packed files that expand without measure are read in part, and every answer says so."""

import bz2
import gzip
import io
import lzma
import random
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from allranks.analysis.diagnose import diagnose, logs
from allranks.analysis.trace import analyse
from allranks.cli.diagnose import diagnose_command
from allranks.errors import RequestError
from allranks.utils import inputs
from tests.warm import allranks

LIMIT_S = 60
ERROR = b"RuntimeError: CUDA error: invalid device ordinal\n"
EVENT = b'{"ph":"X","cat":"cpu_op","name":"aten::add","pid":1,"tid":1,"ts":%d,"dur":1.0},\n'


PACKERS = [gzip.compress, bz2.compress, lzma.compress]
KINDS = pytest.mark.parametrize("pack", PACKERS, ids=["gz", "bz2", "xz"])


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rule at a hundredth of its size, so that the test is fast."""
    monkeypatch.setattr(inputs, "EXPANSION_BYTES", 1 << 18)


@KINDS
@pytest.mark.parametrize("unit", [b"step 1 loss 2.0\n", b"a", b"\0"], ids=["lines", "one line", "zeros"])
def test_bomb_is_read_in_part_and_the_verdict_says_so(
    tmp_path: Path, small_limits: None, pack: Callable[[bytes], bytes], unit: bytes
) -> None:
    packed = pack(unit * ((12 << 20) // len(unit)))
    (tmp_path / "a.log").write_bytes(packed)
    found = diagnose([tmp_path / "a.log"])
    assert found.bytes_read <= (1 << 18) + 50 * len(packed) + 2 * logs.BLOCK
    assert "read only in part" in found.problems[0].text and "50 times" in found.problems[0].text
    done = CliRunner().invoke(diagnose_command, [str(tmp_path / "a.log")], standalone_mode=False)
    assert "No failure found in these logs" not in done.output
    if unit != b"\0":
        assert "1 file was not read, or only in part" in " ".join(done.output.split())


@KINDS
def test_what_comes_before_the_limit_counts(tmp_path: Path, small_limits: None, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a.log").write_bytes(pack(ERROR + b"x\n" * (3 << 20)))
    found = diagnose([tmp_path])
    assert [f.id for f in found.findings] == ["invalid_device"] and found.problems


@KINDS
def test_ordinary_logs_are_read_whole(tmp_path: Path, small_limits: None, pack: Callable[[bytes], bytes]) -> None:
    """Above the bytes that are free, but not beyond what text expands to."""
    draw = random.Random(0)
    values = [(i % 8, i // 8, draw.random(), draw.randrange(9999)) for i in range(24_000)]
    lines = [b"[rank%d] step %d loss %.5f tokens/s %d\n" % drawn for drawn in values]
    (tmp_path / "a.log").write_bytes(pack(b"".join(lines) + ERROR))
    found = diagnose([tmp_path])
    assert [f.id for f in found.findings] == ["invalid_device"] and not found.problems
    assert found.bytes_read > 1 << 20


def test_zeros_behind_a_bomb_give_it_no_more_room(tmp_path: Path, small_limits: None) -> None:
    """The size of a file is no measure: a hole costs nothing."""
    with (tmp_path / "a.log").open("wb") as file:
        file.write(gzip.compress(b"a\n" * (16 << 20)))
        file.truncate(1 << 40)
    assert "read only in part" in diagnose([tmp_path]).problems[0].text


def test_real_limits_bound_a_bomb_of_gigabytes(tmp_path: Path) -> None:
    """At their real size: 1 GB of one line, in 1 MB."""
    packer = zlib.compressobj(9, wbits=31)
    with (tmp_path / "a.log").open("wb") as file:
        for _ in range(16):
            file.write(packer.compress(b"a" * (64 << 20)))
        file.write(packer.flush())
    assert "read only in part" in allranks("diagnose", "a.log", cwd=tmp_path, timeout_s=LIMIT_S).stdout


def test_rest_of_a_line_that_is_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LINE_READ", 1 << 20)
    (tmp_path / "a.log").write_bytes(b"first\n" + b"a" * (8 << 20) + b"\n" + ERROR)
    found = diagnose([tmp_path])
    assert found.findings[0].evidence[0].line == 3
    assert "a line is longer than 1 MiB" in found.problems[0].text
    assert found.bytes_read < 4 << 20


def test_xz_that_asks_for_gigabytes_of_memory(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
    packer = lzma.LZMACompressor(filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 16}])
    data = bytearray(packer.compress(b"step 1\n") + packer.flush())
    assert lzma.decompress(bytes(data), filters=None) and filters
    at = data.index(b"\x21\x01", 12) + 2  # the filter's id, the size of its properties, then the dictionary's size
    data[at] = 40  # 4 GiB - 1
    data[20:24] = zlib.crc32(bytes(data[12:20])).to_bytes(4, "little")
    (tmp_path / "a.log").write_bytes(bytes(data))
    assert "damaged" in diagnose([tmp_path]).problems[0].text


def test_zip_and_tar_are_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.log", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bomb", b"a\n" * (16 << 20))
    with tarfile.open(fileobj=io.BytesIO(), mode="w:gz") as tar:
        entry = tarfile.TarInfo("bomb")
        entry.size = 4 << 20
        tar.addfile(entry, io.BytesIO(b"a\n" * (2 << 20)))
    found = diagnose([tmp_path])
    assert "binary" in found.problems[0].text and found.bytes_read == 0


@pytest.mark.parametrize(
    "unit", [EVENT % 5, b" ", b"[", b"{", b"},{", b'"'], ids=["events", "blanks", "lists", "objects", "ends", "quotes"]
)
def test_trace_that_expands_is_read_in_part(tmp_path: Path, small_limits: None, unit: bytes) -> None:
    first = b"".join(EVENT % (10 * i) for i in range(1, 100))
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents":[' + first + unit * ((10 << 20) // len(unit))))
    try:
        report = analyse([path])[0]
    except RequestError as error:  # what is no list of events is no trace
        assert "has no list of events" in str(error) or "50 times" in str(error)
    else:
        assert any("50 times" in p.message for p in report.problems), report.problems


def test_ordinary_trace_is_read_whole(tmp_path: Path, small_limits: None) -> None:
    draw = random.Random(0)
    events = b"".join(EVENT % (i * 10 + draw.randrange(9)) for i in range(40_000)).rstrip(b",\n")
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents":[' + events + b"]}"))
    report = analyse([path])[0]
    assert report.ranks[0].n_events == 40_000 and not any("times" in p.message for p in report.problems)
