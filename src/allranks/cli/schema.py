"""``allranks schema``: the JSON Schema of the spec."""

from __future__ import annotations

import click

from allranks.cli.options import print_json
from allranks.errors import EXIT_OK


@click.command("schema")
def schema_command() -> int:
    """Print the JSON Schema of the spec; editors check YAML by it while it is written."""
    from allranks.spec.schema import json_schema

    print_json(json_schema())
    return EXIT_OK
