"""A user's own program tells its progress, or prints it; its output is shown live. Real processes, without torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.files import read_json
from tests.dist.harness import train

pytestmark = pytest.mark.dist
REPORTS = """
import os, sys, time, warnings
import allranks
rank = int(os.environ["RANK"])
print("token hf_" + "aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xY2z", flush=True)
print("iter 900: loss 9.0000, time 1.0ms", flush=True)
for step in range(1, 41):
    allranks.report(step=step, loss=4.0 / step, tokens=100)
    time.sleep(0.06)
allranks.report(step="many", loss=object())
sys.stdout.buffer.write(b"\\x1b[31moverwritten\\x1b[0m \\xff\\xfe bytes\\rwhat stays\\n")
print("is torch imported:", "torch" in sys.modules)
"""


def end_of(tmp_path: Path, program: str) -> tuple[Any, Any, dict[str, Any]]:
    (tmp_path / "program.py").write_text(program)
    spec = {"name": "s", "script": {"path": str(tmp_path / "program.py")}, "run_root": str(tmp_path / "runs")}
    done, run = train(tmp_path, spec, code=0)
    return done, run, read_json(run.metrics)


def test_reports_reach_terminal_summary_metrics_and_page(tmp_path: Path) -> None:
    done, run, metrics = end_of(tmp_path, REPORTS)
    assert (metrics["progress_source"], metrics["steps"], metrics["tokens_reported"]) == ("report", 40, 2 * 40 * 100)
    assert (metrics["train_loss_first"], metrics["train_loss_last"]) == (4.0, 0.1)
    assert 500 < metrics["tokens_per_s"] < 2 * 100 / 0.06
    assert re.search(r"^steps +40 *$", done.stdout, re.MULTILINE), done.stdout
    for words in ("4.0000 -> 0.1000", "tokens/s", "what stays", "is torch imported: False", "iter 900"):
        assert words in done.stdout, done.stdout
    for words in ("hf_aB3d", "\x1b", "overwritten", "[rank"):
        assert words not in done.stdout
    assert "loss=<object object" in done.stdout  # one warning for each kind of value that is none
    events = [json.loads(line) for line in run.events_of(1).read_text().splitlines()]
    assert 2 <= sum(e["event"] == "progress" for e in events) <= 6  # 40 reports
    assert "tokens / s" in run.report.read_text()
