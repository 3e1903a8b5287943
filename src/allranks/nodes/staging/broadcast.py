"""Stage a bundle in a running job: query what nodes lack, send it with sbcast or srun, verify it, remove it at the end.

    with staged(bundle, Allocation.current()) as manifest:
        manifest.save(run.stage)
        ...                             # start each node's agent with manifest.of(node)

sbcast before Slurm 24.11 has no node list option, but it sends to the nodes of a job step: so a small step is started
on the nodes that lack something, creates the folder, and waits while ``sbcast --jobid=JOB.STEP`` writes there. If
sbcast does not work, the same step receives the archives through srun's standard input. Helper steps run node.py, one
task per node, and exchange JSON through srun.

Files that only the login node sees are packed before submission, others inside the job and only if a node lacks them.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import AllranksError, EnvironmentNotAble, RunFailed
from allranks.nodes.slurm.allocations import Allocation
from allranks.nodes.slurm.commands import Slurm
from allranks.nodes.slurm.srun import srun_command, wait_or_end
from allranks.nodes.staging import bundles, node
from allranks.nodes.staging.manifests import StageManifest, node_stage
from allranks.nodes.staging.sources import TEMPORARY_FOLDERS, PartFiles, package_versions, requested_parts
from allranks.rundir.files import write_json
from allranks.rundir.paths import RunDir
from allranks.spec.records import RunSpec

_LOADER = "import json,sys; exec(compile(json.loads(sys.stdin.buffer.readline()), 'node.py', 'exec'))"
# The first available interpreter; without one, print the error in the helper's own format.
_SHELL = (
    'loader=$1; shift; for p; do if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -c "$loader"; fi; done; '
    'printf \'@allranks %s 0 1 {"error": "no Python found; tried: %s"}\\n\' "$SLURMD_NODENAME" "$*"; exit 1'
)
_END_S = 15.0


class StagingStep:
    """node.py on some nodes, from its request to its answers. Use it as a context: leaving it ends the step."""

    def __init__(
        self, allocation: Allocation, nodes: Sequence[str], pythons: Sequence[str], request: dict[str, Any]
    ) -> None:
        self.nodes = tuple(nodes)
        self._answers: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue()
        srun = srun_command(
            nodes,
            ["sh", "-c", _SHELL, "sh", _LOADER, *pythons],
            prefix=allocation.prefix,
            job_id=allocation.job_id,
            options=[
                "--overlap",
                "--mem=0",
                "--cpu-bind=none",
                "--input=all",
                "--chdir=/",
                "--job-name=allranks-stage",
            ],
        )
        env = {k: v for k, v in os.environ.items() if k not in _STEP_SETTINGS}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        try:
            self._process = subprocess.Popen(
                srun, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env
            )
        except FileNotFoundError:
            raise EnvironmentNotAble(f"the program {srun[0]!r} is not installed") from None
        threading.Thread(target=self._read, daemon=True).start()
        self.send(json.dumps(Path(str(node.__file__)).read_text(encoding="utf-8")).encode() + b"\n")
        self.order(**request)

    def send(self, data: bytes) -> None:
        """Send input to all nodes of the step; if the step has ended, `answers` reports it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def order(self, **order: Any) -> None:
        """Send one line of JSON."""
        self.send(json.dumps(order).encode() + b"\n")

    def stream(self, part: str, archive: Path, timeout_s: float) -> None:
        """Send an archive through srun: slower than sbcast, but always allowed."""
        guard = threading.Timer(timeout_s, self._process.kill)
        guard.start()
        try:
            self.order(do="stream", part=part, bytes=archive.stat().st_size)
            with archive.open("rb") as file:
                while block := file.read(1 << 20):
                    self.send(block)
        finally:
            guard.cancel()

    def answers(self, timeout_s: float) -> dict[str, dict[str, Any]]:
        """Return the next answer of every node.

        Raises:
            RunFailed: a node reported an error, or not all of them answered in time.
        """
        answers: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(self.nodes):
            try:
                said = self._answers.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(self.nodes) - set(answers))
                raise RunFailed(f"staging: {', '.join(missing)} did not answer within {timeout_s:g} s") from None
            if said is None:
                missing = sorted(set(self.nodes) - set(answers))
                self._errors.seek(0)
                lines = self._errors.read().decode(errors="replace").strip().splitlines()
                why = lines[-1] if lines else "no output"
                raise RunFailed(f"staging: the step ended without an answer of {', '.join(missing)}: {why}")
            answers[said[0]] = said[1]
        wrong = [f"{name}: {answer['error']}" for name, answer in sorted(answers.items()) if "error" in answer]
        if wrong:
            raise RunFailed("staging: " + "; ".join(wrong))
        return answers

    def __enter__(self) -> StagingStep:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        wait_or_end(self._process, _END_S, _END_S)
        self._errors.close()

    def _read(self) -> None:
        """Join fragments to answers, until the step ends."""
        fragments: dict[str, list[str]] = {}
        assert self._process.stdout is not None
        try:
            for raw in self._process.stdout:
                words = raw.decode(errors="replace").rstrip("\n").split(" ", 4)
                if words[0] != "@allranks" or len(words) != 5:
                    continue  # output of modules and login scripts
                mine = fragments.setdefault(words[1], [])
                mine.append(words[4])
                if len(mine) == int(words[3]):
                    self._answers.put((words[1], json.loads("".join(fragments.pop(words[1])))))
        finally:  # also after a line that cannot be parsed: `answers` must not wait for its whole time
            self._answers.put(None)


