"""Which tests go to one worker.

Tests of a file that share one real run (a fixture of the module) would each start it again on other workers. xdist's own
``--dist loadgroup`` groups by a suffix of the test's name that pytest 9 no longer shows to it, so the file's name says it here.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

SHARE_A_RUN = {f"tests/dist/test_{name}.py" for name in ("export", "failures_a", "failures_b", "run", "smoke")}


class BySharedRun(LoadScopeScheduling):
    """One test after the other, as workers become free; files of `SHARE_A_RUN` as one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if path in SHARE_A_RUN else nodeid


def make(config: Any, log: Any) -> BySharedRun:
    """The scheduler of a run with several workers."""
    return BySharedRun(config, log)
