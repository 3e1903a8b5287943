"""Batches that are made one ahead: those of the plan, each as it was collated, with the errors of their own turn."""

import threading
import time
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from allranks.errors import DataError
from allranks.planning.records import BatchPlan
from allranks.spec.records import DataSpec, EvalSpec
from allranks.train.data.batch_feed import BatchFeed
from allranks.train.data.batches import PackedRows, SampleOrder, collate, collate_labelled, noise_batch, prepared_noise
from allranks.train.data.prepared import TokenSet

CPU = torch.device("cpu")
STEPS, ACCUM, MICRO, SEQUENCES = 5, 2, 3, 20


def rows_of_tokens() -> TokenSet:
    """Sequences of one to three rows of uneven length."""
    rng = np.random.default_rng(4)
    counts = rng.integers(1, 4, SEQUENCES)
    lengths = rng.integers(1, 30, counts.sum())
    offsets = np.concatenate([[0], lengths.cumsum()])
    mask = rng.integers(0, 2, offsets[-1]).astype(np.uint8)
    return TokenSet(
        ids=rng.integers(4, 200, offsets[-1]).astype(np.int32),
        mask=mask,
        offsets=offsets,
        pack_offsets=np.concatenate([[0], counts.cumsum()]),
        pack_rows=np.arange(len(lengths)),
        labels=rng.integers(0, 3, len(lengths)),
        real=np.ones(SEQUENCES, np.int64),
        trained=np.ones(SEQUENCES, np.int64),
    )


TOKENS = rows_of_tokens()


def order() -> SampleOrder:
    plan = BatchPlan(micro_batch_size=MICRO, grad_accum=ACCUM, global_batch_size=MICRO * ACCUM)
    return SampleOrder(SEQUENCES, 7, plan, 0, 1)


def text(rows: Any) -> Any:
    return collate(TOKENS, rows, 0, None)


def noise(rows: Any) -> Any:
    data = DataSpec(source="builtin:noise", subset=2 * SEQUENCES)
    return noise_batch(data, prepared_noise(data, EvalSpec()).train, rows, 8, torch.bfloat16)


def assert_equal(one: Any, other: Any) -> None:
    """Compare all fields, also those of the packed rows."""
    assert type(one) is type(other)
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, PackedRows):
            assert_equal(a, b)
        elif isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), field.name
            assert torch.equal(a, b), field.name
        else:
            assert a == b, field.name


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("make", [text, lambda rows: collate_labelled(TOKENS, rows, 0), noise])
def test_batches_are_those_of_the_plan_from_the_first_step_on(make: Any, first: int) -> None:
    planned = [make(rows) for step in range(first, STEPS) for rows in order().micro_batches(step)]
    feed = BatchFeed(order(), make, CPU, first, STEPS, ahead=True)
    taken = [feed.take() for _ in planned]
    with pytest.raises(StopIteration):
        feed.take()
    feed.close()
    for one, other in zip(taken, planned, strict=True):
        assert_equal(one, other)


def test_one_batch_is_made_ahead_in_another_thread() -> None:
    made: list[str] = []

    def make(rows: Any) -> Any:
        made.append(threading.current_thread().name)
        return text(rows)

    feed = BatchFeed(order(), make, CPU, 0, STEPS, ahead=True)
    assert made == []
    for taken in range(1, 4):
        feed.take()
        for _ in range(500):
            if len(made) > taken:
                break
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(made) == taken + 1
    assert all(name.startswith("prefetch") for name in made)
    feed.close()


def test_on_a_cpu_a_batch_is_made_when_it_is_used() -> None:
    made: list[Any] = []

    def make(rows: Any) -> Any:
        assert threading.current_thread() is threading.main_thread()
        made.append(text(rows))
        return made[-1]

    feed = BatchFeed(order(), make, CPU, 0, STEPS)
    assert feed.take() is made[0]
    assert len(made) == 1
    feed.close()


@pytest.mark.parametrize("ahead", [True, False])
def test_an_error_is_raised_where_the_batch_is_used(ahead: bool) -> None:
    bad = order().micro_batches(1)[0].tolist()

    def make(rows: Any) -> Any:
        if rows.tolist() == bad:
            raise DataError(f"sequence {bad[0]} has no token")
        return text(rows)

    feed = BatchFeed(order(), make, CPU, 0, STEPS, ahead=ahead)
    for _ in range(ACCUM):
        feed.take()
        time.sleep(0.05)  # the batch that cannot be made has been tried
    with pytest.raises(DataError, match=f"sequence {bad[0]} has no token") as caught:
        feed.take()
    assert any(entry.name == "make" for entry in caught.traceback)
    feed.close()


def test_a_feed_that_is_closed_makes_no_more_and_waits_for_nothing() -> None:
    made, go_on = [], threading.Event()

    def make(rows: Any) -> Any:
        made.append(rows)
        if len(made) > 1:
            assert go_on.wait(30)
        return text(rows)

    feed = BatchFeed(order(), make, CPU, 0, STEPS, ahead=True)
    feed.take()
    began = time.monotonic()
    feed.close()
    assert time.monotonic() - began < 10
    go_on.set()
    assert feed._thread is not None
    feed._thread.shutdown(wait=True)
    assert len(made) <= 2
