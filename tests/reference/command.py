"""Start allranks through its command line, and read the files that it publishes. Nothing here imports the package."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ALLRANKS = [sys.executable, "-m", "allranks"]


@dataclass(frozen=True)
class Run:
    """A run folder."""

    folder: Path

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the summary."""
        return json.loads((self.folder / "metrics.json").read_text())

    def steps(self) -> list[dict[str, Any]]:
        """Return the step events of rank 0; a step that was repeated after a resume counts once."""
        found: dict[int, dict[str, Any]] = {}
        for event in events(self):
            if event["event"] == "resume":
                found = {step: e for step, e in found.items() if step <= event["from_step"]}
            elif event["event"] == "step":
                found[event["step"]] = event
        return [found[step] for step in sorted(found)]

    def export(self, to: Path) -> str:
        """Export the newest checkpoint and return the folder."""
        allranks("export", self.folder.name, "--run-root", str(self.folder.parent), "--out", str(to), cwd=to.parent)
        return str(to)


def events(run: Run, name: str | None = None, rank: int = 0) -> list[dict[str, Any]]:
    """Return the events of a rank so far, all or those of one name; the last line may still be in the making."""
    file = run.folder / "events" / f"rank{rank}.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if name in (None, event["event"])]


def allranks(*args: str, cwd: Path, limit_s: float = 200) -> str:
    """Run a verb, which must succeed, and return its output."""
    done = subprocess.run([*ALLRANKS, *args], cwd=cwd, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    return done.stdout


def write_spec(folder: Path, spec: dict[str, Any]) -> Path:
    path = folder / f"{spec['name']}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def run(folder: Path, spec: dict[str, Any]) -> Run:
    """Train to the end; the spec's name must be new in its ``run_root``."""
    allranks("run", str(write_spec(folder, spec)), cwd=folder)
    return run_of(spec)


def run_of(spec: dict[str, Any]) -> Run:
    """Return the one run of this name."""
    (found,) = Path(spec["run_root"]).glob(f"{spec['name']}-*")
    return Run(found)


def start(folder: Path, spec: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a run in the background, as the leader of its own session."""
    command = [*ALLRANKS, "run", str(write_spec(folder, spec))]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
