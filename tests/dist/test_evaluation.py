"""Evaluation beside HF Trainer's own: ours is one figure for any ranks and batch size, and one collective; its figure is neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import run_ranks

pytestmark = pytest.mark.dist


def test_ours_is_one_exact_figure_and_one_collective_where_the_trainers_own_changes(tmp_path: Path) -> None:
    (rows,) = run_ranks("row_losses", 1, tmp_path, folder=tmp_path)
    exact = sum(loss for loss, _ in rows) / sum(targets for _, targets in rows)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for world in (1, 2, 3):
        for one in run_ranks("evaluation_beside_trainer", world, tmp_path, folder=tmp_path, sizes=[1, 4, 16, 23])[0]:
            found[world, one["size"]] = one
    assert len(found) == 12
    for key, one in found.items():
        assert one["ours"] == pytest.approx(exact, rel=1e-6), key
        assert one["own"] == one["said"] == 1, key
    # the peer has the same model, rows and targets: all in one batch its mean is the exact one, row by row the mean of means
    assert found[1, 23]["theirs"] == pytest.approx(exact, rel=1e-5)
    assert found[1, 1]["theirs"] == pytest.approx(
        sum(loss / targets for loss, targets in rows if targets) / len(rows), rel=1e-5
    )
    its = [one["theirs"] for one in found.values()]
    assert max(its) - min(its) > 1e-3 * exact
    assert found[2, 1]["its"] > found[2, 16]["its"] >= 1, "it gathers for every batch"
