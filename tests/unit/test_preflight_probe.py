"""The programs that run on nodes, run here: alone, over standard input, with what hangs, and against each other."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from allranks.nodes.preflight.requirements import node_requirements, write_nonces
from allranks.nodes.preflight.runner import TargetNodes, run_preflight
from allranks.nodes.probes import connectivity_probe, probe
from allranks.nodes.records import NodeRequirements, Probe, RequiredFolder
from allranks.nodes.slurm import srun
from allranks.planning.planner import make_plan
from allranks.planning.records import RdmaPort
from allranks.spec.records import DataSpec, RunSpec
from allranks.utils.machine import machine_facts

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


def test_what_hangs_is_given_up_and_said() -> None:
    began = time.monotonic()
    value, error = probe.Later(0.2, time.sleep, 5).get()
    assert value is None and error == "no answer within 0.2 s" and time.monotonic() - began < 2
    assert probe.Later(5, Path("/no/such").stat).get()[1].startswith("FileNotFoundError")


def test_an_import_that_hangs_or_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
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
        facts = probe.folder(msgspec.to_builtins(request.folders[0]))
        assert facts["nonce"] == secrets["run"]
    assert not path.exists()


def test_what_a_spec_needs(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    spec = RunSpec(data=DataSpec(source="rows.json"))
    roles = {f.role: f for f in node_requirements(spec, Path("runs/new"), here=tmp_path).folders}
    assert roles["data"].path == str(tmp_path / "rows.json") and roles["data"].fingerprint
    assert roles["run"].path == str(tmp_path), "the folder above it that is there"
    builtin = node_requirements(RunSpec(data=DataSpec(source="builtin:news")), tmp_path).folders
    assert "data" not in {f.role for f in builtin}


def test_the_files_of_a_pattern_are_those_that_nodes_need(tmp_path: Path) -> None:
    def facts(source: str) -> dict:
        required = node_requirements(RunSpec(data=DataSpec(source=source)), tmp_path, here=tmp_path)
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
    short = json.dumps({"host": "n3", "x": ""})
    exact = json.dumps({"host": "n3", "x": "c" * (800 - len(short))})
    assert len(exact) == 800 and [n.text for n in srun.join_pieces([line(f"@2 {exact}")])] == [exact]


def test_a_node_without_the_launchers_python_uses_another_and_says_so() -> None:
    answers = srun.run_command(srun.python_command("/no/such/python", {}), 20, srun.program_text("probe.py"))
    (facts,) = (line.facts() for line in answers.by_host().values())
    assert facts and facts["executable"] not in ("", "/no/such/python")


def test_a_node_without_any_python_still_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("sh", "fold", "sed", "uname"):
        (tmp_path / name).symlink_to(next(p for p in (Path("/bin") / name, Path("/usr/bin") / name) if p.exists()))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    answers = srun.run_command(srun.python_command("/no/such/python", {}), 20, srun.program_text("probe.py"))
    assert list(answers.by_host()) == ["n7"], answers


def test_a_command_that_hangs_is_ended_and_its_lines_kept() -> None:
    began = time.monotonic()
    answers = srun.run_command(["sh", "-c", 'echo "{\\"host\\": \\"a\\"}"; exec sleep 60'], 0.5, None)
    assert answers.returncode is None and list(answers.by_host()) == ["a"] and time.monotonic() - began < 5


def test_this_machine_alone(tmp_path: Path) -> None:
    spec = RunSpec()
    found = run_preflight(TargetNodes(), spec, make_plan(spec, machine_facts()), tmp_path, imports=False)
    assert len(found.reports) == 1 and found.network is None and found.port
    assert {"proj", "pkgs", "py", "run", "port", "shm"} <= {c.name for c in found.reports[0].checks}
    assert list(tmp_path.iterdir()) == []


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
    found = meet(17, 17, ports={17: probe.unused_port()}, absent=1)
    assert "answered by n1" in found[0]["unreached"][0]["why"]


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
    assert first["gids"] == [
        {"index": 0, "gid": local, "type": "", "interface": ""},
        {"index": 3, "gid": v4, "type": "RoCE v2", "interface": "eth7"},
    ]
    assert second["numa"] is None and second["gids"] == [] and probe.infiniband(str(tmp_path / "none")) == []


def config(control: int | None, size: int = 4096) -> bytes:
    """PCI configuration space with an AER capability, and an ACS one behind it if `control` is given."""
    data = bytearray(4096)
    following = 0x148 if control is not None else 0
    data[0x100:0x104] = (0x0001 | 1 << 16 | following << 20).to_bytes(4, "little")
    if control is not None:
        data[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
        data[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(data[:size])


def test_gpus_on_the_bus_with_iommu_and_acs(tmp_path: Path) -> None:
    devices = tmp_path / "bus"
    devices.mkdir()
    for number, control in (("00", 0x1D), ("01", 0x01), ("02", None)):
        bridge = tmp_path / "sys" / f"0000:{number}:01.0"
        gpu = bridge / f"0000:{number}:02.0"
        write_all(gpu, vendor="0x10de", **{"class": "0x030200"}, numa_node="0", iommu_group__type="DMA-FQ")
        (bridge / "config").write_bytes(config(control))
        (devices / gpu.name).symlink_to(gpu)
    found = {item["bus"]: item for item in probe.gpu_pci(str(devices))}
    assert found["0000:00:02.0"]["acs"] == ["0000:00:01.0"] and found["0000:00:02.0"]["iommu"] == "DMA-FQ"
    assert found["0000:01:02.0"]["acs"] == [], "source validation alone redirects nothing"
    assert found["0000:02:02.0"]["acs"] == []
    for bridge in (tmp_path / "sys").iterdir():
        (bridge / "config").write_bytes(config(0x1D, 64))
    assert [item["acs"] for item in probe.gpu_pci(str(devices))] == [None] * 3, "users may read only 64 bytes"


def test_what_an_administrator_set_for_nccl(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("# a line\nNCCL_SOCKET_IFNAME==eth0  # why\n\nNCCL_NET = Socket\nnonsense\n")
    assert probe.nccl_conf(str(tmp_path / "nccl.conf")) == {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_NET": "Socket"}
    assert probe.nccl_conf(str(tmp_path / "none")) == {}
