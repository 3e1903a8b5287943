"""Check this machine, and derive what every node must have: packages, folders, ports.

The rendezvous port is computed from the job's
ID, so that all nodes use the same one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from allranks.nodes.rank_command import InterpreterFacts, ask_interpreter, node_python, program_file
from allranks.nodes.records import CPU_TORCH, Check, NodeRequirements, PreflightReport, RequiredFolder
from allranks.planning import memory
from allranks.planning.records import LaunchPlan
from allranks.rundir.checkpoints import missing_room
from allranks.spec.data_sources import looks_like_file, parts_of
from allranks.spec.records import RunSpec
from allranks.spec.strategies import strategy_info
from allranks.spec.validation import is_container
from allranks.utils.filesystem import FREE_SPACE, PACKAGE_FOLDER
from allranks.utils.machine import MachineFacts
from allranks.utils.text import format_bytes_word

LOWEST_PORT, EPHEMERAL_PORTS = 20_000, 32_768
PORT_CANDIDATES = 4
TRAINING_PACKAGES = ["torch", "transformers", "tokenizers", "safetensors", "numpy"]
MIN_FREE_BYTES = 64 * 2**20


def rendezvous_port(job_id: str | int, attempt: int = 0) -> int:
    """Return a port from a hash of the job's ID (the last digits alone collide), below Linux's ephemeral range.

    `attempt` selects the next candidate if a port is taken on the first node.
    """
    import hashlib  # loads OpenSSL, which no plan needs

    digest = hashlib.sha256(f"allranks:{job_id}:{attempt}".encode()).digest()
    return LOWEST_PORT + int.from_bytes(digest[:8], "big") % (EPHEMERAL_PORTS - LOWEST_PORT)


def port_candidates(job_id: str | int) -> list[int]:
    """Return ports to try, in order of preference."""
    return [rendezvous_port(job_id, attempt) for attempt in range(PORT_CANDIDATES)]


def needed_packages(spec: RunSpec) -> list[str]:
    """Return the packages that the ranks of this run import."""
    if is_container(spec.cluster.python):
        return []  # the image contains them
    if spec.script is not None:
        return ["torch"]
    return TRAINING_PACKAGES + (["peft"] if spec.adapter.type == "lora" else [])


FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn", "flash-attn-4"),
}
"""What transformers imports, and the distribution from which it must be."""


def required_packages(spec: RunSpec) -> dict[str, str]:
    """Return every package a run needs with its install command; those that all ranks import come first."""
    packages = dict.fromkeys(needed_packages(spec), "pip install 'allranks[train]'")
    if is_container(spec.cluster.python) or spec.script is not None:
        return packages
    # Nodes only look for the library of another engine, because importing it is slow and prints messages.
    if package := strategy_info(spec.strategy.name).package:
        packages[package] = f"pip install 'allranks[{'deepspeed' if package == 'deepspeed' else 'train'}]'"
    for name in spec.observe.all_trackers:
        if ":" not in name:  # a class of the user is imported by rank 0, from its folder too
            packages[name] = f"pip install 'allranks[{name}]'"
    flash = FLASH_PACKAGES.get(spec.model.attention) if spec.model is not None else None
    if flash and importlib.util.find_spec("kernels") is None:  # with which transformers loads them from the hub
        packages[flash[0]] = f"pip install kernels, or {flash[1]}, or set model.attention: sdpa"
    return packages


def node_requirements(
    spec: RunSpec, run_root: Path, *, ports: Sequence[int] = (), imports: bool = True, folder: Path | None = None
) -> NodeRequirements:
    """Return the requirements for every node of the spec. Paths are the launcher's, made absolute from `folder`."""
    from allranks.nodes.checks.registry import ASKS  # with all checks; a run on this machine needs few of them

    folder = folder or Path.cwd()
    required = NodeRequirements(
        python=node_python(spec.cluster.python),
        packages=list(required_packages(spec)),
        imports=needed_packages(spec) if imports else [],
        folders=_folders(spec, run_root, folder),
        ports=list(ports),
    )
    for ask in ASKS:
        required = ask(spec, folder, required)
    return required


def _folders(spec: RunSpec, run_root: Path, folder: Path) -> list[RequiredFolder]:
    def full(path: str | Path) -> str:
        return str((folder / Path(path).expanduser()).absolute())

    folders = [
        RequiredFolder(role="project", path=str(PACKAGE_FOLDER), fingerprint=True),
        RequiredFolder(role="run", path=full(existing_folder(folder / run_root)), write=True),
    ]
    if spec.script is not None:
        program = program_file(spec.script)
        if program is not None:
            folders.append(RequiredFolder(role="script", path=full(program), fingerprint=True))
        if spec.script.workdir is not None:
            folders.append(RequiredFolder(role="workdir", path=full(spec.script.workdir)))
    sources = [part.source for part in parts_of(spec.data)] if spec.data else []
    roles = ["data" if i == 0 else f"data {i + 1}" for i in range(len(sources))]
    for role, source in (*zip(roles, sources, strict=True), ("eval data", spec.eval.source)):
        if source and _is_path(source, folder):
            folders.append(RequiredFolder(role=role, path=full(source), fingerprint=True))
    if spec.model is not None and not spec.model.name.startswith("tiny:") and _is_path(spec.model.name, folder):
        folders.append(RequiredFolder(role="model", path=full(spec.model.name), fingerprint=True))
    if spec.cluster.cache:
        folders.append(
            RequiredFolder(
                role="cache", path=full(existing_folder(folder / Path(spec.cluster.cache).expanduser())), write=True
            )
        )
    return folders


