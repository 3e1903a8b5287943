"""What the ranks of the distributed tests do: ``python -m tests.dist.cases CASE RESULT ARGS``, one process a rank."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft.tuners.lora.layer import Linear, ParamWrapper
from torch.distributed.fsdp import FSDPModule

from allranks.errors import AllranksError, ProofFailed
from allranks.experiments.gates import compare_traffic
from allranks.rundir.paths import RunDir
from allranks.spec.records import TrainSpec
from allranks.train import strategies
from allranks.train.benchmark.baseline import update_error
from allranks.train.benchmark.measurements import CollectiveRecorder, MemoryUsage
from allranks.train.checkpoint import load_full, plan_published_files
from allranks.train.data.batches import IGNORE, Batch, Rows, SampleOrder, collate
from allranks.train.data.prepared import TokenSet
from allranks.train.distributed import DistContext
from allranks.train.evaluation import Evaluator, evaluating
from allranks.train.loop import adamw
from allranks.train.models import lora, lora_experts
from allranks.train.models.lora import fuse_lora
from allranks.train.models.lora_experts import fuse_expert_lora
from allranks.train.models.losses import LossModel
from allranks.train.step_metrics import AsyncStepReduction
from allranks.train.strategies import shards
from allranks.train.strategies.base import Sizes, transformer_blocks
from allranks.train.strategies.shards import MASTER
from allranks.train.sync_proof import prove_ranks
from tests.dist import making, plants, precision_cases
from tests.dist.making import STEPS, built, go_on, orders_of, prepared, run_steps, tokens_of
from tests.dist.variants import ALONE, REPLICATED, UNUSED_OPTIONS, VARIANTS

FORMS = {**VARIANTS, **REPLICATED, **ALONE}


def parities(world: DistContext, args: dict[str, Any]) -> Any:
    """For each (strategy, variant): how far its weights are from those of one process, on the first rank."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    found = []
    references: dict[str, Any] = {}
    for name, variant in args["pairs"]:
        how = dict(FORMS[variant])
        if how.get("extra") in ("sometimes", "in_block"):
            how["salt"] = making.a_salt(world, tokens, how)
            if name in UNUSED_OPTIONS and "options" not in how:
                how["options"] = {"find_unused_parameters": True}
        if world.is_first and variant not in references:
            references[variant] = reference_of(world, tokens, how)
        ours, spread, norms, routers, losses = making.train_with(name, world, tokens, how, Path(args["folder"]))
        found.append({"strategy": name, "variant": variant, "error": None, "spread": spread, "routers": routers})
        if world.is_first:
            start, reference, right_norms, right_losses = references[variant]
            found[-1] |= {
                "error": update_error(ours, reference, start),
                "norm_error": max(abs(n - r) / r for n, r in zip(norms, right_norms, strict=True)),
                "loss_error": float(np.abs(np.subtract(losses, right_losses)).max()),
                "moved": max((float(v.abs().max()) for k, v in ours.items() if "lora_B" in k), default=None),
            }
    return found


def forwards_of_lora(world: DistContext, args: dict[str, Any]) -> Any:
    """For each (strategy, variant): what computed LoRA in a step, and the strategy's remarks.

    ``together``: linear layers of each call of the fused function; ``peft``: calls of PEFT's own forward.
    """
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    found = []
    for name, variant in args["pairs"]:
        how = FORMS[variant]
        strategy, _ = prepared(name, world, how)
        with counted_lora() as counts:
            go_on(strategy, world, tokens, how, 0, 1, Path(args["folder"]))
        found.append({"strategy": name, "variant": variant, "remarks": list(strategy.remarks), **counts})
    return found


