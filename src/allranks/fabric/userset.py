"""What a user sets in ``cluster.env`` that does nothing, or not what is meant. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def user_warnings(env: Mapping[str, str], where: str = "cluster.env.") -> list[str]:
    """One sentence a variable: what is wrong with it, and what does work."""
    found = [f"{where}{name} does nothing: {NO_EFFECT[name]}" for name in env if name in NO_EFFECT]
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


NO_EFFECT: dict[str, str] = {
    "NCCL_TIMEOUT": "NCCL has no such variable; the time limit of collectives is cluster.timeout_s",
    "NCCL_NET_DISABLE": "NCCL has no such variable; NCCL_NET=Socket or NCCL_IB_DISABLE=1 keep it off RDMA",
    "PYTORCH_DIST_BACKEND": "PyTorch has no such variable; the backend is cluster.backend",
    "GLOO_USE_IPV6": "Gloo has no such variable; the interface decides (cluster.rendezvous.interface)",
}
