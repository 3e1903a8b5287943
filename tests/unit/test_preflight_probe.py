"""The programs that run on nodes, run here: alone, with what hangs, against each other; which node is at fault."""

import ast
import base64
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from allranks.errors import RunFailed
from allranks.nodes.network.choose import ChosenNetwork
from allranks.nodes.network.links import NodeLinks, faulty_nodes, judge_links, sampled_links
from allranks.nodes.preflight import link_bandwidth, runner
from allranks.nodes.preflight.requirements import node_requirements, write_nonces
from allranks.nodes.probes import connectivity_probe, probe
from allranks.nodes.records import NodeRequirements, Probe, RequiredFolder
from allranks.nodes.slurm import srun
from allranks.nodes.slurm.allocations import Allocation
from allranks.nodes.staging.broadcast import StagingStep
from allranks.planning.network_policy import NetworkPolicy
from allranks.planning.planner import make_plan
from allranks.planning.records import NodeAddress, RdmaPort
from allranks.spec.records import DataSpec, RunSpec
from allranks.utils.machine import machine_facts
from tests.unit.preflight_nodes import cut

PREFLIGHT = Path(probe.__file__).parent


def ask(request: dict, **env: str) -> dict:
    """One run of the program over standard input, without this package on the path."""
    done = subprocess.run(
        [sys.executable, "-", "--json-args", json.dumps(request)], input=srun.program_text("probe.py"),
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **env},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def test_locks_of_builds_and_whether_a_process_holds_them(tmp_path: Path) -> None:
    left, held = tmp_path / "py311_cpu" / "fused_adam" / "lock", tmp_path / "shm_comm" / "lock"
    for lock in (left, held):
        lock.parent.mkdir(parents=True)
        lock.touch()
    os.utime(left, (time.time() - 5000, time.time() - 5000))
    with held.open():
        found = {lock["path"]: lock for lock in ask({"extensions": str(tmp_path)})["build_locks"]}
    assert {path: lock["held"] for path, lock in found.items()} == {str(left): False, str(held): True}
    assert 5000 <= found[str(left)]["age_s"] < 5100
    assert ask({"extensions": str(tmp_path / "absent")})["build_locks"] == []


@pytest.mark.parametrize("name", ["probe.py", "connectivity_probe.py"])
def test_programs_of_the_nodes_need_only_the_standard_library(name: str) -> None:
    code = list(ast.walk(ast.parse((PREFLIGHT / name).read_text())))
    used = {alias.name for item in code if isinstance(item, ast.Import) for alias in item.names}
    used |= {item.module or "" for item in code if isinstance(item, ast.ImportFrom)}
    assert {part.split(".")[0] for part in used} <= sys.stdlib_module_names, used


@pytest.mark.parametrize("name", ["probe.py", "connectivity_probe.py"])
def test_programs_of_the_nodes_run_on_python_3_8(name: str) -> None:
    """No newer syntax, and no ``tuple[...]`` outside annotations and type checking."""
    tree = ast.parse((PREFLIGHT / name).read_text(), feature_version=(3, 8))

    def evaluated(item: ast.AST) -> list[ast.AST]:
        if isinstance(item, ast.If) and ast.unparse(item.test) == "TYPE_CHECKING":
            return []
        parts = [value for field, value in ast.iter_fields(item) if field not in ("annotation", "returns")]
        children = [c for part in parts for c in (part if isinstance(part, list) else [part]) if isinstance(c, ast.AST)]
        return [item, *(found for child in children for found in evaluated(child))]

    generic = [ast.unparse(item) for item in evaluated(tree) if isinstance(item, ast.Subscript)]
    assert not [text for text in generic if text.startswith(("tuple[", "list[", "dict[", "set["))], generic


