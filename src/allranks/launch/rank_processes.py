"""Manage the processes of one node's ranks: start them with torchrun's environment, wait, signal and kill. No torch.

Each rank leads its own session, so that its children (data loaders, compilers) can be killed with it, and so that a
signal for one rank does not reach others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from allranks.launch.failure_attribution import RankEnd
from allranks.launch.process_guard import (
    AGENT_PID_VARIABLE,
    PROGRAM_VARIABLE,
    RUN_ID_VARIABLE,
    processes_of_run,
    send_signal,
)
from allranks.rundir.heartbeat import HeartbeatPage
from allranks.utils.machine import oom_kills
from allranks.utils.redaction import redact

TORCHRUN_VARIABLE = "ALLRANKS_TORCHRUN"  # JSON of `TorchrunSettings`, in the environment of an agent
LEFTOVER_GRACE_S = 3.0  # for processes that a rank leaves behind, such as a logger that still uploads


def torchrun_environment(
    rank: int, local_rank: int, local_size: int, node: int, nodes: int, world_size: int, run_id: str, restarts: int
) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank, except the store's address.

    Source: torch/distributed/elastic/agent/server/local_elastic_agent.py, torch 2.13.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(local_size),
        "WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),  # a user's own program reads its checkpoint where it is not 0
        "TORCHELASTIC_MAX_RESTARTS": "0",
        RUN_ID_VARIABLE: run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        AGENT_PID_VARIABLE: str(os.getpid()),
    }


class TorchrunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `allranks torchrun` hands to the agent of its node, whose command line may differ from that of other nodes.

    ``python`` runs ``program``, which has the keys of `ScriptSpec` and ``direct``: it is started itself, without
    Python. ``torch`` is its version in ``python``, empty where it has none. ``address`` is MASTER_ADDR; the store gets
    another port if ``port`` is taken and not ``port_fixed``; without ``agent_store`` rank 0 opens it itself.
    ``virtual_local_rank``: each rank has LOCAL_RANK 0, and its GPU is the only one that it sees.
    """

    program: dict[str, Any]
    python: str
    torch: str
    run_id: str
    environment: dict[str, str]
    address: str
    port: int
    port_fixed: bool
    agent_store: bool
    virtual_local_rank: bool = False

    @property
    def command(self) -> list[str]:
        """Return the beginning of the command of a rank."""
        if self.program["direct"] or self.python == sys.executable:
            return [sys.executable, "-u", "-m"]
        return [self.python, "-u", str(Path(__file__).with_name("rank_elsewhere.py"))]

    def variables(self, error_file: Path, local_rank: int) -> dict[str, str]:
        """Return the variables of a rank that differ from those of other runs."""
        only: dict[str, str] = {}
        if self.virtual_local_rank:
            given = os.environ.get("CUDA_VISIBLE_DEVICES")
            gpu = str(local_rank) if given is None else given.split(",")[local_rank].strip()
            only = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpu}
        return {
            **only,
            **self.environment,
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.agent_store),
            PROGRAM_VARIABLE: msgspec.json.encode(self.program).decode(),
        }


def take_torchrun_settings() -> TorchrunSettings | None:
    """Return what `allranks torchrun` has handed to this agent, and remove it from the environment."""
    text = os.environ.pop(TORCHRUN_VARIABLE, "")
    return msgspec.json.decode(text, type=TorchrunSettings) if text else None


class _RankProcess:
    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank, self.process = rank, process
        self.signalled = False
        self.ended_by_agent = False
        self.end: RankEnd | None = None


class RankProcesses:
    """Processes of the ranks of one node. No method blocks."""

    def __init__(self, host: str, pages: Mapping[int, HeartbeatPage]) -> None:
        self._host, self._pages = host, pages
        self._ranks: list[_RankProcess] = []
        self._run_id = ""
        self._oom_kills = oom_kills()

    def start(self, command: Sequence[str], environments: Mapping[int, Mapping[str, str]]) -> None:
        """Start every rank, with variables added to this process's environment; raise `OSError` if one cannot start."""
        for rank, more in environments.items():
            self._run_id = more[RUN_ID_VARIABLE]
            process = subprocess.Popen(
                command, env={**os.environ, **more}, stdin=subprocess.DEVNULL, start_new_session=True
            )
            self._ranks.append(_RankProcess(rank, process))

    def poll(self) -> list[RankEnd]:
        """Check for exited ranks and return all ends so far."""
        for rank in self._ranks:
            if rank.end is None and (code := rank.process.poll()) is not None:
                beat = self._pages[rank.rank].read()
                done = beat is None or beat.done
                rank.end = RankEnd(
                    rank=rank.rank,
                    host=self._host,
                    pid=rank.process.pid,
                    exitcode=code,
                    time=time.time(),
                    done=done,
                    failure=redact(beat.failure) if beat else "",
                    ended_by_agent=rank.ended_by_agent and (code != 0 or not done),
                    killed_for_memory=self._killed_for_memory() if code == -signal.SIGKILL else None,
                )
        return [rank.end for rank in self._ranks if rank.end is not None]

    def _killed_for_memory(self) -> bool | None:
        now = oom_kills()
        return now > self._oom_kills if now is not None and self._oom_kills is not None else None

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks if rank.end is None]

    @property
    def all_ended(self) -> bool:
        return all(rank.end is not None for rank in self._ranks)

    def request_stop(self) -> None:
        """Send SIGUSR1 to each rank once, only after its handler is installed; it would kill a rank still starting."""
        for rank in self._ranks:
            if rank.end is None and not rank.signalled and has_signal_handler(rank.process.pid, signal.SIGUSR1):
                rank.signalled = True
                rank.process.send_signal(signal.SIGUSR1)

    def terminate_programs(self) -> None:
        """Send SIGTERM once to each rank itself, whose program may handle it; its children are its own concern."""
        for rank in self._ranks:
            if rank.end is None and not rank.signalled and rank.process.poll() is None:
                rank.signalled = rank.ended_by_agent = True
                rank.process.send_signal(signal.SIGTERM)

    def terminate(self) -> None:
        self._signal_groups(signal.SIGTERM)

    def kill(self) -> None:
        self._signal_groups(signal.SIGKILL)

    def _signal_groups(self, number: int) -> None:
        for rank in self._ranks:
            if rank.end is None and rank.process.poll() is None:
                rank.ended_by_agent = True
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, number)

    def end_leftovers(self) -> None:
        """Kill the processes that ended ranks have left behind; bounded by `LEFTOVER_GRACE_S`."""
        pids = [rank.process.pid for rank in self._ranks]
        deadline = time.monotonic() + LEFTOVER_GRACE_S
        while (left := processes_of_run(self._run_id, os.getpid(), pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            send_signal(pid, signal.SIGKILL)


def has_signal_handler(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, according to /proc; True if unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return not Path("/proc/self/status").exists()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
