"""What can be known to fail before anything is started: on this machine, and on every node that a run would use.

probe.py, reach.py   run on the nodes, standard library only; one JSON line each
records.py           what they say, and the verdicts
wish.py              spec -> what is asked of the nodes
nodes.py             starts a program on every node with one srun, or here
checks/              one function a check, over all nodes' answers (pure)
network.py, port.py  the network and the port of the rendezvous (pure)
gather.py            the whole way: ask, choose, reach, judge, write
pairs.py             runs on the nodes: copies and all-reduces between all pairs (the only one with torch)
"""

from __future__ import annotations

from allranks.preflight.local import local_report, stamp
from allranks.preflight.records import Check, PreflightReport, require
from allranks.preflight.request import check_request

__all__ = ["Check", "PreflightReport", "check_request", "local_report", "require", "stamp"]
