"""Criteria of the smoke tests, by the keys in tests.yaml.

Each criterion is a function of a run's records; for each, a unit test shows that it can fail. It returns what it
measured and whether that is right; `NotReached` (raised by `Evidence.every`, too) says that the run ended before it
could be measured, and `NotTestable` that this machine lacks a requirement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from allranks.lab.smoke.records import Criterion, Evidence, Measured, NotReached, NotTestable, n_ranks

CRITERIA: dict[str, Criterion] = {}
Judge = Callable[..., Measured]
LOSS_TOLERANCE = 1e-6  # relative; shares are added in another order than in the all-reduce
SAVE_LIMIT_S = 10.0  # the time in the notes
ARTIFACTS = ("config.json", "model.safetensors", "tokenizer.json")


def criterion(key: str, title: str, threshold: str, *, late: bool = False) -> Callable[[Judge], Judge]:
    """Register a function as the criterion `key`.

    Args:
        threshold: what is expected, with the words of `Evidence.words`, and ``{args}`` for the arguments in tests.yaml.
        late: it is only known at the very end, independent of its position in a list.
    """

    def register(judge: Judge) -> Judge:
        CRITERIA[key] = Criterion(key=key, title=title, threshold=threshold, judge=judge, late=late)
        return judge

    return register


def criterion_of(entry: str | dict[str, Any]) -> Criterion:
    """Return the criterion of an entry of tests.yaml."""
    fields = {"key": entry} if isinstance(entry, str) else entry
    own = {name: fields[name] for name in ("key", "title", "args") if name in fields}
    return msgspec.structs.replace(CRITERIA[fields.get("judge", fields["key"])], **own)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))


@criterion("gpu", "GPU detected on every rank", "a GPU on every rank, none shared")
def _gpu(e: Evidence) -> Measured:
    if e.plan.device != "cuda":
        raise NotTestable("no GPU here: the ranks ran on CPU cores")
    names = sorted({str(m["device"]) for m in e.every("model").values()})
    places = {(s["host"], s["local_rank"]) for s in e.every("start").values()}
    return Measured(len(places) == len(e.ranks) and "cpu" not in names, f"{len(places)} GPUs: {_listed(names)}")


@criterion("torch", "One version of PyTorch", "one version of torch on every rank")
def _torch(e: Evidence) -> Measured:
    versions = sorted({str(m["torch"]) for m in e.every("model").values()})
    return Measured(len(versions) == 1, f"{_listed(versions)} on {n_ranks(len(e.ranks))}")


@criterion("world", "Ranks form one group", "{ranks} in one group")
def _world(e: Evidence) -> Measured:
    """Judge by the proof, which is communication in the group, and not by variables."""
    size, starts, proofs = len(e.ranks), e.last("start"), e.last("proof")
    if len(proofs) == size and all(p["world_size"] == size for p in proofs.values()):
        return Measured(True, f"{n_ranks(size)}, verified at step 0")
    if missing := [r for r in e.ranks if r not in starts]:
        return Measured(False, f"{len(starts)} of {size} ranks started", f"missing: rank {_listed(missing)}")
    if message := e.error("ranks were planned"):
        return Measured(False, "another number of ranks answered", message)
    raise NotReached


@criterion("nodes", "Ranks on all nodes", "{nodes}, {ranks}")
def _nodes(e: Evidence) -> Measured:
    if len(e.plan.nodes) == 1:
        raise NotTestable("ran on one node here")
    hosts = sorted({str(s["host"]) for s in e.every("start").values()})
    return Measured(len(hosts) == len(e.plan.nodes), f"{len(hosts)} nodes ({_listed(hosts)}), {n_ranks(len(e.ranks))}")


@criterion("transport", "", "only {args} within a node")
def _transport(e: Evidence, *wanted: str, across: bool = False) -> Measured:
    """Check the channels in NCCL's log: those between nodes with `across`, else those inside a node."""
    if e.plan.procs_per_node == 1 and (not across or len(e.plan.nodes) == 1):
        raise NotTestable("a node with one rank opens no channel within")
    one_node = len(e.plan.nodes) == 1
    ways = {way: n for way, n in e.channels.items() if one_node or way.startswith("NET") == across}
    if not ways and e.plan.backend != "nccl":
        raise NotTestable("no NCCL here: the ranks used gloo, whose log contains no transport")
    if not ways:
        raise NotReached
    other = [way for way in ways if not way.startswith(wanted)]
    shown = _listed(f"{count} x {way}" for way, count in sorted(ways.items()))
    return Measured(not other, shown, f"{_listed(other)} was not expected" if other else "")


