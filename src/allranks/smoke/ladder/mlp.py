"""Figures that the tests of a multilayer perceptron, 01 to 04, share."""

from __future__ import annotations

from allranks.smoke import figures as f
from allranks.smoke.records import Dependence, Figure

ALL: tuple[Dependence, ...] = ("hardware", "size", "ranks")


def parameters(seed: float) -> Figure:
    return Figure(
        name="parameters",
        unit="",
        definition="all weights and biases",
        seed=seed,
        measure=f.parameters,
        depends=("size",),
    )


def global_batch(seed: float) -> Figure:
    return Figure(
        name="global batch",
        unit="rows",
        definition="rows of a step over all ranks",
        seed=seed,
        measure=f.global_batch,
        depends=("ranks",),
    )


def samples(seed: float | None, correct: float | None = None, correction: str = "") -> Figure:
    return Figure(
        name="samples",
        unit="1/s",
        definition="batch rows over all ranks, by training time",
        seed=seed,
        correct=correct,
        correction=correction,
        measure=f.samples_per_s,
        depends=ALL,
    )


def last_loss(seed: float, remark: str = "", *, ranks: bool = True) -> Figure:
    return Figure(
        name="last loss",
        unit="",
        definition=f"mean squared error of step 100{remark}",
        seed=seed,
        measure=f.last_loss,
        depends=("size", "ranks") if ranks else ("size",),
    )


def peak_memory(seed: float, depends: tuple[Dependence, ...] = ALL, *, where: str = " on a rank") -> Figure:
    return Figure(
        name="peak GPU memory",
        unit="GB",
        definition=f"most that torch had allocated{where}",
        seed=seed,
        measure=f.peak_gb,
        depends=depends,
    )


def timing(
    seed_steps: float | None, seed_samples: float | None, *, seed_time: float | None = None
) -> tuple[Figure, ...]:
    """The figures of speed; samples only where the notes' own number is right."""
    found = [
        Figure(
            name="training time",
            unit="s",
            definition="all steps, the first among them",
            seed=seed_time,
            measure=f.training_time,
            depends=ALL,
        ),
        Figure(
            name="steps",
            unit="1/s",
            definition="steps by training time",
            seed=seed_steps,
            measure=f.steps_per_s,
            depends=ALL,
        ),
        samples(seed_samples),
        Figure(
            name="samples after warm-up",
            unit="1/s",
            definition="batch rows over all ranks, by the median step after five",
            seed=None,
            measure=f.warm_samples_per_s,
            depends=ALL,
        ),
        Figure(
            name="first step beyond the median",
            unit="s",
            definition="compilation, first allocations and connections",
            seed=None,
            measure=f.first_step,
            depends=ALL,
        ),
    ]
    return tuple(found)
