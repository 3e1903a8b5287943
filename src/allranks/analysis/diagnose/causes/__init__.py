"""Find the causes of a failure, and decide whether anything failed at all.

`find_candidates` runs all detectors, separates root causes from consequences and ranks them. `decide` gives the
verdict, independently of the failure classes, and describes a failure that no class explains. The confidence of a
finding follows from measured hit rates of the kind of rule that found it, and from what speaks against it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.diagnose.catalogue.messages import BENIGN_MESSAGES
from allranks.analysis.diagnose.catalogue.signs import FAILURE_SIGNS, FailureSign
from allranks.analysis.diagnose.causes import exceptions, hangs, memory, network, process_exits
from allranks.analysis.diagnose.causes.process_exits import FirstExit, first_exit
from allranks.analysis.diagnose.lines import REMARKING_EMITTERS, times_comparable
from allranks.analysis.diagnose.patterns import CERTAIN, LIKELY, POSSIBLE, WEAK
from allranks.analysis.diagnose.records import (
    BenignFinding,
    CandidateCause,
    DiagnosisCase,
    DiagnosisFinding,
    LogEvidence,
    LogSignal,
    UnexplainedFailure,
    sort_by_time,
)
from allranks.utils.redaction import redact

# Each reads the whole case and proposes or weighs candidates. Order matters only where one reads another's candidates.
DETECTORS: tuple[Callable[[DiagnosisCase], None], ...] = (
    memory.detect_out_of_memory,
    network.detect_wrong_transport,
    hangs.detect_collective_timeouts,
    hangs.detect_rank_outside_collective,
    hangs.detect_diverging_calls,
    hangs.detect_ras_report,
    exceptions.detect_unwritable_output,
    hangs.detect_calls_in_tracebacks,
    exceptions.detect_exceptions,
    process_exits.detect_silent_exits,
    process_exits.detect_lost_peers,
    process_exits.detect_failed_node,
    process_exits.detect_non_finite_loss,
    hangs.detect_monitored_hang,
    hangs.detect_size_mismatch,
    hangs.detect_failed_restart,
    hangs.detect_stalled_storage,
    hangs.mention_dumps,
    process_exits.detect_kind_of_library,
)


def find_candidates(case: DiagnosisCase) -> tuple[list[CandidateCause], list[LogSignal]]:
    """Return the candidates, most likely root cause first, and the messages of classes that the job survived."""
    recovered = _collect(case)
    for detect in DETECTORS:
        detect(case)
    return rank_candidates(case), recovered


def _collect(case: DiagnosisCase) -> list[LogSignal]:
    """Propose candidates from messages that match a class. Return warnings after which the job continued."""
    recovered: list[LogSignal] = []
    by_class: dict[str, list[LogSignal]] = {}
    for signal in case.signals:
        if signal.kind == "class":
            survived = CATALOGUE[signal.owner].ends_job and case.survived(signal)
            survived |= CATALOGUE[signal.owner].echo and case.after_completion(signal)
            repeated = CATALOGUE[signal.owner].measured and case.repeats_to_end(signal)
            if not repeated and (survived or (signal.passing and case.went_on_after(signal))):
                recovered.append(signal)
            else:
                by_class.setdefault(signal.owner, []).append(signal)
    for name, signals in by_class.items():
        best = max(_weight(s) for s in signals)
        if best > WEAK:
            more = 0.01 * min(3, len({s.rule for s in signals}) - 1)
            sentence = next((s.groups["told"] for s in signals if _weight(s) == best and s.groups.get("told")), None)
            cause = f"{sentence} {CATALOGUE[name].cause}" if sentence else None
            case.propose(name, min(0.98, best + more), sorted(signals, key=lambda s: -s.weight), cause=cause)
    return recovered


UNKNOWN_EMITTER = 0.1  # less weight for a message that does not state the cause and whose emitter is not recognised


def _weight(signal: LogSignal) -> float:
    """Return the weight of a message, less if nothing in its line shows who wrote it."""
    unsure = signal.emitter == "program" and WEAK < signal.weight < CERTAIN
    return signal.weight - UNKNOWN_EMITTER if unsure else signal.weight


CERTAIN_SCORE = 0.93  # at this score and above a message states the cause itself
# The failure classes that a stronger candidate of each class explains. They are then not separate findings.
_HANGS = frozenset({"collective_hang", "first_collective_failed"})
_ENDS = frozenset({"slurm_cancelled", "peer_died_first"})
_SELF_REPORTED = frozenset({"application_error", "rank_died"})
_GENERAL = frozenset({"collective_hang", "peer_died_first", "slurm_cancelled", "application_error", "rank_died"})
_EXPLAINS: dict[str, frozenset[str]] = {
    # the specific class replaces the general one
    "cuda_oom_optimizer_step": frozenset({"cuda_oom"}),
    "dataset_race": frozenset({"shm_removed"}),
    "shm_too_small": frozenset({"disk_full", "sigbus_memory", "host_oom"}),
    "shm_removed": frozenset({"dataset_race", "script_not_found"}),
    "ssh_launcher": frozenset({"script_not_found", "library_missing", "rendezvous_unreachable", "output_not_writable"}),
    "script_not_found": frozenset({"dataset_race", "library_missing"}),
    "roce_gid_index": frozenset({"rdma_unreachable"}),
    "memlock_limit": frozenset({"host_oom", "rdma_unreachable"}),
    "port_in_use": frozenset({"rendezvous_unreachable", "wrong_interface"}),
    "port_reserved": frozenset({"rendezvous_unreachable", "wrong_interface"}),
    "package_lock": frozenset({"dataset_race"}),
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


def rank_candidates(case: DiagnosisCase) -> list[CandidateCause]:
    """Return the candidates, most likely root cause first, without those that another candidate explains."""
    _mark_explained(case)
    listed = [c for c in case.candidates.values() if not c.explained and c.score > WEAK]
    roots = [c for c in listed if not CATALOGUE[c.id].echo]
    chosen = roots or listed
    first = _earliest(chosen)
    if first is not None and _order_unsure(case, first, chosen):
        first.against.append(
            "it is first only by the clock of its host, and nothing in the logs compares that clock with the others"
        )
    return sorted(chosen, key=lambda c: (-_strength(c), c is not first, -c.score))


def _order_unsure(case: DiagnosisCase, first: CandidateCause, candidates: list[CandidateCause]) -> bool:
    """Return whether an equally strong candidate is on a host whose clock cannot be compared."""
    own = {case.host_of(s) for s in first.signals}
    rivals = [c for c in candidates if c is not first and _strength(c) == _strength(first)]
    hosts = {case.host_of(s) for c in rivals for s in c.signals} - own - {None}
    return bool(hosts and (hosts | own) & case.unsure_hosts)


def _strength(candidate: CandidateCause) -> float:
    """Return the score, limited to `CERTAIN_SCORE` so that the earliest of the certain candidates comes first."""
    return min(round(candidate.score, 2), CERTAIN_SCORE)


def _mark_explained(case: DiagnosisCase) -> None:
    candidates = case.candidates
    for name, echoes in _EXPLAINS.items():
        if name in candidates and not candidates[name].explained:
            for echo in echoes & candidates.keys():
                if candidates[echo].score <= candidates[name].score + 0.02:
                    candidates[echo].explained = True
    _hangs_and_crashes(case)
    strong = [c for c in candidates.values() if not c.explained and c.score > LIKELY - 0.1 and c.id not in _GENERAL]
    own = [c for c in candidates.values() if not c.explained and c.id in _SELF_REPORTED]
    for candidate in candidates.values():
        others = [c for c in strong if c is not candidate]
        if candidate.id in _ENDS | _HANGS - {"first_collective_failed"} and (others or own):
            candidate.explained = True
        if candidate.id == "application_error" and others:
            candidate.score = min(candidate.score, min(c.score for c in others) - 0.1)
            candidate.explained = any(_follows(candidate, c) for c in others)


def _follows(later: CandidateCause, cause: CandidateCause) -> bool:
    """Return whether all messages of a candidate follow the first one of another of the same rank in the same file."""
    first = {(s.file, s.rank): s.line for s in sorted(cause.signals, key=lambda s: -s.line)}
    return bool(later.signals) and all(s.line > first.get((s.file, s.rank), s.line) for s in later.signals)


_ABORT = re.compile(r"SIGABRT|\babort|(?<![\d.])-6\b|\b134\b|\bsignal:? 6\b|0:6\b", re.IGNORECASE)


def _hangs_and_crashes(case: DiagnosisCase) -> None:
    """Mark SIGABRT as explained if the watchdog sent it, and lower the score of a crash beside a stronger cause."""
    candidates = case.candidates
    died = candidates.get("rank_died")
    if died is None:
        return
    aborts = all(_ABORT.search(s.text) for s in died.signals)
    timeouts = case.facts("watchdog") or [
        c
        for c in candidates.values()
        if c is not died and c.score >= POSSIBLE and c.id not in ("slurm_cancelled", "peer_died_first")
    ]
    if aborts and (timeouts or only_reported(died)):
        died.explained = True  # without a reason in these logs the verdict is `unexplained`
        return
    if only_reported(died):
        died.against.append("only the signal is known: these logs show neither where nor why the process crashed")
    if any(c.score >= 0.9 and c.id not in _GENERAL for c in candidates.values()):
        died.score = min(died.score, POSSIBLE)


def _earliest(candidates: list[CandidateCause]) -> CandidateCause | None:
    """Return the candidate with the oldest first message, if their times can be compared."""
    timed = [(c.time, c) for c in candidates if c.time is not None]
    if not timed or not all(times_comparable(timed[0][0], t) for t, _ in timed):
        return None
    return min(timed, key=lambda pair: pair[0])[1]


Verdict = Literal["found", "unexplained", "incomplete", "healthy"]
_QUIET_EXCEPTIONS = frozenset({"StopIteration", "GeneratorExit", "StopAsyncIteration"})
_EXCEPTION = FAILURE_SIGNS["traceback"]
_ENDED = FAILURE_SIGNS["launcher_report"]


def find_signs(case: DiagnosisCase) -> list[tuple[FailureSign, LogSignal]]:
    """Return the signs of failure that the job did not survive, strong ones first, in order of files and lines."""
    signs: list[tuple[FailureSign, LogSignal]] = []
    seen: set[tuple[int, int]] = set()
    for signal in case.signals:
        sign = _sign(signal)
        if sign is None or (signal.file, signal.line) in seen or (signal.file, signal.line) in case.own_kills:
            continue
        remark = signal.severity == "info" or (signal.severity == "warning" and signal.emitter in REMARKING_EMITTERS)
        if not sign.strong and remark:
            continue
        if case.survived(signal) or (not sign.strong and case.went_on_after(signal)):
            continue
        seen.add((signal.file, signal.line))
        signs.append((sign, signal))
    return sorted(signs, key=lambda pair: (not pair[0].strong, pair[1].file, pair[1].line))


def _sign(signal: LogSignal) -> FailureSign | None:
    """Return the sign that a signal is, if it is one."""
    if signal.kind == "sign":
        return FAILURE_SIGNS[signal.owner]
    if signal.owner == "exception":
        name = signal.groups.get("type", "")
        return None if name in _QUIET_EXCEPTIONS or name.endswith("Warning") else _EXCEPTION
    if signal.owner in ("event_error", "event_hang", "run_outcome"):
        return _EXCEPTION
    if signal.owner == "rank_end" and signal.groups.get("code") not in ("0", "-15"):
        return _ENDED
    return None


def decide(
    case: DiagnosisCase, candidates: list[CandidateCause]
) -> tuple[Verdict, list[CandidateCause], UnexplainedFailure | None]:
    """Return the verdict, the candidates that remain findings, and a description of a failure that none explains."""
    signs = find_signs(case)
    kept = candidates if signs else [c for c in candidates if not _is_remark(case, c)]
    if kept:
        return "found", kept, None
    if signs:
        return "unexplained", [], _describe_unexplained(case, signs)
    well = any(case.ends_well(scan.file) for scan in case.scans) or bool(case.facts("rank_done"))
    return ("healthy" if well else "incomplete"), [], None


def _is_remark(case: DiagnosisCase, candidate: CandidateCause) -> bool:
    """Return whether a candidate needs a sign of failure beside it.

    That is what a logger marks as a warning, an ambiguous message of an unknown emitter, and an ambiguous sign of
    slowness in a job that ends well.
    """
    own = [s for s in candidate.signals if s.kind == "class" and s.owner == candidate.id]
    if CATALOGUE[candidate.id].measured:
        return max((s.weight for s in own), default=CERTAIN) <= POSSIBLE and not any(map(case.repeats_to_end, own))
    if own and all(s.passing and s.weight <= POSSIBLE for s in own):
        return True
    if not own or len(own) < len(candidate.signals) or max(s.weight for s in own) >= CERTAIN:
        return False
    ambiguous = candidate.score <= POSSIBLE
    if ambiguous and not CATALOGUE[candidate.id].ends_job and all(case.ends_well(s.file) for s in own):
        return True
    return all(
        (s.severity in ("info", "warning") and s.emitter in REMARKING_EMITTERS)
        or (ambiguous and s.emitter == "program")
        for s in own
    )


def _describe_unexplained(case: DiagnosisCase, signs: list[tuple[FailureSign, LogSignal]]) -> UnexplainedFailure:
    sign, first = signs[0]
    end = first_exit(case)
    rank = end.rank if end.rank is not None else first.rank
    unlike: dict[str, LogSignal] = {}  # the heads of tracebacks are all alike
    for _, signal in signs:
        unlike.setdefault(signal.text, signal)
    host = end.host or case.host_of(first)
    return UnexplainedFailure(
        says=sign.says,
        emitter=first.emitter,
        host=case.rank_hosts.get(rank, host) if rank is not None else host,
        rank=rank,
        read_next=sign.read_next,
        evidence=[
            LogEvidence(file=case.names[s.file], line=s.line, text=redact(s.text))
            for s in list(unlike.values())[:MAX_EVIDENCE]
        ],
    )


# From first looks at logs that no rule was written from (docs/diagnose.md): kind of rule, answers, hits.
MEASURED: dict[str, tuple[int, int]] = {
    "ambiguous message, recognised emitter": (49, 43),
    "ambiguous message, unknown emitter": (18, 18),
    "certain message, recognised emitter": (146, 144),
    "certain message, unknown emitter": (64, 61),
    "exception": (52, 45),
    "likely message, recognised emitter": (67, 58),
    "likely message, unknown emitter": (30, 21),
    "parsed message": (9, 8),
    "several messages together": (21, 15),
    "signal alone": (2, 2),
}
RULE_WEIGHT = 6  # the rule's own weight counts like so many measured answers
HIGHEST = 0.97
UNSURE_HIGHEST = 0.9  # if the emitter is not recognised, or something contradicts
CONTRADICTION = 0.08
_RECORDS = frozenset({"run_outcome", "event_hang", "event_error", "rank_end", "rank_early", "rank_done"})


SIGNAL_ALONE, SIGNAL_ALONE_WEIGHT = "signal alone", 0.5  # how a process ended is known, and not why or where it crashed
_REPORTING = frozenset({"launcher", "mpi", "shell", "slurm_client", "slurm_daemon"})


def only_reported(candidate: CandidateCause) -> bool:
    """Return whether only the signal of a crash is known, by the report of a launcher, a shell or the scheduler."""
    own = [s for s in candidate.signals if s.kind == "class"]
    return (
        candidate.id == "rank_died"
        and len(own) == len(candidate.signals) > 0
        and all((s.emitter in _REPORTING or "told" in s.groups) and not s.frames for s in own)
    )


def kind_of(candidate: CandidateCause) -> str:
    """Return the kind of rule on which a candidate rests most."""
    if any(s.owner in _RECORDS for s in candidate.signals):
        return "record of a run"
    if only_reported(candidate):
        return SIGNAL_ALONE
    own = [s for s in candidate.signals if s.kind == "class" and s.owner == candidate.id]
    if not own:
        return "exception" if candidate.id == "application_error" else "several messages together"
    best = max(own, key=lambda s: s.weight)
    if "told" in best.groups:  # only parsers set it
        return "parsed message"
    emitter = "recognised emitter" if best.emitter != "program" else "unknown emitter"
    strength = "certain" if best.weight >= CERTAIN else "likely" if best.weight >= LIKELY - 0.05 else "ambiguous"
    return f"{strength} message, {emitter}"


def confidences(candidates: list[CandidateCause]) -> list[float]:
    """Return the confidence of each candidate, in the order of the findings; none is above the one before it."""
    values: list[float] = []
    for candidate in candidates:
        rivals = [c for c in candidates if c is not candidate and c.score >= candidate.score]
        value = _confidence(candidate, contradictions=len(candidate.against) + len(rivals[:1]))
        values.append(round(min([value, *values[-1:]]), 2))
    return values


def _confidence(candidate: CandidateCause, *, contradictions: int) -> float:
    kind = kind_of(candidate)
    answers, hits = MEASURED.get(kind, (0, 0))
    weight = min(candidate.score, SIGNAL_ALONE_WEIGHT) if kind == SIGNAL_ALONE else candidate.score
    rate = (hits + RULE_WEIGHT * weight) / (answers + RULE_WEIGHT)
    if kind == SIGNAL_ALONE:
        rate = min(rate, SIGNAL_ALONE_WEIGHT)
    highest = UNSURE_HIGHEST if contradictions or kind.endswith("unknown emitter") else HIGHEST
    return max(min(rate, highest) - CONTRADICTION * min(contradictions, 2), 0.05)


MAX_EVIDENCE = 5
# Reported by every rank: which rank wrote first is not significant.
_REPORTED_BY_ALL = frozenset({"collective_hang", "first_collective_failed", "peer_died_first", "checkpoint_collective"})


def describe_candidates(case: DiagnosisCase, candidates: list[CandidateCause]) -> list[DiagnosisFinding]:
    """Return the findings of candidates."""
    end = first_exit(case)
    return [
        _finding(case, candidate, end, confidence)
        for candidate, confidence in zip(candidates, confidences(candidates), strict=True)
    ]


def _finding(case: DiagnosisCase, candidate: CandidateCause, end: FirstExit, confidence: float) -> DiagnosisFinding:
    entry = CATALOGUE[candidate.id]
    strongest = max((s.weight for s in candidate.signals), default=0.0)
    telling = [s for s in candidate.signals if s.kind != "class" or s.weight >= strongest - 0.2]
    first = sort_by_time(telling)
    rank_number, host = _where(case, candidate, first, end)
    return DiagnosisFinding(
        id=entry.id,
        title=candidate.title or entry.title,
        confidence=confidence,
        cause=redact(candidate.cause or entry.cause),
        fix=candidate.fix or entry.fix,
        host=host,
        rank=rank_number,
        evidence=_evidence(case, first, sizes=entry.id in ("cuda_oom", "cuda_oom_optimizer_step", "host_oom")),
        against=[redact(a) for a in dict.fromkeys(candidate.against)],
        next_test=candidate.next_test or entry.next_test,
        reference=entry.reference,
        count=_count(case, candidate.signals),
    )


def _count(case: DiagnosisCase, signals: list[LogSignal]) -> int:
    """Estimate the number of matching lines; several rules may match one, so each file's busiest rule counts."""
    busiest: dict[int, int] = {}
    for file, rule in {(s.file, s.rule) for s in signals if s.rule >= 0}:
        busiest[file] = max(busiest.get(file, 0), case.scans[file].tallies[rule].count)
    return sum(busiest.values()) or len(signals)


