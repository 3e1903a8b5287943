"""Train as one process would, with plain code: no strategy, no collectives, nothing of loop, collator or schedule.

What each rank must train in each step is recomputed from the documentation (docs/data.md, docs/how-it-works.md): a
second implementation of rows, masks, sequences and their order. Of the package it uses only what reads files and
renders templates, and the tokenizer.

Rows are never packed: each row of a sequence is a row of its own in the batch. `Variant.RANKS` does the same work as
ranks may: gradients are added up for each rank and then over the ranks in order, weights are parts of one tensor, and
rows are trained one by one, with more padding. It is as right as the first: their distance is due to rounding alone.
"""

from __future__ import annotations

import copy
import enum
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from allranks.planning.records import BatchPlan
from allranks.spec import data_sources
from allranks.spec.data_templates import Example, choose_template
from allranks.spec.models import MlpShape, is_mlp, mlp_shape
from allranks.spec.records import RunSpec, TrainSpec
from allranks.train.data.chats import ChatWriter
from allranks.train.data.prepared import PreparedData, TokenSet
from allranks.train.models.quantized_base import dense_state

MAX_ROWS = 100_000
"""Larger sets are taken as prepared: encoding them a second time would take minutes."""
NO_TARGET = -100
MORE_PADDING = 31


@dataclass(frozen=True)
class PlainRow:
    """A row as it is trained: its tokens, and whether each is a target. A classifier's has a class, noise a number."""

    ids: Sequence[int]
    wanted: Sequence[bool]
    label: int = -1

    @property
    def targets(self) -> int:
        """Return how many targets carry loss; the first token has no predecessor that could predict it."""
        return 1 if self.label >= 0 else sum(map(bool, self.wanted[1:]))

    @property
    def tokens(self) -> int:
        """Return the tokens that count in tokens/s; a row of noise counts as one."""
        return max(len(self.ids), 1)


PlainSequence = list[PlainRow]


def permutation(n: int, seed: int, stream: int) -> list[int]:
    """Return the order of `n` raw Philox words with the key (`seed`, `stream`)."""
    words = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(n)
    return np.lexsort((np.arange(n), words)).tolist()


class PlannedRows:
    """The sequences of each rank's micro-batches: one endless stream of permutations, cut into global batches.

    Position ``s*G + (m*W + r)*B + k`` of the stream is entry ``k`` of micro-batch ``m`` of rank ``r`` in step ``s``.
    """

    def __init__(self, n: int, seed: int, batch: BatchPlan, world_size: int) -> None:
        self._n, self._seed, self.batch, self.world_size = n, seed, batch, world_size
        self._epoch = lru_cache(maxsize=2)(lambda epoch: permutation(n, seed, 1 + epoch))

    def of_rank(self, step: int, rank: int) -> list[list[int]]:
        """Return the sequences of a rank's micro-batches in a step (from 0)."""
        size, out = self.batch.micro_batch_size, []
        for micro in range(self.batch.grad_accum):
            first = step * self.batch.global_batch_size + (micro * self.world_size + rank) * size
            places = [divmod(first + k, self._n) for k in range(size)]
            out.append([self._epoch(epoch)[within] for epoch, within in places])
        return out


def plain_sequences(spec: RunSpec, data: PreparedData, *, classifier: bool) -> tuple[list[PlainSequence], str | None]:
    """Return all training sequences, and how the prepared ones differ from them, or None.

    Not recomputed are mixtures (``data.sources``), sets of more than `MAX_ROWS` rows, and texts of tokenizers without
    offsets: their sequences are those that were prepared.
    """
    assert spec.model is not None and spec.data is not None
    if is_mlp(spec.model.name):
        rows = spec.data.subset or 65_536
        held = max(1, round(spec.data.eval_fraction * rows)) if spec.data.eval_fraction and rows > 1 else 0
        held = min(held, spec.eval.subset or held)
        return [[PlainRow([], [], label=i)] for i in range(rows - held)], None
    if data.facts.rows > MAX_ROWS or spec.data.sources is not None or not data.tokenizer.is_fast:
        return _as_prepared(data.train), None
    examples = _training_examples(spec, classifier=classifier)
    rows = _labelled(examples, spec, data) if classifier else _texts(examples, spec, data.tokenizer)
    sequences = [[row] for row in rows] if classifier else _sequences(rows, spec)
    return sequences, _difference(sequences, data.train, classifier=classifier)


