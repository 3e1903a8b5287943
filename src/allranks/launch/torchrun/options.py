"""Read torchrun's command line and its ``PET_*`` variables, as ``torch/distributed/run.py`` of torch 2.13 does. Pure.

Options are accepted if they have torchrun's effect here, or none; the others are refused with the reason.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

from allranks.errors import RequestError

DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
_HELP = """\
usage: allranks torchrun [torchrun's options] PROGRAM [ARGS...]

Start PROGRAM as torchrun does. The log of every rank is kept, hangs are watched, and a failure is explained:
rank, host, line and reason. Options and PET_* variables are torchrun's (docs/torchrun.md has the differences):

  --standalone, --nnodes N|MIN:MAX, --nproc-per-node N|auto|gpu|cpu
  --node-rank N (default: SLURM_NODEID), --master-addr HOST, --master-port PORT
  --rdzv-backend static|c10d, --rdzv-endpoint HOST:PORT, --rdzv-id ID, --rdzv-conf join_timeout=S,...
  --max-restarts N      start again, unless the next attempt would fail the same way
  --log-dir DIR         folder of the run folders (default: runs)
  -t, --tee 3           show every rank, with a prefix; -r, --redirects 3: show none; default: rank 0
  --local-ranks-filter 0,1
  -m, --no-python, --run-path, --role NAME, --shutdown-timeout S
"""
_VALUES: dict[str, str] = {
    "nnodes": "1:1", "nproc-per-node": "1", "node-rank": "", "master-addr": "", "master-port": "",
    "rdzv-backend": "static", "rdzv-endpoint": "", "rdzv-id": "none", "rdzv-conf": "", "max-restarts": "0",
    "log-dir": "", "redirects": "0", "tee": "0", "local-ranks-filter": "", "role": "default", "shutdown-timeout": "",
    "monitor-interval": "0.1", "start-method": "spawn", "event-log-handler": "null", "local-addr": "",
    "signals-to-handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "logs-specs": "", "numa-binding": "",
    "duplicate-stdout-filters": "", "duplicate-stderr-filters": "",
}  # fmt: skip
"""Options with a value, and their defaults."""
_FLAGS = ("standalone", "module", "no-python", "run-path", "virtual-local-rank")
_SHORT = {"redirects": "-r", "tee": "-t", "module": "-m"}
_REFUSED = {
    "logs-specs": "the logs of all ranks are always kept in the run folder",
    "numa-binding": "start the program with numactl instead: --no-python numactl OPTIONS python PROGRAM",
    "virtual-local-rank": "set the device from LOCAL_RANK in the program",
    "duplicate-stdout-filters": "search the ranks' logs in the run folder instead",
    "duplicate-stderr-filters": "search the ranks' logs in the run folder instead",
}


class TorchrunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A checked command line. ``port`` is None, and ``node_rank`` too, where none was given.

    ``plain`` and ``prefixed`` are the local ranks whose output is shown; ``plain`` None: rank 0 of the job.
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
    join_timeout_s: float
    last_call_s: float
    max_restarts: int
    log_dir: str
    role: str
    grace_s: float
    tee: dict[int, int]
    redirects: dict[int, int]
    shown: list[int] | None
    signals: str

    @property
    def unnamed(self) -> bool:
        """Return whether torchrun would choose a run id itself."""
        return not self.several_nodes and self.port is None and self.run_id == "none"

    @property
    def several_nodes(self) -> bool:
        """Return whether other nodes may take part."""
        return self.max_nodes > 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(message.replace("training_script", "PROGRAM"))

    def format_help(self) -> str:
        return _HELP


def parse(args: Sequence[str], environ: Mapping[str, str]) -> TorchrunOptions:
    """Return the checked options; ``--help`` is printed, and ends the command.

    Raises:
        RequestError: an option is unknown, malformed or not supported.
    """
    parser = _Parser(prog="allranks torchrun")
    for name, default in _VALUES.items():
        own = environ.get(f"PET_{name.replace('-', '_').upper()}", default)
        parser.add_argument(*_spellings(name), default=own)
    for name in _FLAGS:
        own = environ.get(f"PET_{name.replace('-', '_').upper()}", "0").lower() not in ("", "0", "false")
        parser.add_argument(*_spellings(name), action="store_true", default=own)
    parser.add_argument("training_script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    given = vars(parser.parse_args(list(args)))
    return _checked({name.replace("_", "-"): value for name, value in given.items()}, environ)


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys([*filter(None, [_SHORT.get(name)]), f"--{name}", f"--{name.replace('-', '_')}"]))


def _checked(given: dict[str, str], environ: Mapping[str, str]) -> TorchrunOptions:
    for name, instead in _REFUSED.items():
        if given[name]:
            raise RequestError(f"--{name} is not supported; {instead}")
    if given["module"] and given["no-python"]:
        raise RequestError("-m and --no-python exclude each other")
    low, high = _nodes("1" if given["standalone"] and given["nnodes"] == "1:1" else given["nnodes"])
    if given["standalone"]:  # one node, on any free port, whatever else was set
        low = high = 1
        given |= {"rdzv-backend": "c10d", "rdzv-endpoint": "", "master-addr": "", "master-port": ""}
    backend = given["rdzv-backend"].lower()
    if high > 1 and backend not in DEFAULT_PORTS:
        raise RequestError(
            f"--rdzv-backend {backend} is not supported: allranks needs no such server. Use --rdzv-backend c10d and as "
            "--rdzv-endpoint HOST:PORT the first node and a free port there"
        )
    address, port = _endpoint(given, backend)
    if high > 1 and not address:
        name = "--master-addr HOST or --rdzv-endpoint" if backend == "static" else "--rdzv-endpoint"
        raise RequestError(f"--nnodes {given['nnodes']}: {name} HOST:PORT must name the first node")
    conf = _settings(given["rdzv-conf"])
    limit = _number(
        "shutdown-timeout", given["shutdown-timeout"] or environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    )
    return TorchrunOptions(
        program=given["training-script"],
        args=list(given["args"]),
        module=bool(given["module"]),
        direct=bool(given["no-python"]) and not given["run-path"],
        min_nodes=low,
        max_nodes=high,
        procs=given["nproc-per-node"],
        node_rank=_number("node-rank", given["node-rank"]) if given["node-rank"] else None,
        backend=backend,
        address=address,
        port=port,
        run_id=given["rdzv-id"],
        join_timeout_s=float(conf.get("join_timeout", conf.get("timeout", "600"))),
        last_call_s=float(conf.get("last_call_timeout", "30")),
        max_restarts=_number("max-restarts", given["max-restarts"]),
        log_dir=given["log-dir"],
        role=given["role"],
        grace_s=limit,
        tee=_streams("tee", given["tee"]),
        redirects=_streams("redirects", given["redirects"]),
        shown=_ranks(given["local-ranks-filter"]),
        signals=given["signals-to-handle"],
    )


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise RequestError(f"--{name} {text}: expected a number that is not negative")
    return int(text)


def _nodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    bounds = _number("nnodes", low), _number("nnodes", high or low)
    if not 0 < bounds[0] <= bounds[1]:
        raise RequestError(f"--nnodes {text}: expected N, or MIN:MAX with 0 < MIN <= MAX")
    return bounds


def _endpoint(given: dict[str, str], backend: str) -> tuple[str, int | None]:
    """Return host and port at which the nodes meet; "" and None where none is given."""
    place = given["rdzv-endpoint"].strip()
    if not place and backend == "static":
        port = _number("master-port", given["master-port"]) if given["master-port"] else None
        return given["master-addr"].strip("[] "), port
    host, port_text = place, ""
    if match := re.fullmatch(r"(?:\[([^\]]+)\]|([^:]*))(?::(\d*))?", place):
        host, port_text = match[1] or match[2], match[3] or ""
    port = _number("rdzv-endpoint", port_text) if port_text else None
    return host, port or None


def _settings(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(str.strip, text.split(",")):
        name, _, value = part.partition("=")
        pairs[name.strip()] = value
    for name in ("join_timeout", "timeout", "last_call_timeout"):
        if name in pairs and not re.fullmatch(r"\d+(\.\d+)?", pairs[name].strip()):
            raise RequestError(f"--rdzv-conf {name}={pairs[name]}: expected a number of seconds")
    return pairs


def _streams(name: str, text: str) -> dict[int, int]:
    """Return 1 (standard output), 2 (error) or 3 (both) by local rank; the key -1 stands for all."""
    if re.fullmatch(r"[0-3]", text):
        return {-1: int(text)}
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise RequestError(f"--{name} {text}: expected 0 to 3, or RANK:N,RANK:N with local ranks and such numbers")
    return {int(rank): int(what) for rank, what in (part.split(":") for part in text.split(","))}


def _ranks(text: str) -> list[int] | None:
    if text and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise RequestError(f"--local-ranks-filter {text}: expected local ranks, separated by commas")
    return [int(word) for word in text.split(",")] if text else None


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
