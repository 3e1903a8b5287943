"""Run smoke tests one after another, on this machine, through Slurm, or in a cluster in a box.

Each test is run through `launch.runs`, as any other run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import msgspec

from allranks.errors import AllranksError, EnvironmentNotAble
from allranks.lab.smoke import records
from allranks.lab.smoke.figures import figure_rows
from allranks.lab.smoke.records import evaluate_criteria
from allranks.lab.smoke.sizes import build_spec
from allranks.launch import runs
from allranks.launch.outcome import RunResult
from allranks.launch.preview import prepare
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec, parse_spec
from allranks.utils.machine import MachineFacts

PACKAGES = ("allranks", "torch", "transformers", "peft", "deepspeed")


class SmokeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the user."""

    place: records.PlaceName = "local"
    scale: records.Scale = "fit"
    sets: tuple[str, ...] = ()
    run_root: str = "runs"

    def gpu(self, machine: MachineFacts) -> bool:
        """Return whether ranks use GPUs: this machine's; under Slurm unless the device is CPU; never in the box."""
        devices = [s.partition("=")[2].strip() for s in self.sets if s.startswith("cluster.device=")]
        if devices:
            return devices[-1] == "cuda"
        return self.place == "slurm" or (self.place == "local" and bool(machine.gpus))


class PreparedTest(msgspec.Struct, frozen=True, kw_only=True):
    """A test prepared for a place; ``unable`` says why it cannot be run there."""

    test: records.SmokeTest
    spec: RunSpec | None = None
    placement: records.Placement | None = None
    scaled: list[str] = []
    unable: str = ""

    @property
    def setting(self) -> str:
        """Return ranks, strategy and model in one line."""
        if self.spec is None or self.placement is None or self.spec.model is None:
            return ""
        model, on = self.spec.model, "GPUs" if self.placement.gpu else "CPU cores"
        return f"{self.placement.text}, {self.spec.strategy.name}, {model.name}, {model.dtype}, on {on}"


class SmokeObserver(Protocol):
    """Receiver of the progress: `launch.runs.Observer`, and the beginning and result of each test."""

    def event(self, event: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def begin(self, ready: PreparedTest) -> None: ...

    def end(self, result: records.TestResult) -> None: ...


@contextmanager
def cluster_for_tests(place: records.PlaceName, nodes: int, say: Callable[[str], None]) -> Iterator[None]:
    """Provide the box: use the running one if it has enough nodes, else start one and remove it at the end.

    Raises:
        EnvironmentNotAble, RequestError: a box cannot run here.
    """
    from allranks.lab.cluster import BoxOptions, down, find_box, up
    from allranks.nodes.slurm.endpoints import NAME_VARIABLE

    box = find_box() if place == "cluster" else None
    if place != "cluster" or (box is not None and len(box.node_names) >= nodes):
        if box is not None:
            say(f"using the running cluster in a box {box.name!r}")
        yield
        return
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


def prepare_test(test: records.SmokeTest, wanted: SmokeOptions, machine: MachineFacts) -> PreparedTest:
    """Return the test's spec for a place, with the user's settings. Pure.

    Raises:
        SpecError: a setting contradicts the test.
    """
    gpu, local = wanted.gpu(machine), wanted.place == "local"
    if local and test.min_nodes > 1 and not (gpu and test.one_gpu_node):
        unable = f"needs {test.min_nodes} nodes: run it with --on slurm, or on this machine with --on cluster"
        return PreparedTest(test=test, unable=unable)
    gpu = gpu and test.spec.get("cluster") != {"device": "cpu"}
    ranks = test.cpu_ranks if not gpu else min(test.ranks, len(machine.gpus)) if local else test.ranks
    placement = records.Placement(
        machine=machine, place=wanted.place, scale=wanted.scale, nodes=1 if local else test.nodes, ranks=ranks, gpu=gpu
    )
    values, scaled = build_spec(test, placement)
    if placement.world != test.nodes * test.ranks:
        why = f"{len(machine.gpus)} GPUs here" if gpu else "no GPU here"
        scaled.insert(0, f"{placement.text} instead of {test.nodes * test.ranks} on {test.nodes}; {why}")
    model = {"compile": False, **values.get("model", {})}  # short, and compared with figures of uncompiled runs
    spec = parse_spec({**values, "model": model, "run_root": wanted.run_root}, wanted.sets)
    return PreparedTest(test=test, spec=spec, placement=placement, scaled=scaled)


def run_tests(
    prepared: Sequence[PreparedTest], wanted: SmokeOptions, machine: MachineFacts, watcher: SmokeObserver
) -> records.SmokeReport:
    """Run all tests in order; a failed test does not stop the next ones, an interrupted one does."""
    began = time.time()
    results: list[records.TestResult] = []
    interrupted = False
    for planned in prepared:
        not_run = PreparedTest(test=planned.test, unable="interrupted before this test")
        ready = not_run if interrupted else planned
        watcher.begin(ready)
        result, now = _run(ready, machine, watcher) if ready.spec else (_result(ready, machine), False)
        interrupted = interrupted or now
        watcher.end(result)
        results.append(result)
    return records.SmokeReport(
        name=time.strftime("smoke-%Y%m%d-%H%M%S", time.localtime(began)),
        place=wanted.place,
        scale=wanted.scale,
        started=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)),
        seconds=round(time.time() - began, 1),
        machine=msgspec.to_builtins(machine),
        versions=_versions(),
        tests=results,
    )


