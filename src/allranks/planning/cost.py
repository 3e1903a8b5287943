"""What a run costs, by ``cluster.price_per_gpu_hour``. A rank has a GPU; on CPUs, a rank counts as one. Pure."""

from __future__ import annotations

from typing import Any

from allranks.planning.records import LaunchPlan
from allranks.planning.slurm_request import parse_time_limit
from allranks.spec.records import RunSpec


def run_cost(spec: RunSpec, plan: LaunchPlan, seconds: float | None) -> dict[str, Any] | None:
    """Return the costs of this many seconds, spare nodes included; None without a price or a time."""
    price = spec.cluster.price_per_gpu_hour
    if price is None or seconds is None:
        return None
    hours = plan.procs_per_node * (len(plan.nodes) + spec.cluster.spares) * seconds / 3600
    return {
        "amount": round(price * hours, 6),
        "currency": spec.cluster.currency,
        "gpu_hours": round(hours, 6),
        "price_per_gpu_hour": price,
    }


def cost_text(cost: dict[str, Any]) -> str:
    """Return costs as ``12.35 USD``; amounts below one have three significant digits."""
    amount = float(cost["amount"])
    return f"{amount:,.2f} {cost['currency']}" if amount >= 1 else f"{amount:.3g} {cost['currency']}"


def cost_row(cost: Any) -> str:
    """Return the costs in metrics.json for a summary; empty without them, or if they are damaged."""
    try:
        return f"{cost_text(cost)}, {float(cost['gpu_hours']):.3g} GPU-hours at {float(cost['price_per_gpu_hour']):g}"
    except (KeyError, TypeError, ValueError):
        return ""


def cost_line(spec: RunSpec, plan: LaunchPlan) -> str | None:
    """Return a line of the plan: what an hour costs, and the time limit of the job; None without a price."""
    hour = run_cost(spec, plan, 3600.0)
    if hour is None:
        return None
    limit_s = parse_time_limit(spec.cluster.slurm.time or "") if spec.cluster.launched_by.uses_slurm else None
    limit = run_cost(spec, plan, limit_s)
    most = f"; at most {cost_text(limit)} within cluster.slurm.time {spec.cluster.slurm.time}" if limit else ""
    price = f"{hour['price_per_gpu_hour']:g} {hour['currency']} a GPU-hour"
    ranks = f"{hour['gpu_hours']:g} rank{'s' * (hour['gpu_hours'] != 1)}"
    return f"cost {cost_text(hour)} an hour: {ranks}, {price}{most}"
