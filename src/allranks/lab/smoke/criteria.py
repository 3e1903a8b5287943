"""Criteria that several smoke tests share: rendezvous, strategy, training steps, checkpoints.

Each criterion is a function of a run's records; for each, a unit test shows that it can fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from allranks.lab.smoke.records import Criterion, Evidence, Verdict, decide, failed, not_reached, not_testable, passed


def n_of(found: int, all_: int, what: str) -> str:
    return f"{found} of {all_} {what}"


def n_ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


NO_GPU = "no GPU here: the ranks ran on CPU cores"
NO_NCCL = "no NCCL here: the ranks used gloo, whose log contains no transport"


def own_gpu(e: Evidence) -> Verdict:
    """Check that every rank has its own GPU on its node."""
    threshold = "a GPU on every rank, none shared"
    if e.plan.device != "cuda":
        return not_testable(threshold, NO_GPU)
    models, starts = e.last("model"), e.last("start")
    if len(models) < len(e.ranks):
        return not_reached(threshold)
    places = {(starts[r]["host"], starts[r]["local_rank"]) for r in models if r in starts}
    names = sorted({str(m["device"]) for m in models.values()})
    ok = len(places) == len(e.ranks) and "cpu" not in names
    return decide(ok, f"{len(places)} GPUs: {', '.join(names)}", threshold)


def versions(e: Evidence) -> Verdict:
    """Check that all ranks import one version of torch."""
    threshold = "one version of torch on every rank"
    models = e.last("model")
    if len(models) < len(e.ranks):
        return not_reached(threshold)
    found = sorted({str(m["torch"]) for m in models.values()})
    return decide(len(found) == 1, f"{', '.join(found)} on {n_of(len(models), len(e.ranks), 'ranks')}", threshold)


def world(e: Evidence) -> Verdict:
    """Check that all planned ranks form one group, by communication in the group and not from variables."""
    size = len(e.ranks)
    threshold = f"{n_ranks(size)} in one group"
    starts, proofs = e.last("start"), e.last("proof")
    if len(proofs) == size and all(p["world_size"] == size for p in proofs.values()):
        return passed(f"{n_ranks(size)}, verified at step 0", threshold)
    if missing := [r for r in e.ranks if r not in starts]:
        return failed(
            n_of(len(starts), size, "ranks started"), threshold, f"missing: rank {', '.join(map(str, missing))}"
        )
    said = [str(x["message"]) for x in e.last("error").values() if "ranks were planned" in str(x["message"])]
    if said:
        return failed("another number of ranks answered", threshold, said[0])
    return not_reached(threshold)


def nodes(e: Evidence) -> Verdict:
    """Check that ranks ran on as many hosts as planned."""
    wanted = len(e.plan.nodes)
    if wanted == 1:
        return not_testable("several nodes", "ran on one node here")
    threshold = f"{wanted} nodes, {n_ranks(len(e.ranks))}"
    starts = e.last("start")
    if len(starts) < len(e.ranks):
        return not_reached(threshold)
    hosts = sorted({str(s["host"]) for s in starts.values()})
    return decide(len(hosts) == wanted, f"{len(hosts)} nodes ({', '.join(hosts)}), {n_ranks(len(starts))}", threshold)


def transport(*wanted: str, across: bool = False) -> Callable[[Evidence], Verdict]:
    """Check NCCL's log: every channel uses one of these transports. `across`: only channels between nodes count, else those inside a node."""

    def judge(e: Evidence) -> Verdict:
        where = "between nodes" if across else "within a node"
        threshold = f"only {' or '.join(wanted)} {where}"
        if e.plan.procs_per_node == 1 and (not across or len(e.plan.nodes) == 1):
            return not_testable(threshold, "a node with one rank opens no channel within")
        ways: dict[str, int] = {}
        for found in e.ways.values():
            for way, count in found.items():
                if len(e.plan.nodes) == 1 or way.startswith("NET") == across:
                    ways[way] = ways.get(way, 0) + count
        if not ways:
            return not_testable(threshold, NO_NCCL) if e.plan.backend != "nccl" else not_reached(threshold)
        other = [way for way in ways if not way.startswith(wanted)]
        shown = ", ".join(f"{count} x {way}" for way, count in sorted(ways.items()))
        return decide(not other, shown, threshold, f"{', '.join(other)} was not expected" if other else "")

    return judge


