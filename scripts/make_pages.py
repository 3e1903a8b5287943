"""Write the generated parts of pages, the pictures of strategies and the schema of the spec, from the records.

``python scripts/make_pages.py [--check]``. A part stands in its page between ``<!-- generated: NAME -->`` and
``<!-- end -->``; `PARTS` has the function of each name. The rest of a page is written by hand. ``--check`` changes
nothing, names what is not up to date and ends with 1 if anything is; `make lint` runs it.

What was proved where (docs/proved.md): features and their test files are those of the table in tests/README.md. CPU and
cluster in a box: benchmarks/results/test_all.json, which `make test-all` writes. GPUs: benchmarks/results/gpu/*.json,
which `make gpu` writes; rehearsals do not count. A cell without a result says "not run".
"""

from __future__ import annotations

import ast
import json
import re
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from allranks.analysis.diagnose.known_failures import KNOWN_FAILURES, KnownFailure
from allranks.analysis.lint import TOPICS
from allranks.analysis.lint.rules import RULES, LintRule
from allranks.launch.restarts import ACTIONS, CAUSES
from allranks.spec import models
from allranks.spec.loader import json_schema
from allranks.spec.records import Record, RunSpec
from allranks.spec.strategies import BUILT_IN
from allranks.spec.strategies.base import StrategyInfo
from allranks.spec.validation import descriptions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PART = re.compile(r"(<!-- generated: (\w+) -->)(\n?).*?(<!-- end -->)", re.DOTALL)


# Failures

NODE_ID = re.compile(r"`(tests/[\w/]+\.py::[^`]+)`")


def failures() -> str:
    """Return the table of the forty failures."""
    sections = (ROOT / "docs" / "failures.md").read_text().split('<a id="failure-')[1:]
    tests = {int(text.partition('"')[0]): len(set(NODE_ID.findall(text.split("### Tests")[1]))) for text in sections}

    def row(failure: KnownFailure) -> str:
        number, count = failure.number, tests[failure.number]
        tested = f"{count} test{'s' * (count != 1)}, {failure.evidence}"
        return f"| {number} | [{failure.title}](#failure-{number}) | {failure.how} | {failure.where} | {tested} |"

    return "\n".join(["| # | failure | how | where | tested by |", "|---|---|---|---|---|", *map(row, KNOWN_FAILURES)])


# Rules of lint


def lint_rule(rule: LintRule) -> str:
    """Return what a rule reports, with a line that is reported and one that is not."""
    where = "" if len(rule.files) == 1 else ", also in environment files and specs"
    cure = f"\n\nFix: {rule.cure}" if rule.cure else ""
    example = f"```bash\n# reported\n{rule.bad}\n# not reported\n{rule.good}\n```"
    return f"### {rule.id}\n\n*{rule.severity}*{where}: {rule.why}\n\n{example}{cure}\n\nSource: {rule.source}\n"


def lint_rules() -> str:
    """Return all rules of lint, by topic."""
    parts = []
    for topic in TOPICS:
        parts.append(f"## {(topic.__doc__ or '').strip().rstrip('.')}\n")
        parts += [lint_rule(rule) for rule in RULES.values() if rule.checks[0].__module__ == topic.__name__]
    return "\n".join(parts)


# Models


def model_row(entry: models.Architecture) -> str:
    """Return the row of an architecture."""
    needs = [f"`model.attention: {entry.attention}`"] if entry.attention != "sdpa" else []
    if entry.task == "text" and not models.packs_rows(entry.model_type):
        needs.append("`data.packing: none`")
    targets = ", ".join(f"`{name}`" for name in entry.targets) if entry.targets else "every linear layer"
    return f"| `{entry.model_type}` | {entry.examples} | {', '.join(needs) or '-'} | {targets} |"


def model_table(task: str) -> str:
    """Return the table of one task."""
    rows = [model_row(entry) for entry in models.TYPES.tested if entry.task == task]
    return "\n".join(["| `model_type` | such as | settings that it needs | LoRA targets |", "|---|---|---|---|", *rows])


