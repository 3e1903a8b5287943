"""Documentation that can be checked is checked."""

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path, PurePosixPath

import click
import pytest
from scripts import count_paths

import allranks
from allranks.cli.main import VERBS, cli
from allranks.errors import AllranksError
from allranks.launch import preview
from allranks.spec.loader import parse_spec, parse_yaml
from allranks.spec.strategies import REGISTRY
from allranks.train import strategies
from tests.conftest import REPO
from tests.unit.topo_texts import BARE


def test_generated_parts_of_pages_are_up_to_date() -> None:
    command = [sys.executable, "scripts/make_pages.py", "--check"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page", [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or path.suffix != ".md" or anchor in _anchors(path), f"{page.name}: {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page: of its headings, as GitHub makes them, and those that are written."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", h)).lower().replace(" ", "-") for h in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


# Names of trace annotations, of the schema that a user writes, and of an ignored folder.
NO_MODULES = re.compile(
    r"allranks\.(data|forward|backward|optimizer|control|module|schema|strategies|launchers)\b(?!\.py)"
)
NO_FILES = ("benchmarks/work",)
TOP = ("src", "tests", "scripts", "benchmarks", "examples", "docs")


@cache
def known_paths() -> set[str]:
    """Return all files of the repository and all their folders, relative to its root."""
    files = {path.relative_to(REPO).as_posix() for top in TOP for path in (REPO / top).rglob("*") if path.is_file()}
    return files | {folder.as_posix() for name in files for folder in PurePosixPath(name).parents}


def is_module(name: str) -> bool:
    """Return whether a dotted name is a module of the package, or a word in one."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        base = "/".join(["src", *parts[:n]])
        for module in {f"{base}.py", f"{base}/__init__.py"} & known_paths():
            if n == 1:
                return parts[1] in allranks.__all__
            return len(parts) == n or re.search(rf"\b{parts[n]}\b", (REPO / module).read_text()) is not None
    return False


PAGES = [
    *(REPO / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *(page for top in ("docs", "examples", "tests") for page in sorted((REPO / top).rglob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPO).as_posix())
def test_modules_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    modules = re.findall(r"\ballranks(?:\.\w+)+", text)
    for module, names in re.findall(r"from (allranks[\w.]*) import ([\w, ]+)", text):
        modules += [f"{module}.{name.strip()}" for name in names.split(",")]
    assert not [name for name in modules if not NO_MODULES.match(name) and not is_module(name)]
    paths = re.findall(r"(?<![\w/.:-])(?:src|tests|scripts|benchmarks|examples)/[\w./-]*\w", text)
    paths = [path for path in paths if not path.startswith(NO_FILES) and not re.search(r"/[A-Z]+\.py$", path)]
    assert not [path for path in paths if not any(f"/{name}".endswith(f"/{path}") for name in known_paths())]


def test_pages_name_every_folder_and_verb() -> None:
    tree, verbs = (REPO / "docs" / "architecture.md").read_text(), (REPO / "docs" / "verbs.md").read_text()
    for folder in (REPO / "src" / "allranks").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"{folder.name}/" in tree, folder.name
    for verb in VERBS:
        assert f"`{verb}" in verbs, verb


def test_the_map_of_the_source_is_true() -> None:
    counts, wrong = count_paths.problems()
    assert len(counts) > 10
    assert not wrong


LIGHT = [
    ["--version"], *([v, "--help"] for v in VERBS), ["schema"], ["plan", "examples/demo.yaml"], ["runs"], ["examples"],
    ["init", "--yes", "-o", "-"], ["lint", "tests/golden/plain.sbatch", "--level", "error"], ["topo", "-"],
    ["stage", "examples/demo.yaml", "--no-packages", "--json", "--to"],
]  # fmt: skip


def test_light_verbs_never_import_torch(tmp_path: Path) -> None:
    code = (
        "import json, sys\nfrom allranks.cli.main import cli\n"
        "for verb in json.loads(sys.argv[1]):\n"
        "    try:\n        cli.main(verb, standalone_mode=False)\n"
        "    except SystemExit as end:\n        assert not end.code, (verb, end.code)\n"
        "    heavy = {'torch', 'numpy', 'transformers', 'pandas', 'pyarrow', 'plotly'} & set(sys.modules)\n"
        "    assert not heavy, (verb, heavy)\n"
    )
    command = [sys.executable, "-c", code, json.dumps([*LIGHT[:-1], [*LIGHT[-1], str(tmp_path)]])]
    done = subprocess.run(command, cwd=REPO, input=BARE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_plan_loads_and_generates_only_what_it_needs() -> None:
    """Each of these took a visible part of the time of `allranks plan`."""
    code = (
        "import dataclasses, sys\nsys.argv = ['allranks', 'plan', 'examples/demo.yaml']\n"
        "from allranks.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "unused = {'_hashlib', 'secrets', 'subprocess', 'jinja2', 'importlib.metadata',\n"
        "          'click.shell_completion', 'rich._emoji_codes'}\n"
        "assert not unused & set(sys.modules), unused & set(sys.modules)\n"
        "own = [(name, kind) for name, module in sys.modules.items() if name.startswith('allranks')\n"
        "       for kind in vars(module).values()\n"
        "       if isinstance(kind, type) and kind.__module__ == name]\n"
        "made = [kind for _, kind in own if dataclasses.is_dataclass(kind)]\nassert own and not made, made\n"
        "texts = [kind for name, kind in own if name == 'allranks.spec.records'\n"
        "         and any(isinstance(x, str) for x in kind.__annotations__.values())]\n"
        "assert not texts, texts\n"
    )
    env = os.environ | {"PATH": "/nowhere"}  # without nvidia-smi, which is a program of its own
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr


def test_only_train_imports_torch() -> None:
    """At the top of a module, where it would burden whoever imports it."""
    for path in (REPO / "src" / "allranks").rglob("*.py"):
        if "train" in path.relative_to(REPO / "src" / "allranks").parts:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.split(".")[0] in ("torch", "transformers", "peft", "numpy") for n in names), path


def test_no_package_hides_a_function_of_the_public_api() -> None:
    """Importing ``allranks.plan.x`` would set ``allranks.plan`` to the package, for every caller of the process; a
    package of this name must do what the function does."""
    folders = {path.stem for path in (REPO / "src" / "allranks").iterdir()}
    for name in folders & (set(allranks.__all__) - {"__version__"}):
        assert callable(importlib.import_module(f"allranks.{name}")), name


def test_every_yaml_block_is_parsed_and_every_spec_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nanoGPT").mkdir()
    for name in ("train.py", "nanoGPT/train.py"):
        (tmp_path / name).touch()
    for name in ("rows.jsonl", "own.jsonl", "chats.jsonl", "train.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a", "response": "b"}\n' * 40)
    (tmp_path / "ds.json").write_text("{}")
    blocks = [
        (page.name, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE))
        for page in [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
        for indent, text in re.findall(r"^( *)```ya?ml\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) >= 9
    for page, text in blocks:
        raw = parse_yaml(text, page)
        if "script" not in raw:  # a part of a spec; the rest is that of README
            raw = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}, **raw}
        preview.plan(parse_spec(raw, where=page))


def commands(page: Path) -> list[str]:
    """Return the commands ``allranks ...`` of a page's blocks, fenced or indented (prose has backticks)."""
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    fenced = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [*"".join(fenced).splitlines(), *re.findall(r"^ {4,}([^`\n]*)$", text, re.MULTILINE)]
    starts = (re.match(r"\s*(?:\$ )?(?:\S+=\S+ )*(?:srun .*? )?(?:\S*/)?(allranks [a-z-].*)", line) for line in lines)
    return [part for m in starts if m for part in re.findall(r"(?:^|&& *)(allranks .*?)(?= *&& | +# |$)", m[1])]


