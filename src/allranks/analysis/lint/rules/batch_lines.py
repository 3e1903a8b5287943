"""Rules for the lines and the variables of PBS and Torque, and for values that no batch system accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placeholders import PLACEHOLDER
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.dataflow import GUARDS
from allranks.analysis.lint.rules.requests import FORM_WHY, lines_of_system
from allranks.analysis.lint.rules.unset_variables import SLURM_NAMES
from allranks.analysis.lint.rules.variables import edits
from allranks.utils.text import lazy_regex

TEMPLATE = lazy_regex(r"\{\{|\{%|<%|(?<!\$)\{[A-Za-z_]\w*\}|@[A-Z_]+@|__\w+__")
RESOURCE = lazy_regex(r"^#PBS\s+(?:-\S+\s+\S+\s+)*?-l\s*(\S+)(.*)")
WALLTIME = lazy_regex(r"\d+(?::\d{1,2}){0,3}(?:\.\d+)?")
OF_CHUNK = lazy_regex(r"(?:nodes|ncpus|mem|vmem|ngpus|mpiprocs|ompthreads)=")
NO_LONG_WHY = "The options of qsub have one letter: it refuses the line, and no job is submitted."
LONG_OPTIONS = {
    "job-name": "-N", "output": "-o", "error": "-e", "time": "-l walltime=", "array": "-J", "partition": "-q", "account": "-A", "nodes": "-l select=",
    "ntasks": "-l select=<n>:ncpus=<n>", "gres": "-l select=1:ngpus=", "mem": "-l select=1:mem=", "export": "-v", "mail-type": "-m", "mail-user": "-M",
}  # fmt: skip


def refused_lines(job: JobDescription) -> Iterator[Violation]:
    """Report lines for PBS that qsub refuses."""
    selects = conflict = None
    for offset, line in lines_of_system(job, "#PBS"):
        if TEMPLATE.search(line) or PLACEHOLDER.search(line) or "$" in line:
            continue
        long = re.match(r"#PBS\s+--([a-z][a-z-]+)", line)
        if long and long[1] in LONG_OPTIONS:  # NQSV, whose lines begin with #PBS too, has others
            cure = f"#PBS {LONG_OPTIONS[long[1]]}"
            yield Violation(offset, f"--{long[1]}: qsub has no such option", why=NO_LONG_WHY, cure=cure)
            continue
        found = RESOURCE.match(line)
        if not found:
            continue
        text = _refused(found[1], found[2].split("#")[0])
        if text:
            yield Violation(offset, text[0], why=FORM_WHY, cure=text[1])
        asked = found[1].split(",") if not found[1].startswith("select") else re.split(r",(?=\w+=)", found[1])
        for part in asked:
            if part.startswith("select="):
                selects = part
            elif OF_CHUNK.match(part) and conflict is None:
                conflict = (offset, part)
    if selects and conflict:
        name = conflict[1].partition("=")[0]
        text = f"-l {conflict[1]} beside -l {selects}: PBS takes the resources of a chunk only in select"
        yield Violation(conflict[0], text, why=FORM_WHY, cure=f"-l select=<n>:{name}=<n>")


def _refused(text: str, rest: str) -> tuple[str, str] | None:
    """Return what is wrong with a request of resources, and what to write."""
    if re.match(r"\s*=", rest) or text.endswith("="):
        return f"-l {text}{rest.rstrip()[:20]}: a resource has no blanks around its =", "-l <name>=<value>"
    if re.match(r"(?:select|nodes)=", text) and (re.match(r"\s*[:+]", rest) or text.endswith((":", "+"))):
        return f"-l {text}: the request ends at the blank", "-l select=<n>:ncpus=<n>:ngpus=<n> without blanks"
    time = re.search(r"\bwalltime(=|:)([^,]*)", text)
    if time and time[1] == ":":
        return f"-l {time[0]}: a resource and its value are parted by =", "-l walltime=<hours>:00:00"
    if time and time[2] and time[2][0].isdigit() and not WALLTIME.fullmatch(time[2]) and "-" not in time[2]:
        return f"walltime={time[2]} is no time", "-l walltime=<hours>:<minutes>:<seconds>"
    if re.search(r"\bnodes=\d+,ppn=", text):
        return f"-l {text}: ppn is a property of nodes, and belongs behind a colon", "-l nodes=<n>:ppn=<n>"
    if re.match(r"node=\d+:ppn=", text):
        return f"-l {text}: the resource is called nodes", "-l nodes=<n>:ppn=<n>"
    return None


BLANK_WHY = (
    "A request ends at the first blank: qsub takes what follows as an argument of its own, and refuses the line."
)
BLANK = lazy_regex(
    r"^#PBS\s+-l\s*(?:(?:select|nodes)=\S+(?<!,)\s+(?P<part>(?:ncpus|ngpus|gpus|mem|ppn|mpiprocs|walltime|ompthreads)=\S+)(?:\s+\w+=\S+)*|(?P<name>walltime|mem|ncpus|nodes)\s+\d\S*)\s*$"
)


def blank_in_request(job: JobDescription) -> Iterator[Violation]:
    """Report ``-l select=1 ncpus=8`` and ``-l walltime 10:00:00``."""
    for offset, line in lines_of_system(job, "#PBS"):
        found = BLANK.match(line)
        if found and found["part"]:
            text = f"the request ends at the blank: {found['part']} is not part of it"
            cure = (
                f"-l {found['part']}" if found["part"].startswith("walltime") else f":{found['part']} without a blank"
            )
            yield Violation(offset, text, why=BLANK_WHY, cure=cure)
        elif found:
            yield Violation(
                offset,
                f"-l {found['name']}: the value follows after =",
                why=BLANK_WHY,
                cure=f"-l {found['name']}=<value>",
            )


LITERAL_WHY = "qsub and bsub read these lines as text before any shell runs: $NAME is not replaced."
VARIABLE = r"(\$\{?[A-Za-z_]\w*)"
TAKEN_AS_TEXT = {
    "#PBS": lazy_regex(rf"#PBS\s+-(?:[NqAP]\s*|l\s*(?:select|nodes|walltime|ncpus|mem)=\S*?){VARIABLE}"),
    "#BSUB": lazy_regex(rf"#BSUB\s+-(?:(?:n|nnodes|J|q|W|P|M)\s+\"?\S*?|R\s+[^$]*){VARIABLE}"),
}


def literal_variables(job: JobDescription) -> Iterator[Violation]:
    """Report variables of the shell in lines for PBS and LSF, in options whose value qsub and bsub take as it is."""
    if job.source.text != job.text:
        return  # the shell that writes the script has expanded them
    for sign, pattern in TAKEN_AS_TEXT.items():
        for offset, line in lines_of_system(job, sign):
            found = pattern.match(line)
            filled_in = (
                found and found[1].startswith("${") and not job.has(found[1][2:])
            )  # by a program that writes jobs
            if found and not filled_in and not re.search(r"\$\$|\{\{", line):
                text = f"{line[:70]}: variables are not expanded here"
                submit = "qsub -l select=$N job.sh" if sign == "#PBS" else "bsub -n $N < job.sh"
                cure = f"set it on the command line, where a shell expands it ({submit})"
                yield Violation(offset, text, why=LITERAL_WHY, cure=cure)


# https://help.altair.com (PBS Professional, environment variables of jobs) and https://docs.adaptivecomputing.com (Torque, qsub)
_NAMES = (
    "ENVIRONMENT JOBID JOBNAME NODEFILE QUEUE ARRAY_ID ARRAY_INDEX ARRAYID JOBDIR JOBCOOKIE NODENUM TASKNUM MOMPORT TMPDIR GPUFILE NUM_NODES "
    "NUM_PPN NP VERSION WALLTIME SERVER CONF_FILE EXEC HOME DPREFIX DEFAULT NCPUS NGPUS O_HOME O_HOST O_LANG O_LOGNAME O_MAIL O_PATH O_QUEUE "
    "O_SHELL O_SYSTEM O_TZ O_WORKDIR O_INITDIR O_SERVER O_SUBMIT_FILTER O_ROOTDIR O_RHOST ACCOUNT MICFILE NODE_FILE PPN JOBFS NCI_JOBFS "
)
PBS_NAMES = {f"PBS_{name}" for name in _NAMES.split()}
OFTEN_MEANT = {
    "PBS_JOB_ID": "PBS_JOBID", "PBS_WORKDIR": "PBS_O_WORKDIR", "PBS_O_WORK_DIR": "PBS_O_WORKDIR", "PBS_JOB_NAME": "PBS_JOBNAME",
    "PBS_WORK_DIR": "PBS_O_WORKDIR", "PBS_NODE_FILE": "PBS_NODEFILE", "PBS_NODELIST": "PBS_NODEFILE", "PBS_ARRAYINDEX": "PBS_ARRAY_INDEX",
    "PBS_ARRAY_TASK_ID": "PBS_ARRAY_INDEX", "PBS_SUBMIT_DIR": "PBS_O_WORKDIR",
}  # fmt: skip
OF_TORQUE = {
    "PBS_NUM_NODES": "$(sort -u $PBS_NODEFILE | wc -l)",
    "PBS_NUM_PPN": "the mpiprocs or ncpus of the request; PBS Pro sets NCPUS",
    "PBS_NP": "$(wc -l < $PBS_NODEFILE)",
}
OF_SITES = lazy_regex(
    r"scratch_\w+=|SCRATCHDIR|TORQUE_|metacentrum"
)  # https://docs.metacentrum.cz: its PBS Pro sets these names, too
MAX_EDITS = 1


def pbs_names(job: JobDescription) -> Iterator[Violation]:
    """Report variables that look like those of PBS, and that PBS does not set for this job."""
    if job.kind != "script" or job.pbs is None or job.sources_files:
        return
    arrays = {m[1] for _, line in lines_of_system(job, "#PBS") for m in re.finditer(r"\s-([tJ])\s*\d+-\d+", line)}
    said: set[str] = set()
    guarded = {u.name for u in job.uses if u.program in ("[", "[[", "test") or u.operator.startswith(GUARDS)}
    for use in job.uses:
        name = use.name
        if not name.startswith("PBS_") or name in said | guarded or job.has(name) or name in job.reading.exported:
            continue
        if name in job.reading.named or use.in_function:
            continue
        if name in OF_TORQUE and re.search(r"(?m)^#PBS\s.*\bselect=", job.text) and not OF_SITES.search(job.text):
            said.add(name)
            text = f"${name} is never set: Torque has it, and select= is a request for PBS Pro"
            yield Violation(use.offset, text, cure=OF_TORQUE[name])
            continue
        if use.program in ("echo", "printf"):
            continue
        said.add(name)
        other = {"PBS_ARRAYID": ("J", "PBS_ARRAY_INDEX"), "PBS_ARRAY_INDEX": ("t", "PBS_ARRAYID")}.get(name)
        if other and arrays == {other[0]}:
            text = f"${name} is never set: for the jobs of -{other[0]} the variable is {other[1]}"
            yield Violation(use.offset, text, cure=f"${other[1]}")
        elif name not in PBS_NAMES:
            near = OFTEN_MEANT.get(name) or min(PBS_NAMES, key=lambda known: (edits(name, known, MAX_EDITS), known))
            if name in OFTEN_MEANT or edits(name, near, MAX_EDITS) <= MAX_EDITS:
                text = f"${name} is never set: PBS has no such variable; {near} was probably meant"
                yield Violation(use.offset, text, cure=f"${near}")


INPUT_WHY = "sbatch reads SBATCH_... from the environment as options, and sets none of them: what the job requested is in SLURM_..."
INPUT_NAMES = {
    "ACCOUNT": ("account", "SLURM_JOB_ACCOUNT"), "ARRAY_INX": ("array", "SLURM_ARRAY_TASK_ID"), "CONSTRAINT": ("constraint", "SLURM_JOB_CONSTRAINTS"),
    "CPUS_PER_GPU": ("cpus-per-gpu", "SLURM_CPUS_PER_GPU"), "CPUS_PER_TASK": ("cpus-per-task", "SLURM_CPUS_PER_TASK"),
    "GPUS": ("gpus", "SLURM_GPUS"), "GPUS_PER_NODE": ("gpus-per-node", "SLURM_GPUS_PER_NODE"),
    "GPUS_PER_TASK": ("gpus-per-task", "SLURM_GPUS_PER_TASK"), "GRES": ("gres", "SLURM_GPUS_ON_NODE"), "JOB_NAME": ("job-name", "SLURM_JOB_NAME"),
    "MEM_PER_CPU": ("mem-per-cpu", "SLURM_MEM_PER_CPU"), "MEM_PER_GPU": ("mem-per-gpu", "SLURM_MEM_PER_GPU"),
    "MEM_PER_NODE": ("mem", "SLURM_MEM_PER_NODE"), "NODES": ("nodes", "SLURM_JOB_NUM_NODES"), "NTASKS": ("ntasks", "SLURM_NTASKS"),
    "NTASKS_PER_NODE": ("ntasks-per-node", "SLURM_NTASKS_PER_NODE"), "PARTITION": ("partition", "SLURM_JOB_PARTITION"),
    "QOS": ("qos", "SLURM_JOB_QOS"), "JOB_ID": ("job-name", "SLURM_JOB_ID"), "JOBID": ("job-name", "SLURM_JOB_ID"),
}  # fmt: skip
"""What follows SBATCH_ in a name, the option of #SBATCH whose value may be meant, and the variable of the job with this value."""


