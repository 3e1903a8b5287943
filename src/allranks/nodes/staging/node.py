"""Run staging on a node: verify and unpack archives. Standard library only, Python 3.8 or later: it is sent there as
source text.

The text arrives on standard input, followed by one line of JSON, the request: ``ask`` (which parts are missing here),
``receive`` (receive parts, verify them, unpack them) or ``remove``. Answers are lines ``@allranks NODE I N FRAGMENT``:
short, because srun may mix long lines of several nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
from typing import Any, BinaryIO, Callable

WHOLE_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 16
BLOCK = 1 << 20
FRAGMENT = 600
ABOUT_PYTHON = (
    "import sys,sysconfig;print('%d.%d' % "
    "sys.version_info[:2],sysconfig.get_config_var('SOABI'),getattr(sys,'_base_executable',sys.executable),sep='\\n"
    "')"
)


class Refused(Exception):
    """An invalid archive, folder or node; the message gives the reason."""


def identity(root: str, names: list[str]) -> str | None:
    """Return a hash of these files below `root` (or of the file `root`, for the name ""); None if one is missing.

    Files above 1 MiB are identified by size and three samples, so that a network file system is not read completely.
    """
    digest = hashlib.sha256()
    try:
        for name in names:
            with open(os.path.join(root, name) if name else root, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{name}\0{size}\0".encode())
                if size <= WHOLE_BYTES:
                    digest.update(file.read())
                    continue
                for offset in (0, size // 2, size - SAMPLE_BYTES):
                    file.seek(offset)
                    digest.update(file.read(SAMPLE_BYTES))
    except OSError:
        return None
    return digest.hexdigest()


def unpack(archive: str, target: str, sha256: str) -> None:
    """Unpack into the new folder `target`, which only appears if the archive is complete and the one that was packed.

    Raises:
        Refused: it has another hash, or entries that no bundle has: outside the folder, devices, links elsewhere.
    """
    digest = hashlib.sha256()
    with open(archive, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    if digest.hexdigest() != sha256:
        raise Refused(f"is damaged: its SHA-256 is {digest.hexdigest()[:16]}..., not {sha256[:16]}...")
    partial = target + ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.mkdir(partial, 0o700)
    try:
        with tarfile.open(archive, "r:") as tar:
            safe = (
                {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            )  # not in the first releases of 3.8 to 3.11
            tar.extractall(partial, **safe)  # type: ignore[arg-type]  # noqa: S202
        os.rename(partial, target)
    except tarfile.TarError as error:
        raise Refused(f"cannot be unpacked: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def make_venv(target: str, interpreter: str) -> None:
    """Turn the unpacked packages into a virtual environment of the node's own interpreter."""
    os.makedirs(os.path.join(target, "bin"))
    for name in ("python", "python3"):
        os.symlink(interpreter, os.path.join(target, "bin", name))
    with open(os.path.join(target, "pyvenv.cfg"), "w") as file:
        file.write(f"home = {os.path.dirname(interpreter)}\ninclude-system-site-packages = false\n")


def is_own(path: str) -> bool:
    """Return whether a path is a folder, not a link, that only this user can access."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return mine and not stat.S_IMODE(status.st_mode) & 0o077


def own_folder(path: str) -> None:
    """Create a folder that only this user can access; refuse one that another user created or could change."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    if not is_own(path):
        raise Refused(f"{path} is not a folder of this user alone (mode 0700); remove it or set another with TMPDIR")


