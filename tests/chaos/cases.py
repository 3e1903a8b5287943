"""The cases: what is done to a run, when, and what must come of it. Rank, step and delay are drawn from the name."""

import random
from functools import partial
from typing import Any

import msgspec

SEED = 20260
ENDLESS, FINITE = 1_000_000, 80
SAVE_EVERY = 10
NEVER = (r"This is a bug in allranks",)
UNSTARTED = (*NEVER, r"did not start")


class Plant(msgspec.Struct, frozen=True, kw_only=True):
    """A fault inside the ranks; ``rank`` -1: all of them; ``call`` 0: each call of the place; ``attempt`` -1: each."""

    how: str
    where: str
    rank: int = -1
    call: int = 0
    seconds: float = 0.0
    attempt: int = -1


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something done from outside: ``what`` is a signal's name or a verb of the harness."""

    target: str
    what: str
    after_s: float = 0.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    launcher: str
    phase: str  # what is waited for before the first action
    actions: tuple[Action, ...] = ()
    plants: tuple[Plant, ...] = ()  # faults inside the ranks of built-in training
    program: tuple[str, ...] = ()  # words for the user's program: where, how, rank, step; empty for built-in training
    spec: dict[str, Any] = {}
    nodes: int = 1
    ranks: int = 2
    steps: int = ENDLESS
    rank: int = 0
    step: int = 0
    delay_s: float = 0.0
    bound_s: float = 30.0  # from the fault to the end of the command, or of the run where the command is killed
    codes: tuple[int, ...] = (1,)  # exit codes of the command that are right
    says: str = ""  # pattern that the final message must have; checked where the run did not succeed
    never: tuple[str, ...] = NEVER  # patterns that neither the message nor the terminal may have
    resume: bool | None = None  # whether ``allranks resume`` must end with 0 afterwards; None: not tried
    requeue: bool = False  # whether the job may go back to the queue
    excluded: tuple[str, ...] = ()  # nodes that the job may exclude afterwards
    restarts: bool = False  # whether the run may start again by itself, as is the default of users
    terminal: bool = False
    small_disk: bool = False
    defect: int = 0  # number of the reported defect that the case covers
    usual: bool = False


def _drawn(name: str, world: int) -> dict[str, Any]:
    draw = random.Random(f"{SEED}:{name}")
    return {"rank": draw.randrange(world), "step": draw.randint(12, 25), "delay_s": round(draw.uniform(0, 0.8), 2)}


def blames(rank: int, world: int) -> tuple[str, ...]:
    """Patterns of messages that name another rank as the one that failed."""
    return tuple(rf"rank {other} (on \S+ )?(failed|stalled)" for other in range(world) if other != rank)


