"""Whatever is given, it is said what could not be read, the rest is read, and nothing raises."""

import bz2
import gzip
import io
import lzma
import os
import random
import socket
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allranks.analysis.diagnose import Diagnosis, diagnose, scanner
from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.cli.diagnose import diagnose_command
from allranks.errors import RequestError
from allranks.utils.decompression import READ_BYTES, DecompressedFile
from tests.sampling import examples
from tests.unit.diagnose_examples import DEVICE, ids, oom

OOM = oom(want="2.00 GiB").encode() + b"\n"
PACKS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
NOISE = random.Random(0).randbytes(1 << 19).hex().encode()


def make(folder: Path, **files: bytes) -> Diagnosis:
    for name, data in files.items():
        (folder / f"{name}.log").write_bytes(data)
    return diagnose([folder])


def problems(found: Diagnosis) -> dict[str, str]:
    return {Path(p.file).name: p.text for p in found.problems}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        *((pack(b"hello\n" + OOM), 2) for pack in PACKS.values()),  # whatever its name
        ((OOM.decode().rstrip() + " auf dem Gerät in Köln\n").encode("latin-1"), 1),
        (b"\0" * 100_000 + b"begin\n" + OOM, 2),  # holes of zeros are not binary
    ],
    ids=[*PACKS, "no UTF-8", "holes"],
)
def test_what_can_be_read_is_read(tmp_path: Path, data: bytes, line: int) -> None:
    (finding,) = make(tmp_path, a=data).findings
    assert (finding.id, finding.evidence[0].line) == ("cuda_oom", line)


@pytest.mark.parametrize("kind", PACKS)
def test_cut_archive_is_said_and_its_beginning_counts(tmp_path: Path, kind: str) -> None:
    whole = PACKS[kind](OOM + b"\n".join(NOISE[i : i + 80] for i in range(0, len(NOISE), 80)))
    found = make(tmp_path, a=whole[: int(len(whole) * 0.9)], b=DEVICE.encode())
    assert set(ids(found)) == {"cuda_oom", "invalid_device"} and "truncated or damaged" in problems(found)["a.log"]
    if kind != "bz2":  # the end of a log tells most: less than a block of it is not lost with what is missing
        small = make(tmp_path, a=PACKS[kind](NOISE[:120_000] + b"\n" + OOM + NOISE[120_000:240_000])[:-30_000], b=b"")
        assert ids(small) == ["cuda_oom"] and "is truncated; the part before was read" in problems(small)["a.log"]


def test_binary_packed_and_empty_files_are_said(tmp_path: Path) -> None:
    zstd = b"\x28\xb5\x2f\xfd" + bytes(100)
    elf, noise = b"\x7fELF" + os.urandom(4000), os.urandom(40000)
    found = make(tmp_path, core=elf, noise=noise, empty=b"", good=OOM, zstd=zstd)
    assert ids(found) == ["cuda_oom"]
    said = {"core.log": "binary", "noise.log": "binary", "empty.log": "empty", "zstd.log": "decompress it first"}
    assert {name: said[name] in text for name, text in problems(found).items()} == dict.fromkeys(said, True)


def test_unreadable_files_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead links, links in a circle, pipes and sockets; a folder that holds itself is read once."""
    (tmp_path / "dead.log").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle.log").symlink_to(tmp_path / "circle.log")
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "loop").symlink_to(tmp_path)
    make(tmp_path, good=OOM)
    (tmp_path / "again.log").symlink_to(tmp_path / "good.log")
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.log")
        found = diagnose([tmp_path, tmp_path / "loop"])
    assert (ids(found), found.files, found.findings[0].count) == (["cuda_oom"], 1, 1)
    said = problems(found)
    assert set(said) == {"dead.log", "circle.log", "pipe.log", "s.log"}
    assert "not a regular file" in said["pipe.log"] and "links" in said["circle.log"]


@pytest.mark.parametrize(
    ("content", "said", "code"),
    [
        (b"", "This log is empty", 1),
        (b"step 1 loss 2.0\n", "they end in progress", 0),
        (b"loading the model\n", "incomplete", 1),
        (b"Traceback (most recent call last):\n", "cause is not in these logs", 1),
        (os.urandom(9000), "None of these files could be read", 2),
        (OOM, "GPU memory exhausted", 1),
        (None, "None of these files could be read", 2),
    ],
    ids=["empty", "healthy", "incomplete", "unexplained", "binary", "failed", "no file"],
)
def test_what_is_said_and_the_exit_code(tmp_path: Path, content: bytes | None, said: str, code: int) -> None:
    """That nothing could be read is not passed off as health."""
    if content is not None:
        (tmp_path / "a.log").write_bytes(content)
    done = CliRunner().invoke(diagnose_command, [str(tmp_path)], standalone_mode=False)
    assert said in done.output
    assert done.return_value == code


def test_names_that_are_no_text_reach_terminal_and_json(tmp_path: Path) -> None:
    """A file's name may hold any bytes, escape codes among them."""
    (tmp_path / "d").mkdir()
    for name in (b"a\xff.log", b"b\x1b[31m\n.log"):
        Path(os.fsdecode(os.fsencode(tmp_path / "d") + b"/" + name)).write_bytes(OOM)
    Path(os.fsdecode(os.fsencode(tmp_path / "d") + b"/c\xff")).write_bytes(os.urandom(9000))
    for extra in ((), ("--json",)):
        done = CliRunner().invoke(diagnose_command, [str(tmp_path / "d"), *extra], standalone_mode=False)
        assert done.exception is None, done.exception
        assert "a\\xff.log" in done.output.replace("\\\\", "\\")
        assert "\x1b[31m" not in done.output


