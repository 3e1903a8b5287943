"""Cases about checkpoints; `test_saves.py` starts them on ranks."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from allranks.errors import AllranksError
from allranks.rundir.checkpoints import find_damage, newest_checkpoint
from allranks.rundir.paths import RunDir
from allranks.train.checkpoint import commit as publishing
from allranks.train.checkpoint import load_full, load_weights_only, plan_published_files, saver
from allranks.train.checkpoint import writer as writing
from allranks.train.distributed import DistContext
from allranks.train.evaluation import Evaluator
from allranks.train.replica_check import ReplicaCheck
from allranks.train.strategies import shards
from tests.dist.making import built, go_on, main, prepared, saver_of, tokens_of, whole_state
from tests.dist.plants import instead

LORA: dict[str, Any] = {"lora": True, "accum": 2}


def trained(folder: Path, name: str, world: DistContext, how: dict[str, Any], **spec: Any) -> tuple[Any, ...]:
    """A strategy after three steps, its module, and its saver."""
    tokens = tokens_of(folder / f"rank{world.rank}", 37)
    published = plan_published_files(built(how).model, world.size)
    strategy, module = prepared(name, world, how)
    go_on(strategy, world, tokens, how, 0, 3, folder)
    run = RunDir(folder / name)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    return strategy, module, saver_of(run, world, strategy, module, published, **spec), run


def said(action: Any) -> str | None:
    try:
        action()
    except AllranksError as error:
        return str(error)
    return None


def elsewhere(world: DistContext, args: dict[str, Any]) -> Any:
    """What each strategy saved, each other loads: full with the optimizer's state, weights_only without."""
    folder, found = Path(args["folder"]), []
    for writer, reader, how in args["triples"]:
        strategy, _, keeper, run = trained(folder / writer, writer, world, how)
        keeper.save(3, "full")
        keeper.save(4, "weights_only")
        wanted = strategy.weights(trained_only=True)
        states = moments_of(strategy, world)
        published = plan_published_files(built(how).model, world.size)
        for step in (3, 4):
            other, module = prepared(reader, world, how)
            if step == 3:
                load_full(run.checkpoint(3), other, published, world.rank)
                theirs = moments_of(other, world)
            else:
                load_weights_only(run.checkpoint(4), other, published, module.model)
                theirs = None
            ours = other.weights(trained_only=True)
            if world.is_first:
                apart = max(float((ours[n] - w).abs().max()) for n, w in wanted.items())
                moments = None if theirs is None else max(float((theirs[k] - t).abs().max()) for k, t in states.items())
                found.append({"writer": writer, "reader": reader, "step": step, "weights": apart, "moments": moments})
        if world.is_first:
            state = run.checkpoint(3) / "state"
            keys = {k for p in state.glob("shard-*.safetensors") for k in safe_open(p, "pt").keys()}  # noqa: SIM118
            found[-1]["twice"] = sorted(k for k in keys if k.startswith("model/") and ("lora" in k or "proj" in k))
            found[-1]["whole"] = [find_damage(run.checkpoint(step)) for step in (3, 4)]
            found[-1]["latest"] = run.latest_checkpoint.read_text().strip()
    return found


def moments_of(strategy: Any, world: DistContext) -> dict[str, torch.Tensor]:
    return {key: t for key, t in whole_state(strategy, world).items() if not key.startswith("model/")}


@contextmanager
def full_disk(owner: Any, name: str, world: DistContext) -> Iterator[None]:
    """A function fails on rank 1 for want of space."""

    def fail(usual: Any, *more: Any) -> Any:
        if world.rank == 1:
            raise OSError(28, "No space left on device")
        return usual(*more)

    put_back = instead(owner, name, fail)
    try:
        yield
    finally:
        put_back()


def absent(world: DistContext, args: dict[str, Any]) -> Any:
    """Rank 1 takes no part in a save: the others hear of it in time, by its number."""
    _, _, keeper, run = trained(Path(args["folder"]), "pytorch_ddp", world, LORA, timeout_s=2.0)
    keeper.save(1, "weights_only")
    problem = None if world.rank == 1 else said(lambda: keeper.save(2, "weights_only"))
    dist.barrier(group=world.control)
    return {"said": problem, "steps": run.checkpoint_steps()}


