"""The Python command that starts the agents, by ``cluster.python``; inside the container if it names one."""

from __future__ import annotations

from pathlib import Path

from allranks.errors import SpecError
from allranks.planning.python_environment import environment_commands
from allranks.planning.records import LaunchPlan
from allranks.rundir.paths import RunDir
from allranks.spec.data_mixture import parts_of
from allranks.spec.records import RunSpec
from allranks.spec.user_program import program_file
from allranks.spec.validation import is_container


def agent_command(spec: RunSpec, plan: LaunchPlan, run: RunDir, python: str) -> tuple[list[str], list[str]]:
    """Return srun options and the Python command for the agents, which run inside the container.

    The run folder and paths in the spec are mounted there under the same paths.
    """
    wanted = spec.cluster.python
    if wanted is None or not is_container(wanted):
        return [], environment_commands(wanted, python)[1]
    mounts = _mounts(spec, run)
    if wanted.startswith("pyxis:"):
        image = wanted.removeprefix("pyxis:")
        return [f"--container-image={image}", f"--container-mounts={','.join(f'{m}:{m}' for m in mounts)}"], ["python"]
    gpus = ["--nv"] if plan.device == "cuda" else []
    return [], ["apptainer", "exec", *gpus, *(f"--bind={m}" for m in mounts), wanted, "python"]


def _mounts(spec: RunSpec, run: RunDir) -> list[str]:
    sources = [part.source for part in parts_of(spec.data)] if spec.data else []
    named = [program_file(spec.script) if spec.script else None, *sources, spec.eval.source]
    folders = [Path(p).expanduser().absolute().parent for p in named if p and Path(p).expanduser().is_file()]
    if spec.script is not None and spec.script.workdir is not None:
        folders.append(Path(spec.script.workdir).expanduser().absolute())
    if spec.model is not None and Path(spec.model.name).expanduser().is_dir():
        folders.append(Path(spec.model.name).expanduser().absolute())
    if spec.cluster.cache:
        folders.append(Path(spec.cluster.cache).expanduser().absolute())
    mounts = list(dict.fromkeys(map(str, [run.root, *folders])))
    for path in mounts:
        if "," in path or ":" in path:
            raise SpecError(
                f"{path}: a path with ',' or ':' cannot be mounted in a container; move it or give it another name"
            )
    return mounts
