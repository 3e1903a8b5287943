"""Make the run of a torchrun command line: its spec, its plan, and what the agent of this node is handed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.launch.rank_processes import TORCHRUN_VARIABLE, TorchrunSettings
from allranks.launch.torchrun.options import DEFAULT_PORTS, TorchrunOptions
from allranks.planning.planner import make_plan
from allranks.planning.rank_environment import SCRIPT_ARGS
from allranks.planning.records import LaunchPlan, NodePlan
from allranks.rundir.paths import RunDir, create_run
from allranks.spec.records import ClusterSpec, RestartSpec, RunSpec, ScriptSpec
from allranks.utils.machine import MachineFacts, machine_facts

KEPT_VARIABLES = ("PYTHONFAULTHANDLER", SCRIPT_ARGS)
"""What a program of a torchrun command line gets besides torchrun's own variables."""
_SHEBANG = re.compile(rb"#!\s*(/\S*python[0-9.]*)\s")


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A command line on one node: what it starts there."""

    options: TorchrunOptions
    facts: MachineFacts
    procs: int
    python: str
    torch: str

    def export_settings(self, address: str, port: int, *, port_fixed: bool, agent_store: bool) -> None:
        """Put what the agent of this node needs into its environment."""
        options = self.options
        program = dict.fromkeys(("path", "module", "workdir")) | {"direct": options.direct, "args": options.args}
        settings = TorchrunSettings(
            program=program | {"module" if options.module else "path": options.program},
            python=self.python,
            torch=self.torch,
            run_id=str(uuid.uuid4()) if options.unnamed else options.run_id,
            environment={
                "ROLE_NAME": options.role,
                "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
                "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals,
            },
            address=address,
            port=port,
            port_fixed=port_fixed,
            agent_store=agent_store,
            virtual_local_rank=options.virtual_local_rank,
        )
        os.environ[TORCHRUN_VARIABLE] = msgspec.json.encode(settings).decode()


def read_node(options: TorchrunOptions) -> NodeRequest:
    """Return what a command line starts on this node, and set OMP_NUM_THREADS where torchrun does.

    Raises:
        RequestError: there is no such program, or the number of ranks cannot be determined.
    """
    if not (shutil.which(options.program) if options.direct else options.module or Path(options.program).is_file()):
        if not options.program.strip():
            raise RequestError("the program is a blank: a backslash that continues a line must be its last character")
        raise RequestError(f"{options.program}: there is no such program; current folder: {Path.cwd()}")
    facts = machine_facts()
    procs = count_procs(options.procs, facts)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if options.virtual_local_rank and visible is not None and procs > len(visible.split(",")):
        raise RequestError(f"--virtual-local-rank: {procs} ranks, but CUDA_VISIBLE_DEVICES={visible} on {facts.host}")
    if procs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    python = program_python()
    return NodeRequest(options=options, facts=facts, procs=procs, python=python, torch=torch_version(python))


def count_procs(text: str, facts: MachineFacts) -> int:
    """Return the ranks of this node, for ``--nproc-per-node``."""
    if re.fullmatch(r"[1-9]\d{0,5}", text):
        return int(text)
    if text in ("auto", "gpu") and facts.gpus:
        return len(facts.gpus)
    if text in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    if text == "gpu":
        raise RequestError(f"--nproc-per-node gpu: {facts.host} has no GPU that the driver reports (nvidia-smi)")
    raise RequestError(f"--nproc-per-node {text}: expected a number, auto, gpu or cpu")


def program_python() -> str:
    """Return the Python that torchrun would run the program with: PYTHON_EXEC, that of a torchrun beside this command,
    or that of the torchrun on PATH; without one the current Python."""
    if wanted := os.environ.get("PYTHON_EXEC"):
        return wanted
    own, other = Path(sys.executable).parent / "torchrun", shutil.which("torchrun")
    if own.exists() or other is None:
        return sys.executable
    with Path(other).open("rb") as file:
        line = _SHEBANG.match(file.readline(4096))
    python = line[1].decode() if line else str(Path(other).with_name("python"))
    return python if Path(python).exists() else sys.executable


def torch_version(python: str) -> str:
    """Return the version of torch, which is not imported, in a Python; empty if it has none."""
    if python == sys.executable:
        with suppress(PackageNotFoundError):
            return version("torch")
        return ""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentNotAble(f"the Python of the program, {python}, cannot be started: {error}") from None


def make_spec(request: NodeRequest, hosts: Sequence[str]) -> RunSpec:
    """Return the spec of a run on some nodes, as it is recorded in the run folder."""
    options, gpus = request.options, len(request.facts.gpus)
    word = options.program.rpartition(".")[2] if options.module else Path(options.program).stem
    name = re.sub(r"[^A-Za-z0-9._-]", "-", word).lstrip("._-")[:80] or "run"
    return RunSpec(
        name=name,
        script=ScriptSpec(
            path=None if options.module else options.program,
            module=options.program if options.module else None,
            args=options.args,
            grace_s=options.grace_s,
        ),
        cluster=ClusterSpec(
            launcher="local" if len(hosts) == 1 else "hosts",
            hosts=[] if len(hosts) == 1 else list(hosts),
            nodes=len(hosts),
            procs_per_node=request.procs,
            device="cuda" if gpus else "cpu",
            backend="gloo" if request.procs > gpus else "auto",
            restarts=RestartSpec(max=options.max_restarts),
        ),
        run_root=options.log_dir or "runs",
    )


def plan_nodes(spec: RunSpec, facts: MachineFacts, hosts: Sequence[str], procs: Sequence[int]) -> LaunchPlan:
    """Return the plan: node by node, each with its own number of ranks; the environment is the caller's."""
    plan = make_plan(spec, facts)
    first = [sum(procs[:node]) for node in range(len(procs))]
    return msgspec.structs.replace(
        plan,
        world_size=sum(procs),
        nodes=[
            NodePlan(node=node, host=host, ranks=list(range(first[node], first[node] + procs[node])))
            for node, host in enumerate(hosts)
        ],
        environment=[item for item in plan.environment if item.name in KEPT_VARIABLES],
        warnings=[],
    )


def create_folder(spec: RunSpec) -> tuple[RunSpec, RunDir]:
    """Create the run folder; below the folder for temporary files where ``runs`` cannot be written."""
    try:
        return spec, create_run(spec.run_root, spec.name)
    except EnvironmentNotAble:
        if spec.run_root != "runs":
            raise
    spec = msgspec.structs.replace(spec, run_root=str(Path(tempfile.gettempdir()) / f"allranks-{os.getuid()}"))
    return spec, create_run(spec.run_root, spec.name)


def store_place(options: TorchrunOptions) -> tuple[str, int, bool]:
    """Return host and port of the ranks' store, and whether it must be this port; port 0: any free one."""
    fixed = options.backend == "static" and options.port is not None
    port = options.port or (DEFAULT_PORTS.get(options.backend, 0) if options.several_nodes else 0)
    return options.address or "localhost", port, fixed
