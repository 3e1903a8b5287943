"""Run the programs of the preflight on hosts with an agent: ask for them over the control channel, and answer.

The agents of a run answer, and so does the agent that a user starts on each host for ``allranks doctor``, which starts
no ranks: ``python -m allranks.launch.host_agent CHANNEL --node N --name HOST``; CHANNEL is the file with the address of
the doctor. Only the programs of `nodes.probes` are run, as they are on this host. No torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import EXIT_ENVIRONMENT, EXIT_OK, AllranksError
from allranks.launch.channel import AgentLink, ChannelClient
from allranks.launch.channel_protocol import ENDED, AgentReport, Endpoint, ProbeAnswer, ProbeRequest
from allranks.nodes.preflight.runner import NodeProgram, TargetNodes
from allranks.nodes.slurm.srun import (
    NodeAnswers,
    OutputLine,
    join_pieces,
    node_clock,
    program_text,
    python_command,
    run_command,
)
from allranks.rundir.files import read_json
from allranks.utils.machine import host_name

POLL_S = 0.05
ANSWER_S = 5.0
"""Time for an answer to arrive, in addition to the time limit of the program."""
PROGRAMS = ("probe.py", "connectivity_probe.py")


class HostNodes(TargetNodes, frozen=True, kw_only=True):
    """Hosts with an agent. ``ask`` sends some of them a program with a time limit and returns the request's number."""

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


class ProbeAnswers:
    """Answers of one agent. A program runs in a thread, so that the agent still notices that it is to stop."""

    def __init__(self, node: int, name: str) -> None:
        """Initialize. `name` is the name of this host on the other hosts."""
        self._node, self._name = node, name
        self._asked = 0
        self._done: list[ProbeAnswer] = []

    def take(self, request: ProbeRequest | None) -> ProbeAnswer | None:
        """Start the program of a new request; return each answer once, when it is there."""
        if request is not None and request.number > self._asked and self._node in request.nodes:
            self._asked = request.number
            threading.Thread(target=self._answer, args=(request,), name="probe", daemon=True).start()
        return self._done.pop() if self._done else None

    def _answer(self, request: ProbeRequest) -> None:
        try:
            self._done.append(answer(request, self._node, self._name))
        except AllranksError as error:
            self._done.append(ProbeAnswer(number=request.number, lines=[], said=f"{self._name}: {error}"))


def answer(request: ProbeRequest, node: int, name: str) -> ProbeAnswer:
    """Run the program and return what it printed. `name` is what the other hosts call this one."""
    if request.program not in PROGRAMS:
        return ProbeAnswer(number=request.number, lines=[], said=f"{name}: no such program: {request.program}")
    text = program_text(request.program, request.request)
    command = [
        "env",
        f"SLURMD_NODENAME={name}",
        f"SLURM_NODEID={node}",
        *python_command(request.python, request.argument),
    ]
    done = run_command(command, request.limit_s, text)
    return ProbeAnswer(number=request.number, lines=[line.text for line in done.lines], said=done.said[-2000:])


REACH_S = 60.0
KEEP_S = 20.0  # without the doctor
DELIVER_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="allranks.launch.host_agent")
    parser.add_argument("channel", type=Path)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    endpoint = read_json(args.channel)
    if endpoint is None:
        sys.exit(
            f"allranks: {args.channel} is missing or unreadable on {host_name()}: the doctor has ended, or its "
            "run_root is not a folder that all hosts share"
        )
    sys.exit(serve(msgspec.convert(endpoint, Endpoint), args.node, args.name))


def serve(endpoint: Endpoint, node: int, name: str) -> int:
    """Answer until the doctor has finished; return the exit code."""
    report = AgentReport(node=node, host=name, machine=host_name(), pid=os.getpid())
    channel = ChannelClient(endpoint, report)
    channel.start()
    say = f"{name}: the doctor at {channel.where}"
    answers, code = ProbeAnswers(node, name), EXIT_OK
    while not channel.orders.end:
        if (answered := answers.take(channel.orders.probe)) is not None:
            report = msgspec.structs.replace(report, answer=answered)
            channel.publish(report)
        if channel.silent_s > (KEEP_S if channel.ever_connected else REACH_S):
            what = "no longer answers" if channel.ever_connected else f"was not reached within {REACH_S:.0f} s"
            sys.stderr.write(f"allranks: {say} {what}: {channel.why}\n")
            code = EXIT_ENVIRONMENT
            break
        time.sleep(POLL_S)
    if code == EXIT_OK:
        channel.publish(msgspec.structs.replace(report, state=ENDED))
        channel.wait_delivered(DELIVER_S)
        sys.stderr.write(f"{say} has what it asked for\n")
    channel.close()
    return code


if __name__ == "__main__":
    main()
