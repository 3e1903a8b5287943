"""Read how a run of allranks ended from its records: first evidence of a diagnosis, and what `run` and `report` say.

`failure_of` gives the class, rank and host of a run's final message; `launch.outcome` saves them in metrics.json.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.diagnose.causes.hangs import OUTSIDE, is_outside
from allranks.analysis.diagnose.causes.memory import KILLED
from allranks.analysis.diagnose.causes.process_exits import LEFT_EARLY
from allranks.analysis.diagnose.logs import started_runs
from allranks.analysis.diagnose.patterns import CERTAIN, NCCL_ERROR
from allranks.analysis.diagnose.records import CandidateCause, DiagnosisCase, FileScan, LogSignal, headline, place
from allranks.rundir.files import read_record
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import read_appended, read_regular
from allranks.utils.redaction import redact
from allranks.utils.text import as_dicts, sanitize

OUTCOME_SCORE = 0.98
GENERAL = frozenset({"application_error", "rank_died", "collective_hang"})  # a log may show a more specific class
# Sentences of allranks itself. The first that matches decides.
_ENDINGS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("node_unhealthy", r"The run folder is no longer visible on (?P<host>[\w.-]*\w)"),
        ("disk_full", r"are needed, \S+ \S+ are free|are free in /|No space left on device|Disk quota exceeded"),
        ("library_missing", r"`module load [^`]+` failed"),
        ("stale_file_handle", r"Stale file handle"),
        ("port_reserved", r"only root may listen"),
        ("output_not_writable", r"Permission denied|Read-only file system"),
        ("loss_not_finite", r"\bnot finite\b"),
        ("slurm_time_limit", r"time limit is near|\b(?:says|ended as) (?:TIMEOUT|DEADLINE)"),
        ("slurm_preempted", r"job was preempted|\b(?:says|ended as) PREEMPTED"),
        ("host_oom", r"\b(?:says|ended as) OUT_OF_ME|out-of-memory killer has ended a process"),
        (
            "node_unhealthy",
            r"the agent on (?:this machine|(?P<host>[^\s:;]+)) is gone|because a node failed|\b(?:says|ended as) (?:NODE_FAIL|BOOT_FAIL)",
        ),
        ("node_unhealthy", r"(?P<host>[^\s,;:]+), the job's first node, where its script "),
        (
            "slurm_cancelled",
            r"was cancelled|^interrupted|^stopped\b.{0,40}\(interrupted|\b(?:says|ended as) CANCELLED|(?:agent|allranks) received SIG",
        ),
        ("replicas_diverged", r"^after step \d+ the weights of .* differ from"),
        ("model_differs_between_ranks", r"(?:weights|models?) (?:of|differ|are not).{0,60}(?:ranks|equal)"),
        ("collective_mismatch", r"the ranks are in different collectives|order of gradients is not the same"),
    )
)
_CONSEQUENCES = ("peer_died_first", "slurm_cancelled", "rendezvous_unreachable")
_RANK_FAILED = re.compile(
    r"^(?:[^:]{0,80}; )?rank (?P<rank>\d+)(?: on (?P<host>\S+))? failed(?: after step \d+| before the first step)?: (?P<what>.*)",
    re.DOTALL,
)
_RANK = re.compile(r"\brank (?P<rank>\d+)\b(?: on (?P<host>[A-Za-z][\w.-]*))?")
# A faulty node may be the reason, which then only the log of a rank shows: class, and classes of the reason.
_OF_SOME_NODE = GENERAL | {"peer_died_first", "rdma_unreachable", "first_collective_failed", "slow_transport"}
_NODE_FAULTS = ("gpu_hardware_fault", "broken_node_network", "fabric_manager")
_UNREACHED_PEER = re.compile(r"Got completion from peer (\S+)<\d+> with (?:error |status=)12\b")
_LOG_END_BYTES = 128 << 10


class RunFailure(Struct, frozen=True, kw_only=True):
    """Class of the failure that ended attempt ``attempt`` of a run, and the rank and host that failed first.

    ``evidence``: what shows, beside the run's final message, that the host is at fault.
    """

    id: str
    rank: int | None = None
    host: str | None = None
    attempt: int = 1
    evidence: str = ""


def failure_of(run: RunDir, message: str) -> RunFailure:
    """Return what the sentence with which the newest attempt of a run ended means."""
    attempt = max(run.attempts(), default=1)
    failure = _read_sentence(run, message, attempt)
    unclear = failure.id in _OF_SOME_NODE and (failure.id != "application_error" or NCCL_ERROR.search(message))
    if unclear and (at_fault := _node_at_fault(run, attempt)):
        return at_fault
    if failure.rank is None or failure.host is not None:
        return failure
    log = run.rank_logs(attempt).get(failure.rank)  # its name has the host, which the sentence need not have
    return structs.replace(failure, host=log and log.name.rsplit(".rank", 1)[0])


def _node_at_fault(run: RunDir, attempt: int) -> RunFailure | None:
    """Return which node the ends of the ranks' logs show to be at fault; None unless it is certain, and one alone.

    That is a fault of the node itself in its own log, or the one node that several others could not reach over RDMA.
    """
    from allranks.analysis.diagnose.scanner import Scanner

    places = as_dicts(read_record(run.rendezvous(attempt)).get("places"))
    hosts = {str(place.get("address")): str(place.get("host")) for place in places}
    scanner, faults, broken = Scanner(), dict[str, RunFailure](), dict[frozenset[str], str]()
    for rank, path in run.rank_logs(attempt).items():
        host = path.name.rsplit(".rank", 1)[0]
        try:
            end = read_appended(path, 0, _LOG_END_BYTES).data
        except OSError:
            continue
        case = DiagnosisCase([path.name], [scanner.scan(0, iter([(end, True)]))])
        for signal in case.signals:
            hard = signal.kind == "class" and signal.owner in _NODE_FAULTS and signal.weight >= CERTAIN
            if hard and not case.survived(signal):
                text = f"{path.name}: {redact(sanitize(signal.text.strip()))[:160]}"
                fault = RunFailure(id=signal.owner, rank=rank, host=host, attempt=attempt, evidence=text)
                faults.setdefault(host, fault)
        for peer in _UNREACHED_PEER.findall(end.decode("utf-8", "replace")):
            broken.setdefault(frozenset((host, hosts.get(str(peer), str(peer)))), path.name)
    common = set(hosts.values()).intersection(*broken)
    if not faults and len(broken) > 1 and len(common) == 1:
        [host] = common
        text = f"{len(broken)} nodes have lost their RDMA connection to it: {', '.join(sorted(broken.values())[:4])}"
        return RunFailure(id="broken_node_network", host=host, attempt=attempt, evidence=text)
    return next(iter(faults.values())) if len(faults) == 1 else None


def failure_headline(metrics: dict[str, Any], run: str) -> str:
    """Return what, where and what to do, as `diagnose` begins, for metrics.json's ``failure``; empty without one."""
    failure, message = metrics.get("failure"), str(metrics.get("message"))
    if not isinstance(failure, dict) or (entry := CATALOGUE.get(str(failure.get("id")))) is None:
        return ""
    todo = f"Look for the cause in its logs with allranks diagnose {run}" if entry.id in GENERAL else entry.fix
    title, todo = _title_and_fix(entry.id, message) or (entry.title, todo)
    return headline(title, place(failure.get("rank"), failure.get("host")), todo)


