"""Hostile files: pipes and devices, specs that stand for endless work, dumps that attack the reader of flights."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.analysis.diagnose import parallel_scan
from allranks.analysis.diagnose.logs import find_logs
from allranks.analysis.diagnose.parallel_scan import scan_files
from allranks.analysis.flight_recorder import plain_value, read_flight_record
from allranks.analysis.report.run_data import read_run_data
from allranks.errors import SpecError
from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from allranks.spec import load_spec
from allranks.spec.loader import MAX_DEPTH, MAX_NODES, parse_yaml
from allranks.utils import inputs
from allranks.utils.inputs import FileTooLarge, NotRegularFile, open_regular, read_input, read_lines, read_regular
from allranks.utils.workers import map_in_processes
from tests.warm import allranks

LIMIT_S = 20
SPEC = "name: n\nmodel: {name: tiny:mistral}\ndata: {source: builtin:instructions}\n"


def verb(*args: str, cwd: Path, code: int) -> str:
    done = allranks(*args, cwd=cwd, timeout_s=LIMIT_S)
    assert done.returncode == code, (args, done.returncode, done.stdout[-500:], done.stderr[-500:])
    assert "bug in allranks" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def special(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files of every kind, with the word that names it."""
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    os.mkfifo("pipe.yaml")
    Path("circle.yaml").symlink_to("circle.yaml")
    Path("folder.yaml").mkdir()
    Path("zero.yaml").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.yaml")
    words = {"pipe.yaml": "named pipe", "circle.yaml": "symbolic links", "folder.yaml": "folder", "zero.yaml": "device"}
    return {**words, "socket.yaml": "socket", "/dev/zero": "device", "/dev/tty": ""}


@pytest.mark.parametrize("name", ["plan", "lint", "topo"])
def test_special_files_are_refused_at_once(special: dict[str, str], name: str) -> None:
    for path, word in special.items():
        assert word in verb(name, path, cwd=Path(), code=2)


@pytest.mark.parametrize(("old", "new", "word"), [
    ("\n$", "\ncluster: {profile: pipe.yaml}\n", "pipe"),
    ("\n$", "\nstrategy: {name: deepspeed_zero1, config: pipe.yaml}\n", "pipe"),
    ("\n$", "\nstrategy: {name: deepspeed_zero1, config: /dev/zero}\n", "device"),
    ("tiny:mistral", "./model", ""), ("builtin:instructions", "rows.jsonl", ""),
    ("builtin:instructions", "good.jsonl, template: form.jinja", ""),
])  # fmt: skip
def test_files_that_a_spec_names_are_refused(special: dict[str, str], old: str, new: str, word: str) -> None:
    """The config of a model's folder, data and template are pipes, too."""
    Path("model").mkdir()
    for pipe in ("model/config.json", "rows.jsonl", "form.jinja"):
        os.mkfifo(pipe)
    Path("good.jsonl").write_text('{"text": "a"}\n')
    Path("spec.yaml").write_text(re.sub(old, new, SPEC))
    assert word in verb("plan", "spec.yaml", cwd=Path(), code=2)


def make_run(root: Path, name: str) -> Path:
    run = root / "runs" / name
    for folder in ("logs/attempt-1", "events", "telemetry", "checkpoints/step-1", "traces", "hang/attempt-1"):
        (run / folder).mkdir(parents=True)
    (run / "spec.yaml").write_text(SPEC)
    (run / "metrics.json").write_text('{"status": "failed", "steps": 3, "message": "m"}')
    (run / "plan.json").write_text("{}")
    return run


IN_A_RUN = [
    "metrics.json", "plan.json", "run_args.json", "preflight.json", "job.json", "logs/driver.json", "logs/slurm.log",
    "logs/attempt-1/n.rank0.log", "logs/attempt-1/n.exit.json", "logs/attempt-1/n.connections.json",
    "logs/attempt-1/network.json", "logs/attempt-1/n.agent.log", "events/rank0.jsonl", "telemetry/n.jsonl",
    "checkpoints/step-1/manifest.json", "traces/rank0.json.gz", "hang/attempt-1/hang.json",
    "hang/attempt-1/flight.rank0",
]  # fmt: skip


def hostile_run(root: Path, name: str, pipes: list[str]) -> Path:
    run = make_run(root, name)
    for pipe in pipes:
        (run / pipe).unlink(missing_ok=True)
        os.mkfifo(run / pipe)
    return run


