"""Steps: each rank its own rows, all ranks one loss and one model."""

from __future__ import annotations

from collections.abc import Callable

from allranks.smoke.criteria.wording import is_finite, n_ranks
from allranks.smoke.evidence import Evidence
from allranks.smoke.judging import decide, failed, not_reached, passed
from allranks.smoke.records import Judgement

LOSS_ERROR = 1e-6  # relative; shares are added in another order than the ranks' all-reduce does


def own_work(e: Evidence) -> Judgement:
    """The ranks' rows were disjoint and complete, and each trained its own."""
    threshold = f"rows disjoint and complete over {n_ranks(len(e.ranks))}"
    proofs = e.last("proof")
    if len(proofs) < len(e.ranks):
        return not_reached(threshold)
    ok = all(p["data_disjoint"] for p in proofs.values())
    return decide(ok, f"{next(iter(proofs.values()))['rows_checked']:,} rows checked", threshold)


def computes(part: str) -> Callable[[Evidence], Judgement]:
    """``forward`` or ``backward`` ran on every rank, with a finite loss."""

    def judge(e: Evidence) -> Judgement:
        threshold = f"on {n_ranks(len(e.ranks))}, loss finite"
        steps = e.events("step")
        ran = [r for r, s in steps.items() if any(x.get(f"{part}_s", 0) > 0 for x in s)]
        bad = [x for x in e.last("error").values() if "not finite" in str(x["message"])]
        if bad:
            return failed("a loss that is not finite", threshold, str(bad[0]["message"])[:200])
        if len(ran) < len(e.ranks):
            return not_reached(threshold)
        finite = all(is_finite(x["loss"]) for s in steps.values() for x in s)
        return decide(finite, f"on {n_ranks(len(ran))}", threshold)

    return judge


def synchronised(e: Evidence) -> Judgement:
    """After the last step every rank's own hash of the weights is the same: gradients were averaged."""
    threshold = f"one hash of the weights on {n_ranks(len(e.ranks))} after the last step"
    ends = e.last("end")
    if len(ends) < len(e.ranks):
        return not_reached(threshold)
    hashes = {end["weights_hash"] for end in ends.values()}
    if hashes == {None}:
        return passed("each weight exists once: its parts lie on the ranks", threshold)
    return decide(len(hashes) == 1, f"{len(hashes)} hash{'es' * (len(hashes) > 1)} on {n_ranks(len(ends))}", threshold)


def steps_done(e: Evidence) -> Judgement:
    """All optimizer steps, on every rank."""
    wanted = e.steps
    threshold = f"{wanted} steps"
    last = e.last("step")
    if len(last) < len(e.ranks) or not wanted:
        return not_reached(threshold)
    least = min(s["step"] for s in last.values())
    if least < wanted and e.last("error"):
        return not_reached(threshold)
    return decide(least == wanted, f"{least} steps on every rank", threshold)


def loss_aggregated(e: Evidence) -> Judgement:
    """Every rank logs the same loss, and it is the sum of the ranks' own parts."""
    threshold = f"equal on {n_ranks(len(e.ranks))}, and the sum of their parts within {LOSS_ERROR:g}"
    steps = {r: {x["step"]: x for x in s} for r, s in e.events("step").items()}
    if len(steps) < len(e.ranks):
        return not_reached(threshold)
    common = sorted(set.intersection(*(set(s) for s in steps.values())))
    if not common:
        return not_reached(threshold)
    for number in common:
        losses = [s[number]["loss"] for s in steps.values()]
        shares = [s[number]["loss_share"] for s in steps.values()]
        if not all(map(is_finite, [*losses, *shares])):
            return not_reached(threshold)
        if len(set(losses)) > 1:
            apart = f"{min(losses):.6g} to {max(losses):.6g}"
            return failed(f"step {number}: {apart}", threshold, "each rank logs a loss of its own")
        if abs(sum(shares) - losses[0]) > LOSS_ERROR * max(abs(losses[0]), 1e-12):
            return failed(f"step {number}: {losses[0]:.6g}", threshold, f"the ranks' parts add up to {sum(shares):.6g}")
    return passed(f"{len(common)} steps, last {steps[0][common[-1]]['loss']:.4f}", threshold)


def batch_product(e: Evidence) -> Judgement:
    """micro x ranks x accumulation = global: as planned, as the engine was told, and as the ranks' batches had it."""
    plan = e.plan.batch
    assert plan is not None
    product = plan.micro_batch_size * len(e.ranks) * plan.grad_accum
    threshold = f"{plan.micro_batch_size} x {len(e.ranks)} x {plan.grad_accum} = {product} rows a step"
    batches = e.last("batch")
    if len(batches) < len(e.ranks):
        return not_reached(threshold)
    rows = sum(b["shape"][0] for b in batches.values()) * plan.grad_accum
    told = e.engine.get("train_batch_size", plan.global_batch_size)
    counted = _rows_a_step(e)
    seen = {"planned": plan.global_batch_size, "engine": told, "first batches": rows}
    seen |= {"trained": counted} if counted is not None else {}
    wrong = [f"{name} {n}" for name, n in seen.items() if n != product]
    return decide(not wrong, f"{rows if counted is None else counted} rows a step", threshold, ", ".join(wrong))


def _rows_a_step(e: Evidence) -> int | None:
    """Over all ranks, where a row counts as one token (noise); the number that is furthest from the plan, if they differ."""
    if e.spec.data is None or e.spec.data.source != "builtin:noise":
        return None
    by_step: dict[int, int] = {}
    for steps in e.events("step").values():
        for s in steps:
            by_step[s["step"]] = by_step.get(s["step"], 0) + s["tokens"] // s.get("steps", 1)
    assert e.plan.batch is not None
    return max(by_step.values(), key=lambda n: abs(n - e.plan.batch.global_batch_size), default=None)  # type: ignore[union-attr]


def prepared_once(e: Evidence) -> Judgement:
    """One rank a cache builds the data, the others wait or find it: no race."""
    threshold = "built by one rank at most, read by all"
    found = {r: str(d["how"]) for r, d in e.last("data").items()}
    if len(found) < len(e.ranks):
        return not_reached(threshold)
    builders = [r for r, how in found.items() if how in ("built", "rebuilt")]
    return decide(len(builders) <= 1, f"{len(builders)} built, {len(found) - len(builders)} read", threshold)


def throughput_written(e: Evidence) -> Judgement:
    """metrics.json has a throughput over all ranks."""
    threshold = "tokens_per_s in metrics.json"
    if not e.metrics:
        return not_reached(threshold)
    rate = e.metrics.get("tokens_per_s")
    if rate is None and e.metrics.get("status") != "succeeded":
        return not_reached(threshold)
    return decide(
        rate is not None and is_finite(rate) and rate > 0, f"{rate or 0:,.1f} tokens/s over all ranks", threshold
    )
