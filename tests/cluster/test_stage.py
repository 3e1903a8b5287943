# ruff: noqa: S108 - /tmp of the nodes is meant
"""Staging on a real Slurm: who lacks something gets it, checked and unpacked, and nobody else; nothing is left."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from allranks.errors import RunFailed
from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import injected
from allranks.nodes.slurm.allocations import Allocation
from allranks.nodes.staging.broadcast import staged
from allranks.nodes.staging.bundles import Bundle, assemble
from allranks.nodes.staging.manifests import NodeStage, load_manifest
from allranks.nodes.staging.sources import environment_source, project_source
from allranks.rundir.files import read_json
from tests.cluster.helpers import on
from tests.cluster.runs import run, spec_in, succeeded

TRAIN = "import fake, helper, sys; print('RAN', fake.VALUE, fake.__file__, helper.__file__, sys.argv[1])\n"
UID = os.getuid()
LEFT = "ls -d /tmp/allranks-[0-9]* 2>/dev/null; true"


@pytest.fixture
def bundle(shared: Path) -> Bundle:
    """A project and an environment of one package each, in folders that can be hidden."""
    site, project = shared / "env" / "site", shared / "code"
    for folder in (site / "fake", site / "fake-1.0.dist-info", project):
        folder.mkdir(parents=True)
    (site / "fake" / "__init__.py").write_text("VALUE = 42\n")
    (site / "fake-1.0.dist-info" / "RECORD").write_text("fake/__init__.py,sha256=x,11\n")
    (project / "helper.py").write_text("")
    (project / "train.py").write_text(TRAIN)
    return assemble([environment_source(site), project_source(project / "train.py")], shared / "store", {})


@contextmanager
def job(box: Box, *nodes: str) -> Iterator[Allocation]:
    """A running job, as seen from the login side."""
    names = nodes or tuple(box.node_names)
    request = ["salloc", "--no-shell", f"--nodelist={','.join(names)}", "--ntasks-per-node=1", "--mem=100"]
    number = box.run([*request, f"--nodes={len(names)}"], cwd="/").stderr.split("job allocation ")[1].split()[0]
    yield Allocation(job_id=number, nodes=names, cluster=box.name, prefix=tuple(box.command_prefix("/")))
    box.run(["scancel", number], cwd="/")


def left(box: Box, node: str) -> list[str]:
    return on(box, node, "sh", "-c", LEFT).split()


def contents(box: Box, stage: NodeStage) -> list[str]:
    """What is in a job's folder besides marks: no archive may be left."""
    return [name for name in on(box, stage.node, "ls", str(stage.folder)).split() if not name.startswith("on.")]