def sbatch_names(job: JobDescription) -> Iterator[Violation]:
    """Report variables that sbatch reads, and that are expected to have the values of the #SBATCH lines in the job."""
    if not job.is_batch or job.submits or job.heading.get("export"):
        return
    said: set[str] = set()
    asked = {u.name for u in job.uses if u.operator or u.program in ("[", "[[", "test")}
    for use in job.uses:
        option, meant = INPUT_NAMES.get(use.name.removeprefix("SBATCH_"), ("", ""))
        if not use.name.startswith("SBATCH_") or option not in job.heading or use.name in said | asked:
            continue
        if job.has(use.name) or use.name in job.reading.named or use.program in ("echo", "printf"):
            continue
        said.add(use.name)
        text = f"${use.name} is never set in the job: the value of --{option} is in {meant}"
        yield Violation(use.offset, text, why=INPUT_WHY, cure=f"${meant}")


NOT_READ = lazy_regex(r"#[ \t]+PBS[ \t]+-(?:l|N|q|A|P)[ \t]*\S")
UNREAD_CURE = "write it as #PBS at the start of the line"


def unread_lines(job: JobDescription) -> Iterator[Violation]:
    """Report ``# PBS`` with a blank in a script that has no line that PBS reads, and ``BSUB -n 4`` without #."""
    for call in job.calls:
        bare = call.written in ("BSUB", "PBS") and call.args and call.args[0].text.startswith("-") and not call.under
        if bare and re.search(rf"(?m)^#{call.written}\s", job.text):
            text = f"{call.written} without # is a command: the option is not read"
            why = "The batch system reads only lines that begin with #, and the shell finds no program of this name."
            yield Violation(call.offset, text, why=why, cure=f"#{call.written} at the start of the line")
    if job.is_job or job.submits or re.search(r"(?m)^#(?:PBS|SBATCH|BSUB|\$)\s", job.text):
        return
    found = [c for c in job.reading.comments if NOT_READ.match(c.text) and job.lines.place(c.offset)[1] == 1]
    in_pbs = any(u.name.startswith("PBS_") for u in job.uses)
    if found and (in_pbs or any(re.match(r"#[ \t]+PBS[ \t]+-l", c.text) for c in found)):
        yield Violation(found[0].offset, "# PBS with a space is a comment", cure=UNREAD_CURE)


