"""Detect which process failed first, from exit codes and errors about a lost peer, and when the loss was not finite."""

from __future__ import annotations

import re

from msgspec import Struct

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.diagnose.records import CandidateCause, DiagnosisCase, LogSignal, sort_by_time

_NUMBER = re.compile(r"\d+")
LEFT_EARLY = (
    "a rank left early with exit code 0",
    "Find out why this rank does less work than the others: fewer batches, a condition on the rank, an early return. "
    "All ranks must take part in the same collectives.",
)


def detect_silent_exits(case: DiagnosisCase) -> None:
    """Detect a rank that ended with an exit code but no message, while the others only report that it is gone."""
    if case.candidates.keys() - {"peer_died_first"}:
        return
    spoke = {s.rank for s in case.signals if s.kind == "class" or s.owner in ("exception", "event_error")}
    ends = sort_by_time(case.facts("rank_end"))
    case.quiet_ends = [s for s in ends if s.rank not in spoke and int(s.groups["code"]) > 0]
    if not case.quiet_ends:
        _early_ends(case, ends, spoke)
    if case.quiet_ends:
        first = case.quiet_ends[0]
        candidate = case.propose("application_error", 0.72, case.quiet_ends)
        candidate.rank, candidate.host = first.rank, first.host
        manner = "and wrote no error: sys.exit, os._exit, or a library that gave up"
        if first.groups["said"]:
            manner = f"by sys.exit with the text {first.groups['said'][:200]!r}"
        candidate.cause = (
            f"Rank {first.rank} ended with exit code {first.groups['code']} {manner}. "
            "The errors of the other ranks only report that it is gone."
        )
        candidate.title = "the program exited" + ("" if first.groups["said"] else " without an error message")
        candidate.fix = (
            f"Find the call that exits with {first.groups['code']} on rank {first.rank} only; raise an exception with "
            "the reason there."
        )
        candidate.next_test = f"read the end of the log of rank {first.rank}, written just before the exit"


def _early_ends(case: DiagnosisCase, ends: list[LogSignal], spoke: set[int | None]) -> None:
    """Detect a rank that ended with exit code 0 while others still communicated with it."""
    victims = [s.time for s in ends if s.rank in spoke and s.time is not None]
    left = [*case.facts("rank_early")] if "peer_died_first" in case.candidates else []
    if victims:  # one that had succeeded, and after whose end others failed
        left += [s for s in case.facts("rank_done") if s.time is not None and s.time <= min(victims)]
    left = [s for s in left if s.rank not in spoke]
    if not left:
        return
    first = sort_by_time(left)[0]
    candidate = case.propose("application_error", 0.72, [first])
    candidate.rank, candidate.host = first.rank, first.host
    candidate.title, candidate.fix = LEFT_EARLY
    candidate.cause = (
        f"Rank {first.rank} ended with exit code 0 (the end of the program, sys.exit(0), or os._exit(0)) while other "
        "ranks still communicated with it. Their errors only report that it is gone."
    )
    candidate.next_test = "print the number of steps or batches of each rank before the loop"


class FirstExit(Struct, frozen=True):
    """Host and rank that ended first, as reported by torchrun's agent or srun."""

    host: str | None
    rank: int | None


def first_exit(case: DiagnosisCase) -> FirstExit:
    """Return the agent's root cause; else the first task that srun reports failed (with rank if each task is one)."""
    noted = sort_by_time(case.facts("rank_end"))
    if noted:
        return FirstExit(noted[0].host, noted[0].rank)
    for root in sort_by_time(case.facts("agent_root")):
        fields = {
            s.groups["field"].lower(): s.groups["value"]
            for s in reversed(case.facts("agent_field"))
            if s.file == root.file and root.line < s.line <= root.line + 9
        }
        if fields:
            rank = _NUMBER.match(fields.get("rank", ""))
            return FirstExit(fields.get("host"), int(rank.group()) if rank else None)
    ended = [s for s in sort_by_time(case.facts("srun_exit")) if "terminated" not in s.groups["how"].lower()]
    if not ended:
        return FirstExit(None, None)
    task = _NUMBER.search(ended[0].groups["tasks"])
    return FirstExit(ended[0].groups["host"], int(task.group()) if task and case.tasks_are_ranks else None)


_NAMED = (
    re.compile(r"retrieving ncclUniqueId from \[(?P<rank>\d+)\]"),
    re.compile(r"(?:timeout|signal|failure|error)[^.]{0,40} (?:from|on|of|by) +(?:global )?rank (?P<rank>\d+)"),
    re.compile(r"possible application crash on rank (?P<rank>\d+)"),
    re.compile(r"reported a timeout signal the global rank (?P<rank>\d+)"),
)
_PEER_ADDRESS = re.compile(
    r"(?:peer|error|from) \[?(?P<address>\d{1,3}(?:\.\d{1,3}){3}|[\da-f]*:[\da-f:]+)(?:\]:\d+|<\d+>)", re.IGNORECASE
)
_PEER_HOST = re.compile(r"[Cc]onnection closed by remote peer (?P<host>[A-Za-z][\w.-]*)")


def detect_lost_peers(case: DiagnosisCase) -> None:
    """Set the rank and host of the lost peer from the messages about it."""
    echo = case.candidates.get("peer_died_first")
    if echo is None:
        return
    for signal in echo.signals:
        match = next((m for p in _NAMED if (m := p.search(signal.text))), None)
        if match and int(match["rank"]) != signal.rank:
            echo.rank = int(match["rank"])
            echo.cause = (
                f"These lines only report that rank {echo.rank} disconnected or did not answer. The reason is in that "
                "rank's own log, which is missing here or contains no error."
            )
            return
    hosts = [m["host"] for s in echo.signals if (m := _PEER_HOST.search(s.text))]
    if hosts:
        echo.host = hosts[0].split("<")[0]
        return
    _by_address(case, echo)
    _by_silence(case, echo)


