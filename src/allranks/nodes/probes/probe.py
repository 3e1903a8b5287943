"""Collect facts about one node and print them as one JSON line. Standard library only: allranks need not be installed
there.

    python probe.py --json-args '{"packages": ["torch"], "folders": [{"role": "run", "path": "/data/runs", "write":
    true}]}' python - --json-args '{...}' < probe.py

The probe reports facts; `checks` evaluates them. Calls that may hang (a dead file system, a name server, a driver) run
in a thread or process with a time limit, and their failure is reported as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER_LIMIT_S = 20.0
NAME_LIMIT_S = 3.0
HUB_LIMIT_S = 4.0
DRIVER_LIMIT_S = 20.0
NONCE_WAIT_S = 1.5  # a network file system may show a new file with a delay
MAX_FILES = 5_000
MAX_READ = 100
EDGE_BYTES = 1 << 16
SKIP = {"__pycache__", ".git", ".venv", ".pytest_cache", ".ruff_cache"}
SIOCGIFFLAGS, SIOCGIFADDR, SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40
IMPORTS = """
import importlib, json, sys, time
for name in sys.argv[1:]:
    began, why = time.perf_counter(), None
    try:
        importlib.import_module(name)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps([name, round(time.perf_counter() - began, 3), why]), flush=True)
"""


class Later:
    """A fact that is looked up in a thread, with a time limit."""

    def __init__(self, limit_s: float, function: Callable[..., Any], *arguments: Any) -> None:
        self.limit_s, self.value, self.began = limit_s, None, time.monotonic()
        self.error: str | None = f"no answer within {limit_s:g} s"
        self.thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
        self.thread.start()

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self.value, self.error = function(*arguments), None
        except Exception as error:  # noqa: BLE001 - any failure is a fact about the node
            self.error = f"{type(error).__name__}: {error}"

    def get(self) -> tuple[Any, str | None]:
        """Return the value, or why there is none."""
        self.thread.join(max(0.0, self.limit_s - (time.monotonic() - self.began)))
        return (None, f"no answer within {self.limit_s:g} s") if self.thread.is_alive() else (self.value, self.error)


def read(path: str) -> str:
    """Return a small file's text, or an empty text."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(path: str) -> int | None:
    """Return a file's number; None if there is none, or if it is negative (unknown)."""
    text = read(path)
    return int(text) if text.isdigit() else None


def link_name(path: str) -> str:
    """Return the last part of a link's target; empty without a link."""
    try:
        return Path(os.readlink(path)).name  # noqa: PTH115 - Python 3.8 runs this too
    except OSError:
        return ""


def interfaces() -> list[dict[str, Any]]:
    """Return every interface that has an IPv4 address, or could have one."""
    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:

        def ask(what: int, name: str) -> bytes | None:
            try:
                return fcntl.ioctl(handle, what, struct.pack("256s", name.encode()[:15]))
            except OSError:
                return None

        for _, name in socket.if_nameindex():
            raw, address, mask = ask(SIOCGIFFLAGS, name), ask(SIOCGIFADDR, name), ask(SIOCGIFNETMASK, name)
            flags = struct.unpack("16xH", raw[:18])[0] if raw else 0
            speed = read(f"/sys/class/net/{name}/speed")
            interfaces.append(
                {
                    "name": name,
                    "address": socket.inet_ntoa(address[20:24]) if address else None,
                    "prefix": ipaddress.ip_network(f"0.0.0.0/{socket.inet_ntoa(mask[20:24])}").prefixlen if mask else 0,
                    "up": bool(flags & IFF_UP and flags & IFF_RUNNING),
                    "loopback": bool(flags & IFF_LOOPBACK),
                    "speed_mbit": int(speed) if speed.isdigit() else None,
                    "numa": number(f"/sys/class/net/{name}/device/numa_node"),
                    "driver": link_name(f"/sys/class/net/{name}/device/driver"),
                }
            )
    return interfaces


def resolved(name: str) -> list[str]:
    """Return the IPv4 addresses to which a name resolves on this node."""
    return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)})


