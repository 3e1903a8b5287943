"""Rules for what launchers need and refuse: host lists, addresses, variables that are passed on, and ray's daemons."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placement import MPI, count_of
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.dataflow import exported_before
from allranks.analysis.lint.rules.steps import is_ray_start

SLOTS_WHY = "The launcher refuses more processes than its hosts have slots, and nothing starts."
DEEPSPEED_WHY = "deepspeed stops with an error: its host filters exclude each other."
DEVICES_WHY = "With these options deepspeed ignores CUDA_VISIBLE_DEVICES and counts the GPUs of the machine from 0."
RAY_WHY = (
    "Without --block the command returns at once, and Slurm ends the processes of a step with it: the worker is gone."
)
BLOCK_WHY = "With --block ray does not return before its node leaves the cluster."
NO_IP_WHY = "accelerate meets at None:None, or at the address of the user's own configuration, and stops or hangs."


def few_slots(job: JobDescription) -> Iterator[Violation]:
    """Compare the processes of horovodrun or Open MPI with the slots of its list of hosts."""
    for call in job.calls:
        if call.in_substitution or call.program not in MPI | {"horovodrun"}:
            continue
        if any(re.search(r"(?i)oversubscribe", a.text) for a in call.args):
            continue
        total = count_of(job, call, {"-np", "--np", "-n", "--n", "--num-proc"})
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            listed = value if equals else following.text if following else ""
            parts = listed.split(",")
            if name not in ("-H", "--host", "--hosts", "-host") or not all(
                re.fullmatch(r"[\w.$-]+:\d{1,3}", p) for p in parts
            ):
                continue
            slots = sum(int(p.rpartition(":")[2]) for p in parts)
            if total and total > slots:
                yield Violation(
                    arg.offset,
                    f"{total} processes, but {listed} has {slots} slots",
                    why=SLOTS_WHY,
                    cure=f"-np {slots}, or more slots",
                )


def filters(job: JobDescription) -> Iterator[Violation]:
    """Report options of deepspeed that exclude each other."""
    for launch in job.launches:
        if launch.kind != "deepspeed":
            continue
        include, exclude = launch.option("include", "i"), launch.option("exclude", "e")
        count = launch.option("num_gpus", "num_nodes")
        chosen = include or exclude
        if chosen and count and (chosen.value or "").strip("\"'"):
            text = f"{count.arg.text.partition('=')[0]} and {chosen.arg.text.partition('=')[0]}: deepspeed takes only one of them"
            yield Violation(
                count.arg.offset, text, why=DEEPSPEED_WHY, cure=f"remove {count.arg.text.partition('=')[0]}"
            )
        elif include and exclude and (include.value or "").strip("\"'") and (exclude.value or "").strip("\"'"):
            yield Violation(
                exclude.arg.offset,
                "--include and --exclude: deepspeed takes only one of them",
                why=DEEPSPEED_WHY,
                cure="remove one",
            )


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
            f"{machines.arg.text.partition('=')[0]} is {job.number(machines.value)}, and there is no --main_process_ip",
            why=NO_IP_WHY,
            cure="--main_process_ip=$HEAD --main_process_port=<port>",
        )


def _asks_for_configuration(job: JobDescription) -> bool:
    return any(c.program == "accelerate-other" for c in job.calls) or "default_config.yaml" in job.text


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