criterion("across", "", "only {args} between nodes")(partial(_transport, across=True))


@criterion("network", "Connections between the nodes as decided", "on each node the chosen network")
def _network(e: Evidence) -> Measured:
    """Compare with the network chosen for each node before the start: NCCL's network, gloo's interface."""
    seen = e.metrics.get("network") or {}
    if not e.metrics:
        raise NotReached
    if not seen.get("line"):
        raise NotTestable("no rank log and no connection shows it")
    bad = [f"{f['host']}: {f['text']}" for f in seen.get("findings", []) if f.get("level") == "bad"]
    return Measured(bool(seen.get("ok")), str(seen["line"]), "; ".join(bad)[:300])


@criterion("barriers", "Barriers complete without timeout", "{ranks} passed the last barrier, no timeout", late=True)
def _barriers(e: Evidence) -> Measured:
    message = e.error("timeout")
    if message and "checkpoint" not in message:  # which is the fault of the save
        return Measured(False, "a collective timed out", message)
    if len(done := e.in_phase("done")) < len(e.ranks):
        raise NotReached
    return Measured(True, f"{n_ranks(len(done))}, no timeout")


@criterion("wrapper", "", "{args} on {ranks}")
def _wrapper(e: Evidence, strategy: str) -> Measured:
    if e.plan.strategy != strategy:
        return Measured(False, e.plan.strategy)
    if len(ready := e.in_phase("prove")) < len(e.ranks):
        raise NotReached
    return Measured(True, f"{strategy} on {len(ready)}")


@criterion("zero", "ZeRO stage 1, optimizer state sharded", "stage 1; each of {ranks} holds 1/{size} of the state")
def _zero(e: Evidence) -> Measured:
    held = [end["state_elements"] for end in e.every("end").values()]
    if not e.engine:
        raise NotReached
    stage = e.engine.get("zero_optimization", {}).get("stage")
    total = e.last("model")[0]["parameters_trained"]
    share = max(held) / total
    ok = stage == 1 and sum(held) == total and share < 1.05 / len(e.ranks)
    return Measured(ok, f"stage {stage}; at most {share:.3f} per rank")


@criterion("engine", "DeepSpeed's engine created", "DeepSpeed's engine on {ranks}")
def _engine(e: Evidence) -> Measured:
    names = sorted({f"{x['engine']} {x['version']}" for x in e.every("engine").values()})
    return Measured(len(names) == 1, f"{_listed(names)} on {len(e.ranks)}")


@criterion("bf16", "bfloat16 enabled and working", "weights bfloat16, inputs bfloat16")
def _bf16(e: Evidence) -> Measured:
    if not (batches := e.last("batch")):
        raise NotReached
    weights = sorted({w for b in batches.values() for w in b["weights"]})
    inputs = sorted({b["dtype"] for b in batches.values()})
    wanted = ["bfloat16"]
    why = "" if inputs == wanted else "layers need inputs with the dtype of their weights"
    return Measured(weights == wanted == inputs, f"weights {_listed(weights)}, inputs {_listed(inputs)}", why)


