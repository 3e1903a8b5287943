"""Records of smoke tests, criteria and results; the evidence of a run, which is its folder read once; evaluation of
criteria on it.

Criteria are functions of this evidence alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from allranks.nodes.network.traffic import verify_network
from allranks.planning.records import LaunchPlan, load_plan
from allranks.rundir.checkpoints import MANIFEST, find_damage
from allranks.rundir.events import read_run_events
from allranks.rundir.files import read_record
from allranks.rundir.paths import RunDir
from allranks.spec import load_spec
from allranks.spec.records import RunSpec
from allranks.utils.inputs import open_regular
from allranks.utils.machine import MachineFacts

Event = dict[str, Any]
HEAD_BYTES = 65_536


class NotReached(Exception):
    """The run ended before a criterion could be checked."""


class NotTestable(Exception):
    """This machine lacks a requirement of a criterion, which the message names."""


def n_ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One run and its reload.

    Attributes:
        first: events of each rank in the first attempt; ``again`` those of the attempt that resumed from its
        checkpoint.
        files: of the newest checkpoint, by name: bytes. ``damage``: its damage, if any.
        ways: NCCL's channels by transport (SHM, P2P, NET/IB, ...), by host; empty without NCCL.
        heads: the first lines of each rank's log.
    """

    spec: RunSpec
    plan: LaunchPlan
    metrics: dict[str, Any]
    first: dict[int, list[Event]]
    again: dict[int, list[Event]]
    step: int | None
    files: dict[str, int]
    damage: str | None
    engine: dict[str, Any]
    ways: dict[str, dict[str, int]]
    heads: dict[int, str]
    preflight: list[str]
    message: str

    @property
    def ranks(self) -> list[int]:
        """Return the planned ranks."""
        return list(range(self.plan.world_size))

    def events(self, kind: str, *, again: bool = False) -> dict[int, list[Event]]:
        """Return the events of a kind by rank, without ranks that have none."""
        story = self.again if again else self.first
        by_rank = {rank: [e for e in events if e["event"] == kind] for rank, events in story.items()}
        return {rank: events for rank, events in by_rank.items() if events}

    def last(self, kind: str, *, again: bool = False) -> dict[int, Event]:
        """Return the last event of a kind by rank."""
        return {rank: events[-1] for rank, events in self.events(kind, again=again).items()}

    def every(self, kind: str) -> dict[int, Event]:
        """Return the last event of a kind of every rank; raise `NotReached` if a rank has none."""
        events = self.last(kind)
        if len(events) < len(self.ranks):
            raise NotReached
        return events

    def in_phase(self, name: str) -> list[int]:
        """Return the ranks that have reached a phase."""
        return [rank for rank, phases in self.events("phase").items() if any(x["name"] == name for x in phases)]

    def error(self, words: str, *, kind: str | None = None, again: bool = False) -> str:
        """Return the first error of a rank (of this type) whose message contains these words; empty if there is
        none."""
        for event in self.last("error", again=again).values():
            message = str(event["message"])
            if words in message.lower() and kind in (None, event.get("type")):
                return message[:300]
        return ""

    @property
    def channels(self) -> Counter[str]:
        """Return NCCL's channels on all hosts, by transport."""
        return sum(map(Counter, self.ways.values()), Counter())

    @property
    def words(self) -> dict[str, object]:
        """Return the words of thresholds."""
        size, nodes, batch = len(self.ranks), len(self.plan.nodes), self.plan.batch
        parts = (batch.micro_batch_size, size, batch.grad_accum) if batch else ()
        return {
            "ranks": n_ranks(size),
            "size": size,
            "last": size - 1,
            "nodes": f"{nodes} node{'s' * (nodes != 1)}",
            "steps": self.steps,
            "batch": f"{' x '.join(map(str, parts))} = {math.prod(parts)}",
        }

    @property
    def steps(self) -> int:
        """Return the planned optimizer steps of the first attempt; the plan may contain those of the reload."""
        phases = [e for e in self.first.get(0, []) if e["event"] == "phase" and "total_steps" in e]
        return int(phases[0]["total_steps"]) if phases else self.plan.max_steps or 0

    @property
    def step_times_s(self) -> list[float]:
        """Return the time of every step of rank 0, including the first."""
        return [t for e in self.events("step").get(0, []) for t in (e.get("step_times_s") or [e["step_time_s"]])]


def read_evidence(run: RunDir, message: str = "") -> Evidence:
    """Read a run's folder; the run may have ended at any point."""
    first, again = {}, {}
    for rank, events in read_run_events(run).items():
        starts = [i for i, e in enumerate(events) if e["event"] == "start"]
        cut = starts[1] if len(starts) > 1 else len(events)
        first[rank], again[rank] = events[:cut], events[cut:]
    steps = run.checkpoint_steps()
    folder = run.checkpoint(steps[-1]) if steps else None
    files = read_record(folder / MANIFEST).get("files", {}) if folder else {}
    seen = verify_network(run, 1)
    return Evidence(
        spec=load_spec(run.spec),
        plan=load_plan(run),
        metrics=read_record(run.metrics),
        first=first,
        again={rank: events for rank, events in again.items() if events},
        step=steps[-1] if steps else None,
        files={name: int(facts["bytes"]) for name, facts in files.items()},
        damage=find_damage(folder) if folder else None,
        engine=read_record(run.engine_config),
        ways={item.host: item.ways for item in seen.observed if item.ways} if seen else {},
        heads={rank: _first_bytes(path) for rank, path in run.rank_logs(1).items()},
        preflight=run.preflight_text.read_text().splitlines() if run.preflight_text.exists() else [],
        message=message,
    )