def network_matches_policy(e: Evidence) -> Verdict:
    """Check that the ranks used the network chosen for each node before the start: NCCL's network, gloo's interface."""
    threshold = "on each node the chosen network"
    seen = e.metrics.get("network") or {}
    if not seen.get("line"):
        return (
            not_testable(threshold, "no rank log and no connection shows it") if e.metrics else not_reached(threshold)
        )
    bad = [f"{f['host']}: {f['text']}" for f in seen.get("findings", []) if f.get("level") == "bad"]
    return decide(bool(seen.get("ok")), str(seen["line"]), threshold, "; ".join(bad)[:300])


def barriers(e: Evidence) -> Verdict:
    """Check that all collectives completed in time, and that every rank passed the last barrier before its ``done``."""
    threshold = f"{n_ranks(len(e.ranks))} passed the last barrier, no timeout"
    late = [
        x
        for x in e.last("error").values()
        if "timeout" in str(x["message"]).lower() and "checkpoint" not in str(x["message"])
    ]
    done = [r for r, p in e.events("phase").items() if any(x["name"] == "done" for x in p)]
    if late:
        return failed(f"rank {late[0]['rank']} timed out", threshold, str(late[0]["message"])[:200])
    return (
        passed(f"{n_ranks(len(done))}, no timeout", threshold) if len(done) == len(e.ranks) else not_reached(threshold)
    )


def strategy_built(strategy: str) -> Callable[[Evidence], Verdict]:
    """Check that every rank has set up the strategy on its model."""

    def judge(e: Evidence) -> Verdict:
        threshold = f"{strategy} on {n_ranks(len(e.ranks))}"
        ready = [r for r, p in e.events("phase").items() if any(x["name"] == "prove" for x in p)]
        if e.plan.strategy != strategy:
            return failed(e.plan.strategy, threshold)
        return (
            passed(f"{strategy} on {len(ready)}", threshold) if len(ready) == len(e.ranks) else not_reached(threshold)
        )

    return judge


def zero_stage(stage: int) -> Callable[[Evidence], Verdict]:
    """Check that the engine's configuration has the stage, and the ranks have equal shards of the optimizer state."""

    def judge(e: Evidence) -> Verdict:
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
            found == stage and whole and share < 1.05 / size, f"stage {found}; at most {share:.3f} per rank", threshold
        )

    return judge


def engine(e: Evidence) -> Verdict:
    """Check that DeepSpeed's engine was created on every rank."""
    threshold = f"DeepSpeed's engine on {n_ranks(len(e.ranks))}"
    found = e.last("engine")
    if len(found) < len(e.ranks):
        return not_reached(threshold)
    names = sorted({f"{x['engine']} {x['version']}" for x in found.values()})
    return decide(len(names) == 1, f"{', '.join(names)} on {len(found)}", threshold)


def bf16(e: Evidence) -> Verdict:
    """Check that weights and inputs are bfloat16."""
    threshold = "weights bfloat16, inputs bfloat16"
    found = e.last("batch")
    if not found:
        return not_reached(threshold)
    weights = sorted({w for b in found.values() for w in b["weights"]})
    inputs = sorted({b["dtype"] for b in found.values()})
    wanted = ["bfloat16"]
    why = "" if inputs == wanted else "layers need inputs with the dtype of their weights"
    return decide(
        weights == wanted == inputs, f"weights {', '.join(weights)}, inputs {', '.join(inputs)}", threshold, why
    )


