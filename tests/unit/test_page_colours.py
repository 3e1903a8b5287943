"""All pages take their colours from one module, and a thing has the same colour on each."""

from __future__ import annotations

import re
from pathlib import Path

import allranks
from allranks.analysis.report.figures import ACTIVITY_COLOURS, PHASE_COLOURS, STATE_COLOURS, css_value, stylesheet

SOURCE = Path(allranks.__file__).parent
OWN = SOURCE / "analysis" / "report" / "figures.py"
TOPOLOGY = SOURCE / "nodes" / "topology" / "drawings.py"  # an SVG file, not a page; its colours are of links
PAGES = sorted(p for p in SOURCE.rglob("templates/*") if p.suffix in (".j2", ".css", ".js") and "sbatch" not in p.name)
VALUE = re.compile(r"(?<![\w&\"'/])#[0-9a-fA-F]{3,8}\b|rgba?\([0-9]")
QUOTED = re.compile(r"""["']#[0-9a-fA-F]{3,8}["'/]""")


def test_only_one_module_holds_values_of_colours() -> None:
    pages = [p for p in PAGES if "<html" in p.read_text() or p.suffix == ".css"]
    assert len(pages) == 2, pages
    assert [(p.name, found) for p in pages if (found := VALUE.findall(p.read_text()))] == []
    modules = [p for p in SOURCE.rglob("*.py") if p not in (OWN, TOPOLOGY)]
    assert [(p.name, found) for p in modules if (found := QUOTED.findall(p.read_text()))] == []
    assert len(QUOTED.findall(OWN.read_text())) > 40 < len(VALUE.findall(stylesheet())), "the patterns find colours"


def test_every_page_defines_the_colours_that_it_uses() -> None:
    defined = {"--columns", *re.findall(r"(--[a-z0-9-]+):", stylesheet())}  # the number of columns is no colour
    for template in PAGES:
        text = template.read_text()
        assert set(re.findall(r"var\((--[a-z0-9-]+)\)", text)) <= defined, template
        if "<html" in text:
            assert "<style>" in text and "{{ colours }}" in text, template
    names = {*ACTIVITY_COLOURS.values(), *PHASE_COLOURS.values(), *STATE_COLOURS.values()}
    assert {name.split("/")[0] for name in names} <= defined


def test_light_and_dark_define_the_same_colours() -> None:
    light, dark = stylesheet().split("@media")
    names = re.compile(r"(--[a-z0-9-]+):")
    assert names.findall(light) == names.findall(dark)


def test_a_colour_with_an_opacity_is_mixed() -> None:
    assert css_value("--c6/0.5") == "color-mix(in srgb, var(--c6) 50%, transparent)"