# Variables of a batch job that must not affect these steps: they have one task per node, on named nodes.
_STEP_SETTINGS = {
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_EXACT"),
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_CPU_BIND", "SLURM_GPUS", "SLURM_GPU_BIND"),
    *("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_NNODES", "SLURM_HOSTFILE", "SLURM_ARBITRARY_NODELIST"),
}
ANSWER_S = 180.0
SLOWEST_BYTES_PER_S = 5e6
Log = Callable[[str], None]
StagingAnswers = dict[str, dict[str, Any]]


@contextmanager
def staged(
    bundle: bundles.Bundle,
    allocation: Allocation,
    *,
    always: bool = False,
    method: str = "auto",
    log: Log = lambda _: None,
    lost: Callable[[], Collection[str]] = tuple,
) -> Iterator[StageManifest]:
    """Yield what each node of the job must use; staged files are removed at the end of the context.

    Args:
        always: stage every part on every node, even if it has it (``cluster.stage: always``).
        method: ``sbcast``, ``stream`` (through srun), or ``auto``: sbcast, and stream if it fails.
        lost: returns nodes that no longer answer, and on which nothing can be removed.

    Raises:
        RunFailed: a node did not answer, a part arrived damaged, or there is not enough space.
        EnvironmentNotAble: a node lacks the packages and an interpreter for staged ones.
    """
    began = time.monotonic()
    touched = allocation.nodes
    try:
        answers = ask_nodes(bundle, allocation, always=always)
        lacking = {name: answer for name, answer in answers.items() if answer["lacks"]}
        touched = tuple(lacking)
        python = bundle.python
        if none := sorted(name for name, a in lacking.items() if "env" in a["lacks"] and not a["python"]):
            raise EnvironmentNotAble(
                f"{', '.join(none)}: the packages are missing, and there is no Python {python.version} "
                f"({python.soabi}) to run staged ones (tried: {', '.join(python.candidates)}); load one with "
                "cluster.modules or cluster.setup, or exclude the node"
            )
        sent, used = 0, set()
        for names, parts in _groups(bundle, lacking):
            log(f"staging {', '.join(part.name for part in parts)} on {', '.join(names)}")
            count, method_used = _send(bundle, allocation, {name: lacking[name] for name in names}, parts, method, log)
            sent += count
            used.add(method_used)
        yield StageManifest(
            job=allocation.folder,
            bundle=bundle.key,
            interpreter=bundle.python.executable,
            method="+".join(sorted(used)) or "none",
            bytes_sent=sent,
            seconds=time.monotonic() - began,
            nodes=[node_stage(bundle, n, answers[n]["lacks"], answers[n]["folder"]) for n in allocation.nodes],
        )
    finally:
        if left := tuple(name for name in touched if name not in lost()):
            _remove(bundle, allocation, left, log)