def test_ranks_that_write_into_one_file_are_told_apart(tmp_path: Path) -> None:
    """Three ranks' tracebacks, line by line in turn: each error belongs to the rank and the frames with its prefix."""
    frames = {0: "torch/optim/adamw.py", 1: "torch/nn/linear.py", 2: "train.py"}
    errors = {0: oom(), 1: "KeyError: 'x'", 2: "KeyError: 'x'"}
    rows = [[f'[rank{r}]:   File "/env/{frames[r]}", line 5, in step', f"[rank{r}]: {errors[r]}"] for r in range(3)]
    (tmp_path / "a.log").write_text("\n".join(line for turn in zip(*rows, strict=True) for line in turn) + "\n")
    found = {f.id: f for f in diagnose([tmp_path]).findings}
    assert found["cuda_oom_optimizer_step"].rank == 0
    assert "linear.py" in found["application_error"].cause
    assert found["application_error"].rank == 1


def test_absent_path_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such file"):
        diagnose([tmp_path / "nowhere"])


def different_lines() -> Iterator[bytes]:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=9)) for _ in range(5000)]
    for _ in range(80_000):
        yield (" ".join(rng.choices(words, k=8)) + "\n").encode() * 2  # what comes twice is remembered, up to a bound


@pytest.mark.parametrize(
    ("pieces", "limit"),
    [
        ([*[b"x" * (1 << 20)] * 8, OOM.rstrip(), *[b" y" * (1 << 19)] * 8, b"\n"], 8 << 20),
        (different_lines(), 12 << 20),
    ],
    ids=["endless line", "different lines"],
)
def test_any_log_needs_bounded_memory(tmp_path: Path, pieces: Any, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MB without a line end: what stands in its middle is found, and it is never held whole."""
    monkeypatch.setattr(scanner, "MAX_FORMS", 5000)
    with (tmp_path / "a.log").open("wb") as file:
        file.writelines(pieces)
    tracemalloc.start()
    found = diagnose([tmp_path])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < limit
    if isinstance(pieces, list):
        evidence = found.findings[0].evidence[0]
        assert (ids(found), evidence.line) == (["cuda_oom"], 1) and len(evidence.text) < 2000


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.binary(max_size=200) | st.sampled_from([e.example.encode() for e in CATALOGUE.values()]), max_size=20),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_any_bytes_are_survived(tmp_path: Path, pieces: list[bytes], end: bytes) -> None:
    (tmp_path / "a.log").write_bytes(end.join(pieces))
    done = CliRunner().invoke(diagnose_command, [str(tmp_path), "--json"], standalone_mode=False)
    assert done.exception is None, done.exception


@pytest.mark.parametrize("kind", PACKS)
@pytest.mark.parametrize("shift", [-2, -1, 0, 1])
@pytest.mark.parametrize("zeros", [0, 3 * READ_BYTES])
def test_a_second_stream_is_read_wherever_the_first_one_ends(kind: str, shift: int, zeros: int) -> None:
    """Reads end inside the next stream's first bytes, between the streams, and in zeros between them."""
    first = random.Random(7).randbytes(500)
    packed = PACKS[kind](first)
    file = _Reads(packed + bytes(zeros) + PACKS[kind](b"the second"), len(packed) + shift)
    assert DecompressedFile(file, kind).read(1000) == first + b"the second"


class _Reads(io.BytesIO):
    """A file whose first read ends at a given place."""

    def __init__(self, data: bytes, first: int) -> None:
        super().__init__(data)
        self._first = first

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() == 0:
            size = self._first
        return super().read(size)
