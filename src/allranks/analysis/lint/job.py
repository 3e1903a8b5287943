"""The view of a file that the rules use: the script's calls and variables, and the job that its options describe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import msgspec

from allranks.analysis.lint.command_options import (
    LAUNCHERS,
    PYTHON,
    Option,
    launcher_options,
    read_directives,
    slurm_options,
)
from allranks.analysis.lint.files import FileKind, find_placeholders
from allranks.analysis.lint.readers import ShellReader, blank_comments, calculate, starts_with_mpi
from allranks.analysis.lint.records import Argument, Assignment, Directive, ProgramCall
from allranks.analysis.lint.shell_tokens import LineIndex, MappedText
from allranks.utils.text import lazy_regex

NODE_NAMES = {"SLURM_JOB_NUM_NODES", "SLURM_NNODES"}
NODE_LIST_NAMES = {"SLURM_NODEID", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}
MAX_LEVELS = 8
USUAL_GPUS = 8
"""No common node has more: a job with eight GPUs per node has the node for itself."""
HALF_OF_USUAL_GPUS = 4
FEW_GPUS, FEW_CPUS = 2, 16
"""A job with so many GPUs, and CPUs, per node leaves room for another one."""
ACCELERATORS = lazy_regex(r"(?:gpu|dcu|npu|mlu|gcd)(?::|\Z)")
ONE_OF_KIND = lazy_regex(r"(?:gpu|dcu|npu|mlu|gcd):(?=\w*[a-z\d])[A-Za-z][\w.-]{2,}")
"""A request that names the kind of GPU only is for one: ``gpu:a100``, but not ``gpu:NGPUS``."""
LIMITS_MEMORY = {"mem", "mem-per-cpu", "mem-per-gpu"}
# Partitions that allocate whole nodes, by the documentation of LUMI (standard, standard-g) and JSC (booster, dc-gpu,
# batch-like names are too general to be listed).
EXCLUSIVE_PARTITIONS = {"standard-g", "booster", "develbooster", "dc-gpu", "dc-gpu-devel"}
# https://docs.nersc.gov/jobs/policy/: all QOS of the GPU nodes but the shared ones
NERSC_EXCLUSIVE_QOS = {"regular", "debug", "premium", "preempt", "overrun", "realtime"}
SETS_PATHS_ONLY = lazy_regex(
    r"(?:activate|(?:conda|mamba)[\w-]*\.sh|bashrc|profile|modules?\.sh|init/(?:ba)?sh|lmod\S*|z00\S*)\Z"
)
# Modules of compilers, CUDA, Python and containers, which set paths, but neither addresses nor ports.
STARTS = lazy_regex(
    r"\s*(?:srun|mpirun|mpiexec|jsrun|torchrun|deepspeed|accelerate\s+launch|python[\d.]*\s.*-m\s+torch\.distributed)\b"
)
OTHER_BATCH_SYSTEMS = lazy_regex(r"^#(?:PBS|COBALT|BSUB|PJM|OAR)\s", re.MULTILINE)


def count_gpus(per_node: str | None, gres: str | None) -> tuple[int | None, bool]:
    """Return the GPUs per node of ``--gpus-per-node`` or ``--gres``, and whether one of the two requests GPUs."""
    values = per_node
    if values is None:
        kinds = (gres or "").removeprefix("gres/").split(",")
        values = next((kind for kind in kinds if ACCELERATORS.match(kind)), None)
    if values is None:
        return None, False
    digits = re.search(r"(?:^|:)(\d{1,6})(?:\(|,|$)", values)
    return (
        int(digits[1]) if digits else 1 if ACCELERATORS.fullmatch(values) or ONE_OF_KIND.fullmatch(values) else None
    ), True


class LauncherCall(msgspec.Struct, frozen=True):
    """A call that starts ranks. `kind` is the launcher's name, or ``python`` for one rank per task of srun."""

    kind: str
    call: ProgramCall
    options: dict[str, Option]
    repeated: tuple[tuple[str, Option], ...] = ()  # options that a later one of the same name replaces
    unknown: bool = False  # has options that are unknown here, as in ``torchrun $ARGS train.py``
    cut: bool = False  # the command ends earlier than its writer meant: its last options are lost

    @property
    def srun(self) -> ProgramCall | None:
        return self.call.srun

    @property
    def open_ended(self) -> bool:
        """Return whether it may have more options than the file shows."""
        return self.unknown or self.cut

    @property
    def open_srun(self) -> bool:
        """Return whether srun has options that are unknown here."""
        return self.srun is not None and self.srun.has_open_options

    def option(self, *names: str) -> Option | None:
        return next((self.options[n] for n in names if n in self.options), None)

    def value(self, *names: str) -> str | None:
        option = self.option(*names)
        return option.value if option else None

    def place_of(self, arg: Argument, part: str) -> int:
        """Return where the last such part of an option's value stands, maybe in a variable's value; else the option."""
        start = self.call.args.index(arg)
        for word in self.call.args[start : start + 2]:
            index = word.source.text.rfind(part)
            if index >= 0:
                return word.source.where(index)
        return arg.offset


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
        slurm_version: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self.text, self.kind, self.reading, self._nodes = text, kind, reading, nodes
        self.source = source or MappedText(text)  # the script itself, if the file contains it in a here-document
        self._slurm_version = slurm_version
        self.folder = folder  # of the script; None for standard input
        self.lines = LineIndex(text)
        self.calls, self.assignments, self.uses = reading.calls, reading.assignments, reading.uses
        comments = {c.offset for c in reading.comments}
        self.placeholders = find_placeholders(text, comments) if kind == "script" else []
        self.directives = read_directives(self.source, comments) if kind == "script" else []

    @cached_property
    def heading(self) -> dict[str, Directive]:
        """Return the directives that sbatch reads (the last of a name counts); if all come too late, those intended."""
        read = [d for d in self.directives if not d.late] or self.directives
        return {d.name: d for d in read if d.name}

    @property
    def is_batch(self) -> bool:
        """Return whether the file is a batch script of Slurm, whose request is read."""
        return bool(self.directives)

    @property
    def submits(self) -> bool:
        return bool(self.reading.submitted) or any(c.program in ("sbatch", "qsub", "bsub") for c in self.calls)

    @cached_property
    def runs_unattended(self) -> bool:
        """Return whether a batch system of any kind runs the file, so that it has no terminal."""
        return self.is_batch or bool(OTHER_BATCH_SYSTEMS.search(self.text))

    def heads(self, name: str) -> str | None:
        option = self.heading.get(name)
        return option.value if option else None

    @cached_property
    def launches(self) -> list[LauncherCall]:
        """Return the calls that start ranks, in the order of the file."""
        launches: list[LauncherCall] = []
        for call, following in zip_longest(self.calls, self.calls[1:]):
            if call.in_substitution:
                continue
            if call.program in LAUNCHERS:
                options = launcher_options(call)
                cut = any(a.text and not a.text.strip() for a in call.args) or (
                    following is not None and following.written.startswith("-")
                )
                launches.append(LauncherCall(call.program, call, options.last, options.repeated, options.unknown, cut))
            elif PYTHON.match(call.program) and _runs_file(call) and (call.srun or starts_with_mpi(call)):
                launches.append(LauncherCall("python", call, {}))
        return launches

    def number(self, text: str | None, depth: int = 0) -> int | None:
        """Return a count written as digits, as a variable of Slurm, or calculated from these; None if it is unknown."""
        if text is None or depth > MAX_LEVELS:
            return None
        text = text.strip().strip("\"'")
        if text.isdecimal() and len(text) < 9:
            return int(text)
        name = text.removeprefix("${").removeprefix("$").removesuffix("}").partition(":-")[0]
        if name in NODE_NAMES:
            return self.nodes
        if name in ("SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"):
            return self.number(self.heads(name.removeprefix("SLURM_").lower().replace("_", "-")))
        if name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
            return self.gpus_per_node
        if name == "SLURM_GPUS":
            return self.number((self.heads("gpus") or "").rpartition(":")[2])
        if name in ("SLURM_NTASKS", "SLURM_NPROCS"):
            per_node = self.number(self.heads("ntasks-per-node"))
            return self.number(self.heads("ntasks")) or (per_node * self.nodes if per_node and self.nodes else None)
        return calculate(text, lambda part: self._number_of(part, depth + 1))

    def _number_of(self, name: str, depth: int) -> int | None:
        """Return the value of a variable of the script, if it has only one."""
        values = {a.value for a in self.by_name.get(name, ())}
        if not values:
            return self.number(f"${name}", depth)
        return self.number(values.pop(), depth) if len(values) == 1 else None

    @cached_property
    def nodes(self) -> int | None:
        """Return the nodes that the job requests; the larger bound of a range."""
        if self._nodes is not None:
            return self._nodes
        if self.kind == "environment":
            assigned = [a.value for name in NODE_NAMES for a in self.set_values(name)]
            return max((int(value) for value in assigned if value.isdecimal() and len(value) < 9), default=None)
        directives = self.heads("nodes")
        if directives and "nodes" in self.heading:
            bounds = [int(n) for n in re.findall(r"\d{1,8}", directives)]
            if bounds and re.fullmatch(r"[\d,:\-]+", directives):
                return max(bounds)
            return None
        tasks, per_node = self.number(self.heads("ntasks")), self.number(self.heads("ntasks-per-node"))
        if tasks == 1:
            return 1
        if tasks and per_node:
            return -(-tasks // per_node)
        literal = [
            int(n.value)
            for c in self.calls
            if c.program in ("srun", "salloc") and not c.in_substitution
            for n in [slurm_options(c).get("nodes")]
            if n and n.value and n.value.isdecimal() and len(n.value) < 9
        ]
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
        if "nodes" in self.heading:
            return True  # a variable number of nodes
        if any(launch.value("nnodes") == "1" or "standalone" in launch.options for launch in self.launches):
            return False
        return self._spread_by_name()

    @property
    def of_unknown_size(self) -> bool:
        """Return whether only the command line of sbatch can request more than one node."""
        return self.is_batch and self.nodes is None and "nodes" not in self.heading

    @cached_property
    def gpus_per_node(self) -> int | None:
        count, known = count_gpus(self.heads("gpus-per-node"), self.heads("gres"))
        return count if known else self._gpus_of_tasks()

    def _gpus_of_tasks(self) -> int | None:
        """Return the GPUs per node of ``--gpus-per-task``, or of ``--gpus`` if they are the same on every node."""
        per_task, total = self.number(self.heads("gpus-per-task")), self.number("$SLURM_GPUS")
        tasks, nodes = self.number(self.heads("ntasks-per-node")), self.nodes
        if tasks is None and (all_tasks := self.number(self.heads("ntasks"))) and nodes:
            tasks = -(-all_tasks // nodes)
        if per_task and tasks:
            return per_task * tasks
        return total // nodes if total and nodes and total % nodes == 0 and per_task is None else None

    def is_missing(self, folder: str) -> bool:
        """Return whether a relative folder exists neither here, nor next to the script or above it in its project."""
        if self.folder is None or folder.startswith(("/", "~", "$")) or "%" in folder or not self.is_batch:
            return False
        return not any((place / folder).is_dir() for place in self._places)

    @property
    def _places(self) -> list[Path]:
        if self.folder is None:
            return []
        places = [Path.cwd(), self.folder]
        for above in self.folder.parents:
            if (places[-1] / ".git").exists() or len(places) > MAX_LEVELS:
                break
            places.append(above)
        return places

    @cached_property
    def requests_gpus(self) -> bool:
        return any("gpu" in name or name == "gres" for name in self.heading)

    @cached_property
    def requests_all(self) -> bool:
        """Return whether the script seems to request all that it needs, with nothing from sbatch's command line."""
        counts = {"nodes", "ntasks", "ntasks-per-node"} & self.heading.keys()
        more = {"time", "partition", "gres", "mem", "gpus-per-node", "gpus", "account"} & self.heading.keys()
        return bool(counts) and bool(more)

    @cached_property
    def whole_nodes(self) -> bool:
        """Return whether no other job can run on the nodes: their GPUs, memory or partition are requested whole."""
        heading = self.heading
        if "exclusive" in heading and heading["exclusive"].value in (None, "", "exclusive"):
            return True
        if re.fullmatch(r"0[kKmMgGtT]?", self.heads("mem") or "") or (self.gpus_per_node or 0) >= USUAL_GPUS:
            return True
        constraint, qos = self.heads("constraint") or "", self.heads("qos") or "shared"
        if "gpu" in re.split(r"[&|]", constraint) and qos in NERSC_EXCLUSIVE_QOS:
            return True
        partitions = (self.heads("partition") or "").split(",")
        return all(p in EXCLUSIVE_PARTITIONS for p in partitions)

    @cached_property
    def shared_nodes(self) -> bool:
        """Return whether other jobs can run on the nodes, as far as the file shows; False also means unknown."""
        if not self.is_batch or self.whole_nodes:
            return False
        gpus, limited = self.gpus_per_node, bool(LIMITS_MEMORY & self.heading.keys())
        array = self.heads("array")
        if array and not array.endswith("%1"):  # its tasks run at the same time
            return limited if gpus is None else gpus < HALF_OF_USUAL_GPUS
        if self.nodes != 1:
            return False
        cpus = self.number(self.heads("cpus-per-task"))
        small = limited or (cpus is not None and cpus <= FEW_CPUS)
        return small and (gpus is None or gpus <= FEW_GPUS) and (limited or gpus is not None)

    @cached_property
    def slurm_version(self) -> tuple[int, int] | None:
        """Return the version of Slurm, if it was given or the script loads a module of it."""
        loaded = re.search(r"^\s*(?:module\s+load|ml)\s.*?\bslurm/(\d\d\.\d\d)", self.text, re.MULTILINE)
        text = self._slurm_version or (loaded[1] if loaded else "")
        match = re.match(r"(?:slurm[- ]?)?(\d\d)\.(\d\d)", text)
        return (int(match[1]), int(match[2])) if match else None

    @cached_property
    def sources_files(self) -> bool:
        sources = [[a.text for a in c.args if a.text[:1] != "-"] for c in self.calls if c.program in ("source", ".")]
        return any(names and not SETS_PATHS_ONLY.search(names[0]) for names in sources)

    @cached_property
    def work(self) -> list[ProgramCall]:
        """Return the outermost commands that do the job's work: launches, and Python programs without a launcher."""
        outer = [la.call.under[0] if la.call.under else la.call for la in self.launches]
        plain = [c for c in self.calls if PYTHON.match(c.program) and _runs_file(c) and not c.in_substitution]
        steps = {c.offset: c for c in [*outer, *(c.under[0] if c.under else c for c in plain)]}
        return [steps[offset] for offset in sorted(steps)]

    @cached_property
    def work_calls(self) -> list[ProgramCall]:
        """Return the launches, and the Python programs that start without a launcher."""
        launched = [la.call for la in self.launches]
        return [*launched, *(c for c in self.calls if PYTHON.match(c.program) and _runs_file(c) and c not in launched)]

    @cached_property
    def chooses_launcher(self) -> bool:
        """Return whether a variable has one of several commands, one of which starts ranks; only the last is known."""
        named = ({a.value for a in items} for items in self.by_name.values())
        return any(len(values) > 1 and any(STARTS.match(value) for value in values) for values in named)

    def srun_nodes(self, srun: ProgramCall) -> int | None:
        option = slurm_options(srun).get("nodes")
        return self.number(option.value) if option else self.nodes

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
        return iter(self.by_name.get(name, ()))

    @cached_property
    def by_name(self) -> dict[str, list[Assignment]]:
        """Return the assignments of each variable, without `unset`."""
        assignments: dict[str, list[Assignment]] = {}
        for item in self.assignments:
            if not item.removed:
                assignments.setdefault(item.name, []).append(item)
        return assignments

    @cached_property
    def used_names(self) -> set[str]:
        return {use.name for use in self.uses}

    @cached_property
    def all_values(self) -> list[Assignment]:
        """Return all assignments; `unset NAME` is none."""
        return [a for a in self.assignments if not a.removed]

    def set_values_named(self, name: str, part: str) -> bool:
        """Return whether the variable gets a value that contains a text."""
        return any(part in a.value for a in self.by_name.get(name, ()))

    def is_copy(self, item: Assignment) -> bool:
        """Return whether the value is another assignment's, where a finding already stands: ``export A=$A``."""
        line, origin = self.lines.place(item.offset)[0], self.lines.place(item.source.where(0))[0]
        return line != origin and origin in self._assigning_lines

    @cached_property
    def _assigning_lines(self) -> set[int]:
        return {self.lines.place(a.offset)[0] for a in self.assignments}

    @cached_property
    def code(self) -> str:
        """Return the text with blanks instead of comments, at the same places."""
        return blank_comments(self.text, self.reading.comments)

    def has(self, *names: str) -> bool:
        return any(name in self.by_name for name in names)

    def line_of(self, offset: int) -> str:
        return self.lines.line(self.lines.place(offset)[0])


def _runs_file(call: ProgramCall) -> bool:
    # Behind the file -c is the program's own option.
    first = next((a.text for a in call.args if a.text in ("-c", "-m") or a.text.endswith(".py")), "-c")
    return first != "-c"