@criterion("jit", "FusedAdam compiled, its time separate", "FusedAdam, compiled outside of the steps")
def _jit(e: Evidence) -> Measured:
    """Check that DeepSpeed compiled its fused optimizer, if the spec names it."""
    if e.plan.device != "cuda":
        raise NotTestable("FusedAdam is a CUDA kernel; here torch's AdamW runs inside DeepSpeed")
    if e.engine and "optimizer" not in e.engine:
        raise NotTestable("no nvcc was found to compile it: torch's fused AdamW runs inside DeepSpeed")
    engine = e.last("engine").get(0, {})
    if "optimizer" not in engine:
        raise NotReached
    optimizer = engine["optimizer"]
    return Measured(optimizer == "FusedAdam", f"{optimizer}, started in {engine['initialize_s']:.1f} s")


@criterion(
    "lora",
    "LoRA: only adapters trained and published",
    "less than 10 % trained; adapter_model.safetensors and no other file published",
)
def _lora(e: Evidence) -> Measured:
    model = e.last("model").get(0)
    if not model or e.step is None:
        raise NotReached
    share = model["parameters_trained"] / model["parameters"]
    published = [n for n in e.files if n.endswith(".safetensors") and "/" not in n]
    ok = share < 0.1 and published == ["adapter_model.safetensors"]
    return Measured(ok, f"{share:.2%} trained; {_listed(published)}")


@criterion("data", "Each rank trains its own rows", "rows disjoint and complete over {ranks}")
def _data(e: Evidence) -> Measured:
    proofs = list(e.every("proof").values())
    return Measured(all(p["data_disjoint"] for p in proofs), f"{proofs[0]['rows_checked']:,} rows checked")


def _computes(e: Evidence, on_gpu: str, on_cpu: str) -> Measured:
    """Check that a part of a step ran on every rank, by a figure that only it gives, and with a finite loss.

    The parts have times on a CPU only. On a GPU a loss shows a forward pass, and a norm of gradients a backward pass.
    """
    sign = on_gpu if e.plan.device == "cuda" else on_cpu
    steps = e.events("step")
    ran = [r for r, s in steps.items() if any(_is_finite(x.get(sign)) and x[sign] > 0 for x in s)]
    if message := e.error("not finite"):
        return Measured(False, "a loss that is not finite", message)
    if len(ran) < len(e.ranks):
        raise NotReached
    return Measured(all(_is_finite(x["loss"]) for s in steps.values() for x in s), f"on {n_ranks(len(ran))}")


for _name, _signs in {"forward": ("loss", "forward_s"), "backward": ("grad_norm", "backward_s")}.items():
    criterion(_name, f"{_name.capitalize()} pass on every rank", "on {ranks}, loss finite")(
        partial(_computes, on_gpu=_signs[0], on_cpu=_signs[1])
    )


@criterion("sync", "Gradients synchronised", "one hash of the weights on {ranks} after the last step")
def _sync(e: Evidence) -> Measured:
    hashes = {end["weights_hash"] for end in e.every("end").values()}
    if hashes == {None}:
        return Measured(True, "each weight exists once, sharded over the ranks")
    return Measured(len(hashes) == 1, f"{len(hashes)} hash{'es' * (len(hashes) > 1)} on {n_ranks(len(e.ranks))}")


@criterion("steps", "All training steps complete", "{steps} steps")
def _steps(e: Evidence) -> Measured:
    least = min(s["step"] for s in e.every("step").values())
    if not e.steps or (least < e.steps and e.last("error")):
        raise NotReached
    return Measured(least == e.steps, f"{least} steps on every rank")


