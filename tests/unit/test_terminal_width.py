"""What verbs show in terminals of 160 to 40 columns: real pseudo-terminals, whole numbers and times, a bar that can be
read."""

from __future__ import annotations

import fcntl
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

from allranks.cli.console import GAP, FittedColumn, fitted_table, fold
from allranks.cli.run_output import BAR_WIDTH, Field, fitting_fields
from tests.conftest import REPO
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

spec = parse_spec({"model": {"name": "tiny:llama"}, "data": {"source": "builtin:instructions"}, "cluster": {"procs_per_node": 2}})
with ProgressView(SafeConsole()) as view:
    view.start(RunDir(Path("x")), make_plan(spec, machine_facts()))
    view.event({"event": "phase", "rank": 0, "name": "train", "total_steps": 12000, "first_step": 0})
    for step in range(0, 4000, 1000):
        time.sleep(0.25)
        view.event({"event": "step", "rank": 0, "step": step, "steps": 1, "step_time_s": 0.1, "tokens": 1234, "loss": 3.21})
"""


def in_terminal(columns: int, *argv: str, cwd: Path) -> list[str]:
    """Run a program in a pseudo-terminal; return every line that it draws, also those that it overwrites."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    env |= {"TERM": "xterm-256color", "PYTHONPATH": str(REPO / "src")}
    with subprocess.Popen(
        [sys.executable, *argv], stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=cwd
    ) as process:
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
    text = CODES.sub("", raw.decode())
    return [line.rstrip() for line in re.split("[\r\n]+", text) if line.strip()]


@pytest.mark.parametrize("columns", [160, 80, 60, 40])
def test_the_bar_and_both_times_are_whole(columns: int, tmp_path: Path) -> None:
    lines = [line for line in in_terminal(columns, "-c", PROGRESS, cwd=tmp_path) if "left" in line]
    assert lines
    for line in lines:
        assert cell_len(line) <= columns
        assert len(BAR.findall(line)) <= 2 and len("".join(BAR.findall(line))) >= BAR_WIDTH
        assert re.search(r" \d+:\d\d \d+:\d\d left$", line)
    shown = lines[-1]
    assert ("step 3000/12000" in shown) == (columns >= 60)
    assert ("loss 3.2100" in shown) == (columns >= 80)
    assert ("24,680 tokens/s" in shown) == (columns >= 80)
    assert ("training" in shown) == (columns in (60, 160)), "where there is room for it, after all others"


def test_fields_are_left_out_by_their_number_and_times_never() -> None:
    phase, step, time = Field("evaluating", 2), Field("step 1/2", 1), Field("1:00:00", 0)
    assert fitting_fields([phase, step, time], 80) == ([phase, step, time], 80 - 11 - 9 - 8)
    assert fitting_fields([phase, step, time], 40) == ([step, time], 23)
    assert fitting_fields([phase, step, time], 30) == ([time], 22)
    assert fitting_fields([phase, step, time], 9) == ([time], 0)


def test_errors_break_between_words(tmp_path: Path) -> None:
    program = (
        f"from allranks.cli.options import echo\necho('allranks: ' + {' '.join(['considerable'] * 20)!r} + ' "
        f"/a/{'x' * 90}', err=True)"
    )
    *lines, last = in_terminal(80, "-c", program, cwd=tmp_path)
    assert (
        max(map(len, lines)) <= 80 and set(" ".join(lines).split()) == {"allranks:", "considerable"} and "/a/x" in last
    )


