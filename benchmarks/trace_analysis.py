"""``allranks trace`` beside HolisticTraceAnalysis: time, memory and figures on the same traces.

``python -m benchmarks.trace_analysis [--traces ../shared/data/traces] [--repeats 5] [--json benchmarks/results/trace_analysis.json]``.
HTA gets a venv of its own outside the project (``--venv``), made when it is not there. Each measurement is a fresh
process; the programs take turns, and the order changes with each repeat. TIME is wall time from start to end of the
process, import included; MEMORY the largest sum over its processes. The exit code is 1 if a set that HTA can read is less
than ten times faster or takes more than a quarter of the memory, or if a figure differs where HTA is right.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.processes import Measured, measure
from benchmarks.programs import ROOT
from benchmarks.trace_sets import TraceSet, generated_set, own_gloo_set, real_sets, wrong_sets

PEERS = ROOT / "benchmarks" / "trace_peers"
FASTER, MEMORY, FIGURES = 10.0, 0.25, 0.001
VERB_BYTES = 1_000_000  # of unpacked traces, from which on the verb with its tables is judged, too
TIMEOUT_S = 900
# pandas 3 is what pip takes by itself, and HTA 0.5.0 fails on it: TypeError, invalid value for dtype int8
HTA_PACKAGES = ["HolisticTraceAnalysis", "pandas<3"]
HTA_ENV = {"HTA_DISABLE_NS_ROUNDING": "1"}  # by default it cuts times to whole microseconds: 2 % off on the A100 trace
TRACELENS = (
    "not measured: AMD-AGI/TraceLens is on no package index (the package of that name on PyPI is another project), "
    "and its repository could not be reached"
)


def hta_python(folder: Path) -> Path:
    """The interpreter of HTA's venv, made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} with {', '.join(HTA_PACKAGES)}", flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *HTA_PACKAGES], check=True, timeout=TIMEOUT_S)
    return python