def adapter_limits() -> str:
    """Return the table of LoRA targets that do not work."""
    rows = [
        f"| `{kind}` | {', '.join(sorted(limit.refused))} | {', '.join(limit.works)} | {limit.why} |"
        for kind, limit in models.TYPES.adapter_limits.items()
    ]
    return "\n".join(["| `model_type` | refused | works | why |", "|---|---|---|---|", *rows])


# The spec


def unwrap(annotation: typing.Any) -> tuple[str, type[Record] | None]:
    """Return (type, record) of an annotation."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *metas = typing.get_args(annotation)
        name, record = unwrap(inner)
        words = [w for m in metas if isinstance(m, msgspec.Meta) for w in (m.extra_json_schema or {}).get("enum", [])]
        return " or ".join(f"`{word}`" for word in words) or name, record
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return "section", annotation
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{a}`" for a in args), None
    if args and origin in (list, dict):
        record = unwrap(args[0])[1]
        return "list" if record else f"{origin.__name__} of {' to '.join(unwrap(a)[0] for a in args)}", record
    if args:
        parts = [unwrap(a) for a in args if a is not type(None)]
        return " or ".join(name for name, _ in parts), next((record for _, record in parts if record), None)
    return getattr(annotation, "__name__", str(annotation)), None


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """Return the default value as YAML."""
    value = (
        field.default
        if field.default is not msgspec.NODEFAULT
        else (field.default_factory() if field.default_factory is not msgspec.NODEFAULT else "required")
    )
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def section(record: type[Record], path: str) -> str:
    """Return one section as a table, followed by its subsections."""
    hints = typing.get_type_hints(record, include_extras=True)
    rows, below = [], ""
    for field in msgspec.structs.fields(record):
        name, inner = unwrap(hints[field.name])
        if inner is not None:
            below += section(inner, f"{path}{field.encode_name}{'[]' if name == 'list' else ''}.")
            continue
        described = descriptions()[record.__name__, field.name]
        rows.append(f"| `{path}{field.encode_name}` | {name} | `{default_of(field)}` | {described} |")
    title = f"\n## {path.rstrip('.') or 'Top level'}\n\n{(record.__doc__ or '').strip().splitlines()[0]}\n\n"
    table = "| key | type | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    return title + table + below


def strategy_options() -> str:
    """Return the table of strategies with their options."""
    lines = [
        f"| `{name}` | {e.summary} | {', '.join(f'`{k}: {v}`' for k, v in e.options.items()).lower() or '-'} |"
        for name, e in BUILT_IN.items()
    ]
    return "\n".join(["| name | what | options and defaults |", "|---|---|---|", *lines])


# Strategies

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "optimizer": "#f2a541",
    "all-reduce": "#d1605e",
    "reduce-scatter": "#b279a2",
    "all-gather": "#8a6d3b",
    "broadcast": "#8a6d3b",
    "wait": "#c9ccd3",
}


class StrategyPage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of docs/strategies.yaml."""

    new: str
    idea: str
    improves: str
    bytes: str
    memory: str
    ratio: str
    unused: str
    compute: tuple[tuple[str, float, float], ...]
    communication: tuple[tuple[str, float, float], ...] = ()
    options: dict[str, str] = {}


PAGES = msgspec.convert(yaml.safe_load((ROOT / "docs" / "strategies.yaml").read_text()), dict[str, StrategyPage])


def implementation(info: StrategyInfo) -> tuple[str, str, str]:
    """Return file, class and the first line of the class's docstring; read without importing torch."""
    module, _, name = info.target.partition(":")
    file = f"src/{module.replace('.', '/')}.py"
    found = [n for n in ast.parse((ROOT / file).read_text()).body if isinstance(n, ast.ClassDef) and n.name == name]
    said = ast.get_docstring(found[0]) if found else None
    if not said:
        raise SystemExit(f"{file}: no class {name} with a docstring")
    return file, name, said.splitlines()[0]