def test_a_hostile_run_folder_does_not_block_the_others(tmp_path: Path) -> None:
    make_run(tmp_path, "good")
    hostile_run(tmp_path, "hostile", IN_A_RUN)
    make_run(tmp_path, "nested").joinpath("metrics.json").write_text("[" * 200_000)
    make_run(tmp_path, "list").joinpath("metrics.json").write_text("[1]")
    make_run(tmp_path, "list-plan").joinpath("plan.json").write_text('"x"')
    circle = make_run(tmp_path, "circle") / "metrics.json"
    circle.unlink()
    circle.symlink_to(circle)
    rows = {row["run"]: row for row in json.loads(verb("runs", "--json", cwd=tmp_path, code=0))}
    assert rows["good"]["steps"] == 3 and len(rows) == 6
    verb("runs", cwd=tmp_path, code=0)
    verb("diagnose", "runs/hostile", cwd=tmp_path, code=2)
    verb("trace", "runs/hostile", cwd=tmp_path, code=2)


@pytest.mark.parametrize(
    ("verb_of", "names"),
    [
        ("report", ["plan.json", "metrics.json", "logs/driver.json"]),
        ("logs", ["logs/attempt-1/n.rank0.log", "plan.json"]),
        ("cancel", ["job.json", "logs/driver.json"]),
    ],
)
def test_a_verb_on_a_hostile_run_folder_does_not_block(tmp_path: Path, verb_of: str, names: list[str]) -> None:
    """Each record of the folder in turn is a named pipe, beside ordinary events."""
    for name in names:
        hostile = hostile_run(tmp_path, name.replace("/", "-"), [name])
        (hostile / "events" / "rank0.jsonl").write_text('{"event": "start", "rank": 0, "time": 1.0, "attempt": 1}\n')
        if name != "logs/attempt-1/n.rank0.log":
            (hostile / "logs" / "attempt-1" / "n.rank0.log").write_text("a line\n")
        done = allranks(verb_of, hostile, cwd=tmp_path, timeout_s=LIMIT_S)
        assert "bug in allranks" not in done.stderr, (name, done.stderr)


def test_page_of_a_hostile_run_is_written(tmp_path: Path) -> None:
    hostile = hostile_run(tmp_path, "hostile", IN_A_RUN)
    code = (
        "import sys; from pathlib import Path; from allranks.rundir.paths import RunDir; "
        "from allranks.analysis.report.page import write_report; write_report(RunDir(Path(sys.argv[1])))"
    )
    subprocess.run([sys.executable, "-c", code, str(hostile)], check=True, timeout=LIMIT_S)
    assert (hostile / "report.html").is_file()


def test_a_pipe_of_the_shell_is_read(tmp_path: Path) -> None:
    """``lint <(env)``: bash passes /dev/fd/63."""
    command = f'"{sys.executable}" -m allranks lint <(echo NCCL_DEBUG=INFO; echo PATH=/bin)'
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode in (0, 1) and "cannot be read" not in done.stdout + done.stderr
    command = f'"{sys.executable}" -m allranks plan <(printf "{SPEC}")'.replace("\n", "\\n")
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


def test_a_pipe_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "PIPE_TIMEOUT_S", 0.3)
    ours, theirs = os.pipe()
    os.write(theirs, b"x")
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="did not end"):
        read_input(f"/dev/fd/{ours}", 100)
    assert time.monotonic() - started < 5
    os.write(theirs, b"x" * 200)
    with pytest.raises(FileTooLarge):
        read_input(f"/dev/fd/{ours}", 100)
    os.close(ours)
    os.close(theirs)


