"""Slurm's commands: what their answers mean, what is called, and what follows if they refuse, or answer badly or late.

`slurm_answers` holds answers as 21.08 to 25.05 print them; stubs stand in for the commands, which the box has.
"""

import json
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.lab.cluster.processes import wait_gone
from allranks.launch.slurm.launcher import SlurmLauncher
from allranks.nodes.preflight.requirements import needed_packages
from allranks.nodes.preflight.runner import exclude_nodes, failure_lines, require_usable_nodes
from allranks.nodes.records import Check, PreflightReport
from allranks.nodes.slurm import answers
from allranks.nodes.slurm.allocations import Allocation, expand_hostlist, refusal
from allranks.nodes.slurm.allocations import test_only as ask_sbatch
from allranks.nodes.slurm.answers import JobInfo, NoAnswer, NodeInfo
from allranks.nodes.slurm.commands import NO_ANSWER, Slurm, SubmissionRefused, over_limits
from allranks.nodes.slurm.srun import run_with_srun, srun_command
from allranks.nodes.staging.broadcast import StagingStep
from allranks.spec import RunSpec, parse_spec
from allranks.spec.records import ClusterSpec
from tests.unit.test_plan import facts

FOLDER = Path(__file__).parent / "slurm_answers"
GOLDEN = FOLDER / "expected.json"
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NOT_KNOWN = "slurm_load_jobs error: Invalid job id specified"
DISABLED = "Slurm accounting storage is disabled"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slurm prints local time; the golden file holds seconds since the epoch."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def text(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text()


def job(name: str) -> JobInfo:
    (only,) = answers.parse_jobs(text(name))
    return only


def node(name: str) -> NodeInfo:
    return answers.parse_nodes(text(name))[0]


def fields(info: msgspec.Struct) -> dict[str, Any]:
    """The fields that were printed: the others have their defaults."""
    usual = {field.name: field.default for field in msgspec.structs.fields(info)}
    return {name: value for name, value in msgspec.structs.asdict(info).items() if value != usual[name]}


def read(name: str) -> Any:
    if "-job-" in name:
        return {**fields(job(name)), "end_text": answers.end_text(job(name))}
    if "-node-" in name:
        return {**fields(node(name)), "lost": answers.is_lost(node(name))}
    if "-sinfo" in name:
        return [msgspec.structs.astuple(line) for line in answers.parse_partitions(text(name))]
    ended = answers.parse_sacct(text(name), "4711")
    return None if ended is None else {"state": ended.state, "end_text": answers.end_text(ended)}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_an_answer_is_read_as_its_golden_line_says(name: str) -> None:
    golden, seen = json.loads(GOLDEN.read_text()), json.loads(msgspec.json.encode(read(name)))
    if os.environ.get("ALLRANKS_GOLDEN") == "write":
        golden[name] = seen
        lines = (f"{json.dumps(key)}: {json.dumps(golden[key])}" for key in sorted(golden))
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert seen == golden[name]


def test_free_text_cannot_pretend_to_be_a_state() -> None:
    """Recorded: the job's name and comment hold ``JobState=FAILED``, a node's reason ``State=DOWN``."""
    assert "JobState=FAILED" in text("22.05-job-running") and job("22.05-job-running").state == "RUNNING"
    assert job("24.05-job-preempted").state == "PREEMPTED"
    assert "slow State=DOWN" in text("22.05-node-drain") and node("22.05-node-drain").state == "IDLE"