@contextmanager
def counted_lora() -> Iterator[dict[str, Any]]:
    counts: dict[str, Any] = {"together": [], "experts": 0, "peft": 0}
    fused, experts = lora.LoRALinears.apply, lora_experts.GroupedLoRA.apply
    usual = {kind: kind.forward for kind in (Linear, ParamWrapper)}  # called as `type(layer).forward`

    def linears(x: Any, scales: Any, *rest: Any) -> Any:
        counts["together"].append(len(scales))
        return fused(x, scales, *rest)

    def grouped(*rest: Any) -> Any:
        counts["experts"] += 1
        return experts(*rest)

    def counting(forward: Any) -> Any:
        def plain(self: Any, *rest: Any, **named: Any) -> Any:
            counts["peft"] += 1
            return forward(self, *rest, **named)

        return plain

    lora.LoRALinears.apply, lora_experts.GroupedLoRA.apply = linears, grouped  # type: ignore[method-assign,assignment]
    for kind, forward in usual.items():
        kind.forward = counting(forward)  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        del lora.LoRALinears.apply, lora_experts.GroupedLoRA.apply  # type: ignore[misc]
        for kind, forward in usual.items():
            kind.forward = forward  # type: ignore[method-assign]


def bad_gradient(world: DistContext, args: dict[str, Any]) -> Any:
    """For each strategy: two good steps, one whose loss is not finite on rank 1 alone, and a good one: the weights must
    be those of the two steps on all ranks until the host hears of it."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    order = orders_of(world, tokens, {})[world.rank]
    found = []
    for name in args["names"]:
        strategy, _ = prepared(name, world, {})
        norms, kept = [], {}
        for step in range(4):
            loss = strategy.module(collate(tokens, order.micro_batches(step)[0], 0, None))
            strategy.backward(loss * (float("nan") if step == 2 and world.rank == 1 else 1.0))
            norms.append(float(strategy.step()))
            if step == 1:
                kept = strategy.weights(trained_only=True)
        now = strategy.weights(trained_only=True)
        same = all(torch.equal(w, now[n]) for n, w in kept.items())
        found.append({"strategy": name, "finite": [bool(np.isfinite(n)) for n in norms], "same": same})
    return found


def refusals(world: DistContext, args: dict[str, Any]) -> Any:
    said = []
    for name in ("pytorch_zero2", "pytorch_zero3"):
        shared, mixed = built({"shared": True}), built({})
        mixed.model.lm_head.to(torch.bfloat16)  # type: ignore[union-attr]
        said += [_said(name, {}, module, world) for module in (shared, mixed)]
        said.append(_said(name, {"adapters": "ignored", "offload": "optimizer"}, built({"lora": True}), world))
        said.append(_said(name, {"adapters": "ignored"}, built({}), world))
    return said


def _said(name: str, options: dict[str, Any], module: LossModel, world: DistContext) -> str:
    try:
        strategies.create(name, options).setup(module, adamw(TrainSpec()), world.group, 1.0)
    except AllranksError as error:
        return str(error)
    return "nothing"


def gathered_at_once(world: DistContext, args: dict[str, Any]) -> Any:
    """The most blocks of `zero3` whose weights are whole at one time, and the most bytes of them."""
    how = {"config": {"num_hidden_layers": args["blocks"]}}
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    strategy, module = prepared("zero3", world, how)
    units, seen = strategy._units, []

    def look(*_: Any) -> None:
        sizes = [sum(f.whole.untyped_storage().nbytes() for f in unit.flats) for unit in units]
        seen.append((sum(s > 0 for s in sizes), sum(sizes)))

    for part in module.modules():
        part.register_forward_hook(look)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    go_on(strategy, world, tokens, how, 0, 2, Path(args["folder"]))
    all_bytes = sum(flat.bytes for unit in units for flat in unit.flats)
    return {"blocks": max(n for n, _ in seen), "share": max(b for _, b in seen) / all_bytes, "looks": len(seen)}


def gathered_by_deepspeed(world: DistContext, args: dict[str, Any]) -> Any:
    """With LoRA: the largest share of the elements that is gathered at one time, and what is left after each step."""
    how = {"lora": True, "accum": 2, "config": {"num_hidden_layers": args["blocks"]}, **args["how"]}
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    strategy, module = prepared("deepspeed_zero3", world, how)
    every: list[Any] = list(module.parameters())
    whole, shares, left = sum(p.ds_numel for p in every), [], []

    def look(*_: Any) -> None:
        shares.append(sum(p.numel() for p in every) / whole)

    for block in transformer_blocks(module):
        block.mlp.register_forward_hook(look)  # type: ignore[union-attr]
    for parameter in every:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(look)
    for step in range(3):
        go_on(strategy, world, tokens, how, step, step + 1, Path(args["folder"]))
        left.append(sum(p.numel() > 0 for p in every))
    return {"share": max(shares), "looks": len(shares), "left": left}


def mechanism(world: DistContext, args: dict[str, Any]) -> Any:
    """For each (strategy, variant): what its process group did in two steps that its formula does not say, or None."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    found = []
    for name, variant in args["pairs"]:
        how = FORMS[variant]
        strategy, _ = prepared(name, world, how)
        sizes = Sizes(tuple(p.numel() * p.element_size() for p in built(how).parameters() if p.requires_grad))
        recorder = CollectiveRecorder(1, 2)
        run_steps(name, strategy, world, tokens, how, Path(args["folder"]), 3, watcher=recorder)
        expected = [asdict(t) for t in strategy.traffic(sizes, world.size, how.get("accum", 1))]
        problem = compare_traffic(expected, recorder.totals())
        found.append({"strategy": name, "variant": variant, "problem": problem, "steps": recorder.steps})
    return found