def fused_adam(e: Evidence) -> Verdict:
    """Check that DeepSpeed compiled its fused optimizer, if the spec names it; its start-up time is separate from the steps."""
    threshold = "FusedAdam, compiled outside of the steps"
    if e.plan.device != "cuda":
        return not_testable(threshold, "FusedAdam is a CUDA kernel; here torch's AdamW runs inside DeepSpeed")
    if e.engine and "optimizer" not in e.engine:
        return not_testable(threshold, "no nvcc was found to compile it: torch's fused AdamW runs inside DeepSpeed")
    found = e.last("engine").get(0)
    if not found or "optimizer" not in found:
        return not_reached(threshold)
    return decide(
        found["optimizer"] == "FusedAdam", f"{found['optimizer']}, started in {found['initialize_s']:.1f} s", threshold
    )


def adapters_only(e: Evidence) -> Verdict:
    """Check LoRA: a small part is trained, and the published weights are the adapter's."""
    threshold = "less than 10 % trained; adapter_model.safetensors and no other file published"
    model = e.last("model").get(0)
    if not model or e.step is None:
        return not_reached(threshold)
    share = model["parameters_trained"] / model["parameters"]
    published = [n for n in e.files if n.endswith(".safetensors") and "/" not in n]
    ok = share < 0.1 and published == ["adapter_model.safetensors"]
    return decide(ok, f"{share:.2%} trained; {', '.join(published)}", threshold)


LOSS_TOLERANCE = 1e-6  # relative; shares are added in another order than in the all-reduce


def disjoint_rows(e: Evidence) -> Verdict:
    """Check that the ranks' rows were disjoint and complete, and each rank trained its own rows."""
    threshold = f"rows disjoint and complete over {n_ranks(len(e.ranks))}"
    proofs = e.last("proof")
    if len(proofs) < len(e.ranks):
        return not_reached(threshold)
    ok = all(p["data_disjoint"] for p in proofs.values())
    return decide(ok, f"{next(iter(proofs.values()))['rows_checked']:,} rows checked", threshold)


def computes(part: str) -> Callable[[Evidence], Verdict]:
    """Check that ``forward`` or ``backward`` ran on every rank, with a finite loss.

    The parts of a step have times on a CPU only. On a GPU a loss shows a forward pass, and a norm of gradients a backward pass.
    """
    on_gpu = {"forward": "loss", "backward": "grad_norm"}[part]

    def judge(e: Evidence) -> Verdict:
        threshold = f"on {n_ranks(len(e.ranks))}, loss finite"
        steps = e.events("step")
        sign = on_gpu if e.plan.device == "cuda" else f"{part}_s"
        ran = [r for r, s in steps.items() if any(is_finite(x.get(sign)) and x[sign] > 0 for x in s)]
        bad = [x for x in e.last("error").values() if "not finite" in str(x["message"])]
        if bad:
            return failed("a loss that is not finite", threshold, str(bad[0]["message"])[:200])
        if len(ran) < len(e.ranks):
            return not_reached(threshold)
        finite = all(is_finite(x["loss"]) for s in steps.values() for x in s)
        return decide(finite, f"on {n_ranks(len(ran))}", threshold)

    return judge


def synchronised(e: Evidence) -> Verdict:
    """Check that every rank has the same hash of the weights after the last step: gradients were averaged."""
    threshold = f"one hash of the weights on {n_ranks(len(e.ranks))} after the last step"
    ends = e.last("end")
    if len(ends) < len(e.ranks):
        return not_reached(threshold)
    hashes = {end["weights_hash"] for end in ends.values()}
    if hashes == {None}:
        return passed("each weight exists once, sharded over the ranks", threshold)
    return decide(len(hashes) == 1, f"{len(hashes)} hash{'es' * (len(hashes) > 1)} on {n_ranks(len(ends))}", threshold)


def steps_done(e: Evidence) -> Verdict:
    """Check that every rank has done all optimizer steps."""
    wanted = e.steps
    threshold = f"{wanted} steps"
    last = e.last("step")
    if len(last) < len(e.ranks) or not wanted:
        return not_reached(threshold)
    least = min(s["step"] for s in last.values())
    if least < wanted and e.last("error"):
        return not_reached(threshold)
    return decide(least == wanted, f"{least} steps on every rank", threshold)