def _first_bytes(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(HEAD_BYTES).decode(errors="replace")


PlaceName = Literal["local", "slurm", "cluster"]
Scale = Literal["fit", "seed", "tiny"]
PASSED, FAILED, NOT_REACHED, NOT_TESTABLE = "passed", "failed", "not reached", "not testable"


class Measured(NamedTuple):
    """What a criterion measured, as text with units, and whether it is right; if not, `why` may explain it."""

    ok: bool
    text: str
    why: str = ""


class Criterion(msgspec.Struct, frozen=True, kw_only=True):
    """One criterion of a test. ``judge`` is a pure function of the run folder's records.

    ``late``: it is only known at the very end, independent of its position in the list.
    """

    key: str
    title: str
    threshold: str
    judge: Callable[..., Measured]
    args: list[str] = []
    late: bool = False


class CriterionResult(msgspec.Struct, frozen=True, kw_only=True):
    """A criterion with its result (a mark of `report.MARKS`): the measured value and its threshold, with units."""

    key: str
    title: str
    state: str
    measured: str
    threshold: str
    why: str = ""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The place for which a test's spec is built: its ``nodes``, ``ranks`` (per node); ``gpu``: ranks run on GPUs."""

    machine: MachineFacts
    place: PlaceName
    scale: Scale
    nodes: int
    ranks: int
    gpu: bool

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    @property
    def text(self) -> str:
        return f"{n_ranks(self.world)} on {self.nodes} node{'s' * (self.nodes > 1)}"


class FigureRow(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the notes and the measured one. ``not_comparable`` is empty if they are comparable, else the reason.

    ``correct``: the correct value, if the notes compute it wrongly; ``correction`` says why.
    """

    name: str
    unit: str
    definition: str
    seed: float | None
    correct: float | None = None
    correction: str = ""
    ours: float | None
    not_comparable: str


class SmokeTest(msgspec.Struct, frozen=True, kw_only=True):
    """One smoke test of tests.yaml. ``nodes`` and ``ranks`` (per node) are those of the notes; ``run`` names its runs.

    ``min_nodes``: with fewer nodes it is not run, unless it is useful on one node with a GPU (``one_gpu_node``);
    ``cpu_ranks``: ranks of a node without GPUs.
    """

    name: str
    run: str
    title: str
    source: str
    hardware: str
    nodes: int
    ranks: int
    spec: dict[str, Any]
    criteria: tuple[Criterion, ...]
    figures: dict[str, Any]
    min_nodes: int = 1
    cpu_ranks: int = 2
    parameters: int | None = None
    mlp: dict[str, Any] | None = None
    variants: list[dict[str, Any]] = []
    one_gpu_node: bool = False


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one test. ``status``: passed | failed | not run."""

    name: str
    title: str
    source: str
    status: str
    message: str
    seconds: float = 0.0
    folder: str | None = None
    setting: str
    hardware: str
    seed_hardware: str
    scaled: list[str]
    untested: list[str]
    criteria: list[CriterionResult] = []
    figures: list[FigureRow] = []
    path: str = ""


class SmokeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of all tests."""

    name: str
    place: str
    scale: str
    started: str
    seconds: float
    machine: dict[str, Any]
    versions: dict[str, str]
    tests: list[TestResult]

    @property
    def failed(self) -> bool:
        return any(test.status == "failed" for test in self.tests)

    @property
    def ran(self) -> bool:
        return any(test.status != "not run" for test in self.tests)


def evaluate_criteria(criteria: tuple[Criterion, ...], evidence: Evidence) -> list[CriterionResult]:
    """Evaluate criteria in order. Only those that the records contradict fail.

    If a run ended early and no failed criterion explains it, the first criterion that was not reached fails with the
    run's message; later ones stay undecided.
    """
    results = [_evaluate(criterion, evidence) for criterion in criteria]
    left = [i for i, result in enumerate(results) if result.state == NOT_REACHED]
    if evidence.message and left and not any(result.state == FAILED for result in results):
        first = min(left, key=lambda i: (criteria[i].late, i))
        early = {"state": FAILED, "measured": "the run ended early", "why": evidence.message}
        results[first] = msgspec.structs.replace(results[first], **early)
    return results


def _evaluate(criterion: Criterion, evidence: Evidence) -> CriterionResult:
    state, measured, why = NOT_REACHED, "-", ""
    try:
        ok, measured, why = criterion.judge(evidence, *criterion.args)
        state = PASSED if ok else FAILED
    except NotTestable as error:
        state, why = NOT_TESTABLE, str(error)
    except NotReached:
        pass
    threshold = criterion.threshold.format(**evidence.words, args=" or ".join(criterion.args))
    known = {"key": criterion.key, "title": criterion.title, "threshold": threshold}
    return CriterionResult(**known, state=state, measured=measured, why=why)
