"""slurmdbd and its MariaDB, for boxes with real accounts, QOS and ``sacct``."""

from __future__ import annotations

import pwd
import secrets
import subprocess

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
    run([*prefix, program("mariadb-install-db"), *words, *install], timeout_s=SLOW_TIMEOUT_S)
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
            [program("setsid"), "--fork", *prefix, program("mariadbd"), *words, *serve],
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
    run([*daemon_prefix(box, box.plan.login), program("slurmdbd")])
    ask = [*box.command_prefix("/"), "sacctmgr", "--noheader", "list", "cluster"]
    wait_until(lambda: attempt(ask).returncode == 0, "slurmdbd", box.folder.log / "slurmdbd.log", SLOW_TIMEOUT_S)


def _create_accounts(box: Box) -> None:
    sacctmgr = [*box.command_prefix("/"), "sacctmgr", "--immediate", "--quiet", "add"]
    user = pwd.getpwuid(box.plan.uid).pw_name
    attempt([*sacctmgr, "cluster", box.name])
    attempt([*sacctmgr, "account", render.ACCOUNT, "description=box", "organization=box"])
    # root exists already, in Slurm's own account "root": then only its second association is new.
    attempt([*sacctmgr, "user", user, f"account={render.ACCOUNT}", f"defaultaccount={render.ACCOUNT}"])