def one_fails(world: DistContext, args: dict[str, Any]) -> Any:
    """Rank 1 cannot write its part: every rank must hear that rank 1 failed, and nothing may be published."""
    _, _, keeper, run = trained(Path(args["folder"]), "pytorch_ddp", world, LORA)
    keeper.save(1, "full")
    with full_disk(writing, "write_files", world):
        first = said(lambda: keeper.save(2, "full"))
        keeper.save(2, "full", behind=True)  # behind training's back it is heard of at the next occasion
        later = said(keeper.finish)
    after = run.checkpoint_steps()
    for step in (3, 4):
        keeper.save(step, "weights_only")
    keeper.finish()
    dist.barrier(group=world.control)  # rank 0 alone removes old ones
    names = sorted(p.name for p in run.checkpoints.iterdir())
    run.spec.touch()
    keeper._together._run = RunDir(run.root / "of another disk") if world.rank == 1 else run
    with full_disk(writing, "write_files", world):
        lost = said(lambda: keeper.save(5, "full"))
    return {"said": first, "later": later, "after": after, "names": names, "lost": lost}


def planted(world: DistContext, args: dict[str, Any]) -> Any:
    """Saves that lie, one after the other: each must be refused, and the good one before stay the newest."""
    folder, problems = Path(args["folder"]), {}
    for name, how in (("zero3", {}), ("zero3", LORA), ("pytorch_zero3", {}), ("pytorch_ddp", {})):
        strategy, _, keeper, run = trained(folder / str(len(problems)), name, world, how)
        keeper.save(1, "full")
        for bug, put in bugs(strategy, world).items():
            put_back = put()
            if put_back is not None:
                problems[f"{name} {'lora' if how else 'full'} {bug}"] = said(partial(keeper.save, 2, "full"))
                put_back()
        assert run.checkpoint_steps() == [1], (name, run.checkpoint_steps(), problems)
        assert newest_checkpoint(run) == (1, [])
        keeper.save(3, "full")
    return problems


def _sliced(strategy: Any, name: str, change: Any) -> Any:
    return None if strategy.replicated else instead(strategy, name, lambda usual: change(usual()))


def bugs(strategy: Any, world: DistContext) -> dict[str, Any]:
    """Each plants itself and returns how it is taken out again; None where it means nothing."""

    def own(shards: Any) -> Any:
        """As if the rank's own slice were the tensor."""
        return [replace(s, numel=s.tensor.numel(), offset=0, everywhere=True) for s in shards]

    def late(ranges: Any) -> Any:
        return [replace(r, offset=max(r.offset - (world.rank == 1), 0)) for r in ranges]

    def write(usual: Any, parts: Any, path: Path) -> bytes:
        written = usual(parts, path)
        if world.rank == 0 and path.parent.name == "on-the-way":
            _flip(path)
        return written

    return {
        "only_the_first_ranks_slice": lambda: _sliced(strategy, "weight_shards", own),
        "a_rank_left_out": lambda: _sliced(strategy, "weight_shards", lambda parts: parts if world.rank == 0 else []),
        "offset_by_one": lambda: _sliced(strategy, "state_ranges", late),
        "a_weight_changed_on_its_way": lambda: _spoilt(lambda ts: {**ts, (k := min(ts)): ts[k] + 1e-3}),
        "a_weight_missing": lambda: _spoilt(lambda ts: {k: t for k, t in ts.items() if k != min(ts)}),
        "a_wrappers_prefix": lambda: _spoilt(lambda ts: {f"_orig_mod.{k}": t for k, t in ts.items()}),
        "another_dtype": lambda: _spoilt(lambda ts: {k: t.to(torch.bfloat16) for k, t in ts.items()}),
        "a_part_changed_on_its_way": lambda: None if strategy.replicated else instead(shards, "write_parts", write),
        "cut_short": lambda: _after_writing(lambda file: os.truncate(file, file.stat().st_size - 1)),
        "a_bit_flipped": lambda: _after_writing(_flip),
    }


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _spoilt(change: Any) -> Any:
    def spoil(file: Path) -> None:
        save_file({k: t.contiguous() for k, t in change(load_file(file)).items()}, file, metadata={"format": "pt"})

    return _after_writing(spoil)


def _after_writing(spoil: Any) -> Any:
    """Does something to the first file for others once it is written: on rank 0 alone, which wrote it."""

    def write(usual: Any, file: Path, *more: Any) -> bytes:
        written = usual(file, *more)
        if dist.get_rank() == 0:
            spoil(min(file.parent.glob("*.safetensors")))
        return written

    return instead(writing, "write_safetensors", write)


