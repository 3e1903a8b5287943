"""The verdict as one paragraph, and what else stands out on the nodes. Pure."""

from __future__ import annotations

from allranks.hang.case import UNKNOWN, Case, Verdict, listed
from allranks.hang.records import Alarm, Fallen, Waiting


def sentence(verdict: Verdict, waiting: list[Waiting], alarm: Alarm, now: float) -> str:
    """One paragraph for a person."""
    silent = f"no progress for {now - alarm.since:.0f} s (limit {alarm.limit_s:g} s, {_alarm_place(alarm)})"
    if not verdict.fallen:
        first = waiting[0].where if waiting else "nowhere"
        if verdict.cause == "alone":
            return f"hang: {silent}; the only rank stands in {first}"
        if verdict.cause == "outside":
            return f"hang: {silent}; all ranks stand in {first}, and none is in a collective: look at what they wait for there"
        return (
            f"hang: {silent}; all ranks wait in the same place ({first}) and none fell out: look at the network and the GPUs rather than "
            "at the program"
        )
    who = verdict.fallen[0]
    ranks = listed([f.rank for f in verdict.fallen if f.rank is not None])
    hosts = ", ".join(dict.fromkeys(f.host for f in verdict.fallen if f.host))
    one = len(verdict.fallen) == 1
    it = "It" if one else f"Rank {who.rank}"
    text = f"hang: rank{'' if one else 's'} {ranks} on {hosts} fell out, {who.why if one else f'rank {who.rank}: {who.why}'}. {_stands(it, who)}"
    for other in verdict.fallen[1:3]:
        if other.where not in (who.where, UNKNOWN):
            text += f"; rank {other.rank} in {other.where}"
    if waiting:
        first = waiting[0]
        count = f"{len(waiting)} other rank{'s wait' if len(waiting) > 1 else ' waits'}"
        text += f". {count}{' for it' if len(verdict.fallen) == 1 else ''}, rank {first.rank} in {first.where or first.call or 'an unknown place'}"
    return f"{text}; {silent}"


def _stands(it: str, who: Fallen) -> str:
    if who.where == UNKNOWN:
        return f"{it} did not show where it stands"
    state = f", {who.state}" if who.state and not who.why.endswith(who.state) else ""
    return f"{it} stands in {who.where}{state}"


def _alarm_place(alarm: Alarm) -> str:
    part = f", {alarm.part}" if alarm.part else ""
    return f"{alarm.phase}{part}" + (f", step {alarm.step + 1}" if alarm.step is not None else "")


def notes(case: Case) -> list[str]:
    """What else stands out on the nodes."""
    notes = []
    for node in case.nodes:
        if node.memory_available_bytes is not None and node.memory_total_bytes:
            share = node.memory_available_bytes / node.memory_total_bytes
            if share < 0.03:
                notes.append(f"{node.host}: only {share:.1%} of its memory is available")
        if node.load1 and node.cpus and node.load1 > 2 * node.cpus:
            notes.append(f"{node.host}: load {node.load1:.0f} on {node.cpus} cores")
        if node.blocked:
            notes.append(f"{node.host}: processes in uninterruptible sleep: {'; '.join(node.blocked[:4])}")
    return notes
