"""A failure to write says how little room there is: torch's own writer does not tell that the disk is full."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.errors import CheckpointError
from allranks.train.checkpoint import saver
from allranks.train.checkpoint.saver import RankAgreement
from allranks.utils import filesystem


@pytest.mark.parametrize("error", [RuntimeError("unexpected pos 64 vs 0"), OSError(5, "Input/output error", "x.pt")])
def test_a_full_disk_is_told_whatever_the_writer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    alone: Any = RankAgreement.__new__(RankAgreement)
    alone.size, alone.group, alone._folder = 1, None, tmp_path
    monkeypatch.setattr(saver.dist, "all_gather_object", lambda answers, mine, group: answers.__setitem__(0, mine))

    def said(free: int) -> str:
        monkeypatch.setattr(filesystem.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))

        def fail() -> None:
            raise error

        with pytest.raises(CheckpointError) as told:
            alone.each("write its files", fail)
        return str(told.value)

    assert f"(512 KiB are free in {tmp_path})" in said(2**19)
    assert "free" not in said(2**40)
