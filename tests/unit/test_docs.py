"""Documentation that can be checked is checked."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys

import pytest

from allranks.cli.main import VERBS
from tests.conftest import REPO


def test_spec_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_spec_docs", REPO / "scripts" / "make_spec_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (REPO / "docs" / "spec.md").read_text() == module.text(), "run python scripts/make_spec_docs.py"


@pytest.mark.parametrize("page", [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_names_every_folder_and_verb() -> None:
    readme = (REPO / "README.md").read_text()
    for folder in (REPO / "src" / "allranks").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"{folder.name}/" in readme, folder.name
    for verb in VERBS:
        assert f"`{verb}" in readme, verb


@pytest.mark.parametrize(
    "verb",
    [["--help"], ["--version"], *([v, "--help"] for v in VERBS), ["schema"], ["plan", "examples/demo.yaml"], ["runs"]],
    ids=" ".join,
)
def test_light_verbs_never_import_torch(verb: list[str]) -> None:
    code = (
        "import sys\nsys.argv = ['allranks', *sys.argv[1:]]\nfrom allranks.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'pandas', 'pyarrow', 'plotly'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *verb], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_only_train_imports_torch() -> None:
    """At the top of a module, where it would burden whoever imports it."""
    for path in (REPO / "src" / "allranks").rglob("*.py"):
        place = path.relative_to(REPO / "src" / "allranks")
        if "train" in place.parts or place.as_posix() == "observe/profiler.py":  # only profiled ranks load it
            continue
        for node in ast.parse(path.read_text()).body:
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not any(n.split(".")[0] in ("torch", "transformers", "peft", "numpy") for n in names), path


def test_every_strategy_has_its_page_and_picture_and_stands_in_the_ladder() -> None:
    from allranks.train.strategies import REGISTRY

    folder = REPO / "docs" / "strategies"
    ladder = (folder / "README.md").read_text()
    for name in REGISTRY:
        assert f"]({name}.md)" in ladder, name
        assert f"img/{name}.svg" in (folder / f"{name}.md").read_text()
        assert (folder / "img" / f"{name}.svg").read_text().startswith("<svg")


def test_a_python_shell_completes_what_is_loaded_when_used() -> None:
    import allranks

    assert set(allranks.__all__) <= set(dir(allranks))
