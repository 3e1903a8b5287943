"""The timeline of the page."""

from __future__ import annotations

from pathlib import Path

from allranks.analysis.trace import analyse
from allranks.analysis.trace.charts import MIN_TIMELINE_HEIGHT, timeline_chart
from tests.unit.trace_builder import mark, op, step, write


def height(path: Path) -> int:
    made = timeline_chart(analyse([path])[0])
    assert made is not None
    return made.height


def test_one_row_leaves_room_for_the_axis(tmp_path: Path) -> None:
    """A chart of 87 pixels had the axis' title on its numbers."""
    one = [step(1, 0, 100), op("aten::mm", 10, 60)]
    more = [*one, mark("allranks.forward", 5, 70)]
    assert (
        height(write(tmp_path / "one.json", one))
        == height(write(tmp_path / "two.json", more))
        == MIN_TIMELINE_HEIGHT
        >= 120
    )
