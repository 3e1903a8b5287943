"""Train as one process would, with plain code: no strategy, no collectives, and nothing of the loop, the collator or the schedule.

Rows are never packed: each row of a sequence is a row of its own in the batch. `Variant.SHIFTED` does the same work with more
padding (noise: row by row) and the micro-batches in the opposite order. It is as right as the first, so that the distance of the two is what rounding
alone does.
"""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from allranks.spec.models import MlpShape, is_mlp, mlp_shape
from allranks.spec.records import RunSpec, TrainSpec
from allranks.train.benchmark.reference_rows import PlainRow, PlainSequence, PlannedRows

NO_TARGET = -100
MORE_PADDING = 31


class Variant(enum.Enum):
    """Two ways to do the same work."""

    PLAIN = "plain"
    SHIFTED = "shifted"


@dataclass(frozen=True)
class PlainTraining:
    """Trained weights on the CPU, and each step's loss and gradient norm before clipping."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]


def plain_rate(train: TrainSpec, step: int, steps: int) -> float:
    """Return the learning rate of a step (from 1): the n-th of N warm-up steps takes n/N of it; the schedule would end one step later."""
    warm = train.warmup_steps
    if step <= warm:
        return train.lr * step / warm
    done = min((step - 1 - warm) / max(steps - warm, 1), 1.0)
    shapes = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}
    return train.lr * shapes[train.schedule]


class PlainTrainer:
    """Train a model on the rows of all ranks, one micro-batch after another."""

    def __init__(
        self,
        spec: RunSpec,
        sequences: Sequence[PlainSequence],
        order: PlannedRows,
        pad_id: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        assert spec.model is not None and spec.data is not None
        self._train, self._batch, self._world = spec.train, order.batch, order.world_size
        self._sequences, self._order, self._pad, self._device, self._dtype = sequences, order, pad_id, device, dtype
        self._seed, self._most = spec.data.seed, spec.data.max_length * order.batch.micro_batch_size
        self._width = mlp_shape(spec.model.name, spec.model.config).width if is_mlp(spec.model.name) else 0

    def run(self, module: Any, steps: int, variant: Variant) -> PlainTraining:
        """Train `module` (the model with its loss, of which only the model is used) in place."""
        model = module.model
        module.train()
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        optimizer = self._optimizer([p for _, p in named])
        out = PlainTraining({}, [], [])
        for step in range(steps):
            micro_batches = list(self._micro_batches(step))
            targets = max(sum(row.targets for rows in micro_batches for row in rows), 1)
            if variant is Variant.SHIFTED:
                micro_batches.reverse()
            total = 0.0
            for rows in micro_batches:
                for part in self._parts(rows, variant):
                    loss = self._loss_sum(model, part, variant) / targets
                    loss.backward()
                    total += float(loss.detach())
            gradients = [p.grad for _, p in named if p.grad is not None]
            norm = math.sqrt(sum(float(g.square().sum(dtype=torch.float64)) for g in gradients))
            limit = self._train.max_grad_norm
            if limit is not None and norm > limit:
                for gradient in gradients:
                    gradient.mul_(limit / norm)
            for group in optimizer.param_groups:
                group["lr"] = plain_rate(self._train, step + 1, steps)
            optimizer.step()
            optimizer.zero_grad()
            out.losses.append(total)
            out.norms.append(norm)
        out.weights.update({name: p.detach().to("cpu", copy=True).contiguous() for name, p in named})
        return out

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW as documented; fused, because the other forms round bfloat16 weights in another way."""
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": self._train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=(0.9, 0.999), eps=1e-8, fused=True)

    def _micro_batches(self, step: int) -> Iterator[list[PlainRow]]:
        parts = [self._order.of_rank(step, rank) for rank in range(self._world)]
        for micro in range(self._batch.grad_accum):
            for rank in range(self._world):
                yield [row for i in parts[rank][micro] for row in self._sequences[i]]

    def _parts(self, rows: list[PlainRow], variant: Variant) -> Iterator[list[PlainRow]]:
        """Yield the rows in parts that with padding have no more tokens than the micro-batch of full sequences."""
        if self._width and variant is Variant.SHIFTED:
            yield from ([row] for row in rows)
            return
        part: list[PlainRow] = []
        for row in rows:
            longest = max(len(r.ids) for r in [*part, row])
            if part and longest * (len(part) + 1) > self._most:
                yield part
                part = []
            part.append(row)
        yield part

    def _loss_sum(self, model: Any, rows: list[PlainRow], variant: Variant) -> torch.Tensor:
        """Return the loss of the rows, summed over their targets."""
        if self._width:
            inputs, wanted = self._noise(rows)
            return (model(inputs).float() - wanted.float()).pow(2).mean(dim=1).sum()
        width = max(len(row.ids) for row in rows)
        if variant is Variant.SHIFTED:
            room = getattr(model.config, "max_position_embeddings", None)
            room = math.inf if room is None else room - 2  # some tables of positions begin with two unused ones
            width = max(width, int(min(width + MORE_PADDING, room)))
        ids = torch.full((len(rows), width), self._pad)
        real = torch.zeros(len(rows), width, dtype=torch.long)
        targets = torch.full((len(rows), width), NO_TARGET)
        for i, row in enumerate(rows):
            tokens = torch.tensor(row.ids)
            ids[i, : len(tokens)] = tokens
            real[i, : len(tokens)] = 1
            targets[i, : len(tokens)] = torch.where(torch.tensor(row.wanted), tokens, NO_TARGET)
        ids, targets = ids.to(self._device), targets.to(self._device)
        if rows[0].label >= 0:
            logits = model(input_ids=ids, attention_mask=real.to(self._device)).logits.float()
            return F.cross_entropy(logits, torch.tensor([row.label for row in rows]).to(self._device), reduction="sum")
        logits = model(input_ids=ids).logits.float()[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=NO_TARGET, reduction="sum")

    def _noise(self, rows: list[PlainRow]) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = []
        for row in rows:
            generator = torch.Generator().manual_seed((self._seed * 2654435761 + row.label) % 2**32)
            drawn.append(torch.randn(2, self._width, generator=generator))
        values = torch.stack(drawn).to(self._dtype).to(self._device)
        return values[:, 0], values[:, 1]


