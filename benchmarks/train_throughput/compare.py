"""What follows from the runs: rates, ratios within a repeat, losses, memory, headroom, goals; tables of README.md."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.train_throughput.variants import FLOOR, OURS, VARIANTS, peers_of

Runs = list[dict[str, Any]]
SPEED_GOAL = 1.2
SHARE_OF_HEADROOM = 0.9
MEMORY_GOAL = 0.7
COLUMNS = (
    "variant", "packing", "tokens/s and rank", "allranks to it", "goal", "floor to it", "products in a step",
    "held-out loss", "peak MiB", "peak MiB, large vocabulary",
)  # fmt: skip
FURTHER = ("e/d", "k/c", "ki/ci", "c/t", "c/x", "c/p", "e/c")


def spread(values: list[float], digits: int = 4) -> dict[str, float]:
    """Median and range."""
    return {key: round(take(values), digits) for key, take in (("median", median), ("min", min), ("max", max))}


def rate(result: dict[str, Any]) -> float:
    """Useful tokens per second and rank over all steps after warm-up."""
    return result["record"]["tokens_per_s_per_rank"]["total"]


def counted(runs: Runs, variant: str) -> dict[int, dict[str, Any]]:
    """Return the records of a variant that count, by repeat."""
    return {r["repeat"]: r["record"] for r in runs if r["variant"] == variant and r["counts"]}


def summarize(runs: Runs) -> dict[str, Any]:
    """Per variant: throughput three ways, step, memory, held-out loss, how many runs."""
    summary = {}
    for name, variant in VARIANTS.items():
        records = list(counted(runs, name).values())
        if records:
            rates = [r["tokens_per_s_per_rank"] for r in records]
            grown = [r["grown_bytes"] / 2**20 for r in records if r["grown_bytes"]]
            summary[name] = {
                "what": variant.what,
                "packing": variant.packing,
                "runs": len(records),
                "tokens_per_s_per_rank": spread([r["total"] for r in rates], 2),
                "tokens_per_s_per_rank_median_step": spread([r["median"] for r in rates], 2),
                "tokens_per_s_per_rank_with_warmup": spread([r["with_warmup"] for r in rates], 2),
                "grown_mib": spread(grown, 1) if grown else None,
                "heldout_loss": spread([r["heldout_loss"] for r in records]),
                "documents_isolated": records[0].get("documents_isolated"),
                "useful_tokens": records[0]["useful_tokens"],
                "steps": records[0]["steps"],
            }
    return summary


def paired(runs: Runs, top: str, bottom: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the records of two variants of the same repeat."""
    tops, bottoms = counted(runs, top), counted(runs, bottom)
    return [(tops[i], bottoms[i]) for i in sorted(tops.keys() & bottoms.keys())]


def ratios(runs: Runs) -> dict[str, Any]:
    """Return ratios of throughput within one repeat, median and range."""
    found = {}
    for pair in [*(f"{ours}/{peer}" for ours in OURS for peer in peers_of(ours)), *FURTHER]:
        both = paired(runs, *pair.split("/"))
        values = [top["tokens_per_s_per_rank"]["total"] / low["tokens_per_s_per_rank"]["total"] for top, low in both]
        if values:
            found[pair] = {"per_repeat": [round(v, 4) for v in values], **spread(values)}
    return found


def losses(runs: Runs) -> dict[str, Any]:
    """Return the held-out losses of allranks beside those of the peers with the same packing.

    A difference is no difference where it is at most the range over the repeats, which have different seeds, of either
    variant. With one repeat there is no range, and no verdict.
    """
    found = {}
    for ours in OURS:
        for peer in peers_of(ours):
            both = [(a["heldout_loss"], b["heldout_loss"]) for a, b in paired(runs, ours, peer)]
            if both:
                allowed = max(max(side) - min(side) for side in zip(*both, strict=True))
                apart = spread([a - b for a, b in both])
                verdict = (
                    None
                    if len(both) < 2
                    else {"equal": abs(apart["median"]) <= allowed, "worse": apart["median"] > allowed}
                )
                found[f"{ours}-{peer}"] = {**apart, "range_over_seeds": round(allowed, 4), **(verdict or {})}
    return found


