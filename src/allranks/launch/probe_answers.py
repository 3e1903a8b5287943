"""Run the programs of the preflight on a host with an agent, as the driver or the doctor asks over the control channel. No torch."""

from __future__ import annotations

import threading

from allranks.errors import AllranksError
from allranks.launch.channel.protocol import ProbeAnswer, ProbeRequest
from allranks.nodes.srun import program_text, python_command, run_command

PROGRAMS = ("probe.py", "connectivity_probe.py")


class ProbeAnswers:
    """Answers of one agent. A program runs in a thread, so that the agent still notices that it is to stop."""

    def __init__(self, node: int, name: str) -> None:
        """`name` is what the other hosts call this one."""
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
