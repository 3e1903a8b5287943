"""Where the text of a matrix comes from: a file, standard input, or the driver of this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import BinaryIO

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.inputs import StdinClosed, is_stdin, name_of, open_input

MAX_BYTES = 4 * 2**20
"""A matrix of 16 GPUs and 20 cards has 6 kB; what is larger is something else."""
DRIVER_LIMIT_S = 30.0
_BOMS = ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"), (b"\xef\xbb\xbf", "utf-8-sig"))


def read_source(path: Path) -> str:
    """Text of a file; ``-`` is standard input.

    Raises:
        RequestError: it cannot be read, is empty, too large, binary or in an unknown encoding.
    """
    name = name_of(path)
    try:
        if not is_stdin(path) and path.is_dir():
            raise RequestError(f"{name} is a folder; give a file with the output of `nvidia-smi topo -m`")
        with open_input(path) as file:
            return _text(_limited(file, name), name)
    except StdinClosed:
        raise RequestError(f"{name} is closed; give a file with the output of `nvidia-smi topo -m`") from None
    except FileNotFoundError:
        raise RequestError(f"{name}: there is no such file") from None
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror or error}") from None


def _limited(file: BinaryIO, name: str) -> bytes:
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"{name} is larger than {MAX_BYTES >> 20} MiB; the output of `nvidia-smi topo -m` has a few kB"
        )
    return data


def _text(data: bytes, name: str) -> str:
    if not data.strip(b" \t\r\n\0\xef\xbb\xbf\xff\xfe"):
        raise RequestError(f"{name} is empty; it should hold the output of `nvidia-smi topo -m`")
    encoding = next((code for bom, code in _BOMS if data.startswith(bom)), "utf-8")
    if encoding == "utf-8" and b"\0" in data:
        raise RequestError(f"{name} is a binary file, no text (it has NUL bytes, the first at {data.index(0)})")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is no {encoding.upper().removesuffix('-SIG')} text (byte {error.start}); "
            f"convert it, for example with `iconv -f latin1 -t utf8`"
        ) from None


def from_driver() -> str:
    """What the driver of this machine says.

    Raises:
        EnvironmentNotAble: there is no driver, or it does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        raise EnvironmentNotAble("there is no nvidia-smi on this machine; give a file: allranks topo FILE")
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DRIVER_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentNotAble(f"nvidia-smi topo -m does not answer: {error}") from None
    if done.returncode:
        raise EnvironmentNotAble(
            f"nvidia-smi topo -m ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}"
        )
    return done.stdout
