"""Write docs/strategies: a page and a timeline picture for each strategy, from its record (`spec/strategies/`) and its class.

python scripts/make_strategy_pages.py
"""

# ruff: noqa: E501 - long lines of Markdown and SVG

from __future__ import annotations

import ast
from pathlib import Path

from allranks.spec.strategies import BUILT_IN
from allranks.spec.strategies.base import Bar, StrategyInfo, StrategyPage

REPO = Path(__file__).resolve().parents[1]
DOCS = REPO / "docs" / "strategies"
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


def page_of(name: str) -> StrategyPage:
    """Return what the record of a strategy says for its page."""
    page = BUILT_IN[name].page
    if page is None:
        raise SystemExit(f"the StrategyInfo of {name} has no page")
    return page


def implementation(info: StrategyInfo) -> tuple[str, str, str]:
    """Return file, class and the first line of the class's docstring; read without importing torch."""
    module, _, name = info.target.partition(":")
    file = f"src/{module.replace('.', '/')}.py"
    found = [n for n in ast.parse((REPO / file).read_text()).body if isinstance(n, ast.ClassDef) and n.name == name]
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
    page = page_of(name)
    left, width, x = 118, 620, lambda v: 118 + 6.2 * v
    rows: list[tuple[str, int, tuple[Bar, ...]]] = [
        ("compute", 34, page.compute),
        ("communication", 72, page.communication),
    ]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 150" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>One optimizer step under {name}</title>",
        '<rect width="760" height="150" rx="8" fill="#f4f5f7"/>',
    ]
    for label, y, bars in rows:
        parts.append(f'<text x="16" y="{y + 18}" fill="#33363d">{label}</text>')
        parts.append(f'<line x1="{left}" y1="{y + 26}" x2="{left + width}" y2="{y + 26}" stroke="#d5d8de"/>')
        for kind, start, stop in bars:
            w = 6.2 * (stop - start)
            parts.append(
                f'<rect x="{x(start):.1f}" y="{y}" width="{w - 1:.1f}" height="26" rx="3" fill="{COLOURS[kind]}"><title>{kind}</title></rect>'
            )
            if w > 72 and kind != "wait":
                parts.append(
                    f'<text x="{x(start) + w / 2:.1f}" y="{y + 18}" text-anchor="middle" fill="#fff" font-size="12">{kind}</text>'
                )
    used = list(dict.fromkeys(k for _, _, bars in rows for k, _, _ in bars))
    at = left
    for kind in used:
        parts.append(
            f'<rect x="{at}" y="119" width="12" height="12" rx="2" fill="{COLOURS[kind]}"/><text x="{at + 17}" y="130" fill="#33363d">{kind}</text>'
        )
        at += 34 + 7.4 * len(kind)
    parts.append('<text x="16" y="130" fill="#6a6f7a">time →</text></svg>')
    return "\n".join(parts) + "\n"


def text(name: str) -> str:
    """Return the page."""
    info, page = BUILT_IN[name], page_of(name)
    file, class_name, said = implementation(info)
    return f"""# `{name}`

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

P: parameters; T: trained ones, n of them tensors, of g bytes each; A: micro-steps; W: ranks. The picture shows the order of operations, not measured
times. [All strategies](README.md)
"""


def _overlap(page: StrategyPage) -> str:
    """Return whether the picture shows communication during computation."""
    computing = [bar for bar in page.compute if bar[0] != "wait"]
    hidden = any(a < stop and start < b for _, start, stop in page.communication for _, a, b in computing)
    return "yes" if hidden else "no"


def readme() -> str:
    """Return the index page."""
    pages = {name: page_of(name) for name in BUILT_IN}
    lines = [
        f"| [`{name}`]({name}.md) | {p.new} | {p.bytes} | {_overlap(p)} | {p.memory} | {p.ratio} |"
        for name, p in pages.items()
    ]
    return (
        """# Strategies

Each strategy is a short class in a file of its family below `src/allranks/train/strategies/`, with the interface `Strategy` (`base.py`); those of DeepSpeed and
Hugging Face's Trainer are in `src/allranks/train/engines/`. The spec selects a strategy by name:
`strategy: {name: zero2}`. Each hand-written strategy improves one thing over the previous one; torch's equivalents are listed, too.

| strategy | what is new | bytes per step, and their collectives | overlaps with computation | memory per rank | at two ranks |
|---|---|---|---|---|---|
"""
        + "\n".join(lines)
        + """

P: parameters; T: trained ones of g bytes; A: micro-steps; W: ranks. On a ring a rank sends 2(W-1)/W of an all-reduce's
bytes, (W-1)/W of a reduce-scatter's or all-gather's.

**Choosing.** If the model with gradients and moments fits, use `pytorch_ddp`. If only the moments do not fit, use `zero1` or `zero2`; with gradient accumulation `zero1` sends
less. If the weights do not fit, use `zero3` or `pytorch_zero3`. With LoRA few parameters are trained: sharding gradients and moments saves
little, only sharding the weights matters. `allranks compare SPEC` measures it for your model on your machines; see [compare](../compare.md).

**Equivalence to one process.** Each strategy is tested against one process that processes the ranks' micro-batches in order, with tied, frozen, unused and
uneven parameters, LoRA, accumulation and bfloat16, on 2, 3 and 4 ranks. On two ranks without accumulation and clipping the weights are bitwise equal, because addition of
two terms is commutative and division by two is exact. In all other cases sums are rounded in another order; the difference is below 0.002 of the change made by
training (float32; AdamW takes full steps even for gradients that are rounding noise).

**Custom strategies.** A package can provide a strategy with an entry point of the group `allranks.strategies`:

    [project.entry-points."allranks.strategies"]
    mine = "my_strategies:MINE"

`MINE` is a `StrategyInfo` (`allranks.spec.strategies.base`): the class as `module:class`, a summary, options with their defaults, and the memory layout if `plan` should
estimate it. The class is a subclass of `LoopStrategy` (`allranks.train.strategies.base`). The module of `MINE` must not import torch, because `plan` imports it on machines without torch.
The package must also be installed in the Python of the ranks. `allranks compare` measures the strategy and compares its weights with those of one process. Built-in
names cannot be replaced.
"""
    )


def main() -> None:
    (DOCS / "img").mkdir(parents=True, exist_ok=True)
    for name in BUILT_IN:
        (DOCS / f"{name}.md").write_text(text(name))
        (DOCS / "img" / f"{name}.svg").write_text(picture(name))
    (DOCS / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
