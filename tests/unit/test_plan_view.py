"""What `plan` shows: nodes in place of ranks, and only variables that are set, unless --full; JSON always has all."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from allranks.cli.plan import show_memory, show_plan
from allranks.planning import memory
from allranks.planning.records import LaunchPlan
from allranks.spec.loader import parse_spec
from allranks.utils.machine import Gpu, MachineFacts

GPU = Gpu(index=0, name="H100", memory_bytes=80 << 30)
FACTS = MachineFacts(host="login", cpus=64, memory_bytes=1 << 40, gpus=[GPU], cpu_model="x", system="Linux")


def shown(plan: LaunchPlan, capsys: pytest.CaptureFixture[str], *, full: bool = False, as_json: bool = False) -> str:
    show_plan(plan, as_json, full=full)
    return capsys.readouterr().out


def hosts(count: int) -> dict[str, Any]:
    return {"launcher": "hosts", "nodes": count, "procs_per_node": 4, "hosts": [f"n{i}" for i in range(count)]}


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