def _where(
    case: DiagnosisCase, candidate: CandidateCause, signals: list[LogSignal], end: FirstExit
) -> tuple[int | None, str | None]:
    """Return rank and host that failed first, from the candidate, its lines, their ranks, or the first exit."""
    if candidate.elsewhere and candidate.rank is None:
        return None, candidate.host
    named = next((s.groups["host"] for s in signals if s.kind == "class" and s.groups.get("host")), None)
    host = candidate.host or named
    ranks = [s.rank for s in signals if s.rank is not None]
    of_all = candidate.id in _REPORTED_BY_ALL and len(set(ranks)) > 1
    if candidate.rank is not None:
        return candidate.rank, host or case.rank_hosts.get(candidate.rank)
    if host:
        there = [rank for rank, place in case.rank_hosts.items() if place == host]
        own = [rank for rank in ranks if rank in there]
        return (own or (there if len(there) == 1 else [None]))[0], host
    number = ranks[0] if ranks and not of_all else end.rank
    host = case.rank_hosts.get(number) if number is not None else None
    if host is None and not of_all:
        host = next((s.host for s in signals if s.host), None) or end.host
    return number, host


_SIZE = re.compile(r"\d ?(?:[kKMGT]i?B|bytes)\b")


def _evidence(case: DiagnosisCase, signals: list[LogSignal], *, sizes: bool = False) -> list[LogEvidence]:
    """Return the first lines; with `sizes` those that say how much memory was wanted or used come first."""
    shown, seen = [], set()
    signals = sorted(signals, key=lambda s: _SIZE.search(s.text) is None) if sizes else signals
    for signal in signals:
        if (signal.file, signal.line) not in seen and len(shown) < MAX_EVIDENCE:
            seen.add((signal.file, signal.line))
            shown.append(LogEvidence(file=case.names[signal.file], line=signal.line, text=redact(signal.text)))
    return shown


def describe_harmless(case: DiagnosisCase, recovered: list[LogSignal]) -> list[BenignFinding]:
    """Return the harmless messages, and those that the job survived or that nothing failed beside."""
    messages: dict[str, tuple[str, list[LogSignal]]] = {}
    for signal in case.signals:
        if signal.kind == "benign":
            messages.setdefault(signal.owner, (BENIGN_MESSAGES[signal.owner].why, []))[1].append(signal)
    for signal in recovered:
        why = "The job continued after it, or nothing failed beside it."
        messages.setdefault(f"recovered_{signal.owner}", (why, []))[1].append(signal)
    return [
        BenignFinding(id=name, why=why, count=_count(case, signals), evidence=_evidence(case, signals[:1])[0])
        for name, (why, signals) in messages.items()
    ]
