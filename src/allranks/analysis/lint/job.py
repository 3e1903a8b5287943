"""The view of a file that the rules use: the script's calls and variables, and the job that its options describe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import msgspec

from allranks.analysis.lint.command_options import (
    LAUNCHERS,
    PYTHON,
    Option,
    launcher_options,
    read_directives,
    slurm_options,
)
from allranks.analysis.lint.readers import FileKind, ShellReader
from allranks.analysis.lint.records import Assignment, Directive, ProgramCall, Severity, Violation
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN, LineIndex, MappedText

NODE_NAMES = {"SLURM_JOB_NUM_NODES", "SLURM_NNODES"}
NODE_LIST_NAMES = {"SLURM_NODEID", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}


class LauncherCall(msgspec.Struct, frozen=True):
    """A call that starts ranks. `kind` is the launcher's name, or ``python`` for one rank per task of srun."""

    kind: str
    call: ProgramCall
    options: dict[str, Option]

    @property
    def srun(self) -> ProgramCall | None:
        return self.call.srun

    @property
    def open_ended(self) -> bool:
        """Return whether it has options that are unknown here: ``torchrun $ARGS train.py``."""
        return any(a.source.text.startswith(UNRESOLVED_OPEN) and not a.quoted for a in self.call.args)

    def option(self, *names: str) -> Option | None:
        return next((self.options[n] for n in names if n in self.options), None)

    def value(self, *names: str) -> str | None:
        option = self.option(*names)
        return option.value if option else None


