"""Run smoke tests one after another, on this machine, through Slurm, or in a cluster in a box.

Each test is run through `launch.runs`, as any other run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import msgspec

from allranks.errors import AllranksError, EnvironmentNotAble
from allranks.lab.smoke.figures import figure_rows
from allranks.lab.smoke.records import (
    FAILED,
    NOT_REACHED,
    NOT_TESTABLE,
    CriterionResult,
    Evidence,
    Placement,
    PlaceName,
    Scale,
    SmokeReport,
    SmokeTest,
    TestResult,
    evaluate_criteria,
    read_evidence,
)
from allranks.lab.smoke.sizes import build_spec
from allranks.launch import runs
from allranks.launch.outcome import RunResult
from allranks.launch.preview import prepare
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec, parse_spec
from allranks.utils.machine import MachineFacts


def placement_of(
    test: SmokeTest, place: PlaceName, scale: Scale, machine: MachineFacts, *, gpu: bool
) -> Placement | str:
    """Return the size of the test in that place, or why it cannot be run there. Pure."""
    if place == "local":
        if test.min_nodes > 1 and not (gpu and test.one_gpu_node):
            return f"needs {test.min_nodes} nodes: run it with --on slurm, or on this machine with --on cluster"
        ranks = min(test.ranks, len(machine.gpus)) if gpu else test.cpu_ranks
        return Placement(machine=machine, place=place, scale=scale, nodes=1, ranks=ranks, gpu=gpu)
    on_gpu = gpu and test.name != "08_cpu_lab"
    ranks = test.ranks if on_gpu else test.cpu_ranks
    return Placement(machine=machine, place=place, scale=scale, nodes=test.nodes, ranks=ranks, gpu=on_gpu)


def world_size_note(test: SmokeTest, placement: Placement) -> list[str]:
    """Return a sentence if there are fewer ranks than in the notes."""
    wanted = test.nodes * test.ranks
    if placement.world == wanted:
        return []
    why = "no GPU here" if not placement.gpu else f"{len(placement.machine.gpus)} GPUs here"
    return [
        f"{placement.world} rank{'s' * (placement.world > 1)} on {placement.nodes} node{'s' * (placement.nodes > 1)} "
        f"instead of {wanted} on {test.nodes}; {why}"
    ]


@contextmanager
def cluster_for_tests(place: PlaceName, nodes: int, say: Callable[[str], None]) -> Iterator[None]:
    """Provide the box: use the running one if it has enough nodes, else start one and remove it at the end.

    Raises:
        EnvironmentNotAble, RequestError: a box cannot run here.
    """
    if place != "cluster":
        yield
        return
    from allranks.lab.cluster import BoxOptions, down, find_box, up
    from allranks.nodes.slurm.endpoints import NAME_VARIABLE

    box = find_box()
    if box is not None and len(box.node_names) >= nodes:
        say(f"using the running cluster in a box {box.name!r}")
        yield
        return
    if box is not None:
        say(f"the running box {box.name!r} has too few nodes ({len(box.node_names)}) and is not used")
    say(f"starting a cluster in a box with {nodes} nodes")
    box = up(BoxOptions(name=f"smoke-{os.getpid()}", nodes=nodes))
    before = os.environ.get(NAME_VARIABLE)
    os.environ[NAME_VARIABLE] = box.name
    try:
        yield
    finally:
        os.environ.pop(NAME_VARIABLE, None)
        if before is not None:
            os.environ[NAME_VARIABLE] = before
        down(box.name)


PACKAGES = ("allranks", "torch", "transformers", "peft", "deepspeed")


class SmokeObserver(Protocol):
    """Callbacks for the progress of smoke tests."""

    def event(self, event: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def begin(self, test: SmokeTest, setting: str, scaled: list[str]) -> None:
        """Report the start of a test."""
        ...

    def judged(self, criterion: CriterionResult) -> None:
        """Report the result of a criterion."""
        ...

    def end(self, result: TestResult) -> None:
        """Report the end of a test."""
        ...


class PreparedTest(msgspec.Struct, frozen=True, kw_only=True):
    """A test prepared for a place; ``unable`` says why it cannot be run there."""

    test: SmokeTest
    spec: RunSpec | None
    asked: Placement | None
    scaled: list[str]
    unable: str = ""


class SmokeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the user."""

    place: PlaceName = "local"
    scale: Scale = "fit"
    sets: tuple[str, ...] = ()
    run_root: str = "runs"

    def gpu(self, machine: MachineFacts) -> bool:
        """Return whether ranks use GPUs: those of this machine; under Slurm unless the device is set to CPU; never in
        the box."""
        devices = [s.partition("=")[2].strip() for s in self.sets if s.startswith("cluster.device=")]
        if devices:
            return devices[-1] == "cuda"
        return self.place == "slurm" or (self.place == "local" and bool(machine.gpus))


