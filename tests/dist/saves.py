"""Cases about checkpoints; `test_saves.py` starts them on ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
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
from allranks.train.strategies import shards
from tests.dist.making import built, go_on, main, prepared, saver_of, tokens_of, whole_state

LORA: dict[str, Any] = {"lora": True, "accum": 2}


def trained(
    folder: Path, name: str, world: DistContext, how: dict[str, Any], **spec: Any
) -> tuple[Any, Any, Any, RunDir]:
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
    """What each strategy saved, each other loads: full with the optimizer's state, weights_only without. Where weights
    stand is counted."""
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

    def broken(aside: Path, *more: Any) -> Any:
        if world.rank == 1:
            raise OSError(28, "No space left on device", str(aside))
        return usual(aside, *more)

    usual = writing.write_files
    writing.write_files = broken
    first = said(lambda: keeper.save(2, "full"))
    keeper.save(2, "full", behind=True)  # behind training's back it is heard of at the next occasion
    later = said(keeper.finish)
    writing.write_files = usual
    after = run.checkpoint_steps()
    for step in (3, 4):
        keeper.save(step, "weights_only")
    keeper.finish()
    dist.barrier(group=world.control)  # rank 0 alone removes old ones
    return {"said": first, "later": later, "after": after, "names": sorted(p.name for p in run.checkpoints.iterdir())}


def planted(world: DistContext, args: dict[str, Any]) -> Any:
    """Saves that lie, one after the other: each must be refused, and the good one before stay the newest."""
    folder, problems = Path(args["folder"]), {}
    for name, how in (("zero3", {}), ("zero3", LORA), ("pytorch_zero3", {}), ("pytorch_ddp", {})):
        strategy, _, keeper, run = trained(folder / str(len(problems)), name, world, how)
        keeper.save(1, "full")
        for bug in args["bugs"]:
            put_back = getattr(Bugs, bug)(strategy, keeper, world)
            if put_back is not None:
                problems[f"{name} {'lora' if how else 'full'} {bug}"] = said(
                    lambda keeper=keeper: keeper.save(2, "full")
                )
                put_back()
        assert run.checkpoint_steps() == [1], (name, run.checkpoint_steps(), problems)
        assert newest_checkpoint(run) == (1, [])
        keeper.save(3, "full")
    return problems


class Bugs:
    """Each plants itself and returns how it is taken out again; None where it means nothing."""

    @staticmethod
    def only_the_first_ranks_slice(strategy: Any, keeper: Any, world: DistContext) -> Any:
        if strategy.replicated:
            return None
        usual = strategy.weight_shards
        strategy.weight_shards = lambda: [
            replace(s, numel=s.tensor.numel(), offset=0, everywhere=True) for s in usual()
        ]  # as if the rank's own slice were the tensor
        return lambda: setattr(strategy, "weight_shards", usual)

    @staticmethod
    def a_rank_left_out(strategy: Any, keeper: Any, world: DistContext) -> Any:
        if strategy.replicated:
            return None
        usual = strategy.weight_shards
        strategy.weight_shards = lambda: usual() if world.rank == 0 else []
        return lambda: setattr(strategy, "weight_shards", usual)

    @staticmethod
    def offset_by_one(strategy: Any, keeper: Any, world: DistContext) -> Any:
        usual = strategy.state_ranges
        strategy.state_ranges = lambda: [
            replace(r, offset=max(r.offset - 1, 0)) if world.rank == 1 else r for r in usual()
        ]
        return None if strategy.replicated else lambda: setattr(strategy, "state_ranges", usual)

    @staticmethod
    def a_weight_changed_on_its_way(strategy: Any, keeper: Any, world: DistContext) -> Any:
        return _spoilt(lambda tensors: {**tensors, (k := min(tensors)): tensors[k] + 1e-3})

    @staticmethod
    def a_weight_missing(strategy: Any, keeper: Any, world: DistContext) -> Any:
        return _spoilt(lambda tensors: {k: t for k, t in tensors.items() if k != min(tensors)})

    @staticmethod
    def a_wrappers_prefix(strategy: Any, keeper: Any, world: DistContext) -> Any:
        return _spoilt(lambda tensors: {f"_orig_mod.{k}": t for k, t in tensors.items()})

    @staticmethod
    def another_dtype(strategy: Any, keeper: Any, world: DistContext) -> Any:
        return _spoilt(lambda tensors: {k: t.to(torch.bfloat16) for k, t in tensors.items()})

    @staticmethod
    def a_part_changed_on_its_way(strategy: Any, keeper: Any, world: DistContext) -> Any:
        if strategy.replicated:
            return None
        usual = shards.write_parts

        def write(parts: Any, path: Path) -> bytes:
            written = usual(parts, path)
            if world.rank == 0 and path.parent.name == "on-the-way":
                _flip(path)
            return written

        shards.write_parts = write
        return lambda: setattr(shards, "write_parts", usual)

    @staticmethod
    def cut_short(strategy: Any, keeper: Any, world: DistContext) -> Any:
        return _after_writing(lambda file: os.truncate(file, file.stat().st_size - 1))

    @staticmethod
    def a_bit_flipped(strategy: Any, keeper: Any, world: DistContext) -> Any:
        return _after_writing(_flip)


def _flip(file: Path) -> None:
    """Change the last bit of a file."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _spoilt(change: Any) -> Any:
    def spoil(file: Path) -> None:
        save_file({k: t.contiguous() for k, t in change(load_file(file)).items()}, file, metadata={"format": "pt"})

    return _after_writing(spoil)


