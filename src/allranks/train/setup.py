"""Build the model inside its strategy and load its weights, ready for the first step."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from allranks.planning.records import LaunchPlan
from allranks.rundir import checkpoints
from allranks.rundir.events import read_events
from allranks.rundir.files import write_json
from allranks.spec.records import ATTENTION_AUTO, COMPILE_AUTO, RunSpec
from allranks.train import checkpoint, distributed, strategies
from allranks.train.attempt import Attempt, versions
from allranks.train.checkpoint.loader import require_same
from allranks.train.checkpoint.saver import make_saver
from allranks.train.data.prepared import PreparedData
from allranks.train.loop import adamw
from allranks.train.models import adapters, precision
from allranks.train.models.attention_flops import attention_cost
from allranks.train.models.attention_trial import choose_attention, remark_of
from allranks.train.models.block_forward import Compilation, set_block_forward
from allranks.train.models.float8 import use_float8
from allranks.train.models.losses import LossModel
from allranks.train.models.moe import ExpertLoad, active_parameters, count_parameters
from allranks.train.models.quantized_base import quantize_base
from allranks.train.models.weight_loader import LoadReport, WeightLoader
from allranks.train.strategies.base import MakeOptimizer, Strategy
from allranks.train.sync_proof import weights_digest
from allranks.train.tasks import TokenTask
from allranks.utils.filesystem import apply_umask


def set_up_strategy(
    strategy: Strategy,
    loader: WeightLoader,
    module: nn.Module,
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    group: dist.ProcessGroup,
    clip_norm: float | None,
) -> tuple[bytes | None, LoadReport]:
    """Call the strategy's `setup`, with `module`: the model with its loss. Collective.

    A strategy that `loads_in_parts` keeps its shard of each weight; the others get a model with all weights.

    Returns:
        The digest of the full weights, if no rank holds them after `setup`; and what loading did.
    """
    in_parts = strategy.loads_in_parts
    loader.begin(module, model, in_parts=in_parts)
    if in_parts:
        strategy.weight_loader = loader
    else:
        loader.whole(module.named_parameters())
    whole = None if in_parts or strategy.replicated else weights_digest(model)
    strategy.setup(module, make_optimizer, group, clip_norm)
    parts, loaded = loader.finish()
    return parts if in_parts else whole, loaded


@dataclass
class TrainingSetup:
    """The model, its loss, its strategy and what belongs to them."""

    model: torch.nn.Module
    loss_model: torch.nn.Module
    strategy: Strategy
    published: checkpoint.PublishedFiles
    saver: checkpoint.Saver
    digest: bytes | None  # of the full weights, if the strategy shards them
    experts: ExpertLoad | None  # of a mixture of experts
    identity: checkpoint.TrainingIdentity


def build_training(attempt: Attempt, task: TokenTask, data: PreparedData) -> TrainingSetup:
    """Load or create the model, add adapters, and call the strategy's `setup`. Collective."""
    spec, world = attempt.spec, attempt.world
    started = time.perf_counter()
    torch.use_deterministic_algorithms(spec.train.deterministic)
    # first, so that a missing library is reported early
    strategy = strategies.create(attempt.plan.strategy, dict(attempt.plan.strategy_options))

    def save_base_model(model: Any) -> None:
        """Save a model that was built from a config, so that its adapters can name it as their base."""
        if spec.adapter.type != "none" and not (attempt.run.model / "config.json").exists():
            model.save_pretrained(str(attempt.run.model))
            data.tokenizer.save_pretrained(str(attempt.run.model))
            apply_umask(attempt.run.model)

    model, filler = task.load(world, data, stored_dtype(attempt.plan, spec), save_base_model)
    base = attempt.model.name  # as the saved adapter names it
    if base.startswith("tiny:"):
        base = str(attempt.run.model.absolute())
    elif (folder := Path(base).expanduser()).is_dir():
        base = str(folder.absolute())
    seed, revision = spec.train.seed, attempt.model.revision
    model = adapters.add_adapter(
        model, spec.adapter, classifier=task.classifier, base=base, revision=revision, seed=seed
    )
    adapted = adapters.adapter_remarks(model, spec.adapter)
    compilation = _compilation(attempt, classifier=task.classifier)
    set_forward(model, attempt.plan, world.device, compilation)
    published = checkpoint.plan_published_files(model, world.size)
    model.to(world.device)
    loss_model = task.loss_model(model)
    ways = [*ways_of_computing(attempt, loss_model), *_choose_attention(attempt, task, data, loss_model)]
    if compilation is not None and attempt.model.compile == COMPILE_AUTO:
        ways.append(f"transformer blocks are compiled: {attempt.plan.compile_reason}")
    experts = ExpertLoad(loss_model, world.device, compiled=compilation is not None)
    # before sharding, which may leave only empty tensors, and before weights take 4 bits
    parameters, active = count_parameters(model), active_parameters(model)
    attention = attention_cost(model)
    ways += [
        *quantize_base(model, filler, attempt.model.quantize, world.device),
        *(use_float8(model, world.device) if attempt.model.float8 else []),
    ]
    distributed.seed_rank(spec.train.seed, world.rank)
    digest, loaded = set_up_strategy(
        strategy, filler, loss_model, model, adamw(spec.train), world.group, spec.train.max_grad_norm
    )
    attempt.events.write("load", **msgspec.to_builtins(loaded))
    if loaded.readers:
        attempt.say_once(f"loading: {loaded.readers} read the weight files, because {loaded.why}")
    if filler.drawn and attempt.plan.max_steps == 0 and world.is_first:
        message = (
            f"model.name {attempt.model.name} has no trained classifier: {', '.join(filler.drawn)} are random, and "
            "train.max_steps is 0, so that accuracy and loss say nothing about the model; train it, or name a model "
            "with a classifier"
        )
        attempt.events.write("warning", what="model", message=message)
    for what, remarks in (("adapter", adapted), ("strategy", strategy.remarks), ("model", ways)):
        for remark in remarks:
            attempt.events.write("remark", what=what, message=remark)
            attempt.say_once(remark)
    if strategy.engine_facts:  # the strategy uses another library's
        attempt.events.write("engine", **strategy.engine_facts)
    if strategy.engine_config and world.is_first:
        write_json(attempt.run.engine_config, strategy.engine_config)
    attempt.events.write(
        "model",
        parameters=parameters[0],
        parameters_trained=parameters[1],
        parameters_active=active[0] if active else None,
        parameters_trained_active=active[1] if active else None,
        attention_flops_per_pair=attention.flops_per_pair if attention else None,
        attention_window=attention.window if attention else None,
        seconds=round(time.perf_counter() - started, 3),
        device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        torch=str(torch.__version__),
        versions=versions(),
        threads=torch.get_num_threads(),
    )
    frozen = loaded.digest if spec.adapter.type != "none" else ""
    identity = checkpoint.TrainingIdentity(sequences=len(data.train), data_hash=data.facts.train_hash, base_hash=frozen)
    saver = make_saver(attempt, strategy, model, data.tokenizer, published, identity)
    return TrainingSetup(model, loss_model, strategy, published, saver, digest, experts if experts else None, identity)


