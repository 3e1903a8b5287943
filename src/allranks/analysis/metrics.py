"""Compute metrics.json from the events of all ranks, of trainings (also failed ones) and users' own programs. Pure."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from allranks.analysis import machine_load, stragglers
from allranks.planning.records import LaunchPlan
from allranks.rundir.events import PROGRESS, READ_IN_LOG, REPORTED
from allranks.spec.data_sources import source_of
from allranks.spec.records import RunSpec
from allranks.utils.text import as_dicts, as_list, finite_float, finite_int, format_value, sanitize

WARMUP_STEPS = stragglers.WARMUP_STEPS
Events = list[dict[str, Any]]
PEAK_FLOPS = {
    # Dense bf16 peaks in FLOP/s, without sparsity, from the vendors' data sheets (NVIDIA's give twice as much, "with
    # sparsity"). The names are those of the drivers, in full: "H100" is also part of H100 NVL and of its MIG instances.
    # Others have no MFU.
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A40": 149.7e12,
    **{f"NVIDIA A100{form}": 312e12 for form in ("-SXM4-40GB", "-SXM4-80GB", "-PCIE-40GB", " 80GB PCIe")},
    **dict.fromkeys(("NVIDIA A800-SXM4-80GB", "NVIDIA A800 80GB PCIe"), 312e12),
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA H20": 148e12,
    "NVIDIA H20-3e": 148e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200 NVL": 835e12,
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H800", "NVIDIA H200"), 989e12),
    **dict.fromkeys(("NVIDIA GH200 120GB", "NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"), 989e12),
    **dict.fromkeys(("NVIDIA B200", "NVIDIA B300", "NVIDIA B300 SXM6 AC"), 2250e12),
    **dict.fromkeys(("NVIDIA GB200", "NVIDIA GB300"), 2500e12),
    "AMD Instinct MI210": 181e12,
    **{f"AMD Instinct {model}": 1307.4e12 for model in ("MI300X", "MI300X OAM", "MI325X", "MI325X OAM")},
}  # fmt: skip
NOT_OF_PROGRAMS = ("strategy", "use_lora", "dtype", "gradient_checkpointing", "eval_s", "checkpoint_s")


def expert_load(story: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the share of tokens of each expert in each block, over all training steps; None for a dense model.

    Returns:
        ``experts``: number of experts per block; ``min`` and ``max``: the smallest and the largest share in any block;
        ``layers``: for
        each block ``layer`` (its number), ``min``, ``mean`` and ``max`` share, ``most`` (the expert with the largest
        share) and ``unused`` (experts without tokens). With even load every expert has the share ``mean``.
    """
    totals: dict[str, list[int]] = {}
    for event in story:
        if event["event"] == "experts":
            for layer, counts in event["layers"].items():
                before = totals.get(layer, [0] * len(counts))
                totals[layer] = [a + b for a, b in zip(before, counts, strict=True)]
    layers = [_layer(name, counts) for name, counts in totals.items() if sum(counts)]
    if not layers:
        return None
    return {
        "experts": max(len(counts) for counts in totals.values()),
        "min": min(layer["min"] for layer in layers),
        "max": max(layer["max"] for layer in layers),
        "layers": layers,
    }


def _layer(name: str, counts: list[int]) -> dict[str, Any]:
    whole = sum(counts)
    return {
        "layer": name,
        "min": min(counts) / whole,
        "mean": 1 / len(counts),
        "max": max(counts) / whole,
        "most": counts.index(max(counts)),
        "unused": counts.count(0),
    }


