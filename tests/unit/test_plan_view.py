"""What `plan` shows: nodes in place of ranks, and only variables that are set, unless --full; JSON always has all."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from allranks.cli.plan import show_memory, show_plan
from allranks.launch import preview
from allranks.planning import memory
from allranks.planning.records import LaunchPlan
from allranks.spec.loader import parse_spec
from allranks.utils.machine import Gpu, MachineFacts

GPU = Gpu(index=0, name="H100", memory_bytes=80 << 30)
FACTS = MachineFacts(host="login", cpus=64, memory_bytes=1 << 40, gpus=[GPU], cpu_model="x", system="Linux")
SLURM = {"launcher": "slurm", "nodes": 2, "procs_per_node": 8, "slurm": {"gpus_per_node": 8, "cpus_per_task": 64}}


def plan_of(**cluster: Any) -> LaunchPlan:
    raw = {"model": {"name": "tiny:llama"}, "data": {"source": "builtin:instructions"}, "cluster": cluster}
    return preview.plan(parse_spec(raw), facts=FACTS)


def shown(plan: LaunchPlan, capsys: pytest.CaptureFixture[str], *, full: bool = False, as_json: bool = False) -> str:
    show_plan(plan, as_json, full=full)
    return capsys.readouterr().out


def hosts(count: int) -> dict[str, Any]:
    return {"launcher": "hosts", "nodes": count, "procs_per_node": 4, "hosts": [f"n{i}" for i in range(count)]}


def test_nodes_of_slurm_are_one_line_and_every_rank_has_a_row_with_full(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(**SLURM)
    short = shown(plan, capsys)
    assert "ranks 0-15 on 2 nodes, 8 on each\n" in short and "local rank" not in short
    full = shown(plan, capsys, full=True)
    rows = re.findall(r"^(\d+) +(\d) +(\d) +node \d *$", full, re.MULTILINE)
    assert [tuple(map(int, row)) for row in rows] == [(r, r // 8, r % 8) for r in range(16)]


def test_variables_that_are_left_alone_are_named_and_explained_with_full(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(**SLURM)
    left = [item for item in plan.environment if item.value is None]
    short, full = shown(plan, capsys), shown(plan, capsys, full=True)
    lines = [line for line in short.splitlines() if line.endswith("(reasons: --full)")]
    assert [line.split(": ")[0] for line in lines] == ["decided on each node", "left at their defaults"]
    for item in left:
        assert sum(item.name in re.split("[ ,]+", line) for line in lines) == 1 and f"\n{item.name} " not in short
        assert f"\n{item.name} " in full
    for item in plan.environment:
        assert item.value is None or (f"\n{item.name} " in short and item.value in short)
    assert "(reasons:" not in full


@pytest.mark.parametrize("columns", [100, 80, 60, 40])
def test_the_memory_of_a_rank_breaks_no_number_and_keeps_its_peak(columns: int) -> None:
    spec = parse_spec({"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}})
    found = memory.fit(spec, memory.make_plan(spec, FACTS), FACTS)
    out = io.StringIO()
    console: Any = Console(file=out, width=columns, force_terminal=True, color_system=None)
    show_memory(console, found)
    lines = out.getvalue().splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("phase"))
    table = lines[head : next(i for i, line in enumerate(lines) if line.startswith("together")) + 1]
    assert all(cell_len(line) <= columns for line in table)
    values = [cell for line in table[1:] for cell in re.split("  +", line.strip())[1:]]
    assert values and all(re.fullmatch(r"[\d.]+ ([KMG]i)?B", value) for value in values), values
    assert found.peak in table[0]
    assert ("not shown in" in out.getvalue()) == (columns < 100)