def options_of(info: StrategyInfo, page: StrategyPage) -> str:
    """Return the options with their defaults and notes."""
    rows = []
    for name, default in info.options.items():
        shown = "none" if default is None else f"{default:g}" if isinstance(default, float) else str(default).lower()
        note = page.options.get(name)
        rows.append(f"`{name}` ({shown})" + (f": {note}" if note else ""))
    return "; ".join(rows) or "none"


def picture(name: str) -> str:
    """Return the timeline of a step of one rank: computation above, communication below."""
    page = PAGES[name]
    left, width, x = 118, 620, lambda v: 118 + 6.2 * v
    rows = [("compute", 34, page.compute), ("communication", 72, page.communication)]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 150" font-family="system-ui, sans-serif" '
        'font-size="13">',
        f"<title>One optimizer step under {name}</title>",
        '<rect width="760" height="150" rx="8" fill="#f4f5f7"/>',
    ]
    for label, y, bars in rows:
        parts.append(f'<text x="16" y="{y + 18}" fill="#33363d">{label}</text>')
        parts.append(f'<line x1="{left}" y1="{y + 26}" x2="{left + width}" y2="{y + 26}" stroke="#d5d8de"/>')
        for kind, start, stop in bars:
            w = 6.2 * (stop - start)
            parts.append(
                f'<rect x="{x(start):.1f}" y="{y}" width="{w - 1:.1f}" height="26" rx="3" fill="{COLOURS[kind]}">'
                f"<title>{kind}</title></rect>"
            )
            if w > 72 and kind != "wait":
                parts.append(
                    f'<text x="{x(start) + w / 2:.1f}" y="{y + 18}" text-anchor="middle" fill="#fff" '
                    f'font-size="12">{kind}</text>'
                )
    used = list(dict.fromkeys(k for _, _, bars in rows for k, _, _ in bars))
    at = left
    for kind in used:
        parts.append(
            f'<rect x="{at}" y="119" width="12" height="12" rx="2" fill="{COLOURS[kind]}"/>'
            f'<text x="{at + 17}" y="130" fill="#33363d">{kind}</text>'
        )
        at += 34 + 7.4 * len(kind)
    parts.append('<text x="16" y="130" fill="#6a6f7a">time →</text></svg>')
    return "\n".join(parts) + "\n"


def strategy_section(name: str) -> str:
    """Return the section of a strategy."""
    info, page = BUILT_IN[name], PAGES[name]
    file, class_name, said = implementation(info)
    return f"""## `{name}`

{page.idea}

![One optimizer step under {name}](img/{name}.svg)

| | |
|---|---|
| bytes per step, payload of one rank | {page.bytes} |
| memory per rank, float32 AdamW, bytes | {page.memory} |
| ratio to plain data parallelism at two ranks, all weights trained | {page.ratio} |
| what it improves | {page.improves} |
| parameters without gradient | {page.unused} |
| options | {options_of(info, page)} |
| code | `{class_name}` in `{file}`: {said} |
"""


def _overlap(page: StrategyPage) -> str:
    """Return whether the picture shows communication during computation."""
    computing = [bar for bar in page.compute if bar[0] != "wait"]
    hidden = any(a < stop and start < b for _, start, stop in page.communication for _, a, b in computing)
    return "yes" if hidden else "no"


def strategy_table() -> str:
    """Return the table of all strategies."""
    lines = [
        f"| [`{name}`](#{name}) | {p.new} | {p.bytes} | {_overlap(p)} | {p.memory} | {p.ratio} |"
        for name, p in ((name, PAGES[name]) for name in BUILT_IN)
    ]
    head = "| strategy | what is new | bytes per step, and their collectives | overlaps with computation "
    head += "| memory per rank | at two ranks |"
    return "\n".join([head, "|---|---|---|---|---|---|", *lines])


# What was proved where

NOT_RUN = "not run"
NO_END = "no end after"  # how a check begins its reason that its time limit ended
SEVERAL = "several"  # the check that needs more than one GPU