def headroom(runs: Runs, floors: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the rate at which only matrix products and attention take time, and how far each variant is below it.

    ``left`` is how many times faster a variant could become; ``products_share`` is the share of products in its step.
    """
    counts = {f["repeat"]: f["record"] for f in floors if f["counts"]}
    if not counts:
        return None
    variants = {}
    for name, variant in VARIANTS.items():
        both = [(counts[i], record) for i, record in counted(runs, name).items() if i in counts]
        if both and variant.packing != "none":
            left = [f["tokens_per_s"][variant.packing] / r["tokens_per_s_per_rank"]["total"] for f, r in both]
            shares = [r["tokens_per_s_per_rank"]["total"] * f["products_s"] / f["tokens"] for f, r in both]
            variants[name] = {"left": spread(left), "products_share": spread(shares)}
    parts = {
        name: spread([f["parts"][name] for f in counts.values()], 6) for name in next(iter(counts.values()))["parts"]
    }
    return {
        "large_product_gflops_per_s": spread([f["product_flops_per_s"] / 1e9 for f in counts.values()], 1),
        "products_of_a_step_gflops_per_s": spread(
            [f["product_flops"] / f["products_s"] / 1e9 for f in counts.values()], 1
        ),
        "copy_gb_per_s": spread([f["copy_bytes_per_s"] / 1e9 for f in counts.values()], 1),
        "parts_s": parts,
        "tokens_per_s_per_rank": {
            p: spread([f["tokens_per_s"][p] for f in counts.values()], 1) for p in ("wrapped", "isolated")
        },
        "variants": variants,
    }


def speed_goals(found: dict[str, Any], room: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the goals of speed: 1.2 times each peer, or 90 % of what the peer leaves if that is less."""
    goals = []
    for ours in OURS:
        for pair in (f"{ours}/{peer}" for peer in peers_of(ours) if f"{ours}/{peer}" in found):
            left = room["variants"].get(pair.split("/")[1], {}).get("left", {}).get("median") if room else None
            goal = SPEED_GOAL if left is None or left >= SPEED_GOAL else round(SHARE_OF_HEADROOM * left, 4)
            ratio = found[pair]["median"]
            goals.append(
                {"what": "speed", "ratio": pair, "left": left, "goal": goal, "median": ratio, "met": ratio >= goal}
            )
    return goals


def memory_goals(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the goals of memory: at most 0.7 times the best peer of all that ran, however its rows are packed."""
    grown = {name: row["grown_mib"]["median"] for name, row in summary.items() if row["grown_mib"]}
    peers = {name: mib for name, mib in grown.items() if name not in OURS}
    if not peers:
        return []
    best = min(peers, key=peers.__getitem__)
    return [
        {"what": "memory", "ratio": f"{ours}/{best}", "goal": MEMORY_GOAL,
         "median": round(grown[ours] / peers[best], 4), "met": grown[ours] <= MEMORY_GOAL * peers[best]}
        for ours in OURS if ours in grown
    ]  # fmt: skip


def compared(runs: Runs, memory_runs: Runs) -> dict[str, Any]:
    """Return all that follows from runs of throughput (those of the floor too) and runs at a large vocabulary."""
    floors, trained = [r for r in runs if r["variant"] == FLOOR], [r for r in runs if r["variant"] != FLOOR]
    found, room, memory = ratios(trained), headroom(trained, floors), summarize(memory_runs)
    return {
        "summary": summarize(trained),
        "ratios": found,
        "losses": losses(trained),
        "headroom": room,
        "memory_at_large_vocabulary": memory,
        "goals": [*speed_goals(found, room), *memory_goals(memory)],
    }


def ranged(row: dict[str, float] | None, digits: int) -> str:
    """Return a median with its range, as a cell."""
    if row is None:
        return ""
    return f"{row['median']:,.{digits}f} ({row['min']:,.{digits}f} to {row['max']:,.{digits}f})"


def tables(document: dict[str, Any]) -> str:
    """Return the tables of a result, in Markdown."""
    goals = {goal["ratio"]: goal for goal in document["goals"] if goal["what"] == "speed"}
    room, memory = document["headroom"], document["memory_at_large_vocabulary"]
    left = room["variants"] if room else {}
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for name, row in document["summary"].items():
        ours = "e" if row["packing"] == "isolated" else "d"
        pair = f"{ours}/{name}"
        goal = goals.get(pair)
        lines.append("| " + " | ".join((
            f"{row['what']} (`{name}`)", row["packing"], ranged(row["tokens_per_s_per_rank"], 0),
            ranged(document["ratios"].get(pair), 2),
            f"{goal['goal']:.2f} {'met' if goal['met'] else 'missed'}" if goal else "",
            ranged(left[name]["left"], 2) if name in left else "",
            f"{100 * left[name]['products_share']['median']:.0f} %" if name in left else "",
            ranged(row["heldout_loss"], 3), ranged(row["grown_mib"], 0),
            ranged(memory[name]["grown_mib"], 0) if name in memory else "",
        )) + " |")  # fmt: skip
    said = [_floor_words(room)] if room else []
    said += [_memory_words(document)] if any(goal["what"] == "memory" for goal in document["goals"]) else []
    said += [_loss_words(document["losses"])] if any("equal" in row for row in document["losses"].values()) else []
    return "\n\n".join(["\n".join(lines), *said])


def _floor_words(room: dict[str, Any]) -> str:
    rates, parts = room["tokens_per_s_per_rank"], room["parts_s"]
    sums = ", ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {1000 * row['median']:.0f}" for name, row in parts.items()
    )
    return (
        f"A large matrix product runs at {ranged(room['large_product_gflops_per_s'], 0)} GFLOP/s a core, those of a "
        f"step at {ranged(room['products_of_a_step_gflops_per_s'], 0)}, while all cores compute. Milliseconds of a "
        f"step that nothing saves: {sums}. The floor: {ranged(rates['wrapped'], 0)} tokens/s and rank wrapped, "
        f"{ranged(rates['isolated'], 0)} isolated. Where a peer leaves less than {SPEED_GOAL} times, the goal is "
        f"{100 * SHARE_OF_HEADROOM:.0f} % of what it leaves."
    )


def _memory_words(document: dict[str, Any]) -> str:
    said = "; ".join(
        f"`{goal['ratio']}` {goal['median']:.2f} ({'met' if goal['met'] else 'missed'})"
        for goal in document["goals"]
        if goal["what"] == "memory"
    )
    words = f"{document['settings']['memory_vocabulary']:,} words"
    return f"Peak memory with a vocabulary of {words} to that of the best peer, goal {MEMORY_GOAL}: {said}."


def _loss_words(found: dict[str, Any]) -> str:
    unequal = [f"`{pair}` {row['median']:+.3f}" for pair, row in found.items() if not row.get("equal", True)]
    widest = max(row["range_over_seeds"] for row in found.values())
    verdict = f"but for {', '.join(unequal)}" if unequal else "in all pairs"
    return f"Held-out losses are equal within the range over seeds (up to {widest:.3f}) {verdict}."
