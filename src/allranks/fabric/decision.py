"""One variable of the ranks' environment, decided. A leaf: everything may import it."""

from __future__ import annotations

import msgspec

NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
NCCL_TROUBLE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
TORCH = "https://docs.pytorch.org/docs/stable/distributed.html"


class EnvVar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One decision. ``value`` None means: looked at, and left alone on purpose.

    `source` says who decided (policy, spec, user; nodes: each node will, when it is asked), `documentation` where the variable is described, `risk` what can go
    wrong with the decision.
    """

    name: str
    value: str | None
    reason: str
    source: str = "policy"
    documentation: str = ""
    risk: str = ""

    def advice(self) -> dict[str, str | None]:
        """The form that ``--json`` prints."""
        return {
            "variable": self.name,
            "value": self.value,
            "reason": self.reason,
            "source": self.documentation or self.source,
            "risk": self.risk,
        }


def nccl(name: str, value: str | None, reason: str, risk: str) -> EnvVar:
    """A variable of NCCL, with the place in its manual."""
    return EnvVar(
        name=name, value=value, reason=reason, documentation=f"{NCCL}#{name.lower().replace('_', '-')}", risk=risk
    )
