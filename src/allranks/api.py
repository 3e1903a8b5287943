"""Python API of the verbs: ``allranks.run(spec)``, ``allranks.plan(spec)``, ``allranks.resume(run)``."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.errors import CheckpointError, SpecError
from allranks.launch.checkpoint_request import checkpoint
from allranks.launch.launchers import local_agents
from allranks.launch.outcome import RunResult
from allranks.launch.preview import PreparedRun, SpecLike, plan, prepare
from allranks.launch.runs import NullObserver, Observer, cancel, create, launch, resume, running
from allranks.spec import load_spec


def run(
    spec: SpecLike | PreparedRun, sets: Sequence[str] = (), observer: Observer | None = None, *, force: bool = False
) -> RunResult:
    """Plan, check, launch, follow and report one run.

    Args:
        force: start even if the estimated memory per rank exceeds the limit.

    Returns:
        The result; ``result.exit_code`` is 0 only if the training succeeded.

    Raises:
        RequestError: the spec or data are wrong; nothing was started.
        EnvironmentNotAble: this machine cannot run it.
    """
    prepared = prepare(spec, sets)
    run_dir, launch_plan = create(prepared, force=force)
    return launch(run_dir, prepared.spec, launch_plan, attempt=1, observer=observer or NullObserver())


__all__ = [
    "CheckpointError", "NullObserver", "RunResult", "SpecError", "cancel", "checkpoint", "create", "launch",
    "load_spec", "local_agents", "plan", "prepare", "resume", "run", "running",
]  # fmt: skip
