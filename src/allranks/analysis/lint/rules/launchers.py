"""Rules for launchers: how they reach other nodes, what they need and refuse, the environment of ranks, and signals."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import SHELLS, slurm_options
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placement import MPI, count_of
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.dataflow import exported_before
from allranks.analysis.lint.rules.steps import is_ray_start
from allranks.utils.text import lazy_regex

SSH_WHY = "It starts the ranks of other nodes through SSH. Many clusters forbid SSH between compute nodes; the job then waits or asks for a key."
SSH_CURE = "start one launcher per node with Slurm: srun --ntasks-per-node=1 torchrun ... (or deepspeed --no_ssh --node_rank=$SLURM_NODEID in a task's shell)"
OLD_WHY = (
    "torch.distributed.launch is deprecated, and passes the program --local-rank (before torch 2.0 --local_rank), which a parser that knows "
    "only the other spelling refuses."
)
COMMA_WHY = "Slurm treats every comma as the end of a value: --export=ALL,X=^lo,docker0 gives X=^lo. Quotes do not help; they become part of the value."
COMMA_CURE = "export the variable in the script before srun; --export=ALL is the default and passes it on"
DROPS_WHY = "The step only gets the named variables (and SLURM_*): PATH, modules, NCCL and cache settings of the script do not reach the ranks."
DROPS_CURE = "omit --export, or write --export=ALL; set variables with export lines before srun"
LOGIN_WHY = "A login shell reads the profile again, which resets PATH and modules to their state after login."
SIGNAL_WHY = "Without B: Slurm sends the signal to every process of every step. It ends torchrun (exit code 138), and its workers keep running."
SIGNAL_CURE = (
    "in the task's shell: trap '' USR1; exec torchrun ... so that only the workers' handlers get it; or #SBATCH --signal=B:USR1@<seconds> "
    "with a trap in the batch script"
)
TRAP_WHY = "The signal goes to the batch shell and ends it unless it has a trap; bash runs a trap only when no foreground program is running."
TRAP_CURE = "trap '<command>' USR1; srun ... & wait"
REQUEUE_WHY = (
    "A requeued job starts with the same output file, which Slurm truncates: the log of the first attempt is lost."
)
LISTS = {
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_ALGO",
    "NCCL_PROTO",
}
STARTERS = lazy_regex(r"\b(?:torchrun|torch\.distributed|deepspeed|accelerate launch|python[0-9.]* \S+\.py)\b")


def ssh(job: JobDescription) -> Iterator[Violation]:
    """Report launchers that reach other nodes by SSH: a note, because the sites whose scripts do so allow it."""
    for launch in job.launches:
        option = launch.option("hostfile", "H", "deepspeed_hostfile")
        by = (launch.value("launcher", "deepspeed_multinode_launcher") or "pdsh").lower()
        nodes = launch.value("num_nodes")
        multi = option is not None or (launch.kind == "deepspeed" and nodes not in (None, "0", "1"))
        if multi and by in ("pdsh", "ssh") and "no_ssh" not in launch.options:
            yield Violation(
                option.arg.offset if option else launch.call.offset,
                f"{launch.kind} with a host file starts the other nodes through pdsh and SSH",
            )
        elif launch.kind == "deepspeed" and by == "slurm" and launch.option("include", "exclude", "i", "e"):
            yield Violation(
                launch.call.offset,
                "deepspeed --launcher slurm passes --include to srun, which has no such option",
                severity="warning",
            )
    for item in job.set_values("PDSH_RCMD_TYPE"):
        if item.value == "ssh":
            yield Violation(item.offset, "PDSH_RCMD_TYPE=ssh: pdsh connects to the other nodes by SSH")
    for call in job.calls:
        words = " ".join(a.text for a in call.args)
        started = any(call in la.call.under for la in job.launches)
        if call.program in ("ssh", "pdsh", "clush", "pssh") and (started or STARTERS.search(words)):
            yield Violation(call.offset, f"{call.program} starts the ranks of other nodes")
        if call.program == "horovodrun" and re.search(r"(?:^| )(?:-H|--hosts|-hostfile|--hostfile)\b", words):
            yield Violation(call.offset, "horovodrun with hosts starts the other nodes through SSH")


def old(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        if launch.kind == "torch.distributed.launch":
            yield Violation(
                launch.call.offset,
                "torch.distributed.launch is deprecated",
                cure="use torchrun with the same options; read LOCAL_RANK from the environment",
            )


def _exports(job: JobDescription) -> Iterator[tuple[int, str, ProgramCall | None]]:
    """Yield every ``--export`` value, with the srun that has it."""
    if "export" in job.heading:
        yield job.heading["export"].offset, job.heading["export"].value or "", None
    for call in job.calls:
        if call.program in ("srun", "sbatch", "salloc"):
            option = slurm_options(call).get("export")
            if option:
                yield option.arg.offset, option.value or "", call


INNER_COMMAND = lazy_regex(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\$\{[^}]*\}")


def comma(job: JobDescription) -> Iterator[Violation]:
    for offset, written, _ in _exports(job):
        name, value = None, INNER_COMMAND.sub("$_", written)  # a comma in a command is none of the value
        for item in value.split(","):
            if "=" in item:
                name = item.partition("=")[0]
            elif name and item and (name in LISTS or not re.fullmatch(r"[A-Z_][A-Z0-9_]*", item)):
                yield Violation(offset, f"--export: {name} is cut off at the comma before {item!r}")
                break
        else:
            if re.search(r"=[\"'].*[\"']", value):
                yield Violation(offset, "--export: the quotes become part of the value", severity="warning")


def drops(job: JobDescription) -> Iterator[Violation]:
    repaired = job.has("SLURM_EXPORT_ENV") or any(a.name == "SLURM_EXPORT_ENV" for a in job.assignments)
    for offset, value, call in _exports(job):
        items = value.split(",")
        if call is not None and call.program == "srun" and not any(la.srun == call for la in job.launches):
            continue
        if call is None and (repaired or _all_say_all(job)):
            continue
        if call is None and not any(c.program == "srun" for c in job.calls):
            continue  # the batch shell has all that the script sets
        if not any(i.upper() == "ALL" for i in items) and value:
            yield Violation(
                offset,
                f"--export={value} without ALL: the rest of the environment does not reach the ranks",
                severity="note" if call is not None and call.program == "sbatch" else None,
            )
        for name, _, given in (i.partition("=") for i in items if "=" in i):
            before = [a for a in job.set_values(name) if a.exported and not a.under and a.offset < offset]
            if call is not None and call.program == "srun" and before and before[-1].value != given:
                text = f"--export={name}={given} does not replace {name}={before[-1].value}, exported before: srun keeps the exported value"
                yield Violation(
                    offset,
                    text,
                    why="In srun the caller's environment overrides --export.",
                    cure=f"export {name}={given} before srun",
                )


def _all_say_all(job: JobDescription) -> bool:
    options = [slurm_options(c).get("export") for c in job.calls if c.program == "srun" and not c.in_substitution]
    return bool(options) and all(o and (o.value or "").upper().startswith("ALL") for o in options)


def login(job: JobDescription) -> Iterator[Violation]:
    prepared = [c for c in job.calls if not c.under and _prepares(c)]
    for call in job.calls:
        flags = [a.text for a in call.args[:2]]
        if call.program not in SHELLS or not call.srun or not any(re.match(r"-[a-z]*l|--login", f) for f in flags):
            continue
        if not any(la.call.offset >= call.offset and call in la.call.under for la in job.launches):
            continue
        again = any(call in c.under and _prepares(c) for c in job.calls)
        before = [c for c in prepared if c.offset < call.offset]
        if before and not again:
            yield Violation(
                call.offset,
                f"{call.program} {flags[0]} reads the profile again, after '{before[-1].written}' prepared the environment",
            )


def _prepares(call: ProgramCall) -> bool:
    words = [a.text for a in call.args]
    return (
        (call.program in ("module", "ml") and bool(words))
        or (call.program in ("conda", "mamba", "micromamba") and words[:1] == ["activate"])
        or (call.program in ("source", ".") and bool(words) and words[0].endswith("activate"))
    )


SIGNALS = {"10": "USR1", "12": "USR2", "2": "INT", "15": "TERM", "1": "HUP", "18": "CONT"}


def _signal(job: JobDescription) -> tuple[bool, str, int] | None:
    """Return whether it goes to the batch shell alone, the signal's name, and its position."""
    found = job.heading.get("signal")
    if found is None or not found.value:
        return None
    target, colon, rest = found.value.partition(":")
    name = (rest if colon else target).partition("@")[0].upper().removeprefix("SIG")
    return (
        bool(colon) and "B" in target.upper(),
        SIGNALS.get(name, name),
        found.offset,
    )


