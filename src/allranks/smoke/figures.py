"""The notes' figures beside ours, by one definition each. What is not comparable says why. Pure."""

from __future__ import annotations

import statistics

from allranks.smoke.evidence import Evidence
from allranks.smoke.records import Figure, FigureRow, SmokeTest


def rows_of(test: SmokeTest, e: Evidence) -> list[FigureRow]:
    """All figures of a test."""
    return [
        FigureRow(
            name=f.name,
            unit=f.unit,
            definition=f.definition,
            seed=f.seed,
            correct=f.correct,
            correction=f.correction,
            ours=f.measure(e),
            not_comparable=_why_not(f, test, e),
        )
        for f in test.figures
    ]


def _why_not(f: Figure, test: SmokeTest, e: Evidence) -> str:
    if f.seed is None:
        return "theirs is not given"
    reasons = []
    if "hardware" in f.depends and e.plan.device != "cuda":
        reasons.append("other hardware")
    if "size" in f.depends and test.parameters is not None and parameters(e) != test.parameters:
        reasons.append("another size of model")
    if "ranks" in f.depends and len(e.ranks) != test.nodes * test.ranks:
        reasons.append(f"{len(e.ranks)} ranks, theirs {test.nodes * test.ranks}")
    return "; ".join(reasons)


def parameters(e: Evidence) -> float | None:
    """All of the model."""
    return e.last("model").get(0, {}).get("parameters")


def global_batch(e: Evidence) -> float | None:
    """Rows of one optimizer step over all ranks."""
    return e.plan.batch.global_batch_size if e.plan.batch else None


def training_time(e: Evidence) -> float | None:
    """Seconds of all steps, the first among them."""
    return sum(e.step_times_s) or None


def steps_per_s(e: Evidence) -> float | None:
    """All steps by the seconds of all steps: warm-up counts, as the notes count."""
    seconds = training_time(e)
    return len(e.step_times_s) / seconds if seconds else None


def samples_per_s(e: Evidence) -> float | None:
    """Batch rows over all ranks a second."""
    rate, batch = steps_per_s(e), global_batch(e)
    return rate * batch if rate and batch else None


def warm_samples_per_s(e: Evidence) -> float | None:
    """Batch rows over all ranks by the median of the steps after the first five."""
    times, batch = e.step_times_s[5:], global_batch(e)
    return batch / statistics.median(times) if times and batch else None


def first_step(e: Evidence) -> float | None:
    """Seconds of the first step beyond the median one: compilation, first allocations, first connections."""
    times = e.step_times_s
    return max(0.0, times[0] - statistics.median(times[1:])) if len(times) > 2 else None


def engine_start(e: Evidence) -> float | None:
    """Seconds in which DeepSpeed was initialised, its operators built among them."""
    return e.last("engine").get(0, {}).get("initialize_s")


def last_loss(e: Evidence) -> float | None:
    """Of the last step, over all ranks."""
    return e.last("step").get(0, {}).get("loss")


def peak_gb(e: Evidence) -> float | None:
    """The most that torch had allocated on a rank's GPU, in 1e9 bytes; None on a CPU, whose peak counts libraries too."""
    if e.plan.device != "cuda":
        return None
    return max((s["peak_memory_bytes"] for steps in e.events("step").values() for s in steps), default=0) / 1e9 or None


def state_gb_a_rank(e: Evidence) -> float | None:
    """Optimizer state a rank writes, in 1e9 bytes: master weights and two moments in float32 with bfloat16 weights, else the moments."""
    ends = e.last("end")
    if not ends:
        return None
    each = 12 if e.plan.dtype == "bfloat16" else 8
    return max(end["state_elements"] for end in ends.values()) * each / 1e9


def wall_time(e: Evidence) -> float | None:
    """Seconds of training and what is around it, without starting the ranks: from the model being ready to the end."""
    phases = e.events("phase").get(0, [])
    begun = [p["time"] for p in phases if p["name"] == "train"]
    ended = [p["time"] for p in phases if p["name"] in ("save", "evaluate", "done")]
    return ended[0] - begun[0] if begun and ended else None


def padded_tokens_per_s_per_rank(e: Evidence) -> float | None:
    """steps x rows x max_length by the wall time: padding and warm-up count, as the notes count."""
    seconds, length = wall_time(e), e.spec.data.max_length if e.spec.data else 0
    rows = e.plan.batch.micro_batch_size * e.plan.batch.grad_accum if e.plan.batch else 0
    return len(e.step_times_s) * rows * length / seconds if seconds else None


def real_tokens_per_s(e: Evidence) -> float | None:
    """Tokens without padding over all ranks after warm-up (tokens_per_s of metrics.json)."""
    return e.metrics.get("tokens_per_s")


def eval_seconds(e: Evidence) -> float | None:
    """Of one evaluation."""
    return e.last("eval").get(0, {}).get("seconds")


def first_perplexity(e: Evidence) -> float | None:
    """Before the first step."""
    evals = e.events("eval").get(0, [])
    return evals[0].get("perplexity") if evals else None


def save_seconds(e: Evidence) -> float | None:
    """In which training stood still for a checkpoint."""
    return e.last("checkpoint").get(0, {}).get("seconds")


def epoch_seconds(e: Evidence) -> float | None:
    """Of showing every row once (epoch_s of metrics.json)."""
    return e.metrics.get("epoch_s")
