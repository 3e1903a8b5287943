"""Detect the kind of an out-of-memory error: in the optimizer's first step, genuine, or caused by a faulty GPU."""

from __future__ import annotations

import re

from allranks.analysis.diagnose.patterns import LIKELY
from allranks.analysis.diagnose.records import CandidateCause, DiagnosisCase, LogSignal, sort_by_time

_OPTIMIZER = re.compile(
    r"torch/optim/|:_?(multi_tensor|single_tensor|fused)_\w+|optimizer\.py:step|:_init_group|:initialize_optimizer_states|:_optimizer_step|adamw?\.py:",
    re.IGNORECASE,
)
_CLOSURE = re.compile(r":(\w*_)?closure$")  # the closure that the program passes to `optimizer.step`
# functions in which a program uses its GPU for the first time
_FIRST_TOUCH = re.compile(
    r":(barrier|init_process_group|_lazy_init|set_device|new_group|_cuda_init|init_device_mesh|_init_dist\w*|initialize_distributed)$"
)
_OF_MEMORY = re.compile(r"oom|memory|MaxRSS|bad_alloc|alloc", re.IGNORECASE)
_REFUSED = re.compile(r"DefaultCPUAllocator|MemoryError|bad_alloc|[Cc]annot allocate memory|malloc of size")
KILLED = (
    "a process was killed (SIGKILL)",
    "Find out who sent the signal: the program's own os.kill, a clean-up script, another user, Slurm.",
)
NEAR_LINES = 60
SPARE_PART = 0.2  # of the capacity; less can be lost to fragmentation


def detect_out_of_memory(case: DiagnosisCase) -> None:
    """Classify out-of-memory errors on GPU and host, and kills with and without evidence of the sender."""
    for name in ("cuda_oom", "host_oom"):
        if candidate := case.candidates.get(name):  # the sizes may stand in a line of their own
            lines = {(s.file, s.line) for s in candidate.signals}
            near = (s for s in (*case.facts("oom_sizes"), *case.facts("oom_process")) if (s.file, s.line) not in lines)
            candidate.signals += [
                s for s in near if any(_is_near(s, o) or s.owner == "oom_process" for o in candidate.signals)
            ]
    _on_the_host(case)
    _refused(case)
    _killed(case)
    oom = case.candidates.get("cuda_oom")
    if oom is None:
        return
    in_step = [s for s in oom.signals if _in_the_optimizer(s)]
    elsewhere = [s for s in oom.signals if _in_a_closure(s)]
    nearby = [s for s in case.facts("optimizer") if any(_is_near(s, o) for o in oom.signals if o not in elsewhere)]
    if in_step or nearby:
        candidate = case.propose(
            "cuda_oom_optimizer_step", min(0.98, oom.score + 0.02), [*in_step, *nearby, *oom.signals[:1]]
        )
        if case.candidates.get("cuda_oom") is oom:
            oom.explained = True
        if not in_step:
            candidate.against.append("the optimizer appears near the error, but not in the traceback")
    _implausible_oom(case, oom.signals)


def _in_the_optimizer(signal: LogSignal) -> bool:
    """Return whether the traceback ends in the optimizer's own step."""
    return any(_OPTIMIZER.search(f) for f in signal.frames[-6:]) and not _in_a_closure(signal)


def _in_a_closure(signal: LogSignal) -> bool:
    """Return whether the optimizer's step called the closure: its forward or backward pass needed the memory."""
    called = max((i for i, f in enumerate(signal.frames) if _CLOSURE.search(f)), default=-1)
    return called >= 0 and not any(_OPTIMIZER.search(f) for f in signal.frames[called + 1 :])


def _on_the_host(case: DiagnosisCase) -> None:
    """Detect that host memory ran out in the optimizer's first step, for ranks on CPUs."""
    candidate = case.candidates.get("host_oom")
    if candidate is not None and any(_in_the_optimizer(s) for s in candidate.signals):
        candidate.cause = (
            "Host memory ran out in the optimizer's step: forward and backward fit, but AdamW allocates two more "
            "values per parameter at its first step. Train fewer parameters (LoRA), shard the optimizer's state "
            "(ZeRO-1), or request more memory."
        )
        candidate.next_test = "allranks plan SPEC shows weights, gradients and optimizer state separately"


def _refused(case: DiagnosisCase) -> None:
    """Tell a refused allocation, which the program sees as an exception, from a kill."""
    candidate = case.candidates.get("host_oom")
    if candidate is not None and candidate.cause is None and all(_REFUSED.search(s.text) for s in candidate.signals):
        candidate.cause = (
            "An allocation of host memory was refused, and the program ended by that exception: the machine's memory "
            "or a limit of the process (ulimit -v, a container) was exhausted. Every rank loads the whole model or "
            "data set, or there are too many data workers."
        )


def _killed(case: DiagnosisCase) -> None:
    """Lower the score of a SIGKILL without a message about memory: lack of memory is likely, but not shown."""
    killed = case.candidates.get("host_oom")
    if killed is None or any(_OF_MEMORY.search(s.text) for s in killed.signals):
        return
    if all(_of_teardown(case, s) for s in killed.signals):
        del case.candidates["host_oom"]
        return
    ends = [s for s in case.facts("rank_end") if s.groups["code"] == "-9" and s.groups["for_memory"]]
    if ends:
        _counted(case, killed, ends)
        return
    killed.score = min(killed.score, 0.7)
    killed.cause = (
        "A process was killed (SIGKILL) and wrote no message. The usual sender is the kernel or Slurm when host memory "
        "runs out: every rank loads the whole model or data set, there are too many data workers, or the job requested "
        "too little memory."
    )
    killed.against.append(
        "these logs contain no message of the kernel or Slurm about memory: somebody may have sent the signal"
    )


