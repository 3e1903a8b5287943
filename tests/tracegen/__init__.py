"""Makes profiler traces whose analysis is known beforehand. Shares no code with ``allranks.analysis.trace``.

`generate` lays work out on an explicit schedule in whole microseconds of one true clock (`schedule`), reads the answer
off that schedule (`truth`), and writes it as each rank's profiler would have seen it (`render`).
"""

from __future__ import annotations

from pathlib import Path

from tests.tracegen.render import write_traces
from tests.tracegen.schedule import Scenario, lay_out
from tests.tracegen.truth import Truth, answer

__all__ = ["Scenario", "Truth", "generate"]


def generate(scenario: Scenario, folder: Path) -> Truth:
    """Write ``rank<R>.json.gz`` of all ranks that are not absent into a folder, and return what is true of them."""
    timeline = lay_out(scenario)
    write_traces(scenario, timeline, folder)
    return answer(scenario, timeline)
