"""The cases: what is done to a run, when, and what must come of it.

Rank, step and delay of a case are drawn from one fixed seed and the case's name, so that a case is the same in every
run and does not change when others are added.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import msgspec

SEED = 20260
ENDLESS, FINITE = 1_000_000, 80
SAVE_EVERY = 10
NEVER = (r"This is a bug in allranks",)
NOT_STARTED = r"did not start"


class Plant(msgspec.Struct, frozen=True, kw_only=True):
    """A fault inside the ranks; ``rank`` -1 means all, ``call`` 0 means each call of the place."""

    how: str
    where: str
    rank: int = -1
    call: int = 0
    seconds: float = 0.0


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something done from outside, ``after_s`` seconds after the one before.

    ``what`` is a signal's name or a verb of the harness.
    """

    target: str
    what: str
    after_s: float = 0.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One fault and its expected end.

    Attributes:
        phase: what is waited for before the first action.
        plants: faults inside the ranks of built-in training.
        program: words for the user's program (where, how, rank, step); empty for built-in training.
        bound_s: seconds from the fault to the end of the command, or of the run where the command is killed.
        codes: exit codes of the command that are right.
        says: pattern that the final message must have; checked where the run did not succeed.
        never: patterns that neither the message nor the terminal may have.
        resume: whether ``allranks resume`` must end with 0 afterwards; None: not tried.
        requeue: whether the job may go back to the queue.
        excluded: nodes that the job may exclude afterwards.
        defect: number of the reported defect that the case covers.
    """

    id: str
    launcher: str
    phase: str
    actions: tuple[Action, ...] = ()
    plants: tuple[Plant, ...] = ()
    program: tuple[str, ...] = ()
    spec: dict[str, Any] = {}
    nodes: int = 1
    ranks: int = 2
    steps: int = ENDLESS
    rank: int = 0
    step: int = 0
    delay_s: float = 0.0
    bound_s: float = 30.0
    codes: tuple[int, ...] = (1,)
    says: str = ""
    never: tuple[str, ...] = NEVER
    resume: bool | None = None
    requeue: bool = False
    excluded: tuple[str, ...] = ()
    terminal: bool = False
    small_disk: bool = False
    defect: int = 0
    usual: bool = False


def _drawn(name: str, world: int) -> dict[str, Any]:
    """Rank, step and delay of a case."""
    draw = random.Random(f"{SEED}:{name}")
    return {"rank": draw.randrange(world), "step": draw.randint(12, 25), "delay_s": round(draw.uniform(0, 0.8), 2)}


def blames(rank: int, world: int) -> tuple[str, ...]:
    """Patterns of messages that name another rank as the one that failed."""
    return tuple(rf"rank {other} (on \S+ )?failed" for other in range(world) if other != rank)


def _make(launcher: str, fault: str, **more: Any) -> Case:
    """A case of a `fault` such as ``training rank KILL``: its phase, its target and what is done."""
    phase, target, what = fault.split()
    nodes = more.pop("nodes", 1 if launcher == "local" else 2)
    world = nodes if launcher == "slurm" else 2
    name = f"{launcher}-{phase}-{target}-{what}" + more.pop("suffix", "")
    values = {**_drawn(name, world), **more}
    actions = values.pop("actions", (Action(target=target, what=what),))
    return Case(id=name, launcher=launcher, phase=phase, nodes=nodes, ranks=world // nodes, actions=actions, **values)


def _raised(launcher: str, where: str, **more: Any) -> Case:
    """An exception of built-in training on one rank."""
    nodes = more.pop("nodes", 1 if launcher == "local" else 2)
    name = f"{launcher}-{where}-rank-raise" + (f"-{nodes}nodes" if nodes > 2 else "")
    world = max(nodes, 2)
    drawn = _drawn(name, world)
    call = {"step": drawn["step"], "save": 2}.get(where, 1)
    plant = Plant(how="raise", where=where, rank=drawn["rank"], call=call)
    steps = FINITE if where in ("end", "eval") else ENDLESS
    return Case(
        id=name,
        launcher=launcher,
        phase="planted",
        nodes=nodes,
        ranks=world // nodes,
        plants=(plant,),
        steps=steps,
        says=rf"(?s)rank {drawn['rank']}\b.*planted by chaos",
        never=(*NEVER, *blames(drawn["rank"], world), NOT_STARTED),
        resume=True if where in ("step", "save", "end") and launcher == "local" else None,
        **{**drawn, "delay_s": 0.0, "bound_s": 20.0, **more},
    )


def _program(launcher: str, where: str, how: str, says: str, **more: Any) -> Case:
    """A fault of a user's own program on one rank."""
    nodes = more.pop("nodes", 1 if launcher == "local" else 2)
    name = f"{launcher}-program-{where}-{how}" + (f"-{nodes}nodes" if nodes > 2 else "")
    world = max(nodes, 2)
    drawn = {**_drawn(name, world), **{k: more.pop(k) for k in ("rank",) if k in more}}
    return Case(
        id=name,
        launcher=launcher,
        phase="planted",
        nodes=nodes,
        ranks=world // nodes,
        program=(where, how, str(drawn["rank"]), str(drawn["step"])),
        says=rf"(?s)rank {drawn['rank']}\b.*({says})",
        never=(*NEVER, *blames(drawn["rank"], world), NOT_STARTED),
        **{**drawn, "delay_s": 0.0, "bound_s": 20.0, "steps": 200, **more},
    )