def test_one_line_with_the_facts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    folders = [{"role": "run", "path": str(tmp_path), "write": True, "fingerprint": True}]
    request = {"packages": ["click", "no_such_package"], "folders": folders, "imports": ["json", "no_such_module"]}
    with socket.create_server(("", 0)) as busy:
        request["ports"] = [busy.getsockname()[1]]
        facts = ask(request, ALLRANKS_CLOCK_OFFSET_S="-90", SLURM_NODEID="3")
    found = msgspec.convert(facts, Probe)
    assert found.free_ports == [] and found.node_id == 3 and found.executable == sys.executable
    assert -92 < found.clock - time.time() < -88
    click, absent = found.packages["click"], found.packages["no_such_package"]
    assert click.version and click.origin and absent.origin is None
    assert found.imports and found.imports["json"].error is None
    assert "ModuleNotFoundError" in (found.imports["no_such_module"].error or "")
    run = found.folders["run"]
    assert run.exists and run.write_error is None and (run.free_bytes or 0) > 0 and run.fingerprint
    assert run.fingerprint.files == 1 and [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert any(item.loopback and item.address == "127.0.0.1" and item.prefix == 8 for item in found.interfaces)
    assert found.shm_free_bytes > 0 and found.cpus >= 1 and found.memory_bytes > 0


def test_what_hangs_or_kills_is_given_up_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    value, error = probe.Later(0.2, time.sleep, 5).get()
    assert value is None and error == "no answer within 0.2 s" and time.monotonic() - began < 2
    assert probe.Later(5, Path("/no/such").stat).get()[1].startswith("FileNotFoundError")
    began = time.monotonic()
    answers = srun.run_command(["sh", "-c", 'echo "{\\"host\\": \\"a\\"}"; exec sleep 60'], 0.5, None)
    assert answers.returncode is None and list(answers.by_host()) == ["a"] and time.monotonic() - began < 5
    (tmp_path / "slow_thing.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "dying_thing.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe.imports(["json", "slow_thing"], 1.0)
    assert found["json"]["error"] is None and "not imported within 1 s" in found["slow_thing"]["error"]
    assert "died with 9" in probe.imports(["dying_thing"], 10)["dying_thing"]["error"]


def test_fingerprints_see_content_names_and_sizes_but_not_times(tmp_path: Path) -> None:
    def made(name: str, **files: str) -> dict:
        folder = tmp_path / name
        (folder / "sub" / "__pycache__").mkdir(parents=True)
        for file, text in files.items():
            (folder / "sub" / file).write_text(text)
        (folder / "gone").symlink_to("/no/such/file")
        return probe.fingerprint(folder)

    first = made("a", x="1", y="2")
    os.utime(tmp_path / "a" / "sub" / "x", (1, 1))
    (tmp_path / "a" / "sub" / "__pycache__" / "x.pyc").write_text("other")
    (tmp_path / "a" / ".allranks-nonce-1").write_text("secret")
    assert probe.fingerprint(tmp_path / "a") == first == made("b", x="1", y="2")
    others = [made("c", x="2", y="2"), made("d", x="1", z="2"), made("e", x="1", y="22")]
    assert len({first["digest"], *(o["digest"] for o in others)}) == 4
    (tmp_path / "one.json").write_text("x" * 200_000)
    whole = probe.fingerprint(tmp_path / "one.json")
    assert whole["files"] == 1 and whole["bytes"] == 200_000
    assert probe.write_error(tmp_path) is None
    assert probe.write_error(tmp_path / "none") == "No such file or directory"


def test_nonces_are_put_only_where_must_be_shared_and_taken_away(tmp_path: Path) -> None:
    run, read = (RequiredFolder(role=r, path=str(tmp_path / r), write=r == "run") for r in ("run", "data"))
    for item in (run, read):
        Path(item.path).mkdir()
    with write_nonces(NodeRequirements(python="p", folders=[run, read])) as (request, secrets):
        assert list(secrets) == ["run"] and request.folders[1].nonce is None
        path = Path(run.path) / str(request.folders[0].nonce)
        assert path.read_text() == secrets["run"]
        assert probe.folder(msgspec.to_builtins(request.folders[0]))["nonce"] == secrets["run"]
    assert not path.exists()


def test_what_a_spec_needs(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    spec = RunSpec(data=DataSpec(source="rows.json"))
    roles = {f.role: f for f in node_requirements(spec, Path("runs/new"), folder=tmp_path).folders}
    assert roles["data"].path == str(tmp_path / "rows.json") and roles["data"].fingerprint
    assert roles["run"].path == str(tmp_path), "the folder above it that is there"
    builtin = node_requirements(RunSpec(data=DataSpec(source="builtin:news")), tmp_path).folders
    assert "data" not in {f.role for f in builtin}


def test_the_files_of_a_pattern_are_those_that_nodes_need(tmp_path: Path) -> None:
    def facts(source: str) -> dict:
        required = node_requirements(RunSpec(data=DataSpec(source=source)), tmp_path, folder=tmp_path)
        (wanted,) = [item for item in required.folders if item.role == "data"]
        return probe.folder(msgspec.to_builtins(wanted))

    rows, pattern = tmp_path / "rows", "rows/**/*.jsonl"
    assert not facts(pattern)["exists"]
    (rows / "b").mkdir(parents=True)
    for name in ("a.jsonl", "b/c.jsonl"):
        (rows / name).write_text("{}")
    first = facts(pattern)
    assert first["exists"] and first["free_bytes"] and first["fingerprint"]["files"] == 2
    (rows / "notes.txt").write_text("of no importance")
    assert facts(pattern)["fingerprint"] == facts(f"{tmp_path}/{pattern}")["fingerprint"] == first["fingerprint"]
    (rows / "b" / "c.jsonl").write_text("{ }")
    assert facts(pattern)["fingerprint"] != first["fingerprint"]


def test_lines_longer_than_slurm_passes_on_come_whole() -> None:
    def line(text: str) -> srun.OutputLine:
        return srun.OutputLine(text=text, received=1.0)

    a, b = json.dumps({"host": "n1", "x": "a" * 2000}), json.dumps({"host": "n2", "x": "b" * 1000})
    pieces = [line(f"@{t} {s[i : i + 800]}") for t, s in (("0", a), ("1", b)) for i in range(0, len(s), 800)]
    mixed = [pieces[0], pieces[3], pieces[1], line("srun: noise"), pieces[4], pieces[2]]
    assert sorted(n.text for n in srun.join_pieces(mixed)) == sorted([a, b, "srun: noise"])
    exact = json.dumps({"host": "n3", "x": "c" * (800 - len(json.dumps({"host": "n3", "x": ""})))})
    assert len(exact) == 800 and [n.text for n in srun.join_pieces([line(f"@2 {exact}")])] == [exact]


def test_nodes_without_the_launchers_python_use_another_or_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = srun.python_command("/no/such/python", {}), 20, srun.program_text("probe.py")
    (facts,) = (line.facts() for line in srun.run_command(*start).by_host().values())
    assert facts and facts["executable"] not in ("", "/no/such/python")
    for name in ("sh", "fold", "sed", "uname"):
        (tmp_path / name).symlink_to(next(p for p in (Path("/bin") / name, Path("/usr/bin") / name) if p.exists()))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    answers = srun.run_command(*start)
    assert list(answers.by_host()) == ["n7"], answers


def meet(*hosts: int, ports: dict[int, int] | None = None, absent: int = 0, window_s: float = 1.0) -> list[dict]:
    """Nodes that connect to each other over 127.0.0.HOST; the last ones are `absent`."""
    numbers = [(ports or {}).get(host) or probe.unused_port() for host in hosts]
    seats = [[f"n{i}", f"127.0.0.{h}", [p]] for i, (h, p) in enumerate(zip(hosts, numbers, strict=True), 1)]
    request = {"seats": connectivity_probe.encode_seats(seats), "seed": "1", "window_s": window_s}
    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(lambda i: connectivity_probe.node_of(request, i).run(), range(len(hosts) - absent)))


def test_a_port_that_is_in_use_for_a_moment_is_waited_for_and_one_that_stays_so_is_named() -> None:
    for freed_s, errors in ((0.5, 0), (30.0, 1)):
        port = probe.unused_port()
        holder = socket.create_server(("127.0.0.17", port))
        timer = threading.Timer(freed_s, holder.close)
        timer.start()
        found = meet(17, 18, ports={17: port}, window_s=2.0)
        timer.cancel()
        holder.close()
        assert [(len(f["errors"]), len(f["unreached"])) for f in found] == [(errors, 0), (0, errors)]


def test_a_node_that_does_not_answer_is_named() -> None:
    assert not any(f["unreached"] + f["errors"] for f in meet(*range(21, 37), window_s=60.0)), "all 16 answer"
    found = meet(14, 15, 16, absent=1)
    assert [[u["peer"] for u in f["unreached"]] for f in found] == [["n3"], ["n3"]]
    failed = found[0]["unreached"][0]
    assert "refused" in failed["why"] and failed["address"] == "127.0.0.16" and failed["tries"] > 2


def test_a_listener_that_never_answers_is_not_reached_and_holds_nobody_up() -> None:
    port = probe.unused_port()
    with socket.create_server(("127.0.0.20", port)) as server:
        began = time.monotonic()
        (found,) = meet(19, 20, ports={20: port}, absent=1, window_s=0.5)
        client, _ = server.accept()
        with client, pytest.raises(ConnectionResetError):  # a peer that is only slow must wait for the next attempt
            assert [client.recv(99), client.recv(99)] == [], "closed as after an answer"
    assert found["unreached"][0]["why"] == "connected, but no answer" and time.monotonic() - began < 5


def test_an_address_that_somebody_else_answers_is_not_reached() -> None:
    assert "answered by n1" in meet(17, 17, ports={17: probe.unused_port()}, absent=1)[0]["unreached"][0]["why"]


def test_gpus_as_the_driver_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in\ntopo) echo 'GPU0 X OK';;\n"
        "*) echo '0, NVIDIA H100, 570.1, 81559, 0'; echo '1, NVIDIA H100, 570.1, 81559, [N/A]';;\nesac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = probe.graphics()
    assert [g["ecc_errors"] for g in found["gpus"]] == ["0", "[N/A]"] and found["gpus"][0]["driver"] == "570.1"
    assert found["p2p"] == "GPU0 X OK\n"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9\n")
    with pytest.raises(OSError, match="could not talk"):
        probe.graphics()


def write_all(root: Path, **files: str) -> None:
    """Files of /sys, their names with `__` for each slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_rdma_ports_with_their_gids(tmp_path: Path) -> None:
    zero, local = "0000:0000:0000:0000:0000:0000:0000:0000", "fe80:0000:0000:0000:0a3f:7cff:fe12:3456"
    v4, v6 = "0000:0000:0000:0000:0000:ffff:0a00:0001", "2001:0db8:0000:0000:0000:0000:0000:0000"
    write_all(tmp_path / "mlx5_0/ports/1", state="4: ACTIVE", rate="100 Gb/sec (4X EDR)", link_layer="Ethernet")
    write_all(tmp_path / "mlx5_0/ports/1", gids__0=local, gids__3=v4, gids__10=v6, gids__4=zero)
    write_all(tmp_path / "mlx5_0/ports/1/gid_attrs", types__3="RoCE v2", ndevs__3="eth7")
    write_all(tmp_path / "mlx5_0/device", numa_node="1", net__eth7__mtu="9000")
    write_all(tmp_path / "mlx5_1", ports__1__state="1: DOWN", device__numa_node="-1")
    first, second = probe.infiniband(str(tmp_path))
    assert msgspec.convert(first, RdmaPort).name == "mlx5_0:1" and first["active"] and first["gbit"] == 100
    assert first["numa"] == 1 and first["interfaces"] == ["eth7"] and not second["active"]
    third = {"index": 3, "gid": v4, "type": "RoCE v2", "interface": "eth7"}
    assert first["gids"] == [{"index": 0, "gid": local, "type": "", "interface": ""}, third]
    assert second["numa"] is None and second["gids"] == [] and probe.infiniband(str(tmp_path / "none")) == []


def config(control: int | None, size: int = 4096) -> bytes:
    """PCI configuration space with an AER capability, and an ACS one behind it if `control` is given."""
    data = bytearray(4096)
    data[0x100:0x104] = (0x0001 | 1 << 16 | (0x148 if control is not None else 0) << 20).to_bytes(4, "little")
    if control is not None:
        data[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
        data[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(data[:size])


def test_gpus_on_the_bus_with_iommu_and_acs(tmp_path: Path) -> None:
    devices = tmp_path / "bus"
    devices.mkdir()
    for number, control in enumerate((0x1D, 0x01, None)):
        bridge = tmp_path / "sys" / f"0000:0{number}:01.0"
        gpu = bridge / f"0000:0{number}:02.0"
        write_all(gpu, vendor="0x10de", **{"class": "0x030200"}, numa_node="0", iommu_group__type="DMA-FQ")
        (bridge / "config").write_bytes(config(control))
        (devices / gpu.name).symlink_to(gpu)
    found = {item["bus"]: (item["acs"], item["iommu"]) for item in probe.gpu_pci(str(devices))}
    assert found["0000:00:02.0"] == (["0000:00:01.0"], "DMA-FQ")
    assert found["0000:01:02.0"][0] == found["0000:02:02.0"][0] == [], "source validation alone redirects nothing"
    for bridge in (tmp_path / "sys").iterdir():
        (bridge / "config").write_bytes(config(0x1D, 64))
    assert [item["acs"] for item in probe.gpu_pci(str(devices))] == [None] * 3, "users may read only 64 bytes"


def test_what_an_administrator_set_for_nccl(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("# a line\nNCCL_SOCKET_IFNAME==eth0  # why\n\nNCCL_NET = Socket\nnonsense\n")
    assert probe.nccl_conf(str(tmp_path / "nccl.conf")) == {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_NET": "Socket"}
    assert probe.nccl_conf(str(tmp_path / "none")) == {}


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


def hosts_of(nodes: int) -> list[str]:
    return [f"n{number}" for number in range(1, nodes + 1)]


def bad_nodes(size: int, works: Callable[[str, str], bool], silent: str = "") -> dict[str, NodeLinks]:
    """The nodes that are not well, where links fail in one direction unless `works` allows them."""
    targets = sampled_links(hosts_of(size), "7")
    answers = {h: cut(h, *(p for p in peers if not works(h, p))) for h, peers in targets.items() if h != silent}
    return {host: verdict for host, verdict in judge_links(targets, answers).items() if not verdict.ok}


@pytest.mark.parametrize("size", [4, 9, 64])
def test_one_bad_node_or_link_is_named_and_no_other(size: int) -> None:
    (down,) = bad_nodes(size, lambda source, target: "n2" not in (source, target)).values()
    assert down.host == "n2" and down.reached == down.reached_by == 0 and down.tried >= 3 and down.tried_by >= 3
    (deaf,) = bad_nodes(size, lambda source, target: target != "n2").values()
    assert deaf.host == "n2" and deaf.reached == deaf.tried > 0 and deaf.reached_by == 0
    assert deaf.failed[0].text() == f"{deaf.failed[0].source} -> n2 10.0.0.2:21001 timed out (4 of 4 attempts failed)"
    last = sampled_links(hosts_of(size), "7")["n1"][-1]
    (link,) = bad_nodes(size, lambda source, target: (source, target) != ("n1", last)).values()
    assert link.host == "n1" and link.peers == [last] and link.reached == link.tried - 1


def test_several_bad_nodes_are_all_named_and_no_other() -> None:
    for size, bad in ((64, 5), (256, 20)):
        chosen = set(random.Random(3).sample(hosts_of(size), bad))
        assert set(bad_nodes(size, lambda source, target, c=chosen: not c & {source, target})) == chosen
    first = set(hosts_of(64)[:20])
    halves = bad_nodes(64, lambda source, target: not (source in first and target not in first))
    assert set(halves) & first, "two halves that do not reach each other do not pass"
    (silent,) = bad_nodes(64, lambda source, target: target != "n9", silent="n9").values()
    assert silent.host == "n9" and not silent.answered, "it says nothing about the others"


def test_the_node_with_most_failures_is_blamed_first() -> None:
    links = {("a", "x"): 1, ("a", "y"): 1, ("b", "x"): 1, ("c", "x"): 1, ("b", "y"): 1, ("c", "y"): 1, ("b", "a"): 0}
    assert faulty_nodes(links) == {"x", "y"}, "a fails with all that it tried, because both are at fault"
    assert faulty_nodes({("a", "b"): 1, ("b", "a"): 1}) == set()


@pytest.fixture
def input_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called srun that writes its input to this file and answers nothing; the kernel limits its arguments."""
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/input\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "input"


def test_all_nodes_that_srun_cannot_reach_are_left_out_at_once(input_file: Path) -> None:
    """Slurm ends a step for each of them; asking again for every 20 of 100 would not come to an end."""
    hosts = hosts_of(200)
    line = "srun: error: Task launch for StepId=1.0 failed on node n%d: Communication connection failure\\n"
    program = input_file.parent / "bin" / "srun"
    program.write_text(
        f"#!/bin/sh\ncat >/dev/null; echo >> {input_file}\n[ $(wc -l < {input_file}) = 1 ] || exit 0\n"
        f"for i in $(seq 1 100); do printf '{line}' $i >&2; done\n"
    )
    probe = runner.NodeProgram(name="probe.py", python="true")
    answers, silent = runner._ask(runner.TargetNodes(hosts=hosts), probe, 10)
    assert input_file.read_text().count("\n") == 2 and answers.returncode == 0
    why = {report.host: report.checks[0].cure for report in silent}
    assert all("failed on node" in why[host] for host in hosts[:100]) and len(why) == 200


HOSTS = [f"compute-{n:05d}" for n in range(10_000)]


def test_the_connection_test_holds_10000_nodes(input_file: Path) -> None:
    """Linux refuses an argument of more than 128 KiB, so nothing that grows with the number of nodes may be one."""
    where = runner.TargetNodes(hosts=HOSTS, slurm_job="1", job_id="1")
    seats = {host: NodeAddress(interface="eth0", address=f"10.1.{n >> 8}.{n & 255}") for n, host in enumerate(HOSTS)}
    probes = [Probe(host=host, node_id=n, free_ports=[21000], unused_port=30000 + n) for n, host in enumerate(HOSTS)]
    network = ChosenNetwork(network="10.1.0.0/16", seats=seats, reason="")
    found, _ = runner._test_connectivity(where, NodeRequirements(python=sys.executable), probes, network)
    assert found is not None and not any(verdict.answered for verdict in found.values())
    namespace: dict[str, str] = {"__name__": "sent"}
    exec(compile(input_file.read_text(), "connectivity_probe.py", "exec"), namespace)  # noqa: S102 - our own program
    request = json.loads(zlib.decompress(base64.b64decode(namespace["REQUEST"])))
    node = connectivity_probe.node_of(request, connectivity_probe.index_of(request, HOSTS[77]) or 0)
    assert {peer for peer, _, _ in node.peers} == set(sampled_links(HOSTS, "1")[HOSTS[77]])


def test_collectives_and_staging_hold_10000_nodes(input_file: Path) -> None:
    probes = [Probe(host=host, node_id=n) for n, host in enumerate(HOSTS)]
    found = runner.PreflightResult(reports=[], probes=probes, network=None, port=21000, probe_s=0, reach_s=0)
    plan = make_plan(RunSpec(), machine_facts())
    with pytest.raises(RunFailed, match="gave no results"):
        link_bandwidth.measure_collectives(runner.TargetNodes(hosts=HOSTS), found, plan, 1, NetworkPolicy(nodes=[]))
    assert json.loads(input_file.read_text())["hosts"] == HOSTS
    step = StagingStep(Allocation(job_id="1", nodes=tuple(HOSTS)), HOSTS, ["python3"], {"verb": "ask"})
    with step, pytest.raises(RunFailed, match="did not answer"):
        step.answers(1)


@pytest.mark.parametrize(
    ("hosts", "folded"),
    [
        ("n1 n2 n3 n5 login", "n[1-3,5],login"), ("gpu08 gpu09 gpu10", "gpu[08-09],gpu10"), ("n9 n10 n11", "n[9-11]"),
        ("r1n2 r1n3 r2n2", "r1n[2-3],r2n2"), ("n1 n1-ib n2-ib", "n1,n1-ib,n2-ib"), ("n7", "n7"),
    ],
)  # fmt: skip
def test_host_lists_are_folded_as_slurm_does(hosts: str, folded: str) -> None:
    assert srun.compress_hosts(hosts.split()) == folded