def test_a_pipe_that_replaces_a_file_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the opening."""
    path = tmp_path / "x"
    path.write_text("x")
    regular = path.stat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(inputs.os, "stat", lambda *_: regular)
    with pytest.raises(NotRegularFile):
        open_regular(path)


def test_files_with_holes_do_not_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    assert read_json(path) is None
    with pytest.raises(FileTooLarge):
        read_regular(path, 1000)
    with (tmp_path / "a.log").open("wb") as file:
        file.write(b"step 1 loss 2.0\n")
        file.truncate(1 << 42)
        file.seek(0, os.SEEK_END)
        file.write(b"\nRuntimeError: CUDA error: invalid device ordinal\n")
    assert "invalid device" in verb("diagnose", "a.log", cwd=tmp_path, code=1)


def test_lines_that_are_too_long_or_nested_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    with path.open("wb") as file:
        file.write(b'{"event": "start"}\n')
        file.write(b" " * (inputs.LINE_BYTES + 2 * inputs._BLOCK) + b"\n")
        file.write(b'{"event": ' + b"[" * 200_000 + b"\n")
        file.write(b'{"event": "stop"}\n{"event": "end"}')
    assert [e["event"] for e in read_events(path)] == ["start", "stop", "end"]
    assert [*read_lines(path, 10)] == [b'{"event": ']


HEAD = "model: {name: tiny:mistral}\ndata: {source: builtin:instructions}\n"


def _doubling(unit: str) -> str:
    return "\n".join(["a0: &a0 {k: x}", *(f"a{i}: &a{i} {unit.replace('@', f'*a{i - 1}')}" for i in range(1, 40))])


BOMBS = {
    "aliases of lists": (_doubling("[@, @, @, @, @, @, @, @, @]"), "counting an alias every time"),
    "aliases of mappings": (_doubling("{a: @, b: @, c: @}"), "counting an alias every time"),
    "merge keys": (_doubling("{<<: [@, @, @, @]}"), "counting an alias every time"),
    "nested lists": ("name: " + "[" * 20_000 + "]" * 20_000, "nested deeper"),
    "nested mappings": ("name: " + "{a: " * 20_000 + "}" * 20_000, "nested deeper"),
    "an integer of 900,000 digits": ("train: {seed: " + "9" * 900_000 + "}", "a number of"),
    "a hexadecimal integer": ("train: {seed: 0x" + "f" * 900_000 + "}", "a number of"),
    "a base-60 integer": ("train: {seed: 1" + ":59" * 300_000 + "}", "a number of"),
    "a value that holds itself": ("train: &a {seed: *a}", "recursive"),
    "a list that holds itself": ("train: {seed: &a [*a]}", "recursive"),
    "a key twice": ("name: a\nname: b", "duplicate key"),
    "very many keys": ("\n".join(f"k{i}: 1" for i in range(90_000)), "more than 20000"),
    "many unknown keys": ("\n".join(f"trani{i}: 1" for i in range(9_000)), "and more"),
    "a program": ("name: !!python/object/apply:os.system ['touch PWNED']", "constructor for the tag"),
}


@pytest.mark.parametrize(("text", "word"), BOMBS.values(), ids=BOMBS.keys())
def test_bomb_is_refused_at_once(tmp_path: Path, text: str, word: str) -> None:
    """In a process of its own: without the limits most of these run for hours."""
    (tmp_path / "bomb.yaml").write_text(HEAD + text + "\n")
    done = allranks("plan", "bomb.yaml", cwd=tmp_path, timeout_s=LIMIT_S)
    assert done.returncode == 2, done.stderr[-500:]
    assert done.stderr.startswith("allranks: bomb.yaml") and word in done.stderr
    assert len(done.stderr) < 5_000
    assert not (tmp_path / "PWNED").exists()


def test_profile_and_overrides_have_the_same_limits(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(_doubling("[@, @, @]"))
    (tmp_path / "spec.yaml").write_text(HEAD + "cluster: {profile: profile.yaml}\n")
    with pytest.raises(SpecError, match=r"profile.yaml.*counting an alias every time"):
        load_spec(tmp_path / "spec.yaml")
    (tmp_path / "spec.yaml").write_text(HEAD)
    with pytest.raises(SpecError, match="nested deeper"):
        load_spec(tmp_path / "spec.yaml", ["model.config=" + "[" * 1000 + "]" * 1000])


def test_spec_of_a_run_folder_is_bounded_in_its_report(tmp_path: Path) -> None:
    """The page hides values of cluster.env, and turned each into text: exponential for nested aliases."""
    code = (
        "import sys; from pathlib import Path; from allranks.analysis.report.run_data import read_run_data; from "
        "allranks.rundir.paths import RunDir; read_run_data(RunDir(Path(sys.argv[1])))"
    )
    (tmp_path / "spec.yaml").write_text(_doubling("[@, @, @, @]") + "\ncluster: {env: {A: *a39}}\n")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=LIMIT_S)
    assert "env" in read_run_data(RunDir(tmp_path)).spec


def test_ordinary_aliases_and_sizes_stay_allowed() -> None:
    assert parse_yaml("a: &a [1, 2]\nb: *a\nc: {d: *a}\n", "x") == {"a": [1, 2], "b": [1, 2], "c": {"d": [1, 2]}}
    count = (MAX_NODES - 10) // 2
    assert len(parse_yaml("\n".join(f"k{i}: 1" for i in range(count)), "x")) == count
    depth = MAX_DEPTH - 2
    assert parse_yaml("a: " + "[" * depth + "]" * depth, "x")
    assert parse_yaml("a: 0xffffffffffffffff\nb: 1_000\nc: 1:00:00", "x") == {"a": 2**64 - 1, "b": 1000, "c": 3600}


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


def _doubled(kind: bytes, levels: int = 60) -> bytes:
    """Each level holds the one below it twice, through the memo; the topmost is left on the stack."""
    value = _text("x") + b"q\x00"
    for level in range(1, levels):
        value += b"0(" + 2 * (b"h" + bytes([level - 1])) + kind + b"q" + bytes([level])
    return value


DUMPS = {
    "doubling lists as sizes": _entry("input_sizes", _doubled(b"l")),
    "doubling tuples as sizes": _entry("input_sizes", _doubled(b"t")),
    "doubling lists as name": _entry("profiling_name", _doubled(b"l")),
    "doubling lists as state": _entry("state", _doubled(b"l")),
    "doubling lists as group": _entry("process_group", _doubled(b"l")),
    "doubling lists in a frame": _entry("frames", b"](}(" + _text("filename") + _doubled(b"l") + b"ue"),
    "doubling tuples as key": PROTO + b"}(" + KEY + b"}" + _doubled(b"t") + b"Nu.",
    "deep tuple as key": PROTO + b"}(" + KEY + b"})" + b"\x85" * 1_000_000 + b"Nu.",
    "deep tuple as key of an older opcode": PROTO + b"}(" + KEY + b"()" + b"\x85" * 1_000_000 + b"Ndu.",
    "keys that collide": PROTO + b"}(" + KEY + b"}"
    + b"".join(b"\x8a\x0c" + (i * ((1 << 61) - 1)).to_bytes(12, "little") + b"N" for i in range(1, 60_000)) + b"u.",
    "no mark": PROTO + KEY + b"l.",
    "no mark for items": PROTO + b"}" + KEY + b"u.",
    "nested lists": _entry("input_sizes", b"(" * 200_000 + b"l" * 200_000),
    "nested tuples": _entry("input_sizes", b")" + b"\x85" * 200_000),
    "a list that holds itself": _entry("input_sizes", b"]q\x05h\x05a"),
    "a number without end": _entry(
        "process_group", b"(\x8b" + (200_000).to_bytes(4, "little") + b"\x7f" * 200_000 + b"l"
    ),
    "a sequence without end": PROTO + b"}(" + KEY + b"}" + _text("entries") + b"](}(" + _text("collective_seq_id")
    + b"\x8b" + (9_000).to_bytes(4, "little") + b"\x7f" * 9_000 + b"ueu.",
    "nested JSON": b'{"pg_config":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "an object": PROTO + KEY + b"cos\nsystem\n(" + _text("touch PWNED") + b"tR.",
    "an append to a text": PROTO + KEY + b"Na.",
    "a text of 2 GiB": PROTO + KEY + b"X\xff\xff\xff\x7f.",
}  # fmt: skip


@pytest.mark.parametrize("attack", DUMPS.values(), ids=DUMPS.keys())
def test_hostile_dump_costs_no_other_file(tmp_path: Path, attack: bytes) -> None:
    (tmp_path / "flight.rank0").write_bytes(attack)
    (tmp_path / "good.log").write_text(GOOD)
    done = allranks("diagnose", ".", "--json", cwd=tmp_path, timeout_s=LIMIT_S)
    assert done.returncode == 1, (done.returncode, done.stderr[-500:])
    assert "invalid_device" in [f["id"] for f in json.loads(done.stdout)["findings"]]
    assert not (tmp_path / "PWNED").exists()


def test_a_dump_that_could_not_be_read_is_not_health(tmp_path: Path) -> None:
    (tmp_path / "flight.rank0").write_bytes(DUMPS["no mark"])
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
def test_any_parser_error_costs_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
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