def ways_of_computing(attempt: Attempt, loss_model: nn.Module) -> list[str]:
    """Log how attention of packed rows is computed, and return remarks on what takes more memory than usual."""
    remarks = []
    if isinstance(loss_model, LossModel):
        if loss_model.packed is not None and loss_model.packed.within_rows:
            attempt.events.write("remark", what="model", message=loss_model.packed.remark)
        elif loss_model.packed is not None:
            remarks.append(loss_model.packed.remark)
        if loss_model.whole_logits:
            remarks.append(f"loss: from the logits of all scored tokens at once; {loss_model.whole_logits}")
        if loss_model.routers:
            remarks.append(loss_model.routers)
    return remarks


def _choose_attention(attempt: Attempt, task: TokenTask, data: PreparedData, loss_model: Any) -> list[str]:
    """Choose the kernel of attention for ``model.attention: auto``; return remarks. Collective."""
    isolated, world, dtype = attempt.data.packing == "isolated", attempt.world, attempt.plan.dtype
    if attempt.model.attention != ATTENTION_AUTO:
        return []
    if task.classifier or not isinstance(loss_model, LossModel):
        return ["model.attention auto: sdpa as usual, because this is no causal language model"]
    if isolated and not (loss_model.packed and loss_model.packed.within_rows):
        return ["model.attention auto: sdpa as usual, because packed rows of this model need a dense mask"]
    earlier = None
    if attempt.args.resume_step is not None and not attempt.args.inexact:
        before = (
            [e for e in read_events(attempt.run.events_of(0)) if e["event"] == "attention"] if world.is_first else []
        )
        earlier = distributed.from_first(world, before[-1].get("chosen") if before else None)
    first = np.arange(min(attempt.batch.micro_batch_size, len(data.train)))
    batch = task.batches(data, dtype, world.device, compiled=attempt.plan.compiled)(first)
    kind = precision.DTYPES[dtype]
    choice = choose_attention(world, loss_model.model, kind, batch, isolated=isolated, earlier=earlier)
    attempt.events.write("attention", **choice)
    return [remark_of(choice)]