def _run(ready: PreparedTest, machine: MachineFacts, watcher: SmokeObserver) -> tuple[records.TestResult, bool]:
    """Return the result of the test, and whether the user interrupted it."""
    assert ready.spec is not None
    began = time.monotonic()
    try:
        run, plan = runs.create(prepare(ready.spec))
        done = runs.launch(run, ready.spec, plan, attempt=1, observer=watcher)
        message, interrupted = done.message, _is_interrupted(done, ready)
        if done.status == "succeeded":
            message, interrupted = _resume_one_step(run, plan.max_steps, ready, watcher)
    except EnvironmentNotAble as error:
        return _result(msgspec.structs.replace(ready, unable=str(error)), machine), False
    except AllranksError as error:  # refused before a rank was started
        seconds = round(time.monotonic() - began, 1)
        return _result(ready, machine, status="failed", message=str(error), seconds=seconds), False
    result = _judged(ready, machine, records.read_evidence(run, message), run)
    return msgspec.structs.replace(result, seconds=round(time.monotonic() - began, 1)), interrupted


def _is_interrupted(done: RunResult, ready: PreparedTest) -> bool:
    """Return whether Ctrl-C ended it, or on this machine any stop signal, as no scheduler could have sent it."""
    interrupted = done.message.startswith("interrupted") or "(interrupted)" in done.message
    local = ready.placement is not None and ready.placement.place == "local"
    return interrupted or (done.status == "stopped" and local)


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


def _judged(ready: PreparedTest, machine: MachineFacts, e: records.Evidence, run: RunDir) -> records.TestResult:
    """Return the result of a test whose ranks were started."""
    criteria = evaluate_criteria(ready.test.criteria, e)
    return _result(
        ready,
        machine,
        e,
        status="failed" if any(j.state in (records.FAILED, records.NOT_REACHED) for j in criteria) else "passed",
        message=e.message,
        folder=str(run.root),
        untested=[f"{j.title}: {j.why}" for j in criteria if j.state == records.NOT_TESTABLE],
        criteria=criteria,
        figures=figure_rows(ready.test, e),
        path=_transport_text(e),
    )


def _result(
    ready: PreparedTest, machine: MachineFacts, e: records.Evidence | None = None, **known: Any
) -> records.TestResult:
    """Return the result of a test with what is known of it; without anything, it was not run."""
    test = ready.test
    not_run = {
        "status": "not run",
        "message": ready.unable,
        "untested": [f"the whole test: {ready.unable}"] if ready.unable else [],
    }
    return records.TestResult(
        name=test.name,
        title=test.title,
        source=test.source,
        setting=ready.setting,
        hardware=_hardware(ready, machine, e),
        seed_hardware=test.hardware,
        scaled=ready.scaled,
        **{**not_run, **known},
    )


def _hardware(ready: PreparedTest, machine: MachineFacts, e: records.Evidence | None) -> str:
    if e is not None and e.plan.device == "cuda":
        names = [str(m["device"]) for m in e.last("model").values()]
        return ", ".join(f"{names.count(n)} x {n}" for n in sorted(set(names))) or "GPUs"
    box = ready.placement is not None and ready.placement.place == "cluster"
    return (
        f"{machine.cpus} cores of {machine.cpu_model}, {machine.memory_bytes / 2**30:.0f} GiB"
        f"{', all nodes of the box on one machine' * box}"
    )


def _transport_text(e: records.Evidence) -> str:
    """Return the transports of the ranks from the logs."""
    if e.channels:
        return "NCCL: " + ", ".join(f"{n} channels by {way}" for way, n in sorted(e.channels.items()))
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