@pytest.mark.parametrize(
    ("name", "now", "cause"),
    [
        # recorded while the signal was handled
        ("22.05-job-cancelling", "2026-11-22T17:08:34", "cancelled"),
        ("22.05-job-preempt-grace", "2026-11-22T17:04:21", "preempted"),
        ("22.05-job-preempted", "2026-11-22T17:04:43", "preempted"),
        ("22.05-job-time-limit", "2026-11-22T17:06:13", "time_limit"),
        ("22.05-job-node-fail", "2026-11-22T17:06:45", "node_fail"),
        ("22.05-job-requeue", "2026-11-22T17:08:42", "unknown"),
        ("22.05-job-killed-by-usr1", "2026-11-22T17:04:12", "time_limit"),
        # two hours of limit: far from it, near it, and as early as Slurm may signal
        ("22.05-job-running", "2026-11-22T17:10:00", "unknown"),
        ("22.05-job-running", "2026-11-22T19:06:31", "time_limit"),
        ("22.05-job-running", "2026-11-22T19:05:32", "time_limit"),
        ("22.05-job-running", "2026-11-22T19:04:00", "unknown"),
        # written after the documentation
        ("23.02-job-unlimited", "2026-03-02T22:00:00", "unknown"),
        ("23.11-job-timeout", "2026-03-02T22:00:23", "time_limit"),
        ("25.05-job-completing", "2026-03-02T10:10:01", "unknown"),
    ],
)
def test_why_a_job_was_signalled(name: str, now: str, cause: str) -> None:
    assert answers.why_signalled(job(name), datetime.fromisoformat(now).timestamp(), signal_s=120) == cause
    assert answers.why_signalled(None, 0.0, 120) == "unknown"
    assert answers.is_lost(None) is None and answers.is_lost(NoAnswer("slurmctld is away")) is None


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("RUNNING", ("RUNNING", (), None)),
        ("COMPLETING", ("COMPLETING", ("COMPLETING",), None)),
        ("CANCELLED,COMPLETING", ("CANCELLED", ("COMPLETING",), None)),
        ("CANCELLED+COMPLETING", ("CANCELLED", ("COMPLETING",), None)),
        ("CANCELLED by 2001", ("CANCELLED", (), 2001)),
        ("PENDING,REQUEUED,POWER_UP_NODE", ("PENDING", ("REQUEUED", "POWER_UP_NODE"), None)),
        ("", ("UNKNOWN", (), None)),
    ],
)
def test_job_states(state: str, expected: tuple[str, tuple[str, ...], int | None]) -> None:
    assert answers.job_state(state) == expected


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:8", 8), ("gpu", 1), ("gpu:a100", 1), ("gpu:a100:4(S:0-1)", 4), ("gpu:a100:2,gpu:v100:2", 4),
        ("(null)", 0), (None, 0), ("", 0), ("shard:8", 0), ("mps:400", 0), ("gpu:2,shard:16(S:0,1),mps:200", 2),
        ("gpu:tesla(S:0,1),nvme:1", 1), ("gres/gpu:h100=4", 4), ("gres:gpu:2", 2), ("gpu:a100:no_consume:4", 4),
        ("gpu:0", 0), ("mygpu:4", 0), ("gpu:8(IDX:0-7)", 8),
    ],
)  # fmt: skip
def test_gpus_in_generic_resources(gres: str | None, gpus: int) -> None:
    assert answers.gpu_count(gres) == gpus


@pytest.mark.parametrize(
    ("version", "partition", "gpus"),
    [
        ("21.08", None, 0), ("21.08", "gpu", 4), ("21.08", "nope", None), ("21.08", "mps", 2), ("21.08", "cpu,gpu", 4),
        ("25.05", None, 8), ("25.05", "batch", 0), ("25.05", "mixed", 1), ("22.05", None, 2), ("22.05", "gpu", 2),
    ],
)  # fmt: skip
def test_gpus_of_a_partition(version: str, partition: str | None, gpus: int | None) -> None:
    assert answers.partition_gpus(answers.parse_partitions(text(f"{version}-sinfo")), partition) == gpus


def test_an_array_gives_one_record_a_task_and_the_one_asked_for_is_found() -> None:
    two = text("22.05-job-running") + text("22.05-job-requeue")
    assert [one.job for one in answers.parse_jobs(two)] == ["1", "2"]
    second = answers.parse_job(two, "2")
    assert second is not None and second.restarts == 1 and answers.parse_job("", "2") is None


def stub(folder: Path, **scripts: str) -> Slurm:
    """A Slurm whose commands are shell lines; a command without one is not installed."""
    cases = "\n".join(f"{name}) {script} ;;" for name, script in scripts.items())
    other = '*) echo "$1: command not found" >&2; exit 127 ;;'
    program(folder, "stub", f'case "$1" in\n{cases}\n{other}\nesac')
    return Slurm([str(folder / "stub")], "a stub")


def saying(folder: Path, answer: str, code: int = 0, to: str = "") -> str:
    path = folder / f"answer-{abs(hash(answer))}"
    path.write_text(answer)
    return f"cat {path} {to}; exit {code}"


