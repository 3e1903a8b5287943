"""The store at which the agents of several nodes meet, signed by its run: another run's store is refused by name.

torch asks a store for nothing of the kind: an agent that finds another job's store at its address joins it, and one of
the two jobs hangs or dies later, with an error that names neither.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from allranks.errors import EnvironmentNotAble
from allranks.launch.rendezvous import Rendezvous

if TYPE_CHECKING:
    from torch.distributed import TCPStore

SIGNATURE = "allranks/run"
SIGNED_WITHIN_S = 15.0
CURE = "leave cluster.rendezvous.port and address null, so that a free place is found, or end the other run"


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """Whose store it is."""

    run: str
    key: str

    def __str__(self) -> str:
        return f"run {self.run} ({self.key})"


def join_store(meeting: Rendezvous, node: int, run: str, timeout_s: float) -> TCPStore:
    """Node 0 opens the store and signs it; every other node goes there and reads whose it is.

    Returns:
        The store; node 0 must keep it until torch has opened its own, which then is this one.

    Raises:
        EnvironmentNotAble: the place belongs to somebody else; the message names both.
    """
    from torch.distributed import TCPStore

    own = Signature(run=run, key=meeting.key)
    where = f"{meeting.address}:{meeting.port}"
    if node == 0:
        try:
            store = TCPStore(
                meeting.address, meeting.port, None, True, timedelta(seconds=timeout_s), False, multi_tenant=True
            )
        except RuntimeError as error:
            raise EnvironmentNotAble(_taken(where, own, meeting, str(error))) from None
        store.set(SIGNATURE, msgspec.json.encode(own).decode())
        return store
    try:
        store = _client(meeting, timeout_s)
    except RuntimeError as error:
        raise EnvironmentNotAble(
            f"node {node} does not reach the store of {own} at {where} within {timeout_s:g} s: {_first(error)}"
        ) from None
    found = _signature(store, SIGNED_WITHIN_S)
    if found != own:
        whose = f"belongs to {found}" if found else f"has not been signed by any run within {SIGNED_WITHIN_S:g} s"
        raise EnvironmentNotAble(f"the store at {where} {whose}; it is not that of {own}: {CURE}")
    return store


def _client(meeting: Rendezvous, timeout_s: float) -> TCPStore:
    """Connected to the store there. In a thread: torch waits without end for the first word of what is no store.

    Raises:
        RuntimeError: nothing answers in time.
    """
    from torch.distributed import TCPStore

    found: list[TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            found.append(TCPStore(meeting.address, meeting.port, None, False, timedelta(seconds=timeout_s), False))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, name="meeting", daemon=True)
    thread.start()
    thread.join(timeout_s + 1.0)
    if not found:
        raise RuntimeError("what listens there does not answer as a store")
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def _signature(store: TCPStore, wait_s: float) -> Signature | None:
    try:
        store.wait([SIGNATURE], timedelta(seconds=wait_s))
        return msgspec.json.decode(store.get(SIGNATURE), type=Signature)
    except (RuntimeError, msgspec.MsgspecError):
        return None


def _taken(where: str, own: Signature, meeting: Rendezvous, why: str) -> str:
    if "in use" not in why.lower():
        return f"node 0 cannot open the store of {own} at {where}: {_first(why)}"
    try:
        owner = _signature(_client(meeting, 3.0), 2.0)
    except RuntimeError:
        owner = None
    holder = str(owner) if owner else "a program that is no run of allranks (ss -ltnp shows it)"
    return f"port {meeting.port} of {meeting.address} is held by {holder}, so {own} cannot meet there: {CURE}"


def _first(error: object) -> str:
    return str(error).strip().split("\n", 1)[0]
