"""Clocks of nodes that differ: how far is found by steps that both tell, or it is said that nothing tells."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from allranks.analysis.diagnose import Diagnosis, diagnose

START = datetime(2025, 3, 1, 10, 0, 0, tzinfo=UTC).timestamp()
DEVICE = "RuntimeError: CUDA error: invalid device ordinal"
DISK = "OSError: [Errno 28] No space left on device: 'x'"


def _line(time: float, text: str) -> str:
    return f"[{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S},{int(time % 1 * 1000):03d}] {text}"


def _log(ahead_s: float, fails_at: float, error: str, *, steps: bool = True) -> str:
    """A rank's log by a clock that is `ahead_s` ahead: a step each 2 s, then its error."""
    lines = [_line(START + ahead_s + 2 * n, f"step {n} loss 2.0") for n in range(1, 40 if steps else 0)]
    return "\n".join([*lines, _line(START + ahead_s + fails_at, error)]) + "\n"


def _diagnose(tmp_path: Path, ahead_s: float, *, steps: bool = True) -> Diagnosis:
    """Rank 0 on node-a runs out of disk at 100 s; rank 1 on node-b failed 3 s before it, by a clock that is ahead."""
    (tmp_path / "node-a.rank0.log").write_text(_log(0, 100, DISK, steps=steps))
    (tmp_path / "node-b.rank1.log").write_text(_log(ahead_s, 97, DEVICE, steps=steps))
    return diagnose([tmp_path])


@pytest.mark.parametrize("ahead_s", [0.0, 0.2, 37.0, -41.5, 3600.0])
def test_first_cause_is_first_whatever_its_clock_says(tmp_path: Path, ahead_s: float) -> None:
    found = _diagnose(tmp_path, ahead_s)
    assert [f.id for f in found.findings] == ["invalid_device", "disk_full"]
    assert (found.findings[0].rank, found.findings[0].host) == (1, "node-b")
    assert found.clocks.offsets_s == ({"node-b": pytest.approx(ahead_s, abs=0.05)} if abs(ahead_s) > 1 else {})
    assert not found.clocks.unknown
    assert not found.findings[0].against
    order = [line.split("  ")[1] for line in found.story]
    assert order[0].startswith("rank 1 on node-b")


def test_clocks_that_nothing_compares_are_said(tmp_path: Path) -> None:
    found = _diagnose(tmp_path, 37, steps=False)
    assert found.clocks.unknown
    assert "order between hosts is uncertain" in found.clocks.note
    assert any("clock" in text for text in found.findings[0].against)


def test_only_the_host_that_nothing_compares_is_unsure(tmp_path: Path) -> None:
    (tmp_path / "node-c.rank2.log").write_text(_log(0, 99, DEVICE, steps=False))
    found = _diagnose(tmp_path, 37)
    assert found.clocks.offsets_s == {"node-b": pytest.approx(37, abs=0.05)}
    assert found.clocks.unknown == ["node-c"]
    assert "node-c" in found.clocks.note


def test_steps_that_ranks_do_not_end_together_tell_nothing(tmp_path: Path) -> None:
    """Without exchange, ranks drift apart: that is no difference of clocks."""
    (tmp_path / "node-a.rank0.log").write_text(_log(0, 100, DISK))
    slow = [_line(START + 2.4 * n, f"step {n} loss 2.0") for n in range(1, 40)]
    (tmp_path / "node-b.rank1.log").write_text("\n".join([*slow, _line(START + 97, DEVICE)]) + "\n")
    assert diagnose([tmp_path]).clocks.offsets_s == {}
