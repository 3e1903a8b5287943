"""The batch script, from the spec and the plan. Pure; every value that comes from the spec is quoted."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from allranks.envpolicy import without_secrets
from allranks.errors import SpecError
from allranks.planning import LaunchPlan
from allranks.rundir import RunDir
from allranks.spec.records import RunSpec

NO_MODULES = "cluster.modules: the job's first node has no `module` command; leave the list out, or load the system's start-up file in cluster.setup"
NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def render(spec: RunSpec, plan: LaunchPlan, run: RunDir, python: str) -> str:
    """The text of ``job.sbatch``.

    Raises:
        SpecError: a value that no quoting can make safe (a line break, a control character, a bad variable name).
    """
    import jinja2  # takes long, and not every plan has a script

    loader = jinja2.PackageLoader("allranks.slurm")  # no HTML: what goes into the script is quoted by the filter q
    jinja = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)  # noqa: S701
    jinja.trim_blocks = jinja.lstrip_blocks = True
    jinja.filters["q"] = shlex.quote
    exports = sorted(without_secrets(plan.environment).items())
    for name, value in exports:
        if not NAME.match(name):
            raise SpecError(f"cluster.env.{name}: this is no name of an environment variable")
        _one_line(f"cluster.env.{name}", value)
    activate, launcher = entering(spec.cluster.environment, python)
    return jinja.get_template("job.sbatch.j2").render(
        title=f"allranks run {run.name}: {_many(plan.world_size, 'rank')} on {_many(len(plan.nodes), 'node')}, {plan.strategy}",
        options=options(spec, plan, run),
        modules=_modules(spec.cluster.modules),
        no_modules=NO_MODULES,
        verdict=str(run.driver),
        setup=spec.cluster.setup,
        activate=activate,
        exports=exports,
        command=[*launcher, "-m", "allranks.launch.driver", str(run.root)],
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _modules(names: list[str]) -> list[tuple[str, str]]:
    """Each module with what is to be said if it cannot be loaded, as it can stand inside a JSON string."""
    return [
        (_one_line("cluster.modules", name), json.dumps(_refusal(names[:i], name))[1:-1])
        for i, name in enumerate(names)
    ]


def _refusal(before: list[str], name: str) -> str:
    when = f"after {', '.join(before)}" if before else "as the first of the list"
    return (
        f"cluster.modules: `module load {name}` failed on the job's first node, {when}. They are loaded in the order of the list, and some are visible "
        f"only once another is loaded: ask `module spider {name}` (Lmod) or `module avail` on such a node"
    )


def options(spec: RunSpec, plan: LaunchPlan, run: RunDir) -> list[str]:
    """The #SBATCH options, quoted as sbatch reads them."""
    slurm = spec.cluster.slurm
    wanted: list[tuple[str, object]] = [
        ("job-name", spec.name),
        ("nodes", len(plan.nodes)),
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
        ("output", run.logs / "slurm.log"),
        ("open-mode", "append"),
        ("signal", f"B:USR1@{slurm.signal_s}"),
    ]
    lines = [f"--{name}={_quoted(f'cluster.slurm.{name}', str(value))}" for name, value in wanted if value is not None]
    lines += ["--exclusive"] if slurm.exclusive else []
    lines += ["--requeue" if slurm.max_requeues else "--no-requeue"]
    for extra in slurm.extra:
        name, equals, value = _one_line("cluster.slurm.extra", extra).removeprefix("#SBATCH").strip().partition("=")
        if not re.match(r"^--?[A-Za-z][A-Za-z0-9-]*$", name):
            raise SpecError(f"cluster.slurm.extra: {extra!r} is no sbatch option; write it as --name=value")
        lines.append(f"{name}={_quoted('cluster.slurm.extra', value)}" if equals else name)
    return lines


def entering(wanted: str | None, python: str) -> tuple[list[str], list[str]]:
    """Shell lines that enter the environment, and the words that start its Python, as the driver needs them.

    ``cluster.environment`` is a virtual environment's folder, ``conda:NAME``, an Apptainer image (``.sif``), or
    ``pyxis:IMAGE``, which srun enters itself. The driver stays outside of containers: srun and scontrol are not in them.
    """
    if wanted is None:
        return [], [python]
    _one_line("cluster.environment", wanted)
    if is_container(wanted):
        return [], [python]
    if wanted.startswith("conda:"):
        return ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(wanted.removeprefix('conda:'))}"], [
            "python"
        ]
    return [f"source {shlex.quote(str(Path(wanted) / 'bin' / 'activate'))}"], ["python"]


def is_container(wanted: str | None) -> bool:
    """Whether ``cluster.environment`` is an image, which brings a Python and packages of its own."""
    return wanted is not None and (wanted.startswith("pyxis:") or wanted.endswith(".sif"))


def agents(spec: RunSpec, plan: LaunchPlan, run: RunDir, python: str) -> tuple[list[str], list[str]]:
    """Options of srun, and the words that start Python, for the agents: these do run inside of a container.

    The run folder and what the spec names by path are mounted there under the same names.
    """
    wanted = spec.cluster.environment
    if wanted is None or not is_container(wanted):
        return [], entering(wanted, python)[1]
    mounts = _mounts(spec, run)
    if wanted.startswith("pyxis:"):
        image = wanted.removeprefix("pyxis:")
        return [f"--container-image={image}", f"--container-mounts={','.join(f'{m}:{m}' for m in mounts)}"], ["python"]
    gpus = ["--nv"] if plan.device == "cuda" else []
    return [], ["apptainer", "exec", *gpus, *(f"--bind={m}" for m in mounts), wanted, "python"]


def _mounts(spec: RunSpec, run: RunDir) -> list[str]:
    named = [spec.script.path if spec.script else None, spec.data.source if spec.data else None, spec.eval.source]
    folders = [Path(p).expanduser().absolute().parent for p in named if p and Path(p).expanduser().is_file()]
    if spec.model is not None and Path(spec.model.name).expanduser().is_dir():
        folders.append(Path(spec.model.name).expanduser().absolute())
    if spec.cluster.cache:
        folders.append(Path(spec.cluster.cache).expanduser().absolute())
    return list(dict.fromkeys(map(str, [run.root, *folders])))


def _one_line(key: str, value: str) -> str:
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise SpecError(f"{key}: {value!r} has a line break or a control character, which no batch script can hold")
    return value


def _quoted(key: str, value: str) -> str:
    """sbatch reads quotes as a shell does, but nothing is expanded: ``%j`` in a file name is its own affair."""
    return shlex.quote(_one_line(key, value))