def loss_aggregated(e: Evidence) -> Verdict:
    """Check that every rank logs the same loss, and that it is the sum of the ranks' parts."""
    threshold = f"equal on {n_ranks(len(e.ranks))}, and the sum of their parts within {LOSS_TOLERANCE:g}"
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
            return failed(f"step {number}: {apart}", threshold, "the ranks log different losses")
        if abs(sum(shares) - losses[0]) > LOSS_TOLERANCE * max(abs(losses[0]), 1e-12):
            return failed(f"step {number}: {losses[0]:.6g}", threshold, f"the ranks' parts add up to {sum(shares):.6g}")
    return passed(f"{len(common)} steps, last {steps[0][common[-1]]['loss']:.4f}", threshold)


def batch_product(e: Evidence) -> Verdict:
    """Check micro x ranks x accumulation = global, in the plan, in the engine's configuration, and in the ranks' batches."""
    plan = e.plan.batch
    assert plan is not None
    product = plan.micro_batch_size * len(e.ranks) * plan.grad_accum
    threshold = f"{plan.micro_batch_size} x {len(e.ranks)} x {plan.grad_accum} = {product} rows per step"
    batches = e.last("batch")
    if len(batches) < len(e.ranks):
        return not_reached(threshold)
    rows = sum(b["shape"][0] for b in batches.values()) * plan.grad_accum
    told = e.engine.get("train_batch_size", plan.global_batch_size)
    counted = _rows_a_step(e)
    seen = {"planned": plan.global_batch_size, "engine": told, "first batches": rows}
    seen |= {"trained": counted} if counted is not None else {}
    wrong = [f"{name} {n}" for name, n in seen.items() if n != product]
    return decide(not wrong, f"{rows if counted is None else counted} rows per step", threshold, ", ".join(wrong))


def _rows_a_step(e: Evidence) -> int | None:
    """Return the rows per step over all ranks, if a row counts as one token (noise); the value furthest from the plan if they differ."""
    if e.spec.data is None or e.spec.data.source != "builtin:noise":
        return None
    by_step: dict[int, int] = {}
    for steps in e.events("step").values():
        for s in steps:
            by_step[s["step"]] = by_step.get(s["step"], 0) + s["tokens"] // s.get("steps", 1)
    assert e.plan.batch is not None
    return max(by_step.values(), key=lambda n: abs(n - e.plan.batch.global_batch_size), default=None)  # type: ignore[union-attr]


def prepared_once(e: Evidence) -> Verdict:
    """Check that one rank per cache builds the data, and the others wait for it or find it: no race."""
    threshold = "built by at most one rank, read by all"
    found = {r: str(d["how"]) for r, d in e.last("data").items()}
    if len(found) < len(e.ranks):
        return not_reached(threshold)
    builders = [r for r, how in found.items() if how in ("built", "rebuilt")]
    return decide(len(builders) <= 1, f"{len(builders)} built, {len(found) - len(builders)} read", threshold)


def throughput_written(e: Evidence) -> Verdict:
    """Check that metrics.json has a throughput over all ranks."""
    threshold = "tokens_per_s in metrics.json"
    if not e.metrics:
        return not_reached(threshold)
    rate = e.metrics.get("tokens_per_s")
    if rate is None and e.metrics.get("status") != "succeeded":
        return not_reached(threshold)
    return decide(
        rate is not None and is_finite(rate) and rate > 0, f"{rate or 0:,.1f} tokens/s over all ranks", threshold
    )


def saved(e: Evidence) -> Verdict:
    """Check that every rank took part in the save, and that the published checkpoint was verified as complete."""
    size = len(e.ranks)
    threshold = f"written by {n_ranks(size)}, every file hash correct"
    began = [r for r, p in e.events("phase").items() if any(x["name"] == "save" for x in p)]
    wrote = e.last("checkpoint")
    if not began or len(e.last("start")) < size:  # another criterion reports a missing rank
        return not_reached(threshold)
    if len(began) < size:
        only = ", ".join(map(str, began))
        return failed(
            n_of(len(began), size, "ranks took part"), threshold, f"rank {only} alone called a collective save"
        )
    refused = [x for x in e.last("error").values() if x.get("type") == "CheckpointError"]
    if refused:
        return failed("not published", threshold, str(refused[0]["message"])[:300])
    if len(wrote) < size or e.step is None:
        return not_reached(threshold)
    total = sum(e.files.values())
    return decide(
        e.damage is None, f"{len(e.files)} files, {total:,} bytes, by {n_ranks(len(wrote))}", threshold, e.damage or ""
    )


