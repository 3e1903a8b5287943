"""Dumps of the flight recorder that attack their reader: each costs no more than its own file."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from allranks.analysis.diagnose import parallel_scan
from allranks.analysis.diagnose.logs import find_logs
from allranks.analysis.diagnose.parallel_scan import scan_files
from allranks.analysis.flight_recorder import plain_value, read_flight_record
from allranks.utils.workers import map_in_processes
from tests.warm import allranks

LIMIT_S = 30
GOOD = "RuntimeError: CUDA error: invalid device ordinal\n"


def _text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


PROTO = b"\x80\x02"
KEY = _text("pg_config")


def _entry(field: str, value: bytes) -> bytes:
    """A dump of one collective in which one field has a value of the attacker's."""
    return (
        PROTO + b"}(" + KEY + b"}" + _text("entries") + b"](" + b"}("
        + _text("collective_seq_id") + b"K\x01" + _text(field) + value + b"ueu."
    )  # fmt: skip


def _doubling(kind: bytes, levels: int = 60) -> bytes:
    """Each level holds the one below it twice, through the memo; the topmost is left on the stack."""
    value = _text("x") + b"q\x00"
    for level in range(1, levels):
        value += b"0(" + 2 * (b"h" + bytes([level - 1])) + kind + b"q" + bytes([level])
    return value


ATTACKS = {
    "doubling lists as sizes": _entry("input_sizes", _doubling(b"l")),
    "doubling tuples as sizes": _entry("input_sizes", _doubling(b"t")),
    "doubling lists as name": _entry("profiling_name", _doubling(b"l")),
    "doubling lists as state": _entry("state", _doubling(b"l")),
    "doubling lists as group": _entry("process_group", _doubling(b"l")),
    "doubling lists in a frame": _entry("frames", b"](}(" + _text("filename") + _doubling(b"l") + b"ue"),
    "doubling tuples as key": PROTO + b"}(" + KEY + b"}" + _doubling(b"t") + b"Nu.",
    "deep tuple as key": PROTO + b"}(" + KEY + b"})" + b"\x85" * 1_000_000 + b"Nu.",
    "deep tuple as key of an older opcode": PROTO + b"}(" + KEY + b"()" + b"\x85" * 1_000_000 + b"Ndu.",
    "keys that collide": PROTO + b"}(" + KEY + b"}"
    + b"".join(b"\x8a\x0c" + (i * ((1 << 61) - 1)).to_bytes(12, "little") + b"N" for i in range(1, 60_000)) + b"u.",
    "no mark": PROTO + KEY + b"l.",
    "no mark for items": PROTO + b"}" + KEY + b"u.",
    "nested lists": _entry("input_sizes", b"(" * 200_000 + b"l" * 200_000),
    "nested tuples": _entry("input_sizes", b")" + b"\x85" * 200_000),
    "a list that holds itself": _entry("input_sizes", b"]q\x05h\x05a"),
    "a number without end": _entry("process_group", b"(\x8b" + (200_000).to_bytes(4, "little") + b"\x7f" * 200_000 + b"l"),
    "a sequence without end": PROTO + b"}(" + KEY + b"}" + _text("entries") + b"](}(" + _text("collective_seq_id")
    + b"\x8b" + (9_000).to_bytes(4, "little") + b"\x7f" * 9_000 + b"ueu.",
    "nested JSON": b'{"pg_config":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "an object": PROTO + KEY + b"cos\nsystem\n(" + _text("touch PWNED") + b"tR.",
    "an append to a text": PROTO + KEY + b"Na.",
    "a text of 2 GiB": PROTO + KEY + b"X\xff\xff\xff\x7f.",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_hostile_dump_costs_no_other_file(tmp_path: Path, attack: bytes) -> None:
    (tmp_path / "flight.rank0").write_bytes(attack)
    (tmp_path / "good.log").write_text(GOOD)
    done = allranks("diagnose", ".", "--json", cwd=tmp_path, timeout_s=LIMIT_S)
    assert done.returncode == 1, (done.returncode, done.stderr[-500:])
    assert "invalid_device" in [f["id"] for f in json.loads(done.stdout)["findings"]]
    assert not (tmp_path / "PWNED").exists()


def test_a_dump_that_could_not_be_read_is_not_health(tmp_path: Path) -> None:
    (tmp_path / "flight.rank0").write_bytes(ATTACKS["no mark"])
    done = allranks("diagnose", ".", cwd=tmp_path, timeout_s=LIMIT_S)
    assert done.returncode == 2 and "is truncated or damaged" in " ".join(done.stdout.split())


def test_many_opcodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.analysis.flight_recorder.MAX_OPCODES", 1000)
    with pytest.raises(ValueError, match="more than 1000 opcodes"):
        plain_value(PROTO + b"N" * 2000 + b".")


def test_a_shared_part_is_read_wherever_it_stands(tmp_path: Path) -> None:
    """torch shares frames among calls through the memo: that stays allowed."""
    frame = b"}(" + _text("filename") + _text("a.py") + _text("line") + b"K\x07" + _text("name") + _text("f") + b"u"
    path = tmp_path / "flight.rank3"
    path.write_bytes(_entry("frames", b"](" + frame + b"q\x01h\x01h\x01e"))
    flight = read_flight_record(path)
    assert flight.rank == 3 and flight.calls[0].frames == ["a.py:7:f"] * 3


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), KeyError("x"), AssertionError()])
def test_any_error_of_a_parser_costs_its_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(scanner: object, number: int, source: object) -> None:
        if number == 0:
            raise error
        return real(scanner, number, source)  # type: ignore[arg-type]

    real = parallel_scan._scan_one
    monkeypatch.setattr(parallel_scan, "_scan_one", fail)
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text(GOOD)
    bad, good = scan_files(find_logs([tmp_path])[0])
    assert "was not read" in bad.problems[0] and type(error).__name__ in bad.problems[0]
    assert good.signals and not good.problems


def _die_on_two(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * 10


def test_a_process_that_is_killed_costs_its_own_input_only() -> None:
    """As the kernel does for want of memory."""
    found = map_in_processes(_die_on_two, [0, 1, 2, 3, 4], workers=2)
    assert [0 if isinstance(answer, ChildProcessError) else answer for answer in found] == [0, 10, 0, 30, 40]
    assert "killed by signal 9" in str(found[2])
