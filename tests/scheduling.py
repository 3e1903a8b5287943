"""Which tests go to one worker.

Tests that share one real run or one cluster (a fixture) would each start it again on other workers. xdist's own
``--dist loadgroup`` groups by a suffix of the test's name that pytest 9 no longer shows to it, so the file's name says it here.
Quick tests go by file too: what their module's fixtures make is made once, and workers ask less often for the next test.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

SHARE_A_RUN = {
    *(
        f"tests/dist/test_{name}.py"
        for name in ("best", "exact_resume", "export", "failures_a", "failures_b", "run", "smoke")
    ),
    "tests/cluster/test_preemption.py",
    "tests/chaos/test_chaos.py::test_a_fault_under_slurm",
}
QUICK = ("tests/unit/", "tests/lint/", "tests/golden/", "tests/security/")


class BySharedRun(LoadScopeScheduling):
    """One test after the other, as workers become free; what is in `SHARE_A_RUN`, and a file in `QUICK`, as one."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        together = path in SHARE_A_RUN or path.startswith(QUICK)
        test = f"{path}::{name.partition('[')[0]}"
        return path if together else test if test in SHARE_A_RUN else nodeid


def make(config: Any, log: Any) -> BySharedRun:
    """The scheduler of a run with several workers."""
    return BySharedRun(config, log)
