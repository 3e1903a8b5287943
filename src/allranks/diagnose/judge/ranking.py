"""Causes before their echoes: which candidates another one explains, and in which order the rest stand."""

from __future__ import annotations

from allranks.diagnose.catalogue import CATALOGUE
from allranks.diagnose.catalogue.entry import FITS, HINTS, SHOWS
from allranks.diagnose.judge.case import Candidate, Case
from allranks.diagnose.lines import comparable

SURE = 0.93  # from here on a message names the cause itself
# What a stronger candidate of these classes brings about; the echo then is no finding of its own.
_HANGS = frozenset({"collective_hang", "first_collective_failed"})
_ENDS = frozenset({"slurm_cancelled", "peer_died_first"})
_SELF_REPORTED = frozenset({"application_error", "rank_died"})
_GENERAL = frozenset({"collective_hang", "peer_died_first", "slurm_cancelled", "application_error", "rank_died"})
_WITHIN: dict[str, frozenset[str]] = {
    # the special case: the general one says the same
    "cuda_oom_optimizer_step": frozenset({"cuda_oom"}),
    "dataset_race": frozenset({"shm_removed"}),
    "shm_too_small": frozenset({"disk_full", "sigbus_memory", "host_oom"}),
    "shm_removed": frozenset({"dataset_race", "script_not_found"}),
    "ssh_launcher": frozenset({"script_not_found", "library_missing", "rendezvous_unreachable", "output_not_writable"}),
    "script_not_found": frozenset({"dataset_race", "library_missing"}),
    "roce_gid_index": frozenset({"rdma_unreachable"}),
    "memlock_limit": frozenset({"host_oom", "rdma_unreachable"}),
    "port_in_use": frozenset({"rendezvous_unreachable", "wrong_interface"}),
    "numpy_clash": frozenset({"library_missing"}),
    "nccl_library_mismatch": frozenset({"library_missing"}),
    "fsdp_mixed_dtype": frozenset({"dtype_mismatch"}),
    "fabric_manager": frozenset({"no_gpu", "gpu_hardware_fault"}),
    "slurm_time_limit": frozenset({"slurm_cancelled", "host_oom", "rank_died"}),
    "slurm_preempted": frozenset({"slurm_cancelled", "host_oom", "rank_died"}),
    "slurm_credential": frozenset({"slurm_controller_error", "slurm_submit_rejected"}),
    "slurm_controller_error": frozenset({"slurm_submit_rejected", "slurm_allocation_gone"}),
    "slurm_allocation_gone": frozenset({"slurm_submit_rejected"}),
    "checkpoint_collective": _HANGS,
    "collective_mismatch": _HANGS,
    "dataloader_hang": _HANGS,
    "gpu_hardware_fault": frozenset({"gpu_application_fault", "slow_transport"}),
    "first_collective_failed": frozenset({"collective_hang"}),
}


def rank(case: Case) -> list[Candidate]:
    """Candidates in order, most likely root cause first; what another one brought about left out."""
    _explain(case)
    listed = [c for c in case.candidates.values() if not c.explained and c.score > HINTS]
    roots = [c for c in listed if not CATALOGUE[c.id].echo]
    chosen = roots or listed
    first = _earliest(chosen)
    if first is not None and _order_unsure(case, first, chosen):
        first.against.append(
            "it comes first by its host's clock only: nothing in the logs compares that clock with the others'"
        )
    return sorted(chosen, key=lambda c: (-_strength(c), c is not first, -c.score))


def _order_unsure(case: Case, first: Candidate, candidates: list[Candidate]) -> bool:
    """Whether a cause that counts the same stands on a host whose clock cannot be compared."""
    own = {case.host_of(s) for s in first.signals}
    rivals = [c for c in candidates if c is not first and _strength(c) == _strength(first)]
    hosts = {case.host_of(s) for c in rivals for s in c.signals} - own - {None}
    return bool(hosts and (hosts | own) & case.unsure_hosts)


def _strength(candidate: Candidate) -> float:
    """Its score; all whose message names the cause count the same, so that the first of them in time leads."""
    return min(round(candidate.score, 2), SURE)


def _explain(case: Case) -> None:
    found = case.candidates
    for name, echoes in _WITHIN.items():
        if name in found and not found[name].explained:
            for echo in echoes & found.keys():
                if found[echo].score <= found[name].score + 0.02:
                    found[echo].explained = True
    _hangs_and_crashes(case)
    strong = [c for c in found.values() if not c.explained and c.score >= SHOWS - 0.1 and c.id not in _GENERAL]
    own = [c for c in found.values() if not c.explained and c.id in _SELF_REPORTED]
    for candidate in found.values():
        others = [c for c in strong if c is not candidate]
        if candidate.id in _ENDS | _HANGS - {"first_collective_failed"} and (others or own):
            candidate.explained = True
        if candidate.id == "application_error" and others:
            candidate.score = min(candidate.score, min(c.score for c in others) - 0.1)


def _hangs_and_crashes(case: Case) -> None:
    """The watchdog ends a process by SIGABRT: that is no crash of its own."""
    found = case.candidates
    died = found.get("rank_died")
    if died is None:
        return
    aborts = all("ABRT" in s.text.upper() or "-6" in s.text or "abort" in s.text.lower() for s in died.signals)
    told = case.facts("watchdog") or [
        c
        for c in found.values()
        if c is not died and c.score >= FITS and c.id not in ("slurm_cancelled", "peer_died_first")
    ]
    if aborts and told:
        died.explained = True
    elif any(c.score >= 0.9 and c.id not in _GENERAL for c in found.values()):
        died.score = min(died.score, FITS)


def _earliest(candidates: list[Candidate]) -> Candidate | None:
    """The one whose first message is oldest, where their times compare."""
    timed = [(c.time, c) for c in candidates if c.time is not None]
    if not timed or not all(comparable(timed[0][0], t) for t, _ in timed):
        return None
    return min(timed, key=lambda pair: pair[0])[1]
