"""Echoes that name the process they echo: whose log to read next."""

from __future__ import annotations

import re

from allranks.diagnose.judge.case import Candidate, Case

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


def decide(case: Case) -> None:
    """Gives an echo the rank and host that its own lines name."""
    echo = case.candidates.get("peer_died_first")
    if echo is None:
        return
    for signal in echo.signals:
        match = next((m for p in _NAMED if (m := p.search(signal.text))), None)
        if match and int(match["rank"]) != signal.rank:
            echo.rank = int(match["rank"])
            echo.cause = (
                f"These lines only report that rank {echo.rank} went away or did not answer. The reason stands in that rank's own log, "
                "which is not among these or says nothing."
            )
            return
    hosts = [m["host"] for s in echo.signals if (m := _PEER_HOST.search(s.text))]
    if hosts:
        echo.host = hosts[0].split("<")[0]
        return
    _by_address(case, echo)
    _by_silence(case, echo)


def _by_address(case: Case, echo: Candidate) -> None:
    """The peer's address, where all that name one name the same; its host, where the logs tell whose it is."""
    named = {m["address"] for s in echo.signals if (m := _PEER_ADDRESS.search(s.text))}
    if len(named) != 1 or (address := named.pop()).startswith("127."):
        return
    owners = {s.groups["address"]: s.groups["host"] for s in case.facts("address")}
    owners |= {s.groups["address"]: s.host for s in case.facts("bootstrap") if s.host}
    echo.host = owners.get(address, address)
    echo.cause = f"These lines only report that the processes on {echo.host} went away. The reason stands in the logs of that host, or it is down."


def _by_silence(case: Case, echo: Candidate) -> None:
    """The one rank whose log ends without a word while all others report that they lost a peer."""
    told = {
        s.rank
        for s in case.signals
        if (s.rank is not None and s.kind == "class") or s.owner in ("exception", "rank_end")
    }
    ranks = {rank for scan in case.scans if (rank := case.file_rank(scan.file)) is not None}
    silent = sorted(ranks - told)
    if len(silent) == 1 and len(ranks) > 1:
        echo.rank = silent[0]
        own = case.rank_hosts.get(echo.rank)
        if echo.host == own or echo.host not in case.rank_hosts.values():
            echo.host = own
            echo.cause = (
                f"These lines only report that a peer went away. The log of rank {echo.rank} ends without a word: it was killed, or its host "
                f"{own or ''} went down."
            )