def _training_examples(spec: RunSpec, *, classifier: bool) -> list[Example]:
    data = spec.data
    assert data is not None
    raw = data_sources.load_rows(data)
    template = choose_template(data, raw, classifier=classifier)
    chosen = list(range(len(raw)))
    if data.subset is not None and data.subset < len(raw):
        chosen = permutation(len(raw), data.seed, 0)[: data.subset]
    examples = [e for e in (template.render(raw[i], i) for i in chosen) if not e.empty]
    if spec.eval.source is not None or not data.eval_fraction or len(examples) < 2:
        return examples
    held = set(permutation(len(examples), data.seed, 1)[: max(1, round(data.eval_fraction * len(examples)))])
    return [e for i, e in enumerate(examples) if i not in held]


def _labelled(examples: list[Example], spec: RunSpec, data: PreparedData) -> list[PlainRow]:
    """Return rows with a class; the tokenizer adds its special tokens and cuts."""
    assert spec.data is not None
    values = {e.label for e in examples if e.label is not None}
    numeric = all(_is_number(v) for v in values)
    classes = {v: i for i, v in enumerate(sorted(values, key=float if numeric else str))}
    if not spec.model or not spec.model.name.startswith("tiny:"):
        classes = data.facts.labels  # a trained head has an order of its own
    labelled = []
    for example in examples:
        text = "".join(text for text, _ in example.turns)
        ids = data.tokenizer(text, truncation=True, max_length=spec.data.max_length)["input_ids"]
        labelled.append(PlainRow(ids, [False] * len(ids), label=classes[example.label or ""]))
    return labelled


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _texts(examples: list[Example], spec: RunSpec, tokenizer: Any) -> list[PlainRow]:
    """Return text rows: a token is a target if a part of it is in a trained turn; the end-of-text token is one, too."""
    assert spec.data is not None
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    word = tokenizer("x", add_special_tokens=False)["input_ids"][0]
    begin = list(takewhile(lambda token: token != word, tokenizer("x")["input_ids"]))
    limit = None if spec.data.packing == "wrapped" else spec.data.max_length
    rows = []
    writer = ChatWriter(tokenizer)
    for turns in [row.turns for one in examples for row in writer.rows(one, mask_prompt=spec.data.mask_prompt)]:
        ids, wanted = _encode(turns, tokenizer)
        if not spec.data.mask_prompt:
            wanted = [True] * len(ids)
        if ids[: len(begin)] != begin:
            ids, wanted = [*begin, *ids], [False] * len(begin) + wanted
        if not turns or turns[-1][1]:
            if ids and ids[-1] == end:
                ids, wanted = ids[:-1], wanted[:-1]
            ids, wanted = [*ids, end], [*wanted, True]
        row = PlainRow(ids[:limit], wanted[:limit])
        if row.targets:
            rows.append(row)
    return rows