def _by_address(case: DiagnosisCase, echo: CandidateCause) -> None:
    """Set the peer's host from its address, if all messages name the same address."""
    named = {m["address"] for s in echo.signals if (m := _PEER_ADDRESS.search(s.text))}
    if len(named) != 1 or (address := named.pop()).startswith("127."):
        return
    owners = {s.groups["address"]: s.groups["host"] for s in case.facts("address")}
    owners |= {s.groups["address"]: s.host for s in case.facts("bootstrap") if s.host}
    echo.host = owners.get(address, address)
    echo.cause = (
        f"These lines only report that the processes on {echo.host} disconnected. The reason is in the logs of that "
        "host, or the host is down."
    )


def _by_silence(case: DiagnosisCase, echo: CandidateCause) -> None:
    """Set the one rank whose log ends without an error while all others report a lost peer."""
    speaking = {
        s.rank
        for s in case.signals
        if (s.rank is not None and s.kind == "class") or s.owner in ("exception", "rank_end")
    }
    ranks = {rank for scan in case.scans if (rank := case.file_rank(scan.file)) is not None}
    silent = sorted(ranks - speaking)
    if len(silent) == 1 and len(ranks) > 1:
        echo.rank = silent[0]
        own = case.rank_hosts.get(echo.rank)
        if echo.host == own or echo.host not in case.rank_hosts.values():
            echo.host = own
            echo.cause = (
                f"These lines only report that a peer disconnected. The log of rank {echo.rank} ends without an error: "
                f"it was killed, or its host {own or ''} went down."
            )


# What a message of `library_missing` may show: its pattern; then title, cause, fix and next test.
_KINDS_OF_LIBRARY = tuple(
    (re.compile(pattern), texts)
    for pattern, *texts in (
        (
            r"version [`'\"]?(?P<need>GLIBC_[\d.]+|(?P<cpp>GLIBCXX|CXXABI)_[\d.]+)['\"]? not found",
            "the system's {library} is too old for a package",
            "A package was built for {need}, which the {library} of this node does not have: the node's system is "
            "older than the one it was built on.",
            "Run in a container or on nodes with a newer system, or install a build for the older one (an older wheel, "
            "conda-forge, or compile it on that node); installing another package does not help.",
            "ldd --version, and strings $(gcc -print-file-name=libstdc++.so.6) | grep GLIBCXX, on that node and "
            "where it was built",
        ),
        (
            r"(?P<need>[\w+-]+)[\w.+-]*\.so[.\d]*: undefined symbol: \S",
            "a package was built for another version of a library",
            "{need} needs a symbol that no loaded library has: it was compiled against another version, most often of "
            "torch, than the one that is installed.",
            "Install the build of that package for this version of torch, Python and CUDA, or compile it again here "
            "(pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps <package>).",
            "python -c 'import torch; print(torch.__version__, torch.version.cuda)' on that node",
        ),
        (
            r"fatal error: (?P<need>\S+\.(?:h|hpp|cuh)): No such file",
            "a header that a compiler needs is missing",
            "{need} is not on this node: no extension or kernel of Triton can be compiled there.",
            "Install the headers (Python.h: python3-dev, or a Python of conda or uv; cuda*.h: the CUDA toolkit of "
            "torch.version.cuda, with CUDA_HOME), or do without what is compiled (torch.compile, fused kernels).",
            "find / -name {need} on that node, and where it works",
        ),
    )
)


def detect_kind_of_library(case: DiagnosisCase) -> None:
    """Tell a system that is too old, an interface that differs and headers from a package that is missing."""
    candidate = case.candidates.get("library_missing")
    for pattern, texts in _KINDS_OF_LIBRARY if candidate is not None else ():
        if candidate and (match := next((m for s in candidate.signals if (m := pattern.search(s.text))), None)):
            library = "C++ library (libstdc++)" if match.groupdict().get("cpp") else "C library (glibc)"
            candidate.title, candidate.cause, candidate.fix, candidate.next_test = (
                text.replace("{need}", match["need"]).replace("{library}", library) for text in texts
            )
            return


_NODE_FAILED = re.compile(r"node.?fail", re.IGNORECASE)


def detect_failed_node(case: DiagnosisCase) -> None:
    """Set the host of a failed node that no message names: the one that the other ranks lost, else none.

    Slurm reports the failure on the node of the batch script, and the ranks that end first are survivors.
    """
    candidate = case.candidates.get("node_unhealthy")
    if candidate is None or any(s.groups.get("host") or not _NODE_FAILED.search(s.text) for s in candidate.signals):
        return
    peer = case.candidates.get("peer_died_first")
    candidate.elsewhere = True
    candidate.host = peer.host if peer and peer.host in case.rank_hosts.values() else None


def detect_non_finite_loss(case: DiagnosisCase) -> None:
    """Say when the loss was first not finite. No rank is named: gradients are averaged before a loss is printed."""
    candidate = case.candidates.get("loss_not_finite")
    if candidate is None:
        return
    candidate.elsewhere = True
    said = [s for s in candidate.signals if not s.text.startswith('{"event"')] or candidate.signals
    first = min(said, key=lambda s: (s.file, s.line))
    candidate.cause = f"{CATALOGUE['loss_not_finite'].cause} The first line that says so: {first.text[:160].strip()}"
