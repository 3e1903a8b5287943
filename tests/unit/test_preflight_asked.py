"""What is asked of nodes and of Slurm before anything runs on them, and what follows from the answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.errors import DataError, EnvironmentNotAble, SpecError
from allranks.launch.slurm.launcher import SlurmLauncher
from allranks.nodes.preflight import check_request
from allranks.nodes.preflight.requirements import needed_packages
from allranks.nodes.preflight.runner import exclude_nodes, failure_lines, require_usable_nodes
from allranks.nodes.records import Check, PreflightReport
from allranks.nodes.slurm.allocations import refusal
from allranks.nodes.slurm.allocations import test_only as ask_sbatch
from allranks.nodes.slurm.answers import parse_partition_limits
from allranks.nodes.slurm.commands import Slurm, SubmissionRefused, over_limits
from allranks.spec import RunSpec, parse_spec
from tests.unit.test_plan import facts

MINIMAL = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}


def spec_of(*sets: str) -> RunSpec:
    return parse_spec(MINIMAL, sets)


def test_packages_go_by_what_the_ranks_import() -> None:
    assert "peft" not in needed_packages(spec_of())
    assert needed_packages(spec_of("adapter.type=lora")) == [*needed_packages(spec_of()), "peft"]
    assert needed_packages(spec_of("cluster.python=/images/x.sif")) == [], "an image brings its own"
    assert needed_packages(parse_spec({"script": {"path": "own.py"}})) == ["torch"]


def report(host: str, *checks: Check) -> PreflightReport:
    return PreflightReport(host=host, checks=list(checks))


def test_a_cure_of_several_nodes_is_told_once_and_what_does_not_block_refuses_no_run() -> None:
    torch = Check(name="pkgs", ok=False, found="MISSING(torch)", cure="pip install")
    name = Check(name="name", ok=False, found="LOOPBACK", cure="/etc/hosts", blocks=False)
    reports = [report("n1", torch, name), report("n2", torch), report("n3", name)]
    assert failure_lines(reports) == ["n1, n2: pkgs: pip install", "n1, n3: name: /etc/hosts"]
    with pytest.raises(EnvironmentNotAble) as refused:
        require_usable_nodes(reports)
    assert str(refused.value) == "nodes are not ready: n1, n2: pkgs: pip install"


def test_a_run_without_some_nodes() -> None:
    three = spec_of("cluster.launcher=slurm", "cluster.nodes=3", "cluster.slurm.exclude=[n9]")
    left = exclude_nodes(three, ["n2"], facts()).cluster
    assert (left.nodes, left.slurm.exclude) == (2, ["n9", "n2"])
    with pytest.raises(EnvironmentNotAble, match="no node is left"):
        exclude_nodes(three, ["n1", "n2", "n3"], facts())
    fixed = spec_of(
        "cluster.launcher=slurm", "cluster.nodes=3", "train.micro_batch_size=1", "train.global_batch_size=6"
    )
    with pytest.raises(EnvironmentNotAble, match="does not allow a run without n2"):
        exclude_nodes(fixed, ["n2"], facts())


def test_data_without_a_row_are_refused_before_anything_is_asked(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="the file is empty"):
        check_request(spec_of(f"data.source={tmp_path / 'rows.jsonl'}"))


def saying(folder: Path, *, out: str = "", err: str = "", code: int = 0) -> Slurm:
    """Slurm's own words, given by a program in its place; what its commands do, the cluster's tests show."""
    (folder / "out").write_text(out)
    (folder / "err").write_text(err)
    return Slurm(["sh", "-c", f"cat {folder}/out; cat {folder}/err >&2; exit {code}", "x"], "a")


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
    slurm = saying(tmp_path, err=f"sbatch: error: Batch job submission failed: {words}\n", code=1)
    sets = ("partition=gpux", "time=9-0", "gres='foo:1'")
    cluster = spec_of("cluster.launcher=slurm", "cluster.nodes=3", *(f"cluster.slurm.{key}" for key in sets)).cluster
    with pytest.raises(SubmissionRefused) as refused:
        slurm.submit(tmp_path / "job.sbatch")
    text = str(refusal(slurm, cluster, str(refused.value)))
    assert text.startswith(said) and words in text and "sbatch: error" not in text


def test_limits_that_sbatch_ignores_are_told_too() -> None:
    text = "main*|infinite|1-infinite\nshort|10:00|1-2\nlong|1-00:00:00|1-infinite\n"
    limits = parse_partition_limits(text)
    for sets, keys in (
        (("cluster.slurm.partition=short", "cluster.slurm.time='00:10:01'"), ["time"]),
        (("cluster.slurm.partition=short", "cluster.slurm.time='11'"), ["time"]),
        (("cluster.slurm.partition=short", "cluster.slurm.time='10'", "cluster.nodes=3"), ["nodes"]),
        (("cluster.slurm.partition='short,long'", "cluster.slurm.time='02:00:00'"), []),
        (("cluster.slurm.partition=short", "cluster.slurm.time='11'", "cluster.slurm.qos=any"), []),
        (("cluster.slurm.time=9-0", "cluster.nodes=400"), []),
        (("cluster.slurm.partition=unknown", "cluster.slurm.time=9-0"), []),
    ):
        cluster = spec_of("cluster.launcher=slurm", *sets).cluster
        assert over_limits(cluster, limits, None) == keys, sets
    assert over_limits(spec_of("cluster.slurm.time='11'").cluster, limits, "short") == ["time"]


SINFO = (
    "main*|n1|idle|up|none\nmain*|n2|drained|{0}|bad DIMM\nmain*|n3|down*|{0}|Not responding\ngpu|g1|idle|{0}|none\n"
)


@pytest.mark.parametrize(
    ("partition", "said"), [(None, "n2 is drained (bad DIMM), n3 is down* (Not responding)"), ("gpu", "")]
)
def test_nodes_that_start_no_job_are_named_with_their_reasons(tmp_path: Path, partition: str | None, said: str) -> None:
    slurm = saying(tmp_path, out=SINFO.format("up"))
    sets = [f"cluster.slurm.partition={partition}"] if partition else []
    cluster = spec_of("cluster.launcher=slurm", "cluster.nodes=3", *sets).cluster
    words = str(refusal(slurm, cluster, "Requested node configuration is not available"))
    assert (
        words.startswith("cluster.nodes 3: Slurm refuses")
        and (f"; {said}, so they start no job" if said else "sinfo") in words
    )
    assert ("start no job" in words) == bool(said)


def test_how_a_job_ended_in_slurms_words(tmp_path: Path) -> None:
    line = "JobId=7 JobName=x JobState={} Reason={} Dependency=(null)\n"
    assert saying(tmp_path, out=line.format("COMPLETED", "None")).end_reason("7") == "COMPLETED"
    assert saying(tmp_path, out=line.format("FAILED", "NodeFail")).end_reason("7") == "FAILED (NodeFail)"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("partition", "Invalid partition name specified"),
        ("account", "Invalid account or account/partition combination specified"),
        ("qos", "Invalid qos specification"),
        ("reservation", "Requested reservation is invalid"),
        ("constraint", "Invalid feature specification"),
    ],
)
def test_a_request_that_could_never_run_names_its_key(tmp_path: Path, key: str, words: str) -> None:
    cluster = spec_of("cluster.launcher=slurm", f"cluster.slurm.{key}=wrong").cluster
    refusing = saying(tmp_path, err=f"allocation failure: {words}\n", code=1)
    with pytest.raises(SpecError, match=rf"cluster\.slurm\.{key} wrong: Slurm refuses such a job"):
        ask_sbatch(refusing, cluster)
    silent = saying(tmp_path, err="sbatch: error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(EnvironmentNotAble, match="contact"):
        ask_sbatch(silent, cluster)


def test_a_refusal_at_the_submission_itself_names_its_key_too(tmp_path: Path) -> None:
    """The cluster may have changed since sbatch was asked."""
    launcher = SlurmLauncher()
    launcher._found = saying(tmp_path, err="sbatch: error: Invalid qos specification\n", code=1)
    spec = spec_of("cluster.launcher=slurm", "cluster.slurm.qos=gone")
    with pytest.raises(SpecError, match=r"cluster\.slurm\.qos gone: Slurm refuses"), launcher._refusals_explained(spec):
        launcher._slurm().submit(tmp_path / "job.sbatch")
