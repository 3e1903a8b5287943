"""Check this machine and every node of a run for problems before anything is started.

probe.py, connectivity_probe.py   run on the nodes, standard library only; one JSON line each
copies_probe.py, pairs_probe.py   run on the nodes with torch: copies and all-reduces between all pairs
records.py           answers of the probes, and verdicts
requirements.py      derives from a spec what every node must have
link_tests.py        runs the copy and pair tests and keeps their results
runner.py            the complete preflight: probe, choose the network, test connections, check, write
"""

from __future__ import annotations

from allranks.nodes.preflight.requirements import check_request, local_report, stamp
from allranks.nodes.records import Check, PreflightReport, require

__all__ = ["Check", "PreflightReport", "check_request", "local_report", "require", "stamp"]
