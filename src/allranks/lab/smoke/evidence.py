"""Read a run folder once into a frozen record, so that criteria are functions of this record alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from allranks.planning.records import LaunchPlan
from allranks.rundir.checkpoints import MANIFEST, find_damage
from allranks.rundir.events import read_run_events
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from allranks.spec import load_spec
from allranks.spec.records import RunSpec
from allranks.utils.inputs import read_regular

Event = dict[str, Any]
HEAD_BYTES = 65_536


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One run and its reload.

    Attributes:
        first: events of each rank in the first attempt; ``again`` those of the attempt that resumed from its checkpoint.
        files: of the newest checkpoint, by name: bytes. ``damage``: its damage, if any.
        ways: NCCL's channels by transport (SHM, P2P, NET/IB, ...), by host; empty without NCCL.
        heads: the first lines of each rank's log.
    """

    spec: RunSpec
    plan: LaunchPlan
    metrics: dict[str, Any]
    first: dict[int, list[Event]]
    again: dict[int, list[Event]]
    step: int | None
    manifest: dict[str, Any]
    files: dict[str, int]
    damage: str | None
    engine: dict[str, Any]
    ways: dict[str, dict[str, int]]
    heads: dict[int, str]
    preflight: list[str]
    message: str

    @property
    def ranks(self) -> list[int]:
        """Return the planned ranks."""
        return list(range(self.plan.world_size))

    def events(self, kind: str, *, again: bool = False) -> dict[int, list[Event]]:
        """Return the events of a kind by rank, without ranks that have none."""
        story = self.again if again else self.first
        found = {rank: [e for e in events if e["event"] == kind] for rank, events in story.items()}
        return {rank: events for rank, events in found.items() if events}

    def last(self, kind: str, *, again: bool = False) -> dict[int, Event]:
        """Return the last event of a kind by rank."""
        return {rank: events[-1] for rank, events in self.events(kind, again=again).items()}

    @property
    def steps(self) -> int:
        """Return the planned optimizer steps of the first attempt; the plan may contain those of the reload."""
        phases = [e for e in self.first.get(0, []) if e["event"] == "phase" and "total_steps" in e]
        return int(phases[0]["total_steps"]) if phases else self.plan.max_steps or 0

    @property
    def step_times_s(self) -> list[float]:
        """Return the time of every step of rank 0, including the first."""
        return [t for e in self.events("step").get(0, []) for t in (e.get("step_times_s") or [e["step_time_s"]])]


def read_evidence(run: RunDir, message: str = "") -> Evidence:
    """Read a run's folder; the run may have ended at any point."""
    first, again = {}, {}
    for rank, events in read_run_events(run).items():
        starts = [i for i, e in enumerate(events) if e["event"] == "start"]
        cut = starts[1] if len(starts) > 1 else len(events)
        first[rank], again[rank] = events[:cut], events[cut:]
    steps = run.checkpoint_steps()
    folder = run.checkpoint(steps[-1]) if steps else None
    facts = read_json(folder / MANIFEST) if folder else None
    manifest: dict[str, Any] = facts if isinstance(facts, dict) else {}
    metrics = read_json(run.metrics) or {}
    return Evidence(
        spec=load_spec(run.spec),
        plan=msgspec.json.decode(read_regular(run.plan), type=LaunchPlan),
        metrics=metrics,
        first=first,
        again={rank: events for rank, events in again.items() if events},
        step=steps[-1] if steps else None,
        manifest=manifest,
        files={name: int(facts["bytes"]) for name, facts in manifest.get("files", {}).items()},
        damage=find_damage(folder) if folder else None,
        engine=read_json(run.engine_config) or {},
        ways=_nccl_transports(metrics, run),
        heads={rank: _first_bytes(path) for rank, path in run.rank_logs(1).items()},
        preflight=run.preflight_text.read_text().splitlines() if run.preflight_text.exists() else [],
        message=message,
    )


def _nccl_transports(metrics: dict[str, Any], run: RunDir) -> dict[str, dict[str, int]]:
    """Return the transports from NCCL's lines in the ranks' logs."""
    from allranks.nodes.network_verification import NetworkLogParser

    found: dict[str, NetworkLogParser] = {}
    for path in run.rank_logs(1).values():
        host = path.name.rsplit(".rank", 1)[0]
        with path.open("rb") as file:
            text = file.read(8 << 20)
        lines = (line.decode(errors="replace") for line in text.splitlines() if b"NCCL" in line)
        found.setdefault(host, NetworkLogParser(host)).take(lines)
    seen = {host: c.observed().ways for host, c in sorted(found.items())}
    return {host: ways for host, ways in seen.items() if ways}


def _first_bytes(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(HEAD_BYTES).decode(errors="replace")