def _counted(case: DiagnosisCase, killed: CandidateCause, ends: list[LogSignal]) -> None:
    """Decide by the kernel's own count of processes that it has ended for lack of memory, which agents compare."""
    for_memory = [s for s in ends if s.groups["for_memory"] == "yes"]
    if for_memory:
        killed.score = LIKELY + 0.1
        killed.rank, killed.host = for_memory[0].rank, for_memory[0].host
        killed.cause = (
            "A process was killed (SIGKILL) after the kernel had counted an out-of-memory kill on its machine: every "
            "rank loads the whole model or data set, there are too many data workers, or the job requested too little "
            "memory."
        )
        return
    del case.candidates["host_oom"]
    candidate = case.propose("rank_died", 0.75, sort_by_time(ends))
    candidate.rank, candidate.host = ends[0].rank, ends[0].host
    candidate.cause = (
        "A process was killed (SIGKILL) and wrote no message. It was not the kernel for lack of memory, whose count of "
        "such kills did not change on that machine: a person, the program itself, or Slurm (a memory limit that it "
        "polls, scancel) sent the signal."
    )
    candidate.title, candidate.fix = KILLED
    candidate.next_test = "sacct -j <job> -o JobID,State,MaxRSS,ReqMem; the system log of that host at that time"


_OWN_EXIT = re.compile(r"\b(?:exit ?code|exitcode|code|status)\W{1,4}(?:[1-9]|[1-9]\d|1[01]\d)\b", re.IGNORECASE)
# A launcher kills what has not ended this long after another process failed: torchrun, Kubernetes and Slurm wait 30 s.
SHUTDOWN_S = (2, 90)


def _of_teardown(case: DiagnosisCase, signal: LogSignal) -> bool:
    """Return whether the launcher itself killed the process: another had ended by an exit code of its own before."""
    reports = (s for s in case.signals if s.owner == "launcher_report" and s.file == signal.file)
    before = (s.time for s in reports if s.time is not None and _OWN_EXIT.search(s.text))
    if signal.time is not None and any(SHUTDOWN_S[0] <= signal.time - time <= SHUTDOWN_S[1] for time in before):
        return True
    over = (s for s in case.facts("step_over") if s.file == signal.file and s.text.lstrip().startswith("srun:"))
    return "srun: error:" in signal.text and any(s.line < signal.line for s in over)


def _is_near(a: LogSignal, b: LogSignal) -> bool:
    """Return whether two messages of the same rank are near each other in a file."""
    same = (a.file, a.rank, a.local, a.task) == (b.file, b.rank, b.local, b.task)
    return same and abs(a.line - b.line) <= NEAR_LINES


def _implausible_oom(case: DiagnosisCase, signals: list[LogSignal]) -> None:
    """Detect an implausible error: memory was free, nothing was allocated yet, or the allocator reports no sizes."""
    sizes = [(s, _bytes(s.groups["want"]), _bytes(s.groups["free"])) for s in case.facts("oom_sizes")]
    spare = [
        s
        for s, want, free in sizes
        if want and free > 2 * want and free > max(2**30, SPARE_PART * _bytes(s.groups.get("capacity", "")))
        if "allowed" not in s.text  # the program limits its own share of the memory
    ]
    oom = case.candidates["cuda_oom"]
    if spare and len(spare) == len(sizes):
        _to_spare(case, oom, spare)
    elif not sizes and any("error: out of memory" in s.text.lower() for s in signals):
        early = [s for s in signals if any(_FIRST_TOUCH.search(f) for f in s.frames[-4:])]
        _at_first_touch(case, oom, early) if early else _from_driver(case, oom, signals)


def _to_spare(case: DiagnosisCase, oom: CandidateCause, spare: list[LogSignal]) -> None:
    candidate = case.propose("gpu_hardware_fault", LIKELY - 0.02, spare)
    candidate.cause = (
        "The allocation failed although much more memory was free than it requested: a memory limit is set for the "
        "process, or the GPU is faulty."
    )
    oom.against.append("more memory was free than was requested")
    oom.score = min(oom.score, 0.7)


def _at_first_touch(case: DiagnosisCase, oom: CandidateCause, early: list[LogSignal]) -> None:
    candidate = case.propose("gpu_hardware_fault", oom.score + 0.02, early)
    candidate.cause = (
        "The GPU reported `out of memory` at the first operation, before the program had allocated anything: another "
        "process uses the GPU, or the GPU is faulty. The memory use of the program is not the cause."
    )
    candidate.against.append("another process on the same GPU looks the same: check nvidia-smi")
    oom.against.append("the program had not allocated anything yet")


def _from_driver(case: DiagnosisCase, oom: CandidateCause, signals: list[LogSignal]) -> None:
    candidate = case.propose("gpu_hardware_fault", 0.45, signals[:1])
    candidate.cause = (
        "The driver itself reported `out of memory`, without the allocator's figures: sometimes the GPU is faulty "
        "rather than full."
    )
    candidate.against.append("these logs contain no ECC error, Xid or NVLink error")
    oom.against.append("no sizes are given: faulty GPUs and GPUs in exclusive mode give the same error")


def _bytes(text: str) -> float:
    """Return the bytes of a size such as `2.00 GiB`; 0 if there is none."""
    number, _, unit = text.partition(" ")
    try:
        return float(number) * 1024 ** max("bKMGT".find(unit[:1]), 0)
    except ValueError:
        return 0.0