def weights_now(strategy: Any) -> dict[str, torch.Tensor]:
    return {s.key: s.tensor.clone() for s in strategy.weight_shards()}


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two states of one strategy."""
    floats = [k for k, t in other.items() if t.numel() and t.is_floating_point()]
    return max(float((one[k] - other[k]).abs().max()) for k in floats)


def restored(run: RunDir, step: int, name: str, world: DistContext, how: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of a new strategy that has loaded a checkpoint."""
    fresh, _ = prepared(name, world, how)
    load_full(run.checkpoint(step), fresh, plan_published_files(built(how).model, world.size), world.rank)
    return weights_now(fresh)


def behind(world: DistContext, args: dict[str, Any]) -> Any:
    """A save behind training holds the weights of its moment; a second one waits for it, and uses its memory again."""
    folder, name, how = Path(args["folder"]), args["name"], args["how"]
    strategy, _, keeper, run = trained(folder, name, world, how)
    heard: list[Any] = []
    keeper._on_published = lambda saved, removed: heard.append(saved)
    gate, usual, copied = threading.Event(), keeper._write, keeper._copies.of
    keeper._write = lambda save: (gate.wait(60), usual(save))[1]
    keeper._copies.of = lambda parts: (time.sleep(1.0), copied(parts))[1]
    moments = [weights_now(strategy)]
    keeper.save(1, "full", behind=True)
    before = run.checkpoint_steps()
    go_on(strategy, world, tokens_of(folder / f"rank{world.rank}", 37), how, 3, 4, folder)
    moments.append(weights_now(strategy))
    memory = {k: t.data_ptr() for k, t in keeper._copies._kept.items()}
    gate.set()
    keeper.save(2, "full", behind=True)
    between = run.checkpoint_steps()
    keeper.finish()
    reused = [memory[k] == t.data_ptr() for k, t in keeper._copies._kept.items()]
    return {
        "before": before, "between": between, "after": run.checkpoint_steps(), "moved": furthest(*moments),
        "apart": [furthest(restored(run, step, name, world, how), moments[step - 1]) for step in (1, 2)],
        "stalled": [saved["seconds"] for saved in heard], "reused": all(reused) and len(reused) > 0,
    }  # fmt: skip


def written_first(world: DistContext, args: dict[str, Any]) -> Any:
    """A save that does not wait for the disk holds the weights of its moment; of files that are damaged before they are
    read again, or that cannot be flushed, training hears at the next occasion."""
    folder, name, how = Path(args["folder"]), args["name"], args["how"]
    strategy, _, keeper, run = trained(folder, name, world, how)
    gate, heard, usual = threading.Event(), [], keeper._complete
    keeper._on_published = lambda saved, removed: heard.append(saved)

    def held_up(*more: Any) -> None:
        assert gate.wait(60)
        usual(*more)

    keeper._complete = held_up
    moment = weights_now(strategy)
    waited_s = keeper.save(1, "full", wait_for_disk=False)
    go_on(strategy, world, tokens_of(folder / f"rank{world.rank}", 37), how, 3, 4, folder)
    moved = furthest(moment, weights_now(strategy))
    before = run.checkpoint_steps()
    gate.set()
    keeper.finish()
    apart = furthest(restored(run, 1, name, world, how), moment)

    def damaged(save: Any, *more: Any) -> None:
        if world.is_first:
            _flip(min(save.aside.glob("*.safetensors")))
        usual(save, *more)

    keeper._complete = damaged
    keeper.save(2, "full", wait_for_disk=False)
    spoilt = said(keeper.finish)
    keeper._complete = usual
    with full_disk(publishing, "flush_file", world):
        keeper.save(3, "full", wait_for_disk=False)
        unflushed = said(keeper.finish)
    with full_disk(writing, "write_files", world):
        at_once = said(lambda: keeper.save(4, "full", wait_for_disk=False)) or said(keeper.finish)
    after = run.checkpoint_steps()
    keeper.save(5, "full")
    return {
        "before": before, "after": after, "moved": moved, "apart": apart, "spoilt": spoilt, "unflushed": unflushed,
        "at_once": at_once, "blocked": (round(waited_s, 4), heard[0]["seconds"], heard[0]["written_s"]),
    }  # fmt: skip


