"""Sample answers and, where right answers are short enough to be compared, the share of right ones."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from allranks.train.evaluate import evaluating
from allranks.train.world import World

CHECKABLE_CHARS = 40
SAMPLE_TOKENS = 48
BATCH = 32


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """``exact_match`` is the share of answers that are right to the letter, None where that cannot be asked."""

    exact_match: float | None
    checked: int
    samples: list[dict[str, Any]]


def checkable(questions: list[dict[str, str]]) -> bool:
    """True if nearly all right answers are one short line: then equality is a fair test."""
    short = sum(len(q["answer"]) <= CHECKABLE_CHARS and "\n" not in q["answer"].strip() for q in questions)
    return bool(questions) and short >= 0.95 * len(questions)


def answer(
    world: World,
    model: nn.Module,
    tokenizer: Any,
    questions: list[dict[str, str]],
    samples: int,
    *,
    lockstep: bool = False,
) -> Answers:
    """Greedy answers to held-out questions, shared out among the ranks. Every rank calls; rank 0 gets the samples.

    With `lockstep` all ranks make equally many forward passes: a strategy may communicate within forward.
    """
    check = checkable(questions)
    asked = questions if check else questions[:samples]
    longest = max((len(tokenizer(q["answer"], add_special_tokens=False)["input_ids"]) for q in asked), default=0)
    limit = min(SAMPLE_TOKENS, longest + 4)
    mine = asked[world.rank :: world.size]
    rounds = math.ceil(math.ceil(len(asked) / world.size) / BATCH)
    replies: list[str] = []
    for i in range(rounds):
        part = mine[i * BATCH : (i + 1) * BATCH]
        if part or lockstep:
            replies += _greedy(world, model, tokenizer, part or asked[:1], limit, lockstep)[: len(part)]
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, replies, group=world.control)
    ordered = [gathered[i % world.size][i // world.size] for i in range(len(asked))]
    right = sum(reply.strip() == q["answer"].strip() for reply, q in zip(ordered, asked, strict=True))
    shown: list[dict[str, Any]] = [
        {
            "prompt": q["prompt"],
            "expected": q["answer"],
            "reply": r,
            "right": check and r.strip() == q["answer"].strip(),
        }
        for q, r in list(zip(asked, ordered, strict=True))[:samples]
    ]
    return Answers(
        exact_match=right / len(asked) if check and asked else None, checked=len(asked) if check else 0, samples=shown
    )


def _greedy(
    world: World, model: nn.Module, tokenizer: Any, questions: list[dict[str, str]], limit: int, lockstep: bool
) -> list[str]:
    encoded = [tokenizer(q["prompt"], add_special_tokens=False)["input_ids"] for q in questions]
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("x")["input_ids"][:1] == [bos]:
        encoded = [ids if ids[:1] == [bos] else [bos, *ids] for ids in encoded]
    width = max(len(ids) for ids in encoded)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(e)) + e for e in encoded], device=world.device)
    mask = torch.tensor([[0] * (width - len(e)) + [1] * len(e) for e in encoded], device=world.device)
    with evaluating(model), torch.no_grad():
        out = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=limit,
            do_sample=False,
            use_cache=True,
            synced_gpus=lockstep,
            pad_token_id=pad,
            eos_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