def _title_and_fix(name: str, message: str) -> tuple[str, str] | None:
    """Return title and fix for what the sentence says beyond its class; None if that is nothing."""
    if message.startswith("hang: rank") and is_outside(message):
        return OUTSIDE
    if "ended with exit code 0 " in message:  # while others ran, or before it had finished
        return LEFT_EARLY
    return KILLED if name == "rank_died" and "ended by SIGKILL" in message else None


def _read_sentence(run: RunDir, message: str, attempt: int) -> RunFailure:
    hang = read_record(run.hang_report(attempt))
    if hang.get("sentence") and str(hang["sentence"])[:200] in message:
        stalled = (hang.get("stalled") or [{}])[0]
        kind = str(hang.get("kind") or "collective_hang")
        return RunFailure(id=kind, rank=stalled.get("rank"), host=stalled.get("host"), attempt=attempt)
    failed = _RANK_FAILED.match(message)
    if failed is None:
        name, match = next(((n, m) for n, p in _ENDINGS if (m := p.search(message))), ("application_error", None))
        named = _RANK.search(message)
        host = (match and match.groupdict().get("host")) or (named and named["host"]) or None
        rank = int(named["rank"]) if named and name not in ("node_unhealthy", "slurm_cancelled") else None
        return RunFailure(id=name, rank=rank, host=host, attempt=attempt)
    what = re.split(r"\. Log: |; rank \d+ then failed", failed["what"])[0]  # what other ranks met is a consequence
    if "out-of-memory killer has ended a process" in what:
        name = "host_oom"
    elif "different collectives" in what:
        name = "collective_mismatch"
    elif "ended by SIG" in what:
        name = "rank_died"
    else:
        name = class_of_text(what)
        if name == "wrong_interface" and " failed after step " in message:  # it has reached the peers before
            name = "peer_died_first"
    return RunFailure(id=name, rank=int(failed["rank"]), host=failed["host"], attempt=attempt)