def _traps(job: JobDescription, name: str) -> list[ProgramCall]:
    return [
        c
        for c in job.calls
        if c.program == "trap"
        and any(SIGNALS.get(a.text, a.text.upper().removeprefix("SIG")) == name for a in c.args[1:])
    ]


def signal(job: JobDescription) -> Iterator[Violation]:
    asked = _signal(job)
    if asked is None or asked[0] or asked[1] not in ("USR1", "USR2", "CONT", "ALRM"):
        return
    for launch in job.launches:
        if launch.kind != "torchrun" or asked[1] in (launch.value("signals_to_handle") or ""):
            continue
        protected = any(t.under == launch.call.under and t.args and not t.args[0].text for t in _traps(job, asked[1]))
        if not protected:
            yield Violation(asked[2], f"--signal={asked[1]} also goes to torchrun and ends it")
            return


def untrapped(job: JobDescription) -> Iterator[Violation]:
    asked = _signal(job)
    if asked is None:
        return
    traps = [t for t in _traps(job, asked[1]) if not t.under]
    if not asked[0]:
        if (
            asked[1] not in ("TERM", "INT")
            and traps
            and traps[0].args[0].text
            and not job.submits
            and not any(True for _ in signal(job))
        ):
            yield Violation(
                traps[0].offset,
                f"the trap for {asked[1]} never runs: --signal={asked[1]} without B: goes to the steps, not to the batch shell",
                cure=f"#SBATCH --signal=B:{asked[1]}@<seconds>, and srun ... & wait in the script",
            )
        return
    outer = job.launches[-1].call.starter if job.launches else job.work[-1] if job.work else None
    replaced = any(re.match(r"\s*exec\s+\S+\s", job.line_of(c.offset)) for c in job.work)
    if not traps and (replaced or job.sources_files):
        if not replaced and outer and _in_foreground(job, outer):
            text = f"a trap for {asked[1]} in another file runs only after this command has ended, and without one the signal ends the shell"
            yield Violation(outer.offset, text)
        return  # the program that replaced the shell gets it, or the trap is in another file
    if not traps:
        yield Violation(
            asked[2], f"--signal=B:{asked[1]} without a trap for {asked[1]} in the script: it ends the batch shell"
        )
    elif outer and traps[-1].args[0].text and "exec" not in job.line_of(outer.offset).split():
        if outer.after != "&" and not outer.in_function:
            yield Violation(outer.offset, f"the trap for {asked[1]} runs only after this command has ended")


