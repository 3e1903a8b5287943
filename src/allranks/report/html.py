"""What pages share: templates that escape, plotly.js inside the page, and a policy that lets it load nothing."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from allranks import __version__
from allranks.redact import redact

PLOTLY_SLOT = "<!-- plotly.js -->"  # cannot come from a run: every text of it is escaped
_PACKAGES = ("allranks.report", "allranks.trace")


def plotly_source() -> str | None:
    """plotly.js, or None where the `report` extra is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    return get_plotlyjs()


def policy(scripts: list[str]) -> str:
    """The page's own content policy: it loads nothing, and runs no script but ours, known by their hashes."""
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts if s]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


@cache
def asset(name: str) -> str:
    """A file of a `templates` folder."""
    found = [resources.files(package) / "templates" / name for package in _PACKAGES]
    return next((f for f in found if f.is_file()), found[0]).read_text(encoding="utf-8")


def escaping() -> jinja2.Environment:
    """For templates that escape every text, and fail where a value is missing."""
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def template(name: str) -> jinja2.Template:
    """A template of a `templates` folder."""
    return escaping().get_template(name)


def rendered(name: str, context: dict[str, Any], figures: str, plotly: str | None) -> str:
    """A page with charts. ``figures``: what `charts.figures_json` made; ``plotly``: plotly.js, which comes in last, whole."""
    script = asset("report.js")
    frame = {
        "version": __version__,
        "css": Markup(asset("report.css")),  # noqa: S704 - our own file
        "script": Markup(script),  # noqa: S704 - our own file
        "figures": Markup(figures),  # noqa: S704 - figures_json made it safe
        "plotly_slot": Markup(PLOTLY_SLOT),  # noqa: S704 - our own mark
        "policy": policy([script, plotly or ""]),
    }
    html = redact(template(name).render(context | frame))  # each text was cleaned when it was read; a second lock
    return html.replace(PLOTLY_SLOT, f"<script>{plotly}</script>" if plotly else "", 1)
