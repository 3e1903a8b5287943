"""Check a request on the launcher's machine, before contacting nodes. No torch.

`check_request` reads the spec, the model's config, tokenizer and headers, and the first row of the data: less than a
second. `check_rows` converts every row, as the ranks will. `launch.preview.check_start` calls the others, for `run` and
`doctor`.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlsplit

from allranks.errors import DataError, EnvironmentNotAble, SpecError
from allranks.nodes.checks.software import HUB, hub_names, offline_variable
from allranks.nodes.rank_command import (
    missing_program_paths,
    needed_file,
    program_file,
    require_interpreter,
    require_program,
)
from allranks.planning.model_checks import trains_classifier
from allranks.planning.rank_environment import script_arguments
from allranks.spec import data_sources
from allranks.spec.data_rows import eval_data, naming_source, read_examples
from allranks.spec.data_sources import parts_of, source_of
from allranks.spec.data_templates import choose_template, require_task_template, require_template
from allranks.spec.models import check_model_folder, is_mlp
from allranks.spec.records import DataSpec, RunSpec, ScriptSpec
from allranks.spec.validation import is_container
from allranks.utils.filesystem import hf_home
from allranks.utils.inputs import read_text
from allranks.utils.safetensors_files import stored_tensors
from allranks.version import __version__

MAX_ROW_BYTES = 64 << 20
"""Limit for `check_rows`: reading more takes seconds. The rows of larger files are checked on the ranks."""
TIMEOUT_S = 5.0


def check_request(spec: RunSpec) -> bool | None:
    """Refuse what is invalid on any machine: an unknown or unsuitable model, a missing or empty data file, a missing
    column.

    Returns:
        Whether the model is trained as a classifier; None if that is unknown.

    Raises:
        SpecError, DataError: with the key and the fix.
    """
    if spec.cluster.python is not None and spec.cluster.launched_by.runs_here:
        require_interpreter(spec.cluster.python)
    if spec.script is not None and spec.cluster.launched_by.runs_here:
        require_program(spec.script, spec.cluster.python)
    if spec.script is not None:
        _check_source(spec.script, spec.cluster.python)
        script_arguments(spec.script, dict(os.environ))
    if spec.model is not None and is_mlp(spec.model.name):
        return None  # it uses noise, by the rules of the spec
    if spec.model is not None and not spec.model.name.startswith("tiny:"):
        check_model_folder(spec.model.name)
    classifier = trains_classifier(spec)
    if spec.data is not None:
        for number, part in enumerate(parts_of(spec.data)):
            with naming_source(spec.data, number):
                _check_data(spec, part, classifier)
    if spec.data is not None and spec.eval.source is not None:
        try:
            _check_data(spec, eval_data(spec), classifier)
        except DataError as error:
            raise DataError(str(error).replace("data.source", "eval.source")) from None
    return classifier


def _check_source(script: ScriptSpec, python: str | None) -> None:
    from allranks.nodes.checks.program import source_problem  # with the probe of the nodes, which loads much

    path = program_file(script)
    if path is not None and path.is_file() and (problem := source_problem(script, path, same_python=python is None)):
        raise SpecError(problem)


def _check_data(spec: RunSpec, data: DataSpec, classifier: bool | None) -> None:
    """Refuse a first row that no template fits."""
    require_template(data.template)
    source = source_of(data)
    if source.startswith("builtin:"):
        own = data_sources.builtin_set(source)
        if data.template != "auto" or data.columns:  # else it has its own columns
            choose_template(data, own.rows(1, data.seed), classifier=classifier is True)
        elif classifier:
            require_task_template(own.template, spec.model.name if spec.model else "", classifier=True)
        return
    if not data_sources.looks_like_file(source):
        return
    rows = data_sources.read_first_rows(source)
    if not rows:
        if all(path.stat().st_size == 0 for path in data_sources.data_files(source)):
            raise DataError(f"data.source {source}: the file is empty")
        return
    if classifier is not None or data.template != "auto":
        choose_template(data, rows, classifier=classifier is True)


def check_rows(spec: RunSpec, classifier: bool | None) -> None:
    """Read and convert all rows of local files as the ranks will, to find unusable rows before they start.

    A file above `MAX_ROW_BYTES`, one that this machine does not see, and all files without numpy are left to the ranks.

    Args:
        classifier: the answer of `check_request`.

    Raises:
        DataError: names the row.
    """
    data = spec.data
    if data is None or spec.model is None or is_mlp(spec.model.name) or find_spec("numpy") is None:
        return
    sources = [source_of(part) for part in parts_of(data)] + ([spec.eval.source] if spec.eval.source else [])
    own = [source for source in sources if not source.startswith("builtin:")]
    if classifier is None or not own or not all(map(data_sources.looks_like_file, own)):
        return
    try:
        files = [path for source in own for path in data_sources.data_files(source)]
    except DataError:  # this machine may not see them
        return
    if sum(path.stat().st_size for path in files) <= MAX_ROW_BYTES:
        read_examples(spec, classifier=classifier)


def check_sources(spec: RunSpec) -> None:
    """Refuse what the ranks could not load: a name of the hub, or a folder with a config and no weights.

    The hub is asked only if the ranks run on this machine: nodes of a cluster may see another network.

    Raises:
        SpecError, EnvironmentNotAble: as `ask_hub` and `stored_tensors`.
    """
    if spec.cluster.launched_by.runs_here:
        ask_hub(spec)
    name = spec.model.name if spec.model is not None else ""
    folder = Path(name).expanduser()
    if name and not is_mlp(name) and not name.startswith("tiny:") and (folder / "config.json").is_file():
        stored_tensors(folder, name)


def ask_hub(spec: RunSpec) -> None:
    """Check that a model and a data set of the hub are in this machine's cache, or that the hub has them.

    Raises:
        SpecError: the hub does not know the name or the revision, or demands a token.
        EnvironmentNotAble: neither cached nor reachable.
    """
    from allranks.nodes.probes.probe import is_cached  # a program of the nodes, which loads much

    for key, name, folders in hub_names(spec):
        if any(is_cached(str(folder)) for folder in folders):
            continue
        if key == "model.name":
            revision = (spec.model.revision if spec.model else None) or "main"
            _ask_hub(f"/{name}/resolve/{revision}/config.json", key, name)
        else:
            revision = next((p.revision for p in parts_of(spec.data) if p.source == name), None) if spec.data else None
            _ask_hub(f"/api/datasets/{name}/revision/{revision or 'main'}", key, name)


def _ask_hub(path: str, key: str, name: str) -> None:
    base = os.environ.get("HF_ENDPOINT") or HUB
    cure = "use a local folder or file, or fill the cache on a machine with network (HF_HOME)"
    if variable := offline_variable(os.environ):
        raise EnvironmentNotAble(
            f"{key} {name}: is not in this machine's cache, and {variable} disables access to the hub; {cure}"
        )
    if urlsplit(base).scheme not in ("http", "https"):
        raise EnvironmentNotAble(f"HF_ENDPOINT is {base}; it must be an http or https address")
    from urllib import error, request

    token = _token()
    headers = {"User-Agent": f"allranks/{__version__}", **({"Authorization": f"Bearer {token}"} if token else {})}
    question = request.Request(base.rstrip("/") + quote(path), headers=headers, method="HEAD")  # noqa: S310
    try:
        with request.urlopen(question, timeout=TIMEOUT_S):  # noqa: S310
            return
    except error.HTTPError as answer:
        if answer.code in (401, 403, 404):
            known = answer.code == 404
            what = "repository or revision" if known else f"public repository (HTTP {answer.code})"
            cure = "check the name" + ("" if known else ", and set HF_TOKEN if it is private or gated")
            missing = f"is not a local path, and the hub ({base}) has no such {what}"
            raise SpecError(f"{key} {name}: {missing}; {cure}") from None
    except (OSError, ValueError) as problem:
        why = getattr(problem, "reason", problem)
        raise EnvironmentNotAble(
            f"{key} {name}: is neither a local path nor in this machine's cache, and the hub ({base}) is not "
            f"reachable: {why}; {cure}"
        ) from None


def _token() -> str:
    """Return the user's token as the hub's client finds it; empty if there is none."""
    if token := os.environ.get("HF_TOKEN"):
        return token.strip()
    try:
        return read_text(Path(os.environ.get("HF_TOKEN_PATH") or hf_home() / "token"), 4096).strip()
    except (OSError, ValueError):
        return ""


def check_paths(spec: RunSpec) -> None:
    """Refuse a program, an environment or a working directory that is missing here, unless only the nodes may see its
    folder.

    Raises:
        SpecError: names key and path.
    """
    launcher, python, chdir = spec.cluster.launched_by, spec.cluster.python, spec.cluster.slurm.chdir
    for path, problem in missing_program_paths(spec.script) if spec.script is not None else ():
        if _counts(path, spec):
            raise SpecError(problem)
    needed = needed_file(python) if not launcher.runs_here and python is not None else None
    image = python is not None and is_container(python)
    if needed is not None and not needed.is_file() and _counts(needed if image else needed.parent.parent, spec):
        raise SpecError(
            f"cluster.python {python}: there is no {needed}; name a virtual environment's folder, an interpreter, "
            "conda:NAME, or a container's image"
        )
    if launcher.uses_slurm and chdir is not None and not Path(chdir).is_dir() and _counts(Path(chdir), spec):
        raise SpecError(
            f"cluster.slurm.chdir {chdir}: there is no such folder; Slurm would start the job in /tmp instead"
        )


def _counts(missing: Path, spec: RunSpec) -> bool:
    """Return whether a path that is missing here is missing on the nodes, too, as far as this machine can tell.

    A relative path starts from the current folder, which the nodes share. An absolute one may be in a folder that only
    they see, such as a folder for temporary files.
    """
    from allranks.nodes.staging.broadcast import is_node_local  # loads much, and most runs have nothing that is missing

    return not missing.is_absolute() or (missing.parent.is_dir() and not is_node_local(missing, Path(spec.run_root)))
