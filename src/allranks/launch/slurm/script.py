"""Render the batch script from spec and plan. Pure; every value from the spec is quoted."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

from allranks.errors import SpecError
from allranks.nodes.rank_command import environment_commands, needed_file
from allranks.planning.rank_environment import public_variables
from allranks.planning.records import LaunchPlan
from allranks.rundir.paths import RunDir
from allranks.spec.records import ClusterSpec, RunSpec

VARIABLE_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def render_batch_script(spec: RunSpec, plan: LaunchPlan, run: RunDir, python: str) -> str:
    """Return the text of ``job.sbatch``.

    Raises:
        SpecError: a value cannot be quoted safely (a line break, a control character, an invalid variable name).
    """
    options = sbatch_options(spec, plan, run)
    activate, launcher = environment_commands(spec.cluster.python, python)
    exports = sorted(public_variables(plan.environment).items())
    for name, value in exports:
        if not VARIABLE_NAME.match(name):
            raise SpecError(f"cluster.env.{name}: not a valid name of an environment variable")
        _one_line(f"cluster.env.{name}", value)
    what = plan.strategy if plan.batch else "your own program"
    spare = f" and {spec.cluster.spares} spare" if spec.cluster.spares else ""
    return _render(
        spec.cluster,
        activate=activate,
        title=(
            f"allranks run {run.name}: {_count_text(plan.world_size, 'rank')} on "
            f"{_count_text(len(plan.nodes), 'node')}{spare}, {what}"
        ),
        options=options,
        verdict=str(run.driver),
        exports=exports,
        command=[*launcher, "-m", "allranks.launch.driver", str(run.root)],
    )


def render_array_script(
    spec: RunSpec, plan: LaunchPlan, folder: RunDir, python: str, *, tasks: Sequence[int], at_once: int | None
) -> str:
    """Return a batch script whose tasks each run ``allranks sweep FOLDER --task``, which starts the ranks of one point
    in the allocation of its task; at most `at_once` at the same time."""
    activate, launcher = environment_commands(spec.cluster.python, python)
    output = f"--output={_quoted('run_root', str(folder.root).replace('%', '%%') + '/slurm-%a.log')}"
    kept = [one for one in sbatch_options(spec, plan, folder) if not one.startswith(("--output=", "--array="))]
    array = f"--array={','.join(map(str, tasks))}" + (f"%{at_once}" if at_once else "")
    return _render(
        spec.cluster,
        activate=activate,
        title=f"allranks sweep {folder.name}: {_count_text(len(tasks), 'point')}",
        options=[*kept, output, array],
        verdict="/dev/null",
        exports=[],
        command=[*launcher, "-m", "allranks", "sweep", str(folder.root), "--task"],
    )


def render_environment_test(spec: RunSpec) -> str | None:
    """Return the part of the batch script that loads modules, runs the setup and activates the environment; None
    without any of them.

    What fails is named in the last line of its standard output, in the words of a run.
    """
    cluster = spec.cluster
    if not (cluster.modules or cluster.setup or cluster.python):
        return None
    activate, _ = environment_commands(cluster.python, "")
    nothing: dict[str, object] = {"options": [], "exports": [], "verdict": "/dev/null", "command": ["true"]}
    return _render(cluster, activate=activate, title="allranks doctor", **nothing)


def _render(cluster: ClusterSpec, **values: object) -> str:
    import jinja2  # takes long, and not every plan has a script

    loader = jinja2.PackageLoader(
        "allranks.launch.slurm"
    )  # no HTML: what goes into the script is quoted by the filter q
    jinja = jinja2.Environment(  # noqa: S701
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    jinja.trim_blocks = jinja.lstrip_blocks = True
    jinja.filters["q"] = shlex.quote
    return jinja.get_template("job.sbatch.j2").render(
        modules=_modules(cluster.modules),
        no_modules=_json_text(
            f"cluster.modules {', '.join(cluster.modules)}: the job's first node has no `module` command; remove "
            "the list, or load the system's start-up file in cluster.setup"
        ),
        setup=cluster.setup,
        environment=_environment_file(cluster.python),
        **values,
    )


def _environment_file(wanted: str | None) -> tuple[str, str] | None:
    """Return the file that ``cluster.python`` needs on the first node, and the error without it, escaped for JSON."""
    path = needed_file(wanted) if wanted is not None else None
    if path is None:
        return None
    text = f"cluster.python {wanted}: the job's first node has no {path}; put it on a file system that all nodes share"
    return str(path), _json_text(text)


def _json_text(text: str) -> str:
    """Return a text as the inside of a JSON string, in which the batch script puts it."""
    return json.dumps(text)[1:-1]


def _count_text(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _modules(names: list[str]) -> list[tuple[str, str]]:
    """Return each module with its error message, escaped for a JSON string."""
    return [
        (_one_line("cluster.modules", name), _json_text(_module_error(names[:i], name))) for i, name in enumerate(names)
    ]


def _module_error(before: list[str], name: str) -> str:
    when = f"after {', '.join(before)}" if before else "as the first of the list"
    return (
        f"cluster.modules: `module load {name}` failed on the job's first node, {when}. They are loaded in list order, "
        f"and some are visible only after another one is loaded: run `module spider {name}` (Lmod) or `module avail` "
        "on such a node"
    )


def sbatch_options(spec: RunSpec, plan: LaunchPlan, run: RunDir) -> list[str]:
    """Return the #SBATCH options, quoted for sbatch."""
    slurm = spec.cluster.slurm
    wanted: list[tuple[str, object]] = [
        ("job-name", spec.name),
        ("nodes", len(plan.nodes) + spec.cluster.spares),
        ("ntasks-per-node", 1),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("time", slurm.time),
        ("gpus-per-node", slurm.gpus_per_node),
        ("gres", slurm.gres),
        ("cpus-per-task", slurm.cpus_per_task),
        ("mem", slurm.mem),
        ("constraint", slurm.constraint),
        ("reservation", slurm.reservation),
        ("chdir", slurm.chdir),
        ("exclude", ",".join(slurm.exclude) or None),
        ("output", str(run.logs / "slurm.log").replace("%", "%%")),  # sbatch expands %j and the like
        ("open-mode", "append"),
        ("signal", f"B:USR1@{slurm.signal_s}"),
    ]
    lines = [f"--{name}={_quoted(f'cluster.slurm.{name}', str(value))}" for name, value in wanted if value is not None]
    lines += ["--exclusive"] if slurm.exclusive else []
    lines += ["--no-kill"] if spec.cluster.spares else []  # or the loss of a node would end the job
    lines += ["--requeue" if slurm.max_requeues else "--no-requeue"]
    for extra in slurm.extra:
        name, equals, value = _one_line("cluster.slurm.extra", extra).removeprefix("#SBATCH").strip().partition("=")
        if not re.match(r"^--?[A-Za-z][A-Za-z0-9-]*$", name):
            raise SpecError(f"cluster.slurm.extra: expected --name=value, got {extra!r}")
        lines.append(f"{name}={_quoted('cluster.slurm.extra', value)}" if equals else name)
    return lines


def _one_line(key: str, value: str) -> str:
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise SpecError(
            f"{key}: {value!r} has a line break or a control character, which a batch script cannot contain"
        )
    return value


def _quoted(key: str, value: str) -> str:
    """Quote a value for sbatch, which parses quotes like a shell but expands only its own ``%j`` in file names."""
    return shlex.quote(_one_line(key, value))
