"""Profiles of clusters: specs of their own, and another spec's cluster."""

from pathlib import Path

import pytest

from allranks.errors import SpecError
from allranks.planning.planner import make_plan
from allranks.spec import load_spec, parse_spec
from allranks.utils.machine import Gpu, MachineFacts
from tests.conftest import REPO

PROFILES = sorted((REPO / "examples" / "clusters").glob("*.yaml"))
GPUS = [Gpu(index=i, name="L4", memory_bytes=2**34) for i in range(8)]
HERE = MachineFacts(host="n1", cpus=64, memory_bytes=2**38, gpus=GPUS, cpu_model="x", system="Linux")


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.stem)
def test_each_can_be_planned_and_used_by_another_spec(path: Path) -> None:
    own = load_spec(path)
    planned = make_plan(own, HERE)
    assert planned.world_size == own.cluster.nodes * (own.cluster.procs_per_node or 0) and not planned.warnings
    other = load_spec(REPO / "examples" / "demo.yaml", [f"cluster.profile={path}", "cluster.timeout_s=77"])
    assert (other.cluster.slurm, other.cluster.nodes) == (own.cluster.slurm, own.cluster.nodes)
    assert other.cluster.timeout_s == 77 and other.model != own.model
    assert other.cluster.profile is None, "it is used up"


def test_own_values_win_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("cluster: {nodes: 4, slurm: {partition: a, account: b}, env: {X: '1', Y: '2'}}\n")
    base = "model: {name: 'tiny:mistral'}\ndata: {source: builtin:instructions}\n"
    own = "cluster: {profile: p.yaml, launcher: slurm, slurm: {account: c}, env: {X: '3'}}\n"
    (tmp_path / "s.yaml").write_text(base + own)
    found = load_spec(tmp_path / "s.yaml").cluster
    assert (found.nodes, found.slurm.partition, found.slurm.account) == (4, "a", "c")
    assert found.env == {"X": "3", "Y": "2"}


@pytest.mark.parametrize(
    ("text", "profile", "said"),
    [
        ("cluster: {profile: x.yaml}", "p.yaml", "a profile cannot name another"),
        ("model: {}", "p.yaml", "no section cluster"), ("[1]", "p.yaml", "no section cluster"),
        ("cluster: {nods: 3}", "p.yaml", "'cluster.nodes'"), ("", "nowhere.yaml", "no such file"),
        ("", 3, "path of another spec"),
    ],
)  # fmt: skip
def test_profiles_that_are_none(tmp_path: Path, text: str, profile: str | int, said: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    named = str(tmp_path / profile) if isinstance(profile, str) else profile
    raw = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}, "cluster": {"profile": named}}
    with pytest.raises(SpecError, match=said):
        parse_spec(raw)
