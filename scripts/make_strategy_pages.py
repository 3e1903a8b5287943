"""Write docs/strategies: a page and a timeline picture for each strategy, from one description each.

python scripts/make_strategy_pages.py
"""

# ruff: noqa: E501 - a table of words

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from allranks.spec.strategies import strategy_info

DOCS = Path(__file__).resolve().parents[1] / "docs" / "strategies"
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
Bars = list[tuple[str, float, float]]


def code_of(name: str) -> str:
    """Return the path of a strategy's file below `allranks.train`."""
    return strategy_info(name).target.partition(":")[0].removeprefix("allranks.train.").replace(".", "/") + ".py"


@dataclass(frozen=True)
class Page:
    """Description of one strategy: text, formulas, and the timeline of a step."""

    name: str
    idea: str
    fixes: str
    bytes: str
    memory: str
    ratio: str
    unused: str
    compute: Bars
    comm: Bars = field(default_factory=list)
    options: str = "none"
    new: str = ""
    code: str = ""  # if it is not a file of strategies/


F, B = ("forward", 0, 20), ("backward", 20, 60)
ZEROS = "A missing gradient counts as zeros on that rank. If it is missing on all ranks, the optimizer gets a gradient of zeros."
ADAPTERS = (
    "`find_unused_parameters`, `adapters` (auto): ignored keeps adapters whole on every rank (one flat all-reduce of their gradients per step, "
    "no collective to save them), sharded shards them like other weights, auto keeps them whole if four times their bytes are at most 64 MiB or a "
    "tenth of the rank's share of the frozen weights, and reports the choice; `offload` (none): optimizer keeps moments on the host and updates there "
    "(each step copies this rank's gradients to the host and its new weights back), all also keeps the sharded weights there, so that a block's shard is "
    "copied to the device whenever it is gathered; whole adapters stay on the device"
)
OFFLOAD = "`offload` (none): optimizer keeps moments on the host and updates there; each step copies this rank's gradients to the host and its new weights back"
OPTION = "With `find_unused_parameters: true`; without it torch raises an error."
NONE_MISSING = "With `find_unused_parameters: true`, as zeros and in the same order on all ranks; without it the run ends with an error that names the parameter."
DEEPSPEED = "`config` (none): a JSON file, or its content; `config_from` (none): set by allranks, the file from which `config` was read; `find_unused_parameters` (false)"
DATA = "4P + 12T: weights, gradients, two moments"