def _after_writing(spoil: Any) -> Any:
    """Does something to the first file for others as soon as it is written: on rank 0 alone, which wrote it (a bit
    flipped twice is whole)."""
    usual = writing.write_safetensors

    def write(file: Path, *more: Any) -> bytes:
        written = usual(file, *more)
        if dist.get_rank() == 0:
            spoil(min(file.parent.glob("*.safetensors")))
        return written

    writing.write_safetensors = write
    return lambda: setattr(writing, "write_safetensors", usual)


def behind(world: DistContext, args: dict[str, Any]) -> Any:
    """A save behind training's back holds the weights of its moment, though a step changes them before it is written; a
    second one waits for the first, and uses its memory again."""
    folder = Path(args["folder"])
    strategy, _, keeper, run = trained(folder, args["name"], world, args["how"])
    heard: list[Any] = []
    keeper._on_published = lambda saved, removed: heard.append(saved)
    gate, usual, copied = threading.Event(), keeper._write, keeper._copies.of

    def held_up(save: Any) -> Any:
        gate.wait(60)
        return usual(save)

    def slowly(parts: Any) -> Any:
        time.sleep(1.0)
        return copied(parts)

    def weights() -> dict[str, torch.Tensor]:
        return {s.key: s.tensor.clone() for s in strategy.weight_shards()}

    keeper._write, keeper._copies.of = held_up, slowly
    moments = [weights()]
    keeper.save(1, "full", behind=True)
    before = run.checkpoint_steps()
    tokens = tokens_of(folder / f"rank{world.rank}", 37)
    go_on(strategy, world, tokens, args["how"], 3, 4, folder)
    moments.append(weights())
    memory = {k: t.data_ptr() for k, t in keeper._copies._kept.items()}
    gate.set()
    keeper.save(2, "full", behind=True)
    between = run.checkpoint_steps()
    keeper.finish()
    reused = [memory[k] == t.data_ptr() for k, t in keeper._copies._kept.items()]
    fresh, _ = prepared(args["name"], world, args["how"])
    apart = []
    for step, then in ((1, moments[0]), (2, moments[1])):
        load_full(run.checkpoint(step), fresh, plan_published_files(built(args["how"]).model, world.size), world.rank)
        apart.append(
            max(
                float((s.tensor - then[s.key]).abs().max())
                for s in fresh.weight_shards()
                if s.tensor.numel() and s.tensor.is_floating_point()
            )
        )
    moved = max(
        float((moments[0][k] - t).abs().max()) for k, t in moments[1].items() if t.numel() and t.is_floating_point()
    )
    return {
        "before": before,
        "between": between,
        "after": run.checkpoint_steps(),
        "apart": apart,
        "moved": moved,
        "stalled": [saved["seconds"] for saved in heard],
        "reused": all(reused) and len(reused) > 0,
    }


def written_first(world: DistContext, args: dict[str, Any]) -> Any:
    """A save that does not wait for the disk holds the weights of its moment, though a step changes them before the
    files are read again; of files that are damaged by then, or that cannot be flushed, training hears at the next
    occasion."""
    folder = Path(args["folder"])
    strategy, _, keeper, run = trained(folder, args["name"], world, args["how"])
    gate, heard, usual = threading.Event(), [], keeper._complete
    keeper._on_published = lambda saved, removed: heard.append(saved)

    def held_up(*more: Any) -> None:
        assert gate.wait(60)
        usual(*more)

    keeper._complete = held_up
    moment = {s.key: s.tensor.clone() for s in strategy.weight_shards()}
    waited_s = keeper.save(1, "full", wait_for_disk=False)
    tokens = tokens_of(folder / f"rank{world.rank}", 37)
    go_on(strategy, world, tokens, args["how"], 3, 4, folder)
    moved = max(
        float((moment[s.key] - s.tensor).abs().max())
        for s in strategy.weight_shards()
        if s.tensor.numel() and s.key in moment
    )
    before = run.checkpoint_steps()
    gate.set()
    keeper.finish()
    fresh, _ = prepared(args["name"], world, args["how"])
    load_full(run.checkpoint(1), fresh, plan_published_files(built(args["how"]).model, world.size), world.rank)
    apart = max(
        float((s.tensor - moment[s.key]).abs().max())
        for s in fresh.weight_shards()
        if s.tensor.numel() and s.tensor.is_floating_point()
    )

    def damaged(save: Any, *more: Any) -> None:
        if world.is_first:
            _flip(min(save.aside.glob("*.safetensors")))
        usual(save, *more)

    def full_disk(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    keeper._complete = damaged
    keeper.save(2, "full", wait_for_disk=False)
    spoilt = said(keeper.finish)
    keeper._complete = usual
    flush, write = publishing.flush_file, writing.write_files
    if world.rank == 1:
        publishing.flush_file = full_disk
    keeper.save(3, "full", wait_for_disk=False)
    unflushed = said(keeper.finish)
    publishing.flush_file = flush
    if world.rank == 1:
        writing.write_files = full_disk
    at_once = said(lambda: keeper.save(4, "full", wait_for_disk=False)) or said(keeper.finish)
    writing.write_files = write
    after = run.checkpoint_steps()
    keeper.save(5, "full")
    return {
        "before": before,
        "after": after,
        "moved": moved,
        "apart": apart,
        "spoilt": spoilt,
        "unflushed": unflushed,
        "at_once": at_once,
        "blocked": (round(waited_s, 4), heard[0]["seconds"], heard[0]["written_s"]),
    }


def lite_moves(world: DistContext, args: dict[str, Any]) -> Any:
    """What a weights-only save of adapters sends and writes, by strategy, beside the bytes of the adapters and of what
    is frozen."""
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
    if not isinstance(shape, (list, tuple)):
        return 0
    if shape and isinstance(shape[0], (list, tuple)):
        return sum(_numel(s) for s in shape)
    total = 1
    for n in shape:
        total *= n
    return total if shape else 0


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


if __name__ == "__main__":
    main(globals())