OPEN_LIST_WHY = (
    "The dots stand for names that are to be filled in: sbatch refuses the option, as there is no such name."
)


def open_list(job: JobDescription) -> Iterator[Violation]:
    """Report ``--partition=gpu,...``, whose dots nobody has filled in."""
    for item in job.directives:
        value = item.value or ""
        if not item.late and item.name in OF_NAMES and re.search(r"(?:\A|,)(?:\.{2,}|\u2026)(?:,|\Z)", value):
            text = f"--{item.name}={value}: {'...' if '.' in value else value} is no name"
            yield Violation(
                item.offset, text, why=OPEN_LIST_WHY, cure=f"--{item.name}=<name>", whatever_is_filled_in=True
            )


OF_NAMES = {"partition", "account", "qos", "nodelist", "exclude", "constraint", "time", "mem", "gres"}

FOREIGN_WHY = "The program belongs to Slurm, and this job runs under another batch system: 'command not found'."


def foreign_programs(job: JobDescription) -> Iterator[Violation]:
    """Report programs of Slurm in a job of PBS that knows nothing else of Slurm."""
    if job.pbs is None or job.is_batch or job.sources_files or "SLURM" in job.text.replace("SLURM_JOB_NODELIST", ""):
        return
    if re.search(r"#SBATCH|\b(?:sbatch|salloc|slurm)\b", job.text) or job.submits:
        return
    for call in job.calls:
        outer = call.under[0] if call.under else call
        if outer.program in ("srun", "scontrol") and not outer.tested and not outer.in_function and not outer.branch:
            if outer.after not in ("||", "&&"):
                yield Violation(
                    outer.offset, f"{outer.program} in a job of PBS", why=FOREIGN_WHY, cure="mpiexec, or pbsdsh"
                )
                return


