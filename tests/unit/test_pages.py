"""Every kind of page in a real browser: its controls work, it says nothing to the console, and it is accessible."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allranks.analysis.report.page import write_report
from allranks.analysis.trace.page import summary_html
from allranks.experiments import compare
from allranks.lab.smoke.report import html_page
from allranks.nodes.topology.drawings import draw_svg
from allranks.nodes.topology.nvidia_smi import parse_topology
from allranks.rundir.paths import RunDir
from tests import sampling
from tests.browser import CHROMIUM, Browser
from tests.unit import test_compare, test_smoke_criteria, test_trace_output, topo_texts
from tests.unit.report_runs import Maker, answers, complete_run, failed_run, served
from tests.unit.test_run_status import verb

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")
AXE = Path(sys.prefix, "node_modules", "axe-core", "axe.min.js")
MAX_PAGE_BYTES = 1_500_000


def _text(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _large_run(tmp_path: Path) -> Path:
    """Eight ranks, four GPUs on each of two hosts, 4,000 steps, two attempts: the most that is drawn without areas."""
    make = Maker(tmp_path, "large", ranks=8, hosts=("a", "b"))
    make.begin(total=4000)
    make.evaluate(0, loss=300.0, exact=0.0, samples=answers(2))
    make.steps(1, 2500)
    make.begin(attempt=2, resumed_from=2000, total=4000)
    make.steps(2001, 4000)
    make.evaluate(4000, loss=2.1, exact=0.5, samples=answers(3))
    make.telemetry(gpus=4)
    return write_report(make.write(plan={"device": "cuda"}))


def _compared_runs(tmp_path: Path) -> Path:
    runs = [str(complete_run(tmp_path, f"run{i}", 40, seed=i).root) for i in range(10 if sampling.ALL else 4)]
    assert verb("compare-runs", *runs, "--out", str(tmp_path / "runs.html"))[0] == 0
    return tmp_path / "runs.html"


def _comparison(tmp_path: Path) -> Path:
    run = RunDir(tmp_path / "comparison")
    run.root.mkdir()
    compare.write_comparison(run, test_compare.three_repeats())
    return run.root / "comparison.html"


PAGES: dict[str, Callable[[Path], Path]] = {
    "report": lambda p: write_report(complete_run(p, steps=120)),
    "report of a failure": lambda p: write_report(failed_run(p)),
    "report of a large run": _large_run,
    "compared runs, sweep": _compared_runs,
    "comparison of strategies": _comparison,
    "trace": lambda p: _text(p / "trace.html", summary_html(test_trace_output.report(p / "traces"))),
    "smoke tests": lambda p: _text(
        p / "smoke.html", html_page(test_smoke_criteria.ladder(test_smoke_criteria.result()))
    ),
    "topology": lambda p: _text(p / "topology.svg", draw_svg(parse_topology(topo_texts.SEED_L4))),
}
"""A sweep has the page of compared runs; `watch --web` serves the report, which `test_watch` asks for over HTTP."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = PAGES[request.param](tmp_path_factory.mktemp("page"))
    assert path.stat().st_size < MAX_PAGE_BYTES
    return path.as_uri()


SHOWN = "document.querySelectorAll('.scatterlayer .trace, .barlayer .trace').length"
CLICK_ALL = "document.querySelectorAll('button, summary, nav a').forEach((e) => e.click())"
FITS = "document.documentElement.scrollWidth <= innerWidth"
UNTITLED = """[...document.querySelectorAll('.plot')].filter((p) =>
  Object.keys(p.layout).filter((k) => k.startsWith('yaxis')).length !==
  [...p.querySelectorAll('.annotation')].filter((a) => a.textContent).length).map((p) => p.id)"""


def show(browser: Browser, page: str, width: int) -> None:
    """Open and draw a page, unless the test before has left it so."""
    if browser.shown != (page, width):
        browser.open(page, width, dark=width < 1000)
        browser.draw()


@pytest.mark.parametrize("width", [1400, 420])
def test_a_page_works(browser: Browser, page: str, width: int) -> None:
    show(browser, page, width)
    assert browser.run(UNTITLED) == [], "a y axis without title"
    before = browser.run(SHOWN)
    browser.run(CLICK_ALL)
    assert before == 0 or browser.run(SHOWN) < before
    browser.run(CLICK_ALL)
    browser.until(f"{SHOWN} === {before}")
    assert browser.run(FITS) and browser.problems == []


@pytest.mark.skipif(not AXE.exists(), reason=f"needs axe-core: npm install --prefix {sys.prefix} axe-core")
@pytest.mark.parametrize("width", [1400, 420])
def test_a_page_is_accessible(browser: Browser, page: str, width: int) -> None:
    show(browser, page, width)
    assert browser.run(FITS) and browser.problems == []
    browser.run(AXE.read_text() + ";0")
    found = browser.run("axe.run().then((r) => r.violations.map((v) => [v.impact, v.id, v.nodes[0].html]))")
    assert [v for v in found if v[0] in ("serious", "critical")] == []


CUT = """[...document.querySelectorAll('main *, .plot svg')].filter((e) => e.checkVisibility() && (
  e.getBoundingClientRect().right > innerWidth + 1 || (e.matches('.table, pre') && e.scrollWidth > e.clientWidth + 1)))
  .map((e) => e.outerHTML.slice(0, 90))"""
GLUED = """(() => { const all = [...document.querySelectorAll('main .panel:not(.card), main .cards, main h2')];
  const rects = all.map((e) => e.getBoundingClientRect());
  const glued = (e, i) => rects[i + 1].top < rects[i].bottom + 8;
  return all.slice(1).filter(glued).map((e) => e.outerHTML.slice(0, 90)); })()"""


def test_a_page_is_printed_whole(browser: Browser, page: str) -> None:
    """On A4, after it was drawn in a wide window."""
    browser.open(page)
    browser.draw()
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.call("Emulation.setDeviceMetricsOverride", width=718, height=1000, deviceScaleFactor=1, mobile=False)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(CUT) == [] and browser.run(GLUED) == []
    assert not browser.run("[...document.querySelectorAll('nav, .log')].some((e) => e.checkVisibility())")


def test_a_page_that_loads_itself_again_remembers_what_was_hidden(browser: Browser, tmp_path: Path) -> None:
    with served(complete_run(tmp_path)) as address:
        browser.open(address)
        browser.draw()
        browser.run("document.querySelector('.keys button').click()")
        browser.reload()
        browser.until("document.querySelectorAll('[aria-pressed=false]').length === 2")
    assert browser.problems == []