def _make(
    launcher: str, fault: str, bound_s: float, *, nodes: int = 0, end: str = "", blames_others: bool = True, **more: Any
) -> Case:
    """A case of a `fault` such as ``training rank KILL``: its phase, its target and what is done.

    RANK and NODE in what it must say are those of the case.
    """
    phase, target, what = fault.split()
    nodes = nodes or (1 if launcher == "local" else 2)
    world = nodes if launcher == "slurm" else 2
    name = f"{launcher}-{phase}-{target}-{what}{end}"
    values = {**_drawn(name, world), "actions": (Action(target=target, what=what),), "bound_s": bound_s, **more}
    rank = values["rank"]
    values["says"] = values.get("says", "").replace("RANK", str(rank)).replace("NODE", f"n{rank + 1}")
    if not blames_others:
        values["never"] = (*values.get("never", NEVER), *blames(rank, world))
    return Case(id=name, launcher=launcher, phase=phase, nodes=nodes, ranks=world // nodes, **values)


def _planted(launcher: str, name: str, says: str, *, nodes: int = 0, rank: int | None = None, **more: Any) -> Case:
    """A fault inside one rank, of which the message must say that it was this rank."""
    nodes = nodes or (1 if launcher == "local" else 2)
    name = f"{launcher}-{name}" + (f"-{nodes}nodes" if nodes > 2 else "")
    world = max(nodes, 2)
    drawn = {**_drawn(name, world), "delay_s": 0.0}
    rank = drawn["rank"] if rank is None else rank
    drawn |= {"rank": rank, "says": rf"(?s)rank {rank}\b.*{says}", "never": (*UNSTARTED, *blames(rank, world))}
    values = {**drawn, "bound_s": 20.0, "nodes": nodes, "ranks": world // nodes, **more}
    values |= {key: value(drawn) for key, value in values.items() if callable(value)}
    return Case(id=name, launcher=launcher, phase="planted", **values)


def _raised(launcher: str, where: str, **more: Any) -> Case:
    def plants(drawn: dict[str, Any]) -> tuple[Plant, ...]:
        call = {"step": drawn["step"], "save": 2}.get(where, 1)
        return (Plant(how="raise", where=where, rank=drawn["rank"], call=call),)

    steps = FINITE if where in ("end", "eval") else ENDLESS
    resume = True if where in ("step", "save", "end") and launcher == "local" else None
    name = f"{where}-rank-raise"
    return _planted(launcher, name, "planted by chaos", plants=plants, steps=steps, resume=resume, **more)


def _program(launcher: str, where: str, how: str, says: str, **more: Any) -> Case:
    def program(drawn: dict[str, Any]) -> tuple[str, ...]:
        return (where, how, str(drawn["rank"]), str(drawn["step"]))

    return _planted(launcher, f"program-{where}-{how}", f"({says})", program=program, steps=200, **more)


def _hold(where: str, call: int = 1) -> tuple[Plant, ...]:
    """A place that takes some seconds on every rank, so that something can be done meanwhile."""
    return (Plant(how="hold", where=where, call=call, seconds=3.0),)


def _then(*actions: str, after_s: float) -> tuple[Action, ...]:
    """Actions such as ``rank STOP``; the second is done some seconds after the first."""
    parts = [action.split() for action in actions]
    return tuple(Action(target=t, what=w, after_s=after_s * (i > 0)) for i, (t, w) in enumerate(parts))


SAVING: dict[str, Any] = {"plants": _hold("save", 2)}
ENDING: dict[str, Any] = {"plants": _hold("end"), "steps": FINITE}
RESUMED: dict[str, Any] = {"resume": True}
STOPPED = r"(?i)stop|interrupt|cancel|closed|hang ?up|SIGHUP"
HANGS: dict[str, Any] = {"spec": {"observe": {"hang_s": 5}}}
PHASES: tuple[tuple[str, dict[str, Any]], ...] = (("start", {}), ("training", RESUMED), ("saving", SAVING))
ALL_RIGHT: dict[str, Any] = {"steps": FINITE, "codes": (0,)}
CODE = "(exit )?code "
LEFT = "exit code 0|ended|left"
RAISED, TEXT, MISSING = "planted by chaos", "the planted text of chaos", "no_such_module_of_chaos"


def _local() -> list[Case]:
    make = partial(_make, "local")
    cases = [_raised("local", where) for where in ("step", "end")]
    nan = (Plant(how="nan", where="eval"),)
    often: dict[str, Any] = {"spec": {"eval": {"samples": 0, "every": 20}}, "bound_s": 60, "defect": 11}
    cases.append(Case(id="local-eval-nan", launcher="local", phase="planted", plants=nan, **ALL_RIGHT, **often))
    # ranks
    died: dict[str, Any] = {"says": r"rank RANK\b.*SIGKILL", "never": UNSTARTED, "blames_others": False}
    cases += [
        make("training rank KILL", 20, **died, **RESUMED),
        make("training rank STOP", 45, says=r"rank RANK\b", **HANGS, **RESUMED),
        make("training rank TERM", 20, says=STOPPED, **RESUMED),
    ]
    # the agent
    killed = {"says": r"(?i)agent.*(SIGKILL|signal 9|killed)|(SIGKILL|signal 9|killed).*agent", "never": UNSTARTED}
    int_later = _then("agent STOP", "command INT", after_s=1.0)
    cases += [
        make("start agent KILL", 20, defect=10, usual=True, **killed),
        make("training agent KILL", 20, defect=10, **killed, **RESUMED),
        make("ending agent KILL", 20, defect=10, codes=(0, 1), **killed, **ENDING),
        make("training agent STOP", 60, steps=FINITE, codes=(0, 1), says=r"(?i)agent", defect=10),
        make("training agent STOP", 20, end="+INT", actions=int_later, says=STOPPED, defect=10, **RESUMED),
        make("training agent TERM", 30, says=STOPPED, **RESUMED),
    ]
    # the command
    cases += [make("planning command INT", 10), make("planning command HUP", 10, codes=(1, -1))]
    cases += [make(f"{phase} command INT", 15, says=STOPPED, **more) for phase, more in PHASES]
    cases.append(make("ending command INT", 15, codes=(0, 1), says=STOPPED, **ENDING))
    for what in ("TERM", "HUP", "close"):
        at_45_s = partial(make, bound_s=45, terminal=what == "close", says=STOPPED)
        cases += [at_45_s(f"{phase} command {what}", **more) for phase, more in PHASES]
    cases += [make(f"{phase} command KILL", 30, codes=(-9,), **more) for phase, more in PHASES[1:]]
    twice = _then("command INT", "command INT", after_s=0.3)
    paused = _then("command STOP", "command CONT", after_s=5.0)
    deaf = _then("rank STOP", "command INT", after_s=0.5)
    cases += [
        make("training command INT", 10, end="+INT", actions=twice, says=STOPPED),
        make("training command STOP", 60, end="+CONT", actions=paused, **ALL_RIGHT),
        make("training rank STOP", 15, end="+INT", actions=deaf, says=STOPPED),
        make("training run cancel", 30, says=STOPPED, **RESUMED),
        make("training run cancel-now", 15, says=STOPPED),
    ]
    # files and disks
    full: dict[str, Any] = {"small_disk": True, "says": r"(?i)no space|free|disk"}
    sleeps = (Plant(how="sleep", where="step", rank=1, call=17),)
    named: dict[str, Any] = {**full, "says": r"(?i)rank 1\b", "plants": sleeps, "defect": 8, **HANGS, **RESUMED}
    cases += [make("training disk fill", 60, **full, **RESUMED), make("planted disk fill", 60, end="+hang", **named)]
    lost: dict[str, Any] = {"never": UNSTARTED, "defect": 10}
    parts = ("logs", "events", "telemetry", "checkpoints")
    cases += [make(f"training files remove-{what}", 60, **ALL_RIGHT, **lost) for what in parts]
    gone: dict[str, Any] = {"actions": _then("files remove-logs", "rank KILL", after_s=1.0), "says": "SIGKILL"}
    cases.append(make("training files remove-logs", 30, end="+KILL", **gone, **lost, **RESUMED))
    # a user's own program
    cases.append(_program("local", "import", "import", MISSING))
    cases += [_program("local", where, "raise", RAISED) for where in ("init", "training", "ending")]
    cases += [_program("local", where, "exit7", f"{CODE}7") for where in ("init", "training")]
    cases += [_program("local", where, "exit0", LEFT) for where in ("init", "training")]
    others = (("training", "exittext", TEXT), ("ending", "exit3", f"{CODE}3"))
    others += (("training", "kill", "SIGKILL"), ("training", "segv", "SIGSEGV"))
    return cases + [_program("local", *how) for how in others]


def _slurm() -> list[Case]:
    make = partial(_make, "slurm")
    # the job is cancelled by Slurm's own command
    cancelled: dict[str, Any] = {"says": r"(?i)cancel", "never": (*NEVER, "exclude it"), "defect": 2}
    phases = (("pending", {}), ("staging", {}), *PHASES)
    cases = [make(f"{phase} job scancel", 45, **cancelled, **more) for phase, more in phases]
    # the command
    asked = r"(?i)cancel|interrupt"
    for what in ("INT", "TERM", "HUP", "close"):
        closed = what == "close"
        cases.append(make(f"pending command {what}", 15, terminal=closed, says=asked, defect=3))
        cases.append(make(f"training command {what}", 45, terminal=closed, says=STOPPED, resume=closed or None))
    # agents, driver, ranks; Slurm's commands fail on the node
    agent: dict[str, Any] = {"says": r"(?s)(?i)(agent.*n2|n2.*agent)", "never": UNSTARTED, "defect": 10}
    driver: dict[str, Any] = {"says": r"(?i)driver|SIGKILL|signal 9", "defect": 10}
    failed: dict[str, Any] = {"never": (*NEVER, r"CalledProcessError|TimeoutExpired"), "says": "scontrol", "defect": 7}
    failed |= {"actions": (), "steps": FINITE, "codes": (0, 1, 3)}
    # Slurm's daemons, nodes, and its time limit
    then_int = _then("slurmctld restart", "command INT", after_s=1.0)
    again: dict[str, Any] = {"requeue": True, "steps": 300, "codes": (0,)}
    lost: dict[str, Any] = {"defect": 10, "never": UNSTARTED, **ALL_RIGHT}
    return [
        _program("slurm", "init", "raise", RAISED, rank=1, defect=1),
        _program("slurm", "training", "raise", RAISED, nodes=3, defect=1),
        _program("slurm", "import", "import", MISSING, rank=1, defect=1),
        _program("slurm", "training", "exit7", f"{CODE}7"),
        _program("slurm", "training", "exittext", TEXT),
        _program("slurm", "init", "exit0", LEFT),
        _raised("slurm", "step", nodes=3, defect=1),
        *cases,
        make("staging command INT", 30, says=STOPPED),
        make("start command TERM", 45, says=STOPPED),
        make("training command KILL", 90, steps=FINITE, codes=(-9,)),
        make("pending run cancel", 15, says=r"(?i)cancel"),
        make("training run cancel", 45, says=STOPPED, **RESUMED),
        make("submitted scontrol fails", 90, **failed),
        make("submitted scontrol hangs", 90, **failed),
        make("training agent:1 KILL", 60, **agent, **RESUMED),
        make("training agent:1 STOP", 90, **agent),
        make("training driver KILL", 60, **driver, **RESUMED),
        make("training driver STOP", 120, steps=FINITE, codes=(0, 1), says=r"(?i)driver", defect=10),
        make("training driver TERM", 60, says=STOPPED),
        make("training rank KILL", 45, nodes=3, says=r"rank RANK on NODE\b.*SIGKILL", blames_others=False),
        make("training rank STOP", 90, says=r"rank RANK on NODE\b", **HANGS),
        make("training slurmd:n2 KILL", 180, **ALL_RIGHT),
        make("training slurmd:n2 restart", 120, **ALL_RIGHT),
        make("training slurmctld restart", 120, **ALL_RIGHT),
        make("pending slurmctld restart+INT", 45, says=asked, actions=then_int),
        make("training node:n2 kill", 150, excluded=("n2",), **again),
        make("training job time-limit", 120, **again),
        make("training files remove-logs", 90, **lost),
        make("training files remove-events", 90, **lost),
    ]


def all_cases() -> list[Case]:
    cases = [*_local(), *_slurm()]
    names = [case.id for case in cases]
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
    return cases
