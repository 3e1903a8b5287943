"""The registry of node checks, in the order of the printed line. A check is one function in a file of this package, and
one line here.

A check that needs more facts than the others also has a function in `ASKS`, which adds to the request to every node.
"""

from __future__ import annotations

from allranks.nodes.checks import Ask, Judge, hardware, network, program, software

CHECKS: tuple[Judge, ...] = (
    software.proj,
    software.workdir,
    software.pkgs,
    software.py,
    software.torch,
    software.imports,
    program.program,
    software.extensions,
    software.data,
    software.model,
    software.hub,
    software.run,
    software.cache,
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
ASKS: tuple[Ask, ...] = (program.ask, software.ask_extensions, software.ask_hub_names)
