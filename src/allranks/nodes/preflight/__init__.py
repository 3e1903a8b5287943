"""Check this machine and every node of a run for problems before anything is started.

probe.py, connectivity_probe.py   run on the nodes, standard library only; one JSON line each
links_probe.py                    runs on the nodes with torch: copies and all-reduces between all pairs
request.py           checks on the launcher's machine: model, rows, a name that the hub does not know, missing paths
requirements.py      derives from a spec what every node must have
link_bandwidth.py    runs the copy and pair tests, keeps their results, and judges the bandwidth
runner.py            the complete preflight: probe, choose the network, test connections, check, write
"""

from __future__ import annotations

from allranks.nodes.preflight.request import check_request, check_rows
from allranks.nodes.preflight.requirements import stamp

__all__ = ["check_request", "check_rows", "stamp"]
