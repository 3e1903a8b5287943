"""The rungs, in order. A new test is one file beside this one and one line below."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from allranks.errors import SpecError
from allranks.smoke.ladder import (
    t01_single,
    t02_ddp,
    t03_deepspeed_zero1,
    t04_multinode_deepspeed,
    t05_lora_sft,
    t06_lora_sft_2node,
    t07_fsdp_lora_moe,
    t08_cpu_lab,
)
from allranks.smoke.records import SmokeTest

TESTS: tuple[SmokeTest, ...] = (
    t01_single.TEST,
    t02_ddp.TEST,
    t03_deepspeed_zero1.TEST,
    t04_multinode_deepspeed.TEST,
    t05_lora_sft.TEST,
    t06_lora_sft_2node.TEST,
    t07_fsdp_lora_moe.TEST,
    t08_cpu_lab.TEST,
)


def chosen(names: Sequence[str]) -> list[SmokeTest]:
    """Tests by name or the beginning of one, in the order of the ladder; ``all`` or nothing means all.

    Raises:
        SpecError: there is no such test.
    """
    if not names or "all" in names:
        return list(TESTS)
    found = []
    for name in names:
        matches = [t for t in TESTS if t.name == name] or [t for t in TESTS if t.name.startswith(name)]
        if len(matches) != 1:
            near = difflib.get_close_matches(name, [t.name for t in TESTS], n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SpecError(f"smoke: there is no test {name!r}{hint} (known: {', '.join(t.name for t in TESTS)})")
        found += matches
    return [t for t in TESTS if t in found]