PAGES = [
    Page("single", "One process, without communication.", "Nothing; it is the reference for all other strategies.", "none", DATA, "1",
         "Not changed by the optimizer.", [F, B, ("optimizer", 60, 68)], new="the reference"),
    Page("simple_ddp", "Every rank trains on its own rows. After each backward pass, every gradient is averaged over the ranks.",
         "`single` uses only one process.", "A T g, in n A all-reduces after backward", DATA, "1", ZEROS,
         [F, B, ("wait", 60, 92), ("optimizer", 92, 100)], [("all-reduce", 60 + i * 4, 63.2 + i * 4) for i in range(8)], new="one all-reduce per parameter"),
    Page("simple_ddp_ga", "Like `simple_ddp`, but it communicates only after the last micro-step: gradients of the others are accumulated on each rank.",
         "`simple_ddp` communicates in every micro-step, although only the last one needs it.", "T g, in n all-reduces after the last backward", DATA, "1", ZEROS,
         [("forward", 0, 10), ("backward", 10, 30), ("forward", 30, 40), ("backward", 40, 60), ("wait", 60, 92), ("optimizer", 92, 100)],
         [("all-reduce", 60 + i * 4, 63.2 + i * 4) for i in range(8)], new="once per optimizer step"),
    Page("simple_ddp_hook", "A hook all-reduces each gradient as soon as it is ready, and waits for it. The order is always from the last parameter to the first, "
         "so that ranks whose gradients are ready in different orders reduce the same ones together.",
         "`simple_ddp_ga` starts to communicate only after backward.", "T g, in n all-reduces within backward", DATA, "1", ZEROS,
         [F, *[(k, 20 + i * 9 + a, 20 + i * 9 + b) for i in range(8) for k, a, b in (("backward", 0, 5), ("wait", 5, 9))], ("optimizer", 92, 100)],
         [("all-reduce", 25 + i * 9, 29 + i * 9) for i in range(8)], new="within backward"),
    Page("simple_ddp_async", "The hook starts an asynchronous all-reduce; the update waits for all of them.",
         "`simple_ddp_hook` blocks computation during communication.", "T g, in n all-reduces started within backward", DATA, "1", ZEROS,
         [F, B, ("wait", 60, 66), ("optimizer", 66, 74)], [("all-reduce", 25 + i * 5, 29 + i * 5) for i in range(8)], new="without waiting"),
    Page("bucket_ddp_async", "Gradients are grouped in buckets, in a fixed order from the last parameter to the first (checked to be equal on all ranks). "
         "A full bucket is reduced while backward continues. Gradients are views of the buckets, so nothing is copied back.",
         "`simple_ddp_async` sends hundreds of small messages, each with its own latency.", "T g, in about T g / 25 MB all-reduces started within backward", DATA, "1",
         ZEROS, [F, B, ("wait", 60, 63), ("optimizer", 63, 71)], [("all-reduce", 33, 42), ("all-reduce", 44, 53), ("all-reduce", 55, 63)],
         "`bucket_mb` (25)", "few large messages"),
    Page("pytorch_ddp", "torch's DistributedDataParallel. Its buckets follow the order in which gradients were ready in the first step.",
         "The fixed order of `bucket_ddp_async` may differ from the order of readiness.", "T g, in about T g / 25 MB all-reduces started within backward", DATA, "1", OPTION,
         [F, B, ("wait", 60, 63), ("optimizer", 63, 71)], [("all-reduce", 30, 39), ("all-reduce", 42, 51), ("all-reduce", 54, 63)],
         "`bucket_mb` (25), `find_unused_parameters`, `static_graph`", "buckets by readiness"),
    Page("zero1", "Each rank updates an exactly equal part of the weights and keeps moments only for that part; then the parts are gathered.",
         "In data parallelism every rank keeps the same moments and makes the same update.", "2 T g: all-reduces in backward, all-gathers in the step",
         "4P + 4T + 8T/W", "3/4", ZEROS, [F, B, ("wait", 60, 63), ("optimizer", 63, 67), ("wait", 67, 77)],
         [("all-reduce", 33, 42), ("all-reduce", 44, 53), ("all-reduce", 55, 63), ("all-gather", 67, 77)], f"`bucket_mb` (25); {OFFLOAD}", "sharded moments"),
    Page("zero2", "Gradients are reduced to the rank that needs them: one reduce-scatter per bucket, after which each rank keeps only its part.",
         "`zero1` reduces full gradients on every rank, although each rank uses only a part.", "(A + 1) T g: reduce-scatters in each backward, all-gathers in the step",
         "4P + 12T/W, and up to three buckets in flight", "5/8", ZEROS, [F, B, ("wait", 60, 62), ("optimizer", 62, 66), ("wait", 66, 76)],
         [("reduce-scatter", 33, 38), ("reduce-scatter", 44, 49), ("reduce-scatter", 55, 62), ("all-gather", 66, 76)], f"`bucket_mb` (25); {OFFLOAD}", "sharded gradients"),
    Page("zero3", "Weights are sharded, too. A block's weights are gathered while the block before it computes, and freed after use; the same in backward. "
         "Weights outside of blocks (embeddings, head) stay gathered from forward to the end of backward.",
         "`zero2` keeps all weights on all ranks. Gathering the full model before forward would not reduce the peak.",
         "A (2 P + T) g, nearly: all-gathers in forward and backward, reduce-scatters in backward", "(4P + 12T)/W, and two or three gathered blocks", "1/2", ZEROS,
         [("wait", 0, 5), ("forward", 5, 25), ("wait", 25, 30), ("backward", 30, 72), ("optimizer", 72, 76)],
         [("all-gather", i, i + 4) for i in (0, 6, 12, 18)] + [("all-gather", i, i + 4) for i in (26, 33, 44, 55)] + [("reduce-scatter", i, i + 4) for i in (39, 50, 61, 68)],
         OFFLOAD, "sharded weights, block by block"),
    Page("pytorch_zero1", "torch's DistributedDataParallel with ZeroRedundancyOptimizer: each parameter is updated by one rank and then broadcast.",
         "In `pytorch_ddp` every rank keeps the same moments.", "2 T g: all-reduces in backward, n broadcasts in the step", "4P + 4T + about 8T/W (parts differ in size)",
         "3/4", OPTION, [F, B, ("wait", 60, 63), ("optimizer", 63, 67), ("wait", 67, 83)],
         [("all-reduce", 30, 39), ("all-reduce", 42, 51), ("all-reduce", 54, 63)] + [("broadcast", 67 + i * 2, 68.6 + i * 2) for i in range(8)],
         "`bucket_mb` (25), `find_unused_parameters`", "torch's `zero1`"),
    Page("pytorch_zero2", "torch's FSDP2 (`fully_shard` per block) that keeps gathered weights until backward has used them.",
         "`pytorch_zero1` keeps full gradients.", "A (P + T) g: all-gathers in forward, reduce-scatters in backward", "(4P + 12T)/W between steps; all weights between forward and backward",
         "1/2", "With `find_unused_parameters: true`, which adds zeros to each block's output; without it, ranks with different unused parameters would reduce different ones.",
         [("wait", 0, 5), ("forward", 5, 25), ("backward", 25, 67), ("optimizer", 67, 71)],
         [("all-gather", i, i + 4) for i in (0, 6, 12, 18)] + [("reduce-scatter", i, i + 4) for i in (35, 45, 55, 63)], ADAPTERS, "torch's `zero2`, weights sharded between steps"),
    Page("pytorch_zero3", "torch's FSDP2 (`fully_shard` per block) that frees a block after its forward and gathers it again for its backward.",
         "`pytorch_zero2` keeps all weights gathered between forward and backward.", "A (2 P + T) g: all-gathers in forward and backward, reduce-scatters in backward",
         "(4P + 12T)/W, and two or three gathered blocks", "1/2", "As `pytorch_zero2`.",
         [("wait", 0, 5), ("forward", 5, 25), ("wait", 25, 30), ("backward", 30, 72), ("optimizer", 72, 76)],
         [("all-gather", i, i + 4) for i in (0, 6, 12, 18)] + [("all-gather", i, i + 4) for i in (26, 33, 44, 55)] + [("reduce-scatter", i, i + 4) for i in (39, 50, 61, 68)],
         ADAPTERS, "torch's `zero3`"),
    Page("deepspeed_zero1", "DeepSpeed's engine, stage 1. Its JSON is filled in from the spec and checked against it; see [DeepSpeed](../deepspeed.md).",
         "Nothing; the method of `zero1` with DeepSpeed's own configuration.", "2 T g: all-reduces after the last backward, one all-gather per parameter group in the step",
         "4P + 4T + 12T/W; at the update 4P + 16T/W (a float32 copy of the rank's part of the weights)", "3/4", NONE_MISSING, [F, B, ("wait", 60, 68), ("optimizer", 68, 74), ("wait", 74, 84)],
         [("all-reduce", 60, 68), ("all-gather", 74, 84)], DEEPSPEED, "DeepSpeed's stage 1"),
    Page("deepspeed_zero2", "DeepSpeed's engine, stage 2.", "`deepspeed_zero1` keeps full gradients until the last micro-step.",
         "(A + 1) T g: all-reduces after each backward, one all-gather per parameter group in the step", "4P + 16T/W, and a bucket of gradients", "3/4", NONE_MISSING,
         [F, B, ("wait", 60, 68), ("optimizer", 68, 74), ("wait", 74, 84)], [("all-reduce", 60, 68), ("all-gather", 74, 84)], DEEPSPEED, "DeepSpeed's stage 2"),
    Page("deepspeed_zero3", "DeepSpeed's engine, stage 3: sharded weights, gathered module by module. Tensors with fewer than 100,000 elements are not sharded, and weights gathered "
         "in forward are kept until backward while fewer than 10^9 elements are gathered; both limits are keys of its JSON.",
         "`deepspeed_zero2` keeps all weights on all ranks.", "A (2 P + T) g above those limits: all-gathers in forward and backward, reduce-scatters after backward",
         "(4P + 16T)/W, and the gathered weights of the two limits", "5/8", NONE_MISSING, [("wait", 0, 5), ("forward", 5, 25), ("wait", 25, 30), ("backward", 30, 72), ("wait", 72, 78), ("optimizer", 78, 82)],
         [("all-gather", i, i + 4) for i in (0, 6, 12, 18)] + [("all-gather", i, i + 4) for i in (26, 33, 44, 55)] + [("reduce-scatter", 72, 78)], DEEPSPEED, "DeepSpeed's stage 3"),
    Page("hf_trainer", "Hugging Face's Trainer runs the steps in place of this project's loop; its Accelerate wraps the model in torch's "
         "DistributedDataParallel. Data, loss, learning rates, records, evaluation, checkpoints and proofs are those of every strategy; see [HF Trainer](../hf_trainer.md).",
         "Nothing; it compares the Trainer with other strategies on equal work, and refuses a Trainer whose ranks train independently.",
         "T g, in about T g / 25 MB all-reduces started within backward", "4P + 16T: as `pytorch_ddp`, and buckets beside the gradients", "5/4", OPTION,
         [F, B, ("wait", 60, 63), ("optimizer", 63, 73)], [("all-reduce", 30, 39), ("all-reduce", 42, 51), ("all-reduce", 54, 63)],
         "`find_unused_parameters` (false), `args` (none): more TrainingArguments", "the Trainer in place of the loop",
         "engines/hf_trainer.py"),
]  # fmt: skip


