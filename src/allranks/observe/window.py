"""Whether the profiler's window fits a run. Pure, no torch."""

from __future__ import annotations

from allranks.spec.records import ProfileSpec, RunSpec


def window_warning(wanted: ProfileSpec, steps: int) -> str | None:
    """What a run, or an attempt, of so many steps leaves of the window; None if all of it."""
    first = wanted.wait + wanted.warmup
    window = f"observe.profile records steps {first + 1} to {first + wanted.active}"
    if steps <= first:
        return f"{window}, but there are only {steps}: there will be no trace; lower wait or warmup"
    if steps < first + wanted.active:
        return f"{window}, but there are only {steps}: the trace will hold {steps - first} of {wanted.active} steps"
    return None


def profile_warnings(spec: RunSpec, world_size: int, max_steps: int | None) -> list[str]:
    """What `plan` and `run` say about the window; ``max_steps`` None means not known yet."""
    wanted = spec.observe.profile
    if wanted is None:
        return []
    if spec.script is not None:
        return ["observe.profile: a script of your own is not profiled; it has its own loop"]
    found = []
    if max_steps is not None and (short := window_warning(wanted, max_steps)):
        found.append(short)
    absent = sorted(rank for rank in wanted.ranks or [] if rank >= world_size)
    if absent:
        found.append(
            f"observe.profile.ranks names {', '.join(map(str, absent))}, but the ranks are 0 to {world_size - 1}"
        )
    if wanted.ranks == []:
        found.append("observe.profile.ranks is empty: no rank is profiled; leave it out to profile all")
    return found