def memory(world: DistContext, args: dict[str, Any]) -> Any:
    """Bytes of weights, gradients and optimizer state that this rank really holds when it updates, by strategy."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    found = {}
    for name in args["names"]:
        strategy, module = prepared(name, world, {})
        held = MemoryUsage(strategy, module)
        go_on(strategy, world, tokens, {}, 0, 2, Path(args["folder"]))
        found[name] = held.weights() + held.gradients + held.optimizer_state()
        held.remove()
    return found


def reference_of(
    world: DistContext, tokens: TokenSet, how: dict[str, Any], module: LossModel | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float], list[list[float]]]:
    """One process, no strategy, no allranks loop: the weights before and after, norms and losses.

    The loss is scaled as DDP's mean over ranks needs it: in bfloat16 a factor that is no power of 2 rounds otherwise.
    """
    loss_model = (module or built(how)).train()
    named = [(n, p) for n, p in loss_model.named_parameters() if p.requires_grad]
    start = {n: p.detach().clone() for n, p in named}
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.0, fused=True)  # rounds as ours does
    orders = orders_of(world, tokens, how)
    norms, losses = [], []
    for step in range(STEPS):
        parts = [0.0, 0.0]
        total = int(tokens.trained[orders[0].global_batch(step)].sum())
        for micro in range(how.get("accum", 1)):
            for order in orders:
                batch = collate(tokens, order.micro_batches(step)[micro], 0, None).to(world.device)
                balanced = bool(how.get("router_loss"))
                loss, router = plain_losses(loss_model.model, batch) if balanced else (loss_model(batch), 0.0)
                (loss * world.size / total).backward()
                parts = [parts[0] + (float(loss.detach()) - router) / total, parts[1] + router / total]
        losses.append(parts)
        for _, p in named:
            if p.grad is not None:
                p.grad.div_(world.size)
        norms.append(float(torch.nn.utils.get_total_norm([p.grad.float() for _, p in named if p.grad is not None])))
        if how.get("clip", 1.0):
            torch.nn.utils.clip_grad_norm_([p for _, p in named], how.get("clip", 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return start, {n: p.detach().clone() for n, p in named}, norms, losses


def plain_losses(model: Any, batch: Batch) -> tuple[torch.Tensor, float]:
    """The loss of plain transformers with its load-balancing loss, and this part alone, times the trained tokens."""
    labels = torch.nn.functional.pad(batch.targets[:, :-1], (1, 0), value=IGNORE)
    out = model(batch.input_ids, attention_mask=batch.real_tokens().long(), labels=labels, output_router_logits=True)
    return out.loss * batch.tokens_trained, float(out.aux_loss) * model.router_aux_loss_coef * batch.tokens_trained


def trainer_bug(world: DistContext, args: dict[str, Any]) -> Any:
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    try:
        making.train_with("hf_trainer", world, tokens, {"accum": 2}, Path(args["folder"]))
    except AllranksError as error:
        return {"said": str(error), "kind": type(error).__name__}
    return {"said": None, "kind": None}


def refused(world: DistContext, args: dict[str, Any]) -> Any:
    pairs = [(name, FORMS[variant]) for name, variant in args["pairs"]]
    return [_said(name, making.options_of(name, how), built(how), world) for name, how in pairs]


def save_shards(world: DistContext, args: dict[str, Any]) -> Any:
    """Each strategy's state after two steps, in parts and, for comparison, whole and without files."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    for name in args["names"]:
        strategy, _ = prepared(name, world, args["how"])
        go_on(strategy, world, tokens, args["how"], 0, 2, Path(args["folder"]))
        folder = Path(args["folder"]) / name
        with making.Collectives() as calls:
            parts = [*strategy.weight_shards(), *shards.state_shards(strategy.state_ranges())]
        assert not calls.seen, calls.seen
        own = [part for shard in parts if (part := shards.share_to_write(shard, world.rank, world.size)).tensor.numel()]
        folder.mkdir(exist_ok=True)
        shards.write_parts(own, folder / shards.shard_file(world.rank))
        dist.barrier(group=world.control)
        state = making.whole_state(strategy, world)
        if world.is_first:
            torch.save(state, Path(args["folder"]) / f"{name}.pt")