# Checks of `make gpu` that prove a feature on one GPU: names, or beginnings of names followed by a dot.
ON_A_GPU: dict[str, tuple[str, ...]] = {
    "Strategies give the same result": ("one_rank", "two_ranks", "demo"),
    "Checkpoints": ("resume", "stopped"),
    "A complete run": ("demo", "full_compiled", "full"),
    "Resume after a stop": ("resume", "stopped"),
    "Ends of a run": ("nan", "stopped"),
    "Loading of models": ("full", "plain"),
    "QLoRA": ("qlora", "quantized"),
    "8-bit products, choice of the attention kernel": (
        "products",
        "float8",
        "attention_rows",
        "attention_whole",
        "full_float8",
    ),
    "DeepSpeed": ("one_rank.one_rank_equals_plain_torch[deepspeed", "demo.deepspeed"),
    "Engine `hf_trainer`": ("one_rank.one_rank_equals_plain_torch[hf_trainer", "demo.hf_trainer"),
    "Comparison": ("sharing",),
    "Smoke tests": ("smoke",),
    "Recomputation, compiled blocks": ("compiled", "recomputed", "selective"),
    "Memory estimate": ("memory", "bench_memory"),
    "Hangs and stragglers": ("spin",),
    "Profile and traces": ("profiled", "profiled_compiled"),
    "Preflight on nodes": ("doctor",),
}
# What only a GPU can show, and no test of the table.
GPU_ONLY: dict[str, tuple[str, ...]] = {
    "No host synchronisation within a step": ("host_sync",),
    "Batches that are copied ahead": ("batches",),
    "Speed and MFU of LoRA, 8 layers of 7B": ("plain", "isolated", "compiled", "compiled_isolated", "recomputed"),
    "torch.compile": ("compiled", "compiled_isolated", "flex"),
    "A 7B model": ("full_compiled", "full"),
    "Unit tests with CUDA": ("unit",),
}
ON_SEVERAL = ("Strategies give the same result", "Comparison")