def find_python(need: dict[str, Any]) -> str | None:
    """Return the first of the given interpreters that exists here with the version and build that the packages need."""
    for candidate in need["candidates"]:
        path = shutil.which(candidate)
        if path is None:
            continue
        try:
            done = subprocess.run(
                [path, "-I", "-c", ABOUT_PYTHON],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        said = done.stdout.decode().split("\n")
        if said[:2] == [need["version"], need["soabi"]]:
            return said[2]
    return None


def job_root() -> str:
    """Return this user's job folder on this node, below the first suitable of SLURM_TMPDIR, TMPDIR, /tmp, /var/tmp."""
    bases = [os.environ.get("SLURM_TMPDIR"), os.environ.get("TMPDIR"), "/tmp", "/var/tmp"]  # noqa: S108
    base = next((b for b in bases if b and will_do(b)), "/tmp")  # noqa: S108
    return os.path.join(base, f"allranks-{os.getuid()}")


def will_do(base: str) -> bool:
    """Return whether a folder is writable and libraries in it can be loaded."""
    if not os.path.isabs(base) or not os.access(base, os.W_OK | os.X_OK):
        return False
    return not os.statvfs(base).f_flag & os.ST_NOEXEC


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Return which parts this node lacks, and where it would store them; leave a mark there if it lacks any."""
    own_python = {**request["python"], "candidates": [request["python"]["executable"]]}
    lacks = [
        part["name"]
        for part in request["parts"]
        if request["always"]
        or identity(part["path"], part["probe"]) != part["identity"]
        or (part["name"] == "env" and find_python(own_python) is None)
    ]
    if request.get("only_look"):
        return {"lacks": lacks}
    root = job_root()
    answer: dict[str, Any] = {"lacks": lacks, "folder": os.path.join(root, request["job"])}
    if "env" in lacks:
        answer["python"] = find_python(request["python"])
    sweep(root, request)
    if lacks:
        os.makedirs(os.path.dirname(root), exist_ok=True)
        own_folder(root)
        own_folder(answer["folder"])
        with open(os.path.join(answer["folder"], f"on.{me()}"), "w") as file:
            file.write(me())
    return answer


def sweep(root: str, request: dict[str, Any]) -> None:
    """Remove files of this user's ended jobs of this cluster that were not removed (the jobs were killed)."""
    cluster, job, _ = request["job"].rsplit(".", 2)
    # Another user could have put a link there, and files behind it would be removed with this user's rights.
    for name in os.listdir(root) if is_own(root) else []:
        parts = name.rsplit(".", 2)
        if len(parts) != 3 or parts[0] != cluster or not parts[1].isdigit() or name == request["job"]:
            continue
        ended = request["live"] is not None and int(parts[1]) < int(job) and parts[1] not in request["live"]
        if ended or (parts[1] == job and parts[2].isdigit()):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def receive(request: dict[str, Any], source: BinaryIO) -> dict[str, Any] | None:
    """Report that this node is ready, receive the parts (sent here, or through `source`), verify and unpack them."""
    folder = request["folder"]
    free = shutil.disk_usage(folder).free
    marks = [name[3:] for name in os.listdir(folder) if name.startswith("on.")]
    say({"ready": True, "step": os.environ.get("SLURM_STEP_ID", ""), "sees": marks, "free": free})
    for line in iter(source.readline, b""):
        order = json.loads(line)
        if order["do"] == "stream":
            with open(incoming(folder, order["part"]), "wb") as file:
                left = order["bytes"]
                while left:
                    block = source.read(min(left, BLOCK))
                    if not block:
                        raise Refused(f"part {order['part']} ended {left} bytes early")
                    file.write(block)
                    left -= len(block)
        else:
            for part in request["parts"]:
                place(folder, part, request["interpreters"][me()])
            return {}
    return None


def incoming(folder: str, part: str) -> str:
    """Return where a part's archive arrives."""
    return os.path.join(folder, f"{part}.tar")


def place(folder: str, part: dict[str, Any], interpreter: str | None) -> None:
    """Unpack a part that has arrived to its final location."""
    target, archive = os.path.join(folder, part["name"]), incoming(folder, part["name"])
    shutil.rmtree(target, ignore_errors=True)  # left by an interrupted attempt
    try:
        unpack(archive, target, part["sha256"])
    except Refused as error:
        raise Refused(f"part {part['name']} {error}") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(archive)
    if interpreter is not None and part["name"] == "env":
        make_venv(target, interpreter)


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the job's folder, and the user's folder if it is then empty."""
    folder = os.path.join(job_root(), request["job"])
    if not is_own(os.path.dirname(folder)):  # nothing there is this job's
        return {"gone": True}
    for _ in range(3):  # nodes may share the folder and remove it at once
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            break
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(folder))
    return {"gone": not os.path.lexists(folder)}


def me() -> str:
    """Return this node's name in Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def say(answer: dict[str, Any]) -> None:
    """Print one answer, in lines short enough not to be split."""
    text = json.dumps(answer)
    parts = [text[i : i + FRAGMENT] for i in range(0, len(text), FRAGMENT)]
    for number, part in enumerate(parts):
        sys.stdout.write(f"@allranks {me()} {number} {len(parts)} {part}\n")
    sys.stdout.flush()


def main() -> int:
    """Carry out the request on standard input."""
    source = sys.stdin.buffer
    request = json.loads(source.readline())
    verbs: dict[str, Callable[[], dict[str, Any] | None]] = {
        "ask": lambda: ask(request),
        "receive": lambda: receive(request, source),
        "remove": lambda: remove(request),
    }
    try:
        answer = verbs[request["verb"]]()
    except (Refused, OSError) as error:
        say({"error": str(error)})
        return 1
    if answer is not None:
        say(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