def picture(page: Page) -> str:
    """Return the timeline of a step of one rank: computation above, communication below."""
    left, width, x = 118, 620, lambda v: 118 + 6.2 * v
    rows = [("compute", 34, page.compute), ("communication", 72, page.comm)]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 150" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>One optimizer step under {page.name}</title>",
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


def text(page: Page) -> str:
    """Return the page."""
    return f"""# `{page.name}`

{page.idea}

![One optimizer step under {page.name}](img/{page.name}.svg)

| | |
|---|---|
| bytes per step, payload of one rank | {page.bytes} |
| memory per rank, float32 AdamW, bytes | {page.memory} |
| ratio to plain data parallelism at two ranks, all weights trained | {page.ratio} |
| what it improves | {page.fixes} |
| parameters without gradient | {page.unused} |
| options | {page.options} |

P: parameters; T: trained ones, n of them tensors, of g bytes each; A: micro-steps; W: ranks. The picture shows the order of operations, not measured
times. [All strategies](README.md); code: `src/allranks/train/{page.code or code_of(page.name)}`.
"""


def _overlap(page: Page) -> str:
    """Return whether the picture shows communication during computation."""
    computing = [bar for bar in page.compute if bar[0] != "wait"]
    hidden = any(a < stop and start < b for _, start, stop in page.comm for _, a, b in computing)
    return "yes" if hidden else "no"


def readme() -> str:
    """Return the index page."""
    lines = [
        f"| [`{p.name}`]({p.name}.md) | {p.new} | {p.bytes} | {_overlap(p)} | {p.memory} | {p.ratio} |" for p in PAGES
    ]
    return (
        """# Strategies

Each strategy is one short file below `src/allranks/train/strategies/` that implements the interface `Strategy` (`base.py`); those of DeepSpeed and
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
    for page in PAGES:
        (DOCS / f"{page.name}.md").write_text(text(page))
        (DOCS / "img" / f"{page.name}.svg").write_text(picture(page))
    (DOCS / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
