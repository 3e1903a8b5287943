"""Read torchrun's command line and its ``PET_*`` variables, as ``torch/distributed/run.py`` of torch 2.13 does. Pure.

Options are accepted if they have torchrun's effect here, or none; the others are refused with the reason.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from allranks.errors import RequestError

MAX_PORT = (1 << 16) - 1
DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
_HELP = """\
usage: allranks torchrun [torchrun's options] PROGRAM [ARGS...]

Start PROGRAM as torchrun does. The log of every rank is kept, hangs are
watched, and a failure is explained: rank, host, line, reason. Options and PET_*
variables are torchrun's (differences: torchrun in the documentation):

  --standalone, --nnodes N|MIN:MAX, --nproc-per-node N|auto|gpu|cpu
  --node-rank N (default: SLURM_NODEID), --master-addr HOST, --master-port PORT
  --rdzv-backend static|c10d, --rdzv-endpoint HOST:PORT, --rdzv-id ID
  --rdzv-conf join_timeout=S,last_call_timeout=S
  --max-restarts N     start again, unless the next attempt would fail alike
  --log-dir DIR        folder of the run folders (default: runs)
  -t, --tee 3          show every rank with a prefix (default: rank 0 alone)
  -r, --redirects 3    show none; --local-ranks-filter 0,1: show these
  -m, --no-python, --run-path, --role NAME, --shutdown-timeout S,
  --virtual-local-rank
"""


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise argparse.ArgumentTypeError(f"expected a number that is not negative, got {text!r}")
    return int(text)


def _number(text: str) -> int | None:
    return _count(text) if text else None


def _nodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    bounds = _count(low), _count(high or low)
    if not 0 < bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"expected N, or MIN:MAX with 0 < MIN <= MAX, got {text!r}")
    return bounds


def _endpoint(text: str) -> tuple[str, int | None]:
    """Return host and port; "" and None where they are not given."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]*))(?::(\d*))?", text.strip())
    if match is None:
        return text.strip(), None
    return match[1] or match[2], int(match[3] or 0) or None


def _settings(text: str) -> dict[str, float]:
    pairs = [part.strip(" '\"").partition("=") for part in text.split(",")]
    timeouts = {name: value for name, _, value in pairs if name in ("join_timeout", "last_call_timeout", "timeout")}
    for name, value in timeouts.items():
        if not re.fullmatch(r"\d+(\.\d+)?", value):
            raise argparse.ArgumentTypeError(f"{name}={value}: expected a number of seconds")
    return {name: float(value) for name, value in timeouts.items()}


def _streams(text: str) -> dict[int, int]:
    """Return 1 (standard output), 2 (error) or 3 (both) by local rank; the key -1 stands for all."""
    if re.fullmatch(r"[0-3]", text):
        return {-1: int(text)}
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise argparse.ArgumentTypeError(f"expected 0 to 3, or RANK:N,RANK:N with such numbers, got {text!r}")
    return {int(rank): int(what) for rank, what in (part.split(":") for part in text.split(","))}


def _ranks(text: str) -> list[int] | None:
    return [_count(word) for word in text.split(",")] if text else None


_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "nnodes": ("1:1", _nodes), "nproc-per-node": ("1", str), "node-rank": ("", _number), "master-addr": ("", str),
    "master-port": ("", _number), "rdzv-backend": ("static", str.lower), "rdzv-endpoint": ("", _endpoint),
    "rdzv-id": ("none", str), "rdzv-conf": ("", _settings), "max-restarts": ("0", _count), "log-dir": ("", str),
    "redirects": ("0", _streams), "tee": ("0", _streams), "local-ranks-filter": ("", _ranks), "role": ("default", str),
    "shutdown-timeout": ("30", _count), "signals-to-handle": ("SIGTERM,SIGINT,SIGHUP,SIGQUIT", str),
    **dict.fromkeys(("monitor-interval", "start-method", "event-log-handler", "local-addr"), ("", str)),
}  # fmt: skip
"""Options with a value: default, and what reads it. The last ones concern torchrun's own processes."""
_FLAGS = ("standalone", "module", "no-python", "run-path", "virtual-local-rank")
_SHORT = {"redirects": "-r", "tee": "-t", "module": "-m"}
_REFUSED = {
    "logs-specs": "the logs of all ranks are always kept in the run folder",
    "numa-binding": "start the program with numactl instead: --no-python numactl OPTIONS python PROGRAM",
    "duplicate-stdout-filters": "search the ranks' logs in the run folder instead",
    "duplicate-stderr-filters": "search the ranks' logs in the run folder instead",
}


class TorchrunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A checked command line. ``port`` and ``node_rank`` are None where none was given.

    ``shown`` are the local ranks whose output is shown; None: rank 0 of the job.
    """

    program: str
    args: list[str]
    module: bool
    direct: bool
    min_nodes: int
    max_nodes: int
    procs: str
    node_rank: int | None
    backend: str
    address: str
    port: int | None
    run_id: str
    conf: dict[str, float]
    max_restarts: int
    log_dir: str
    role: str
    grace_s: float
    tee: dict[int, int]
    redirects: dict[int, int]
    shown: list[int] | None
    signals: str
    virtual_local_rank: bool

    @property
    def unnamed(self) -> bool:
        """Return whether torchrun would choose a run id itself."""
        return not self.several_nodes and self.port is None and self.run_id == "none"

    @property
    def several_nodes(self) -> bool:
        """Return whether other nodes may take part."""
        return self.max_nodes > 1

    @property
    def join_timeout_s(self) -> float:
        """Return how long nodes wait for each other."""
        return self.conf.get("join_timeout", self.conf.get("timeout", 600.0))

    @property
    def last_call_s(self) -> float:
        """Return how long more nodes than the fewest are waited for."""
        return self.conf.get("last_call_timeout", 30.0)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(message.removeprefix("argument ").replace("training_script, args", "PROGRAM"))

    def format_help(self) -> str:
        return _HELP


def parse(args: Sequence[str], environ: Mapping[str, str]) -> TorchrunOptions:
    """Return the checked options; ``--help`` is printed, and ends the command.

    Raises:
        RequestError: an option is unknown, malformed or not supported.
    """
    parser = _Parser(prog="allranks torchrun")
    pet = {"shutdown_timeout": environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or "30"}
    pet |= {name.removeprefix("PET_").lower(): value for name, value in environ.items() if name.startswith("PET_")}

    def add(name: str, **more: Any) -> None:
        key = name.replace("-", "_")
        spellings = dict.fromkeys([*filter(None, [_SHORT.get(name)]), f"--{name}", f"--{key}"])
        parser.add_argument(*spellings, **{**more, "default": pet.get(key, more["default"])})

    for name, (default, kind) in _OPTIONS.items():
        add(name, default=default, type=kind)
    for name in _FLAGS:
        add(name, action="store_const", const="1", default="0")
    for name in _REFUSED:
        add(name, default="")
    parser.add_argument("training_script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    given = parser.parse_args(list(args))
    for name, instead in _REFUSED.items():
        if getattr(given, name.replace("-", "_")) not in ("", "0"):
            raise RequestError(f"--{name} is not supported; {instead}")
    for name in _FLAGS:
        key = name.replace("-", "_")
        if (value := getattr(given, key)) not in ("", "0", "1"):
            raise RequestError(f"PET_{key.upper()}={value}: expected 0 or 1")
        setattr(given, key, value == "1")
    return _checked(given, environ)


def _checked(given: argparse.Namespace, environ: Mapping[str, str]) -> TorchrunOptions:
    if given.module and given.no_python:
        raise RequestError("-m and --no-python exclude each other")
    (low, high), backend, (address, port) = given.nnodes, given.rdzv_backend, given.rdzv_endpoint
    if given.standalone:  # one node, on any free port, whatever else was set
        low, high, backend, address, port = 1, 1, "c10d", "", None
    elif backend == "static" and not address:
        address, port = given.master_addr.strip("[] "), given.master_port
    if high > 1 and backend not in DEFAULT_PORTS:
        raise RequestError(
            f"--rdzv-backend {backend} is not supported: allranks needs no such server. Use --rdzv-backend c10d and as "
            "--rdzv-endpoint HOST:PORT the first node and a free port there"
        )
    if high > 1 and not address:
        name = "--master-addr HOST or --rdzv-endpoint" if backend == "static" else "--rdzv-endpoint"
        raise RequestError(f"--nnodes {high}: {name} HOST:PORT must name the first node")
    if (port or 0) > MAX_PORT:
        raise RequestError(f"port {port}: the largest is {MAX_PORT}")
    return TorchrunOptions(
        program=given.training_script, args=given.args, module=given.module,
        direct=given.no_python and not given.run_path, min_nodes=low, max_nodes=high, procs=given.nproc_per_node,
        node_rank=given.node_rank, backend=backend, address=address, port=port, run_id=given.rdzv_id,
        conf=given.rdzv_conf, max_restarts=given.max_restarts, log_dir=given.log_dir, role=given.role,
        grace_s=given.shutdown_timeout,
        tee=given.tee, redirects=given.redirects, shown=given.local_ranks_filter, signals=given.signals_to_handle,
        virtual_local_rank=given.virtual_local_rank,
    )  # fmt: skip


def shown_ranks(options: TorchrunOptions, procs: int, *, first_node: bool) -> dict[int, bool]:
    """Return the local ranks whose output is shown on this node, and whether with a prefix, as torchrun's --tee does.

    torchrun shows all ranks by default; here it is rank 0 of the job, because the logs have the others.
    """
    all_ranks = range(procs)
    teed = [r for r in all_ranks if options.tee.get(r, options.tee.get(-1, 0))]
    hidden = [r for r in all_ranks if options.redirects.get(r, options.redirects.get(-1, 0))]
    wanted = options.shown if options.shown is not None else [0] if first_node else []
    shown = {r: False for r in wanted if r in all_ranks and r not in hidden}
    return shown | {r: True for r in teed if options.shown is None or r in options.shown}