def ask_nodes(bundle: bundles.Bundle, allocation: Allocation, *, always: bool = False) -> StagingAnswers:
    """Query which parts each node lacks, with one step on all of them."""
    parts = [
        {name: getattr(part, name) for name in ("name", "path", "probe", "identity", "sha256")} for part in bundle.parts
    ]
    live = Slurm([*allocation.prefix], "this job's").output("squeue", "--me", "--noheader", "--format=%A", timeout_s=60)
    request = {
        "always": always,
        "job": allocation.folder,
        "live": None if live is None else live.split(),  # without an answer of Slurm nothing old is removed
    }
    return _ask(allocation, bundle.python, parts, request)


def missing_parts(part_files: Sequence[PartFiles], allocation: Allocation) -> set[str]:
    """Return the names of the parts that some node lacks, before they are packed; nothing is written."""
    parts = [
        {"name": s.name, "path": str(s.path), "probe": list(s.probe), "identity": bundles.identity_of(s)}
        for s in part_files
    ]
    answers = _ask(allocation, bundles.interpreter(), parts, {"only_look": True, "always": False})
    return {name for answer in answers.values() for name in answer["lacks"]}


def _ask(
    allocation: Allocation, python: bundles.Interpreter, parts: list[dict[str, Any]], request: dict[str, Any]
) -> StagingAnswers:
    request = {"verb": "ask", "python": msgspec.to_builtins(python), "parts": parts, **request}
    with StagingStep(allocation, allocation.nodes, _pythons(python), request) as step:
        return step.answers(ANSWER_S)


def _pythons(python: bundles.Interpreter) -> list[str]:
    return list(dict.fromkeys([python.executable, *python.candidates]))


def _groups(bundle: bundles.Bundle, lacking: StagingAnswers) -> Iterator[tuple[list[str], list[bundles.BundlePart]]]:
    """Yield nodes that lack the same parts in the same folder."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, answer in sorted(lacking.items()):
        groups.setdefault((answer["folder"], *answer["lacks"]), []).append(name)
    for (_, *parts), names in groups.items():
        yield names, [part for part in bundle.parts if part.name in parts]


def _send(
    bundle: bundles.Bundle,
    allocation: Allocation,
    group: StagingAnswers,
    parts: list[bundles.BundlePart],
    method: str,
    log: Log,
) -> tuple[int, str]:
    """Send a group of nodes its parts; nodes that share the folder are served once."""
    folder = next(iter(group.values()))["folder"]
    total = sum(part.bytes for part in parts)
    limit = ANSWER_S + total / SLOWEST_BYTES_PER_S
    request = {
        "verb": "receive",
        "folder": folder,
        "interpreters": {name: answer.get("python") for name, answer in group.items()},
        "parts": [{"name": p.name, "sha256": p.sha256} for p in parts],
    }
    with StagingStep(allocation, list(group), _pythons(bundle.python), request) as step:
        ready = step.answers(ANSWER_S)
        first = {name: min(set(answer["sees"]) & set(group)) for name, answer in ready.items()}
        if all(name == one for name, one in first.items()):
            need = total + sum(part.unpacked_bytes for part in parts)
            small = [f"{name} has {a['free'] >> 20} MiB" for name, a in sorted(ready.items()) if a["free"] < need]
            if small:
                lack = f"{folder} needs {(need >> 20) + 1} MiB, but {', '.join(small)}"
                raise RunFailed(f"staging: {lack}; set TMPDIR to a larger disk of the nodes")
            method_used = "stream"
            if method != "stream":
                try:
                    _sbcast(allocation, next(iter(ready.values()))["step"], folder, parts, limit)
                    method_used = "sbcast"
                except AllranksError as error:
                    if method == "sbcast":
                        raise
                    log(f"sbcast does not work here ({error}); sending through srun")
            if method_used == "stream":
                for part in parts:
                    step.stream(part.name, Path(part.archive), limit)
            step.order(do="unpack")
            step.answers(limit)
            return total * len(group), method_used
    log(f"{folder} is shared by several nodes: {first}")
    return _send(bundle, allocation, {one: group[one] for one in set(first.values())}, parts, method, log)


def _sbcast(allocation: Allocation, step: str, folder: str, parts: list[bundles.BundlePart], limit_s: float) -> None:
    """Copy archives to the nodes of a step of the job."""
    for part in parts:
        job, target = f"--jobid={allocation.job_id}.{step}", node.incoming(folder, part.name)
        words = ("sbcast", "--force", job, part.archive, target)
        done = Slurm([*allocation.prefix], "this job's").call(*words, timeout_s=limit_s)
        if done.returncode:
            raise RunFailed(" ".join(done.stderr.split())[-200:] or f"exit code {done.returncode}")


def _remove(bundle: bundles.Bundle, allocation: Allocation, nodes: tuple[str, ...], log: Log) -> None:
    """Remove the job's folders; a lost node must not hide why the job failed."""
    try:
        with StagingStep(
            allocation, nodes, _pythons(bundle.python), {"verb": "remove", "job": allocation.folder}
        ) as step:
            left = sorted(name for name, answer in step.answers(ANSWER_S).items() if not answer["gone"])
        if left:
            log(f"staging: {', '.join(left)} could not remove the staged files; the next job there tries again")
    except AllranksError as error:
        log(f"staging: staged files may be left on {', '.join(nodes)}: {error}; the next job there removes them")