def prepare_test(test: SmokeTest, wanted: SmokeOptions, machine: MachineFacts) -> PreparedTest:
    """Return the test's spec for a place, with the user's settings. Pure.

    Raises:
        SpecError: a setting contradicts the test.
    """
    placement = placement_of(test, wanted.place, wanted.scale, machine, gpu=wanted.gpu(machine))
    if isinstance(placement, str):
        return PreparedTest(test=test, spec=None, asked=None, scaled=[], unable=placement)
    values, scaled = build_spec(test, placement)
    model = {"compile": False, **values.get("model", {})}  # short, and compared with figures of uncompiled runs
    spec = parse_spec({**values, "model": model, "run_root": wanted.run_root}, wanted.sets)
    return PreparedTest(test=test, spec=spec, asked=placement, scaled=[*world_size_note(test, placement), *scaled])


def run_tests(
    tests: Sequence[SmokeTest], wanted: SmokeOptions, machine: MachineFacts, watcher: SmokeObserver
) -> SmokeReport:
    """Run all tests in order; a failed test does not stop the next ones, an interrupted one does."""
    began, name = time.time(), time.strftime("smoke-%Y%m%d-%H%M%S")
    results: list[TestResult] = []
    ended = False
    for test in tests:
        ready = prepare_test(test, wanted, machine)
        if ended:
            ready = msgspec.structs.replace(ready, spec=None, scaled=[], unable="interrupted before this test")
        watcher.begin(test, _describe_test(ready), ready.scaled)
        result, now_ended = _run(ready, machine, watcher) if ready.spec else (_result(ready, machine), False)
        ended = ended or now_ended
        watcher.end(result)
        results.append(result)
    return SmokeReport(
        name=name,
        place=wanted.place,
        scale=wanted.scale,
        started=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)),
        seconds=round(time.time() - began, 1),
        machine=msgspec.to_builtins(machine),
        versions=_versions(),
        tests=results,
    )


def _run(ready: PreparedTest, machine: MachineFacts, watcher: SmokeObserver) -> tuple[TestResult, bool]:
    """Return the result of the test, and whether the user interrupted it."""
    assert ready.spec is not None and ready.asked is not None
    began = time.monotonic()
    try:
        run, plan = runs.create(prepare(ready.spec))
        done = runs.launch(run, ready.spec, plan, attempt=1, observer=watcher)
        message, ended = done.message, _is_interrupted(done, ready)
        if done.status == "succeeded":
            message, ended = _resume_one_step(run, plan.max_steps, ready, watcher)
    except EnvironmentNotAble as error:
        return _result(msgspec.structs.replace(ready, unable=str(error)), machine), False
    except AllranksError as error:  # refused before a rank was started
        refused = {"status": "failed", "message": str(error), "seconds": round(time.monotonic() - began, 1)}
        return _result(ready, machine, **refused), False
    evidence = read_evidence(run, message)
    criteria = evaluate_criteria(ready.test.criteria, evidence)
    for judged in criteria:
        watcher.judged(judged)
    return _ran(ready, machine, evidence, criteria, run, time.monotonic() - began), ended


def _is_interrupted(done: RunResult, ready: PreparedTest) -> bool:
    """Return whether Ctrl-C ended it; on this machine any other stop signal counts too, because no scheduler could have
    sent it."""
    interrupted = done.message.startswith("interrupted") or "(interrupted)" in done.message
    return interrupted or (done.status == "stopped" and ready.asked is not None and ready.asked.place == "local")