def stored_dtype(plan: LaunchPlan, spec: RunSpec) -> str:
    """Return the dtype in which the model is loaded: that of trained weights, or with adapters of the frozen base."""
    return plan.param_dtype if spec.adapter.type == "none" else plan.dtype


def set_forward(
    model: nn.Module, plan: LaunchPlan, device: torch.device, compilation: Compilation | None = None
) -> None:
    """Store trained weights in the plan's ``param_dtype``, compute in its ``dtype``, recompute activations as it says,
    and compile: before the strategy's `setup`, so that its hooks are outside of what is compiled."""
    precision.cast_trained_weights(model, precision.DTYPES[plan.param_dtype])
    precision.use_autocast(model, precision.DTYPES[plan.dtype], device)
    set_block_forward(model, plan.recomputation, compilation)


def _compilation(attempt: Attempt, *, classifier: bool) -> Compilation | None:
    """Return how blocks are compiled, or None if they are not."""
    if attempt.model.compile is False:
        return None

    def report(reason: str) -> None:
        message = f"model.compile: this rank continues without compiled blocks, because {reason}"
        attempt.events.write("remark", what="compile", message=message)
        attempt.say(message)

    if not attempt.plan.compiled:
        if attempt.model.compile is True:  # auto has decided
            report(attempt.plan.compile_reason)
        return None
    return Compilation(static=not classifier, report=lambda failure: report(f"the compiler failed: {failure}"))


def restore(attempt: Attempt, built: TrainingSetup) -> int:
    """Load the checkpoint that the launcher chose, if any, and return the first step to run. Raise `CheckpointError` on
    every rank if it was written with other data or another base model, unless the resume may be inexact."""
    step = attempt.args.resume_step
    if step is None:
        if attempt.args.anew:
            attempt.events.write("resume", from_step=0, inexact=False)
        return 0
    folder = attempt.run.checkpoint(step)
    if attempt.args.inexact and not (folder / "state").is_dir():
        checkpoint.load_weights_only(folder, built.strategy, built.published, built.model)
    else:
        require_same(attempt.world, folder, built.identity, allow_inexact=attempt.args.inexact)
        checkpoint.load_full(folder, built.strategy, built.published, attempt.world.rank)
    if built.digest is not None:  # each rank has read its ranges of files whose hashes were verified
        files = checkpoints.read_manifest(attempt.run, step)["files"]
        built.digest = hashlib.sha256(msgspec.json.encode(files)).digest()
    attempt.events.write("resume", from_step=step, inexact=attempt.args.inexact)
    return step


def log_experts(attempt: Attempt, built: TrainingSetup, done: int) -> None:
    """Log how many tokens each expert of a mixture received since the last call. Collective."""
    if built.experts:
        counts = built.experts.counts(done, attempt.world.group)
        if attempt.world.is_first:
            attempt.events.write("experts", **msgspec.to_builtins(counts))


def log_end(attempt: Attempt, built: TrainingSetup, done: int) -> None:
    """Log this rank's own norms and sizes: comparing ranks shows if gradients were averaged and state was sharded."""
    if attempt.spec.observe.proof_at_end:
        digest = weights_digest(built.model).hex() if built.strategy.replicated else None
        elements = sum(r.length for r in built.strategy.state_ranges())
        attempt.events.write("end", step=done, weights_hash=digest, state_elements=elements)
