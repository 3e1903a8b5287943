"""Sampled connections: who tries whom, what it costs as nodes are added, and that only what fails twice is reported."""

from __future__ import annotations

import base64
import json
import math
import os
import random
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from allranks.errors import RunFailed
from allranks.nodes.network import links as network
from allranks.nodes.network.links import faulty_nodes
from allranks.nodes.preflight import link_tests, runner
from allranks.nodes.preflight.runner import connect_window_s
from allranks.nodes.probes import connectivity_probe
from allranks.nodes.probes.probe import unused_port
from allranks.nodes.records import Probe
from allranks.nodes.slurm import srun as nodes
from allranks.nodes.slurm.allocations import Allocation
from allranks.nodes.staging.broadcast import StagingStep
from allranks.planning.network_policy import NetworkPolicy
from allranks.planning.planner import make_plan
from allranks.spec.records import RunSpec
from allranks.utils.machine import machine_facts
from tests.reachsim import PORTS, Faults, Simulated, hosts_of

SIMULATED_SIZES = (64, 512)


@pytest.mark.parametrize("size", [2, 8, 9, 64, 4096])
def test_every_node_is_tried_by_as_many_distinct_others_as_it_tries(size: int) -> None:
    expected = size - 1 if size <= connectivity_probe.MESH_NODES else 1 + (size - 1).bit_length()
    tried_by: dict[int, set[int]] = {index: set() for index in range(size)}
    for index in range(size):
        targets = connectivity_probe.sampled_targets(index, size, "job 5")
        assert len(set(targets)) == len(targets) == expected and index not in targets
        assert (index + 1) % size in targets, "the ring holds all nodes together"
        for target in targets:
            tried_by[target].add(index)
    assert {len(sources) for sources in tried_by.values()} == {expected}
    for index in (0, 1, size - 1):
        assert set(connectivity_probe.sampled_visitors(index, size, "job 5")) == tried_by[index]


def test_operations_per_node_grow_no_faster_than_log_n() -> None:
    cost: dict[int, dict[str, int]] = {}
    for size in SIMULATED_SIZES:
        run = Simulated(size)
        assert run.bad() == {} and run.second is None
        per_node = list(run.first_cost.values())
        cost[size] = {name: max(one[name] for one in per_node) for name in per_node[0]}
        links = len(PORTS) * (1 + math.ceil(math.log2(size)))
        assert cost[size]["connects"] == cost[size]["accepts"] == links
        assert cost[size]["messages"] == 2 * links
        assert cost[size]["bytes"] <= 2 * links * len(f"n{size}\n")
    for small, large in pairwise(SIMULATED_SIZES):
        growth = math.log2(large) / math.log2(small)
        for name in ("connects", "accepts", "messages"):
            assert cost[large][name] <= growth * cost[small][name], (small, large, name)


@pytest.mark.parametrize("size", [4, 9, 64])
def test_a_node_that_is_down_is_named_and_no_other(size: int) -> None:
    host = f"n{size // 2}"
    run = Simulated(size, Faults(down={host}))
    assert list(run.bad()) == [host]
    found = run.bad()[host]
    assert found.reached == found.reached_by == 0 and found.tried >= 3 and found.tried_by >= 3
    assert {item.why for item in found.failed} == {"timed out"} and all(item.tries > 2 for item in found.failed)
    assert len(run.again) <= 1 + 2 * network.RETRIED_PEERS, "only the suspect and its helpers are asked again"


@pytest.mark.parametrize("size", [3, 64])
def test_a_node_that_nobody_can_connect_to_is_named_with_the_direction(size: int) -> None:
    run = Simulated(size, Faults(deaf={"n2"}))
    assert list(run.bad()) == ["n2"]
    found = run.bad()["n2"]
    assert found.reached == found.tried > 0 and found.reached_by == 0
    assert {item.peer for item in found.failed} == {"n2"}
    assert found.failed[0].text().startswith(f"{found.failed[0].source} -> n2 10.0.0.")