def _resume_one_step(
    run: RunDir, max_steps: int | None, ready: PreparedTest, watcher: SmokeObserver
) -> tuple[str, bool]:
    """Resume from the checkpoint for one step, as `allranks resume` does.

    Return the error or nothing, and whether the user interrupted it.
    """
    last = max(run.checkpoint_steps(), default=max_steps or 0)
    sets = ("train.epochs=null", f"train.max_steps={last + 1}", "checkpoint.at_end=false", "eval.at_end=false")
    try:
        again = runs.resume(run.root, sets=sets, observer=watcher)
    except AllranksError as error:
        return f"resume from the checkpoint: {error}", False
    if again.status == "succeeded":
        return "", False
    return f"resume from the checkpoint: {again.message}", _is_interrupted(again, ready)


def _ran(
    ready: PreparedTest,
    machine: MachineFacts,
    e: Evidence,
    criteria: list[CriterionResult],
    run: RunDir,
    seconds: float,
) -> TestResult:
    """Return the result of a test whose ranks were started."""
    return _result(
        ready,
        machine,
        status="failed" if any(j.state in (FAILED, NOT_REACHED) for j in criteria) else "passed",
        message=e.message,
        seconds=round(seconds, 1),
        folder=str(run.root),
        hardware=_hardware(ready, machine, e),
        untested=[f"{j.title}: {j.why}" for j in criteria if j.state == NOT_TESTABLE],
        criteria=criteria,
        figures=figure_rows(ready.test, e),
        path=_transport_text(e),
    )


def _result(ready: PreparedTest, machine: MachineFacts, **known: Any) -> TestResult:
    """Return the result of a test with what is known of it; without anything, it was not run."""
    test = ready.test
    fields = {
        "status": "not run",
        "message": ready.unable,
        "seconds": 0.0,
        "hardware": _hardware(ready, machine, None),
        "untested": [f"the whole test: {ready.unable}"] if ready.unable else [],
    }
    return TestResult(
        name=test.name,
        title=test.title,
        source=test.source,
        setting=_describe_test(ready),
        seed_hardware=test.hardware,
        scaled=ready.scaled,
        **{**fields, **known},
    )


def _describe_test(ready: PreparedTest) -> str:
    """Return ranks, strategy and model in one line."""
    spec, placement = ready.spec, ready.asked
    if spec is None or placement is None or spec.model is None:
        return ""
    on = "GPUs" if placement.gpu else "CPU cores"
    words = (
        f"{placement.world} rank{'s' * (placement.world > 1)} on {placement.nodes} node{'s' * (placement.nodes > 1)}"
    )
    return f"{words}, {spec.strategy.name}, {spec.model.name}, {spec.model.dtype}, on {on}"


def _hardware(ready: PreparedTest, machine: MachineFacts, e: Evidence | None) -> str:
    if e is not None and e.plan.device == "cuda":
        names = [str(m["device"]) for m in e.last("model").values()]
        return ", ".join(f"{names.count(n)} x {n}" for n in sorted(set(names))) or "GPUs"
    box = ", all nodes of the box on one machine" if ready.asked and ready.asked.place == "cluster" else ""
    return f"{machine.cpus} cores of {machine.cpu_model}, {machine.memory_bytes / 2**30:.0f} GiB{box}"


def _transport_text(e: Evidence) -> str:
    """Return the transports of the ranks from the logs."""
    ways: dict[str, int] = {}
    for found in e.ways.values():
        for way, count in found.items():
            ways[way] = ways.get(way, 0) + count
    if ways:
        return "NCCL: " + ", ".join(f"{n} channels by {way}" for way, n in sorted(ways.items()))
    line = str((e.metrics.get("network") or {}).get("line") or "")
    return f"{e.plan.backend}{f': {line}' if line else ''}" if len(e.ranks) > 1 else "none, one process"


def _versions() -> dict[str, str]:
    figures = {}
    for name in PACKAGES:
        try:
            figures[name] = version(name)
        except PackageNotFoundError:
            continue
    return figures


def report_folder(results: SmokeReport, run_root: str | Path) -> Path:
    """Return the folder of the report, next to the runs."""
    return Path(run_root).absolute() / results.name