def lite_moves(world: DistContext, args: dict[str, Any]) -> Any:
    """What a weights-only save of adapters sends and writes, beside the bytes of the adapters and of the base."""
    from torch.profiler import ProfilerActivity, profile

    found = {}
    for name in args["names"]:
        heard: list[Any] = []
        strategy, _, keeper, run = trained(Path(args["folder"]) / name, name, world, LORA)
        keeper._on_published = lambda saved, removed, heard=heard: heard.append(saved)
        whole = [(p.numel() * p.element_size(), p.requires_grad) for p in built(LORA).parameters()]
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as traced:
            if args.get("plant"):
                strategy.weights(trained_only=False)
            keeper.save(1, "weights_only")
        sent: dict[str, int] = {}
        for event in traced.events() or []:
            if event.name.startswith(("c10d::", "_c10d_functional::")):
                sent[event.name] = sent.get(event.name, 0) + sum(_numel(s) for s in event.input_shapes)
        found[name] = {
            "sent": sent, "written": heard[0]["bytes"],
            "trained": sum(b for b, t in whole if t), "frozen": sum(b for b, t in whole if not t),
            "keys": len(load_file(run.checkpoint(1) / "adapter_model.safetensors")),
        }  # fmt: skip
    return found


def _numel(shape: Any) -> int:
    if not isinstance(shape, (list, tuple)) or not shape:
        return 0
    return sum(map(_numel, shape)) if isinstance(shape[0], (list, tuple)) else math.prod(shape)


def killed(world: DistContext, args: dict[str, Any]) -> Any:
    """A good checkpoint, and a second one in which `rank` is killed at `stage`."""
    _, _, keeper, _ = trained(Path(args["folder"]), args["name"], world, {})
    keeper.save(1, "full")
    if world.rank == args["rank"]:
        place, name = STAGES[args["stage"]]
        place = keeper if place is None else place
        usual, calls = getattr(place, name), []

        def die(*more: Any, **named: Any) -> Any:
            calls.append(1)
            if args["stage"] == "between the renames" and len(calls) < 2:
                return usual(*more, **named)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(place, name, die)
    keeper.save(args["step"], "full")
    return None


# what is never reached again by the rank that is killed
STAGES: dict[str, tuple[Any, str]] = {
    "while writing": (writing, "write_files"),
    "before proof": (None, "_complete"),
    "before the rename": (saver, "publish_checkpoint"),
    "between the renames": (Path, "rename"),
    "after the rename": (publishing, "write_text_atomic"),
}


def after_kills(world: DistContext, args: dict[str, Any]) -> Any:
    """What each kill left is usable, and the next save tidies up."""
    found = []
    for folder, name in args["cases"]:
        run = RunDir(Path(folder) / name)
        step, problems = newest_checkpoint(run)
        strategy, _ = prepared(name, world, {})
        load_full(run.checkpoint(step), strategy, plan_published_files(built({}).model, world.size), world.rank)
        _, _, keeper, run = trained(Path(folder), name, world, {})
        dist.barrier(group=world.control)
        keeper.save(7, "full")
        keeper.finish()
        names = sorted(p.name for p in run.checkpoints.iterdir())
        found.append({"step": step, "problems": problems, "names": names, "damage": find_damage(run.checkpoint(7))})
    return found


def changed_bits(world: DistContext, args: dict[str, Any]) -> Any:
    """What the comparison of replicas says of a bit that changes on the last rank: nowhere, in its first and its last
    weight, and in its first state, which counts only before a save."""
    tokens, found = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37), {}
    for name, how in args["pairs"]:
        strategy, module = prepared(name, world, how)
        observe = SimpleNamespace(observe=SimpleNamespace(verify_every=1))
        plan = SimpleNamespace(shard_ranks=2 if "options" in how else world.size)
        silent = SimpleNamespace(write=lambda *a, **k: None)
        attempt: Any = SimpleNamespace(world=world, plan=plan, spec=observe, events=silent)
        check = ReplicaCheck(attempt, strategy, module.model)
        go_on(strategy, world, tokens, how, 0, 2, Path(args["folder"]))
        Evaluator(world, module, tokens, pad_id=0, batch_size=4, classifier=False).run()  # weights are gathered
        nothing = said(lambda check=check: check.compare(2, with_state=True))
        state = shards.state_shards(strategy.state_ranges())[0].tensor
        buffers = {f"model/{name}" for name, _ in module.named_buffers()}
        weights = [shard.tensor for shard in strategy.weight_shards() if shard.key not in buffers]
        places = [weights[0], weights[-1], state]
        bits = [place.view(-1)[:1].view(torch.int32) for place in places]
        answers = []
        for bit in bits:
            if world.rank == world.size - 1:
                bit.bitwise_xor_(1 << 20)
            answers += [said(partial(check.compare, 3)), said(partial(check.compare, 3, with_state=True))]
            if world.rank == world.size - 1:
                bit.bitwise_xor_(1 << 20)
        found[name] = [nothing, *answers]
    return found


if __name__ == "__main__":
    main(globals())
