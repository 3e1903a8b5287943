"""What a user sets in ``cluster.env`` that does nothing, or not what is meant. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from allranks.envnames import MISTAKES, is_known, nearest


def user_warnings(env: Mapping[str, str], where: str = "cluster.env.") -> list[str]:
    """One sentence a variable: what is wrong with it, and what does work."""
    found = []
    for name in env:
        mistake = MISTAKES.get(name)
        if mistake:
            found.append(f"{where}{name}: {mistake.why}; instead: {mistake.instead}")
        elif name.startswith("NCCL_") and not is_known(name) and (near := nearest(name)):
            found.append(f"{where}{name}: NCCL is not known to read this name; did you mean {near}?")
    return [*found, *_values(env, where)]


def _values(env: Mapping[str, str], where: str) -> list[str]:
    """Names that are right, with values that do harm."""
    found = []
    gloo = env.get("GLOO_SOCKET_IFNAME", "")
    if gloo.startswith(("^", "=")):
        found.append(
            f"{where}GLOO_SOCKET_IFNAME is {gloo!r}, but Gloo takes exact names only ('^' and '=' are NCCL's): "
            "take the line out, then each node's own interface is found"
        )
    if env.get("NCCL_P2P_DISABLE") == "1":
        found.append(
            f"{where}NCCL_P2P_DISABLE=1 costs much where there is NVLink; "
            "`allranks doctor SPEC --collectives` says whether peer-to-peer works"
        )
    if env.get("NCCL_IB_GID_INDEX", "-1") not in ("-1", ""):
        found.append(f"{where}NCCL_IB_GID_INDEX: the right index differs from node to node; NCCL chooses it since 2.21")
    return found