def _is_path(text: str, folder: Path) -> bool:
    return not text.startswith("builtin:") and (looks_like_file(text) or (folder / text).exists())


def existing_folder(path: Path) -> Path:
    """Return the folder itself, or its nearest existing parent."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


@contextmanager
def write_nonces(required: NodeRequirements) -> Iterator[tuple[NodeRequirements, dict[str, str]]]:
    """Write a file with a secret to every folder that must be shared; removed at the end.

    Yields the requirements with the files' names, and the secret by role; none for a folder not writable from here.
    """
    import secrets

    secret, name = secrets.token_hex(16), f".allranks-nonce-{os.getpid()}-{secrets.token_hex(4)}"
    made: list[Path] = []
    folders, nonces = [], {}
    try:
        for item in required.folders:
            path = Path(item.path) / name
            named = item
            if item.write:
                try:
                    path.write_text(secret)
                    made.append(path)
                    named, nonces[item.role] = msgspec.structs.replace(item, nonce=name), secret
                except OSError:
                    pass
            folders.append(named)
        yield msgspec.structs.replace(required, folders=folders), nonces
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def local_report(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts, fit: memory.Fit) -> PreflightReport:
    """Return every check of this machine. Its packages do not count where nodes run the ranks with their own Python."""
    own_ranks = spec.cluster.launched_by.runs_here
    ask_packages = own_ranks or spec.cluster.python is None
    installed_by = required_packages(spec)
    ranks_python = _ask_own_python(spec, list(installed_by) if ask_packages else [])
    threads = next((e.value for e in plan.environment if e.name == "OMP_NUM_THREADS"), "?")
    checks = [
        Check(name="python", ok=True, found=".".join(map(str, sys.version_info[:3]))),
        *([_packages(installed_by, ranks_python, gpus=bool(facts.gpus), own_ranks=own_ranks)] if ask_packages else []),
        *_run_root_checks(spec, plan, fit),
        Check(name="threads", ok=True, found=f"{plan.procs_per_node}x{threads}/{facts.cpus}-cores"),
    ]
    return PreflightReport(host=facts.host, checks=checks)


def _ask_own_python(spec: RunSpec, names: Sequence[str]) -> InterpreterFacts | None:
    """Ask the ranks' Python on this machine for some modules; None if it is this one, or in a container."""
    wanted = spec.cluster.python
    if wanted is None or not spec.cluster.launched_by.runs_here or is_container(wanted):
        return None
    return ask_interpreter(wanted, names)


def _packages(installed_by: dict[str, str], there: InterpreterFacts | None, *, gpus: bool, own_ranks: bool) -> Check:
    missing = [
        name
        for name in installed_by
        if (importlib.util.find_spec(name) is None if there is None else name in there.missing)
    ]
    where = f"in cluster.python: {there.python} -m " if there is not None else ""
    commands = dict.fromkeys(f"{where}{installed_by[name]}" for name in missing)
    if "torch" in missing and not gpus:
        commands = {f"without a GPU first {where}{CPU_TORCH}": None} | commands
    if not own_ranks:
        commands["or set cluster.python to the environment of the nodes that has them"] = None
    return Check(
        name="packages",
        ok=not missing,
        found=f"missing {', '.join(missing)}" if missing else "ok",
        cure="; ".join(commands),
    )


def _run_root_checks(spec: RunSpec, plan: LaunchPlan, fit: memory.Fit) -> tuple[Check, Check]:
    """Return whether the disk of the run root has room for the first checkpoint, and whether it can be written."""
    import tempfile

    folder, error, problem = existing_folder(Path(spec.run_root)), "", ""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)  # a full disk fails only then
    except OSError as failure:
        error = failure.strerror or str(failure)
    free = shutil.disk_usage(folder).free
    if free <= MIN_FREE_BYTES:
        problem = f"{spec.run_root} has less than {MIN_FREE_BYTES >> 20} MiB free"
    elif spec.model is not None:
        need = spec.checkpoint.least_bytes(memory.saved_bytes(fit, spec, plan))
        if problem := missing_room(folder, need):
            problem += f", and the first checkpoint does not fit; {FREE_SPACE}, or save less (checkpoint.mode)"
    disk = Check(name="disk", ok=not problem, found=f"{format_bytes_word(free)}-free", cure=problem)
    cannot = f"run_root {spec.run_root}: cannot create a run folder there: {error}"
    run = Check(
        name="run",
        ok=not error,
        found=f"READ-ONLY({folder})" if error else "rw",
        cure=f"{cannot}; choose another with --set run_root=FOLDER",
    )
    return disk, run


def stamp() -> str:
    """Return the current time for display."""
    return time.strftime("%Y-%m-%d %H:%M:%S")
