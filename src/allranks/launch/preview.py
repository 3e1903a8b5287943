"""Prepare a run: check the request, read facts, decide the plan. Also shows what would run: memory, batch script or
commands, data.

A separate module, so that `allranks plan` does not import the launch machinery. Rows and token counts are from a
process of its own (`allranks.train.inspection`), without ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import EXIT_ENVIRONMENT, EXIT_REQUEST, AllranksError, DataError, EnvironmentNotAble, SpecError
from allranks.launch.launchers import Launcher, get_launcher
from allranks.nodes.preflight.request import check_paths, check_request, check_rows, check_sources
from allranks.nodes.preflight.requirements import local_report, node_requirements
from allranks.nodes.records import CPU_TORCH, PreflightReport, require_ready
from allranks.planning import memory
from allranks.planning.memory import Fit
from allranks.planning.model_checks import model_warnings
from allranks.planning.records import LaunchPlan
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec, load_spec, parse_spec
from allranks.spec.data_sources import data_files, looks_like_file, parts_of, source_of
from allranks.spec.loader import spec_to_dict
from allranks.spec.models import is_mlp
from allranks.utils.machine import MachineFacts
from allranks.utils.text import sanitize

SpecLike = RunSpec | dict[str, Any] | str | Path


def read_spec(spec: SpecLike, sets: Sequence[str] = ()) -> RunSpec:
    """Return a spec from a file, a dictionary or a record."""
    if isinstance(spec, RunSpec):
        return spec
    return parse_spec(spec, sets) if isinstance(spec, dict) else load_spec(spec, sets)


def planning_facts(spec: RunSpec) -> MachineFacts:
    """Return the facts that a spec's plan depends on: this machine's and its launcher's, such as a partition's GPUs."""
    return get_launcher(spec.cluster.launcher).planning_facts(spec)


def plan(spec: SpecLike, sets: Sequence[str] = (), *, facts: MachineFacts | None = None) -> LaunchPlan:
    """Return what would run, without side effects.

    Args:
        facts: the result of `planning_facts`; None: determine them.

    Raises:
        SpecError: the spec is wrong.
    """
    checked = read_spec(spec, sets)
    return plan_with_model(checked, facts or planning_facts(checked))


def plan_with_model(spec: RunSpec, facts: MachineFacts) -> LaunchPlan:
    """Return the plan with the warnings that need the model's config.

    Raises:
        SpecError, EnvironmentNotAble: as `planner.make_plan`.
    """
    plan = memory.make_plan(spec, facts)
    return msgspec.structs.replace(plan, warnings=[*plan.warnings, *model_warnings(spec)])


class PreparedRun(msgspec.Struct, frozen=True, dict=True):
    """A request, and what follows from it. Facts are read, and plan and memory decided, once, when first needed."""

    spec: RunSpec
    classifier: bool | None = None
    """Whether the model is trained as a classifier; None if that is unknown."""

    @cached_property
    def launcher(self) -> Launcher:
        """Return the spec's launcher."""
        return get_launcher(self.spec.cluster.launcher)

    @cached_property
    def facts(self) -> MachineFacts:
        """Return what the plan depends on besides the spec."""
        return planning_facts(self.spec)

    @cached_property
    def plan(self) -> LaunchPlan:
        """Return what would run.

        Raises:
            SpecError, EnvironmentNotAble: as `planner.make_plan`.
        """
        return plan_with_model(self.spec, self.facts)

    @cached_property
    def fit(self) -> Fit:
        """Return how much memory a rank will need, whether its device has it, and what would make it fit."""
        return memory.fit(self.spec, self.plan, self.facts)

    @property
    def plan_with_memory(self) -> LaunchPlan:
        """Return the plan with what a rank needs, which the checks of nodes compare with what its device has."""
        known = None if self.plan.device_is_provisional else memory.known_bytes(self.fit)
        return msgspec.structs.replace(self.plan, rank_memory_bytes=known)

    @property
    def batch_script(self) -> str | None:
        """Return the batch script for sbatch; None for launchers without a script."""
        return self.launcher.batch_script(self.spec, self._future_run, lambda: self.plan)

    @property
    def hand_commands(self) -> list[str] | None:
        """Return the commands to start manually, one per node; None for launchers that start the nodes themselves."""
        return self.launcher.node_commands(self.spec, self._future_run, lambda: self.plan)

    @property
    def _future_run(self) -> RunDir:
        """Return the folder that the run would get; TIME stands for its start time."""
        return RunDir(Path(self.spec.run_root).absolute() / f"{self.spec.name}-TIME")


def prepare(spec: SpecLike | PreparedRun, sets: Sequence[str] = ()) -> PreparedRun:
    """Read a spec and refuse what is wrong on any machine; a run that is prepared stays as it is.

    Raises:
        SpecError, DataError: with the key and the fix.
    """
    if isinstance(spec, PreparedRun):
        return spec
    checked = read_spec(spec, sets)
    return PreparedRun(checked, check_request(checked))