class PlainModule(nn.Module):
    """A model under the name that it has in the module of a strategy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def plain_module(module: Any, spec: RunSpec, *, classifier: bool) -> PlainModule:
    """Return a model of the spec with the weights of `module`, without dropout, on the same device."""
    assert spec.model is not None
    given = module.model
    plain: Any
    if is_mlp(spec.model.name):
        plain = _Perceptron(mlp_shape(spec.model.name, spec.model.config))
    else:
        base = given.get_base_model() if hasattr(given, "get_base_model") else given
        config = copy.deepcopy(base.config)
        config._attn_implementation = spec.model.attention  # not this package's own for packed rows
        plain = type(base)(config)
        for layer in plain.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        if spec.adapter.type == "lora":
            plain = _with_lora(plain, spec, classifier=classifier)
    plain.load_state_dict(given.state_dict())
    return PlainModule(plain.to(next(given.parameters()).device))


def _with_lora(model: Any, spec: RunSpec, *, classifier: bool) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    wanted = spec.adapter
    targets = wanted.targets
    config = LoraConfig(
        r=wanted.r,
        lora_alpha=wanted.alpha,  # type: ignore[arg-type] - PEFT accepts fractions, too
        lora_dropout=0.0,
        target_modules="all-linear" if targets is None and not wanted.target_parameters else targets,
        target_parameters=wanted.target_parameters or None,
        modules_to_save=wanted.modules_to_save or None,
        task_type=TaskType.SEQ_CLS if classifier else TaskType.CAUSAL_LM,
    )
    return get_peft_model(model, config)


class _Perceptron(nn.Module):
    """Linear layers with a GELU between any two of a block (``blocks``), or of all (``wide``)."""

    def __init__(self, shape: MlpShape) -> None:
        super().__init__()
        wide = shape.width * shape.expansion
        self.layers = nn.ModuleList()
        for i in range(shape.layers):
            if shape.shape == "blocks":
                self.layers.append(nn.Sequential(nn.Linear(shape.width, wide), nn.GELU(), nn.Linear(wide, shape.width)))
            else:
                ends = shape.width if i == 0 else wide, shape.width if i == shape.layers - 1 else wide
                self.layers.append(nn.Sequential(*[nn.GELU()][: min(i, 1)], nn.Linear(*ends)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs
