"""Damaged input in bulk: short here, as long as one likes by hand (`topo_fuzz`)."""

from __future__ import annotations

import pytest

from tests.unit.topo_fuzz import fuzz


def test_a_moment_of_it() -> None:
    assert fuzz(1.0)["read"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_minutes_of_it() -> None:
    found = fuzz(600.0, seed=1)
    assert found["read"] and found["refused"] and found["decided"] and found["log"]
