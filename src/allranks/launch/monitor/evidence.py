"""Collect evidence of stalled ranks on one node: stacks, flight recorder, process and network state.

Stack dumps come from faulthandler. The agent collects before any process is killed: bounded time and size, no secrets.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

from allranks.analysis.flight_recorder import CollectiveCall, read_flight_record
from allranks.analysis.nccl_ras import MAX_BYTES, RasFinding, read_ras
from allranks.analysis.stacks import main_thread_frames
from allranks.launch.monitor import procfs
from allranks.launch.monitor.records import NodeEvidence, RankEvidence
from allranks.launch.process_guard import send_signal
from allranks.launch.rank_processes import has_signal_handler
from allranks.rundir.files import make_folder, write_text_atomic
from allranks.rundir.heartbeat import DUMP_SIGNAL, Heartbeat, HeartbeatPage
from allranks.rundir.paths import RunDir
from allranks.utils.machine import oom_kills
from allranks.utils.redaction import redact, redact_tree

BUFFER_SIZE = "2000"  # the default of torch 2.13
FIRST_WITH_FR_NAMES = (2, 13)  # enabled by default from here on; the older names cause a warning
WATCHDOG_DUMP = "watchdog.rank"


def flight_recorder_environment(device: str, folder: Path, torch: str | None = None) -> dict[str, str]:
    """Return the flight recorder's variables for a rank that computes on ``cuda`` or ``cpu``; dumps go to `folder`.

    Args:
        torch: its version, if the ranks have another Python than this process.
    """
    try:
        major, minor = (version("torch") if torch is None else torch).split(".")[:2]
        new = (int(major), int(minor)) >= FIRST_WITH_FR_NAMES
    except (PackageNotFoundError, ValueError):
        new = False
    variables = {} if new else {"TORCH_FR_BUFFER_SIZE": BUFFER_SIZE, "TORCH_NCCL_TRACE_BUFFER_SIZE": BUFFER_SIZE}
    dump = {"TORCH_FR_DUMP_TEMP_FILE" if new else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / WATCHDOG_DUMP)}
    return {**variables, **(dump if device == "cuda" else {})}


ANSWER_S = 3.0  # for the dump of a stack and of the flight recorder
BUSY_ANSWER_S = (
    10.0  # if a rank that has not answered still works on its answer; below the time for all nodes (`supervisor`)
)
STACK_BYTES = 256 << 10
OUTERMOST_FRAME = "in _run_module_as_main"  # of a rank's main thread
MAX_CALLS = 60  # and findings of RAS
CONNECT_TIMEOUT_S = 2.0
RAS_NODES = 2  # that ask: each gets a report on the whole job, and one of them may be the node that hangs
RAS_ANSWER_S = 6.0  # RAS itself waits for other processes, here for 2 s at each level of its tree
RAS_REQUEST = b"timeout 2\nverbose status\n"


def ras_address(device: str, node: int) -> tuple[str, int] | None:
    """Return where NCCL's RAS answers on this node; None if it is not asked: without GPUs, or by other nodes."""
    given, off = os.environ.get("NCCL_RAS_ADDR", ""), os.environ.get("NCCL_RAS_ENABLE") == "0"
    if node >= RAS_NODES or off or not (device == "cuda" or given):
        return None
    host, _, port = given.rpartition(":")
    return host.strip("[]") or "localhost", int(port) if port.isdigit() and len(port) < 6 else 28028


def ask_ras(address: tuple[str, int]) -> str:
    """Return RAS's report, or what of it came in time; empty if nothing answers. A process of any user may answer."""
    deadline, parts, size = time.monotonic() + RAS_ANSWER_S, list[bytes](), 0
    try:
        with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S) as sock:
            sock.sendall(RAS_REQUEST)
            while size < MAX_BYTES and (left_s := deadline - time.monotonic()) > 0:
                sock.settimeout(left_s)
                if not (data := sock.recv(1 << 16)):
                    break
                parts.append(data)
                size += len(data)
    except (OSError, OverflowError):
        pass
    return b"".join(parts).decode(errors="replace").removeprefix("OK\n")