def _in_foreground(job: JobDescription, outer: ProgramCall) -> bool:
    """Return whether the script's own shell waits for the last launch without ``wait``."""
    simple = not (outer.in_function or outer.in_loop or outer.branch or outer.tested)
    return simple and outer.after in ("\n", ";", "") and bool(job.launches) and "wait" not in job.code.split()


SAYS_CATCHES = lazy_regex(
    r"(?i)\b(?:python|train\w*|program|worker\w*)\b[^.\n]{0,40}\b(?:catch\w*|handle\w*|receive\w*|get)\b[^.\n]{0,20}\b(?:SIG\w+|USR[12]|signal)"
)
NOT_PASSED_WHY = "With B: only the batch shell gets the signal. Its trap does not send it to the step, so the program's own handler never runs."
NOT_PASSED_CURE = (
    "scancel --signal=USR1 $SLURM_JOB_ID, or kill -USR1 of srun's process, in the trap; or --signal without B:"
)


def not_passed(job: JobDescription) -> Iterator[Violation]:
    """Report a trap that does not pass the signal on, although a comment says that the program handles it."""
    asked = _signal(job)
    if asked is None or not asked[0] or asked[1] == "TERM" or job.sources_files or not job.work:
        return
    traps = [t for t in _traps(job, asked[1]) if not t.under and t.args[0].text]
    sends = (
        re.search(r"\bkill\b|\bpkill\b|scancel[^\n]*(?:-s|--signal)|\btouch\b|>", _body_of_trap(job, traps))
        if traps
        else None
    )
    told = any(SAYS_CATCHES.search(c.text) for c in job.reading.comments)
    if traps and not sends and told and job.work[-1].after == "&":
        text = f"the trap for {asked[1]} does not pass it on to {job.work[-1].written}, which is to handle it"
        yield Violation(traps[-1].offset, text, why=NOT_PASSED_WHY, cure=NOT_PASSED_CURE)


