"""The registry of node checks, in the order of the printed line. A check is one function in a file of this package, and one line here.

A check that needs more facts than the others is a `NodeCheck`: it also says what to ask of every node (`program.py` is an example).
"""

from __future__ import annotations

from allranks.nodes.checks import Judge, NodeCheck, hardware, network, program, software

CHECKS: tuple[Judge | NodeCheck, ...] = (
    software.proj,
    software.workdir,
    software.pkgs,
    software.py,
    software.torch,
    software.imports,
    program.PROGRAM,
    software.EXTENSIONS,
    software.data,
    software.model,
    software.HUB_NAMES,
    software.run,
    software.cache,
    network.net,
    network.ifname,
    network.reach,
    network.name,
    network.port,
    network.clock,
    hardware.shm,
    hardware.TMP,
    hardware.memlock,
    hardware.files,
    hardware.threads,
    hardware.gpus,
    hardware.memory,
    hardware.p2p,
    hardware.ib,
)