def test_a_job_that_slurm_does_not_know_differs_from_no_answer(tmp_path: Path) -> None:
    unknown = stub(tmp_path, scontrol=saying(tmp_path, NOT_KNOWN, 1, ">&2"))
    assert unknown.try_job("7") is None and unknown.state("7").state == "GONE" and not unknown.state("7").alive
    away = stub(tmp_path, scontrol=saying(tmp_path, AWAY, 1, ">&2"))
    answer, state = away.try_job("7"), away.state("7")
    assert isinstance(answer, NoAnswer) and "Unable to contact" in answer.reason
    assert state.state == NO_ANSWER and state.alive, "a controller that restarts has ended no job"
    assert away.restarts("7") is None and away.end_reason("7") == "unknown"
    known = stub(tmp_path, scontrol=saying(tmp_path, text("22.05-job-running")))
    answer, state = known.try_job("1"), known.state("1")
    assert isinstance(answer, JobInfo) and answer.state == "RUNNING"
    assert (state.state, state.nodes, state.alive, state.restarts) == ("RUNNING", "n[1-2]", True, 0)
    ended = stub(tmp_path, scontrol=saying(tmp_path, text("22.05-job-failed")))
    assert ended.end_reason("7") == "FAILED (NonZeroExitCode, exit code 3)"


def test_a_node_that_slurm_does_not_know_differs_from_no_answer(tmp_path: Path) -> None:
    assert stub(tmp_path, scontrol=saying(tmp_path, "Node n9 not found\n", 1)).try_node("n9") is None
    away = stub(tmp_path, scontrol=saying(tmp_path, AWAY.replace("jobs", "node"), 1, ">&2"))
    assert isinstance(away.try_node("n9"), NoAnswer)
    there = stub(tmp_path, scontrol=saying(tmp_path, text("22.05-node-down"))).try_node("n2")
    assert isinstance(there, NodeInfo) and there.responding is False


def test_commands_that_cannot_be_started_or_read_are_no_answer(tmp_path: Path) -> None:
    for answer in (b"", b"\xff\xfe\x00garbage", b"JobId=x\n", b"<html>proxy</html>"):
        (tmp_path / "answer").write_bytes(answer)
        assert isinstance(stub(tmp_path, scontrol=f"cat {tmp_path}/answer").try_job("7"), NoAnswer), answer
    assert isinstance(Slurm([str(tmp_path / "nowhere")], "none").try_job("7"), NoAnswer)
    (tmp_path / "not-executable").write_text("#!/bin/sh\n")
    forbidden = Slurm([str(tmp_path / "not-executable")], "forbidden")
    assert isinstance(forbidden.try_job("7"), NoAnswer) and isinstance(forbidden.try_node("n1"), NoAnswer)
    assert forbidden.partition_gpus(None) is None and forbidden.node_state("n1") == "unknown"
    with pytest.raises(EnvironmentNotAble, match="cannot be started"):
        forbidden.call("sbatch")


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    """A wrapper script's child holds the pipe: killing the wrapper alone would wait for the child."""
    slurm = stub(tmp_path, scontrol=f"sleep 120 & echo $! > {tmp_path}/child; wait")
    began = time.monotonic()
    answer = slurm.try_job("7")
    assert isinstance(answer, NoAnswer) and "within 10 s" in answer.reason
    assert time.monotonic() - began < 60, "not until the child ends by itself"
    assert wait_gone([int((tmp_path / "child").read_text())], 10) == [], "the child was left running"


@pytest.mark.parametrize(
    ("sacct", "said"),
    [
        (("CANCELLED by 2001|0:15\n",),
         "CANCELLED (by user id 2001, the batch script was killed by signal 15 (SIGTERM))"),
        (("COMPLETED|0:0\n",), "COMPLETED"), ((DISABLED, 1, ">&2"), "unknown"), ((DISABLED,), "unknown"),
        (("",), "unknown"), (None, "unknown"),
    ],
)  # fmt: skip
def test_a_job_that_scontrol_has_forgotten_is_looked_up_in_accounting(tmp_path: Path, sacct: Any, said: str) -> None:
    scripts = {} if sacct is None else {"sacct": saying(tmp_path, *sacct)}
    assert stub(tmp_path, scontrol=saying(tmp_path, NOT_KNOWN, 1, ">&2"), **scripts).end_reason("7") == said


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH for programs that stand for Slurm's."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_step_has_one_task_on_each_node_and_survives_the_failure_of_one() -> None:
    tasks = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=0"]
    assert srun_command(2, ["true"], cpus="8", options=["--wait=0"]) == ["srun", *tasks, "--wait=0", "true"]
    named = srun_command(["n1", "n2"], ["true"], prefix=["box"], job_id="7", cpus=8)
    assert named == ["box", "srun", "--jobid=7", "--nodelist=n[1-2]", *tasks, "true"]