def run_on(box: Box, allocation: Allocation, node: str, *command: str) -> str:
    """Output of a step of the job on one node."""
    words = ["srun", f"--jobid={allocation.job_id}", f"--nodelist={node}", "-N1", "-n1", "--overlap", "--chdir=/"]
    done = box.run([*words, *command], cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("method", ["auto", "stream"])
def test_only_the_node_that_lacks_it_gets_it_and_runs_it(box: Box, bundle: Bundle, shared: Path, method: str) -> None:
    with (
        injected(box, "hide-folder", "n2", path=str(shared / "code")),
        injected(box, "hide-folder", "n3", path=str(shared / "env")),
        job(box) as allocation,
    ):
        with staged(bundle, allocation, method=method) as manifest:
            assert [left(box, name) for name in ("n1", "n2", "n3")] == [[], *[[f"/tmp/allranks-{UID}"]] * 2]
            kept = {n.node: [p.name for p in n.parts if p.staged] for n in manifest.nodes}
            assert kept == {"n1": [], "n2": ["project"], "n3": ["env"]}
            assert manifest.bytes_sent == sum(part.bytes for part in bundle.parts)
            assert manifest.method == ("stream" if method == "stream" or box.plan.rootless else "sbcast")
            two, three = manifest.of("n2"), manifest.of("n3")
            assert contents(box, two) == ["project"]
            for node in (two, three):
                env = [f"{k}={v}" for k, v in node.environment().items()]
                script = node.overrides.get("script.path") or str(shared / "code" / "train.py")
                if node is two:
                    env.append(f"PYTHONPATH={shared}/env/site:{two.python_path[0]}")
                said = run_on(box, allocation, node.node, "env", *env, node.python, script, "x").split()
                assert said[:2] == ["RAN", "42"] and said[4] == "x"
                assert said[2].startswith(f"{three.folder}/env/lib" if node is three else str(shared))
                assert said[3].startswith(str(shared) if node is three else f"{two.folder}/project/")
            manifest.save(shared / "stage.json")
            assert load_manifest(shared / "stage.json") == manifest
        assert [left(box, name) for name in ("n1", "n2", "n3")] == [[], [], []]


def test_folders_and_patterns_of_data_reach_the_node_that_lacks_them(box: Box, shared: Path) -> None:
    """Two sources and the rows to evaluate on: a folder of texts, and patterns, one of them relative."""
    for number in range(24):
        rows = f'{{"text": "say word {number}"}}\n'
        for kind, text in (("texts/{}.md", f"# Page {number}\n\nSay word."), ("rows/{}.jsonl", rows)):
            path = shared / "data" / kind.format(f"sub/{number}" if number % 2 else number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    sources = [{"source": str(shared / "data" / "texts")}, {"source": "data/rows/**/*.jsonl"}]
    spec = spec_in(shared, cluster={"nodes": 2}, eval={"source": f"{shared}/data/rows/*.jsonl", "samples": 0})
    spec["data"] = {"sources": sources, "max_length": 64}
    with injected(box, "hide-folder", "n2", path=str(shared / "data")):
        _, run_dir = succeeded(shared, spec)
        kept = {n["node"]: [p["name"] for p in n["parts"] if p["staged"]] for n in read_json(run_dir.stage)["nodes"]}
        assert kept == {"n1": [], "n2": ["data-1", "data-2", "eval-data"]}
        spec["cluster"]["stage"] = "never"
        never, _ = run(shared, spec)
        assert never.returncode == 3 and "n2 does not see" in never.stderr
    succeeded(shared, spec)


def test_nothing_is_sent_where_nothing_is_missing(box: Box, bundle: Bundle) -> None:
    with job(box, "n1", "n2") as allocation, staged(bundle, allocation) as manifest:
        assert (manifest.bytes_sent, manifest.method) == (0, "none")
        assert all(n.folder is None and not n.variables and n.python == sys.executable for n in manifest.nodes)
        assert left(box, "n1") == left(box, "n2") == []


def test_two_jobs_and_a_second_run_do_not_collide(box: Box, bundle: Bundle) -> None:
    with job(box, "n1", "n2") as one, job(box, "n1", "n2") as two:
        with staged(bundle, one, always=True) as first:
            with staged(bundle, two, always=True) as second:
                folders = {m.of("n2").folder for m in (first, second)}
                assert len(folders) == 2 and all(on(box, "n2", "ls", str(f), "-d") for f in folders)
            assert contents(box, first.of("n2")) == ["env", "project"]
            on(box, "n1", "test", "!", "-e", str(second.of("n1").folder))
        with staged(bundle, one, always=True) as again:
            assert again.bytes_sent == first.bytes_sent == 2 * bundle.bytes
        assert left(box, "n1") == left(box, "n2") == []


def test_a_damaged_archive_is_refused_on_the_node_and_nothing_stays(box: Box, bundle: Bundle) -> None:
    archive = Path(bundle.parts[1].archive)
    content = bytearray(archive.read_bytes())
    content[600] ^= 1
    archive.write_bytes(content)
    with job(box, "n1", "n3") as allocation:
        with (
            pytest.raises(RunFailed, match=r"n1: part project .*(damaged|tar file).*n3: part project"),
            staged(bundle, allocation, always=True),
        ):
            pytest.fail("a damaged part was accepted")
        assert left(box, "n1") == left(box, "n3") == []


def test_a_full_disk_is_said_before_anything_is_sent(box: Box, bundle: Bundle) -> None:
    with (
        injected(box, "fill-disk", "n2", path="/tmp"),
        job(box, "n2") as allocation,
        pytest.raises(RunFailed, match=r"No space left|n2 has 0 MiB") as caught,
        staged(bundle, allocation, always=True),
    ):
        pytest.fail("it was staged on a full disk")
    assert "n2" in str(caught.value)
    huge = [msgspec.structs.replace(part, unpacked_bytes=1 << 50) for part in bundle.parts]
    with (
        job(box, "n2") as allocation,
        pytest.raises(RunFailed, match=r"needs \d+ MiB, but n2 has \d+ MiB; set TMPDIR"),
        staged(msgspec.structs.replace(bundle, parts=huge), allocation, always=True),
    ):
        pytest.fail("it was staged where it has no room")
    assert left(box, "n2") == []


def test_what_a_killed_job_left_is_removed_by_the_next(box: Box, bundle: Bundle) -> None:
    with job(box, "n1") as allocation:
        stale = f"/tmp/allranks-{UID}/{box.name}.{int(allocation.job_id) - 1}.0"
        on(box, "n1", "mkdir", "-p", "-m", "700", f"/tmp/allranks-{UID}", stale)
        with staged(bundle, allocation, always=True):
            on(box, "n1", "test", "!", "-e", stale)
        assert left(box, "n1") == []


def test_nodes_that_share_the_folder_are_served_once(make_box: Callable[..., Box], bundle: Bundle) -> None:
    box = make_box(f"stage-shared-{UID}", nodes=2, shared_tmp=True)
    with job(box) as allocation, staged(bundle, allocation, always=True) as manifest:
        assert manifest.bytes_sent == bundle.bytes
        assert {n.folder for n in manifest.nodes} == {manifest.nodes[0].folder}
        assert "42" in run_on(box, allocation, "n2", manifest.of("n2").python, "-c", "import fake; print(fake.VALUE)")
    assert not Path(str(manifest.nodes[0].folder)).exists()
