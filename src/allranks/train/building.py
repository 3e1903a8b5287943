"""From prepared data to a model within its strategy, ready for its first step."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from allranks import checkpoints
from allranks.train import adapters, checkpoint, rng, strategies
from allranks.train.attempt import Attempt
from allranks.train.checkpoint.loading import require_same_data
from allranks.train.data.prepared import Prepared
from allranks.train.loading.setup import set_up
from allranks.train.model import count_parameters
from allranks.train.moe import ExpertLoad
from allranks.train.optim import adamw
from allranks.train.saving import saver_of
from allranks.train.strategies.contract import Strategy
from allranks.train.tasks.contract import Task
from allranks.train.telling import tell_engine, tell_model, tell_remarks


@dataclass
class Built:
    """The model in all its forms."""

    model: torch.nn.Module
    loss_model: torch.nn.Module
    strategy: Strategy
    published: checkpoint.Published
    saver: checkpoint.Saver
    digest: bytes | None  # of the whole weights, where the strategy shards them
    experts: ExpertLoad | None  # of a mixture of experts


def build(here: Attempt, task: Task, data: Prepared) -> Built:
    """Load or make the model, adapt it, and hand it to the strategy. Every rank calls."""
    spec, world = here.spec, here.world
    started = time.perf_counter()
    strategy = strategies.create(here.plan.strategy, dict(here.plan.strategy_options))  # a missing library: first
    model, filler = task.load(world, data, here.plan.dtype, partial(_keep_base, here, data.tokenizer))
    model = adapters.add_adapter(
        model, spec.adapter, classifier=task.classifier, base=_base_name(here), seed=spec.train.seed
    )
    adapted = adapters.remarks_on(model, spec.adapter)
    published = checkpoint.published_of(model, world.size)
    model.to(world.device)
    if here.model.compile:
        model.compile()
    loss_model = task.loss_model(model)
    experts = ExpertLoad(loss_model, data.tokenizer.pad_token_id, world.device)
    parameters = count_parameters(model)  # whole: a strategy may leave nothing but empty tensors behind
    rng.seed_rank(spec.train.seed, world.rank)
    digest, loaded = set_up(strategy, filler, loss_model, model, adamw(spec.train), world.group, spec.train.clip_norm)
    here.events.write("load", **msgspec.to_builtins(loaded))
    tell_remarks(here, adapted, strategy)
    tell_engine(here, strategy)
    tell_model(here, parameters, time.perf_counter() - started)
    saver = saver_of(here, strategy, model, data.tokenizer, published, len(data.train))
    return Built(model, loss_model, strategy, published, saver, digest, experts if experts else None)


def _base_name(here: Attempt) -> str:
    """What adapters call the model that they belong to."""
    name = here.model.name
    return str(here.run.model) if name.startswith("tiny:") else name


def _keep_base(here: Attempt, tokenizer: Any, model: Any) -> None:
    """What adapters of a model built from a config name as their base."""
    folder = here.run.model
    if here.spec.adapter.type != "none" and not (folder / "config.json").exists():
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))


def restore(here: Attempt, built: Built, sequences: int) -> int:
    """Go on from the checkpoint that the launcher named, if it named one.

    Args:
        sequences: of the training data; a checkpoint of other data is refused.

    Returns:
        The first step to do.
    """
    step = here.args.resume_step
    if step is None:
        if here.args.anew:
            here.events.write("resume", from_step=0, inexact=False)
        return 0
    folder = here.run.checkpoint(step)
    if here.args.inexact and not (folder / "state").is_dir():
        checkpoint.load_lite(folder, built.strategy, built.published, built.model)
    else:
        require_same_data(folder, sequences)
        checkpoint.load_full(folder, built.strategy, built.published, here.world.rank)
    if built.digest is not None:  # each rank read its ranges of these files, whose hashes were compared
        built.digest = hashlib.sha256(msgspec.json.encode(checkpoints.manifest(here.run, step)["files"])).digest()
    here.events.write("resume", from_step=step, inexact=here.args.inexact)
    return step


def rehearse(strategy: Strategy, batch: Any) -> None:
    """A forward and backward pass whose loss is 0, for strategies that learn from it in which order gradients come."""
    state = rng.rng_state()
    strategy.module.train()
    strategy.backward(strategy.module(batch) * 0.0)
    strategy.optimizer.zero_grad(set_to_none=True)
    rng.set_rng_state(state)
