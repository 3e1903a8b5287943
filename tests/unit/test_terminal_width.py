"""What verbs show in terminals of 160 to 40 columns: real pseudo-terminals, whole numbers and times, a whole bar."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from allranks.cli.plan import show_memory
from allranks.cli.run_output import BAR_WIDTH
from tests.conftest import REPO
from tests.unit.fit_specs import estimated
from tests.warm import allranks

BAR = re.compile("[━╸╺]+")
CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
PROGRESS = """
import time
from allranks.cli.console import SafeConsole
from allranks.cli.run import ProgressView
from pathlib import Path
from allranks.planning.planner import make_plan
from allranks.rundir.paths import RunDir
from allranks.spec.loader import parse_spec
from allranks.utils.machine import machine_facts

rows = {"source": "builtin:instructions"}
spec = parse_spec({"model": {"name": "tiny:llama"}, "data": rows, "cluster": {"procs_per_node": 2}})
with ProgressView(SafeConsole()) as view:
    view.start(RunDir(Path("x")), make_plan(spec, machine_facts()))
    view.event({"event": "phase", "rank": 0, "name": "train", "total_steps": 12000, "first_step": 0})
    for step in range(0, 4000, 1000):
        time.sleep(0.25)
        figures = {"step": step, "steps": 1, "step_time_s": 0.1, "tokens": 1234, "loss": 3.21}
        view.event({"event": "step", "rank": 0, **figures})
"""


def in_terminal(columns: int, *argv: str, cwd: Path) -> list[str]:
    """Run a program in a pseudo-terminal; return every line that it draws, also those that it overwrites."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    env |= {"TERM": "xterm-256color", "PYTHONPATH": str(REPO / "src")}
    command = [sys.executable, *argv]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=cwd) as process:
        os.close(theirs)
        raw = b""
        while True:
            try:
                block = os.read(ours, 65536)
            except OSError:
                break
            if not block:
                break
            raw += block
        assert process.wait(60) == 0, raw.decode()
    os.close(ours)
    return [line.rstrip() for line in re.split("[\r\n]+", CODES.sub("", raw.decode())) if line.strip()]


@pytest.mark.parametrize("columns", [160, 80, 60, 40])
def test_the_bar_and_both_times_are_whole(columns: int, tmp_path: Path) -> None:
    lines = [line for line in in_terminal(columns, "-c", PROGRESS, cwd=tmp_path) if "left" in line]
    assert lines
    for line in lines:
        assert cell_len(line) <= columns
        assert len(BAR.findall(line)) <= 2 and len("".join(BAR.findall(line))) >= BAR_WIDTH
        assert re.search(r" \d+:\d\d \d+:\d\d left$", line)
    shown = lines[-1]
    assert ("step 3000/12000" in shown) == (columns >= 60) and ("loss 3.2100" in shown) == (columns >= 80)
    assert ("24,680 tokens/s" in shown) == (columns >= 80)
    assert ("training" in shown) == (columns in (60, 160)), "where there is room for it, after all others"


def test_errors_break_between_words(tmp_path: Path) -> None:
    text = f"allranks: {' '.join(['considerable'] * 20)} /a/{'x' * 90}"
    program = f"from allranks.cli.options import echo\necho({text!r}, err=True)"
    *lines, last = in_terminal(80, "-c", program, cwd=tmp_path)
    assert max(map(len, lines)) <= 80 and "/a/x" in last
    assert set(" ".join(lines).split()) == {"allranks:", "considerable"}


RUNS: list[dict[str, Any]] = [
    {"run": "mistral-7b-lora-ddp-1node-20261123-190000", "status": "stopped", "model": "mistralai/Mistral-7B-v0.1",
     "dataset": "yahma/alpaca-cleaned", "strategy": "deepspeed_zero3", "steps": 123456, "train_loss_last": 0.9876,
     "eval_loss": None, "tokens_per_s": 1234567.8, "world_size": 16},
    {"run": "[x]-20261123-190001", "status": "failed", "model": "/shared/models/Llama-3.1-8B",
     "dataset": "/shared/train.jsonl", "strategy": "zero1", "steps": 0, "train_loss_last": None, "eval_loss": None,
     "tokens_per_s": None, "world_size": None},
]  # fmt: skip


@pytest.fixture
def run_root(tmp_path: Path) -> Path:
    for row in RUNS:
        folder = tmp_path / "runs" / row["run"]
        folder.mkdir(parents=True)
        (folder / "spec.yaml").write_text("name: x\n")
        (folder / "metrics.json").write_text(json.dumps(row))
        (folder / "plan.json").write_text(json.dumps({k: row[k] for k in ("strategy", "world_size")}))
    return tmp_path


@pytest.mark.parametrize("columns", [120, 80, 60, 40])
def test_runs_break_no_number(columns: int, run_root: Path) -> None:
    lines = in_terminal(columns, "-m", "allranks", "runs", cwd=run_root)
    assert max(cell_len(line) for line in lines) <= columns
    heads = lines[0].split()
    assert heads[:2] == ["run", "status"] and "steps" in heads
    for row, name in zip(RUNS, ("mistral-7b-", "[x]-"), strict=True):
        line = next(line for line in lines if line.startswith(name))
        assert {str(row["steps"]), row["status"]} <= set(line.split())
    if columns >= 80:
        assert {"strategy", "model", "data"} <= set(heads) and "Llama-3.1-8B" in "".join(lines).replace(" ", "")
    if columns == 120:
        assert not any("not shown" in line for line in lines) and "1,234,568" in " ".join(lines)
    else:
        assert any(line.startswith(f"not shown in {columns} columns:") for line in lines)


def test_a_run_that_has_not_ended_shows_what_was_requested(tmp_path: Path) -> None:
    specs = {"live-1": "model: {name: tiny:bert}\ndata: {source: builtin:news}\n", "broken-1": "model: {nam: x}\n"}
    for name, spec in specs.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "spec.yaml").write_text(spec)
    (tmp_path / "runs" / "live-1" / "plan.json").write_text('{"strategy": "zero1"}')
    rows = {row["run"]: row for row in json.loads(allranks("runs", "--json", cwd=tmp_path).stdout)}
    assert (rows["live-1"]["model"], rows["live-1"]["dataset"]) == ("tiny:bert", "builtin:news")
    assert (rows["broken-1"]["model"], rows["broken-1"]["dataset"]) == (None, None)
    keys = "run folder status strategy compared world_size model dataset steps train_loss_last eval_loss tokens_per_s"
    assert set(rows["live-1"]) == set(keys.split())


@pytest.mark.parametrize("columns", [100, 80, 70, 60, 40])
def test_the_memory_of_a_rank_breaks_no_number_and_keeps_its_peak(columns: int) -> None:
    spec = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}
    found, out = estimated(spec, gpus=1), io.StringIO()
    console: Any = Console(file=out, width=columns, force_terminal=True, color_system=None)
    show_memory(console, found)
    lines = out.getvalue().splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("phase"))
    table = lines[head : next(i for i, line in enumerate(lines) if line.startswith("together")) + 1]
    assert all(cell_len(line) <= columns for line in table)
    values = [cell for line in table[1:] for cell in re.split("  +", line.strip())[1:]]
    assert values and all(re.fullmatch(r"[\d.]+ ([KMG]i)?B", value) for value in values), values
    assert found.peak in table[0] and ("not shown in" in out.getvalue()) == (columns < 75)
