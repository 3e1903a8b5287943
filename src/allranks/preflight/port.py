"""The rendezvous port of a job. Pure: the job's id in, the same port on every node out."""

from __future__ import annotations

import hashlib

LOW = 20_000
TRIES = 4


def rendezvous_port(job_id: str | int, low: int = LOW, ephemeral_low: int = 32_768, attempt: int = 0) -> int:
    """A port from a hash of the job's id (the last digits alone collide), below those that the kernel gives away.

    `attempt` gives the next candidate, for when a port is taken on the first node.
    """
    high = ephemeral_low if ephemeral_low > low + 1000 else 32_768
    digest = hashlib.sha256(f"allranks:{job_id}:{attempt}".encode()).digest()
    return low + int.from_bytes(digest[:8], "big") % (high - low)


def candidates(job_id: str | int, ephemeral_low: int = 32_768, count: int = TRIES) -> list[int]:
    """Ports to ask for, in order of preference."""
    return [rendezvous_port(job_id, ephemeral_low=ephemeral_low, attempt=attempt) for attempt in range(count)]