def test_checks_and_staging_name_job_and_nodes_alike(programs: Path) -> None:
    program(programs, "srun", f'echo "$@" >> {programs}/calls; cat > /dev/null')
    run_with_srun(["n1", "n2"], ["true"], 5, job_id="7")
    with StagingStep(Allocation(job_id="7", nodes=("n1", "n2")), ["n1", "n2"], ["python3"], {"verb": "ask"}):
        pass
    check, stage = (line.split() for line in (programs / "calls").read_text().splitlines() if line.startswith("--"))
    own = {"--wait=5", "--quit-on-interrupt", "--input=none", "true"}
    assert set(check) - own == set(check) & set(stage), "only what differs by purpose differs"
    assert {"--jobid=7", "--nodelist=n[1-2]", "--ntasks-per-node=1"} <= set(check) & set(stage)
    assert {"--mem=0", "--cpu-bind=none", "--input=all", "--chdir=/", "--overlap"} <= set(stage)


def test_the_job_of_this_process(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentNotAble, match="not inside a Slurm job"):
        Allocation.current()
    program(programs, "scontrol", '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"')
    for name, value in (("JOB_ID", "7"), ("JOB_NODELIST", "n[1-2]"), ("RESTART_COUNT", "3")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert (Allocation.current().nodes, Allocation.current().folder) == (("n1", "n2"), "cluster.7.3")


def test_a_host_list_that_slurm_does_not_expand_is_an_error_and_not_an_empty_job(programs: Path) -> None:
    program(programs, "scontrol", 'echo "Invalid hostlist: n[1-" >&2; exit 1')
    with pytest.raises(EnvironmentNotAble, match=r"show hostnames failed: Invalid hostlist: n\[1-"):
        expand_hostlist(Slurm([], "own"), "n[1-")


def spec_of(*sets: str) -> RunSpec:
    return parse_spec({"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}, sets)


def cluster_of(nodes: int = 3, **slurm: str) -> ClusterSpec:
    sets = (f"cluster.slurm.{key}='{value}'" for key, value in slurm.items())
    return spec_of("cluster.launcher=slurm", f"cluster.nodes={nodes}", *sets).cluster


def test_packages_go_by_what_the_ranks_import() -> None:
    assert "peft" not in needed_packages(spec_of())
    assert needed_packages(spec_of("adapter.type=lora")) == [*needed_packages(spec_of()), "peft"]
    assert needed_packages(spec_of("cluster.python=/images/x.sif")) == [], "an image brings its own"
    assert needed_packages(parse_spec({"script": {"path": "own.py"}})) == ["torch"]


def test_a_cure_of_several_nodes_is_told_once_and_what_does_not_block_refuses_no_run() -> None:
    torch = Check(name="pkgs", ok=False, found="MISSING(torch)", cure="pip install")
    name = Check(name="name", ok=False, found="LOOPBACK", cure="/etc/hosts", blocks=False)
    checks = {"n1": [torch, name], "n2": [torch], "n3": [name]}
    reports = [PreflightReport(host=host, checks=own) for host, own in checks.items()]
    assert failure_lines(reports) == ["n1, n2: pkgs: pip install", "n1, n3: name: /etc/hosts"]
    with pytest.raises(EnvironmentNotAble) as refused:
        require_usable_nodes(reports)
    assert str(refused.value) == "nodes are not ready: n1, n2: pkgs: pip install"


def test_a_run_without_some_nodes() -> None:
    three = ("cluster.launcher=slurm", "cluster.nodes=3", "cluster.slurm.exclude=[n9]")
    left = exclude_nodes(spec_of(*three), ["n2"], 2, facts()).cluster
    assert (left.nodes, left.slurm.exclude) == (2, ["n9", "n2"])
    with pytest.raises(EnvironmentNotAble, match="no node is left"):
        exclude_nodes(spec_of(*three), ["n1", "n2", "n3"], 0, facts())
    with pytest.raises(EnvironmentNotAble, match="does not allow a run without n2"):
        exclude_nodes(spec_of(*three, "train.micro_batch_size=1", "train.global_batch_size=6"), ["n2"], 2, facts())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("Invalid partition name specified", "cluster.slurm.partition gpux: "),
        ("INVALID ACCOUNT or account/partition combination specified", "cluster.slurm.partition gpux: "),
        ("User's group not permitted to use this partition", "cluster.slurm.partition gpux: "),
        ("Invalid qos specification", "cluster.slurm.qos null: "),
        ("Requested time limit is invalid (missing or exceeds some limit)", "cluster.slurm.time 9-0: "),
        ("Invalid --time specification", "cluster.slurm.time 9-0: "),
        ("Invalid generic resource (gres) specification", "cluster.slurm.gres foo:1: "),
        ("Requested node configuration is not available", "cluster.slurm.gres foo:1 and cluster.nodes 3: "),
        ("CPU count per node can not be satisfied", "cluster.nodes 3: "),
        ("Memory specification can not be satisfied", "cluster.slurm.mem null: "),
        ("Job violates accounting/QOS policy (job submit limit)", "cluster.slurm.time 9-0 and "),
        ("the site's plug-in says no", "cluster of 3 nodes: "),
    ],
)
def test_what_sbatch_refuses_is_told_with_key_and_value(tmp_path: Path, words: str, said: str) -> None:
    slurm = stub(tmp_path, sbatch=saying(tmp_path, f"sbatch: error: Batch job submission failed: {words}\n", 1, ">&2"))
    with pytest.raises(SubmissionRefused) as refused:
        slurm.submit(tmp_path / "job.sbatch")
    text = str(refusal(slurm, cluster_of(partition="gpux", time="9-0", gres="foo:1"), str(refused.value)))
    assert text.startswith(said) and words in text and "sbatch: error" not in text


@pytest.mark.parametrize(
    ("nodes", "slurm", "keys"),
    [
        (1, {"partition": "short", "time": "00:10:01"}, ["time"]), (1, {"partition": "short", "time": "11"}, ["time"]),
        (3, {"partition": "short", "time": "10"}, ["nodes"]), (1, {"partition": "short,long", "time": "02:00:00"}, []),
        (1, {"partition": "short", "time": "11", "qos": "any"}, []), (400, {"time": "9-0"}, []),
        (1, {"partition": "unknown", "time": "9-0"}, []),
    ],
)  # fmt: skip
def test_limits_that_sbatch_ignores_are_told_too(nodes: int, slurm: dict[str, str], keys: list[str]) -> None:
    limits = answers.parse_partition_limits("main*|infinite|1-infinite\nshort|10:00|1-2\nlong|1-00:00:00|1-infinite\n")
    assert over_limits(cluster_of(nodes, **slurm), limits, None) == keys
    assert over_limits(spec_of("cluster.slurm.time='11'").cluster, limits, "short") == ["time"]


def test_nodes_that_start_no_job_are_named_with_their_reasons(tmp_path: Path) -> None:
    main = "main*|n1|idle|up|none\nmain*|n2|drained|up|bad DIMM\nmain*|n3|down*|up|Not responding\n"
    slurm = stub(tmp_path, sinfo=saying(tmp_path, f"{main}gpu|g1|idle|up|none\n"))
    bad = "; n2 is drained (bad DIMM), n3 is down* (Not responding), so they start no job"
    for cluster, words in ((cluster_of(), bad), (cluster_of(partition="gpu"), "sinfo")):
        text = str(refusal(slurm, cluster, "Requested node configuration is not available"))
        assert text.startswith("cluster.nodes 3: Slurm refuses") and words in text
        assert ("start no job" in text) == (words is bad)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("partition", "Invalid partition name specified"), ("qos", "Invalid qos specification"),
        ("account", "Invalid account or account/partition combination specified"),
        ("reservation", "Requested reservation is invalid"), ("constraint", "Invalid feature specification"),
    ],
)  # fmt: skip
def test_a_request_that_could_never_run_names_its_key(tmp_path: Path, key: str, words: str) -> None:
    refusing = stub(tmp_path, sbatch=saying(tmp_path, f"allocation failure: {words}\n", 1, ">&2"))
    with pytest.raises(SpecError, match=rf"cluster\.slurm\.{key} wrong: Slurm refuses such a job"):
        ask_sbatch(refusing, cluster_of(**{key: "wrong"}))
    silent = stub(tmp_path, sbatch=saying(tmp_path, f"sbatch: error: {AWAY}\n", 1, ">&2"))
    with pytest.raises(EnvironmentNotAble, match="contact"):
        ask_sbatch(silent, cluster_of(**{key: "wrong"}))


def test_a_refusal_at_the_submission_itself_names_its_key_too(tmp_path: Path) -> None:
    """The cluster may have changed since sbatch was asked."""
    launcher = SlurmLauncher()
    launcher._found = stub(tmp_path, sbatch=saying(tmp_path, "sbatch: error: Invalid qos specification\n", 1, ">&2"))
    spec = spec_of("cluster.launcher=slurm", "cluster.slurm.qos=gone")
    with pytest.raises(SpecError, match=r"cluster\.slurm\.qos gone: Slurm refuses"), launcher._refusals_explained(spec):
        launcher._slurm().submit(tmp_path / "job.sbatch")