def pack_ahead(spec: RunSpec, run: RunDir) -> bundles.Bundle | None:
    """Pack the script, model and data in folders for temporary files on the login node.

    Each node has such folders of its own, so the job's first node, which packs the other files, could not read them.

    Returns:
        The bundle, which is also recorded in the run folder; None if there are no such files.
    """
    parts = [part for part in requested_parts(spec) if part.path is not None and is_node_local(part.path, run.root)]
    if not parts:
        return None
    store = bundles.store_of(spec)
    if is_node_local(store, run.root):
        store = run.root / "bundle"
    bundle = bundles.assemble([source for part in parts for source in part.find()], store, package_versions())
    write_json(run.bundle, msgspec.to_builtins(bundle))
    return bundle


def is_node_local(path: Path, run_root: Path) -> bool:
    """Return whether a path is in a folder for temporary files and the run folder, which all nodes see, is not."""
    path, seen = path.expanduser().resolve(), run_root.resolve()
    return any(path.is_relative_to(folder) and not seen.is_relative_to(folder) for folder in TEMPORARY_FOLDERS)


def load_packed_ahead(run: RunDir) -> bundles.Bundle | None:
    """Return the bundle that `pack_ahead` recorded."""
    return bundles.load_bundle(run.bundle) if run.bundle.exists() else None


def bundle_for(
    spec: RunSpec,
    allocation: Allocation,
    *,
    packages: bool,
    always: bool,
    ahead: bundles.Bundle | None = None,
    log: Log = lambda _: None,
) -> bundles.Bundle:
    """Return a bundle, inside the job, of the parts that some node lacks, or of all.

    Args:
        packages: whether a node may lack Python packages; scanning them takes a moment.
        ahead: the bundle packed on the login node; it is used unchanged.
    """
    packed = ahead.parts if ahead else []
    sources = bundles.checked_sources(spec, packages=packages, without={part.name for part in packed})
    if not always:
        needed = missing_parts(sources, allocation)
        sources = [source for source in sources if source.name in needed]
    return bundles.assemble(sources, bundles.store_of(spec), package_versions(), log, packed=packed)
