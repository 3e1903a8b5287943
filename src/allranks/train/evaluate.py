"""Evaluation that does not depend on batch size or number of ranks: token-weighted sums in float64, one all-reduce."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from allranks.hang.pulse import pulse
from allranks.train.data.collate import IGNORE, Batch, collate, collate_labelled
from allranks.train.data.order import Rows
from allranks.train.data.prepared import TokenSet
from allranks.train.losses import LossModel
from allranks.train.world import World

DEFAULT_BATCH = 8


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Loss in nats per target; ``perplexity`` is None for classifiers, ``accuracy`` None for language models."""

    loss: float
    perplexity: float | None
    accuracy: float | None
    targets: int
    rows: int
    seconds: float
    collectives: int = 1


class Evaluator:
    """Evaluates held-out rows, shared out among the ranks."""

    def __init__(
        self, world: World, model: LossModel, tokens: TokenSet, *, pad_id: int, batch_size: int | None, classifier: bool
    ) -> None:
        self._world, self._model, self._tokens = world, model, tokens
        self._pad_id, self._size, self._classifier = pad_id, batch_size or DEFAULT_BATCH, classifier

    def run(self) -> EvalResult:
        """Evaluate once. Every rank calls; all get the same result."""
        started = time.perf_counter()
        # loss sum, targets, right answers, rows; float64 sums do not feel the order in which batches come
        sums = torch.zeros(4, dtype=torch.float64, device=self._world.device)
        with evaluating(self._model), torch.no_grad():
            for rows, real in self._batches():
                pulse.beat()
                part = self._score(rows)
                if real:
                    sums += part
        dist.all_reduce(sums, group=self._world.group)
        loss_sum, targets, right, rows_seen = sums.tolist()
        loss = loss_sum / max(targets, 1.0)
        return EvalResult(
            loss=loss,
            perplexity=None if self._classifier else _exp(loss),
            accuracy=right / max(rows_seen, 1.0) if self._classifier else None,
            targets=int(targets),
            rows=int(rows_seen),
            seconds=time.perf_counter() - started,
        )

    def _batches(self) -> Iterator[tuple[Rows, bool]]:
        """This rank's batches, rows of like length together. All ranks run equally many: a strategy may communicate
        within forward, and a rank that has fewer runs its share again without counting it."""
        lengths = np.diff(self._tokens.offsets)
        ordered = np.argsort(lengths, kind="stable").astype(np.int64)
        mine = ordered[self._world.rank :: self._world.size]
        rounds = math.ceil(math.ceil(len(ordered) / self._world.size) / self._size)
        spare = ordered[:1]
        for i in range(rounds):
            part = mine[i * self._size : (i + 1) * self._size]
            yield (part, True) if len(part) else (spare, False)

    def _score(self, rows: Rows) -> torch.Tensor:
        if self._classifier:
            batch = collate_labelled(self._tokens, rows, self._pad_id).to(self._world.device)
            logits = self._model.label_logits(batch)
            loss = F.cross_entropy(logits, batch.targets, reduction="none").double().sum()
            right = (logits.argmax(-1) == batch.targets).sum()
            return torch.stack([loss, loss.new_tensor(len(rows)), right.double(), loss.new_tensor(len(rows))])
        batch = collate(self._tokens, rows, self._pad_id, None).to(self._world.device)
        return self._score_text(batch, len(rows))

    def _score_text(self, batch: Batch, rows: int) -> torch.Tensor:
        logits, targets = self._model.token_logits(batch)
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        loss = each.double().sum()
        return torch.stack([loss, (targets != IGNORE).sum().double(), torch.zeros_like(loss), loss.new_tensor(rows)])


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within, the former mode after."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
