"""Ranks that come together: devices, versions, one group, the way they talk."""

from __future__ import annotations

from collections.abc import Callable

from allranks.smoke.criteria.wording import n_of, n_ranks
from allranks.smoke.evidence import Evidence
from allranks.smoke.judging import decide, failed, not_reached, not_testable, passed
from allranks.smoke.records import Judgement

NO_GPU = "no GPU here: the ranks ran on CPU cores"
NO_NCCL = "no NCCL here: the ranks talked over gloo, whose log names no transport"


def accelerator(e: Evidence) -> Judgement:
    """Every rank names the GPU it trains on, and no two of a node have the same."""
    threshold = "a GPU on every rank, each its own"
    if e.plan.device != "cuda":
        return not_testable(threshold, NO_GPU)
    models, starts = e.last("model"), e.last("start")
    if len(models) < len(e.ranks):
        return not_reached(threshold)
    places = {(starts[r]["host"], starts[r]["local_rank"]) for r in models if r in starts}
    names = sorted({str(m["device"]) for m in models.values()})
    ok = len(places) == len(e.ranks) and "cpu" not in names
    return decide(ok, f"{len(places)} GPUs: {', '.join(names)}", threshold)


def versions(e: Evidence) -> Judgement:
    """All ranks import one version of torch."""
    threshold = "one version of torch on every rank"
    models = e.last("model")
    if len(models) < len(e.ranks):
        return not_reached(threshold)
    found = sorted({str(m["torch"]) for m in models.values()})
    return decide(len(found) == 1, f"{', '.join(found)} on {n_of(len(models), len(e.ranks), 'ranks')}", threshold)


def world(e: Evidence) -> Judgement:
    """As many ranks as planned are one group: shown over the group itself, not read from variables."""
    size = len(e.ranks)
    threshold = f"{n_ranks(size)} in one group"
    starts, proofs = e.last("start"), e.last("proof")
    if len(proofs) == size and all(p["world_size"] == size for p in proofs.values()):
        return passed(f"{n_ranks(size)}, proved at step 0", threshold)
    if missing := [r for r in e.ranks if r not in starts]:
        return failed(
            n_of(len(starts), size, "ranks began"), threshold, f"missing: rank {', '.join(map(str, missing))}"
        )
    said = [str(x["message"]) for x in e.last("error").values() if "ranks were planned" in str(x["message"])]
    if said:
        return failed("another number of ranks answered", threshold, said[0])
    return not_reached(threshold)


def nodes(e: Evidence) -> Judgement:
    """Ranks ran on as many hosts as planned."""
    wanted = len(e.plan.nodes)
    if wanted == 1:
        return not_testable("several nodes", "run on one node here")
    threshold = f"{wanted} nodes, {n_ranks(len(e.ranks))}"
    starts = e.last("start")
    if len(starts) < len(e.ranks):
        return not_reached(threshold)
    hosts = sorted({str(s["host"]) for s in starts.values()})
    return decide(len(hosts) == wanted, f"{len(hosts)} nodes ({', '.join(hosts)}), {n_ranks(len(starts))}", threshold)


def transport(*wanted: str, across: bool = False) -> Callable[[Evidence], Judgement]:
    """NCCL's own log: every channel goes one of these ways. `across`: only the ways between nodes count, else those within."""

    def judge(e: Evidence) -> Judgement:
        where = "between nodes" if across else "within a node"
        threshold = f"only {' or '.join(wanted)} {where}"
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


def as_decided(e: Evidence) -> Judgement:
    """Between nodes the ranks talk over what was decided for each node before they started: NCCL's network, gloo's interface."""
    threshold = "on each node what was decided for it"
    seen = e.metrics.get("network") or {}
    if not seen.get("line"):
        return not_testable(threshold, "no rank's log and no connection tells") if e.metrics else not_reached(threshold)
    bad = [f"{f['host']}: {f['text']}" for f in seen.get("findings", []) if f.get("level") == "bad"]
    return decide(bool(seen.get("ok")), str(seen["line"]), threshold, "; ".join(bad)[:300])


def barriers(e: Evidence) -> Judgement:
    """All collectives came back in time; the last barrier is behind every rank's ``done``."""
    threshold = f"{n_ranks(len(e.ranks))} past the last barrier, no timeout"
    late = [
        x
        for x in e.last("error").values()
        if "timeout" in str(x["message"]).lower() and "checkpoint" not in str(x["message"])
    ]
    done = [r for r, p in e.events("phase").items() if any(x["name"] == "done" for x in p)]
    if late:
        return failed(f"rank {late[0]['rank']} waited in vain", threshold, str(late[0]["message"])[:200])
    return (
        passed(f"{n_ranks(len(done))}, no timeout", threshold) if len(done) == len(e.ranks) else not_reached(threshold)
    )
