"""GPU memory that ran out: in the optimizer's first step, really, or not at all."""

from __future__ import annotations

import re

from allranks.diagnose.catalogue.entry import SHOWS
from allranks.diagnose.judge.case import Case
from allranks.diagnose.signals import Signal

_OPTIMIZER = re.compile(
    r"torch/optim/|:_?(multi_tensor|single_tensor|fused)_\w+|optimizer\.py:step|:_init_group|:initialize_optimizer_states|:_optimizer_step|adamw?\.py:",
    re.IGNORECASE,
)
_UNITS = {
    "B": 1,
    "bytes": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
NEAR_LINES = 60


def decide(case: Case) -> None:
    """Tells the kinds of GPU out-of-memory apart."""
    oom = case.candidates.get("cuda_oom")
    if oom is None:
        return
    nearby = [
        s
        for s in case.facts("optimizer")
        if any(s.file == o.file and abs(s.line - o.line) <= NEAR_LINES for o in oom.signals)
    ]
    in_step = [s for s in oom.signals if any(_OPTIMIZER.search(f) for f in s.frames[-6:])]
    if in_step or nearby:
        found = case.propose(
            "cuda_oom_optimizer_step", min(0.98, oom.score + 0.02), [*in_step, *nearby, *oom.signals[:1]]
        )
        if case.candidates.get("cuda_oom") is oom:
            oom.explained = True
        if not in_step:
            found.against.append("the optimizer is named near the error, but the traceback does not show it")
    _strange(case, oom.signals)


def _strange(case: Case, signals: list[Signal]) -> None:
    """Out of memory with memory to spare, or before the allocator had a word in it."""
    sizes = [(s, _bytes(s.groups["want"]), _bytes(s.groups["free"])) for s in case.facts("oom_sizes")]
    spare = [s for s, want, free in sizes if want and free > 2 * want and free > 2**30]
    oom = case.candidates["cuda_oom"]
    if spare and len(spare) == len(sizes):
        case.propose(
            "gpu_hardware_fault", SHOWS - 0.02, spare,
            cause="The allocation failed although much more memory was free than it asked for: either a limit was set for the process, or the GPU is faulty.",
        )  # fmt: skip
        oom.against.append("more memory was free than was asked for")
        oom.score = min(oom.score, 0.7)
    elif (
        not sizes
        and all("tried to allocate" not in s.text.lower() for s in signals)
        and any("error: out of memory" in s.text.lower() for s in signals)
    ):
        other = case.propose("gpu_hardware_fault", 0.45, signals[:1])
        other.cause = "The driver itself said `out of memory`, without the allocator's figures: now and then that is a faulty GPU rather than a full one."
        other.against.append("no ECC error, Xid or NVLink error is in these logs")
        oom.against.append("no sizes are given: this error also comes from faulty GPUs and from cards in exclusive use")


def _bytes(text: str) -> float:
    number, _, unit = text.partition(" ")
    try:
        return float(number) * _UNITS.get(unit, 0)
    except ValueError:
        return 0.0