def port_free(port: int) -> bool:
    """Return whether a server could listen there now."""
    with socket.socket() as handle:
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            handle.bind(("", port))
            handle.listen(1)
        except OSError:
            return False
    return True


def unused_port() -> int:
    """Return a port of the range that Gloo and NCCL use."""
    with socket.socket() as handle:
        handle.bind(("", 0))
        return handle.getsockname()[1]


def package(name: str) -> dict[str, str | None]:
    """Return version and location of a package, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    return {"version": version, "origin": spec.origin if spec else None}


def has_module(name: str) -> bool:
    """Return whether a package can be found, without importing it; a folder without ``__init__.py`` must hold
    something.

    The process's own folder does not count, unless PYTHONPATH has it: the ranks have the program's there.
    """
    written = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    given = [os.path.abspath(path) for path in written if path]  # noqa: PTH100
    kept = list(sys.path)
    try:
        own = os.getcwd()  # noqa: PTH109 - Python 3.8 runs this too
        if kept and kept[0] in ("", own) and own not in given:
            del sys.path[0]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is not None:
            return spec is not None
        places = spec.submodule_search_locations or []
        return any(os.listdir(place) for place in places if os.path.isdir(place))  # noqa: PTH112, PTH208
    except (ImportError, ValueError, AttributeError, OSError):
        return False
    finally:
        sys.path[:] = kept


def is_cached(path: str) -> bool:
    """Return whether a hub folder has a snapshot (an interrupted download has none), or a data folder any content."""
    pattern = "snapshots/*/*" if Path(path).name.startswith(("models--", "datasets--")) else "*"
    try:
        return next(Path(path).glob(pattern), None) is not None
    except OSError:
        return False


def hub(items: list[dict[str, Any]], address: str) -> dict[str, Any]:
    """Return which names are in this node's cache, and, if one is not, whether the node reaches the hub."""
    report: dict[str, Any] = {"cached": {item["name"]: any(map(is_cached, item["folders"])) for item in items}}
    if not all(report["cached"].values()) and address:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), HUB_LIMIT_S).close()
            report["reached"] = True
        except OSError as error:
            report["reached"], report["error"] = False, str(error)
    return report


def build_locks(root: str) -> list[dict[str, Any]]:
    """Return the locks of C++ extensions below torch's folder for them: there are none while nothing is built."""
    locks = {lock: lock.stat() for pattern in ("*/lock", "*/*/lock") for lock in Path(root).glob(pattern)}
    held = set()
    for number in Path("/proc").glob("[0-9]*/fd/*") if locks else []:
        try:
            held.add((number.stat().st_dev, number.stat().st_ino))
        except OSError:  # it was closed, or belongs to another user
            continue
    return [
        {"path": str(lock), "age_s": time.time() - seen.st_mtime, "held": (seen.st_dev, seen.st_ino) in held}
        for lock, seen in locks.items()
    ]


