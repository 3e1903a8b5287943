"""Draw one optimizer step of some runs from their traces, each as long as the picture is wide.

``python scripts/trace_picture.py OUT.svg RUN RUN...``. Of each run rank 0 of the newest traces; above what the rank
computes, below its collectives.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {"forward": "#4c78a8", "backward": "#72b7b2", "optimizer": "#f2a541", "all_reduce": "#d1605e"}
GATHER, SCATTER = "#8a6d3b", "#b279a2"
LEFT, WIDTH = 150, 780


def events(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the last step of rank 0, its annotations of phases, and its collectives."""
    every = json.loads(gzip.decompress((run / "traces" / "rank0.json.gz").read_bytes()))["traceEvents"]
    timed = [event for event in every if event.get("ph") == "X"]
    step = max((e for e in timed if e["name"].startswith("ProfilerStep")), key=lambda e: e["ts"])
    inside = [e for e in timed if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
    phases = [e for e in inside if e["name"] in ("allranks.forward", "allranks.backward", "allranks.optimizer")]
    return step, phases, [e for e in inside if e["name"].startswith(("gloo:", "nccl:"))]


def colour(name: str) -> str:
    """Return the colour of a phase or a collective."""
    kind = name.partition(":")[2] or name.rpartition(".")[2]
    return COLOURS.get(kind) or (GATHER if "gather" in kind else SCATTER)


def picture(runs: dict[str, Path]) -> str:
    """Return the picture as SVG."""
    read = {name: events(run) for name, run in runs.items()}
    height = 78 * len(runs) + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" font-family="system-ui, sans-serif" '
        'font-size="13">',
        f'<rect width="960" height="{height}" rx="8" fill="#f4f5f7"/>',
    ]
    names = []
    for row, (name, (step, phases, collectives)) in enumerate(read.items()):
        top = 14 + 78 * row
        parts.append(f'<text x="14" y="{top + 17}" fill="#33363d" font-weight="600">{name}</text>')
        text = f"{len(collectives)} collective{'s' * (len(collectives) != 1)}"
        parts.append(f'<text x="14" y="{top + 45}" fill="#6a6f7a" font-size="11">{text}</text>')
        for y, bars in ((top, phases), (top + 28, collectives)):
            for e in bars:
                x = LEFT + WIDTH * (e["ts"] - step["ts"]) / step["dur"]
                w = max(1.2, WIDTH * min(e["dur"], step["ts"] + step["dur"] - e["ts"]) / step["dur"])
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="24" fill="{colour(e["name"])}" '
                    f'fill-opacity="0.85"/>'
                )
                names.append(e["name"])
    x = LEFT
    for name in dict.fromkeys(names):
        label = name.partition(":")[2].strip("_").replace("_base", "") or name.rpartition(".")[2]
        parts.append(f'<rect x="{x}" y="{height - 25}" width="12" height="12" fill="{colour(name)}"/>')
        parts.append(f'<text x="{x + 17}" y="{height - 14}" fill="#33363d">{label}</text>')
        x += 40 + 7 * len(label)
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    out, *folders = sys.argv[1:]
    named = {Path(f).name.split("-")[1] if Path(f).name.count("-") > 2 else Path(f).name: Path(f) for f in folders}
    Path(out).write_text(picture(named))
