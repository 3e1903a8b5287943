"""The driver's side of a hang, without sockets: a real supervisor and a real judge in the process of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from allranks.launch.channel import AgentLink
from allranks.launch.channel_protocol import RUNNING, AgentReport, Orders
from allranks.launch.monitor.hang_rules import HangAnalyzer
from allranks.launch.monitor.records import HangAlarm, NodeEvidence
from allranks.launch.supervisor import Supervisor
from allranks.rundir.paths import RunDir


class InProcessDriver:
    """Supervises the watches of some nodes."""

    def __init__(self, run: RunDir, hosts: dict[int, str], nodes: int) -> None:
        self.judge = HangAnalyzer(run, 1, hosts, nodes)
        self.supervisor = Supervisor(nodes, self.judge)
        self.alarms: dict[int, HangAlarm] = {}
        self.sent: list[NodeEvidence] = []
        self._nodes = nodes
        self._lock = threading.Lock()

    @property
    def orders(self) -> Orders:
        """What the supervisor decides from the reports of all nodes."""
        now = time.monotonic()
        with self._lock:
            links = {
                n: AgentLink(
                    report=AgentReport(
                        node=n, host=f"n{n}", pid=1, state=RUNNING, store=("h", 1), alarm=self.alarms.get(n)
                    ),
                    heard_at=now,
                )
                for n in range(self._nodes)
            }
            return self.supervisor.tick(links, now)

    def send_evidence(self, found: NodeEvidence) -> None:
        """As the control channel delivers it."""
        with self._lock:
            self.sent.append(found)
            self.supervisor.evidence(found)

    def raise_alarm(self, node: int) -> Callable[[HangAlarm], None]:
        """What the watch of a node calls."""
        return lambda alarm: self.alarms.__setitem__(node, alarm)


class DeafChannel:
    """A driver that receives everything and never answers."""

    def __init__(self) -> None:
        self.orders = Orders()
        self.sent: list[NodeEvidence] = []

    def send_evidence(self, found: NodeEvidence) -> None:
        """Keep it."""
        self.sent.append(found)
