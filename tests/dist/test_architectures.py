"""Each tested architecture is planned, trained, saved, and read by plain transformers and PEFT."""

from pathlib import Path

import pytest

from allranks.spec.models import TYPES, Architecture, packs_rows
from tests.dist.architecture_configs import CONFIGS
from tests.dist.harness import run_ranks

USUAL = {"qwen3_moe", "distilbert"}


def test_each_has_a_config() -> None:
    assert set(CONFIGS) == {entry.model_type for entry in TYPES.tested}
    assert len(CONFIGS) == len(TYPES.tested)


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.model_type, marks=() if e.model_type in USUAL else pytest.mark.full) for e in TYPES.tested],
)
def test_it_trains_and_others_read_it(entry: Architecture, tmp_path: Path) -> None:
    (found,) = run_ranks("architecture", 1, tmp_path, module="architecture_cases", kind=entry.model_type)
    for adapter in ("lora", "none"):
        (said,) = found[adapter]["said"]
        assert said == pytest.approx(found[adapter]["plain"], rel=2e-5), adapter
    assert found["lora"]["said"] != found["none"]["said"]
    assert found["lora"]["adapters"] > 0 and not found["lora"]["untrained"]
    if entry.task == "text":  # the list of those that do not separate rows is as measured, too
        assert (found["leak"] < 1e-5) is packs_rows(entry.model_type), found["leak"]