def load_shards(world: DistContext, args: dict[str, Any]) -> Any:
    """What differs once each strategy has read what each other one wrote: names by strategy and source."""
    wrong = []
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    for name in args["names"]:
        strategy, _ = prepared(name, world, args["how"])
        for source in args["sources"]:
            folder = Path(args["folder"]) / source
            if args.get("trained"):  # another state, which must not show afterwards
                go_on(strategy, world, tokens, args["how"], 0, 1, Path(args["folder"]))
                if name == "deepspeed_zero3" and not all(p.numel() for p in strategy.module.parameters()):
                    wrong.append((name, source, "not all weights are whole"))
            ranges = strategy.state_ranges()
            room = shards.allocate_state(ranges, shards.stored_sizes(folder))
            shards.read_shards([*strategy.weight_shards(), *room], folder, world.control)
            strategy.finish_loading()
            saved = torch.load(Path(args["folder"]) / f"{source}.pt", weights_only=True)
            whole = making.whole_state(strategy, world)
            names = [*_copies_that_differ(ranges, saved), *_state_that_differs(saved, whole)]
            # twice: DeepSpeed's stage 3 has small weights whole and in parts, and looks at the parts from then on
            for _ in range(2):
                whole = strategy.weights(trained_only=True)
                names += [n for n, w in whole.items() if not torch.equal(w.flatten(), saved[f"model/{n}"])]
            wrong += [(name, source, n) for n in names]
    return wrong


def _state_that_differs(saved: dict[str, torch.Tensor], again: dict[str, torch.Tensor]) -> list[str]:
    """Keys whose values were lost or changed; moments have the dtype of what they update; not all keep masters."""
    assert len(saved) > 20
    missing = [key for key in saved if key not in again and not key.endswith(f"/{MASTER}")]
    shared = saved.keys() & again.keys()
    return missing + [key for key in shared if not torch.equal(saved[key].to(again[key].dtype), again[key])]


def _copies_that_differ(ranges: Any, saved: dict[str, torch.Tensor]) -> list[str]:
    wrong = []
    for r in ranges:
        if r.copy_of is None:
            continue
        whole = saved.get(f"optimizer/{r.name}/{MASTER}", saved[f"model/{r.name}"]).float()
        if not torch.equal(r.of(r.parameter).cpu(), whole[r.offset : r.offset + r.length]):
            wrong.append(f"copy of {r.name}")
    return wrong


