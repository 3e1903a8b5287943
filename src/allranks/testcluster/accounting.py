"""slurmdbd and its MariaDB, for boxes with real accounts, QOS and ``sacct``."""

from __future__ import annotations

import secrets
import subprocess

from allranks.errors import RunFailed
from allranks.testcluster import render
from allranks.testcluster.box import Box
from allranks.testcluster.command import attempt, program, run
from allranks.testcluster.daemons import daemon_prefix, wait_until

SLOW_TIMEOUT_S = 120.0
# A test's database: small files, and no waiting for a disk.
SMALL = (
    "--innodb-log-file-size=8M",
    "--innodb-buffer-pool-size=32M",
    "--innodb-flush-log-at-trx-commit=0",
    "--skip-log-bin",
    "--skip-name-resolve",
)


def start(box: Box) -> None:
    """Starts both, and creates the cluster, one account, and the box's user in it."""
    password = secrets.token_hex(16)
    _start_database(box, password)
    _start_slurmdbd(box, password)
    _create_accounts(box)


def _start_database(box: Box, password: str) -> None:
    """MariaDB on the login side's loopback, which nothing outside the box can reach."""
    folder = box.folder.database
    prefix = daemon_prefix(box, box.plan.login)
    log = box.folder.log / "mariadbd.log"
    words = ["--no-defaults", f"--datadir={folder / 'data'}", *SMALL]
    words += [] if box.plan.rootless else ["--user=root"]
    install = ["--skip-test-db", "--auth-root-authentication-method=normal"]
    run([*prefix, program("mariadb-install-db"), *words, *install], timeout_s=SLOW_TIMEOUT_S, what="mariadb-install-db")
    script = folder / "init.sql"
    script.touch(mode=0o600)
    script.write_text(
        "CREATE DATABASE IF NOT EXISTS slurm;\n"
        f"CREATE OR REPLACE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm.* TO 'slurm'@'127.0.0.1';\n"
    )
    serve = [
        f"--socket={folder / 'socket'}",
        f"--pid-file={folder / 'pid'}",
        f"--port={render.DATABASE_PORT}",
        "--bind-address=127.0.0.1",
        f"--init-file={script}",
    ]
    with log.open("wb") as output:
        subprocess.run(
            [*prefix, program("setsid"), "--fork", program("mariadbd"), *words, *serve],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=SLOW_TIMEOUT_S,
            check=True,
        )
    wait_until(lambda: "ready for connections" in log.read_text(errors="replace"), "MariaDB", log, SLOW_TIMEOUT_S)


def _start_slurmdbd(box: Box, password: str) -> None:
    conf = box.folder.etc / "slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(render.slurmdbd_conf(box.plan, box.folder, password))
    run([*daemon_prefix(box, box.plan.login), program("slurmdbd")], what="slurmdbd")
    ask = [*box.command_prefix("/"), "sacctmgr", "--noheader", "list", "cluster"]
    wait_until(lambda: attempt(ask).returncode == 0, "slurmdbd", box.folder.log / "slurmdbd.log", SLOW_TIMEOUT_S)


def _create_accounts(box: Box) -> None:
    """Root's associations with Slurm's own account "root" are made by slurmdbd; ours is added and made the default."""
    sacctmgr = [*box.command_prefix("/"), "sacctmgr", "--immediate", "--quiet"]
    user = box.plan.user
    attempt([*sacctmgr, "add", "cluster", box.name])
    attempt([*sacctmgr, "add", "account", render.ACCOUNT, "description=box", "organization=box"])
    attempt([*sacctmgr, "add", "user", user, f"account={render.ACCOUNT}"])
    attempt([*sacctmgr, "modify", "user", user, "set", f"defaultaccount={render.ACCOUNT}"])
    listed = run([*sacctmgr, "--noheader", "--parsable2", "list", "user", user, "format=user,defaultaccount"])
    if f"{user}|{render.ACCOUNT}" not in listed:
        raise RunFailed(f"slurmdbd did not take the account '{render.ACCOUNT}' for '{user}': it lists {listed!r}.")