@criterion(
    "loss",
    "Loss aggregated over the ranks",
    f"equal on {{ranks}}, and the sum of their parts within {LOSS_TOLERANCE:g}",
)
def _loss(e: Evidence) -> Measured:
    e.every("step")
    steps = {r: {x["step"]: x for x in s} for r, s in e.events("step").items()}
    common = sorted(set.intersection(*(set(s) for s in steps.values())))
    for number in common:
        losses = [s[number]["loss"] for s in steps.values()]
        shares = [s[number]["loss_share"] for s in steps.values()]
        if not all(map(_is_finite, [*losses, *shares])):
            raise NotReached
        if len(set(losses)) > 1:
            apart = f"step {number}: {min(losses):.6g} to {max(losses):.6g}"
            return Measured(False, apart, "the ranks log different losses")
        if abs(sum(shares) - losses[0]) > LOSS_TOLERANCE * max(abs(losses[0]), 1e-12):
            why = f"the ranks' parts add up to {sum(shares):.6g}"
            return Measured(False, f"step {number}: {losses[0]:.6g}", why)
    if not common:
        raise NotReached
    return Measured(True, f"{len(common)} steps, last {steps[0][common[-1]]['loss']:.4f}")


@criterion("batch", "Batch size product correct", "{batch} rows per step")
def _batch(e: Evidence) -> Measured:
    """Check micro x ranks x accumulation = global, in the plan, the engine's configuration, and the ranks' batches."""
    plan = e.plan.batch
    assert plan is not None
    product = plan.micro_batch_size * len(e.ranks) * plan.grad_accum
    rows = sum(b["shape"][0] for b in e.every("batch").values()) * plan.grad_accum
    engines = e.engine.get("train_batch_size", plan.global_batch_size)
    seen = {"planned": plan.global_batch_size, "engine": engines, "first batches": rows}
    if e.spec.data is not None and e.spec.data.source == "builtin:noise":  # where a row counts as one token
        by_step: Counter[int] = Counter()
        for step in (s for steps in e.events("step").values() for s in steps):
            by_step[step["step"]] += step["tokens"] // step.get("steps", 1)
        if by_step:
            seen["trained"] = max(by_step.values(), key=lambda n: abs(n - plan.global_batch_size))
    wrong = [f"{name} {n}" for name, n in seen.items() if n != product]
    return Measured(not wrong, f"{seen.get('trained', rows)} rows per step", _listed(wrong))


@criterion("race", "Rows prepared once, without a race", "built by at most one rank, read by all")
def _race(e: Evidence) -> Measured:
    built = sum(d["how"] in ("built", "rebuilt") for d in e.every("data").values())
    return Measured(built <= 1, f"{built} built, {len(e.ranks) - built} read")


@criterion("metrics", "Throughput written", "tokens_per_s in metrics.json")
def _metrics(e: Evidence) -> Measured:
    rate = e.metrics.get("tokens_per_s")
    if not e.metrics or (rate is None and e.metrics.get("status") != "succeeded"):
        raise NotReached
    rate = rate or 0.0
    return Measured(_is_finite(rate) and rate > 0, f"{rate:,.1f} tokens/s over all ranks")


@criterion("save", "Checkpoint saved by all ranks", "written by {ranks}, every file hash correct")
def _save(e: Evidence) -> Measured:
    began, size = e.in_phase("save"), len(e.ranks)
    if not began or len(e.last("start")) < size:  # another criterion reports a missing rank
        raise NotReached
    if len(began) < size:
        only = f"rank {_listed(began)} alone called a collective save"
        return Measured(False, f"{len(began)} of {size} ranks took part", only)
    if message := e.error("", kind="CheckpointError"):
        return Measured(False, "not published", message)
    wrote, total = e.every("checkpoint"), sum(e.files.values())
    if e.step is None:
        raise NotReached
    shown = f"{len(e.files)} files, {total:,} bytes, by {n_ranks(len(wrote))}"
    return Measured(e.damage is None, shown, e.damage or "")


@criterion("state", "Optimizer state of every rank saved", "the complete state, in the shards of {ranks}")
def _state(e: Evidence) -> Measured:
    state = [n for name, n in e.files.items() if name.startswith("state/") and name.endswith(".safetensors")]
    e.every("end")
    if e.step is None:
        raise NotReached
    # AdamW's two moments, and master weights, in float32
    element_bytes = 12 if e.engine.get("bf16", {}).get("enabled") else 8
    least = element_bytes * e.last("model")[0]["parameters_trained"]
    shown = f"{len(state)} files, {sum(state):,} bytes of state, which has {least:,} or more"
    return Measured(sum(state) >= least, shown)