RUNS: list[dict[str, Any]] = [
    {"run": "demo-20261123-182738", "status": "succeeded", "model": "tiny:mistral", "dataset": "builtin:instructions", "strategy": "pytorch_ddp",
     "steps": 500, "train_loss_last": 1.2345, "eval_loss": 1.5, "tokens_per_s": 23456.7, "world_size": 2},
    {"run": "mistral-7b-lora-ddp-1node-20261123-190000", "status": "stopped", "model": "mistralai/Mistral-7B-v0.1", "dataset": "yahma/alpaca-cleaned",
     "strategy": "deepspeed_zero3", "steps": 123456, "train_loss_last": 0.9876, "eval_loss": None, "tokens_per_s": 1234567.8, "world_size": 16},
    {"run": "[x]-20261123-190001", "status": "failed", "model": "/shared/models/Llama-3.1-8B", "dataset": "/shared/train.jsonl", "strategy": "zero1",
     "steps": 0, "train_loss_last": None, "eval_loss": None, "tokens_per_s": None, "world_size": None},
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


def words(line: str) -> list[str]:
    return line.split()


@pytest.mark.parametrize("columns", [120, 80, 60, 40])
def test_runs_break_no_number(columns: int, run_root: Path) -> None:
    lines = in_terminal(columns, "-m", "allranks", "runs", cwd=run_root)
    assert max(cell_len(line) for line in lines) <= columns
    heads = words(lines[0])
    assert heads[:2] == ["run", "status"] and "steps" in heads
    for row, name in zip(RUNS, ("demo-", "mistral-7b-", "[x]-"), strict=True):
        line = next(line for line in lines if line.startswith(name))
        assert str(row["steps"]) in words(line) and row["status"] in words(line)
    if columns >= 80:
        assert {"strategy", "model", "data"} <= set(heads)
        assert "Llama-3.1-8B" in "".join(lines).replace(" ", "")
    if columns == 120:
        assert not any("not shown" in line for line in lines) and "1,234,568" in " ".join(lines)
    else:
        assert any(line.startswith(f"not shown in {columns} columns:") for line in lines)


def test_runs_in_a_pipe_are_one_line_each(run_root: Path) -> None:
    done = allranks("runs", cwd=run_root, env={"COLUMNS": "80"})
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(RUNS)
    assert words(lines[2]) == [
        "mistral-7b-lora-ddp-1node-20261123-190000", "stopped", "deepspeed_zero3", "mistralai/Mistral-7B-v0.1",
        "yahma/alpaca-cleaned", "123456", "0.9876", "-", "1,234,568", "16",
    ]  # fmt: skip


def test_a_run_that_has_not_ended_shows_what_was_requested(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "live-1"
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text("model: {name: tiny:bert}\ndata: {source: builtin:news}\n")
    (folder / "plan.json").write_text('{"strategy": "zero1"}')
    broken = tmp_path / "runs" / "broken-1"
    broken.mkdir()
    (broken / "spec.yaml").write_text("model: {nam: x}\n")
    done = allranks("runs", "--json", cwd=tmp_path)
    rows = {row["run"]: row for row in json.loads(done.stdout)}
    assert (rows["live-1"]["model"], rows["live-1"]["dataset"]) == ("tiny:bert", "builtin:news")
    assert (rows["broken-1"]["model"], rows["broken-1"]["dataset"]) == (None, None)
    assert set(rows["live-1"]) == {
        "run", "folder", "status", "strategy", "compared", "world_size", "model", "dataset", "steps", "train_loss_last", "eval_loss", "tokens_per_s",
    }  # fmt: skip


def test_text_is_folded_behind_separators() -> None:
    assert fold("builtin:instructions", 12) == "builtin:\ninstructions"
    assert fold("mistralai/Mistral-7B-v0.1", 14) == "mistralai/\nMistral-7B-\nv0.1"
    assert fold("abcdefgh", 3) == "abc\ndef\ngh"
    assert fold("short", 10) == "short" and fold("", 5) == "" and fold("字字字", 4) == "字字\n字"


def test_a_table_that_cannot_fit_folds_its_text_further_and_keeps_its_numbers() -> None:
    columns = [FittedColumn("name", fold_to=20), FittedColumn("steps", right=True)]
    table, left_out = fitted_table(columns, [["a" * 30, "1234567890"]], 22)
    assert not left_out
    assert "1234567890" in [str(cell) for cell in table.columns[1].cells]
    assert max(len(line) for line in str(next(iter(table.columns[0].cells))).split("\n")) == 22 - 10 - 2 * GAP