def test_one_link_is_told_from_one_node() -> None:
    for size in (3, 64):
        target = hosts_of(size)[connectivity_probe.sampled_targets(0, size, "7")[-1]]
        run = Simulated(size, Faults(links={("n1", target)}))
        assert list(run.bad()) == ["n1"]
        (link, _) = run.bad()["n1"].failed
        assert (link.source, link.peer, link.port) == ("n1", target, PORTS[0])
        assert run.bad()["n1"].reached == run.bad()["n1"].tried - 1


def test_several_bad_nodes_are_all_named_and_no_other() -> None:
    draw = random.Random(3)
    for size, bad in ((64, 5), (256, 20)):
        chosen = set(draw.sample(hosts_of(size), bad))
        run = Simulated(size, Faults(down=chosen))
        assert set(run.bad()) == chosen
        most = max(cost["connects"] for cost in run.second_cost.values())
        assert most <= 40 * len(PORTS) * network.RETRIED_PEERS, "attempts on dead links are bounded by the window"


def test_two_halves_that_do_not_reach_each_other_do_not_pass() -> None:
    hosts = hosts_of(64)
    run = Simulated(64, Faults(links={(a, b) for a in hosts[:20] for b in hosts[20:]}))
    assert run.bad() and set(run.bad()) & set(hosts[:20])


def test_a_node_that_starts_late_or_drops_connections_is_not_reported() -> None:
    for size in (3, 64):
        within = Faults(start_s={"n2": connect_window_s(size) - 1}, busy={"n3": 5})
        run = Simulated(size, within)
        assert run.bad() == {} and run.second is None, "attempts go on within the window"
        after = Faults(start_s={"n2": 3 * connect_window_s(size)})
        run = Simulated(size, after, later=Faults())
        assert run.second is not None and "n2" in run.again and run.bad() == {}, "the second round clears it"
        assert "n2" in network.suspect_nodes(run.hosts, run.first)


def test_a_node_without_an_answer_is_silent_only_if_it_stays_so() -> None:
    run = Simulated(64, Faults(silent={"n9"}), later=Faults())
    assert run.bad() == {}
    run = Simulated(64, Faults(silent={"n9"}))
    assert list(run.bad()) == ["n9"] and not run.bad()["n9"].answered


def test_a_second_round_that_fails_clears_nobody() -> None:
    run = Simulated(64, Faults(down={"n9"}))
    unanswered = network.ConnectionRound(targets=run.again, answers={})
    assert list(network.judge_links(run.hosts, run.first, unanswered)) == run.hosts
    bad = [h for h, found in network.judge_links(run.hosts, run.first, unanswered).items() if not found.ok]
    assert bad == ["n9"]