def _body_of_trap(job: JobDescription, traps: list[ProgramCall]) -> str:
    """Return the commands of the traps, and those of the functions that they call; all of the code if these are not found."""
    texts: list[str] = []
    for trap in traps:
        words = trap.args[0].text
        found = re.search(
            rf"(?ms)^[ \t]*(?:function[ \t]+)?{re.escape(words)}[ \t]*(?:\(\))?[ \t]*\n?\{{(.*?)^[ \t]*\}}", job.code
        )
        texts.append(found[1] if found else words if " " in words else job.code)
    return re.sub(r"echo[ \t][^\n]*", "", "\n".join(texts))


def requeue(job: JobDescription) -> Iterator[Violation]:
    """Report a script that asks to be requeued, by its option, a command or a trap, without a log in append mode."""
    found = job.heading.get("requeue")
    again = next((c for c in job.calls if _requeues(c)), None)
    if (found or again) and (job.heads("open-mode") or "").lower() != "append":
        yield Violation(
            found.offset if found else again.offset if again else 0,
            "the job may be requeued, and its log is not opened in append mode",
            severity=None if again else "note",  # --requeue alone only permits it
        )


def _requeues(call: ProgramCall) -> bool:
    words = [a.text for a in call.args]
    if call.program == "trap":
        return bool(words) and re.search(r"\bscontrol\s+requeue\b", words[0]) is not None
    return call.program == "scontrol" and words[:1] == ["requeue"]


# --------------------------------------------------------------------------- host lists and devices

SLOTS_WHY = "The launcher refuses more processes than its hosts have slots, and nothing starts."


def few_slots(job: JobDescription) -> Iterator[Violation]:
    """Compare the processes of horovodrun or Open MPI with the slots of its list of hosts."""
    for call in job.calls:
        if call.in_substitution or call.program not in MPI | {"horovodrun"}:
            continue
        if any(re.search(r"(?i)oversubscribe", a.text) for a in call.args):
            continue
        total = count_of(job, call, {"-np", "--np", "-n", "--n", "--num-proc"})
        if total and (known := _slots_of_slurm(job, call)) and total > known:
            text = (
                f"{total} processes, but the job requests {known} task{'s' * (known > 1)}: Open MPI has as many slots"
            )
            cure = f"--ntasks={total}, or --oversubscribe"
            yield Violation(call.offset, text, why=SLOTS_WHY, cure=cure, severity="warning")
            continue
        cores = _cores_of_slurm(job, call) if total else None
        if total and cores and total >= CROWDED * cores:
            text = f"{total} processes, but the job requests {cores} CPUs"
            yield Violation(call.offset, text, why=CROWDED_WHY, cure=f"--ntasks={total}", severity="warning")
            continue
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            listed = value if equals else following.text if following else ""
            parts = listed.split(",")
            counted = all(re.fullmatch(r"[\w.$-]+:\d{1,3}", p) for p in parts)
            bare = call.program in MPI and _is_open_mpi(call) and all(re.fullmatch(r"[\w.-]+", p) for p in parts)
            if name not in ("-H", "--host", "--hosts", "-host") or not (counted or bare):
                continue
            slots = sum(int(p.rpartition(":")[2] or 1) if ":" in p else 1 for p in parts)
            if total and total > slots:
                yield Violation(
                    arg.offset,
                    f"{total} processes, but {listed} has {slots} slots",
                    why=SLOTS_WHY,
                    cure=f"-np {slots}, or more slots",
                )