def states(world: DistContext, args: dict[str, Any]) -> Any:
    """For (saved under, loaded under, variant): how far two steps, a checkpoint, a load and two steps are from four.

    ``evaluations``: the held-out losses after two and after four steps, and those of one process on rank 0.
    """
    folder = Path(args["folder"])
    tokens = tokens_of(folder / f"rank{world.rank}", 37)
    found = []
    bugs = args.get("plants") or [None] * len(args["triples"])
    for i, ((saver, loader, variant), bug) in enumerate(zip(args["triples"], bugs, strict=True)):
        how = VARIANTS[variant]
        first, module = prepared(saver, world, how)
        go_on(first, world, tokens, how, 0, 2, folder)
        evaluator = Evaluator(world, module, tokens, pad_id=0, batch_size=4, classifier=False)
        losses, right = [evaluator.run().loss], [_loss_alone(how, first.weights(trained_only=True), tokens, world)]
        run = RunDir(folder / f"{saver}.{i}")
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        published = plan_published_files(built(how).model, world.size)
        making.saver_of(run, world, first, module, published).save(2, "full")
        go_on(first, world, tokens, how, 2, 4, folder)
        wanted = first.weights(trained_only=True)
        losses.append(evaluator.run().loss)
        right.append(_loss_alone(how, wanted, tokens, world))
        if bug:
            plants.plant(bug, world)
        second, _ = prepared(loader, world, how)
        load_full(run.checkpoint(2), second, published, world.rank)
        go_on(second, world, tokens, how, 2, 4, folder)
        ours = second.weights(trained_only=True)
        error = max((float((ours[n].double() - w.double()).abs().max()) for n, w in wanted.items()), default=0.0)
        evaluations = [losses, right]
        found.append({"saved": saver, "loaded": loader, "variant": variant, "error": error, "evaluations": evaluations})
    return found


def _loss_alone(how: dict[str, Any], weights: dict[str, torch.Tensor], tokens: TokenSet, world: DistContext) -> Any:
    """The held-out loss of a new model with these trained weights, by the first rank alone."""
    if not world.is_first:
        return None
    model = built(how)
    model.load_state_dict(weights, strict=False)
    with evaluating(model), torch.no_grad():
        losses = [model(collate(tokens, np.array([row]), 0, None)).double() for row in range(len(tokens))]
    return float(sum(losses)) / int(tokens.trained[: len(tokens)].sum())


def same_seeds(world: DistContext, args: dict[str, Any]) -> Any:
    tokens, found = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37), {}
    for name in args["names"]:
        strategy, _ = prepared(name, world, VARIANTS["lora"])
        try:
            go_on(strategy, world, tokens, VARIANTS["lora"], 0, 1, Path(args["folder"]), seed_of_rank=0)
            found[name] = ""
        except ProofFailed as error:
            found[name] = str(error)
    return found


