"""What pages share: templates that escape, plotly.js inside the page, and a policy that lets it load nothing."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from allranks.utils.redaction import redact, redact_forms
from allranks.utils.text import printable
from allranks.version import __version__

PLOTLY_SLOT = "<!-- plotly.js -->"  # cannot come from a run: every text of it is escaped
_PACKAGES = ("allranks.analysis.report", "allranks.analysis.trace")


def plotly_source() -> str | None:
    """plotly.js, or None where the `report` extra is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    return get_plotlyjs()


def content_security_policy(scripts: list[str]) -> str:
    """The page's own content policy: it loads nothing, and runs no script but ours, known by their hashes."""
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts if s]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


@cache
def read_asset(name: str) -> str:
    """A file of a `templates` folder."""
    found = [resources.files(package) / "templates" / name for package in _PACKAGES]
    return next((f for f in found if f.is_file()), found[0]).read_text(encoding="utf-8")


def html_environment() -> jinja2.Environment:
    """For templates that escape every text, and fail where a value is missing."""
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(read_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_sanitize_value,
    )


def _sanitize_value(value: Any) -> Any:
    """Every text on a page: without secrets and control characters. Markup is our own."""
    return redact(printable(value)) if type(value) is str else value


@cache
def load_template(name: str) -> jinja2.Template:
    """A template of a `templates` folder."""
    return html_environment().get_template(name)


def render_page(name: str, context: dict[str, Any], figures: str, plotly: str | None) -> str:
    """A page with charts. ``figures``: what `charts.figures_json` made; ``plotly``: plotly.js, which comes in last, whole."""
    script = read_asset("report.js")
    frame = {
        "version": __version__,
        "css": Markup(read_asset("report.css")),  # noqa: S704 - our own file
        "script": Markup(script),  # noqa: S704 - our own file
        "figures": Markup(figures),  # noqa: S704 - figures_json made it safe
        "plotly_slot": Markup(PLOTLY_SLOT),  # noqa: S704 - our own mark
        "policy": content_security_policy([script, plotly or ""]),
    }
    html = redact_forms(
        load_template(name).render(context | frame)
    )  # each text was cleaned when it was read; a second lock
    return html.replace(PLOTLY_SLOT, f"<script>{plotly}</script>" if plotly else "", 1)
