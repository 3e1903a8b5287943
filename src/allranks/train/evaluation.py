"""Evaluate the loss on held-out rows, generate sample answers, and compute the share of correct answers if they are
checkable.

The loss does not depend on batch size or number of ranks: token-weighted sums in float64, one all-reduce.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from allranks.rundir.heartbeat import heartbeat
from allranks.train.data.batches import Rows, collate, collate_labelled
from allranks.train.data.prepared import TokenSet
from allranks.train.data.tokenization import prefix_tokens
from allranks.train.distributed import DistContext
from allranks.train.models.losses import LossModel

DEFAULT_BATCH = 8
CHECKABLE_CHARS = 40
SAMPLE_TOKENS = 48
BATCH = 32


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Loss in nats per target; ``perplexity`` is None for classifiers, ``accuracy`` is None for language models."""

    loss: float
    perplexity: float | None
    accuracy: float | None
    targets: int
    rows: int
    seconds: float
    collectives: int = 1


class Evaluator:
    """Evaluate the held-out rows; each rank evaluates a part of them."""

    def __init__(
        self,
        world: DistContext,
        model: LossModel,
        tokens: TokenSet,
        *,
        pad_id: int,
        batch_size: int | None,
        classifier: bool,
    ) -> None:
        self._world, self._model, self._tokens = world, model, tokens
        self._pad_id, self._size, self._classifier = pad_id, batch_size or DEFAULT_BATCH, classifier

    def run(self) -> EvalResult:
        """Evaluate once. Collective: every rank calls it and gets the same result."""
        started = time.perf_counter()
        # loss sum, targets, correct answers, rows; in float64 the order of the batches does not matter
        sums = torch.zeros(4, dtype=torch.float64, device=self._world.device)
        with evaluating(self._model), torch.no_grad():
            for rows, real in self._batches():
                heartbeat.beat()
                part = self._score(rows)
                if real:
                    sums += part
        dist.all_reduce(sums, group=self._world.group)
        loss_sum, targets, right, rows_seen = sums.tolist()
        loss = loss_sum / max(targets, 1.0)
        return EvalResult(
            loss=loss,
            perplexity=None if self._classifier else math.exp(loss) if loss < 700 else math.inf,
            accuracy=right / max(rows_seen, 1.0) if self._classifier else None,
            targets=int(targets),
            rows=int(rows_seen),
            seconds=time.perf_counter() - started,
        )

    def _batches(self) -> Iterator[tuple[Rows, bool]]:
        """Yield this rank's batches, with rows of similar length together, and whether the batch counts.

        All ranks yield the same number of batches, because a strategy may communicate within forward: a rank with fewer
        batches repeats its own without counting them.
        """
        lengths = np.diff(self._tokens.offsets)
        ordered = np.argsort(lengths, kind="stable").astype(np.int64)
        mine = ordered[self._world.rank :: self._world.size]
        for start in range(0, math.ceil(len(ordered) / self._world.size), self._size):
            part = mine[start : start + self._size]
            yield (part, True) if len(part) else (ordered[:1], False)

    def _score(self, rows: Rows) -> torch.Tensor:
        """Return loss sum, targets, correct answers and rows of a batch, (4,) in float64."""
        if self._classifier:
            batch = collate_labelled(self._tokens, rows, self._pad_id).to(self._world.device)
            logits = self._model.label_logits(batch)
            loss = F.cross_entropy(logits, batch.targets, reduction="none").double().sum()
            right = (logits.argmax(-1) == batch.targets).sum()
            return torch.stack([loss, loss.new_tensor(len(rows)), right.double(), loss.new_tensor(len(rows))])
        batch = collate(self._tokens, rows, self._pad_id, None).to(self._world.device)
        loss = self._model.token_losses(batch).double().sum()
        return torch.stack([loss, *loss.new_tensor([batch.tokens_trained, 0, len(rows)])])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and restore its mode at the end."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


class SampleAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Generated answers. ``exact_match``: share that equals the reference exactly, None if data is not checkable."""

    exact_match: float | None
    checked: int
    samples: list[dict[str, Any]]


def sample_answers(
    world: DistContext,
    model: nn.Module,
    tokenizer: Any,
    questions: list[dict[str, str]],
    samples: int,
    *,
    lockstep: bool = False,
) -> SampleAnswers:
    """Generate greedy answers to held-out questions, divided among the ranks. Collective; rank 0 gets the samples.

    With `lockstep` all ranks make the same number of forward passes, because a strategy may communicate within forward.
    """
    # nearly all reference answers are one short line, so that equality is a fair test
    short = sum(len(q["answer"]) <= CHECKABLE_CHARS and "\n" not in q["answer"].strip() for q in questions)
    check = bool(questions) and short >= 0.95 * len(questions)
    shown = questions if check else questions[:samples]
    longest = max((len(tokenizer(q["answer"], add_special_tokens=False)["input_ids"]) for q in shown), default=0)
    limit = min(SAMPLE_TOKENS, longest + 4)
    mine = shown[world.rank :: world.size]
    replies: list[str] = []
    for start in range(0, math.ceil(len(shown) / world.size), BATCH):
        part = mine[start : start + BATCH]
        if part or lockstep:
            prompts = [question["prompt"] for question in part or shown[:1]]
            added = generate_replies(model, tokenizer, prompts, limit, world.device, lockstep=lockstep)
            replies += tokenizer.batch_decode(added[: len(part)], skip_special_tokens=True)
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, replies, group=world.control)
    ordered = [gathered[i % world.size][i // world.size] for i in range(len(shown))]
    right = [reply.strip() == q["answer"].strip() for reply, q in zip(ordered, shown, strict=True)]
    return SampleAnswers(
        exact_match=sum(right) / len(shown) if check else None,
        checked=len(shown) if check else 0,
        samples=[
            {"prompt": q["prompt"], "expected": q["answer"], "reply": reply, "right": check and equal}
            for q, reply, equal in list(zip(shown, ordered, right, strict=True))[:samples]
        ],
    )


def generate_replies(
    model: nn.Module,
    tokenizer: Any,
    prompts: list[str],
    limit: int,
    device: torch.device,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    lockstep: bool = False,
) -> list[list[int]]:
    """Return the tokens that the model adds to each prompt, up to the first of `end_tokens`.

    Args:
        limit: the largest number of tokens.
        temperature: 0 takes the most probable token; otherwise each is drawn from `seed`, from all tokens.
        lockstep: all ranks make the same number of forward passes.
    """
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    width = max(len(ids) for ids in encoded)
    pad, ends = tokenizer.pad_token_id, end_tokens(model, tokenizer)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with evaluating(model), torch.no_grad():
        out = model.generate(  # type: ignore[operator]
            input_ids=torch.tensor([[pad] * (width - len(e)) + e for e in encoded], device=device),
            attention_mask=torch.tensor([[0] * (width - len(e)) + [1] * len(e) for e in encoded], device=device),
            max_new_tokens=limit,
            use_cache=True,
            synced_gpus=lockstep,
            pad_token_id=pad,
            eos_token_id=ends or None,
            **sampling,
        )
    added = out[:, width:].tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in added]


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a reply: the tokenizer's, used in training, and all of generation_config.json."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = own if isinstance(own, list) else [own]
    return sorted({token for token in (tokenizer.eos_token_id, *several) if token is not None})


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens of a prompt, after those that the tokenizer writes before a text."""
    ids, prefix = tokenizer(prompt, add_special_tokens=False)["input_ids"], prefix_tokens(tokenizer)
    return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]


class EarlyStopping:
    """Count evaluations since the held-out loss was last lower, by `min_delta`, than before; after `patience` of them
    in a row the training ends.

    A non-finite loss is never lower. The evaluation before the first step does not count: it has no checkpoint.
    """

    def __init__(self, patience: int | None, min_delta: float = 0.0) -> None:
        self._patience, self._min_delta = patience, min_delta
        self.best_loss, self.best_step = math.inf, 0
        self.waited = 0

    def add(self, step: int, loss: float | None) -> None:
        """Add the evaluation after `step`; None and NaN are losses that were not finite."""
        if step == 0:
            return
        if loss is not None and loss < self.best_loss - self._min_delta:
            self.best_loss, self.best_step, self.waited = loss, step, 0
        else:
            self.waited += 1

    @property
    def reason(self) -> str | None:
        """Why the training ends now, or None."""
        if self._patience is None or self.waited < self._patience:
            return None
        lowest = f"lower than {self.best_loss:.6g} (step {self.best_step})" if self.best_step else "finite"
        rule = f"eval.patience {self._patience}, eval.min_delta {self._min_delta:g}"
        return f"the held-out loss was not {lowest} in {self.waited} evaluations ({rule})"


def evaluations_until(events: Iterable[dict[str, Any]], step: int) -> list[tuple[int, float | None]]:
    """Return step and loss of each evaluation up to `step` in rank 0's events, without those an attempt repeated."""
    losses: dict[int, float | None] = {}
    for event in events:
        if event["event"] == "resume":
            losses = {done: loss for done, loss in losses.items() if done <= event["from_step"]}
        elif event["event"] == "eval":
            losses[event["step"]] = event.get("loss")
    return [(done, loss) for done, loss in losses.items() if done <= step]
