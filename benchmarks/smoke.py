"""The smoke ladder as it is climbed on this machine: all tests on one node, then those of several nodes on the cluster in a box.

    python -m benchmarks.smoke --json benchmarks/results/smoke.json
    python -m benchmarks.smoke --use runs/smoke-A/smoke.json runs/smoke-B/smoke.json --json benchmarks/results/smoke.json

The exit code is 1 if a criterion failed, or if a test was run nowhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TIMEOUT_S = 5400
CLIMBS = (("all", "--on", "local"), ("04", "06", "08", "--on", "cluster"))
PRIVATE = ("folder", "report", "host")


def climb(words: tuple[str, ...], folder: str) -> dict[str, Any]:
    """One `allranks smoke --json`."""
    command = [sys.executable, "-m", "allranks.cli.main", "smoke", *words, "--json", "--run-root", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT_S)
    return json.loads(done.stdout)


def public(value: Any) -> Any:
    """Without names of this machine and paths on it."""
    if isinstance(value, dict):
        return {k: public(v) for k, v in value.items() if k not in PRIVATE}
    return [public(v) for v in value] if isinstance(value, list) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--use", type=Path, nargs="+", help="smoke.json of climbs that were made before")
    given = parser.parse_args()
    if given.use:
        climbs = [json.loads(path.read_text()) for path in given.use]
    else:
        # not below /tmp, of which each node of the box has its own
        with tempfile.TemporaryDirectory(prefix="allranks-smoke-", dir="/var/tmp") as folder:
            climbs = [climb(words, folder) for words in CLIMBS]
    given.json.write_text(json.dumps({"climbs": public(climbs)}, indent=2, ensure_ascii=False) + "\n")
    tests = [test for one in climbs for test in one["tests"]]
    ran = {t["name"]: t["status"] for t in tests if t["status"] != "not run"}
    for name in sorted({t["name"] for t in tests}):
        print(f"{name:24} {ran.get(name, 'not run')}")
    return int(any(t["status"] == "failed" for t in tests) or len(ran) < len({t["name"] for t in tests}))


if __name__ == "__main__":
    sys.exit(main())
