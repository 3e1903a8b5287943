"""Named pipes, devices, sockets and links in a circle where a file is expected: no verb waits, no verb reads without
end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.utils import inputs
from allranks.utils.inputs import FileTooLarge, NotRegularFile, open_regular, read_input, read_lines, read_regular
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
    return {
        "pipe.yaml": "named pipe",
        "circle.yaml": "symbolic links",
        "folder.yaml": "folder",
        "zero.yaml": "device",
        "socket.yaml": "socket",
        "/dev/zero": "device",
        "/dev/tty": "",
    }


@pytest.mark.parametrize("name", ["plan", "lint", "topo"])
def test_special_files_are_refused_at_once(special: dict[str, str], name: str) -> None:
    for path, word in special.items():
        assert word in verb(name, path, cwd=Path(), code=2)


@pytest.mark.parametrize(
    "extra",
    [
        "cluster: {profile: pipe.yaml}",
        "strategy: {name: deepspeed_zero1, config: pipe.yaml}",
        "strategy: {name: deepspeed_zero1, config: /dev/zero}",
    ],
)
def test_files_that_a_spec_names_are_refused(special: dict[str, str], extra: str) -> None:
    Path("spec.yaml").write_text(SPEC + extra + "\n")
    assert "pipe" in (said := verb("plan", "spec.yaml", cwd=Path(), code=2)) or "device" in said


def test_config_of_a_model_folder_is_a_pipe(special: dict[str, str]) -> None:
    Path("model").mkdir()
    os.mkfifo("model/config.json")
    Path("spec.yaml").write_text(SPEC.replace("tiny:mistral", "./model"))
    verb("plan", "spec.yaml", cwd=Path(), code=2)


@pytest.mark.parametrize("template", [False, True])
def test_data_and_template_are_pipes(special: dict[str, str], template: bool) -> None:
    os.mkfifo("rows.jsonl")
    os.mkfifo("form.jinja")
    Path("good.jsonl").write_text('{"text": "a"}\n')
    source = "{source: good.jsonl, template: form.jinja}" if template else "{source: rows.jsonl}"
    Path("spec.yaml").write_text(SPEC.replace("{source: builtin:instructions}", source))
    verb("plan", "spec.yaml", cwd=Path(), code=2)


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
    "logs/attempt-1/n.rank0.log", "logs/attempt-1/n.exit.json", "logs/attempt-1/n.connections.json", "logs/attempt-1/network.json",
    "logs/attempt-1/n.agent.log", "events/rank0.jsonl", "telemetry/n.jsonl", "checkpoints/step-1/manifest.json", "traces/rank0.json.gz",
    "hang/attempt-1/hang.json", "hang/attempt-1/flight.rank0",
]  # fmt: skip


def test_a_hostile_run_folder_does_not_block_the_others(tmp_path: Path) -> None:
    make_run(tmp_path, "good")
    hostile = make_run(tmp_path, "hostile")
    for name in IN_A_RUN:
        (hostile / name).unlink(missing_ok=True)
        os.mkfifo(hostile / name)
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
        hostile = make_run(tmp_path, name.replace("/", "-"))
        (hostile / "events" / "rank0.jsonl").write_text('{"event": "start", "rank": 0, "time": 1.0, "attempt": 1}\n')
        (hostile / "logs" / "attempt-1" / "n.rank0.log").write_text("a line\n")
        (hostile / name).unlink(missing_ok=True)
        os.mkfifo(hostile / name)
        done = allranks(verb_of, hostile, cwd=tmp_path, timeout_s=LIMIT_S)
        assert "bug in allranks" not in done.stderr, (name, done.stderr)


def test_page_of_a_hostile_run_is_written(tmp_path: Path) -> None:
    hostile = make_run(tmp_path, "hostile")
    for name in IN_A_RUN:
        (hostile / name).unlink(missing_ok=True)
        os.mkfifo(hostile / name)
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