def state_files(e: Evidence) -> Verdict:
    """Check that the checkpoint contains the optimizer state of every rank, and that the parts add up to the complete state."""
    threshold = f"the shards of {n_ranks(len(e.ranks))}"
    ends, model = e.last("end"), e.last("model")
    state = {name: n for name, n in e.files.items() if name.startswith("state/") and name.endswith(".safetensors")}
    if e.step is None or len(ends) < len(e.ranks):
        return not_reached(threshold)
    masters = bool(e.engine.get("bf16", {}).get("enabled"))
    element = (12 if masters else 8) * model[0][
        "parameters_trained"
    ]  # AdamW's two moments, and master weights, in float32
    found = sum(state.values())
    return decide(
        found >= element, f"{len(state)} files, {found:,} bytes of state", f"{threshold}: {element:,} bytes or more"
    )


def reloaded(e: Evidence) -> Verdict:
    """Check that a second attempt loaded it on every rank with the weights of the last step, and continued training."""
    size = len(e.ranks)
    threshold = f"loaded by {n_ranks(size)}, weights unchanged, next step done"
    resumed, proofs, steps = (e.last(kind, again=True) for kind in ("resume", "proof", "step"))
    if not e.again or len(e.last("start")) < size:
        return not_reached(threshold)
    if len(resumed) < size or len(proofs) < size or len(steps) < size:
        why = next((str(x["message"])[:200] for x in e.last("error", again=True).values()), e.message)
        return failed(n_of(len(resumed), size, "ranks loaded it"), threshold, why)
    before, after = ({x["weights_hash"] for x in found.values()} for found in (e.last("end"), proofs))
    # None: sharded; that attempt's own check compares the files' hashes on all ranks
    as_saved = len(after) == 1 and (None in before or after <= before)
    same = as_saved and {r["from_step"] for r in resumed.values()} == {w["step"] for w in e.last("checkpoint").values()}
    return decide(
        same, f"{n_ranks(len(resumed))}, after step {resumed[0]['from_step']}, loss {steps[0]['loss']:.4f}", threshold
    )


SAVE_LIMIT_S = 10.0  # the time in the notes
ARTIFACTS = ("config.json", "model.safetensors", "tokenizer.json")


def evaluation(e: Evidence) -> Verdict:
    """Check that each evaluation has the same targets, communicates once, and gives a plausible perplexity."""
    threshold = "same targets each time, 1 collective, perplexity from 1 to twice the vocabulary"
    evals = e.events("eval").get(0, [])
    data = e.last("data").get(0, {})
    if len(evals) < 2:
        return not_reached(threshold)
    targets, collectives = {x["targets"] for x in evals}, {x["collectives"] for x in evals}
    values = [x["perplexity"] for x in evals]
    fine = all(v is not None and math.isfinite(v) and 1 <= v < 2 * data["vocab_size"] for v in values)
    ok = fine and len(targets) == 1 and collectives == {1}
    shown = " -> ".join("-" if v is None else f"{v:.1f}" for v in values)
    return decide(
        ok, f"{len(evals)} times, {'/'.join(map(str, sorted(targets)))} targets, perplexity {shown}", threshold
    )


def save_is_quick(e: Evidence) -> Verdict:
    """Check that training pauses for a checkpoint no longer than for the weights-only one of the notes."""
    threshold = f"at most {SAVE_LIMIT_S:g} s"
    wrote = e.last("checkpoint")
    if len(wrote) < len(e.ranks):
        return not_reached(threshold)
    slowest = max(float(x["seconds"]) for x in wrote.values())
    return decide(slowest <= SAVE_LIMIT_S, f"{slowest:.2f} s", threshold)