def _is_open_mpi(call: ProgramCall) -> bool:
    """Return whether the options are those of Open MPI, where a host without a number has one slot."""
    return any(a.text in ("-x", "--mca", "-mca", "--allow-run-as-root", "--map-by", "--bind-to") for a in call.args)


OTHER_MPI = lazy_regex(
    r"(?im)^[^#\n]*\b(?:intel(?!-(?:tensorflow|openmp|extension|numpy|scikit)\b)|impi|oneapi|mpich|mvapich\w*|cray\w*|I_MPI_\w+)\b"
)


CROWDED = 2
CROWDED_WHY = (
    "Several processes share each CPU and take turns: the run is many times slower, or the launcher refuses it."
)
FULL_NODE = 8
"""A job that asks for so many tasks per node names the CPUs that it wants."""


def _cores_of_slurm(job: JobDescription, call: ProgramCall) -> int | None:
    """Return the CPUs of a job of Slurm for an MPI that starts any number of processes."""
    if not OTHER_MPI.search(job.text):
        return None
    tasks = _slots_of_slurm(job, call, of_any_mpi=True)
    each = job.number(job.heads("cpus-per-task")) if "cpus-per-task" in job.heading else 1
    return tasks * each if tasks and each and tasks >= FULL_NODE * (job.nodes or 1) else None


def _slots_of_slurm(job: JobDescription, call: ProgramCall, *, of_any_mpi: bool = False) -> int | None:
    """Return the slots that Open MPI takes from Slurm; None if it may have others, or may be another MPI."""
    options = {a.text.partition("=")[0] for a in call.args if a.text.startswith("-")}
    own = {
        "-H",
        "--host",
        "-host",
        "--hosts",
        "--hostfile",
        "-hostfile",
        "-machinefile",
        "--machinefile",
        "-f",
        "-ppn",
        "--ppn",
        "-perhost",
        "-rf",
    }
    if not job.is_batch or call.program == "horovodrun" or call.under or options & own:
        return None
    if not of_any_mpi and OTHER_MPI.search(job.text):
        return None
    if (
        job.heading.keys() & {"ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core", "exclusive", "gpus-per-task"}
        or "OVERSUBSCRIBE" in job.text.upper()
    ):
        return None
    nodes, tasks, each = (
        job.number(job.heads("nodes")),
        job.number(job.heads("ntasks")),
        job.number(job.heads("ntasks-per-node")),
    )
    if tasks or "ntasks" in job.heading:
        return tasks
    if each or "ntasks-per-node" in job.heading:
        return each * nodes if each and nodes else None
    return nodes if nodes and "cpus-per-task" in job.heading else None


DEEPSPEED_WHY = "deepspeed stops with an error: its host filters exclude each other."


def filters(job: JobDescription) -> Iterator[Violation]:
    """Report options of deepspeed that exclude each other."""
    for launch in job.launches:
        if launch.kind != "deepspeed":
            continue
        include, exclude = launch.option("include", "i"), launch.option("exclude", "e")
        count = launch.option("num_gpus", "num_nodes")
        chosen = include or exclude
        if chosen and count and chosen.plain_value:
            text = f"{count.written} and {chosen.written}: deepspeed takes only one of them"
            yield Violation(count.arg.offset, text, why=DEEPSPEED_WHY, cure=f"remove {count.written}")
        elif include and exclude and include.plain_value and exclude.plain_value:
            yield Violation(
                exclude.arg.offset,
                "--include and --exclude: deepspeed takes only one of them",
                why=DEEPSPEED_WHY,
                cure="remove one",
            )


DEVICES_WHY = "With these options deepspeed ignores CUDA_VISIBLE_DEVICES and counts the GPUs of the machine from 0."


