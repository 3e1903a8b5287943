"""What loading takes of a node's memory, measured on a model of 212 million parameters."""

from pathlib import Path

import pytest
from benchmarks.load_memory import allowed, measure, write_models

pytestmark = pytest.mark.full


def test_a_node_holds_at_most_one_copy_while_it_loads(tmp_path: Path) -> None:
    folders, copy, largest = write_models(tmp_path)
    for strategy in ("pytorch_zero3", "zero3"):
        found = measure("allranks", strategy, folders["bfloat16"], 2)
        assert 0.9 * copy < found["peak_pss_bytes"] <= allowed(copy, largest, strategy, 2), (strategy, found)
        assert sum(found["read_bytes"]) == copy // 2 and max(found["read_bytes"]) < 0.3 * copy, found
    naive = measure("from_pretrained", "pytorch_zero3", folders["bfloat16"], 2)
    assert naive["peak_pss_bytes"] > allowed(copy, largest, "pytorch_zero3", 2)  # the measurement sees a copy too many