def before_and_after(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """List rank 0's ``prompt``, ``expected``, ``before`` (None if not evaluated before), ``before_step``, ``after``."""
    evals = [
        (e.get("step"), samples) for e in events if e["event"] == "eval" and (samples := as_dicts(e.get("samples")))
    ]
    if not evals:
        return []
    (first_step, first), (last_step, last) = evals[0], evals[-1]
    start = {str(s.get("prompt")): s.get("reply") for s in first} if len(evals) > 1 or first_step == 0 else {}
    trained = last_step != 0
    return [
        {
            "prompt": s.get("prompt"),
            "expected": s.get("expected"),
            "before": start.get(str(s.get("prompt"))),
            "before_step": first_step if start else None,
            "after": s.get("reply") if trained else None,
        }
        for s in (last if trained else first)
    ]


def without_repeated_steps(events: Events) -> Events:
    """Drop the steps that a resumed attempt repeated: after ``resume`` from step N, the later ones count."""
    kept: Events = []
    for event in events:
        if event["event"] == "resume":
            start = event["from_step"]
            kept = [
                e for e in kept if e["event"] not in ("step", "eval", "checkpoint", "experts") or e["step"] <= start
            ]
        kept.append(event)
    return kept


def first_event(events: Events, kind: str) -> dict[str, Any]:
    """Return the first event of a kind, or an empty one."""
    return next((e for e in events if e["event"] == kind), {})


def last_event(events: Events, kind: str) -> dict[str, Any]:
    """Return the last event of a kind, or an empty one."""
    return next((e for e in reversed(events) if e["event"] == kind), {})


def step_times(steps: Events, after: int = 0) -> list[float]:
    """Return the times of all optimizer steps later than `after`, in seconds."""
    times: list[float] = []
    for event in steps:
        each = event.get("step_times_s") or [event["step_time_s"]]
        start = event["step"] - len(each)
        times += [t for i, t in enumerate(each) if start + i >= after]
    return times


def summarize(run_name: str, spec: RunSpec, plan: LaunchPlan, ranks: dict[int, Events], status: str) -> dict[str, Any]:
    """Return the content of metrics.json; unknown values are None, for a user's own program most of them."""
    story = {rank: without_repeated_steps(events) for rank, events in ranks.items()}
    zero = story.get(0, [])
    steps = {rank: [e for e in events if e["event"] == "step"] for rank, events in story.items()}
    model, data, proof, evaluation = (
        last_event(zero, "model"),
        last_event(zero, "data"),
        last_event(zero, "proof"),
        last_event(zero, "eval"),
    )
    rate = throughput(steps)
    times = step_times(steps.get(0, []), WARMUP_STEPS)
    losses = [e.get("loss") for e in steps.get(0, [])]  # None where one was not finite
    router = [e["router_aux_loss"] for e in steps.get(0, []) if "router_aux_loss" in e]
    utilisation, attention = mfu(rate, model, plan), attention_flops_per_token(steps, model, spec)
    metrics = {
        "run_name": run_name,
        "status": status,
        "strategy": plan.strategy,
        "world_size": plan.world_size,
        "nodes": len(plan.nodes),
        "device": model.get("device", plan.device),
        "torch": model.get("torch"),
        "model": spec.model.name if spec.model else None,
        "parameters": model.get("parameters"),
        "parameters_trained": model.get("parameters_trained"),
        "dataset": source_of(spec.data) if spec.data else None,
        "use_lora": spec.adapter.type == "lora",
        "dtype": plan.dtype,
        "gradient_checkpointing": plan.recomputation != "none",
        "recomputation": plan.recomputation,
        "compiled": plan.compiled and _not_compiled(ranks) is None,
        "compile_reason": plan.compile_reason or None,
        "not_compiled": _not_compiled(ranks),
        "attention": attention_of(zero),
        "steps": steps[0][-1]["step"] if steps.get(0) else 0,
        "wall_time_s": wall_time(ranks),
        "train_loss_first": losses[0] if losses else None,
        "train_loss_last": losses[-1] if losses else None,
        "router_aux_loss_first": router[0] if router else None,
        "router_aux_loss_last": router[-1] if router else None,
        "eval_loss": evaluation.get("loss"),
        "eval_loss_first": first_event(zero, "eval").get("loss"),
        **best_evaluation(zero),
        "stopped_early": early_stop(zero),
        "perplexity": evaluation.get("perplexity"),
        "accuracy": evaluation.get("accuracy"),
        "exact_match": evaluation.get("exact_match"),
        "exact_match_first": first_event(zero, "eval").get("exact_match"),
        "tokens_real": _total(steps, "tokens"),
        "tokens_trained": _total(steps, "tokens_trained"),
        "tokens_padded": _total(steps, "tokens_padded"),
        "tokens_per_s": rate,
        "tokens_per_s_per_rank": rate / plan.world_size if rate else None,
        "warmup_s": round(sum(step_times(steps.get(0, []))) - sum(times), 6) if times else None,
        "step_time_s": {"median": statistics.median(times), "p90": quantile(times, 0.9)} if times else None,
        "epoch_s": epoch_time(times, data, plan),
        "mfu": utilisation,
        "mfu_with_attention": add_attention(utilisation, attention, rate, model, plan),
        "attention_flops_per_token": attention,
        "peak_memory_bytes": max(
            (v for s in steps.values() for e in s if (v := e.get("peak_memory_bytes"))), default=None
        ),
        "prepare_s": data.get("seconds"),
        "engine": engine_of(zero),
        "expert_load": expert_load(zero),
        "eval_s": _sum(zero, "eval", "seconds"),
        "checkpoint_s": _sum(zero, "checkpoint", "seconds"),
        "own_time": own_time(story),
        "machine_load": [msgspec.to_builtins(load) for load in machine_load.loads_of_run(story)],
        "links": [msgspec.to_builtins(link) for link in stragglers.links_of_run(story)],
        "rows_truncated": data.get("rows_truncated"),
        "tokens_cut": data.get("tokens_cut"),
        "attempts": sum(e["event"] == "start" for e in zero),
        "sync_proof": {k: proof[k] for k in ("world_size", "weights_equal", "data_disjoint")} if proof else None,
        "warnings": run_warnings(plan, ranks),
    }
    if spec.script is None:
        return metrics
    # plan and events determine these of a training, but not of a user's own program
    counts = () if steps.get(0) else ("steps", "tokens_real", "tokens_trained", "tokens_padded")
    return {**metrics, **dict.fromkeys((*NOT_OF_PROGRAMS, *counts))}


def run_warnings(plan: LaunchPlan, ranks: dict[int, Events]) -> list[str]:
    """Return what the plan, the data and the ranks warn of, each once."""
    texts = [*plan.warnings]
    for rank, events in sorted(ranks.items()):
        for event in events:
            if event["event"] == "warning":
                texts.append(f"rank {rank}: {format_value(event.get('message'))}")
            elif rank == 0 and event["event"] == "data":
                texts += map(format_value, as_list(event.get("warnings")))
    return list(dict.fromkeys(map(sanitize, texts)))


def best_evaluation(story: Events) -> dict[str, Any]:
    """Return ``best_step`` and ``best_eval_loss``, the lowest held-out loss after a step; None without one."""
    evaluations = [
        (e["loss"], e["step"]) for e in story if e["event"] == "eval" and e.get("loss") is not None and e["step"]
    ]
    loss, step = min(evaluations, default=(None, None))
    return {"best_step": step, "best_eval_loss": loss}


def early_stop(story: Events) -> dict[str, Any] | None:
    """Return ``step`` and ``reason`` if ``eval.patience`` ended the training, and no later attempt has continued it."""
    last = max((i for i, e in enumerate(story) if e["event"] == "early_stop"), default=None)
    if last is None or any(e["event"] == "step" for e in story[last:]):
        return None
    return {"step": story[last].get("step"), "reason": story[last].get("reason")}


def own_time(story: dict[int, Events]) -> dict[str, Any] | None:
    """Return how long each rank works before it waits for others, relative to the median, and the slow ranks.

    None if it cannot be determined (one rank, too few steps).
    """
    pace = stragglers.pace_of_run(story)
    if pace is None:
        return None
    return {**msgspec.to_builtins(pace), "stragglers": [r.rank for r in pace.slow]}


def engine_of(story: Events) -> dict[str, Any] | None:
    """Return the engine of another library that a strategy uses: name, version, and start-up times.

    ``import_s`` and ``initialize_s`` (with compilation): seconds to import and start it; no step includes them.
    """
    event = last_event(story, "engine")
    keys = ("engine", "version", "import_s", "initialize_s")
    return {"name" if k == "engine" else k: event.get(k) for k in keys} if event else None


def epoch_time(times: list[float], data: dict[str, Any], plan: LaunchPlan) -> float | None:
    """Return the training time in seconds for one epoch: the mean step after warm-up times the steps of an epoch.

    Excludes evaluations and checkpoints. The mean and not the median, because an epoch includes its slow steps.
    """
    sequences = data.get("sequences")
    if not times or not sequences or plan.batch is None:
        return None
    return statistics.fmean(times) * sequences / plan.batch.global_batch_size


def throughput(steps: dict[int, Events]) -> float | None:
    """Return real tokens per second over all ranks after warm-up, by rank 0's time: ranks are synchronous."""
    tokens = sum(e["tokens"] for s in steps.values() for e in _after_warm_up(s))
    seconds = sum(sum(e.get("step_times_s") or [e["step_time_s"]]) for e in _after_warm_up(steps.get(0, [])))
    return tokens / seconds if seconds else None


def _after_warm_up(steps: Events) -> Events:
    return [e for e in steps if e["step"] - e.get("steps", 1) >= WARMUP_STEPS]


def attention_of(story: Events) -> dict[str, Any] | None:
    """Return how ``model.attention: auto`` chose a kernel: ``chosen``, ``shape``, ``tried``; None without the event."""
    event = next((e for e in story if e["event"] == "attention"), None)
    return {key: event.get(key) for key in ("chosen", "shape", "tried")} if event else None


def _total(steps: dict[int, Events], name: str) -> int:
    return sum(e.get(name) or 0 for s in steps.values() for e in s)


def _sum(events: Events, kind: str, name: str) -> float:
    return sum(e.get(name) or 0 for e in events if e["event"] == kind)


def _not_compiled(ranks: dict[int, Events]) -> str | None:
    """Return why blocks are not compiled on the lowest rank where they are not, or None."""
    remarks = (e for _, events in sorted(ranks.items()) for e in events if e["event"] == "remark")
    return next((e.get("message") for e in remarks if e.get("what") == "compile"), None)


def wall_time(ranks: dict[int, Events]) -> float | None:
    """Return the seconds from the first to the last event of each attempt, summed over attempts."""
    times: dict[int, list[float]] = {}
    for events in ranks.values():
        attempt = 0
        for event in events:
            if event["event"] == "start":
                attempt = event.get("attempt") or attempt + 1
            times.setdefault(attempt, []).append(event["time"])
    return round(sum(max(own) - min(own) for own in times.values()), 3) if times else None


def quantile(values: list[float], q: float) -> float:
    """Return the q-quantile by linear interpolation between the sorted values."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def mfu(rate: float | None, model: dict[str, Any], plan: LaunchPlan) -> float | None:
    """Return the model FLOP utilisation; None on a CPU, and if the peak of the GPU or the parameters that a token uses
    are unknown.

    Counts 6 FLOPs per parameter and token; with LoRA 4 per frozen and 6 per trained parameter (frozen weights get no
    gradient; NeMo counts the same way). Of a mixture of experts, only the parameters that a token uses count.
    """
    peak = PEAK_FLOPS.get(str(model.get("device", "")).strip())
    used, trained = (model.get(key) for key in ("parameters_active", "parameters_trained_active"))
    if not rate or not peak or used is None or trained is None or plan.device != "cuda" or plan.dtype != "bfloat16":
        return None
    return rate * (6 * trained + 4 * (used - trained)) / (peak * plan.world_size)


def attention_flops_per_token(steps: dict[int, Events], model: dict[str, Any], spec: RunSpec) -> float | None:
    """Return the FLOPs of attention per real token in the steps after warm-up, forward and backward.

    A token attends to those of its row up to itself (in an encoder: to all of its row), so that this depends on the
    lengths of the rows.

    Returns:
        None for a run that did not record them, and where a sliding window may be shorter than a row.
    """
    each, window = finite_int(model.get("attention_flops_per_pair")), finite_int(model.get("attention_window"))
    counted = [e for s in steps.values() for e in _after_warm_up(s)]
    pairs = [finite_int(e.get("attention_pairs")) for e in counted]
    tokens = sum(e["tokens"] for e in counted)
    if each is None or None in pairs or not tokens or (window and spec.data and spec.data.max_length > window):
        return None
    return each * sum(p for p in pairs if p is not None) / tokens


def add_attention(
    utilisation: float | None, attention: float | None, rate: float | None, model: dict[str, Any], plan: LaunchPlan
) -> float | None:
    """Return the model FLOP utilisation with the FLOPs of attention (Chowdhery et al. 2022, PaLM, appendix B); None if
    it is not known.

    Args:
        utilisation: the result of `mfu`.
        attention: FLOPs of attention per token.
    """
    if utilisation is None or attention is None or not rate:
        return None
    return utilisation + rate * attention / (PEAK_FLOPS[str(model["device"]).strip()] * plan.world_size)


def progress_events(events: Events) -> Events:
    """Return a rank's events of progress; those read in its log only if it has reported nothing itself."""
    reports = [e for e in events if e.get("event") == PROGRESS and e.get("source") in (REPORTED, READ_IN_LOG)]
    reported = [e for e in reports if e["source"] == REPORTED]
    return reported or reports


def progress_metrics(ranks: dict[int, Events]) -> dict[str, Any]:
    """Return the values of metrics.json that a user's own program has made known; empty if there are none.

    ``progress_source`` is ``report`` or ``log``. Steps and losses are those of the lowest rank that has said any. Rates
    are measured from the first record to the last one; ``tokens_per_s`` adds up the ranks that have reported tokens.
    """
    story = {rank: reports for rank, events in sorted(ranks.items()) if (reports := progress_events(events))}
    if any(e["source"] == REPORTED for reports in story.values() for e in reports):
        story = {rank: reports for rank, reports in story.items() if reports[0]["source"] == REPORTED}
    if not story:
        return {}
    metrics: dict[str, Any] = {"progress_source": next(iter(story.values()))[0]["source"]}
    stepped = next(
        (reports for events in story.values() if (reports := [e for e in events if _step(e) is not None])), []
    )
    if stepped:
        metrics["steps"] = max(_step(e) or 0 for e in stepped)
        metrics["steps_per_s"] = _rate(stepped, (_step(stepped[-1]) or 0) - (_step(stepped[0]) or 0))
    lossy = next((reports for events in story.values() if (reports := [e for e in events if "loss" in e])), [])
    if lossy:
        metrics["train_loss_first"], metrics["train_loss_last"] = (
            finite_float(lossy[0]["loss"]),
            finite_float(lossy[-1]["loss"]),
        )
        if (at := _not_finite_since(lossy)) is not None:
            metrics["loss_not_finite"] = {"step": _step(lossy[at]), "source": metrics["progress_source"]}
    held_out = [e for events in story.values() for e in events if "eval_loss" in e]
    if held_out:
        metrics["eval_loss_first"] = finite_float(held_out[0]["eval_loss"])
        metrics["eval_loss"] = finite_float(held_out[-1]["eval_loss"])
    reported = {
        rank: reports
        for rank, events in story.items()
        if (reports := [e for e in events if finite_int(e.get("tokens")) is not None])
    }
    if reported:
        metrics["tokens_reported"] = sum(finite_int(e["tokens"]) or 0 for reports in reported.values() for e in reports)
        rates = [
            _rate(reports, sum(finite_int(e["tokens"]) or 0 for e in reports[1:])) for reports in reported.values()
        ]
        if all(rate is not None for rate in rates):
            metrics["tokens_per_s"] = sum(rate or 0.0 for rate in rates)
    return {name: value for name, value in metrics.items() if value is not None or name.startswith(("train_", "eval_"))}


def _not_finite_since(lossy: Events) -> int | None:
    """Return the index of the first loss (null: NaN) after which none was finite; None if the last one was."""
    finite = [i for i, e in enumerate(lossy) if finite_float(e["loss"]) is not None]
    first = finite[-1] + 1 if finite else 0
    return first if first < len(lossy) else None


def describe_non_finite_loss(metrics: dict[str, Any]) -> str:
    """Return since when the loss of a user's own program is not finite; empty if it is, or not known."""
    loss = metrics.get("loss_not_finite")
    if not isinstance(loss, dict):
        return ""
    step = finite_int(loss.get("step"))
    since = f"from step {step} on" if step is not None else "in all that is known of it"
    by = "as the program reported" if loss.get("source") == REPORTED else "as the output of rank 0 says"
    return f"the loss is not finite (NaN or infinite) {since}, {by}"


def _step(event: dict[str, Any]) -> int | None:
    return finite_int(event.get("step"))


def _rate(events: Events, amount: int) -> float | None:
    """Return an amount per second, from the first of these events to the last one; None if that is not known."""
    began, ended = (finite_float(e.get("last", e.get("time"))) for e in (events[0], events[-1]))
    if began is None or ended is None or ended <= began or amount <= 0:
        return None
    return amount / (ended - began)
