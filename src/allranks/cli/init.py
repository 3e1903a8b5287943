"""``allranks init``: write a first spec from a few answers or options. It is checked as `plan` does before it is
written."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.options import (
    any_path,
    check_new_file,
    complete_values,
    echo,
    json_option,
    print_json,
    write_new_file,
)
from allranks.errors import EXIT_OK, AllranksError, DataError, EnvironmentNotAble, RequestError
from allranks.spec.launchers import BUILT_IN, DEFAULT_LAUNCHER, LAUNCHERS, LauncherInfo, launchers_with

if TYPE_CHECKING:
    from allranks.spec.examples import StarterChoices
    from allranks.spec.foreign_configs import Conversion

MACHINES = {info.machine: name for name, info in (*LAUNCHERS.items(), *BUILT_IN.items())}
"""The values of ``--machine``, each with its launcher; of two with the same value, the built-in one."""
NEEDED = ("model", "data", "machine")
OPTIONS_OF_SOME = {"uses_slurm": ("nodes", "partition", "gpus_per_node", "time", "account"), "uses_hosts": ("hosts",)}
"""Options that only launchers with this property have."""
_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


@dataclass
class Answers:
    """Options, completed by answers. None: not given."""

    values: dict[str, Any]
    ask: bool
    quiet: bool = False

    def tell(self, text: str) -> None:
        if not self.quiet:
            echo(text, err=True)

    def take(
        self,
        key: str,
        question: str,
        default: Any,
        *,
        kind: Any = None,
        check: Callable[[Any], object] = lambda value: None,
    ) -> Any:
        """Return the option, else the answer, else the default; a question is repeated until `check` accepts it."""
        while self.ask and self.values.get(key) is None:
            answer = self._answer(question, default, kind)
            try:
                check(answer)
            except AllranksError as error:
                echo(f"{error}\n", err=True)
                continue
            self.values[key] = answer
            return answer
        value = default if self.values.get(key) is None else self.values[key]
        check(value)
        return value

    def _answer(self, question: str, default: Any, kind: Any) -> Any:
        shown = default if default is not None else ""
        try:
            answer = click.prompt(question, default=shown, type=kind, err=True, show_default=shown != "")
        except click.Abort:  # Ctrl-C or Ctrl-D, behind the question
            echo(err=True)
            raise
        answer = answer.strip() if isinstance(answer, str) else answer
        return None if answer == "" else answer


@click.command("init")
@click.option(
    "--model",
    shell_complete=complete_values("model.name"),
    help="Hub name, folder, or a tiny model such as tiny:llama.",
)
@click.option(
    "--data",
    shell_complete=complete_values("data.source", or_files=True),
    help="Hub name, file, or built-in set such as builtin:instructions.",
)
@click.option(
    "--columns", metavar="ROLE=COLUMN,...", help="Columns with other names, such as prompt=question,response=answer."
)
@click.option(
    "--template", metavar="NAME|FILE", help="Template of the rows, or a Jinja file (default: chosen by the columns)."
)
@click.option(
    "--machine", type=click.Choice([*MACHINES]), help="Where to run: this machine, Slurm, or hosts started manually."
)
@click.option("--strategy", shell_complete=complete_values("strategy.name"), help="Strategy (default: pytorch_ddp).")
@click.option("--name", help="Name of the runs (default: from model and data).")
@click.option(
    "--procs-per-node", type=click.IntRange(1), help="Ranks per node (default: one per GPU, two without GPUs)."
)
@click.option("--nodes", type=click.IntRange(1), help="Slurm: number of nodes (default: 1).")
@click.option("--partition", help="Slurm: partition (default: the cluster's).")
@click.option("--gpus-per-node", type=click.IntRange(0), help="Slurm: GPUs of each node (default: none).")
@click.option("--time", help="Slurm: time limit, such as 01:00:00.")
@click.option("--account", help="Slurm: account.")
@click.option("--hosts", help="Names or addresses of the hosts, separated by commas.")
@click.option(
    "--from",
    "from_file",
    type=any_path,
    metavar="FILE",
    help="Convert a configuration of accelerate, DeepSpeed, axolotl or TRL; other options take precedence.",
)
@click.option(
    "--output",
    "-o",
    type=any_path,
    default="spec.yaml",
    show_default=True,
    metavar="FILE",
    help="File to write; - prints it.",
)
@click.option(
    "--yes", "-y", is_flag=True, help="Ask no questions: write a test run on this machine, unless options are given."
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@json_option
def init_command(output: Path, yes: bool, force: bool, as_json: bool, from_file: Path | None, **options: Any) -> int:
    """Write a minimal spec with comments, which `plan` accepts and `run` runs.

    Asks for model, data and machine if standard input is a terminal; with --model, --data and --machine, or with --yes,
    it asks no questions. --from FILE never asks: what FILE does not say is left at its default.
    """
    to_stdout = str(output) == "-"
    if not to_stdout:
        check_new_file(output, force=force)
    if from_file is not None:
        return _convert(from_file, output, force, as_json, {k: v for k, v in options.items() if v is not None})
    ask = _may_ask(options, yes)
    file = "spec.yaml" if to_stdout else str(output)
    answers = Answers(options, ask, quiet=as_json and not ask)
    choices = _choices(answers)
    try:
        text, notes = _checked_text(choices, file)
    except DataError as error:
        if "no template fits" in str(error):
            answers.tell("init takes them as --columns ROLE=COLUMN,..., or --template FILE")
        raise
    for note in notes:
        answers.tell(f"note: {note}")
    if not to_stdout:
        write_new_file(output, text, force=force)
    if as_json:
        print_json(
            {
                "file": None if to_stdout else str(output),
                "model": choices.model,
                "data": choices.data,
                "data_found": describe_data(choices.data),
                "launcher": choices.launcher,
                "strategy": choices.strategy,
                "text": text,
            }
        )
    elif to_stdout:
        echo(text.rstrip("\n"))
    else:
        file = shlex.quote(str(output))
        echo(f"wrote {output}; next: allranks plan {file}, then: allranks run {file}", message=True)
    return EXIT_OK


FROM_OPTIONS = {
    "model": "model.name", "data": "data.source", "template": "data.template", "machine": "cluster.launcher",
    "strategy": "strategy.name", "name": "name", "nodes": "cluster.nodes", "procs_per_node": "cluster.procs_per_node",
    "hosts": "cluster.hosts",
    **{key: f"cluster.slurm.{key}" for key in ("partition", "gpus_per_node", "time", "account")},
}  # fmt: skip
"""The key that each option sets beside ``--from``."""


def _convert(source: Path, output: Path, force: bool, as_json: bool, options: dict[str, Any]) -> int:
    """Write the spec that a configuration of another tool describes."""
    from allranks.spec.foreign_configs import read_foreign, spec_text

    conversion = read_foreign(source)
    if wrong := [option for option in options if option not in FROM_OPTIONS]:
        raise RequestError(f"--{wrong[0]} cannot be combined with --from; edit the spec that it writes")
    if "machine" in options:
        options["machine"] = MACHINES[options["machine"]]
    if "hosts" in options:
        options["hosts"] = [*_hosts(options["hosts"])]
        options.setdefault("nodes", len(options["hosts"]))
    for option in options:
        conversion = conversion.without(FROM_OPTIONS[option], f"--{option.replace('_', '-')} was given")
    conversion = _planned(conversion.with_values({FROM_OPTIONS[option]: value for option, value in options.items()}))
    to_stdout = str(output) == "-"
    text = spec_text(conversion, "spec.yaml" if to_stdout else str(output))
    if not to_stdout:
        write_new_file(output, text, force=force)
    left = [str(line) for line in sorted(conversion.left, key=lambda line: line.number)]
    if as_json:
        file = None if to_stdout else str(output)
        print_json({"file": file, "from": str(source), "kind": conversion.kind, "not_taken_over": left, "text": text})
    elif to_stdout:
        echo(text.rstrip("\n"))
    else:
        n = sum(1 for lines in conversion.origins.values() for _ in lines)
        echo(f"wrote {output} from {source} ({conversion.kind}): {n} lines taken over, {len(left)} not", message=True)
        for line in left:
            echo(f"  not taken over: {line}", err=True)
        name = shlex.quote(str(output))
        echo(f"next: allranks plan {name}, then: allranks run {name}", message=True)
    return EXIT_OK


def _planned(conversion: Conversion) -> Conversion:
    """Return a conversion that `plan` accepts, without the values that this machine refuses.

    Raises:
        AllranksError: it is refused for another reason.
    """
    from allranks.launch import preview

    while True:
        try:
            _ = preview.prepare(conversion.spec()).plan
        except AllranksError as error:
            text = " ".join(str(error).removeprefix("spec: ").split())
            named = sorted((text.index(key), -len(key), key) for key in conversion.origins if key in text)
            if not named:
                raise
            conversion = conversion.without(named[0][2], text)  # the key that the message begins with
        else:
            return conversion


def _may_ask(options: dict[str, Any], yes: bool) -> bool:
    """Return whether to ask questions.

    Raises:
        RequestError: an option is missing, and standard input is not a terminal.
    """
    missing = [f"--{key}" for key in NEEDED if options.get(key) is None]
    if yes or not missing:
        return False
    if not sys.stdin.isatty():
        raise RequestError(
            f"standard input is not a terminal, so no questions can be asked: give {', '.join(missing)}, or --yes for "
            "a test run on this machine"
        )
    return True


def _choices(answers: Answers) -> StarterChoices:
    from allranks.spec.examples import StarterChoices, default_data
    from allranks.spec.strategies import strategy_info

    model = answers.take("model", "Model: hub name, folder, or tiny:llama for a test", "tiny:llama", check=_check_model)
    source = default_data(model)
    data = answers.take("data", "Data: hub name, file, or a built-in set for a test", source, check=describe_data)
    answers.tell(f"data: {data}: {describe_data(data)}")
    columns = data_columns(answers, model, data)
    likely = launchers_with(uses_slurm=True)[0] if answers.ask and shutil.which("sinfo") else DEFAULT_LAUNCHER
    machine = answers.take("machine", "Machine", LAUNCHERS[likely].machine, kind=click.Choice([*MACHINES]))
    strategy = answers.take("strategy", "Strategy", "pytorch_ddp", check=strategy_info)
    chosen = StarterChoices(
        model=model,
        data=data,
        launcher=MACHINES[machine],
        strategy=strategy,
        procs_per_node=answers.values.get("procs_per_node"),
        name=answers.values.get("name"),
        columns=columns,
        template=answers.values.get("template"),
    )
    launcher = LAUNCHERS[chosen.launcher]
    _refuse_others(answers, launcher)
    if launcher.uses_slurm:
        return _slurm(chosen, answers)
    if launcher.uses_hosts:
        question = "Hosts, separated by commas; the first one hosts the rendezvous"
        hosts = _hosts(answers.take("hosts", question, None, check=_hosts))
        return replace(chosen, hosts=hosts, nodes=len(hosts))
    return chosen


def _check_model(name: str) -> None:
    from allranks.launch import preview
    from allranks.spec.examples import default_data
    from allranks.spec.loader import parse_spec

    preview.plan(parse_spec({"model": {"name": name}, "data": {"source": default_data(name)}}))


def _hosts(text: str | None) -> tuple[str, ...]:
    hosts = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    if not hosts:
        raise RequestError("--hosts is missing: names or addresses of the hosts, separated by commas")
    return hosts


def _refuse_others(answers: Answers, launcher: LauncherInfo) -> None:
    """Refuse options that this launcher does not have."""
    for needed, keys in OPTIONS_OF_SOME.items():
        given = [f"--{key.replace('_', '-')}" for key in keys if answers.values.get(key) is not None]
        if given and not getattr(launcher, needed):
            other = next(info.machine for info in LAUNCHERS.values() if getattr(info, needed))
            raise RequestError(
                f"{', '.join(given)}: only with --machine {other}, and the machine is {launcher.machine}"
            )


def _slurm(chosen: StarterChoices, answers: Answers) -> StarterChoices:
    def check_time(time: str | None) -> None:
        if time is not None and not _TIME.fullmatch(time):
            raise RequestError(
                f"--time {time}: expected a time limit of Slurm, such as 30 (minutes), 01:00:00 or 1-00:00:00"
            )

    return replace(
        chosen,
        partition=answers.take("partition", "Partition (empty: the cluster's default)", None),
        gpus_per_node=answers.take("gpus_per_node", "GPUs per node (0: none)", 0, kind=click.IntRange(0)) or None,
        time=answers.take("time", "Time limit, such as 01:00:00 (empty: the partition's)", None, check=check_time),
        nodes=answers.take("nodes", "Nodes", 1, kind=click.IntRange(1)),
        account=answers.values.get("account"),
    )


def _checked_text(choices: StarterChoices, file: str) -> tuple[str, list[str]]:
    """Return the text of a spec that `plan` and `data` accept, and notes on its rows; rows that are too few to be
    packed are not packed.

    Raises:
        AllranksError: it would be refused.
    """
    from allranks.launch import preview
    from allranks.spec.data_sources import looks_like_file
    from allranks.spec.examples import starter_text
    from allranks.spec.loader import parse_spec, parse_yaml

    text = starter_text(choices, file)
    spec = parse_spec(parse_yaml(text, file), where=file)
    run = preview.prepare(spec)
    _ = run.plan  # also refuse what cannot be planned
    if not looks_like_file(choices.data):
        return text, []
    try:
        facts = preview.inspect_data(run, rows=0)["facts"]
    except EnvironmentNotAble as error:
        return text, [f"the rows are not checked: {error}"]
    problem = preview.few_sequences(run, facts)
    if problem is None:
        return text, facts["warnings"]
    if choices.packing is None and "data.packing: none" in problem:
        return _checked_text(replace(choices, packing="none"), file)
    raise RequestError(problem)


def describe_data(source: str) -> str:
    """Return what a source is: a built-in set, a file with its columns, or a name of the hub.

    Raises:
        DataError: it is a file that cannot be used.
    """
    from allranks.spec import data_sources
    from allranks.spec.data_columns import listed, merged_row
    from allranks.spec.models import NOISE_SOURCE
    from allranks.utils.text import format_bytes

    if source == NOISE_SOURCE:
        return "random numbers for mlp: models"
    if source.startswith("builtin:"):
        own = data_sources.builtin_set(source)
        return f"built-in set, {own.default_rows:,} rows, template {own.template}"
    if not data_sources.looks_like_file(source):
        return "no file of this name here, so a data set of the Hugging Face hub; it is loaded when the run starts"
    files = data_sources.data_files(source)
    row = merged_row(data_sources.read_first_rows(source))
    columns = f", columns {listed(list(row))}" if row else ""
    kind, size = files[0].suffix.lower().removeprefix("."), format_bytes(sum(file.stat().st_size for file in files))
    return f"{kind} file of {size}{columns}" if len(files) == 1 else f"{len(files)} {kind} files of {size}{columns}"


def data_columns(answers: Answers, model: str, source: str) -> tuple[tuple[str, str], ...]:
    """Return the roles of columns: those of the option, or of the answer where no template fits the file.

    Both can also be the name of a Jinja file, which becomes the option ``template``.

    Raises:
        RequestError: the option is neither of both.
    """
    from allranks.spec import data_sources

    given = answers.values.get("columns")
    if given is not None or not answers.ask or answers.values.get("template"):
        return _accept(answers, given)
    rows = data_sources.read_first_rows(source) if data_sources.looks_like_file(source) else []
    if not rows:
        return ()
    from allranks.planning.model_checks import trains_classifier
    from allranks.spec.data_columns import NoTemplateFits, fitting_template
    from allranks.spec.loader import parse_spec
    from allranks.spec.records import DataSpec

    spec = parse_spec({"model": {"name": model}, "data": {"source": "builtin:instructions"}})
    classifier = trains_classifier(spec) is True  # False if that is not known here

    def check(text: str | None) -> None:
        if not _is_jinja(text or ""):
            fitting_template(DataSpec(source=source), dict(parse_columns(text or "")), rows, classifier=classifier)

    try:
        fitting_template(DataSpec(source=source), {}, rows, classifier=classifier)
    except NoTemplateFits as error:
        answers.tell(f"{error}\n")
        question = "Roles of the columns (ROLE=COLUMN, ...; or a .jinja file)"
        return _accept(answers, answers.take("columns", question, None, check=check))
    except DataError:  # `plan` says it
        pass
    return ()


def _is_jinja(text: str) -> bool:
    return Path(text).suffix in (".jinja", ".jinja2", ".j2") and "=" not in text


def _accept(answers: Answers, text: str | None) -> tuple[tuple[str, str], ...]:
    """Return the roles of an answer, or take it as the name of a Jinja file."""
    if text is not None and _is_jinja(text):
        answers.values.update(columns=None, template=text)
        return ()
    return parse_columns(text) if text is not None else ()


def parse_columns(text: str) -> tuple[tuple[str, str], ...]:
    """Return roles and columns of ``prompt=question, response=answer``; the YAML form ``{prompt: question}`` is taken,
    too.

    Raises:
        RequestError: it has another form, or names a role twice.
    """
    inner = re.sub(r"^\s*(columns:)?\s*\{|\}\s*$", "", text)
    pairs = []
    for part in inner.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*[=:]\s*(\S(?:.*\S)?)\s*", part)
        if match is None:
            raise RequestError(
                f"--columns {text}: expected ROLE=COLUMN, ..., such as prompt=question,response=answer; columns whose "
                "names have a comma are written in the spec"
            )
        pairs.append((match[1], match[2].strip("\"'") if match[2][0] in "\"'" else match[2]))
    roles = [role for role, _ in pairs]
    if twice := next((role for role in roles if roles.count(role) > 1), None):
        raise RequestError(f"--columns {text}: {twice} occurs twice; several columns of a role are written in the spec")
    return tuple(pairs)