def refusal(command: str) -> str | None:
    """Return why the real parser refuses a command; a file that does not exist here is no reason."""
    args = [word for word in shlex.split(re.split(r" [|<>;] | 2?>", command)[0])[1:] if word != "..."]
    verb: click.Command = cli
    parent = None
    try:
        while isinstance(verb, click.Group) and args and (below := verb.get_command(click.Context(verb), args[0])):
            parent = click.Context(verb, parent=parent, info_name=verb.name)
            verb, args = below, args[1:]
        verb.make_context(verb.name, args, parent=parent)
        return f"no verb {args[0]}" if isinstance(verb, click.Group) and args and args[0][0] != "-" else None
    except (click.exceptions.Exit, AllranksError):
        return None
    except click.UsageError as error:
        return None if "does not exist" in error.format_message() else error.format_message()
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPO).as_posix())
def test_every_command_of_a_page_is_one_that_allranks_parses(page: Path) -> None:
    assert not {command: why for command in commands(page) if (why := refusal(command))}


IN_PROSE = re.compile("^Missing argument|requires an argument|^Usage: ")
"""Prose may name a verb, or a verb and an option, without what a command line needs as well."""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPO).as_posix())
def test_every_verb_and_option_in_the_prose_of_a_page_exists(page: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).replace(r"\|", "|")
    named = re.findall(r"`(allranks [a-z][^`]*)`", prose)
    assert not {command: why for command in named if (why := refusal(command)) and not IN_PROSE.search(why)}


@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="needs pip install '.[site]'; `make site` does it")
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "(torchrun.html)" in (tmp_path / "llms.txt").read_text()
    assert (tmp_path / "examples" / "glm-tiny-fsdp-lora.yaml").exists()


def test_no_page_or_file_has_a_placeholder_for_its_address() -> None:
    files = [*PAGES, *(REPO / n for n in ("pyproject.toml", "action.yml", "mkdocs.yml", "CITATION.cff", "Dockerfile"))]
    assert not [path.name for path in files if re.search("<owner>|OWNER/|github.com/allranks", path.read_text())]


STRATEGIES = REPO / "docs" / "strategies.md"


@pytest.mark.parametrize("name", REGISTRY)
def test_section_names_the_options_of_the_registry_with_their_defaults(name: str) -> None:
    section = STRATEGIES.read_text().partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
    (line,) = re.findall(r"^\| options \| (.*) \|$", section, re.MULTILINE)
    named = dict(re.findall(r"`(\w+)`(?: \(([^)]*)\))?", line))
    assert named.keys() == REGISTRY[name].options.keys()
    for key, value in named.items():
        if value:
            default = REGISTRY[name].options[key]
            assert value in (str(default).lower(), f"{default:g}" if isinstance(default, float) else ""), key


@pytest.mark.parametrize("name", REGISTRY)
def test_the_table_says_of_overlap_what_the_strategy_claims(name: str) -> None:
    (row,) = re.findall(rf"^\| \[`{name}`\].*$", STRATEGIES.read_text(), re.MULTILINE)
    assert row.split("|")[4].strip() == ("yes" if strategies.create(name, {}).claims_overlap else "no")
