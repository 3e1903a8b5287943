"""The checks over all nodes' answers: pure, one function each, in the order of the line."""

from __future__ import annotations

from allranks.preflight.checks import folders, hardware, network, software
from allranks.preflight.checks.survey import Judge, Need, Survey
from allranks.preflight.records import Check, PreflightReport

CHECKS: tuple[Judge, ...] = (
    software.proj,
    software.pkgs,
    software.py,
    software.torch,
    software.imports,
    software.data,
    software.model,
    folders.run,
    folders.cache,
    network.net,
    network.ifname,
    network.reach,
    network.name,
    network.port,
    network.clock,
    hardware.shm,
    hardware.memlock,
    hardware.files,
    hardware.threads,
    hardware.gpus,
    hardware.memory,
    hardware.p2p,
    hardware.ib,
)


def judge(survey: Survey) -> list[PreflightReport]:
    """One report a node, in the order of the nodes."""
    verdicts = [check(survey) for check in CHECKS]
    return [
        PreflightReport(host=probe.host, checks=[found[probe.host] for found in verdicts if probe.host in found])
        for probe in sorted(survey.probes, key=lambda probe: probe.node_id)
    ]


__all__ = ["CHECKS", "Check", "Judge", "Need", "PreflightReport", "Survey", "judge"]