def features() -> dict[str, list[str]]:
    """Return the features of tests/README.md with their test files."""
    found = {}
    for line in (ROOT / "tests" / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        files = re.findall(
            r"`((?:dist|cluster|unit|reference|chaos|security)/test_\w+\.py)`", cells[1] if len(cells) > 2 else ""
        )
        if files:
            found[cells[0]] = files
    if unknown := (ON_A_GPU.keys() | set(ON_SEVERAL)) - found.keys():
        raise SystemExit(f"make_pages: tests/README.md has no feature {', '.join(sorted(unknown))}")
    return found


def parts_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of test_all.json, each with its own date; an older file is one part."""
    return list(record.get("parts", {}).values()) or [record]


def tested(record: Mapping[str, Any], files: list[str]) -> str:
    """Return the cell of some test files."""
    ran, bad, dates = [], [], []
    for part in parts_of(record):
        here = [f for f in files if f"tests/{f}" in part.get("files_s", {})]
        names = tuple("tests." + f.removesuffix(".py").replace("/", ".") + "::" for f in here)
        bad += (
            [
                n
                for n, status in part.get("not_passed", {}).items()
                if status in ("failure", "error") and n.startswith(names)
            ]
            if names
            else []
        )
        dates += [part["when"]] if here else []
        ran += here
    if not ran:
        return NOT_RUN
    return f"{f'{len(bad)} failed' if bad else 'passed'} {max(dates)}"


def matches(check: str, wanted: tuple[str, ...]) -> bool:
    """Return whether a check's name is one of these, or a case of one."""
    return any(check == w or check.startswith(f"{w}.") or ("." in w and check.startswith(w)) for w in wanted)


def on_gpus(records: list[dict[str, Any]], wanted: tuple[str, ...], *, several: bool) -> str:
    """Return the cell of some checks: by device, which of them passed, failed, were cut off, or never ran."""
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:  # oldest first: of each check, with all its cases, the newest results count
        if several and record["device"]["count"] < 2:
            continue
        for name in wanted:
            ran = [
                c | {"date": record["machine"]["date"][:10]}
                for stage in record["stages"].values()
                for check, c in stage["checks"].items()
                if matches(check, (name,)) and c["status"] != "skipped"
            ]
            if ran:
                results.setdefault(record["device"]["name"], {})[name] = ran
    cells = []
    for device, by_check in results.items():
        said = [f"{one_check(by_check[name])} (`{name.partition('[')[0]}`)" for name in wanted if name in by_check]
        missing = [f"`{name.partition('[')[0]}`" for name in wanted if name not in by_check]
        cells.append(", ".join([*said, *([f"not run: {' '.join(missing)}"] if missing else [])]) + f" on {device}")
    return "; ".join(cells) or NOT_RUN


def one_check(cases: list[dict[str, Any]]) -> str:
    """Return what the cases of one check ended with, and when."""
    failed = [c for c in cases if c["status"] == "failed"]
    date = max(c["date"] for c in cases)
    if failed and all(c["reason"].startswith(NO_END) for c in failed):
        return f"cut off {date}"
    return f"{len(failed)} of {len(cases)} failed {date}" if failed else f"passed {date}"


def proved_table(tests: Mapping[str, Any], records: list[dict[str, Any]]) -> str:
    """Return the table of all features."""
    lines = ["| feature | CPU | cluster in a box | one GPU | several GPUs |", "|---|---|---|---|---|"]
    for name, files in features().items():
        box = [f for f in files if f.startswith("cluster/")]
        cpu = tested(tests, [f for f in files if f not in box])
        one = on_gpus(records, ON_A_GPU.get(name, ()), several=False)
        many = on_gpus(records, (SEVERAL,), several=True) if name in ON_SEVERAL else NOT_RUN
        lines.append(f"| {name} | {cpu} | {tested(tests, box)} | {one} | {many} |")
    for name, checks in GPU_ONLY.items():
        lines.append(f"| {name} | - | - | {on_gpus(records, checks, several=False)} | {NOT_RUN} |")
    return "\n".join(lines) + "\n"


def figure(value: Any) -> str:
    """Return a figure of a check as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} {figure(v)}" for k, v in value.items()) + "}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value > 9999 else str(value)


def together(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the records of one device, oldest first, as one: of each check, with all its cases, the newest result."""
    stages: dict[str, dict[str, Any]] = {}
    for record in records:
        for name, found in record["stages"].items():
            into = stages.setdefault(name, {"finished": False, "seconds": 0.0, "checks": {}})
            again = {check.partition(".")[0] for check in found["checks"]}
            kept = {check: c for check, c in into["checks"].items() if check.partition(".")[0] not in again}
            into["checks"] = kept | found["checks"]
            into["seconds"] += found["seconds"]
            into["finished"] = into["finished"] or found["finished"]
    return {**records[-1], "stages": stages}


def device_page(record: Mapping[str, Any]) -> str:
    """Return the results of one record as Markdown."""
    device, versions = record["device"], record["versions"]
    commit, plus, changes = record["commit"].partition("+")
    head = f"{device['name']}, {record['machine']['date'][:10]}, commit {commit[:12]}{plus}{changes}"
    facts = ", ".join(f"{k} {v}" for k, v in {"driver": device.get("driver"), **versions}.items() if v)
    lines = [
        f"## {head}",
        "",
        *(["**Rehearsal on a CPU with tiny sizes; not a result of a GPU.**", ""] if record["rehearsal"] else []),
        f"{facts}; C compiler: {record['compiler'] or 'none'}.",
        "",
        *([record["note"], ""] if record.get("note") else []),
    ]
    for stage, found in record["stages"].items():
        checks = found["checks"].values()
        counts = ", ".join(
            f"{n} {s}" for s in ("passed", "failed", "skipped") if (n := sum(c["status"] == s for c in checks))
        )
        unfinished = "" if found["finished"] else ", not finished"
        lines += [f"### {stage}: {counts or 'no result'} in {found['seconds']:.0f} s{unfinished}", ""]
        lines += ["| check | result | s | limit | figures or reason |", "|---|---|---|---|---|"]
        for name, c in found["checks"].items():
            said = c["reason"] or ", ".join(f"{k} {figure(v)}" for k, v in c["figures"].items())
            text = " ".join(said.split())[:400].replace("|", "\\|").replace("<", "&lt;")
            lines.append(f"| `{name}` | {c['status']} | {c['seconds']:.1f} | {c['limit_s']:.0f} | {text} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def proved() -> str:
    """Return the table and the records of each device."""
    tests = json.loads((RESULTS / "test_all.json").read_text())
    every = [json.loads(p.read_text()) for p in sorted((RESULTS / "gpu").glob("*.json"))]
    records = sorted((r for r in every if not r["rehearsal"]), key=lambda r: r["machine"]["date"])
    devices: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        devices.setdefault(record["device"]["name"], []).append(record)
    pages = [device_page(together(of_one)) for of_one in devices.values()] or ["No record of a GPU yet.\n"]
    return proved_table(tests, records) + "\n" + "\n".join(pages)


# Benchmarks


def throughput() -> str:
    """Return the tables of train_throughput, and what was measured where."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.train_throughput.compare import tables

    path = RESULTS / "train_throughput.json"
    if not path.exists():
        return "Not measured yet."
    result = json.loads(path.read_text())
    settings, machine = result["settings"], result["machine"]
    repeats = f"{settings['repeats']} repeat{'s' if settings['repeats'] > 1 else ''}"
    disturbed = ", beside other programs" if settings["accept_disturbed"] else ""
    where = f"{machine['date'][:10]}, {machine['cores']} cores ({machine['cpu']}), "
    where += f"{repeats} of {settings['useful_tokens']:,} tokens{disturbed}"
    return f"`results/{path.name}`, {where}; median (range):\n\n{tables(result)}"


def restarts() -> str:
    """Return the rows of the table of causes."""
    rows = [f"| {cause} | {', '.join(f'`{n}`' for n in names)} | {ACTIONS[cause]} |" for cause, names in CAUSES.items()]
    return "\n".join(
        [
            "| cause | failure classes | what follows |",
            "|---|---|---|",
            *rows,
            f"| deterministic | all others | {ACTIONS['deterministic']} |",
        ]
    )


PARTS: dict[str, Callable[[], str]] = {
    "restarts": restarts,
    "failures": failures,
    "lint_rules": lint_rules,
    "models_text": lambda: model_table("text"),
    "models_classification": lambda: model_table("classification"),
    "encoder_decoders": lambda: ", ".join(sorted(models.TYPES.encoder_decoders)),
    "multimodal": lambda: ", ".join(sorted(models.TYPES.multimodal)),
    "state_across_rows": lambda: ", ".join(sorted(models.TYPES.state_across_rows)),
    "attention_across_rows": lambda: ", ".join(sorted(models.TYPES.attention_across_rows)),
    "adapter_limits": adapter_limits,
    "spec": lambda: section(RunSpec, ""),
    "strategy_options": strategy_options,
    "strategy_table": strategy_table,
    "strategies": lambda: "\n".join(map(strategy_section, BUILT_IN)),
    "proved": proved,
    "throughput": throughput,
}


def filled(page: str) -> str:
    """Return a page with its generated parts up to date; those on lines of their own stay so."""

    def part(match: re.Match[str]) -> str:
        begin, name, newline, end = match.groups()
        text = PARTS[name]().strip("\n")
        return f"{begin}\n{text}\n{end}" if newline else f"{begin}{text}{end}"

    return PART.sub(part, page)


def main() -> None:
    """Write or check all files."""
    pages = [
        p
        for p in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md")
        if PART.search(p.read_text())
    ]
    wanted = {page: filled(page.read_text()) for page in pages}
    wanted |= {ROOT / "docs" / "img" / f"{name}.svg": picture(name) for name in BUILT_IN}
    wanted[ROOT / "docs" / "allranks.schema.json"] = json.dumps(json_schema(), indent=1) + "\n"
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        raise SystemExit(f"make_pages: not up to date: {names}; run python scripts/make_pages.py" if stale else 0)
    for path in stale:
        path.write_text(wanted[path])


if __name__ == "__main__":
    main()