def check_start(prepared: PreparedRun, plan: LaunchPlan, *, required: bool = True) -> PreflightReport:
    """Return the report on this machine, with the checks of a node if the ranks run here.

    Args:
        plan: with the memory of a rank, unless a run was asked to start without that check.
        required: refuse to continue if the report has a failed check; False where the caller shows these checks itself.

    Raises:
        SpecError, DataError: the program is not where the spec says, the hub does not know a name, or a row cannot be
        used.
        EnvironmentNotAble: this machine lacks something.
    """
    spec = prepared.spec
    check_paths(spec)
    check_rows(spec, prepared.classifier)
    report = local_report(spec, plan, prepared.facts, prepared.fit)
    if required:
        require_ready(report)
    check_sources(spec)
    if not required or not spec.cluster.launched_by.runs_here:
        return report
    from allranks.nodes.preflight.runner import TargetNodes, require_usable_nodes, run_preflight  # with all checks

    run_root = Path(spec.run_root)
    required_here = node_requirements(spec, run_root, imports=False)  # no ports: one is chosen when the ranks start
    nodes = run_preflight(TargetNodes(), spec, plan, run_root, required=required_here)
    require_usable_nodes(nodes.reports)
    more = [check for one in nodes.reports for check in one.checks]
    names = {check.name for check in more}
    return msgspec.structs.replace(report, checks=[*(c for c in report.checks if c.name not in names), *more])


SMALL_BYTES_PER_TOKEN = 16
"""A file with more bytes than this per token of one sequence on each rank has enough sequences: tokens are shorter."""


def inspect_data(prepared: PreparedRun, *, rows: int) -> dict[str, Any]:
    """Return what a run would train on, as `allranks.train.inspection.Inspection` has it.

    Args:
        rows: how many training rows to show.

    Raises:
        RequestError: the spec has no rows of text, or they cannot be used.
        EnvironmentNotAble: a package, the tokenizer or the data is not on this machine.
    """
    spec = prepared.spec
    if spec.data is None or spec.model is None:
        raise SpecError("this spec runs your own program (script), whose data allranks does not read")
    if is_mlp(spec.model.name):
        raise SpecError(f"model.name {spec.model.name}: it is trained on noise, there are no rows to show")
    request = {"spec": spec_to_dict(spec), "classifier": prepared.classifier, "rows": rows}
    environment = dict(os.environ) | ({"HF_HOME": spec.cluster.cache} if spec.cluster.cache else {})
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "allranks.train.inspection"],
        input=json.dumps(request).encode(),
        capture_output=True,
        env=environment,
        check=False,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = "".join(sanitize(done.stderr.decode("utf-8", "replace")).strip().splitlines()[-1:])
        missing = last.startswith("ModuleNotFoundError")
        cure = f"; without a GPU first {CPU_TORCH}; pip install 'allranks[train]'" if missing else ""
        raise EnvironmentNotAble(
            f"the data could not be tokenized (exit code {done.returncode}): {last}{cure}"
        ) from None
    if "error" in answer:
        kinds = {EXIT_REQUEST: DataError, EXIT_ENVIRONMENT: EnvironmentNotAble}
        raise kinds.get(answer["exit_code"], AllranksError)(answer["error"])
    return answer


def few_sequences(prepared: PreparedRun, facts: dict[str, Any]) -> str | None:
    """Return why some ranks would have no data, and what to do; None if there are enough sequences."""
    plan, data = prepared.plan, prepared.spec.data
    sequences, rows = facts["sequences"], facts["rows_train"] - facts["rows_without_target"]
    if data is None or sequences >= plan.world_size:
        return None
    fewer = f"use fewer ranks (cluster.procs_per_node: {max(1, sequences // len(plan.nodes))})"
    packed = data.packing != "none" and not facts["labels"] and rows >= plan.world_size
    why = f" of up to {data.max_length} tokens (data.packing: {data.packing})" if packed else ""
    cure = f"set data.packing: none, which gives {rows} sequences, or {fewer}" if packed else f"{fewer}, or add rows"
    give = "row gives" if rows == 1 else "rows give"
    return (
        f"data.source {facts['source']}: {rows} training {give} {sequences} sequence{'s' * (sequences != 1)}{why}, too "
        f"few for {plan.world_size} ranks; {cure}"
    )


def sequence_problem(prepared: PreparedRun) -> str | None:
    """Return what `few_sequences` finds, if the file is so small that there can be too few.

    Files of a size that always suffices, built-in sets and sets of the hub are not tokenized here.

    Raises:
        DataError: the ranks would refuse the rows.
    """
    spec, data = prepared.spec, prepared.spec.data
    if data is None or spec.model is None or is_mlp(spec.model.name):
        return None
    sources = [source_of(part) for part in parts_of(data)]
    enough = prepared.plan.world_size * data.max_length * SMALL_BYTES_PER_TOKEN
    if not all(map(looks_like_file, sources)):
        return None
    try:
        paths = [path for source in sources for path in data_files(source)]
    except DataError:  # this machine may not see them
        return None
    if sum(path.stat().st_size for path in paths) > enough:
        return None
    try:
        return few_sequences(prepared, inspect_data(prepared, rows=0)["facts"])
    except EnvironmentNotAble:
        return None  # the tokenizer may be on the nodes only
