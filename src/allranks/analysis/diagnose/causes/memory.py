"""GPU memory that ran out: in the optimizer's first step, really, or not at all."""

from __future__ import annotations

import re

from allranks.analysis.diagnose.case import CandidateCause, DiagnosisCase
from allranks.analysis.diagnose.patterns import LIKELY
from allranks.analysis.diagnose.records import LogSignal

_OPTIMIZER = re.compile(
    r"torch/optim/|:_?(multi_tensor|single_tensor|fused)_\w+|optimizer\.py:step|:_init_group|:initialize_optimizer_states|:_optimizer_step|adamw?\.py:",
    re.IGNORECASE,
)
_CLOSURE = re.compile(r":(\w*_)?closure$")  # what the program gives to `optimizer.step`
# functions in which a program touches its GPU for the first time
_FIRST_TOUCH = re.compile(
    r":(barrier|init_process_group|_lazy_init|set_device|new_group|_cuda_init|init_device_mesh|_init_dist\w*|initialize_distributed)$"
)
_OF_MEMORY = re.compile(r"oom|memory|MaxRSS|bad_alloc|alloc", re.IGNORECASE)
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


def detect_out_of_memory(case: DiagnosisCase) -> None:
    """Tells the kinds of out-of-memory apart, on the GPU and on the host, and a kill whose sender is shown from one whose is not."""
    _on_the_host(case)
    _killed(case)
    oom = case.candidates.get("cuda_oom")
    if oom is None:
        return
    in_step = [s for s in oom.signals if _in_the_optimizer(s)]
    elsewhere = [s for s in oom.signals if _in_a_closure(s)]
    nearby = [s for s in case.facts("optimizer") if any(_is_near(s, o) for o in oom.signals if o not in elsewhere)]
    if in_step or nearby:
        found = case.propose(
            "cuda_oom_optimizer_step", min(0.98, oom.score + 0.02), [*in_step, *nearby, *oom.signals[:1]]
        )
        if case.candidates.get("cuda_oom") is oom:
            oom.explained = True
        if not in_step:
            found.against.append("the optimizer is named near the error, but the traceback does not show it")
    _implausible_oom(case, oom.signals)


def _in_the_optimizer(signal: LogSignal) -> bool:
    """Whether the traceback ends in the optimizer's own step."""
    return any(_OPTIMIZER.search(f) for f in signal.frames[-6:]) and not _in_a_closure(signal)


def _in_a_closure(signal: LogSignal) -> bool:
    """Whether the optimizer's step had only called the program back: the memory was wanted by its forward or backward pass."""
    called = max((i for i, f in enumerate(signal.frames) if _CLOSURE.search(f)), default=-1)
    return called >= 0 and not any(_OPTIMIZER.search(f) for f in signal.frames[called + 1 :])


def _on_the_host(case: DiagnosisCase) -> None:
    """Says of ranks on CPUs, too, that it was the optimizer's first step."""
    found = case.candidates.get("host_oom")
    if found is not None and any(_in_the_optimizer(s) for s in found.signals):
        found.cause = (
            "The host's memory ran out in the optimizer's step: forward and backward fit, but AdamW makes two more values a parameter at its first step. "
            "Train fewer parameters (LoRA), shard the optimizer's state (ZeRO-1), or ask for more memory."
        )
        found.next_test = "allranks plan SPEC shows weights, gradients and optimizer state apart"


def _killed(case: DiagnosisCase) -> None:
    """SIGKILL without a word of memory: most often the kernel or Slurm for want of it, but nothing says so."""
    killed = case.candidates.get("host_oom")
    if killed is None or any(_OF_MEMORY.search(s.text) for s in killed.signals):
        return
    if all(_of_teardown(case, s) for s in killed.signals):
        del case.candidates["host_oom"]
        return
    killed.score = min(killed.score, 0.7)
    killed.cause = (
        "A process was killed (SIGKILL) without a word of its own. The usual sender is the kernel or Slurm for want of host memory: every rank loads "
        "the whole model or data set, too many data workers, or the job asked for too little."
    )
    killed.against.append(
        "no line of the kernel or of Slurm on memory is in these logs: somebody may have sent the signal by hand"
    )


def _of_teardown(case: DiagnosisCase, signal: LogSignal) -> bool:
    """A task that srun itself was about to kill."""
    over = (s for s in case.facts("step_over") if s.file == signal.file and s.text.lstrip().startswith("srun:"))
    return "srun: error:" in signal.text and any(s.line < signal.line for s in over)


def _is_near(a: LogSignal, b: LogSignal) -> bool:
    """Near each other in a file, and of the same rank."""
    same = (a.file, a.rank, a.local, a.task) == (b.file, b.rank, b.local, b.task)
    return same and abs(a.line - b.line) <= NEAR_LINES


def _implausible_oom(case: DiagnosisCase, signals: list[LogSignal]) -> None:
    """Out of memory with memory to spare, before anything was allocated, or without the allocator's word."""
    sizes = [(s, _bytes(s.groups["want"]), _bytes(s.groups["free"])) for s in case.facts("oom_sizes")]
    spare = [s for s, want, free in sizes if want and free > 2 * want and free > 2**30]
    oom = case.candidates["cuda_oom"]
    if spare and len(spare) == len(sizes):
        _to_spare(case, oom, spare)
    elif not sizes and any("error: out of memory" in s.text.lower() for s in signals):
        early = [s for s in signals if any(_FIRST_TOUCH.search(f) for f in s.frames[-4:])]
        _at_first_touch(case, oom, early) if early else _from_driver(case, oom, signals)


def _to_spare(case: DiagnosisCase, oom: CandidateCause, spare: list[LogSignal]) -> None:
    found = case.propose("gpu_hardware_fault", LIKELY - 0.02, spare)
    found.cause = "The allocation failed although much more memory was free than it asked for: either a limit was set for the process, or the GPU is faulty."
    oom.against.append("more memory was free than was asked for")
    oom.score = min(oom.score, 0.7)


def _at_first_touch(case: DiagnosisCase, oom: CandidateCause, early: list[LogSignal]) -> None:
    found = case.propose("gpu_hardware_fault", oom.score + 0.02, early)
    found.cause = (
        "The GPU said `out of memory` at the first operation on it, before the program had put anything there: either another process "
        "holds the card, or the GPU is faulty. The size of the program is not the cause."
    )
    found.against.append("another process on the same card looks the same: nvidia-smi tells")
    oom.against.append("the program had not allocated anything yet")


def _from_driver(case: DiagnosisCase, oom: CandidateCause, signals: list[LogSignal]) -> None:
    found = case.propose("gpu_hardware_fault", 0.45, signals[:1])
    found.cause = "The driver itself said `out of memory`, without the allocator's figures: now and then that is a faulty GPU rather than a full one."
    found.against.append("no ECC error, Xid or NVLink error is in these logs")
    oom.against.append("no sizes are given: this error also comes from faulty GPUs and from cards in exclusive use")


def _bytes(text: str) -> float:
    number, _, unit = text.partition(" ")
    try:
        return float(number) * _UNITS.get(unit, 0)
    except ValueError:
        return 0.0