def class_of_text(text: str) -> str:
    """Return the class of the exception ``Type: message`` of a program or a library."""
    from allranks.analysis.diagnose.causes import find_candidates
    from allranks.analysis.diagnose.scanner import Scanner

    scan = Scanner().scan(0, iter([(text.encode(), True)]))
    matches, _ = find_candidates(DiagnosisCase(["message"], [scan]))
    return matches[0].id if matches else "application_error"


def read_outcomes(paths: Sequence[Path]) -> list[tuple[str, int, str, RunFailure]]:
    """Return each run folder's recorded failure: its metrics.json, the message's line, the message, the failure."""
    outcomes = []
    for run in started_runs(paths):
        metrics = read_record(run.metrics)
        message, record = str(metrics.get("message") or ""), metrics.get("failure")
        if metrics.get("status") not in ("failed", "stopped") or not message:
            continue
        failure = RunFailure(**record) if isinstance(record, dict) else failure_of(run, message)
        if failure.attempt == max(run.attempts(), default=1):
            lines = read_regular(run.metrics).decode("utf-8", "replace").splitlines()
            line = next((i for i, text in enumerate(lines, 1) if text.lstrip().startswith('"message"')), 1)
            outcomes.append((f"{run.root.name}/metrics.json", line, message, failure))
    return outcomes


def add_outcomes(case: DiagnosisCase, outcomes: Sequence[tuple[str, int, str, RunFailure]]) -> None:
    """Add the recorded ends of runs as evidence to a case, before detectors read it."""
    for name, line, message, failure in outcomes:
        case.names.append(name)
        case.scans.append(FileScan(file=len(case.names) - 1, lines=line))
        signal = LogSignal(
            kind="fact",
            owner="run_outcome",
            weight=1.0,
            file=len(case.names) - 1,
            line=line,
            rank=failure.rank,
            host=failure.host,
            text=message,
            groups={"id": failure.id},
            emitter="allranks",
        )
        case.signals.append(signal)


def apply_outcomes(case: DiagnosisCase, candidates: list[CandidateCause]) -> list[CandidateCause]:
    """Put the recorded end of a run first. What logs show counts beside it only if it says more about the same end."""
    for signal in case.facts("run_outcome"):
        name = signal.groups["id"]
        finer = [c for c in candidates if c.id not in GENERAL and c.score >= 0.75 and c.id not in _CONSEQUENCES]
        lead = next((c for c in candidates if c.id == name), None)
        if lead is None and name in GENERAL and finer:
            lead = finer[0]
        if lead is None:
            lead = CandidateCause(id=name, score=OUTCOME_SCORE)
        lead.signals = [signal, *lead.signals]
        lead.score, lead.against = max(lead.score, OUTCOME_SCORE), []
        if lead.id == name and (name != "application_error" or lead.cause is None):
            lead.cause = signal.text
            lead.title, lead.fix = _title_and_fix(name, signal.text) or (lead.title, lead.fix)
        lead.rank = signal.rank if signal.rank is not None else lead.rank
        lead.host = signal.host or lead.host
        lead.elsewhere = lead.rank is None
        candidates = [lead, *(c for c in finer if c is not lead and name in GENERAL)]
    return candidates
