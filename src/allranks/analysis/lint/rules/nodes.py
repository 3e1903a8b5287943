"""Rules for nodes that a job requests and no program uses, or that are started one after another."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import SHELLS, slurm_options
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import ProgramCall, Violation

NODES_WHY = "The batch script runs on the first node only; the other nodes are idle, and paid for."
NODES_CURE = "srun python ..., or #SBATCH --nodes=1"
SEQUENCE_WHY = (
    "The first launcher waits for the others, which start only after it has ended; it stops at the rendezvous timeout."
)
SEQUENCE_CURE = "srun --ntasks-per-node=1 without --nodelist starts all nodes at once; or end the line with & and add wait after the loop"


def sequence(job: JobDescription) -> Iterator[Violation]:
    """Report launchers that a loop starts on one node after another."""
    for launch in job.launches:
        srun = launch.srun
        yield from _by_ssh(job, launch)
        if srun is None or not srun.in_loop or launch.call.under[0].after == "&" or srun.in_function:
            continue
        node = slurm_options(srun).get("nodelist")
        if node and "$" in (node.value or "") and launch.value("nnodes", "num_machines") not in (None, "1"):
            yield Violation(srun.offset, f"the loop starts {launch.kind} on one node after another")


def _by_ssh(job: JobDescription, launch: LauncherCall) -> Iterator[Violation]:
    """Report a loop over nodes whose ssh waits for the launcher, which waits for the next node."""
    ssh = next((c for c in launch.call.under if c.program == "ssh"), None)
    if ssh is None or not ssh.in_loop or ssh.in_function or ssh.after == "&" or launch.call.after == "&":
        return
    detached = any(a.text.startswith("-") and "f" in a.text and a.text[1:].isalpha() for a in ssh.args)
    host = next((a.text for a in ssh.args if "$" in a.text and not a.text.startswith("-")), None)
    several = launch.value("nnodes", "num_machines") not in (None, "1")
    if (
        host
        and several
        and not detached
        and not re.search(r"\b(?:nohup|setsid|tmux|screen)\b|&\s*[\"']?\s*$", ssh.args[-1].text)
    ):
        yield Violation(
            ssh.offset,
            f"the loop starts {launch.kind} on one node after another: ssh returns when it has ended",
            cure='ssh "$node" ... & in the loop, and wait after it; or srun, which starts all at once',
        )


SPREADS_ITSELF = re.compile(
    r"(?:^|/)\w*launch\w*\.py$|--mpi[-_]\w+|--hosts\b|submitit|dask|\bray\b|parsl|mpi4py|spark|hostfile|horovod|pip$|venv$"
)


def idle_nodes(job: JobDescription) -> Iterator[Violation]:
    """Report a job of several nodes whose programs all run in the batch script, on the first node."""
    yield from _small_step(job)
    yield from _head_only(job)
    yield from _beside_steps(job)
    if not job.is_job or (job.nodes or 1) < 2 or job.launches or not job.work or job.sources_files:
        return
    if job.chooses_launcher:
        return
    others = [c for c in job.calls if not c.in_substitution]
    if any(c.program in STARTS_ELSEWHERE or runs_script(c) for c in others) or "array" in job.heading:
        return
    work = next((c for c in job.work if not any(SPREADS_ITSELF.search(a.text) for a in c.args)), None)
    if work is None:
        return
    yield Violation(work.offset, f"{work.program} runs on the first of {job.nodes} nodes only")


TRAINS = re.compile(r"(?:\S*/)?(?:\w*_)?(?:pre_?)?train(?:_\w+)?\.py\Z")
CLUSTERS = re.compile(r"(?i)\b(?:ray|dask|spark|mpi4py|submitit)\b")


def _beside_steps(job: JobDescription) -> Iterator[Violation]:
    """Report a training without srun in a job of several nodes whose other programs srun starts, one after another."""
    if not job.is_batch or (job.nodes or 1) < 2 or job.launches or len(job.work) != 1 or "array" in job.heading:
        return
    call, own = job.work[0], [c for c in job.calls if not c.in_substitution and not c.under]
    steps = [c for c in own if c.program in STARTS_ELSEWHERE]
    if call.under or call.in_loop or call.in_function or call.branch or call.after not in ("\n", ";", ""):
        return
    if not steps or any(c.program != "srun" or c.after == "&" for c in steps) or CLUSTERS.search(job.text):
        return
    plain = not any(SPREADS_ITSELF.search(a.text) for a in call.args) and not any(runs_script(c) for c in own)
    if plain and call.args and TRAINS.match(call.args[0].text):
        text = f"{call.program} runs on the first of {job.nodes} nodes only: srun does not start it"
        yield Violation(call.offset, text)


def _small_step(job: JobDescription) -> Iterator[Violation]:
    """Report a job whose only step takes fewer nodes than the job has."""
    if (
        not job.is_batch
        or (job.nodes or 1) < 2
        or len(job.launches) != 1
        or len(job.work) != 1
        or "array" in job.heading
    ):
        return
    launch, steps = job.launches[0], [c for c in job.calls if c.program == "srun" and not c.in_substitution]
    srun = launch.srun
    if srun is None or len(steps) != 1 or srun.in_loop or srun.in_function or srun.after == "&" or launch.open_srun:
        return
    options = slurm_options(srun)
    asked, tasks = options.get("nodes"), options.get("ntasks")
    nodes = job.number(asked.value) if asked else None
    counted = job.number(tasks.value) if tasks else None
    if options.keys() & {"nodelist", "relative", "nodefile", "exact", "overlap"} or any(
        SPREADS_ITSELF.search(a.text) for a in launch.call.args
    ):
        return
    used, option = (nodes, asked) if nodes else (counted, tasks)
    if option and used and used < (job.nodes or 0) and launch.value("nnodes", "num_machines") in (None, "1"):
        text = f"the only step of the job takes {used} of its {job.nodes} nodes"
        cure = f"srun without {option.arg.text.partition('=')[0]}, or #SBATCH --nodes={used}"
        yield Violation(option.arg.offset, text, why="The job waits for, and pays for, all its nodes.", cure=cure)


def _head_only(job: JobDescription) -> Iterator[Violation]:
    """Report a head of Ray in a job of several nodes, none of which joins it."""
    if not job.is_job or (job.nodes or 1) < 2 or job.sources_files:
        return
    heads = [c for c in job.calls if is_ray_start(c) and any(a.text == "--head" for a in c.args)]
    own = [c for c in job.calls if not c.in_substitution]
    joins = any(is_ray_start(c) and c not in heads for c in own) or any(
        "symmetric-run" in a.text for c in own for a in c.args
    )
    unknown = any(
        runs_script(c) or c.program in ("sbatch", "pdsh", "clush", "pbsdsh", "mpirun", "mpiexec") for c in own
    )
    mentioned = re.search(
        r"ray\s+start(?![^\n]*--head)|symmetric-run",
        "\n".join(ln for ln in job.text.splitlines() if not ln.lstrip().startswith("#")),
    )
    if heads and not joins and not unknown and not mentioned:
        text = f"ray has its head on one of {job.nodes} nodes, and no other node joins it"
        yield Violation(
            heads[0].offset, text, cure='srun ... ray start --address="$head:6379" --block & on the other nodes'
        )


def is_ray_start(call: ProgramCall) -> bool:
    return call.program == "ray" and [a.text for a in call.args[:1]] == ["start"]


STARTS_ELSEWHERE = {
    "srun", "mpirun", "mpiexec", "mpiexec.hydra", "ssh", "pdsh", "parallel", "sbatch", "ray", "pbsdsh", "clush", "jsrun", "aprun", "horovodrun",
    "orterun", "blaunch", "flux", "lrun", "ddlrun", "runjob",
}  # fmt: skip


def runs_script(call: ProgramCall) -> bool:
    """Return whether the call runs another script, which may start programs on the other nodes."""
    first = call.args[0].text if call.args else ""
    shell = call.program in SHELLS and not first.startswith("-")
    return shell or call.written.startswith(("./", "../", "$")) or call.written.endswith((".sh", ".bash"))
