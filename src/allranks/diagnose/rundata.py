"""What a run of allranks wrote down about itself beside its logs: who ended how, and who was connected with whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from allranks.diagnose.signals import FileScan, Signal
from allranks.rundir import RunDir, is_run

ENDS = ".exit.json"
_STOPPED = (0, -15)  # ended well, or stopped because another had failed


class _End(Struct):
    rank: int
    host: str
    exitcode: int
    time: float | None = None


class _Ends(Struct):
    failed: list[_End] = []


class _Connections(Struct):
    interfaces: dict[str, int] = {}


def connections(paths: Sequence[Path]) -> dict[str, int]:
    """Connections between ranks by interface, such as ``{"TCP/eth0": 12}``, of the newest attempt of each run folder."""
    found: dict[str, int] = {}
    for path in paths:
        if not is_run(path) or not (path / "plan.json").is_file():
            continue
        run = RunDir(path)
        for file in sorted(run.logs_of(max(run.attempts(), default=1)).glob("*.connections.json")):
            try:
                counted = msgspec.json.decode(file.read_bytes(), type=_Connections).interfaces
            except (OSError, msgspec.DecodeError):
                continue  # a record of the run, no log: what is not there is not told
            for name, count in counted.items():
                found[f"TCP/{name}"] = found.get(f"TCP/{name}", 0) + count
    return found


def note_ends(scan: FileScan, path: Path) -> None:
    """Give the signals of a node's record of ends their ranks, and add the processes that failed, the first of them first."""
    try:
        data = path.read_bytes()
        failed = [e for e in msgspec.json.decode(data, type=_Ends).failed if e.exitcode not in _STOPPED]
    except (OSError, msgspec.DecodeError):
        return  # cut by a kill: what stands in it as text was read
    text = data.decode("utf-8", "replace").splitlines()
    for end in failed:
        at = next((i for i, line in enumerate(text, 1) if line.strip().startswith(f'"rank": {end.rank},')), 1)
        for signal in scan.signals:
            if at <= signal.line <= at + 5 and signal.rank is None:
                signal.rank, signal.host, signal.time = end.rank, end.host, end.time
        scan.signals.append(_signal(scan.file, at, end))


def _signal(file: int, line: int, end: _End) -> Signal:
    return Signal(
        kind="fact", owner="rank_end", rule=-1, weight=0.5, passing=False, file=file, line=line, time=end.time, rank=end.rank, local=None,
        task=None, host=end.host, text=f"rank {end.rank} on {end.host} ended with exit code {end.exitcode}", groups={"code": str(end.exitcode)},
    )  # fmt: skip
