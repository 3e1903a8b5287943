"""Random faults with fixed seeds: what is done to a run that starts again by itself, and whether its end is right."""

import random
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tests.chaos.cases import NEVER, SAVE_EVERY, Action, Case, Plant, blames

SEEDS = 200
STEPS, EVAL_EVERY, HANG_S, HOLD_S = 60, 20, 10.0, 3.0
BOUND_S = {"local": 240.0, "slurm": 420.0}
STRATEGIES = ("pytorch_ddp", "simple_ddp", "zero1", "zero2", "zero3", "pytorch_zero3")
INSIDE = {
    "kill": "SIGKILL", "segv": "SIGSEGV", "exit0": r"exit code 0|ended|left", "exit7": "code 7",
    "raise": "planted by chaos", "memory": "(?i)memory", "sleep": r"(?i)stall|stuck|hang|waits",
    "stop": "(?i)stop|stall", "clock": "", "pause": "",
}  # fmt: skip
"""Faults inside a rank, with what the final message says where the run stops; empty: the run goes on."""
AT_SAVE = {"stale": "(?i)stale", "readonly": "(?i)read-only", "raise": "planted by chaos"}
MOMENTS = ("prepare", "join", "build", "step", "step", "eval", "save", "save", "end")
OUTSIDE_LOCAL = {"agent:KILL": "(?i)agent", "agent:STOP": "(?i)agent", "disk:fill": "(?i)space|disk|are free"}
OUTSIDE_LOCAL |= {"checkpoint:damage": "SIGKILL"}
PHASES_LOCAL = {"start": 0, "joining": 0, "training": 0, "saving": 2, "evaluating": 1}
NODE = ("node:kill", "node:kill", "link:cut", "link:flap", "link:slow", "link:down", "names:lose", "folder:hide",
        "slurmd:KILL", "agent:KILL", "agent:STOP")  # fmt: skip
PHASES_SLURM = {"staging": 0, **PHASES_LOCAL}
PLACE_OF_PHASE = {"saving": "save", "evaluating": "eval"}


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A seed's scenario: ``says`` are patterns of a final message that is right, ``culprits`` of one that names it.

    ``blames``: patterns of messages that name a healthy rank. ``skewed``: the rank whose clock is wrong.
    """

    seed: int
    strategy: str
    faults: tuple[str, ...]
    case: Case
    says: tuple[str, ...]
    culprits: tuple[str, ...]
    blames: tuple[str, ...]
    skewed: int | None = None


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a trial. ``first_verdict``: of the first attempt that failed; ``weights``: a digest at the end."""

    ended: bool
    injected: bool
    code: int | None
    message: str
    shown: str
    left: tuple[str, ...]
    attempts: int
    first_verdict: str
    weights: str
    recovery_s: float | None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the results. ``named``: yes, no, wrong, or none where nothing failed."""

    seed: int
    launcher: str
    strategy: str
    faults: tuple[str, ...]
    outcome: str
    bounded: bool
    clean: bool
    named: str
    right: bool
    attempts: int
    seconds: float
    recovery_s: float | None
    verdict: str
    reasons: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.bounded and self.clean and self.right and self.named != "wrong"


def trial(seed: int, launcher: str = "") -> Trial:
    """Return the trial of a seed; `launcher` overrides the drawn one."""
    draw = random.Random(f"restarts:{seed}")
    launcher = launcher or draw.choices(("local", "slurm"), (3, 2))[0]
    strategy, world = draw.choice(STRATEGIES), 2
    slurm, step = launcher == "slurm", draw.randint(12, 45)
    kinds: list[str] = []
    says: list[str] = []
    culprits: list[str] = []
    healthy: list[set[int]] = []
    plants: list[Plant] = []
    actions: tuple[Action, ...] = ()
    phase, skewed = "fault", None

    def inside(attempt: int, *, fatal: bool = False) -> None:
        nonlocal skewed
        moment = draw.choice(("step", "save")) if fatal else draw.choice(MOMENTS)
        here = [*(AT_SAVE if moment == "save" else ()), *INSIDE]
        how = draw.choice(("kill", "segv", "exit0")) if fatal else draw.choice(here)
        rank, call = draw.randrange(world), {"step": step, "save": 2}.get(moment, 1)
        if moment == "save" and how not in AT_SAVE:
            call = draw.randint(1, 3)
        plants.append(Plant(how=how, where=moment, rank=rank, call=call, seconds=5.0, attempt=attempt))
        kinds.append(f"{how} of rank {rank} at {moment}{' of the next attempt' * (attempt > 0)}")
        skewed = rank if how == "clock" else skewed
        says.append(AT_SAVE.get(how, INSIDE.get(how, "")))
        culprits.append(rf"rank {rank}\b" + (rf"|\bn{rank + 1}\b" if slurm else ""))
        healthy.append({other for other in range(world) if other != rank})

    def outside() -> None:
        nonlocal actions, phase
        what = draw.choice(NODE if slurm else list(OUTSIDE_LOCAL))
        phase = draw.choice(list(PHASES_SLURM if slurm else PHASES_LOCAL))
        if what == "checkpoint:damage":
            phase = "training"
        target, _, act = what.partition(":")
        node = draw.randrange(world)
        if slurm:
            target = f"{target}:{node}" if target == "agent" else f"{target}:n{node + 1}"
        actions = (Action(target=target, what=act),)
        if act == "damage":
            actions = (*actions, Action(target="rank", what="KILL"))
        if phase in PLACE_OF_PHASE:
            plants.append(Plant(how="hold", where=PLACE_OF_PHASE[phase], call=PHASES_LOCAL[phase], seconds=HOLD_S))
        kinds.append(f"{what}{f' of n{node + 1}' * slurm} at {phase}")
        says.append(rf"\bn{node + 1}\b" if slurm else OUTSIDE_LOCAL[what])
        culprits.append(rf"\bn{node + 1}\b|rank {node}\b" if slurm else r"rank 0\b" if act == "damage" else says[-1])
        if slurm or act == "damage":
            healthy.append({other for other in range(world) if other != (node if slurm else 0)})

    style = draw.random()
    if style < 0.55:
        inside(0)
    elif style < 0.8:
        outside()
    elif style < 0.9:
        inside(0, fatal=True)
        inside(1)
    else:
        inside(0)
        outside()
    innocent = set.intersection(*healthy) if healthy else set[int]()
    case = Case(
        id=f"seed-{seed}", launcher=launcher, phase=phase, actions=actions, plants=tuple(plants),
        nodes=2 if slurm else 1, ranks=1 if slurm else 2, steps=STEPS, step=step, bound_s=BOUND_S[launcher],
        delay_s=round(draw.uniform(0, 0.5), 2), spec=settings(strategy),
        restarts=True, small_disk=any(action.what == "fill" for action in actions),
    )  # fmt: skip
    return Trial(
        seed=seed, strategy=strategy, faults=tuple(kinds), case=case, says=tuple(filter(None, says)),
        culprits=tuple(culprits), skewed=skewed,
        blames=tuple(p for rank in innocent for p in blames(1 - rank, world)),
    )  # fmt: skip


def settings(strategy: str) -> dict[str, Any]:
    """Return the sections of a trial's spec; restarts have their default."""
    return {
        "strategy": {"name": strategy},
        "eval": {"samples": 0, "every": EVAL_EVERY},
        "observe": {"hang_s": HANG_S},
        "checkpoint": {"mode": "full", "every": SAVE_EVERY, "keep": 2},
    }