def ignored_devices(job: JobDescription) -> Iterator[Violation]:
    """Report CUDA_VISIBLE_DEVICES that ``deepspeed --num_gpus`` ignores."""
    for launch in job.launches:
        if launch.kind != "deepspeed":
            continue
        option = launch.option("num_gpus")
        own = [a for a in launch.call.prefix if a.name == "CUDA_VISIBLE_DEVICES"]
        own = own or exported_before(job, "CUDA_VISIBLE_DEVICES", launch.call)
        if option is None or not own or not re.fullmatch(r"\d{1,2}(?:,\d{1,2})*", own[-1].value):
            continue
        numbers = [int(n) for n in own[-1].value.split(",")]
        count = job.number(option.value)
        if count and count == len(numbers) and sorted(numbers) != list(range(count)):
            text = (
                f"deepspeed --num_gpus={count} ignores CUDA_VISIBLE_DEVICES={own[-1].value}: it takes GPUs 0 to {count - 1}"
                if count > 1
                else f"deepspeed --num_gpus=1 ignores CUDA_VISIBLE_DEVICES={own[-1].value}: it takes GPU 0"
            )
            yield Violation(
                option.arg.offset, text, why=DEVICES_WHY, cure=f"--include localhost:{own[-1].value} without --num_gpus"
            )


# ---------------------------------------------------------------------------------------- addresses

NO_IP_WHY = "accelerate meets at None:None, or at the address of the user's own configuration, and stops or hangs."


def without_address(job: JobDescription) -> Iterator[Violation]:
    """Report accelerate on several machines without the address of the first one."""
    for launch in job.launches:
        machines = launch.option("num_machines")
        if (
            launch.kind != "accelerate"
            or machines is None
            or (job.number(machines.value) or 1) < 2
            or launch.open_ended
        ):
            continue
        if (
            launch.option("main_process_ip", "config_file", "deepspeed_hostfile", "rdzv_backend", "rdzv_conf", "tpu")
            is not None
        ):
            continue
        if job.has(
            "ACCELERATE_CONFIG_FILE", "MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR"
        ) or _asks_for_configuration(job):
            continue
        yield Violation(
            machines.arg.offset,
            f"{machines.written} is {job.number(machines.value)}, and there is no --main_process_ip",
            why=NO_IP_WHY,
            cure="--main_process_ip=$HEAD --main_process_port=<port>",
        )


def _asks_for_configuration(job: JobDescription) -> bool:
    return any(c.program == "accelerate-other" for c in job.calls) or "default_config.yaml" in job.text


# ---------------------------------------------------------------------------------------------- Ray

BLOCK_WHY = "With --block ray does not return before its node leaves the cluster."


def ray_blocks(job: JobDescription) -> Iterator[Violation]:
    """Report ``ray start --block`` in the foreground, above the job's work."""
    for call in job.calls:
        if not is_ray_start(call) or not any(a.text == "--block" for a in call.args):
            continue
        outer = call.under[0] if call.under else call
        if (
            outer.after == "&"
            or call.after == "&"
            or outer.in_function
            or call.branch
            or call.in_substitution
            or call.in_loop
        ):
            continue
        if (
            any(c.program in ("ssh", "bash", "sh", "nohup") for c in call.under)
            or outer.before in ("&&", "||", "|")
            or outer.after in ("|", "||")
        ):
            continue
        if any(w.offset > outer.offset and w.offset != outer.offset for w in job.work):
            yield Violation(
                outer.offset,
                "ray start --block does not return: the programs below it never start",
                why=BLOCK_WHY,
                cure="end the line with &",
            )
            return


RAY_WHY = (
    "Without --block the command returns at once, and Slurm ends the processes of a step with it: the worker is gone."
)


def ray_step_ends(job: JobDescription) -> Iterator[Violation]:
    """Report a worker of ray in a step that ends at once."""
    for call in job.calls:
        srun = call.srun
        if (
            not is_ray_start(call)
            or srun is None
            or call.in_substitution
            or any(a.text == "--block" for a in call.args)
        ):
            continue
        if any(c.program in ("bash", "sh") for c in call.under) or any(
            "$" in a.text and "@" in a.text for a in call.args
        ):
            continue
        yield Violation(
            srun.offset,
            "srun ray start without --block: the step ends, and Slurm ends ray with it",
            why=RAY_WHY,
            cure="ray start ... --block &",
        )