def preflight(e: Evidence) -> Verdict:
    """Check that every node sees the project and the packages."""
    wanted = len(e.plan.nodes)
    threshold = f"proj=ok pkgs=ok on {wanted} nodes"
    lines = [line for line in e.preflight if "proj=" in line]
    if not lines:
        return not_reached(threshold)
    good = [line for line in lines if "proj=ok" in line and "pkgs=ok" in line]
    return decide(len(good) == wanted, f"{len(good)} of {len(lines)} nodes", threshold)


def rank_banners(e: Evidence) -> Verdict:
    """Check that every rank's log starts with its number and the world size."""
    size = len(e.ranks)
    threshold = f"[RANK 0..{size - 1}] WORLD_SIZE={size}"
    if not e.heads:
        return not_reached(threshold)
    found = [r for r, text in e.heads.items() if f"[RANK {r}] WORLD_SIZE={size} " in text]
    return decide(len(found) == size, f"{len(found)} ranks print it", threshold)


def artifacts(e: Evidence) -> Verdict:
    """Check the files that the lab's hand-out lists."""
    threshold = ", ".join(ARTIFACTS)
    if e.step is None:
        return not_reached(threshold)
    missing = [name for name in ARTIFACTS if name not in e.files]
    return decide(
        not missing, f"{len(ARTIFACTS) - len(missing)} of {len(ARTIFACTS)} exist", threshold, ", ".join(missing)
    )


CRITERIA: dict[str, tuple[str, Callable[..., Any]]] = {
    "gpu": ("GPU detected on every rank", own_gpu),
    "torch": ("One version of PyTorch", versions),
    "world": ("Ranks form one group", world),
    "nodes": ("Ranks on all nodes", nodes),
    "transport": ("", transport),
    "across": ("", partial(transport, across=True)),
    "network": ("Connections between the nodes as decided", network_matches_policy),
    "barriers": ("Barriers complete without timeout", barriers),
    "wrapper": ("", strategy_built),
    "engine": ("DeepSpeed's engine created", engine),
    "zero": ("ZeRO stage 1, optimizer state sharded", zero_stage(1)),
    "bf16": ("bfloat16 enabled and working", bf16),
    "jit": ("FusedAdam compiled, its time separate", fused_adam),
    "lora": ("LoRA: only adapters trained and published", adapters_only),
    "data": ("Each rank trains its own rows", disjoint_rows),
    "race": ("Rows prepared once, without a race", prepared_once),
    "forward": ("Forward pass on every rank", computes("forward")),
    "backward": ("Backward pass on every rank", computes("backward")),
    "sync": ("Gradients synchronised", synchronised),
    "steps": ("All training steps complete", steps_done),
    "loss": ("Loss aggregated over the ranks", loss_aggregated),
    "batch": ("Batch size product correct", batch_product),
    "metrics": ("Throughput written", throughput_written),
    "eval": ("Evaluation: same rows, one collective, plausible perplexity", evaluation),
    "save": ("Checkpoint saved by all ranks", saved),
    "quick": ("Checkpoint takes seconds, not minutes", save_is_quick),
    "state": ("Optimizer state of every rank saved", state_files),
    "artifacts": ("Model, configuration and tokenizer saved", artifacts),
    "reload": ("Checkpoint reloaded", reloaded),
    "preflight": ("Preflight: every node sees project and packages", preflight),
    "banner": ("Every rank prints its number and the world size", rank_banners),
}
"""Title and function of each criterion that tests.yaml names. With arguments, the function returns the one that judges."""
LATE = {"barriers"}


def criterion_of(entry: str | dict[str, Any]) -> Criterion:
    """Return the criterion of an entry of tests.yaml."""
    fields = {"key": entry} if isinstance(entry, str) else entry
    key = fields["key"]
    title, judge = CRITERIA[fields.get("judge", key)]
    if "args" in fields:
        judge = judge(*fields["args"])
    return Criterion(key, fields.get("title", title), judge, late=key in LATE)
