"""Evidence of one node, taken by its agent before anything is killed. Bounded in time and size, secrets left out."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil

from allranks.diagnose.flightrec import read_flight_record
from allranks.hang import procfs, stacks
from allranks.hang.inside import DUMP_SIGNAL
from allranks.hang.pulse import Beat, Page
from allranks.hang.records import Call, NodeEvidence, RankEvidence
from allranks.redact import redact
from allranks.rundir import RunDir

ANSWER_S = 3.0  # for the dump of a stack and of the flight recorder
PY_SPY_S = 6.0
STACK_BYTES = 256 << 10
MOST_CALLS = 60
REACH_S = 2.0


class Collector:
    """Looks at the ranks of one node. ``pids`` by rank are of the processes that lived at the last look."""

    def __init__(
        self, run: RunDir, attempt: int, node: int, host: str, meeting: tuple[str, int] | None, interface: str
    ) -> None:
        self._run, self._attempt, self._node, self._host = run, attempt, node, host
        self._meeting, self._interface = meeting, interface

    def node(self, pages: Mapping[int, Page], beats: Mapping[int, Beat]) -> NodeEvidence:
        """Everything; takes a few seconds."""
        began = time.monotonic()
        sizes = {rank: os.fstat(page.stacks).st_size for rank, page in pages.items()}
        before = {rank: procfs.work_done(beat.pid)[0] for rank, beat in beats.items()}
        for rank, page in pages.items():
            page.ask()
            if rank in beats:
                _ask_stack(beats[rank].pid)
        with ThreadPoolExecutor(8) as pool:
            meets = pool.submit(self._meets)
            spied = {rank: pool.submit(_py_spy, beat.pid) for rank, beat in beats.items()}
            _wait_for_answers(pages, sizes)
            texts = {rank: s.result() for rank, s in spied.items()}
            waited = time.monotonic() - began
            ranks = [
                self._rank(rank, pages[rank], beat, sizes[rank], texts[rank], before[rank], waited)
                for rank, beat in sorted(beats.items())
            ]
            memory = psutil.virtual_memory()
            return NodeEvidence(
                node=self._node,
                host=self._host,
                time=round(time.time(), 3),
                ranks=ranks,
                seconds=round(time.monotonic() - began, 3),
                load1=procfs.load1(),
                cpus=os.cpu_count(),
                memory_total_bytes=memory.total,
                memory_available_bytes=memory.available,
                oom_kills=procfs.oom_kills(),
                blocked=procfs.blocked(),
                interfaces=procfs.interfaces(),
                interface=self._interface,
                meets=meets.result(),
            )

    def _rank(
        self, rank: int, page: Page, beat: Beat, size: int, spied: str | None, cpu_before: float, waited: float
    ) -> RankEvidence:
        now = time.monotonic()
        dumped = page.stack_text(STACK_BYTES + size)[size:]
        text, by = (spied, "py-spy") if spied else (dumped, "faulthandler")
        frames = stacks.main_thread(text)
        state = procfs.state_of(beat.pid)
        self._keep(rank, text)
        calls, no_calls = self._calls(rank, page)
        return RankEvidence(
            rank=rank,
            pid=beat.pid,
            state=state,
            phase=beat.phase,
            part=beat.part,
            step=beat.step,
            silent_s=round(now - beat.at, 3),
            python_silent_s=round(now - beat.alive_at, 3) if beat.alive_at else None,
            sequences=beat.sequences,
            wait_channel=procfs.wait_channel(beat.pid),
            kernel_stack=procfs.kernel_stack(beat.pid),
            cpu_share=round((procfs.work_done(beat.pid)[0] - cpu_before) / max(waited, 0.01), 2),
            threads=procfs.threads(beat.pid),
            memory_bytes=procfs.memory_bytes(beat.pid),
            stack=frames,
            stack_by=by if frames else "",
            no_stack="" if frames else "the process did not answer",
            calls=calls,
            no_calls=no_calls,
        )

    def _keep(self, rank: int, text: str) -> None:
        """The dump of all threads, for a person and for `allranks diagnose`."""
        if text.strip():
            path = self._run.hang_stack(self._attempt, self._host, rank)
            path.write_text(redact(text)[:STACK_BYTES], encoding="utf-8")

    def _calls(self, rank: int, page: Page) -> tuple[list[Call], str]:
        """The last collectives by torch's flight recorder, or why there are none."""
        path = self._run.hang_flight(self._attempt, rank)
        if not path.exists():
            why = (
                "its record of collectives is empty"
                if page.answered
                else "no thread of Python ran, so none was written"
            )
            return [], why
        try:
            found = read_flight_record(path).calls
        except (OSError, ValueError) as error:
            return [], f"its record of collectives cannot be read: {error}"
        return [
            Call(
                group=c.group,
                seq=c.seq,
                op=c.op.rpartition(":")[2],
                sizes=c.sizes,
                done=c.state == "completed",
                where=_where(c.frames),
            )
            for c in found[-MOST_CALLS:]
        ], ""

    def _meets(self) -> bool | None:
        if self._meeting is None:
            return None
        try:
            with socket.create_connection(self._meeting, timeout=REACH_S):
                return True
        except OSError:
            return False


def _where(frames: list[str]) -> str:
    own = next((f for f in frames if f and not stacks.is_library(f)), "")
    return own[:200]


def _ask_stack(pid: int) -> None:
    from allranks.launch.agent import catches

    if catches(pid, DUMP_SIGNAL):
        try:
            os.kill(pid, DUMP_SIGNAL)
        except OSError:
            return


def _wait_for_answers(pages: Mapping[int, Page], sizes: Mapping[int, int]) -> None:
    """Until all have answered, and what they write has stopped growing; at most `ANSWER_S`."""
    deadline, last = time.monotonic() + ANSWER_S, -1
    while time.monotonic() < deadline:
        now = sum(os.fstat(p.stacks).st_size for p in pages.values())
        grown = all(os.fstat(p.stacks).st_size > sizes[r] for r, p in pages.items())
        if grown and now == last and all(p.answered for p in pages.values()):
            return
        last = now
        time.sleep(0.2)


def _py_spy(pid: int) -> str | None:
    """All threads by py-spy, where it is installed and may look."""
    program = shutil.which("py-spy")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PY_SPY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout[:STACK_BYTES] if done.returncode == 0 and "Thread " in done.stdout else None


def save(path: Path, found: NodeEvidence) -> None:
    """In place: the file was there from the start, so that other nodes see it at once on NFS too."""
    with path.open("w", encoding="utf-8") as file:
        file.write(redact(msgspec.json.format(msgspec.json.encode(found)).decode()))
        file.flush()
        os.fsync(file.fileno())