def hta_versions(python: Path) -> dict[str, str]:
    """What the venv holds."""
    code = (
        "import json,importlib.metadata as m;"
        "print(json.dumps({p: m.version(p) for p in ('HolisticTraceAnalysis','pandas','numpy')}))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def programs(python: Path, traces: TraceSet) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command and environment of each program for a set."""
    folder = str(traces.folder)
    verb = [str(Path(sys.executable).with_name("allranks")), "trace", folder]
    return {
        "allranks trace": (verb, {}),
        "analyse": ([sys.executable, str(PEERS / "ours.py"), folder], {}),
        "hta": ([str(python), str(PEERS / "peer_hta.py"), folder], HTA_ENV),
    }


def take_turns(commands: dict[str, tuple[list[str], dict[str, str]]], repeats: int) -> dict[str, list[Measured]]:
    """Each program once that does not count (files come from the disk, code is compiled), then as often as asked, in an
    order that changes."""
    names = list(commands)
    for command, env in commands.values():
        measure(command, TIMEOUT_S, env)
    taken: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(repeats):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            command, env = commands[name]
            taken[name].append(measure(command, TIMEOUT_S, env))
    return taken


def answer(measured: Measured) -> dict[str, Any]:
    """What a program printed, or how it failed."""
    if measured.code:
        return {"failed": (measured.stderr.strip().splitlines() or ["no message"])[-1][:200], "ranks": {}}
    try:
        return json.loads(measured.stdout)
    except ValueError:
        return {"ranks": {}}


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def cost(taken: list[Measured]) -> dict[str, Any]:
    """Wall and CPU seconds, import and work apart where the program tells, and memory."""
    told = [a for m in taken if "import_s" in (a := answer(m))]
    apart = {key: spread([a[key] for a in told]) for key in ("import_s", "work_s")} if told else {}
    return {
        "wall_s": spread([m.wall_s for m in taken]),
        "cpu_s": spread([m.cpu_s for m in taken]),
        **apart,
        "peak_bytes": spread([float(m.peak_bytes) for m in taken]),
        "exit_codes": sorted({m.code for m in taken}),
    }


def compare(
    traces: TraceSet, ours: dict[str, Any], hta: dict[str, Any], reference: dict[str, Any]
) -> list[dict[str, Any]]:
    """Each figure of a rank that both read, and that differs by more than 0.1 %, with what a third opinion says."""
    differences = []
    for rank, mine in ours["ranks"].items():
        if "compute_us" not in hta["ranks"].get(rank, {}):
            continue  # HTA has no figures of this rank: nothing to compare
        third = reference["ranks"].get(rank) or {}
        for key in ("compute_us", "non_compute_us", "overlap_percent"):
            a, b = mine.get(key), hta["ranks"].get(rank, {}).get(key)
            if equal(key, a, b):
                continue
            opinions = {place: (third.get(place) or {}).get(key) for place in ("whole", "steps")}
            agrees = {
                name: any(equal(key, value, opinion) for opinion in opinions.values())
                for name, value in (("ours", a), ("hta", b))
            }
            row = {"set": traces.name, "rank": rank, "figure": key, "ours": a, "hta": b}
            differences.append({**row, "reference": opinions, "agrees_with_reference": agrees})
    return differences


def equal(key: str, a: float | None, b: float | None) -> bool:
    """Within 0.1 %; the overlap within the two digits that HTA prints."""
    if a is None or b is None:
        return a is b
    slack = 0.0051 if key == "overlap_percent" else 0.0
    return abs(a - b) <= FIGURES * max(abs(a), abs(b)) + slack


def set_row(traces: TraceSet, python: Path, repeats: int) -> dict[str, Any]:
    """One set: cost of all programs, ratios within a repeat, and differences."""
    taken = take_turns(programs(python, traces), repeats)
    answers = {name: answer(found[-1]) for name, found in taken.items()}
    third = answer(measure([sys.executable, str(PEERS / "reference.py"), str(traces.folder)], TIMEOUT_S))
    rows = {name: cost(found) for name, found in taken.items()}

    def ratio(program: str, field: str) -> dict[str, float]:
        return spread(
            [getattr(a, field) / getattr(b, field) for a, b in zip(taken[program], taken["hta"], strict=True)]
        )

    hta = answers["hta"]
    row = {
        "name": traces.name,
        "ranks": traces.ranks,
        "bytes": traces.bytes,
        "unpacked_bytes": traces.unpacked_bytes,
        "programs": rows,
        "hta_reads_it": bool(hta["ranks"]) and all("compute_us" in figures for figures in hta["ranks"].values()),
        "hta_errors": hta.get("errors") or hta.get("failed"),
        "ours_failed": answers["analyse"].get("failed"),
        "hta_time_over_ours": {
            p: {k: 1 / v for k, v in ratio(p, "wall_s").items()} for p in ("allranks trace", "analyse")
        },
        "our_memory_over_hta": {p: ratio(p, "peak_bytes") for p in ("allranks trace", "analyse")},
        "differences": compare(traces, answers["analyse"], hta, third),
    }
    times, memory = row["hta_time_over_ours"], row["our_memory_over_hta"]
    print(
        f"{traces.name:32} {traces.bytes / 2**20:7.2f} MiB  verb {rows['allranks trace']['wall_s']['median']:6.3f} s, analyse "
        f"{rows['analyse']['wall_s']['median']:6.3f} s, HTA {rows['hta']['wall_s']['median']:6.3f} s: "
        f"x{times['allranks trace']['median']:.1f} and x{times['analyse']['median']:.1f} faster, "
        f"memory {memory['allranks trace']['median']:.2f} and {memory['analyse']['median']:.2f} of HTA's, "
        f"{len(row['differences'])} figures differ",
        flush=True,
    )
    return row


def wrong_row(traces: TraceSet, python: Path) -> dict[str, Any]:
    """What both make of a trace whose answer is known."""
    assert traces.truth is not None
    truth = traces.truth
    ours = answer(measure([sys.executable, str(PEERS / "ours.py"), str(traces.folder)], TIMEOUT_S))
    hta = answer(measure([str(python), str(PEERS / "peer_hta.py"), str(traces.folder)], TIMEOUT_S, HTA_ENV))
    rank = truth.ranks[0]
    overlap = 100 * truth.total(rank, "overlapped_comm") / truth.total(rank, "comm")
    late = max(truth.ranks, key=lambda r: sum(max(c.waits.values()) for c in truth.collectives if c.last_rank == r))
    keys = ("compute_us", "overlap_percent")
    return {
        "name": traces.name,
        "truth": {
            "compute_us": truth.total(rank, "compute"),
            "overlap_percent": overlap,
            "straggler": late if len(truth.ranks) > 1 else None,
        },
        "ours": {k: ours["ranks"].get(str(rank), {}).get(k) for k in keys}
        | {"straggler": ours.get("stragglers"), "failed": ours.get("failed")},
        "hta": {k: hta["ranks"].get(str(rank), {}).get(k) for k in keys}
        | {"straggler": hta.get("stragglers"), "errors": hta.get("errors")},
    }


def growth(work: Path, python: Path, most: int, hta_most: int, repeats: int) -> list[dict[str, Any]]:
    """The same trace for ever more ranks: bytes, time, memory."""
    rows = []
    ranks = 1
    while ranks <= most:
        traces = generated_set(work, ranks, f"growth_{ranks}")
        commands = programs(python, traces)
        commands = {
            name: c for name, c in commands.items() if name == "analyse" or (name == "hta" and ranks <= hta_most)
        }
        taken = take_turns(commands, repeats)
        rows.append(
            {"ranks": ranks, "bytes": traces.bytes, "programs": {name: cost(found) for name, found in taken.items()}}
        )
        ours = rows[-1]["programs"]["analyse"]
        print(
            f"{ranks:3} ranks, {traces.bytes / 2**20:7.2f} MiB: {ours['wall_s']['median']:.3f} s, "
            f"{ours['peak_bytes']['median'] / 2**20:.0f} MiB",
            flush=True,
        )
        for path in traces.folder.iterdir():
            path.unlink()
        ranks *= 2
    return rows


def verdict(sets: list[dict[str, Any]]) -> list[str]:
    """What falls short of the aims, in words."""
    short = []
    for row in sets:
        if row["ours_failed"]:
            short.append(f"{row['name']}: ours failed: {row['ours_failed']}")
        if row["programs"]["allranks trace"]["exit_codes"] != [0]:
            short.append(f"{row['name']}: the verb ended with {row['programs']['allranks trace']['exit_codes']}")
        if not row["hta_reads_it"]:
            continue
        memory = row["our_memory_over_hta"]["analyse"]["median"]
        judged = ("analyse", "allranks trace") if row["unpacked_bytes"] > VERB_BYTES else ("analyse",)
        for program in judged:
            times = row["hta_time_over_ours"][program]["median"]
            if times < FASTER:
                short.append(f"{row['name']}: {program} {times:.1f} times faster, not {FASTER:.0f}")
        if memory > MEMORY:
            short.append(f"{row['name']}: {memory:.2f} of its memory, not {MEMORY}")
        short += [
            f"{row['name']}: rank {d['rank']}, {d['figure']}: ours {d['ours']}, HTA {d['hta']}, reference {d['reference']}"
            for d in row["differences"]
            if d["agrees_with_reference"]["hta"] or not d["agrees_with_reference"]["ours"]
        ]
    return short


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "data" / "traces")
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "allranks-benchmark-hta")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most-ranks", type=int, default=64)
    parser.add_argument("--hta-most-ranks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    python = hta_python(args.venv)
    clock = machine.CpuClock.now()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        sets = [*real_sets(args.traces, work), own_gloo_set(work), generated_set(work, 8)]
        rows = [set_row(traces, python, args.repeats) for traces in sets]
        (work / "wrong").mkdir()
        wrong = [wrong_row(traces, python) for traces in wrong_sets(work / "wrong")]
        grown = growth(work, python, args.most_ranks, args.hta_most_ranks, max(args.repeats // 2, 1))
    short = verdict(rows)
    print("\n".join(["", "falls short:" if short else "all aims are met", *short]))
    if args.json:
        result = {
            "aims": {"times_faster": FASTER, "memory_share": MEMORY, "figures": FIGURES},
            "sets": rows,
            "known_answers": wrong,
            "growth": grown,
            "falls_short": short,
            "peers": {"hta": hta_versions(python) | {"environment": HTA_ENV}, "tracelens": TRACELENS},
            "disturbed": clock.disturbance(),
            "machine": machine.facts(),
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(short))


if __name__ == "__main__":
    raise SystemExit(main())
