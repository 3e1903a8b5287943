"""Define the colours of all pages and drawings, in light and dark mode, and which thing has which.

Figures name a colour by its CSS variable: ``--c1``, or ``--c1/0.2`` with opacity.
"""

from __future__ import annotations

PALETTE_SIZE = 8
_LIGHT = {
    "page": "#f5f6f8", "card": "#ffffff", "ink": "#17202c", "muted": "#586474", "line": "#e2e6eb", "grid": "#e9ecf0",
    "good": "#187644", "warn": "#9a6100", "bad": "#c0322b", "info": "#2a62c9",
    "good-soft": "#e5f4ec", "warn-soft": "#fdf1dc", "bad-soft": "#fdeceb", "info-soft": "#e7effc",
    "shade": "#58647420", "area": "#58647412", "fade": "#0000002e",
    "c1": "#2f6fdb", "c2": "#d9711a", "c3": "#1f9d83", "c4": "#8b5cc7", "c5": "#b08c00",
    "c6": "#7c8896", "c7": "#d14b76", "c8": "#2f9fc4",
}  # fmt: skip
_DARK = {
    "page": "#0e1319", "card": "#161d26", "ink": "#e7ecf2", "muted": "#98a5b5", "line": "#28323f", "grid": "#232d39",
    "good": "#56c98a", "warn": "#e8b04a", "bad": "#ff8078", "info": "#7fadff",
    "good-soft": "#12301f", "warn-soft": "#33270e", "bad-soft": "#3a1a19", "info-soft": "#16294a",
    "shade": "#98a5b522", "area": "#98a5b510", "fade": "#0000002e",
    "c1": "#6ea2ff", "c2": "#f29b4b", "c3": "#43c4a6", "c4": "#b48af0", "c5": "#dcbc3b",
    "c6": "#8e9aa9", "c7": "#f07fa2", "c8": "#5cc3e6",
}  # fmt: skip
ACTIVITY_COLOURS = {
    "compute": "--c1", "exposed": "--c2", "hidden": "--c3", "copy": "--c4", "idle": "--c6/0.35", "wait": "--c7"
}  # fmt: skip
"""What a rank does, from a trace."""
RUN_COLOURS = {
    "start": "--c6", "prepare": "--c5", "build": "--c4", "prove": "--c8", "train": "--c1", "evaluate": "--c2",
    "save": "--c3", "repeated": "--c5", "detection": "--c7", "restart": "--c4", "other": "--c6/0.5",
}  # fmt: skip
"""What a run does."""
PHASE_COLOURS = {"data": "--c3", "forward": "--c8", "backward": "--c5", "optimizer": "--c7", "other": "--c6/0.5"}
"""Parts of a step. A timeline shows them beside the activities, so that they differ from compute, exposed and copy."""
STATE_COLOURS = {"weights": "--c8", "gradients": "--c5", "optimizer": "--c7"}
"""What a rank holds; each has the colour of the part of the step that makes use of it, or makes it."""


def colour(i: int) -> str:
    """Return the i-th colour of the palette: of a rank, a GPU, a run."""
    return f"--c{i % PALETTE_SIZE + 1}"


def css_value(name: str) -> str:
    """Return a colour as a value in CSS: ``--c1/0.5`` becomes a mix with nothing."""
    variable, _, opacity = name.partition("/")
    return f"color-mix(in srgb, var({variable}) {float(opacity):.0%}, transparent)" if opacity else f"var({variable})"


def stylesheet() -> str:
    """Return the CSS that defines all colours, for the ``<style>`` of a page or a drawing."""
    light, dark = (" ".join(f"--{name}: {paint};" for name, paint in values.items()) for values in (_LIGHT, _DARK))
    dark_rule = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f":root {{ color-scheme: light dark; {light} }}\n{dark_rule}\n"
