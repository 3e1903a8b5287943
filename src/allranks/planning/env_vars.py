"""Record the environment variables of the ranks; warn about variables without effect.

A variable that no library reads raises no error: the run continues as if it were not set. Therefore `env_warnings` and
`allranks lint` compare names with tables of known, renamed and unread variables. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from allranks.utils.text import nearest_name, suggest

NCCL_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
NCCL_TROUBLESHOOTING_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
MULTI_RANK_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Lets NCCL put several ranks on one GPU or its MIG instances. Source: https://github.com/NVIDIA/nccl/issues/1716"""
TORCH_DISTRIBUTED_DOCS = "https://docs.pytorch.org/docs/stable/distributed.html"


class EnvVar(msgspec.Struct, frozen=True):
    """One decided variable. ``value`` None means: considered, and deliberately not set.

    `source` says who decided (policy, spec, user; nodes: each node will decide at run time), `documentation` is a link,
    `risk` says what can go wrong.
    """

    name: str
    value: str | None
    reason: str
    source: str = "policy"
    documentation: str = ""
    risk: str = ""

    def advice(self) -> dict[str, str | None]:
        """Return the form that ``--json`` prints."""
        return {
            "variable": self.name,
            "value": self.value,
            "reason": self.reason,
            "source": self.documentation or self.source,
            "risk": self.risk,
        }


def nccl_var(name: str, value: str | None, reason: str, risk: str) -> EnvVar:
    """Return a NCCL variable with the link to its documentation."""
    link = f"{NCCL_DOCS}#{name.lower().replace('_', '-')}"
    return EnvVar(name, value, reason, documentation=link, risk=risk)


def env_warnings(env: Mapping[str, str], where: str = "cluster.env.") -> list[str]:
    """Return one sentence per variable or harmful value: what is wrong with it, and what works instead."""
    warnings = []
    for name in env:
        mistake = UNREAD_VARIABLES.get(name)
        if mistake:
            warnings.append(f"{where}{name}: {mistake.why}; instead: {mistake.instead}")
        elif name.startswith("NCCL_") and not is_known_variable(name) and (near := nearest_variable(name)):
            warnings.append(f"{where}{name}: NCCL is not known to read this name{suggest(near)}")
    gloo = env.get("GLOO_SOCKET_IFNAME", "")
    if gloo.startswith(("^", "=")):
        warnings.append(
            f"{where}GLOO_SOCKET_IFNAME is {gloo!r}, but Gloo only accepts exact names ('^' and '=' are NCCL's "
            "syntax): remove the line; allranks then determines the interface on each node"
        )
    if env.get("NCCL_P2P_DISABLE") == "1":
        warnings.append(
            f"{where}NCCL_P2P_DISABLE=1 is slow on nodes with NVLink; "
            "`allranks doctor SPEC --collectives` tests whether peer-to-peer works"
        )
    if env.get("NCCL_IB_GID_INDEX", "-1") not in ("-1", ""):
        warnings.append(f"{where}NCCL_IB_GID_INDEX: the right index differs between nodes; NCCL chooses it since 2.21")
    return warnings


class UnreadVariable(msgspec.Struct, frozen=True):
    """Why a variable does not do what its name suggests, and what works instead."""

    why: str
    instead: str


def _unread(rows: list[tuple[str, str, str]]) -> dict[str, UnreadVariable]:
    return {name: UnreadVariable(why, instead) for names, why, instead in rows for name in names.split()}


_TABLES = json.loads((Path(__file__).parent / "env_variables.json").read_text())
UNREAD_VARIABLES = _unread(_TABLES["unread"])
"""Variables that no release of the library reads."""
DEPRECATED_VARIABLES = _unread(_TABLES["deprecated"])
"""Names that worked in the past, or that still work with a warning."""
NCCL_NAMES = frozenset(" ".join(_TABLES["nccl"]).split())
"""Variables, without NCCL_, that libnccl 2.21.5 or 2.32.3 contains as strings."""
PLUGINS = tuple(f"NCCL_{name}" for name in " ".join(_TABLES["nccl_plugins"]).split())
"""How the variables of NCCL's plugins begin (AWS OFI, Google's FasTrak and TCPX, UCX, MSCCL, RCCL)."""
OTHER_NAMES = frozenset(" ".join(_TABLES["torch_and_gloo"]).split())
"""Variables of torch 2.13 and Gloo."""


def is_known_variable(name: str) -> bool:
    """Return whether a library or NCCL plugin reads an ``NCCL_``, ``TORCH_NCCL_``, ``TORCH_FR_`` or ``GLOO_`` name."""
    return name.removeprefix("NCCL_") in NCCL_NAMES or name.startswith(PLUGINS) or name in OTHER_NAMES


def nearest_variable(name: str) -> str | None:
    """Return the most similar known variable, or None if no name is close."""
    names = [f"NCCL_{n}" for n in NCCL_NAMES] if name.startswith("NCCL_") else list(OTHER_NAMES)
    return nearest_name(name, sorted(names), 0.87)