# --------------------------------------------------------------------------- names without SLURM_

BARE_NAMES = {
    "CPUS_ON_NODE", "GPUS_ON_NODE", "ARRAY_TASK_ID", "ARRAY_JOB_ID", "ARRAY_TASK_COUNT", "JOB_NODELIST", "JOB_NUM_NODES", "SUBMIT_DIR",
    "CPUS_PER_TASK", "JOB_CPUS_PER_NODE", "STEP_NODELIST", "NTASKS_PER_NODE", "MEM_PER_NODE", "MEM_PER_CPU", "TASK_PID",
}  # fmt: skip
GRID_ENGINE = {
    "JOB_ID": "SLURM_JOB_ID",
    "SGE_O_WORKDIR": "SLURM_SUBMIT_DIR",
    "NSLOTS": "SLURM_CPUS_PER_TASK",
    "SGE_TASK_ID": "SLURM_ARRAY_TASK_ID",
}


def bare_names(job: JobDescription) -> Iterator[Violation]:
    """Report variables of Slurm without the SLURM_ in front, and those of Grid Engine, in a job of Slurm."""
    if not job.is_batch or job.submits or job.sources_files or "export" in job.heading:
        return
    said = {
        u.name for u in job.uses if u.program in ("[", "[[", "test", "echo", "printf") or u.operator.startswith(GUARDS)
    }
    for use in job.uses:
        name = use.name
        if name in said or job.has(name) or name in job.reading.named | job.reading.exported or use.in_function:
            continue
        meant = f"SLURM_{name}" if name in BARE_NAMES and f"SLURM_{name}" in SLURM_NAMES else GRID_ENGINE.get(name)
        if meant and not re.search(rf"(?m)^#\$\s|{name}=", job.text):
            said.add(name)
            other = "a variable of Grid Engine" if name in GRID_ENGINE else "without SLURM_"
            yield Violation(use.offset, f"${name} is never set ({other}); {meant} was probably meant", cure=f"${meant}")


TAKES_VALUE = {
    "output", "error", "job-name", "time", "partition", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "mem", "gres", "account",
    "mail-user", "mail-type", "array", "qos", "constraint", "gpus", "gpus-per-node", "dependency", "reservation", "nodelist",
}  # fmt: skip
VALUE_WHY = "sbatch reads all the lines as one list of words: the option takes the next option for its value, which is then lost."


def value_missing(job: JobDescription) -> Iterator[Violation]:
    """Report an option that takes a value and stands at the end of its line without one."""
    for item, following in zip_longest(job.directives, job.directives[1:]) if job.calls else ():
        continued = following is not None and not following.name  # its value stands in the next line
        if item.value is None and item.name in TAKES_VALUE and not (item.late or continued or "#" in item.text):
            written = item.text.split()[0]
            text = f"{written} has no value: sbatch takes the first word of the next line for it"
            yield Violation(
                item.offset, text, why=VALUE_WHY, cure=f"{written} <value>, or remove the line", severity="warning"
            )
            return