def undisturbed(strategy: str, launcher: str) -> Case:
    """Return the case whose final weights all trials of a strategy must have."""
    slurm = launcher == "slurm"
    return Case(
        id=f"{launcher}-{strategy}", launcher=launcher, phase="started", nodes=2 if slurm else 1,
        ranks=1 if slurm else 2, steps=STEPS, bound_s=BOUND_S[launcher], codes=(0,), spec=settings(strategy),
        restarts=True,
    )  # fmt: skip


def judge(of: Trial, seen: Seen, expected_weights: str, seconds: float) -> Result:
    """Return what a trial has shown. Pure."""
    reasons = []
    if not seen.ended:
        outcome = "not ended"
        reasons.append(f"not over after {of.case.bound_s:.0f} s")
    elif seen.code == 0:
        outcome = "finished"
        if seen.weights != expected_weights:
            reasons.append("other weights" if seen.weights else "no final weights")
    else:
        outcome = "stopped"
        if not seen.message or not any(re.search(p, seen.message) for p in of.says):
            reasons.append("the message lacks the reason")
    reasons += [f"says /{p}/" for p in NEVER if re.search(p, seen.message) or re.search(p, seen.shown)]
    if re.search(r"Traceback \(most recent call last\):", seen.shown):
        reasons.append("a traceback on the terminal")
    right = not reasons
    verdict = seen.first_verdict or ("" if seen.code == 0 else seen.message)
    named = "none" if not verdict and seen.code == 0 else "no"
    if any(re.search(p, verdict) for p in of.culprits):
        named = "yes"
    elif any(re.search(p, verdict) for p in of.blames):
        named = "wrong"
        reasons.append("names a healthy rank")
    return Result(
        seed=of.seed, launcher=of.case.launcher, strategy=of.strategy, faults=of.faults, outcome=outcome,
        bounded=seen.ended, clean=seen.ended and not seen.left, named=named, right=right, attempts=seen.attempts,
        seconds=round(seconds, 1), recovery_s=seen.recovery_s, verdict=verdict[:300],
        reasons=(
            *reasons, *(f"left over: {what}" for what in seen.left), *(["not injected"] if not seen.injected else []),
        ),
    )  # fmt: skip


def totals(results: Sequence[Result]) -> dict[str, Any]:
    """Return the figures of all results that count: trials whose fault was injected."""
    counted = [one for one in results if "not injected" not in one.reasons]
    times = sorted(one.recovery_s for one in counted if one.recovery_s is not None and one.attempts > 1)
    failed = [one for one in counted if one.named != "none"]
    quantiles = {q: times[min(int(len(times) * q), len(times) - 1)] if times else None for q in (0.5, 0.9)}
    return {
        "trials": len(counted),
        "not_injected": len(results) - len(counted),
        "ok": sum(one.ok for one in counted),
        **{name: sum(getattr(one, name) for one in counted) for name in ("bounded", "clean")},
        "weights_or_reason_right": sum(one.right for one in counted),
        "culprit": {word: sum(one.named == word for one in counted) for word in ("yes", "no", "wrong", "none")},
        "failed": len(failed),
        "outcomes": {word: sum(o.outcome == word for o in counted) for word in ("finished", "stopped", "not ended")},
        "started_again": sum(one.attempts > 1 for one in counted),
        "fault_to_first_new_step_s": {"median": quantiles[0.5], "p90": quantiles[0.9], "n": len(times)},
    }