@criterion("reload", "Checkpoint reloaded", "loaded by {ranks}, weights unchanged, next step done")
def _reload(e: Evidence) -> Measured:
    """Check that a second attempt loaded it on every rank with the weights of the last step, and continued training."""
    size = len(e.ranks)
    resumed, proofs, steps = (e.last(kind, again=True) for kind in ("resume", "proof", "step"))
    if not e.again or len(e.last("start")) < size:
        raise NotReached
    if min(map(len, (resumed, proofs, steps))) < size:
        return Measured(False, f"{len(resumed)} of {size} ranks loaded it", e.error("", again=True) or e.message)
    before, after = ({x["weights_hash"] for x in events.values()} for events in (e.last("end"), proofs))
    # None: sharded; that attempt's own check compares the files' hashes on all ranks
    as_saved = len(after) == 1 and (None in before or after <= before)
    same = as_saved and {r["from_step"] for r in resumed.values()} == {w["step"] for w in e.last("checkpoint").values()}
    return Measured(same, f"{n_ranks(len(resumed))}, after step {resumed[0]['from_step']}, loss {steps[0]['loss']:.4f}")


@criterion(
    "eval",
    "Evaluation: same rows, one collective, plausible perplexity",
    "same targets each time, 1 collective, perplexity from 1 to twice the vocabulary",
)
def _eval(e: Evidence) -> Measured:
    evals = e.events("eval").get(0, [])
    if len(evals) < 2:
        raise NotReached
    targets, collectives = {x["targets"] for x in evals}, {x["collectives"] for x in evals}
    values, limit = [x["perplexity"] for x in evals], 2 * e.last("data")[0]["vocab_size"]
    fine = all(_is_finite(v) and 1 <= v < limit for v in values)
    shown = " -> ".join("-" if v is None else f"{v:.1f}" for v in values)
    counted = f"{len(evals)} times, {'/'.join(map(str, sorted(targets)))} targets"
    return Measured(fine and len(targets) == 1 and collectives == {1}, f"{counted}, perplexity {shown}")


@criterion("quick", "Checkpoint takes seconds, not minutes", f"at most {SAVE_LIMIT_S:g} s")
def _quick(e: Evidence) -> Measured:
    slowest = max(float(x["seconds"]) for x in e.every("checkpoint").values())
    return Measured(slowest <= SAVE_LIMIT_S, f"{slowest:.2f} s")


@criterion("preflight", "Preflight: every node sees project and packages", "proj=ok pkgs=ok on {nodes}")
def _preflight(e: Evidence) -> Measured:
    lines = [line for line in e.preflight if "proj=" in line]
    if not lines:
        raise NotReached
    good = [line for line in lines if "proj=ok" in line and "pkgs=ok" in line]
    return Measured(len(good) == len(e.plan.nodes), f"{len(good)} of {len(lines)} nodes")


@criterion("banner", "Every rank prints its number and the world size", "[RANK 0..{last}] WORLD_SIZE={size}")
def _banner(e: Evidence) -> Measured:
    if not e.heads:
        raise NotReached
    ranks = [r for r, text in e.heads.items() if f"[RANK {r}] WORLD_SIZE={len(e.ranks)} " in text]
    return Measured(len(ranks) == len(e.ranks), f"{len(ranks)} ranks print it")


@criterion("artifacts", "Model, configuration and tokenizer saved", ", ".join(ARTIFACTS))
def _artifacts(e: Evidence) -> Measured:
    if e.step is None:
        raise NotReached
    missing = [name for name in ARTIFACTS if name not in e.files]
    return Measured(not missing, f"{len(ARTIFACTS) - len(missing)} of {len(ARTIFACTS)} exist", _listed(missing))