def imports(names: list[str], limit_s: float) -> dict[str, dict[str, Any]]:
    """Import packages in a separate process; return the times and errors."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS, *names],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        output, end = done.stdout, f"the interpreter died with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, end = (error.stdout or b"").decode(), f"not imported within {limit_s:g} s"
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    facts = {name: {"seconds": seconds, "error": why} for name, seconds, why in rows}
    return {name: facts.get(name, {"seconds": None, "error": end}) for name in names}


def folder(request: dict[str, Any]) -> dict[str, Any]:
    """Return facts about a path or the files of a pattern: existence, free space, content; whether it is writable."""
    path = Path(request["path"])
    names = [] if path.exists() else glob.glob(str(path), recursive=True)  # noqa: PTH207
    matches = tuple(name for name in names if os.path.isfile(name))  # noqa: PTH113
    facts: dict[str, Any] = {"exists": path.exists() or bool(matches), "free_bytes": None}
    if request.get("nonce"):
        facts["nonce"] = read_nonce(path / request["nonce"])
    if facts["exists"]:
        facts["free_bytes"] = shutil.disk_usage(matches[0] if matches else path).free
        if request.get("write"):
            facts["write_error"] = write_error(path)
        if request.get("fingerprint"):
            facts["fingerprint"] = fingerprint(path, matches)
    return facts


def read_nonce(path: Path) -> str | None:
    """Return the launcher's secret: a node that reads it sees the launcher's folder, not another of the same name."""
    deadline = time.monotonic() + NONCE_WAIT_S
    while True:
        text = read(str(path))
        if text or time.monotonic() > deadline or not path.parent.is_dir():
            return text or None
        os.listdir(path.parent)  # noqa: PTH208 - makes a network file system look again
        time.sleep(0.1)


def write_error(path: Path) -> str | None:
    """Return why a folder cannot be written; a byte is actually written, because a full disk only fails then."""
    trial = path / f".allranks-probe-{uuid.uuid4().hex}"
    try:
        with trial.open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):  # a read-only file system refuses this even without a file
            trial.unlink()
    return None


def fingerprint(path: Path, matches: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a digest of names, sizes and parts of evenly chosen files; without times, so that a copy has the same
    digest.

    Args:
        matches: the files, if `path` is a pattern.
    """
    names = list(matches)
    alone = [] if matches else [(str(path.parent), [], [path.name])]
    for root, folders, files in os.walk(path) if path.is_dir() else alone:
        folders[:] = sorted(name for name in folders if name not in SKIP)
        names += [f"{root}/{name}" for name in files if not name.startswith(".allranks-")]
        if len(names) > MAX_FILES:
            break
    names = sorted(names)[:MAX_FILES]
    digest, total = hashlib.sha256(), 0
    for place, name in enumerate(names):
        if not Path(name).is_file():  # a broken link, a socket
            digest.update(f"{os.path.relpath(name, path)}\0-\0".encode())
            continue
        size = Path(name).stat().st_size
        total += size
        digest.update(f"{os.path.relpath(name, path)}\0{size}\0".encode())
        if place % (len(names) // MAX_READ + 1) == 0:
            with Path(name).open("rb") as file:
                digest.update(file.read(EDGE_BYTES))
                file.seek(max(0, size - EDGE_BYTES))
                digest.update(file.read(EDGE_BYTES))
    return {"files": len(names), "bytes": total, "digest": digest.hexdigest()[:16]}


def graphics() -> dict[str, Any]:
    """Return GPUs, pairs without peer access, topology; empty without a driver. AMD GPUs only without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {"gpus": amd(), "p2p": None, "topo": None}
    fields = "index,name,driver_version,memory.total,ecc.errors.uncorrected.volatile.total"
    rows = [line.split(", ") for line in smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines()]
    keys = ("index", "name", "driver", "memory_mb", "ecc_errors")
    gpus = [dict(zip(keys, row)) for row in rows if len(row) == len(keys)]  # noqa: B905 - Python 3.8 runs this too
    if not gpus:
        return {"gpus": [], "p2p": None, "topo": None}
    later = Later(DRIVER_LIMIT_S, smi, "topo", "-m")
    p2p = smi("topo", "-p2p", "r") if len(gpus) > 1 else None
    return {"gpus": gpus, "p2p": p2p, "topo": later.get()[0]}


def amd(nodes: str = "/sys/class/kfd/kfd/topology/nodes", devices: str = "/dev/dri") -> list[dict[str, Any]]:
    """Return the AMD GPUs whose device this process can open, like `allranks.utils.machine.amd_gpus` on one machine."""
    gpus = []
    for node in sorted((p for p in Path(nodes).glob("*") if p.name.isdigit()), key=lambda p: int(p.name)):
        facts = dict(line.split(None, 1) for line in read(f"{node}/properties").splitlines() if " " in line)
        minor = facts.get("drm_render_minor", "")
        if not int(facts.get("simd_count", 0)):
            continue
        try:
            os.close(os.open(f"{devices}/renderD{minor}", os.O_RDWR))
        except OSError:
            continue
        version = int(facts.get("gfx_target_version", 0))
        name = f"AMD gfx{version // 10000}{version // 100 % 100}{version % 100:x}"
        banks = [line.split() for path in node.glob("mem_banks/*/properties") for line in read(str(path)).splitlines()]
        size = max([int(words[1]) for words in banks if words[:1] == ["size_in_bytes"]], default=0)
        gpus.append(
            {
                "index": str(len(gpus)),
                "name": read(f"/sys/class/drm/renderD{minor}/device/product_name") or name,
                "driver": read("/sys/module/amdgpu/version") or platform.release(),
                "memory_mb": str(size >> 20),
            }
        )
    return gpus


def smi(*words: str) -> str:
    """Return the output of nvidia-smi."""
    done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=DRIVER_LIMIT_S, check=False)
    if done.returncode != 0:
        raise OSError(f"nvidia-smi {words[0]}: {(done.stdout + done.stderr).strip()[-200:]}")
    return done.stdout


def infiniband(root: str = "/sys/class/infiniband") -> list[dict[str, Any]]:
    """Return every port of every RDMA device: state, rate, NUMA node, interfaces, addresses (GIDs) with types."""
    ports = []
    for port in sorted(Path(root).glob("*/ports/*")):
        device, rate = port.parent.parent, re.match(r"[\d.]+", read(f"{port}/rate"))
        facts = {
            "device": device.name,
            "port": int(port.name),
            "active": "ACTIVE" in read(f"{port}/state"),
            "layer": read(f"{port}/link_layer"),
            "gbit": float(rate[0]) if rate else 0.0,
            "numa": number(f"{device}/device/numa_node"),
            "interfaces": sorted(path.name for path in device.glob("device/net/*")),
        }
        ports.append({**facts, "gids": gids(port)})
    return ports


def gids(port: Path) -> list[dict[str, Any]]:
    """Return index, address, type (``RoCE v2``) and interface of every set GID; most of the kernel's 256 are zero."""
    gids = []
    for index in sorted(int(path.name) for path in port.glob("gids/*") if path.name.isdigit()):
        gid = read(f"{port}/gids/{index}")
        if gid.replace(":", "").strip("0") and not gid.endswith(":0000:0000:0000:0000"):
            kind, interface = (read(f"{port}/gid_attrs/{what}/{index}") for what in ("types", "ndevs"))
            gids.append({"index": index, "gid": gid, "type": kind, "interface": interface})
    return gids


def gpu_pci(root: str = "/sys/bus/pci/devices") -> list[dict[str, Any]]:
    """Return NVIDIA GPUs on the PCI bus: NUMA node, kind of IOMMU domain, and bridges above them that redirect peer
    traffic.

    `iommu` is ``DMA`` or ``DMA-FQ`` (addresses are translated), ``identity`` (passed through), or None (no IOMMU, or
    unknown). `acs` is None if the registers cannot be read, which needs root.
    """
    gpus = []
    for device in sorted(Path(root).glob("*")):
        if read(f"{device}/vendor") == "0x10de" and read(f"{device}/class").startswith("0x03"):
            iommu = read(f"{device}/iommu_group/type") or None
            bridges = [acs(folder) for folder in device.resolve().parents if (folder / "config").is_file()]
            named = [name for name in bridges if name]
            acs_known = any(name is not None for name in bridges)
            facts = {"bus": device.name, "numa": number(f"{device}/numa_node"), "iommu": iommu}
            gpus.append({**facts, "acs": named if acs_known else None})
    return gpus


def acs(bridge: Path) -> str | None:
    """Return the bridge's name if it redirects traffic between devices below it to the CPU, empty if not, None if
    unknown.

    PCI Express extended capability 13, control register at offset 6: bit 2 redirects requests, bit 3 completions.
    """
    try:
        data = (bridge / "config").read_bytes()
    except OSError:
        return None
    if len(data) < 0x104:
        return None  # without permission the kernel only shows 64 bytes
    place = 0x100
    for _ in range(64):
        (head,) = struct.unpack_from("<I", data, place) if place + 8 <= len(data) else (0,)
        if head & 0xFFFF == 0x000D:
            (control,) = struct.unpack_from("<H", data, place + 6)
            return bridge.name if control & 0x0C else ""
        place = head >> 20
        if place < 0x100:
            break
    return ""


def nccl_version() -> str | None:
    """Return the version of the NCCL package that pip installed for torch."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def nccl_conf(path: str = "/etc/nccl.conf") -> dict[str, str]:
    """Return the administrator's NCCL settings on this node."""
    pairs = [line.split("#")[0].partition("=") for line in read(path).splitlines()]
    return {name.strip(): value.strip() for name, equals, value in pairs if equals and name.strip()}


def cpus() -> int:
    """Return the number of CPUs that this process may use: affinity, and the cgroup's quota."""
    count = len(os.sched_getaffinity(0))
    quota, _, period = read("/sys/fs/cgroup/cpu.max").partition(" ")
    return max(1, min(count, int(quota) // int(period)) if quota.isdigit() and period.isdigit() else count)


def limits() -> dict[str, int | None]:
    """Return limits: locked memory, open files, shared memory, memory; None is unlimited."""

    def soft(which: int) -> int | None:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    memory = dict(line.split(":") for line in read("/proc/meminfo").splitlines() if line.count(":") == 1)
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108 - its size is the fact
    return {
        "memlock_bytes": soft(resource.RLIMIT_MEMLOCK),
        "open_files": soft(resource.RLIMIT_NOFILE),
        "shm_free_bytes": shm.free if shm else 0,
        "memory_bytes": int(memory.get("MemTotal", "0 kB").split()[0]) * 1024,
    }


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """Return all requested facts. Calls that may hang are started first and awaited last."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    name = Later(NAME_LIMIT_S, resolved, socket.gethostname())
    driver = Later(DRIVER_LIMIT_S + 1, graphics)
    models = Later(FOLDER_LIMIT_S, hub, request["hub"], request.get("hub_address", "")) if request.get("hub") else None
    locks = Later(FOLDER_LIMIT_S, build_locks, request["extensions"]) if request.get("extensions") else None
    folders = {item["role"]: Later(FOLDER_LIMIT_S, folder, item) for item in request.get("folders", [])}
    report: dict[str, Any] = {
        "host": host,
        "node_id": int(os.environ.get("SLURM_NODEID", "0")),
        "own_name": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cpus": cpus(),
        "interfaces": interfaces(),
        "free_ports": [port for port in request.get("ports", []) if port_free(port)],
        "unused_port": unused_port(),
        "packages": {item: package(item) for item in request.get("packages", [])},
        "program": {item: has_module(item) for item in request.get("program", {})},
        "infiniband": infiniband(),
        "gpu_pci": gpu_pci(),
        "nccl": nccl_version(),
        "nccl_conf": nccl_conf(),
        **limits(),
    }
    if request.get("imports"):
        report["imports"] = imports(request["imports"], request.get("import_limit_s", 90.0))
    report["resolves"], report["resolve_error"] = name.get()
    if models is not None:
        value, error = models.get()
        report["hub"] = value or {"error": error}
    if locks is not None:
        report["build_locks"] = locks.get()[0] or []
    gpus, report["gpu_error"] = driver.get()
    report.update(gpus or {"gpus": [], "p2p": None, "topo": None})
    report["folders"] = {}
    for role, later in folders.items():
        value, error = later.get()
        report["folders"][role] = {**(value or {"exists": False}), "error": error}
    return report


def main() -> None:
    """Print one JSON line; a hung thread must not keep the process alive."""
    began = time.perf_counter()
    report = facts(json.loads(sys.argv[sys.argv.index("--json-args") + 1]) if "--json-args" in sys.argv else {})
    report["probe_s"] = round(time.perf_counter() - began, 3)
    report["clock"] = time.time() + float(os.environ.get("ALLRANKS_CLOCK_OFFSET_S") or 0)
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
