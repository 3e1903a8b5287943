"""What every peer measures in the same way: steps, distribution, held-out loss, and the record it writes."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.train_throughput import memory
from benchmarks.train_throughput.workload import SEQ_LEN, WARMUP_STEPS, WORLD, RaggedRows, Workload

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.nn import Module

FOR_LOGITS = ("input_ids", "position_ids", "attention_mask")
FOR_LOGITS += ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def peer_parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments all peers take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, required=True, help="folder built by workload.py")
    parser.add_argument("--useful-tokens", type=int, required=True, help="non-pad tokens to train, over all ranks")
    parser.add_argument("--out", type=Path, required=True, help="JSON record, written by rank 0")
    parser.add_argument("--packing", choices=("wrapped", "isolated"), default="wrapped")
    parser.add_argument("--seed", type=int, default=42, help="of the adapters and the dropout")
    return parser


class Recorder:
    """Wall time, useful tokens and a digest of the rows of each optimizer step of this rank.

    A step's time is the distance between the ends of two steps, so it holds everything: data, forward, backward,
    communication, optimizer and the rest of the loop. ``several``: a batch of several documents, as the model got it.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokens: list[int] = []
        self.digests: list[str] = []
        self.several: dict[str, Any] | None = None

    def start(self) -> None:
        """Training begins."""
        self.ends = [time.perf_counter()]

    def saw(self, input_ids: torch.Tensor, useful: int) -> None:
        """A micro-batch went into the model (one per step here)."""
        self.tokens.append(useful)
        self.digests.append(hashlib.blake2b(input_ids.numpy().tobytes(), digest_size=8).hexdigest())

    def saw_documents(self, batch: dict[str, Any]) -> None:
        """Keep one batch in which positions begin anew, to test isolation after training."""
        if self.several is None and "position_ids" in batch and int((batch["position_ids"] == 0).sum()) > 1:
            self.several = {k: v for k, v in batch.items() if k in FOR_LOGITS}

    def step_end(self) -> None:
        """An optimizer step is over."""
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Wall time of each step."""
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]

    def watch(self, model: Module, pad_id: int) -> None:
        """Count what goes into ``model``, for trainers that own the loop: labels do not matter, pads do."""

        def before_forward(_module: Module, _args: tuple[Any, ...], kwargs: dict[str, torch.Tensor]) -> None:
            ids = kwargs["input_ids"]
            self.saw(ids, int((ids != pad_id).sum()))
            self.saw_documents(kwargs)

        self._hook = model.register_forward_pre_hook(before_forward, with_kwargs=True)

    def unwatch(self) -> None:
        """Stop counting, before evaluation."""
        self._hook.remove()


def throughput(tokens: list[int], seconds: list[float]) -> dict[str, float]:
    """Useful tokens per second of one rank: over all steps after warm-up, by the median step, and with warm-up."""
    kept_tokens, kept_seconds = tokens[WARMUP_STEPS:], seconds[WARMUP_STEPS:]
    if not kept_seconds:
        raise ValueError(f"{len(seconds)} steps leave nothing after a warm-up of {WARMUP_STEPS}")
    return {
        "total": sum(kept_tokens) / sum(kept_seconds),
        "median": float(np.mean(kept_tokens) / np.median(kept_seconds)),
        "with_warmup": sum(tokens) / sum(seconds),
    }


def row_nll(model: Module, ids: np.ndarray) -> tuple[float, int]:
    """Summed negative log-likelihood of one unpadded row, and how many tokens it predicts."""
    import torch
    from torch.nn.functional import cross_entropy

    row = torch.from_numpy(np.asarray(ids[:SEQ_LEN], dtype=np.int64))[None]
    logits = model(input_ids=row).logits[0, :-1].float()
    return float(cross_entropy(logits, row[0, 1:], reduction="sum")), row.shape[1] - 1


def heldout_loss(model: Module, rows: RaggedRows, group: ProcessGroup | None = None) -> float:
    """Token-weighted mean NLL over all held-out rows, each cut at SEQ_LEN; ranks share the rows."""
    import torch
    import torch.distributed as dist

    rank, world = (group.rank(), group.size()) if group else (0, 1)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        parts = [row_nll(model, rows[i]) for i in range(rank, len(rows), world)]
    model.train(was_training)
    total = torch.tensor([sum(p[0] for p in parts), sum(p[1] for p in parts)], dtype=torch.float64)
    if group:
        dist.all_reduce(total, group=group)
    return float(total[0] / total[1])


def attends_across(model: Module, batch: dict[str, Any]) -> bool:
    """Return whether the logits of the last document of a batch of one row change with the tokens of the first."""
    import torch

    ids, starts = batch["input_ids"], (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    other = ids.clone()
    other[:, : starts[1]] = ids[:, : starts[1]].flip(1)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        before, after = (model(**{**batch, "input_ids": i}).logits[:, starts[-1] :] for i in (ids, other))
    model.train(was_training)
    return not torch.allclose(before, after, rtol=0.0, atol=1e-5)


def trained_digest(model: Module) -> str:
    """Digest of all trainable weights."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _gathered(value: Any, group: ProcessGroup) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def write_record(
    recorder: Recorder, model: Module, group: ProcessGroup, workload: Workload, args: argparse.Namespace, **extra: Any
) -> None:
    """Check that the ranks really trained together, evaluate, and write the peer's record on rank 0.

    ``model`` is the adapted model without its DDP wrapper, ``group`` the group whose all-reduce averaged gradients.
    """
    import torch
    import torch.distributed as dist

    grown = memory.grown_bytes()
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    digests = _gathered(recorder.digests, group)
    tokens = _gathered(recorder.tokens, group)
    seconds = _gathered(recorder.seconds, group)
    weights = _gathered(trained_digest(model), group)
    loss = heldout_loss(model, workload.heldout, group)
    isolated = None if recorder.several is None else not attends_across(model, recorder.several)
    rates = [throughput(t, s) for t, s in zip(tokens, seconds, strict=True)]
    record = {
        "steps": len(recorder.seconds),
        "per_step_s": [round(s, 6) for s in recorder.seconds],
        "useful_tokens_per_step": tokens,
        "useful_tokens": sum(map(sum, tokens)),
        "tokens_per_s_per_rank": {k: round(float(np.mean([r[k] for r in rates])), 2) for k in rates[0]},
        "heldout_loss": loss,
        "world_size_verified": int(ones.item()),
        "weights_equal_across_ranks": len(set(weights)) == 1,
        "data_differs_across_ranks": all(len(set(step)) == WORLD for step in zip(*digests, strict=True)),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "seed": args.seed,
        "grown_bytes": grown,
        "documents_isolated": isolated,
        **extra,
    }
    refuse_if_unsound(record)
    if group.rank() == 0:
        args.out.write_text(json.dumps(record))
    dist.barrier(group)


def refuse_if_unsound(record: dict[str, Any]) -> None:
    """A run that did not train as claimed gives no number.

    Raises:
        RuntimeError: with every reason.
    """
    per_rank = record["useful_tokens_per_step"]
    wrong = [
        reason
        for reason, bad in (
            ("the group has not the expected size", record["world_size_verified"] != WORLD),
            ("the ranks' weights differ", not record["weights_equal_across_ranks"]),
            ("the ranks saw the same rows", not record["data_differs_across_ranks"]),
            ("documents attend to one another", record.get("documents_isolated") is False),
            ("forward passes and optimizer steps differ", any(len(t) != record["steps"] for t in per_rank)),
        )
        if bad
    ]
    if wrong:
        raise RuntimeError("not a sound measurement: " + "; ".join(wrong))