class EvidenceCollector:
    """Collect evidence of the ranks of one node."""

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        node: int,
        host: str,
        meeting: tuple[str, int] | None,
        interface: str,
        ras: tuple[str, int] | None = None,
    ) -> None:
        self._run, self._attempt, self._node, self._host = run, attempt, node, host
        self._meeting, self._interface, self._ras = meeting, interface, ras

    def node(self, pages: Mapping[int, HeartbeatPage], beats: Mapping[int, Heartbeat]) -> NodeEvidence:
        """Return all evidence of the node; takes a few seconds."""
        began = time.monotonic()
        reports = list[str]()
        asking = None
        if ras := self._ras:
            asking = threading.Thread(target=lambda: reports.append(ask_ras(ras)), name="nccl-ras", daemon=True)
            asking.start()
        sizes = {rank: os.fstat(page.stacks).st_size for rank, page in pages.items()}
        before = {rank: procfs.work_of(beat.pid).cpu_s for rank, beat in beats.items()}
        for rank, page in pages.items():
            page.ask()
            if rank in beats and has_signal_handler(beats[rank].pid, DUMP_SIGNAL):
                send_signal(beats[rank].pid, DUMP_SIGNAL)
        meets = self._meets()
        _wait_for_answers(pages, sizes, {rank: beat.pid for rank, beat in beats.items()})
        waited = time.monotonic() - began
        ranks = [
            self._rank(rank, pages[rank], beat, sizes[rank], before[rank], (began, waited))
            for rank, beat in sorted(beats.items())
        ]
        if asking:
            asking.join(max(0.0, began + RAS_ANSWER_S + CONNECT_TIMEOUT_S - time.monotonic()))
        memory = psutil.virtual_memory()
        collected = NodeEvidence(
            node=self._node,
            host=self._host,
            time=round(time.time(), 3),
            ranks=ranks,
            seconds=round(time.monotonic() - began, 3),
            load1=os.getloadavg()[0],
            cpus=os.cpu_count(),
            memory_total_bytes=memory.total,
            memory_available_bytes=memory.available,
            oom_kills=oom_kills(),
            blocked=procfs.blocked_processes(),
            interfaces=procfs.interfaces(),
            interface=self._interface,
            meets=meets,
            ras=self._ras_findings(reports[0] if reports else ""),
        )
        return _redacted(collected)

    def _rank(
        self,
        rank: int,
        page: HeartbeatPage,
        beat: Heartbeat,
        size: int,
        cpu_before: float,
        request: tuple[float, float],
    ) -> RankEvidence:
        """Return the evidence of a rank. ``request``: when, and how long the answer was waited for, in seconds."""
        at, waited = request  # silence counts up to the request, since the answer itself may take long
        text = page.stack_text(STACK_BYTES + size)[size:]
        self._keep(rank, text)
        calls, no_calls = self._calls(rank, page)
        return RankEvidence(
            rank=rank,
            pid=beat.pid,
            state=procfs.state_of(beat.pid),
            phase=beat.phase,
            part=beat.part,
            step=beat.step,
            silent_s=round(at - beat.at, 3),
            python_silent_s=round(at - beat.alive_at, 3) if beat.alive_at else None,
            python_beats=beat.alive_beats,
            monitor_error=beat.monitor_error,
            sequences=beat.sequences,
            wait_channel=procfs.wait_channel(beat.pid),
            kernel_stack=procfs.kernel_stack(beat.pid),
            cpu_share=round((procfs.work_of(beat.pid).cpu_s - cpu_before) / max(waited, 0.01), 2),
            stack=main_thread_frames(text),
            calls=calls,
            no_calls=no_calls,
        )

    def _keep(self, rank: int, text: str) -> None:
        """Save the dump of all threads, for the user and for `allranks diagnose`."""
        if text.strip():
            path = self._run.hang_stack(self._attempt, self._host, rank)
            try:
                make_folder(path.parent)
                path.write_text(redact(text)[:STACK_BYTES], encoding="utf-8")
            except OSError as error:  # for example a full disk; the verdict does not need the file
                logging.warning("%s cannot be written: %s", path, error.strerror)

    def _calls(self, rank: int, page: HeartbeatPage) -> tuple[list[CollectiveCall], str]:
        """Return the last collectives from torch's flight recorder, or why there are none."""
        path = self._run.hang_flight(self._attempt, rank)
        if not path.exists():
            silent = "the heartbeat thread did not answer, so no record was written"
            return [], "the flight recorder is empty" if page.answered else silent
        try:
            calls = read_flight_record(path).calls
        except (OSError, ValueError) as error:
            return [], f"the flight recorder's dump cannot be read: {error}"
        return [call.without_stack() for call in calls[-MAX_CALLS:]], ""

    def _ras_findings(self, text: str) -> list[RasFinding]:
        """Save RAS's report, and return what it says."""
        if text.strip():
            path = self._run.hang_ras(self._attempt, self._node)
            try:
                make_folder(path.parent)
                write_text_atomic(path, redact(text))
            except OSError as error:
                logging.warning("%s cannot be written: %s", path, error.strerror)
        return next(reversed(read_ras(text)), [])[:MAX_CALLS]

    def _meets(self) -> bool | None:
        if self._meeting is None:
            return None
        try:
            with socket.create_connection(self._meeting, timeout=CONNECT_TIMEOUT_S):
                return True
        except OSError:
            return False


def _wait_for_answers(pages: Mapping[int, HeartbeatPage], sizes: Mapping[int, int], pids: Mapping[int, int]) -> None:
    """Wait up to `ANSWER_S` until all ranks have answered and written the stack of their main thread, the last one of a
    dump; up to `BUSY_ANSWER_S` while a rank that has not answered computes, as on an overloaded node."""
    began = time.monotonic()
    cpu_s: dict[int, float] = {}
    while (waited := time.monotonic() - began) < BUSY_ANSWER_S:
        if all(
            p.answered and OUTERMOST_FRAME in p.stack_text(STACK_BYTES + sizes[r])[sizes[r] :] for r, p in pages.items()
        ):
            return
        before = cpu_s
        cpu_s = {r: procfs.work_of(pids[r]).cpu_s for r, p in pages.items() if r in pids and not p.answered}
        if waited >= ANSWER_S and not any(cpu_s[r] > before.get(r, cpu_s[r]) for r in cpu_s):
            return
        time.sleep(0.2 if waited < ANSWER_S else 1.0)


def save_evidence(path: Path, evidence: NodeEvidence) -> None:
    """Write the evidence to the run folder; raise `OSError` if that fails."""
    make_folder(path.parent)
    write_text_atomic(path, msgspec.json.format(msgspec.json.encode(evidence)).decode())


def _redacted(evidence: NodeEvidence) -> NodeEvidence:
    """Return the evidence without secrets in stacks or process names."""
    return msgspec.convert(redact_tree(msgspec.to_builtins(evidence)), NodeEvidence)
