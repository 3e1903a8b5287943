"""Real ranks on two cores that other processes use, too: the machine is named, slow ranks still are, and nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.utils.kernel_counters import OVERLOADED, RunQueueClock
from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import ALLRANKS, stall_ranks, step_events, train

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not RunQueueClock().available, reason="this kernel has no /proc/<pid>/schedstat"),
]
LIMIT_S = 150
BUSY = f"""
import glob, sys, time
end = time.monotonic() + {LIMIT_S}
while len(sys.argv) > 1 and time.monotonic() < end and not any('"step"' in open(file).read() for file in glob.glob(sys.argv[1])):
    time.sleep(0.2)
while time.monotonic() < end:
    pass
"""


@contextmanager
def two_cores() -> Iterator[None]:
    """Let this process and those that it starts use two cores, so that a few others overload any machine."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(allowed)[:2]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class Others:
    """Busy loops beside the ranks, from their first step on if `events` names the files that tell of it."""

    def __init__(self, count: int, events: str = "") -> None:
        command = [sys.executable, "-c", BUSY, *filter(None, [events])]
        # Each in a session of its own: the kernel shares the cores equally between sessions (sched_autogroup).
        self._loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]

    def __enter__(self) -> Others:
        return self

    def end(self) -> None:
        for one in self._loops:
            one.kill()
            one.wait()

    def __exit__(self, *_: object) -> None:
        self.end()


def spec(tmp_path: Path, steps: int) -> dict[str, Any]:
    write_rows(tmp_path / "rows.json", 80)
    return tiny_spec(
        tmp_path / "rows.json",
        tmp_path,
        train={"max_steps": steps},
        eval={"samples": 0},
        cluster={"env": {"OMP_NUM_THREADS": "1"}},
        strategy={"name": "pytorch_ddp"},
    )


def test_an_overloaded_machine_is_named_and_no_rank(tmp_path: Path) -> None:
    with two_cores(), Others(6, str(tmp_path / "runs" / "*" / "events" / "rank*.jsonl")):
        done, run = train(tmp_path, spec(tmp_path, 200))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is slow" not in done.stdout
    assert "is overloaded: " in done.stdout
    metrics = read_json(run.metrics)
    assert metrics["own_time"]["stragglers"] == []
    (load,) = metrics["machine_load"]
    assert load["cores"] == 2
    assert 0.1 <= load["taken_share"] <= 1
    assert load["others_cores"] > 0.5
    assert "CPU time of the ranks" in run.report.read_text()
    for rank in range(2):
        steps = step_events(run, rank)
        assert all(0 <= e["own_queued_s"] <= e["own_s"] + 0.002 for e in steps)
        assert any(e["event"] == "cpu_load" for e in read_events(run.events_of(rank)))


@pytest.mark.parametrize(
    ("what", "part", "others"),
    [
        ("burning_backward", "own_backward_s", 2),
        *(
            pytest.param(what, part, others, marks=pytest.mark.full)
            for what, part in (
                ("sleep_a_while", "own_s"),
                ("burn_a_while", "own_s"),
                ("slow_backward", "own_backward_s"),
                ("slow_optimizer", "own_optimizer_s"),
                ("burning_optimizer", "own_optimizer_s"),
            )
            for others in (0, 2)
        ),
    ],
)
def test_a_slow_rank_is_named_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, part: str, others: int
) -> None:
    stall_ranks(monkeypatch, f"{what}:1:-1", 0.1)
    with two_cores(), Others(others):
        done, run = train(tmp_path, spec(tmp_path, 40))
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if "is slow" in line]
    assert len(said) == 1 and "rank 1 on" in said[0], done.stdout
    found = read_json(run.metrics)["own_time"]
    assert found["stragglers"] == [1]
    assert {r["rank"]: (r["slow_in"], r["reason"]) for r in found["ranks"]}[1] == ([part], "own")


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy", ["pytorch_ddp", "zero1", "zero2", "zero3", "pytorch_zero1", "pytorch_zero3", "hf_trainer"]
)
@pytest.mark.parametrize("threads", ["1", "2"])
def test_no_rank_of_any_strategy_is_named_on_an_overloaded_machine(tmp_path: Path, strategy: str, threads: str) -> None:
    wanted = spec(tmp_path, 80) | {"strategy": {"name": strategy}}
    wanted["cluster"]["env"]["OMP_NUM_THREADS"] = threads
    with two_cores(), Others(2):
        done, run = train(tmp_path, wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is slow" not in done.stdout
    assert read_json(run.metrics)["own_time"]["stragglers"] == []


def test_repeats_of_a_comparison_on_an_overloaded_machine_are_repeated(tmp_path: Path) -> None:
    """The others end when the comparison begins to repeat what they have disturbed."""
    wanted = {
        "name": "c",
        "model": {
            "name": "tiny:llama",
            "config": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3},
        },
        "data": {"source": "builtin:reviews", "subset": 100, "max_length": 64, "template": "text"},
        "train": {"max_steps": 10, "micro_batch_size": 8},
        "cluster": {"procs_per_node": 2, "cache": str(tmp_path / "cache"), "env": {"OMP_NUM_THREADS": "1"}},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(wanted))
    command = [*ALLRANKS, "compare", "c.yaml", "--strategies", "simple_ddp,zero1", "--repeats", "1"]
    lines: list[str] = []
    with two_cores(), Others(3) as others:
        running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert running.stdout is not None
        for line in running.stdout:
            lines.append(line)
            if "the machine was overloaded, once more" in line:
                others.end()
        assert running.wait(LIMIT_S) == 0, "".join(lines)
    out = "".join(lines)
    folder = next((tmp_path / "runs").iterdir())
    rows = json.loads((folder / "comparison.json").read_text())["rows"]
    ranks = json.loads((folder / "compare" / "measured.json").read_text())["ranks"]
    for row in rows:
        load = row["load"]
        assert 1 < load["repeats"] <= 3, out
        assert len(ranks[0][row["strategy"]]["repeats"]) == load["repeats"]
        assert load["disturbed"] >= 1
        assert load["taken_share"] >= OVERLOADED
        assert load["counted"] == (load["repeats"] - load["disturbed"] or load["repeats"])
        assert any("overloaded" in mark for mark in row["marks"])
    assert "timed repeats: up to" in out
    assert "other processes used" in out
    assert "overloaded" in (folder / "comparison.html").read_text()