def _hold(where: str, call: int = 1) -> tuple[Plant, ...]:
    """A place that takes some seconds on every rank, so that something can be done meanwhile."""
    return (Plant(how="hold", where=where, call=call, seconds=3.0),)


SAVING: dict[str, Any] = {"plants": _hold("save", 2)}
ENDING: dict[str, Any] = {"plants": _hold("end"), "steps": FINITE}
STOPPED = r"(?i)stop|interrupt|cancel|closed|hang ?up|SIGHUP"


def _local() -> list[Case]:
    make = partial(_make, "local")
    cases = [_raised("local", where) for where in ("prepare", "build", "step", "eval", "save", "end")]
    cases.append(
        Case(
            id="local-eval-nan",
            launcher="local",
            phase="planted",
            plants=(Plant(how="nan", where="eval"),),
            steps=FINITE,
            spec={"eval": {"samples": 0, "every": 20}},
            bound_s=60,
            codes=(0,),
            defect=11,
            usual=False,
        )
    )
    # ranks
    for phase, more in (("joining", {}), ("training", {}), ("saving", SAVING), ("ending", ENDING)):
        case = make(f"{phase} rank KILL", bound_s=20, resume=phase in ("training", "saving") or None, **more)
        never = (*NEVER, *blames(case.rank, 2), NOT_STARTED)
        cases.append(msgspec.structs.replace(case, says=rf"rank {case.rank}\b.*SIGKILL", never=never))
    stopped = make("training rank STOP", spec={"observe": {"hang_s": 5}}, bound_s=45, resume=True)
    cases.append(msgspec.structs.replace(stopped, says=rf"rank {stopped.rank}\b"))
    cases.append(make("training rank TERM", bound_s=20, says=STOPPED, resume=True))
    # the agent
    says_agent = r"(?i)agent.*(SIGKILL|signal 9|killed)|(SIGKILL|signal 9|killed).*agent"
    for phase, more in (("start", {}), ("training", {"usual": True}), ("saving", SAVING), ("ending", ENDING)):
        resume = phase in ("training", "saving") or None
        cases.append(
            make(
                f"{phase} agent KILL",
                bound_s=20,
                codes=(0, 1) if phase == "ending" else (1,),
                says=says_agent,
                never=(*NEVER, NOT_STARTED),
                resume=resume,
                defect=10,
                **more,
            )
        )
    cases.append(make("training agent STOP", steps=FINITE, bound_s=60, codes=(0, 1), says=r"(?i)agent", defect=10))
    then_int = (Action(target="agent", what="STOP"), Action(target="command", what="INT", after_s=1.0))
    cases.append(
        make("training agent STOP", suffix="+INT", actions=then_int, bound_s=20, says=STOPPED, resume=True, defect=10)
    )
    cases.append(make("training agent TERM", bound_s=30, says=STOPPED, resume=True))
    # the command
    cases.append(make("planning command INT", bound_s=10))
    cases.append(make("planning command HUP", bound_s=10, codes=(1, -1)))
    for phase, more in (("start", {}), ("training", {"resume": True}), ("saving", SAVING), ("ending", ENDING)):
        codes = (0, 1) if phase == "ending" else (1,)
        cases.append(make(f"{phase} command INT", bound_s=15, codes=codes, says=STOPPED, **more))
    for phase, more in (("start", {}), ("training", {"resume": True}), ("saving", SAVING)):
        cases.append(make(f"{phase} command TERM", bound_s=45, says=STOPPED, **more))
    for phase, more in (("start", {}), ("training", {"resume": True}), ("saving", SAVING)):
        cases.append(make(f"{phase} command HUP", bound_s=45, says=STOPPED, **more))
    for phase, more in (("start", {}), ("training", {"resume": True}), ("saving", SAVING)):
        cases.append(make(f"{phase} command close", terminal=True, bound_s=45, says=STOPPED, **more))
    for phase, more in (("training", {"resume": True}), ("saving", SAVING)):
        cases.append(make(f"{phase} command KILL", bound_s=30, codes=(-9,), **more))
    twice = (Action(target="command", what="INT"), Action(target="command", what="INT", after_s=0.3))
    cases.append(make("training command INT", suffix="+INT", actions=twice, bound_s=10, says=STOPPED))
    paused = (Action(target="command", what="STOP"), Action(target="command", what="CONT", after_s=5.0))
    cases.append(make("training command STOP", suffix="+CONT", actions=paused, steps=FINITE, bound_s=60, codes=(0,)))
    deaf = (Action(target="rank", what="STOP"), Action(target="command", what="INT", after_s=0.5))
    cases.append(make("training rank STOP", suffix="+INT", actions=deaf, bound_s=15, says=STOPPED))
    cases.append(make("training run cancel", bound_s=30, says=STOPPED, resume=True))
    cases.append(make("training run cancel-now", bound_s=15, says=STOPPED))
    # files and disks
    full = r"(?i)no space|free|disk"
    for phase, more in (("start", {}), ("training", {"resume": True}), ("saving", {**SAVING, "resume": True})):
        cases.append(make(f"{phase} disk fill", small_disk=True, bound_s=60, says=full, **more))
    cases.append(
        make(
            "planted disk fill",
            suffix="+hang",
            small_disk=True,
            bound_s=60,
            defect=8,
            resume=True,
            spec={"observe": {"hang_s": 5}},
            plants=(Plant(how="sleep", where="step", rank=1, call=17),),
            says=r"(?i)rank 1\b",
        )
    )
    cases += [
        make(
            f"training files remove-{what}",
            steps=FINITE,
            bound_s=60,
            codes=(0,),
            never=(*NEVER, NOT_STARTED),
            defect=10,
        )
        for what in ("logs", "events", "telemetry", "checkpoints")
    ]
    gone = (Action(target="files", what="remove-logs"), Action(target="rank", what="KILL", after_s=1.0))
    cases.append(
        make(
            "training files remove-logs",
            suffix="+KILL",
            actions=gone,
            bound_s=30,
            says=r"SIGKILL",
            resume=True,
            never=(*NEVER, NOT_STARTED),
            defect=10,
        )
    )
    # a user's own program
    for where, how, says in (
        ("import", "import", "no_such_module_of_chaos"),
        ("init", "raise", "planted by chaos"),
        ("training", "raise", "planted by chaos"),
        ("ending", "raise", "planted by chaos"),
        ("init", "exit7", "(exit )?code 7"),
        ("training", "exit7", "(exit )?code 7"),
        ("training", "exittext", "the planted text of chaos"),
        ("init", "exit0", "exit code 0|ended|left"),
        ("training", "exit0", "exit code 0|ended|left"),
        ("ending", "exit3", "(exit )?code 3"),
        ("training", "kill", "SIGKILL"),
        ("training", "segv", "SIGSEGV"),
    ):
        cases.append(_program("local", where, how, says))
    return cases


