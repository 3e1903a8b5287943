"""One file for the batch host where it does not see allranks or its packages: they come from the bundle, on a shared folder.

write_bootstrap(bundle, run.root / "bootstrap.py")              # when the job is submitted

python=$(python3 RUN/bootstrap.py) || exit 3                    # in the batch script; any Python from 3.8 on
exec "$python" -m allranks.launch.driver RUN
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from allranks.rundir import write_text_atomic
from allranks.stage.bundle import Bundle, probe_of
from allranks.stage.steps import helper_texts

NEEDED = ("env", "allranks")
_TEXT = """\
# Written by allranks for one job: unpacks the packages on the batch host, and prints the Python to use.
import json, sys, types
for name, text in json.loads({texts!r}):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, name, "exec"), module.__dict__)
try:
    sys.exit(module.bootstrap(json.loads({request!r})))
except (module.Refused, OSError) as error:
    sys.exit("allranks: this host cannot be prepared: %s" % error)
"""


def write_bootstrap(bundle: Bundle, path: Path) -> None:
    """Write the file: standard library only, with everything in it but the archives."""
    parts = [
        {**probe_of(part), "archive": part.archive, "unpacked_bytes": part.unpacked_bytes}
        for part in bundle.parts
        if part.name in NEEDED
    ]
    request = {"python": msgspec.to_builtins(bundle.python), "parts": parts}
    texts = msgspec.json.encode(helper_texts()).decode()
    write_text_atomic(path, _TEXT.format(texts=texts, request=msgspec.json.encode(request).decode()))
