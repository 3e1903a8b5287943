"""Rows of documents that do not attend to one another: whole documents, positions that begin anew, no padding."""

from __future__ import annotations

import math
import random
from typing import TypedDict

import numpy as np

from benchmarks.train_throughput.workload import DATA_SEED, IGNORED, SEQ_LEN, WORLD, Workload


class Row(TypedDict):
    """A packed row: ``position_ids`` are 0 where a document begins, and there is nothing to predict there."""

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray


def best_fit(lengths: np.ndarray) -> list[list[int]]:
    """Return the documents of each row when they are packed best fit decreasing; none is longer than SEQ_LEN."""
    bins: list[list[int]] = []
    free: list[int] = []
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        fitting = [i for i, room in enumerate(free) if room >= length]
        at = min(fitting, key=free.__getitem__) if fitting else len(bins)
        if not fitting:
            bins.append([])
            free.append(SEQ_LEN)
        bins[at].append(document)
        free[at] -= length
    return bins


def isolated_rows(workload: Workload) -> list[Row]:
    """Return the rows in an order drawn once for all: best fit decreasing puts those of one long document first."""
    documents = [np.asarray(ids[:SEQ_LEN], dtype=np.int64) for ids in workload.train]
    bins = best_fit(np.array([len(ids) for ids in documents]))
    random.Random(DATA_SEED).shuffle(bins)
    return [joined([documents[i] for i in found]) for found in bins]


def joined(documents: list[np.ndarray]) -> Row:
    """Return one row of these documents."""
    ids = np.concatenate(documents)
    positions = np.concatenate([np.arange(len(document)) for document in documents])
    return {"input_ids": ids, "labels": np.where(positions == 0, IGNORED, ids), "position_ids": positions}


def filled_up(row: Row, pad_id: int) -> Row:
    """Return the row at its full length, for what needs one shape; of the padding, a document, nothing is predicted."""
    missing = SEQ_LEN - len(row["input_ids"])
    return {
        "input_ids": np.pad(row["input_ids"], (0, missing), constant_values=pad_id),
        "labels": np.pad(row["labels"], (0, missing), constant_values=IGNORED),
        "position_ids": np.concatenate([row["position_ids"], np.arange(missing)]),
    }


def isolated_fill(lengths: np.ndarray) -> float:
    """Return the share of useful tokens when whole documents are packed into SEQ_LEN, for the number of steps."""
    cut = np.minimum(lengths, SEQ_LEN)
    return float(cut.sum() / (len(best_fit(cut)) * SEQ_LEN))


def steps_for(workload: Workload, packing: str, useful_tokens: int) -> int:
    """Return the optimizer steps that train at least this many useful tokens over all ranks, or very nearly."""
    fill = isolated_fill(workload.train.lengths) if packing == "isolated" else 1.0
    return math.ceil(useful_tokens / (WORLD * SEQ_LEN * fill))
