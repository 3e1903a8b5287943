"""Defects planted in the source: a comparison on two gloo ranks refuses each of them. See planted/edits.yaml and
planted/blind_edits.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.planted_runs import edited, edits, run

pytestmark = pytest.mark.dist


def test_each_defect_still_finds_its_place() -> None:
    for edit in edits("edits.yaml") + edits("blind_edits.yaml"):
        compile(edited(edit), edit["file"], "exec")


@pytest.mark.parametrize("edit", edits("edits.yaml"), ids=lambda edit: edit["id"])
def test_a_planted_defect_is_refused(edit: dict[str, Any], tmp_path: Path) -> None:
    found = run(edit, tmp_path)
    assert edit["by"] in found["by"], found


@pytest.mark.parametrize("edit", edits("blind_edits.yaml"), ids=lambda edit: edit["id"])
def test_a_defect_written_without_looking_at_the_gates_is_refused(edit: dict[str, Any], tmp_path: Path) -> None:
    assert run(edit, tmp_path)["by"]