def test_the_node_with_most_failures_is_blamed_first() -> None:
    links = {("a", "x"): 1, ("a", "y"): 1, ("b", "x"): 1, ("c", "x"): 1, ("b", "y"): 1, ("c", "y"): 1, ("b", "a"): 0}
    assert faulty_nodes(links) == {"x", "y"}, "a fails with all that it tried, because both are at fault"
    assert faulty_nodes({("a", "b"): 1, ("b", "a"): 1}) == set()


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called srun that writes down its standard input and answers nothing; its arguments pass the kernel's
    limits."""
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/input\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "input"


def test_all_nodes_that_srun_cannot_reach_are_left_out_at_once(srun: Path) -> None:
    """Slurm ends a step for each of them; asking again for every 20 of 100 would not come to an end."""
    hosts = hosts_of(200)
    line = "srun: error: Task launch for StepId=1.0 failed on node n%d: Communication connection failure\\n"
    program = srun.parent / "bin" / "srun"
    program.write_text(
        f"#!/bin/sh\ncat >/dev/null; echo >> {srun}\n[ $(wc -l < {srun}) = 1 ] || exit 0\n"
        f"for i in $(seq 1 100); do printf '{line}' $i >&2; done\n"
    )
    answers, silent = runner._ask(
        runner.TargetNodes(hosts=hosts), runner.NodeProgram(name="probe.py", python="true"), 10
    )
    assert srun.read_text().count("\n") == 2 and answers.returncode == 0
    why = {report.host: report.checks[0].cure for report in silent}
    assert all("failed on node" in why[host] for host in hosts[:100]) and len(why) == 200


HOSTS = [f"compute-{n:05d}" for n in range(10_000)]


def test_both_rounds_hold_10000_nodes(srun: Path) -> None:
    """Linux refuses an argument of more than 128 KiB, so nothing that grows with the number of nodes may be one."""
    where = runner.TargetNodes(hosts=HOSTS, slurm_job="1", job_id="1")
    seats = {host: [host, f"10.1.{n >> 8}.{n & 255}", [21000, 30000 + n]] for n, host in enumerate(HOSTS)}
    targets = network.sampled_links(HOSTS, "1")
    for seed in ("1", None):
        found, _ = runner._round(where, sys.executable, seats, targets, seed=seed)
        assert found.answers == {}
        namespace: dict[str, str] = {"__name__": "sent"}
        exec(compile(srun.read_text(), "connectivity_probe.py", "exec"), namespace)  # noqa: S102 - our own program
        request = json.loads(zlib.decompress(base64.b64decode(namespace["REQUEST"])))
        node = connectivity_probe.node_of(request, connectivity_probe.index_of(request, HOSTS[77]) or 0, 0.0)
        assert {HOSTS[peer] for peer, _ in node.links} == set(targets[HOSTS[77]])


def test_collectives_and_staging_hold_10000_nodes(srun: Path) -> None:
    probes = [Probe(host=host, node_id=n) for n, host in enumerate(HOSTS)]
    found = runner.PreflightResult(reports=[], probes=probes, network=None, port=21000, probe_s=0, reach_s=0)
    plan = make_plan(RunSpec(), machine_facts())
    with pytest.raises(RunFailed, match="gave no results"):
        link_tests.measure_collectives(runner.TargetNodes(hosts=HOSTS), found, plan, 1, NetworkPolicy(nodes=[]))
    assert json.loads(srun.read_text())["hosts"] == HOSTS
    step = StagingStep(Allocation(job_id="1", nodes=tuple(HOSTS)), HOSTS, ["python3"], {"verb": "ask"})
    with step, pytest.raises(RunFailed, match="did not answer"):
        step.answers(1)


def test_host_lists_are_folded_as_slurm_does() -> None:
    assert nodes.compress_hosts(["n1", "n2", "n3", "n5", "login"]) == "n[1-3,5],login"
    assert nodes.compress_hosts(["gpu08", "gpu09", "gpu10"]) == "gpu[08-09],gpu10"
    assert nodes.compress_hosts(["n9", "n10", "n11"]) == "n[9-11]"
    assert nodes.compress_hosts(["r1n2", "r1n3", "r2n2"]) == "r1n[2-3],r2n2"
    assert nodes.compress_hosts(["n1", "n1-ib", "n2-ib"]) == "n1,n1-ib,n2-ib", "Slurm folds no number inside a name"
    assert nodes.compress_hosts(["n7"]) == "n7"


def test_16_processes_agree_with_the_simulation() -> None:
    """Real sockets, each process on an address of its own."""
    hosts = hosts_of(16)
    seats = [[host, f"127.0.61.{n}", [21000, unused_port()]] for n, host in enumerate(hosts, 1)]
    text = nodes.program_text(
        "connectivity_probe.py", {"seats": connectivity_probe.encode_seats(seats), "seed": "7", "window_s": 60.0}
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-"],
            env={**os.environ, "SLURMD_NODENAME": host},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in hosts
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.close()
    answers = [json.loads(process.stdout.read()) for process in started if process.stdout]
    assert [process.wait(60) for process in started] == [0] * 16
    simulated = Simulated(16).first_cost
    assert [answer["host"] for answer in answers] == hosts and not any(a["unreached"] + a["errors"] for a in answers)
    for answer in answers:
        cost, expected = answer["cost"], simulated[answer["host"]]
        assert cost["threads"] == 1
        assert cost["accepts"] == expected["accepts"] and cost["messages"] == expected["messages"]
        assert cost["bytes"] == expected["bytes"]
        assert cost["connects"] >= expected["connects"], "a process that has not started yet is tried again"
