"""Echoes that name the process they echo: whose log to read next."""

from __future__ import annotations

import re

from allranks.diagnose.judge.case import Case

_NAMED = (
    re.compile(r"retrieving ncclUniqueId from \[(?P<rank>\d+)\]"),
    re.compile(r"(?:timeout|signal|failure|error)[^.]{0,40} (?:from|on|of|by) (?:global )?rank (?P<rank>\d+)"),
    re.compile(r"reported a timeout signal the global rank (?P<rank>\d+)"),
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
