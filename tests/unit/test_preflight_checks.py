"""Each check names the node that is wrong, and only that one, with what to do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from allranks.errors import EnvironmentNotAble
from allranks.nodes.checks import NodeSurvey, PlanRequirements
from allranks.nodes.checks.registry import CHECKS
from allranks.nodes.preflight.requirements import node_requirements
from allranks.nodes.preflight.runner import STAGEABLE_CHECKS, failure_lines, require_usable_nodes, run_checks
from allranks.nodes.records import (
    BuildLock,
    Check,
    ConnectionResults,
    ContentDigest,
    FolderFacts,
    ImportResult,
    Package,
    PreflightReport,
    RequiredFolder,
    UnreachedPort,
)
from allranks.planning.records import RdmaPort
from allranks.spec import parse_spec
from tests.unit.preflight_nodes import (
    FOLDERS,
    GIB,
    PORTS,
    REQUIRED,
    connected,
    failures,
    in_folder,
    interface,
    node,
    survey,
    three,
)

replace = msgspec.structs.replace


def only(found, key: str) -> Check:
    """The one failure there is."""
    bad = failures(found)
    assert list(bad) == [key], bad
    assert bad[key].cure
    assert key.partition(".")[0] in bad[key].cure or bad[key].name in ("py", "port", "gpus"), bad[key].cure
    return bad[key]


def test_nodes_that_are_well_give_the_line_of_the_lab() -> None:
    reports = run_checks(three(node(3)))
    assert [r.host for r in reports] == ["n1", "n2", "n3"] and all(r.ok for r in reports)
    assert reports[1].line() == (
        "n2 proj=ok pkgs=ok py=3.11.7 torch=2.13.0 data=ok run=rw,12GiB net=eth0/10.0.0.2 reach=2/2 name=ok "
        "clock=+0.00s shm=8GiB files=65536 threads=2x4/8 OK"
    )
    assert "port=21001" in reports[0].line()
    assert failure_lines(reports) == []


def test_a_missing_package_and_a_differing_version() -> None:
    gone = {**node(3).packages, "torch": Package(version="2.13.0", origin=None)}  # an empty folder of that name
    check = only(three(node(3, packages=gone)), "n3.pkgs")
    assert check.found == "MISSING(torch)"
    other = {**node(3).packages, "peft": Package(version="0.18.0", origin="/x")}
    check = only(three(node(3, packages=other)), "n3.pkgs")
    assert check.found == "VERSION(peft 0.18.0, others 0.19.0)" and "peft==0.19.0" in check.cure
    assert "pkgs=MISSING(torch)" in run_checks(three(node(3, packages=gone)))[2].line()


def test_an_engines_package_is_looked_for_and_not_imported(tmp_path: Path) -> None:
    base = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}
    for strategy, package in (("deepspeed_zero1", "deepspeed"), ("hf_trainer", "accelerate"), ("pytorch_ddp", None)):
        required = node_requirements(parse_spec({**base, "strategy": {"name": strategy}}), tmp_path)
        assert set(required.packages) - set(required.imports) == ({package} - {None}), strategy
    engine = {"deepspeed": Package(version="0.18.0", origin="/env/deepspeed/__init__.py")}
    nodes = [node(n, packages={**node(n).packages, **(engine if n < 3 else {})}) for n in (1, 2, 3)]
    wanted = replace(REQUIRED, packages=["torch", "deepspeed"])
    check = only(survey(*nodes, required=wanted), "n3.pkgs")
    assert check.found == "MISSING(deepspeed)" and "'allranks[train,deepspeed]' on n3" in check.cure


def test_another_python_and_the_same_one_elsewhere() -> None:
    assert only(three(node(3, python="3.12.1")), "n3.py").found == "VERSION(3.12.1)"
    assert only(three(node(3, executable="/usr/bin/python3")), "n3.py").found == "MISSING(/env/bin/python)"
    assert "n3.py" in failures(three(node(3, executable="", python="")))


def test_an_import_that_fails() -> None:
    broken = {"torch": ImportResult(seconds=1.0), "peft": ImportResult(seconds=0.1, error="ImportError: no X")}
    check = only(three(node(3, imports=broken)), "n3.imports")
    assert check.found == "FAILED(peft)" and "no X" in check.cure
    gone = node(3, packages={**node(3).packages, "peft": Package(version=None, origin=None)}, imports=broken)
    assert only(three(gone), "n3.pkgs").found == "MISSING(peft)", "said once"


def test_project_and_data_missing_or_of_other_content() -> None:
    assert only(three(in_folder(node(3), "project", exists=False)), "n3.proj").found == "MISSING(/work/allranks)"
    other = ContentDigest(files=3, bytes=300, digest="bbbb")
    assert only(three(in_folder(node(3), "data", fingerprint=other)), "n3.data").found == "DIFFERS(/work/rows.json)"
    assert only(three(in_folder(node(3), "data", error="no answer within 8 s")), "n3.data").found.startswith("UNREAD")
    for facts in ({"exists": False}, {"fingerprint": other}, {"error": "no answer within 8 s"}):
        check = only(three(in_folder(node(3), "project", **facts)), "n3.proj")
        assert check.blocks and "n3" in check.cure, facts


def test_a_users_own_program_is_part_of_the_project() -> None:
    own = ContentDigest(files=1, bytes=9, digest="cccc")
    probes = [
        replace(p, folders={**p.folders, "script": FolderFacts(exists=p.host != "n2", fingerprint=own)})
        for p in map(node, (1, 2, 3))
    ]
    required = replace(REQUIRED, folders=[*REQUIRED.folders, RequiredFolder(role="script", path="/home/u/own.py")])
    assert only(replace(survey(*probes), required=required), "n2.proj").found == "MISSING(/home/u/own.py)"
    without = [in_folder(p, "project", exists=p.host != "n1") for p in probes]
    bad = failures(replace(survey(*without), required=required))
    assert {key: check.found.partition("(")[0] for key, check in bad.items()} == {
        "n1.proj": "MISSING",
        "n2.proj": "MISSING",
    }


def test_the_launcher_settles_a_draw_of_two_nodes() -> None:
    other = ContentDigest(files=3, bytes=300, digest="bbbb")
    two = survey(node(1), in_folder(node(2), "data", fingerprint=other))
    assert list(failures(replace(two, here={"data": FolderFacts(fingerprint=other)}))) == ["n1.data"]
    assert list(failures(two)) == ["n2.data"]


def test_a_run_folder_that_is_not_the_launchers() -> None:
    assert only(three(in_folder(node(3), "run", nonce=None)), "n3.run").found == "NOT-SHARED(/work/runs)"
    assert only(three(in_folder(node(3), "run", nonce="other")), "n3.run").found == "NOT-SHARED(/work/runs)"
    assert not failures(survey(in_folder(node(1), "run", nonce=None))), "one node shares with nobody"
    remote = survey(in_folder(node(1), "run", nonce=None), remote=True)
    assert only(remote, "n1.run").found == "NOT-SHARED(/work/runs)", "but with the launcher, if that is elsewhere"
    assert only(three(in_folder(node(3), "run", write_error="Permission denied")), "n3.run").found.startswith(
        "READ-ONLY"
    )
    assert only(three(in_folder(node(3), "run", free_bytes=2**20)), "n3.run").found.startswith("FULL")
    assert only(three(in_folder(node(3), "run", exists=False)), "n3.run").found.startswith("MISSING")


def test_a_folder_that_the_launcher_cannot_write_is_not_called_shared() -> None:
    line = run_checks(replace(three(node(3)), nonces={}))[0].line()
    assert "run=rw,12GiB,sharing-not-proved" in line


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1"])
def test_own_name_on_loopback_is_bad_but_does_not_block(address: str) -> None:
    check = only(three(node(3, resolves=[address])), "n3.name")
    assert check.found == f"LOOPBACK({address})" and "/etc/hosts" in check.cure and not check.blocks
    assert only(three(node(3, resolves=None, resolve_error="gaierror")), "n3.name").found == "UNKNOWN(n3)"
    require_usable_nodes(run_checks(three(node(3, resolves=[address]))))


def test_the_port_counts_on_the_first_node_only() -> None:
    assert not failures(three(node(3, free_ports=[])))
    second = survey(node(1, free_ports=[PORTS[1]]), node(2))
    assert not failures(second) and "port=21002" in run_checks(second)[0].line()
    taken = survey(node(1, free_ports=[]), node(2))
    assert only(taken, "n1.port").found == "TAKEN(21001,21002)"
    fixed = replace(taken, need=PlanRequirements(port=29500))
    assert only(fixed, "n1.port").found == "TAKEN(29500)" and "null" in failures(fixed)["n1.port"].cure


def test_a_clock_that_is_90_s_off() -> None:
    assert only(three(node(3, clock=1090.0)), "n3.clock").found == "WRONG(+90.0s)"
    assert only(survey(node(1), node(2, clock=910.0)), "n2.clock").found == "WRONG(-90.0s)"
    assert not failures(survey(node(1, clock=1001.5), node(2, clock=1001.5), node(3, clock=999.0))), "each within 2 s"
    launcher_wrong = survey(node(1, clock=1090.0), node(2, clock=1090.1), node(3, clock=1000.0))
    assert list(failures(launcher_wrong)) == ["n3.clock"]


def test_shared_memory_and_open_files() -> None:
    assert only(three(node(3, shm_free_bytes=8 * 2**20)), "n3.shm").found == "SMALL(8MiB)"
    gpu = PlanRequirements(device="cuda", procs_per_node=0)
    docker = replace(survey(node(1, shm_free_bytes=64 * 2**20)), need=gpu)
    assert "n1.shm" in failures(docker) and "--shm-size" in failures(docker)["n1.shm"].cure
    few = three(node(3, open_files=256))
    assert only(few, "n3.files").found == "FEW(256)"
    assert "cluster.setup" in failures(replace(few, remote=True))["n3.files"].cure
    assert failures(replace(few, remote=False))["n3.files"].cure == "ulimit -n 65536 on n3 before the run"


def test_a_lock_that_no_build_holds() -> None:
    left = BuildLock(path="/home/u/.cache/torch_extensions/py311_cu126/fused_adam/lock", age_s=7200.0, held=False)
    check = only(three(node(3, build_locks=[left])), "n3.extensions")
    assert (check.found, check.blocks) == ("LOCKED(fused_adam)", False)
    assert "120 min ago" in check.cure and f"rm {left.path}" in check.cure
    for other in (replace(left, held=True), replace(left, age_s=60.0)):
        assert not failures(three(node(3, build_locks=[other])))


def test_more_threads_than_cores() -> None:
    check = only(three(node(3, cpus=4)), "n3.threads")
    assert check.found == "MANY(2x4/4)" and "OMP_NUM_THREADS=2" in check.cure
    alone = replace(three(node(3)), need=PlanRequirements(procs_per_node=16, threads=1))
    assert not failures(alone), "fewer than one thread a rank there cannot be"


def test_unreached_peers_blame_the_one_that_nobody_reaches() -> None:
    def cut(host: str, *peers: str) -> ConnectionResults:
        return ConnectionResults(
            host=host,
            unreached=[
                UnreachedPort(peer=p, port=21001, why="timed out", address=f"10.0.0.{p[1:]}", tries=4) for p in peers
            ],
        )

    def judged(*hosts: str, **answers: ConnectionResults) -> NodeSurvey:
        probes = [node(int(host[1:])) for host in hosts]
        return replace(survey(*probes), reach=connected(list(hosts), answers))

    three_hosts = ("n1", "n2", "n3")
    alone = judged(*three_hosts, n1=cut("n1", "n3"), n2=cut("n2", "n3"), n3=cut("n3", "n1", "n2"))
    check = only(alone, "n3.reach")
    assert check.found == "UNREACHABLE(n1,n2)"
    assert "n3 -> n1 10.0.0.1:21001 timed out (4 of 4 attempts failed)" in check.cure
    assert "2 of 2 nodes not reached from n3, 2 of 2 did not reach it" in check.cure
    pair = judged(*three_hosts, n1=cut("n1", "n2"), n2=cut("n2"), n3=cut("n3"))
    assert only(pair, "n1.reach").found == "UNREACHABLE(n2)"
    two = judged("n1", "n2", n1=cut("n1", "n2"), n2=cut("n2"))
    assert only(two, "n1.reach").found == "UNREACHABLE(n2)", "of two, who does not reach says so"
    mute = judged(*three_hosts, n1=cut("n1"), n2=cut("n2"))
    assert only(mute, "n3.reach").found == "NO-ANSWER"
    closed = judged("n1", "n2", n1=cut("n1"), n2=replace(cut("n2"), errors=["cannot listen on 10.0.0.2:1: in use"]))
    assert "cannot listen" in only(closed, "n2.reach").cure


def test_no_network_names_the_node_without_one() -> None:
    lonely = node(3, interfaces=[interface("eth0", "10.0.0.3", up=False)])
    found = survey(node(1), node(2))
    found = replace(found, probes=[*found.probes, lonely], network=None, network_error="n1, n2, not n3", reach=None)
    assert list(failures(found)) == ["n3.net"]
    assert failures(found)["n3.net"].found == "NONE(eth0-down)"


def test_gpus_too_few_broken_or_different() -> None:
    h100 = {"index": "0", "name": "NVIDIA H100", "driver": "570.1", "ecc_errors": "0"}
    need = {"need": PlanRequirements(device="cuda", procs_per_node=1)}
    good = node(1, gpus=[h100])
    shared = {"need": PlanRequirements(device="cuda", procs_per_node=4, share_gpus=True)}
    assert not failures(survey(good, node(2, gpus=[h100]), **shared)), "Gloo ranks share a GPU"
    assert only(survey(good, node(2), **shared), "n2.gpus").cure.startswith("the ranks need a GPU: ")
    assert only(survey(good, node(2), **need), "n2.gpus").cure.startswith("the ranks need a GPU: ")
    assert only(survey(good, node(2), **need), "n2.gpus").found == "FEW(0)"
    assert only(survey(good, node(2, gpus=[{**h100, "ecc_errors": "2"}]), **need), "n2.gpus").found == "ECC(0)"
    assert not failures(survey(good, node(2, gpus=[{**h100, "ecc_errors": "[N/A]"}]), **need))
    for need_of, blocks in ((need, True), ({}, False)):
        check = only(survey(good, node(2, gpus=[{**h100, "ecc_errors": "2"}]), **need_of), "n2.gpus")
        assert check.blocks is blocks, "ranks on the CPU do not need it"
    assert only(survey(good, node(2, gpus=[{**h100, "driver": "550.2"}]), **need), "n2.gpus").found.startswith("DIFF")
    assert only(survey(good, node(2, gpu_error="no answer"), **need), "n2.gpus").found == "DRIVER"


def test_infiniband_ports_that_are_down_and_memory_that_cannot_be_locked() -> None:
    up, down = (RdmaPort(device="mlx5_0", port=1, active=active, layer="InfiniBand") for active in (True, False))
    assert list(failures(survey(node(1, infiniband=[up]), node(2, infiniband=[down])))) == ["n2.ib"]
    assert list(failures(survey(node(1, infiniband=[up], memlock_bytes=2**16)))) == ["n1.memlock"]
    assert not failures(survey(node(1, memlock_bytes=2**16))), "without RDMA nothing is locked"


def test_p2p_matrix() -> None:
    text = " \tGPU0\tGPU1\n GPU0\tX\t{}\n GPU1\t{}\tX\n\nLegend:\n  X    = Self\n  OK   = Status Ok\n"
    assert not failures(survey(node(1, p2p=text.format("OK", "OK"))))
    assert failures(survey(node(1, p2p=text.format("OK", "CNS"))))["n1.p2p"].found == "NONE(1/2)"


def test_what_blocks_is_refused_with_all_cures() -> None:
    bad = PreflightReport(host="n2", checks=[Check(name="pkgs", ok=False, found="MISSING(torch)", cure="pip install")])
    with pytest.raises(EnvironmentNotAble, match="n2: pkgs: pip install"):
        require_usable_nodes([bad])


def test_every_check_passes_over_what_was_not_asked() -> None:
    bare = survey(
        node(1),
        required=replace(REQUIRED, packages=[], folders=[], ports=[]),
        need=PlanRequirements(),
        nonces={},
        received={},
    )
    assert failures(bare) == {}
    assert len(CHECKS) == len(set(CHECKS))
    assert GIB == 2**30


def named(first: str, **variables: str):
    """Two nodes whose interfaces are called `first` and eno1, and what the user names."""
    nodes = [node(1, interfaces=[interface(first, "10.0.0.1")]), node(2, interfaces=[interface("eno1", "10.0.0.2")])]
    return survey(*nodes, need=PlanRequirements(procs_per_node=2, threads=4, named=variables))


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0"}, ["n2"]),
        ({"GLOO_SOCKET_IFNAME": "eth0,eno1"}, []),
        ({"GLOO_SOCKET_IFNAME": "eth"}, ["n1", "n2"]),
        ({"NCCL_SOCKET_IFNAME": "e"}, []),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, ["n1", "n2"]),
        ({"NCCL_SOCKET_IFNAME": "=eth0,eno1"}, []),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, []),
        ({"NCCL_SOCKET_IFNAME": "^e"}, ["n1", "n2"]),
        ({}, []),
    ],
)
def test_interfaces_that_the_user_names(variables: dict[str, str], missing: list[str]) -> None:
    bad = failures(named("eth0", **variables))
    assert [key.partition(".")[0] for key in bad if key.endswith(".ifname")] == missing
    assert all("remove it from cluster.env" in check.cure and check.blocks for check in bad.values())


def test_a_node_whose_gpu_or_memory_is_too_small_for_a_rank() -> None:
    gpu = {"index": "0", "name": "NVIDIA H100", "driver": "570", "memory_mb": "81920", "ecc_errors": "0"}
    large, small = node(1, gpus=[gpu] * 2), node(2, gpus=[{**gpu, "memory_mb": "40960"}] * 2)
    need = PlanRequirements(procs_per_node=2, threads=4, device="cuda", rank_memory_bytes=60 * GIB)
    found = run_checks(survey(large, small, need=need))
    by_host = {r.host: next(c for c in r.checks if c.name == "memory") for r in found}
    assert by_host["n1"].ok and by_host["n1"].found == "60GiB/80GiB"
    assert (by_host["n2"].ok, by_host["n2"].blocks, by_host["n2"].found) == (False, True, "SMALL(60GiB/40GiB)")
    assert "--force" in (by_host["n2"].cure or "")
    near = msgspec.structs.replace(need, rank_memory_bytes=42 * GIB)  # within what the estimate may be wrong by
    check = failures(survey(large, small, need=near))["n2.memory"]
    assert (check.found, check.blocks) == ("CLOSE(42GiB/40GiB)", False)
    shared = msgspec.structs.replace(need, procs_per_node=4, rank_memory_bytes=30 * GIB)
    assert "n2.memory" in failures(survey(large, small, need=shared)), "two ranks share a GPU"
    uneven = node(1, gpus=[gpu, {**gpu, "memory_mb": "40960"}])
    assert failures(survey(uneven, need=need))["n1.memory"].found == "SMALL(60GiB/40GiB)", "the smallest counts"
    unknown = [{**gpu, "memory_mb": "[N/A]"}] * 2
    assert not any(c.name == "memory" for r in run_checks(survey(node(1, gpus=unknown), need=need)) for c in r.checks)
    host = PlanRequirements(procs_per_node=2, threads=4, rank_memory_bytes=9 * GIB)
    nodes = survey(node(1, memory_bytes=32 * GIB), node(2, memory_bytes=16 * GIB), need=host)
    assert list(failures(nodes)) == ["n2.memory"]


def test_a_working_directory_that_a_node_lacks_is_not_staged() -> None:
    required = replace(REQUIRED, folders=[*FOLDERS, RequiredFolder(role="workdir", path="/work/at")])
    nodes = [node(n) for n in (1, 2)]
    there = [replace(one, folders={**one.folders, "workdir": FolderFacts(exists=one.host == "n1")}) for one in nodes]
    found = failures(survey(*there, required=required))
    assert list(found) == ["n2.workdir"] and found["n2.workdir"].found == "MISSING(/work/at)"
    assert "workdir" not in STAGEABLE_CHECKS