def reloaded_adapter(world: DistContext, args: dict[str, Any]) -> Any:
    """For each strategy: an adapter's answers beside those of plain PEFT that loads its files.

    ``changed`` compares them with PEFT's model whose forward is the run's.
    """
    from peft import PeftModel

    folder = Path(args["folder"])
    tokens = tokens_of(folder / f"rank{world.rank}", 37)
    batch = collate(tokens, np.arange(4), 0, None)
    found = []
    for i, one in enumerate(args["names"]):
        name, more = (one, {}) if isinstance(one, str) else one
        how = {"lora": True, "accum": 2, **more}
        strategy, module = prepared(name, world, how)
        go_on(strategy, world, tokens, how, 0, 3, folder)
        module.eval()
        with torch.no_grad():
            ours = module.model(input_ids=batch.input_ids).logits
        run = RunDir(folder / f"{name}.{i}")
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        published = plan_published_files(built(how).model, world.size)
        making.saver_of(run, world, strategy, module, published).save(3, "weights_only")
        if world.is_first:
            bare = built({**how, "lora": False}).model.eval()
            with torch.no_grad():
                without = bare(input_ids=batch.input_ids).logits
                plain = PeftModel.from_pretrained(bare, str(run.checkpoint(3))).eval()
                theirs = plain(input_ids=batch.input_ids).logits
                fuse_lora(plain)
                fuse_expert_lora(plain)
                fused = plain(input_ids=batch.input_ids).logits
            apart, learned, changed = (float((ours - other).abs().max()) for other in (theirs, without, fused))
            names = [name for name, _ in plain.named_parameters() if ".lora_" in name]
            saved = sorted({name.split(".lora_")[0].rsplit(".layers.", 1)[-1] for name in names})
            found.append({"strategy": name, "apart": apart, "learned": learned, "changed": changed, "saved": saved})
    return found


class LateSampler(SampleOrder):
    """Gives every rank the rows of rank 0 from the fourth step on."""

    def micro_batches(self, step: int) -> list[Rows]:
        return list(self.global_batch(step).reshape(1, self._world, -1)[:, self._rank if step < 3 else 0])


def proof(world: DistContext, args: dict[str, Any]) -> Any:
    fault = args["fault"]
    model, _ = making.model_of(seed=2 if fault == "weights" and world.rank == 1 else 1)
    if fault == "one_weight" and world.rank == 1:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-6
    reader = 0 if fault == "sampler" and world.rank == 1 else world.rank
    kind = LateSampler if fault == "late_sampler" else SampleOrder
    order = kind(21, 1, making.batch_of(1, world.size), reader, world.size)
    planned = world.size + 1 if fault == "absent" else world.size
    try:
        return {"hash": prove_ranks(world, planned, model, order).weights_hash}
    except AllranksError as error:
        return {"error": str(error), "exit_code": error.exit_code}


def evaluation(world: DistContext, args: dict[str, Any]) -> Any:
    model, _ = making.model_of()
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 23)
    found = []
    for size in (1, 4, 16):
        module = LossModel(model, classifier=False)
        result = Evaluator(world, module, tokens, pad_id=0, batch_size=size, classifier=False).run()
        found.append([result.loss, result.perplexity, result.targets, result.rows])
    return found


def evaluation_collectives(world: DistContext, args: dict[str, Any]) -> Any:
    """For each strategy: how often an evaluation of 23 rows calls which collective, by torch's name; and of FSDP2,
    which modules the forward passes of its units begin with."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 23)
    calls_of, roots = {}, set()
    for name in args["names"]:
        _, module = prepared(name, world, {"lora": True, "moe": True})
        for unit in (m for m in module.modules() if isinstance(m, FSDPModule) and m is not module):
            own, state = module._get_fsdp_state(), unit._get_fsdp_state()._state_ctx
            unit.register_forward_pre_hook(lambda *_, own=own, s=state: roots.add(s.iter_forward_root is own))
        with making.Collectives() as calls:
            Evaluator(world, module, tokens, pad_id=0, batch_size=2, classifier=False).run()
        calls_of[name] = dict(Counter(calls.seen))
    return {"calls": calls_of, "roots": list(roots)}


def stop_agreement(world: DistContext, args: dict[str, Any]) -> Any:
    """Only rank 1 is asked to stop; all must hear of it for the same step."""
    control = AsyncStepReduction(world)
    heard = []
    for step in range(5):
        agreed = control.finish()
        heard.append(agreed.stop if agreed else None)
        control.start(step, torch.tensor(1.0), torch.tensor(2.0), stop=world.rank == 1 and step == 2)
    last = control.drain()
    return {"heard": heard, "loss": last[-1].loss_sum, "norm": last[-1].grad_norm}


def main(known: dict[str, Any]) -> None:
    making.main({**vars(precision_cases), **globals(), **known})


if __name__ == "__main__":
    main({})
