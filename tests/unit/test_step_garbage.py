"""Python's garbage is collected at chosen steps, and between them only during callbacks."""

import gc
from collections.abc import Iterator

import pytest

from allranks.train.step_garbage import STEPS_BETWEEN, StepGarbage


@pytest.fixture
def collected() -> Iterator[list[int]]:
    """The generations that the interpreter collects."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    yield generations
    gc.callbacks.remove(note)
    gc.enable()


def test_collections_come_at_chosen_steps_only(collected: list[int]) -> None:
    garbage = StepGarbage(2 * STEPS_BETWEEN)
    first = 3  # of a resumed run
    seconds = {}
    for step in range(first, 2 * STEPS_BETWEEN):
        kept = [[i] for i in range(2000)]  # enough for Python to collect by itself
        if (taken := garbage.after_step(step)) is not None:
            seconds[step] = taken
    assert kept and list(seconds) == [first, STEPS_BETWEEN - 1, 2 * STEPS_BETWEEN - 1]
    after_first = len(collected) - collected[::-1].index(2)
    assert collected[after_first:] == [1, 1] and all(taken >= 0 for taken in seconds.values())
    with garbage.automatic():
        assert gc.isenabled()
    assert not gc.isenabled() and collected[-1] == 1
    garbage.close()
    assert gc.isenabled() and not gc.get_freeze_count()


@pytest.mark.parametrize("steps", [0, STEPS_BETWEEN])
def test_a_run_without_steps_and_a_short_one_change_nothing(steps: int) -> None:
    garbage = StepGarbage(steps)
    assert not any(garbage.after_step(step) for step in range(steps))
    with garbage.automatic():
        assert gc.isenabled()
    garbage.close()
    assert gc.isenabled()
