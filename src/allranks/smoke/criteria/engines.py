"""The strategy that was asked for is the one that ran."""

from __future__ import annotations

from collections.abc import Callable

from allranks.smoke.criteria.wording import n_ranks
from allranks.smoke.evidence import Evidence
from allranks.smoke.judging import decide, failed, not_reached, not_testable, passed
from allranks.smoke.records import Judgement


def built(strategy: str) -> Callable[[Evidence], Judgement]:
    """Every rank has set up the strategy on its model."""

    def judge(e: Evidence) -> Judgement:
        threshold = f"{strategy} on {n_ranks(len(e.ranks))}"
        ready = [r for r, p in e.events("phase").items() if any(x["name"] == "prove" for x in p)]
        if e.plan.strategy != strategy:
            return failed(e.plan.strategy, threshold)
        return (
            passed(f"{strategy} on {len(ready)}", threshold) if len(ready) == len(e.ranks) else not_reached(threshold)
        )

    return judge


def zero_stage(stage: int) -> Callable[[Evidence], Judgement]:
    """The engine's own configuration has the stage, and the ranks hold equal parts of the optimizer's state."""

    def judge(e: Evidence) -> Judgement:
        size = len(e.ranks)
        threshold = f"stage {stage}; each of {n_ranks(size)} holds 1/{size} of the state"
        ends, model = e.last("end"), e.last("model")
        if len(ends) < size or not e.engine:
            return not_reached(threshold)
        found = e.engine.get("zero_optimization", {}).get("stage")
        total = model[0]["parameters_trained"]
        share = max(end["state_elements"] for end in ends.values()) / total
        whole = sum(end["state_elements"] for end in ends.values()) == total
        return decide(
            found == stage and whole and share < 1.05 / size, f"stage {found}; at most {share:.3f} a rank", threshold
        )

    return judge


def engine(e: Evidence) -> Judgement:
    """DeepSpeed's engine was made on every rank."""
    threshold = f"DeepSpeed's engine on {n_ranks(len(e.ranks))}"
    found = e.last("engine")
    if len(found) < len(e.ranks):
        return not_reached(threshold)
    names = sorted({f"{x['engine']} {x['version']}" for x in found.values()})
    return decide(len(names) == 1, f"{', '.join(names)} on {len(found)}", threshold)


def bf16(e: Evidence) -> Judgement:
    """Weights are bfloat16, and so is what they are given."""
    threshold = "weights bfloat16, inputs bfloat16"
    found = e.last("batch")
    if not found:
        return not_reached(threshold)
    weights = sorted({w for b in found.values() for w in b["weights"]})
    inputs = sorted({b["dtype"] for b in found.values()})
    wanted = ["bfloat16"]
    why = "" if inputs == wanted else "layers refuse inputs of another dtype than their weights"
    return decide(
        weights == wanted == inputs, f"weights {', '.join(weights)}, inputs {', '.join(inputs)}", threshold, why
    )


def fused_adam(e: Evidence) -> Judgement:
    """DeepSpeed compiled its fused optimizer; how long its start took is told apart from the steps."""
    threshold = "FusedAdam, compiled apart from the steps"
    if e.plan.device != "cuda":
        return not_testable(threshold, "FusedAdam is a CUDA kernel; here torch's AdamW runs inside DeepSpeed")
    found = e.last("engine").get(0)
    if not found or "optimizer" not in found:
        return not_reached(threshold)
    return decide(
        found["optimizer"] == "FusedAdam", f"{found['optimizer']}, started in {found['initialize_s']:.1f} s", threshold
    )


def adapters_only(e: Evidence) -> Judgement:
    """LoRA: a small part is trained, and the published weights are the adapter's."""
    threshold = "less than 10 % trained; adapter_model.safetensors and nothing else published"
    model = e.last("model").get(0)
    if not model or e.step is None:
        return not_reached(threshold)
    share = model["parameters_trained"] / model["parameters"]
    published = [n for n in e.files if n.endswith(".safetensors") and "/" not in n]
    ok = share < 0.1 and published == ["adapter_model.safetensors"]
    return decide(ok, f"{share:.2%} trained; {', '.join(published)}", threshold)
