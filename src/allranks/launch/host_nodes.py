"""Hosts whose agents people started by hand, as nodes that the preflight can query over the control channel."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allranks.launch.channel.protocol import ProbeRequest
from allranks.launch.channel.server import AgentLink
from allranks.nodes.preflight.runner import NodeProgram, TargetNodes
from allranks.nodes.srun import NodeAnswers, OutputLine, join_pieces, node_clock

POLL_S = 0.05
ANSWER_S = 5.0
"""Time for an answer to arrive, in addition to the time limit of the program."""


class HostNodes(TargetNodes, frozen=True, kw_only=True):
    """Hosts with an agent. ``ask`` sends some of them a program with a time limit, and returns the number of the request."""

    channel: Any
    ask: Callable[[Sequence[int], NodeProgram, float], int]
    node_of: dict[str, int]
    programs_only: bool = True

    def run_program(self, program: NodeProgram, timeout_s: float, only: Sequence[str] = ()) -> NodeAnswers:
        """Run one of the programs of the preflight on all hosts, or on some; those without an agent do not answer."""
        links = self.channel.links
        nodes = [self.node_of[host] for host in (only or self.hosts) if self.node_of[host] in links]
        began, lines, said = time.monotonic(), [], []
        number = self.ask(nodes, program, timeout_s)
        waiting = set(nodes)
        while waiting and time.monotonic() - began < timeout_s + ANSWER_S:
            for node in sorted(waiting):
                link = self.channel.links[node]
                if link.report.answer is not None and link.report.answer.number == number:
                    lines += join_pieces([OutputLine(text=t, received=node_clock()) for t in link.report.answer.lines])
                    said.append(link.report.answer.said)
                elif not link.closed or time.monotonic() - link.closed_at < ANSWER_S:
                    continue
                waiting.discard(node)
            time.sleep(POLL_S)
        return NodeAnswers(lines=lines, returncode=0, said="\n".join(said), seconds=time.monotonic() - began)

    def silence_cure(self, host: str, answers: NodeAnswers, why: str) -> str:
        """Return what to do about a host without an answer."""
        return f"{host} did not answer within {answers.seconds:.0f} s ({why})"


def next_probe(before: ProbeRequest | None, nodes: Sequence[int], program: NodeProgram, limit_s: float) -> ProbeRequest:
    """Return the request to run a program on some nodes, numbered after the last request."""
    return ProbeRequest(
        number=before.number + 1 if before else 1,
        nodes=list(nodes),
        limit_s=limit_s,
        program=program.name,
        python=program.python,
        argument=program.argument,
        request=program.request,
    )


def one_per_machine(links: Mapping[int, AgentLink], labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the hosts to examine, one for each machine, and notes on hosts that are the same machine.

    Two agents of one machine would hold each other's ports.
    """
    first: dict[tuple[str, str], str] = {}
    hosts, notes = [], []
    for node, label in enumerate(labels):
        link = links.get(node)
        same = first.setdefault((link.address, link.report.machine), label) if link else label
        if same == label:
            hosts.append(label)
        else:
            notes.append(f"{label} is the same machine as {same}, and was examined once")
    return hosts, notes