def _encode(turns: Sequence[tuple[str, bool]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Encode the whole text, and mark the tokens that contain a character of a trained turn."""
    text = "".join(text for text, _ in turns)
    trained = list(chain.from_iterable([kind] * len(part) for part, kind in turns))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [any(trained[a:b]) for a, b in encoded["offset_mapping"]]


def _sequences(rows: list[PlainRow], spec: RunSpec) -> list[PlainSequence]:
    data = spec.data
    assert data is not None
    if data.packing == "none":
        return [[row] for row in rows]
    if data.packing == "wrapped":
        order = permutation(len(rows), data.seed, 2)
        ids = list(chain.from_iterable(rows[i].ids for i in order))
        wanted = list(chain.from_iterable(rows[i].wanted for i in order))
        ends = range(0, len(ids), data.max_length)
        cut = [PlainRow(ids[at : at + data.max_length], wanted[at : at + data.max_length]) for at in ends]
        return [[row] for i, row in enumerate(cut) if i == 0 or i < len(cut) - 1 or row.targets]
    return _best_fit([rows[i] for i in permutation(len(rows), data.seed, 0)], data.max_length)


def _best_fit(rows: list[PlainRow], capacity: int) -> list[PlainSequence]:
    """Pack longest first, each row into the fullest sequence that has space, the first of equally full ones."""
    packs: list[PlainSequence] = []
    with_space: dict[int, list[int]] = {}
    spaces = 0  # bit i: a sequence has space for i tokens
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        need = len(row.ids)
        fitting = spaces >> need
        space = need + (fitting & -fitting).bit_length() - 1 if fitting else capacity
        if fitting:
            pack = min(with_space[space])
            with_space[space].remove(pack)
            if not with_space[space]:
                spaces &= ~(1 << space)
        else:
            pack = len(packs)
            packs.append([])
        packs[pack].append(row)
        if space > need:
            with_space.setdefault(space - need, []).append(pack)
            spaces |= 1 << (space - need)
    return packs


def _as_prepared(tokens: TokenSet) -> list[PlainSequence]:
    def row(r: int) -> PlainRow:
        part = slice(int(tokens.offsets[r]), int(tokens.offsets[r + 1]))
        return PlainRow(tokens.ids[part].tolist(), tokens.mask[part].astype(bool).tolist(), int(tokens.labels[r]))

    return [[row(int(r)) for r in tokens.rows_of(i)] for i in range(len(tokens))]


def _difference(ours: list[PlainSequence], tokens: TokenSet, *, classifier: bool) -> str | None:
    """Return the first way in which the prepared sequences differ from `ours`."""
    if len(ours) != len(tokens):
        return f"{len(tokens)} sequences were prepared, the documented rules give {len(ours)}"
    for i, sequence in enumerate(ours):
        rows = tokens.rows_of(i)
        if len(rows) != len(sequence):
            return f"sequence {i} was prepared with {len(rows)} rows, the documented rules give {len(sequence)}"
        for r, row in zip(rows, sequence, strict=True):
            part = slice(int(tokens.offsets[r]), int(tokens.offsets[r + 1]))
            if not _equal(tokens.ids[part], row.ids):
                return f"sequence {i} was prepared with other tokens than the documented rules give"
            if classifier and int(tokens.labels[r]) != row.label:
                return (
                    f"sequence {i} was prepared with class {int(tokens.labels[r])}, the documented rules give "
                    f"{row.label}"
                )
            if not classifier and not _equal(tokens.mask[part][1:].astype(bool), row.wanted[1:]):
                return f"sequence {i} was prepared with other trained tokens than the documented rules give"
    return None


def _equal(ours: npt.NDArray[Any], wanted: Sequence[Any]) -> bool:
    return len(ours) == len(wanted) and bool((ours == np.asarray(wanted, ours.dtype)).all())


class Variant(enum.Enum):
    """Two ways to do the same work."""

    PLAIN = "plain"
    RANKS = "ranks"


@dataclass(frozen=True)
class PlainTraining:
    """Trained weights on the CPU, and each step's loss and gradient norm before clipping."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]


def plain_rate(train: TrainSpec, step: int, steps: int) -> float:
    """Return the rate of a step (from 1): n/N of `lr` in warm-up step n of N; the schedule would end one step later."""
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
        self._router, self._alone = 0.0, False
        self._asked = spec.model.router_aux_loss

    def run(self, module: Any, steps: int, variant: Variant) -> PlainTraining:
        """Train `module` (the model with its loss, of which only the model is used) in place."""
        model = module.model
        self._look_at(model)
        module.train()
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        own = [p.data for _, p in named]
        if variant is Variant.RANKS:
            _join([p for _, p in named])
        optimizer = self._optimizer(named)
        out = PlainTraining({}, [], [])
        for step in range(steps):
            micro_batches = list(self._micro_batches(step))
            targets = max(sum(row.targets for rows in micro_batches for row in rows), 1)
            if variant is Variant.RANKS:
                total = self._sums_of_ranks(model, [p for _, p in named], micro_batches, targets)
            else:
                total = self._accumulate(model, micro_batches, variant, targets)
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
        for (_, parameter), data in zip(named, own, strict=True):
            parameter.data = data
        return out

    def _accumulate(self, model: Any, micro_batches: list[list[PlainRow]], variant: Variant, targets: float) -> float:
        """Add up the gradients of micro-batches; return their loss."""
        total = 0.0
        for rows in micro_batches:
            for loss in self._losses(model, rows, variant):
                (loss / targets).backward()
                total += float(loss.detach() / targets)
        return total

    def _losses(self, model: Any, rows: list[PlainRow], variant: Variant) -> Iterator[torch.Tensor]:
        """Yield losses of parts of a micro-batch; with a load-balancing loss (no sum over rows), that of all of it."""
        parts = (self._loss_sum(model, part, variant) for part in self._parts(rows, variant))
        if not self._router:
            yield from (loss for loss, _ in parts)
            return
        losses, routed = zip(*parts, strict=True)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        logits = tuple(torch.cat(layer) for layer in zip(*routed, strict=True))
        balance = sys.modules[type(base).__module__].load_balancing_loss_func
        router = balance(logits, logits[0].shape[-1], base.num_experts_per_tok)
        yield sum(losses) + self._router * router * sum(row.targets for row in rows)

    def _sums_of_ranks(
        self, model: Any, parameters: list[nn.Parameter], micro_batches: list[list[PlainRow]], targets: int
    ) -> float:
        """Sum each rank's gradients over micro-batches, then over ranks in order; divide, as in data parallelism."""
        total, sums = 0.0, dict[nn.Parameter, torch.Tensor]()
        for rank in range(self._world):
            total += self._accumulate(model, micro_batches[rank :: self._world], Variant.RANKS, targets / self._world)
            for parameter in parameters:
                if parameter.grad is not None:
                    sums[parameter] = sums[parameter].add_(parameter.grad) if parameter in sums else parameter.grad
                parameter.grad = None
        for parameter, whole in sums.items():
            parameter.grad = whole.div_(self._world)
        return total / self._world

    def _optimizer(self, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return AdamW as documented; fused, because the other forms round bfloat16 weights in another way."""
        kept = {name for name, p in named if p.dim() <= 1 or name.endswith("bias") or re.search(r"norm\.", name)}
        groups = [
            {"params": [p for name, p in named if name not in kept], "weight_decay": self._train.weight_decay},
            {"params": [p for name, p in named if name in kept], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=(0.9, 0.999), eps=1e-8, fused=True)

    def _look_at(self, model: Any) -> None:
        """Note the coefficient of the load-balancing loss, and whether a row must be alone in its batch."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = getattr(base, "config", None)
        own = next((vars(base)[key] for key in ("router_aux_loss_coef", "aux_loss_coef") if key in vars(base)), 0.0)
        default = own if getattr(config, "output_router_logits", False) else 0.0
        self._router = default if self._asked == "auto" else 0.0 if self._asked == "off" else float(self._asked)
        kinds = [str(getattr(m, "rope_type", "")) for m in base.modules()]
        self._alone = any("longrope" in kind or "dynamic" in kind for kind in kinds)

    def _micro_batches(self, step: int) -> Iterator[list[PlainRow]]:
        parts = [self._order.of_rank(step, rank) for rank in range(self._world)]
        for micro in range(self._batch.grad_accum):
            for rank in range(self._world):
                yield [row for i in parts[rank][micro] for row in self._sequences[i]]

    def _parts(self, rows: list[PlainRow], variant: Variant) -> Iterator[list[PlainRow]]:
        """Yield the rows in parts that with padding have no more tokens than the micro-batch of full sequences."""
        if variant is Variant.RANKS or self._alone:
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

    def _loss_sum(
        self, model: Any, rows: list[PlainRow], variant: Variant
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the loss summed over the rows' targets, and their tokens' router logits in each layer if used."""
        if self._width:
            inputs, wanted = self._noise(rows)
            return (model(inputs).float() - wanted.float()).pow(2).mean(dim=1).sum(), ()
        width = max(len(row.ids) for row in rows)
        if variant is Variant.RANKS and not self._alone:
            room = getattr(model.config, "max_position_embeddings", None)
            room = math.inf if room is None else room - 2  # some tables of positions begin with two unused ones
            width = max(width, int(min(width + MORE_PADDING, room)))
        ids = torch.full((len(rows), width), self._pad)
        real = torch.zeros(len(rows), width, dtype=torch.bool)
        targets = torch.full((len(rows), width), NO_TARGET)
        for i, row in enumerate(rows):
            tokens = torch.tensor(row.ids)
            ids[i, : len(tokens)] = tokens
            real[i, : len(tokens)] = True
            targets[i, : len(tokens)] = torch.where(torch.tensor(row.wanted), tokens, NO_TARGET)
        ids, targets, real = ids.to(self._device), targets.to(self._device), real.to(self._device)
        if rows[0].label >= 0:
            logits = model(input_ids=ids, attention_mask=real.long()).logits.float()
            labels = torch.tensor([row.label for row in rows]).to(self._device)
            return F.cross_entropy(logits, labels, reduction="sum"), ()
        if self._alone:
            _forget_lengths(model)
        out = model(input_ids=ids, **({"output_router_logits": True} if self._router else {}))
        logits, wanted = out.logits.float()[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
        loss = F.cross_entropy(logits, wanted, ignore_index=NO_TARGET, reduction="sum")
        routed = out.router_logits if self._router else ()
        return loss, [layer.flatten(0, -2)[real.flatten()] for layer in routed]

    def _noise(self, rows: list[PlainRow]) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = []
        for row in rows:
            generator = torch.Generator().manual_seed((self._seed * 2654435761 + row.label) % 2**32)
            drawn.append(torch.randn(2, self._width, generator=generator))
        values = torch.stack(drawn).to(self._dtype).to(self._device)
        return values[:, 0], values[:, 1]


def _forget_lengths(model: nn.Module) -> None:
    """Let dynamic NTK forget longer rows than the next one."""
    for module in model.modules():
        if hasattr(module, "max_seq_len_cached") and hasattr(module, "original_inv_freq"):
            module.inv_freq, module.max_seq_len_cached = module.original_inv_freq, module.original_max_seq_len


def without_random_numbers(model: nn.Module) -> None:
    """Let training draw no random numbers: dropout, and in mixtures of experts jitter and experts drawn at random
    (Phi-3.5-MoE).

    Ranks and a single process would draw different ones.
    """
    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.0  # type: ignore[assignment]
        if type(module).__name__.endswith("Router"):
            module.eval().train = lambda mode=True, module=module: module  # for this module alone


def _join(parameters: list[nn.Parameter]) -> None:
    """Make parameters parts of one tensor of their dtype: not aligned, so that kernels add up in another order."""
    for dtype in {p.dtype for p in parameters}:
        own = [p for p in parameters if p.dtype == dtype]
        whole = torch.cat([own[0].data.new_zeros(1), *(p.data.flatten() for p in own)])
        for parameter, data in zip(own, whole[1:].split([p.numel() for p in own]), strict=True):
            parameter.data = data.view(parameter.shape)


class PlainModule(nn.Module):
    """A model under the name that it has in the module of a strategy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def plain_module(module: Any, spec: RunSpec, *, classifier: bool) -> PlainModule:
    """Return a model of the spec with the weights of `module`, without random numbers, on the same device."""
    assert spec.model is not None
    given = module.model
    plain: Any
    if is_mlp(spec.model.name):
        plain = _Perceptron(mlp_shape(spec.model.name, spec.model.config))
    else:
        base = given.get_base_model() if hasattr(given, "get_base_model") else given
        config = copy.deepcopy(base.config)
        config._attn_implementation = spec.model.implementation  # not this package's own for packed rows
        plain = type(base)(config)
        without_random_numbers(plain)
        if spec.adapter.type == "lora":
            plain = _with_lora(plain, spec, classifier=classifier)
    plain.load_state_dict(dense_state(given))
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
