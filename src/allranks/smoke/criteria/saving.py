"""Checkpoints: written by all, whole, and gone on from."""

from __future__ import annotations

from allranks.smoke.criteria.wording import n_of, n_ranks
from allranks.smoke.evidence import Evidence
from allranks.smoke.judging import decide, failed, not_reached
from allranks.smoke.records import Judgement


def saved(e: Evidence) -> Judgement:
    """Every rank took part in the save, and what was published is whole after it was read again."""
    size = len(e.ranks)
    threshold = f"written by {n_ranks(size)}, every file's hash right"
    began = [r for r, p in e.events("phase").items() if any(x["name"] == "save" for x in p)]
    wrote = e.last("checkpoint")
    if not began or len(e.last("start")) < size:  # a rank that is not there is told of elsewhere
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


def state_files(e: Evidence) -> Judgement:
    """The optimizer's state of every rank is in the checkpoint: the ranks' parts add up to the whole."""
    threshold = f"the parts of {n_ranks(len(e.ranks))}"
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


def reloaded(e: Evidence) -> Judgement:
    """A second attempt loaded it on every rank; its weights are those after the last step, and training goes on."""
    size = len(e.ranks)
    threshold = f"loaded by {n_ranks(size)}, weights as they were, next step done"
    resumed, proofs, steps = (e.last(kind, again=True) for kind in ("resume", "proof", "step"))
    if not e.again or len(e.last("start")) < size:
        return not_reached(threshold)
    if len(resumed) < size or len(proofs) < size or len(steps) < size:
        why = next((str(x["message"])[:200] for x in e.last("error", again=True).values()), e.message)
        return failed(n_of(len(resumed), size, "ranks loaded it"), threshold, why)
    before, after = ({x["weights_hash"] for x in found.values()} for found in (e.last("end"), proofs))
    # None: parts, for which the proof of that attempt compares the files' hashes on all ranks
    as_saved = len(after) == 1 and (None in before or after <= before)
    same = as_saved and {r["from_step"] for r in resumed.values()} == {w["step"] for w in e.last("checkpoint").values()}
    return decide(
        same, f"{n_ranks(len(resumed))}, after step {resumed[0]['from_step']}, loss {steps[0]['loss']:.4f}", threshold
    )