class JobDescription:
    """One file as the rules see it. Whether something is a finding is decided by the rules."""

    def __init__(
        self,
        text: str,
        kind: FileKind,
        reading: ShellReader,
        *,
        nodes: int | None = None,
        source: MappedText | None = None,
    ) -> None:
        self.text, self.kind, self.reading, self._nodes = text, kind, reading, nodes
        self.source = source or MappedText(text)  # the script itself, if the file contains it in a here-document
        self.lines = LineIndex(text)
        self.calls, self.assignments, self.uses = reading.calls, reading.assignments, reading.uses
        comments = {c.offset for c in reading.comments}
        self.directives = read_directives(self.source, comments) if kind == "script" else []

    @cached_property
    def heading(self) -> dict[str, Directive]:
        """Return the directives that sbatch reads; the last of a name counts. If all come too late, return those that were intended."""
        read = [d for d in self.directives if not d.late] or self.directives
        return {d.name: d for d in read if d.name}

    @property
    def is_batch(self) -> bool:
        return bool(self.directives)

    def heads(self, name: str) -> str | None:
        found = self.heading.get(name)
        return found.value if found else None

    @cached_property
    def launches(self) -> list[LauncherCall]:
        """Return the calls that start ranks, in the order of the file."""
        found: list[LauncherCall] = []
        for call in self.calls:
            if call.in_substitution:
                continue
            if call.program in LAUNCHERS:
                found.append(LauncherCall(call.program, call, launcher_options(call)))
            elif PYTHON.match(call.program) and _runs_file(call) and (call.srun or _mpi(call)):
                found.append(LauncherCall("python", call, {}))
        return found

    def number(self, text: str | None) -> int | None:
        """Return a count written as digits or as one of Slurm's variables; None if it is unknown."""
        if text is None:
            return None
        text = text.strip().strip("\"'")
        if text.isdecimal() and len(text) < 9:
            return int(text)
        name = text.removeprefix("${").removeprefix("$").removesuffix("}").partition(":-")[0]
        if name in NODE_NAMES:
            return self.nodes
        if name == "SLURM_NTASKS_PER_NODE":
            return self.number(self.heads("ntasks-per-node"))
        if name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
            return self.gpus_per_node
        if name in ("SLURM_NTASKS", "SLURM_NPROCS"):
            return self.number(self.heads("ntasks"))
        return None

    @cached_property
    def nodes(self) -> int | None:
        """Return the nodes that the job requests; the larger bound of a range."""
        if self._nodes is not None:
            return self._nodes
        if self.kind == "environment":
            told = [
                int(a.value)
                for name in NODE_NAMES
                for a in self.set_values(name)
                if a.value.isdecimal() and len(a.value) < 9
            ]
            return max(told, default=None)
        asked = self.heads("nodes")
        if asked and "nodes" in self.heading:
            bounds = [int(n) for n in re.findall(r"\d{1,8}", asked)]
            if bounds and re.fullmatch(r"[\d,:\-]+", asked):
                return max(bounds)
            return None
        if self.number(self.heads("ntasks")) == 1:
            return 1
        literal = [int(n.value) for c in self.calls if c.program in ("srun", "salloc") and not c.in_substitution
                   for n in [slurm_options(c).get("nodes")] if n and n.value and n.value.isdecimal() and len(n.value) < 9]  # fmt: skip
        literal += [int(v) for launch in self.launches for v in [launch.value("nnodes", "num_machines", "num_nodes")]
                    if v and v.isdecimal() and len(v) < 9]  # fmt: skip
        if literal:
            return max(literal)
        return 1 if self.is_batch and not self._spread_by_name() else None

    def _spread_by_name(self) -> bool:
        return any(u.name in NODE_LIST_NAMES for u in self.uses)

    @cached_property
    def multi_node(self) -> bool:
        """Return whether more than one node takes part, as far as the file shows."""
        if self.nodes is not None:
            return self.nodes > 1
        if any(launch.value("nnodes") == "1" or "standalone" in launch.options for launch in self.launches):
            return False
        return self._spread_by_name()

    @cached_property
    def gpus_per_node(self) -> int | None:
        asked = self.heads("gpus-per-node") or self.heads("gres")
        if asked is None or (self.heads("gpus-per-node") is None and not asked.startswith("gpu")):
            return None
        digits = re.search(r"(?:^|:)(\d{1,6})(?:\(|,|$)", asked)
        return int(digits[1]) if digits else None

    def srun_nodes(self, srun: ProgramCall) -> int | None:
        asked = slurm_options(srun).get("nodes")
        return self.number(asked.value) if asked else self.nodes

    def tasks_per_node(self, srun: ProgramCall) -> int | None:
        """Return the tasks per node that this srun starts; None if the file does not show it."""
        options = slurm_options(srun)
        if "ntasks" in options:
            text = options["ntasks"].value or ""
            if text.removeprefix("${").removeprefix("$").removesuffix("}") in NODE_NAMES and "nodes" not in options:
                return 1
            tasks, nodes = self.number(text), self.srun_nodes(srun)
            return -(-tasks // nodes) if tasks and nodes else None
        # The job's number of tasks is in SLURM_NTASKS and overrides srun's own --ntasks-per-node.
        tasks = self.number(self.heads("ntasks"))
        if tasks:
            return -(-tasks // self.nodes) if self.nodes else None
        if "ntasks-per-node" in self.heading:
            return self.number(self.heads("ntasks-per-node"))
        if "ntasks-per-node" in options:
            return self.number(options["ntasks-per-node"].value)
        per_gpu = self.heading.keys() & {"ntasks-per-gpu", "ntasks-per-socket"}
        return None if per_gpu else 1

    def set_values(self, name: str) -> Iterator[Assignment]:
        """Yield every assignment of a variable that may reach a program."""
        return (a for a in self.assignments if a.name == name and not a.removed)

    def has(self, *names: str) -> bool:
        return any(a.name in names and not a.removed for a in self.assignments)

    def line_of(self, offset: int) -> str:
        return self.lines.line(self.lines.place(offset)[0])


def _runs_file(call: ProgramCall) -> bool:
    return any(a.text.endswith(".py") or a.text == "-m" for a in call.args) and not any(
        a.text == "-c" for a in call.args
    )


def _mpi(call: ProgramCall) -> bool:
    return any(c.program in ("mpirun", "mpiexec", "orterun") for c in call.under)


RuleCheck = Callable[["JobDescription"], Iterable[Violation]]


class LintRule(msgspec.Struct, frozen=True):
    """One rule. `why` says what happens, `cure` what to write, `source` where this is documented."""

    id: str
    severity: Severity
    check: RuleCheck
    why: str
    cure: str
    source: str
    files: tuple[str, ...] = ("script",)  # kinds of files it applies to