def _slurm() -> list[Case]:
    cases = [
        _program("slurm", "init", "raise", "planted by chaos", rank=1, defect=1),
        _program("slurm", "training", "raise", "planted by chaos", nodes=3, defect=1),
        _program("slurm", "import", "import", "no_such_module_of_chaos", rank=1, defect=1),
        _program("slurm", "training", "exit7", "(exit )?code 7"),
        _program("slurm", "training", "exittext", "the planted text of chaos"),
        _program("slurm", "init", "exit0", "exit code 0|ended|left"),
        _raised("slurm", "step", nodes=3, defect=1),
        _raised("slurm", "save"),
    ]

    make = partial(_make, "slurm")

    # the job is cancelled by Slurm's own command
    for phase, more in (
        ("pending", {}),
        ("staging", {}),
        ("start", {}),
        ("training", {"resume": True}),
        ("saving", SAVING),
    ):
        cases.append(
            make(f"{phase} job scancel", bound_s=45, says=r"(?i)cancel", never=(*NEVER, "exclude it"), defect=2, **more)
        )
    # the command
    for what in ("INT", "TERM", "HUP", "close"):
        at_once = 15.0
        cases.append(
            make(
                f"pending command {what}",
                terminal=what == "close",
                bound_s=at_once,
                says=r"(?i)cancel|interrupt",
                defect=3,
            )
        )
        cases.append(
            make(
                f"training command {what}",
                terminal=what == "close",
                bound_s=45,
                says=STOPPED,
                resume=what == "close" or None,
            )
        )
    cases.append(make("staging command INT", bound_s=30, says=STOPPED))
    cases.append(make("start command TERM", bound_s=45, says=STOPPED))
    cases.append(make("training command KILL", steps=FINITE, bound_s=90, codes=(-9,)))
    cases.append(make("pending run cancel", bound_s=15, says=r"(?i)cancel"))
    cases.append(make("training run cancel", bound_s=45, says=STOPPED, resume=True))
    # Slurm's commands fail on the node
    cases += [
        make(
            f"submitted scontrol {what}",
            actions=(),
            steps=FINITE,
            bound_s=90,
            codes=(0, 1, 3),
            says=r"scontrol",
            defect=7,
            never=(*NEVER, r"CalledProcessError|TimeoutExpired"),
        )
        for what in ("fails", "hangs")
    ]
    # agents, driver, ranks
    agent = r"(?s)(?i)(agent.*n2|n2.*agent)"
    cases += [
        make("training agent:1 KILL", bound_s=60, says=agent, never=(*NEVER, NOT_STARTED), resume=True, defect=10),
        make("training agent:1 STOP", bound_s=90, says=agent, never=(*NEVER, NOT_STARTED), defect=10),
        make("training driver KILL", bound_s=60, says=r"(?i)driver|SIGKILL|signal 9", resume=True, defect=10),
        make("training driver STOP", steps=FINITE, bound_s=120, codes=(0, 1), says=r"(?i)driver", defect=10),
        make("staging driver KILL", bound_s=60, says=r"(?i)driver|SIGKILL|signal 9", defect=10),
        make("training driver TERM", bound_s=60, says=STOPPED),
    ]
    killed = make("training rank KILL", nodes=3, bound_s=45)
    cases.append(
        msgspec.structs.replace(
            killed,
            says=rf"rank {killed.rank} on n{killed.rank + 1}\b.*SIGKILL",
            never=(*NEVER, *blames(killed.rank, 3)),
        )
    )
    stopped = make("training rank STOP", spec={"observe": {"hang_s": 5}}, bound_s=90)
    cases.append(msgspec.structs.replace(stopped, says=rf"rank {stopped.rank} on n{stopped.rank + 1}\b"))
    # Slurm's daemons, nodes, and its time limit
    through: dict[str, Any] = {"steps": FINITE, "codes": (0,)}
    cases += [
        make("training slurmd:n2 KILL", bound_s=180, **through),
        make("training slurmd:n2 restart", bound_s=120, **through),
        make("training slurmctld restart", bound_s=120, **through),
        make(
            "pending slurmctld restart+INT",
            bound_s=45,
            says=r"(?i)cancel|interrupt",
            actions=(Action(target="slurmctld", what="restart"), Action(target="command", what="INT", after_s=1.0)),
        ),
        make("training node:n2 kill", bound_s=150, requeue=True, excluded=("n2",), steps=300, codes=(0,)),
        make("training job time-limit", bound_s=120, requeue=True, steps=300, codes=(0,)),
        make("training files remove-logs", bound_s=90, defect=10, never=(*NEVER, NOT_STARTED), **through),
        make("training files remove-events", bound_s=90, defect=10, never=(*NEVER, NOT_STARTED), **through),
    ]
    return cases


def all_cases() -> list[Case]:
    """Every case; ids are unique."""
    cases = [*_local(), *_slurm()]
    names = [case.id for case in cases]
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
    return cases
