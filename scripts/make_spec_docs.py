"""Write docs/spec.md from the records; a test checks that it is up to date. ``python scripts/make_spec_docs.py``"""

from __future__ import annotations

import typing
from pathlib import Path

import msgspec

from allranks.spec.records import DataSpec, Record, RunSpec
from allranks.spec.strategies import REGISTRY

HEAD = """# The spec

A spec is one YAML file. `--set section.key=value` overrides any value. `allranks schema` prints the JSON Schema: with
`# yaml-language-server: $schema=allranks.schema.json` at the top of a spec, editors check and complete it.

All keys except `model.name` and `data.source` (or `data.sources`) have a default. Generated from the records by `scripts/make_spec_docs.py`.
"""

DATA = """
### Templates and columns

A template converts a row to text and selects the part that is trained. `auto` chooses by the columns of the first row.

| `data.template` | columns, or keys of `data.columns` | text |
|---|---|---|
| `alpaca` | `instruction`, `input` (may be missing), `output` | headings of Alpaca; `output` is trained |
| `chat` | `messages`; or `prompt`, `response`; or those of `alpaca`; also `system`, `tools` | the model's chat template; replies are trained |
| `completion` | `prompt`, `completion` | both joined as they are; `completion` is trained |
| `text` | `text` | as it is, all trained |
| `classification` | `text`, `label` | as it is; the label is the class |
| a `.jinja` file | any | its block `prompt`, then its block `response`, which is trained |

`data.columns` says which column of the file has which role: `{prompt: question, response: answer}`. Several columns are joined by line feeds:
`{text: [title, body], label: topic}`. Without it, `conversations` is used as `messages`, and `response` and `completion` are interchangeable.

A Jinja file uses the columns as variables, and needs the block `response`, unless `data.mask_prompt` is false:

```jinja
{% block prompt %}Question: {{ question }}
Answer: {% endblock %}{% block response %}{{ answer }}{% endblock %}
```

[own-data.md](own-data.md) explains formats, chats and what `allranks data` shows.
"""


def unwrap(annotation: typing.Any) -> tuple[str, str, type[Record] | None]:
    """Return (type, description, record) of an annotation."""
    description = ""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *metas = typing.get_args(annotation)
        name, below, record = unwrap(inner)
        notes = [m.description for m in metas if isinstance(m, msgspec.Meta) and m.description]
        words = [w for m in metas if isinstance(m, msgspec.Meta) for w in (m.extra_json_schema or {}).get("enum", [])]
        name = " or ".join(f"`{word}`" for word in words) or name
        return name, notes[0] if notes else below, record
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return "section", (annotation.__doc__ or "").strip().splitlines()[0], annotation
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{a}`" for a in args), "", None
    if args and origin in (list, dict):
        record = unwrap(args[0])[2]
        name = "list" if record else f"{origin.__name__} of {' to '.join(unwrap(a)[0] for a in args)}"
        return name, "", record
    if args:
        parts = [unwrap(a) for a in args if a is not type(None)]
        return (
            " or ".join(p[0] for p in parts),
            next((p[1] for p in parts if p[1]), description),
            next((p[2] for p in parts if p[2]), None),
        )
    return getattr(annotation, "__name__", str(annotation)), "", None


def default(field: msgspec.structs.FieldInfo) -> str:
    """Return the default value as YAML."""
    value = (
        field.default
        if field.default is not msgspec.NODEFAULT
        else (field.default_factory() if field.default_factory is not msgspec.NODEFAULT else "required")
    )
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def section(record: type[Record], path: str) -> str:
    """Return one section as a table, followed by its subsections."""
    hints = typing.get_type_hints(record, include_extras=True)
    rows, below = [], ""
    for field in msgspec.structs.fields(record):
        name, text, inner = unwrap(hints[field.name])
        if inner is not None:
            below += section(inner, f"{path}{field.encode_name}{'[]' if name == 'list' else ''}.")
            continue
        rows.append(f"| `{path}{field.encode_name}` | {name} | `{default(field)}` | {text} |")
    title = f"\n## {path.rstrip('.') or 'Top level'}\n\n{(record.__doc__ or '').strip().splitlines()[0]}\n\n"
    table = "| key | type | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    return title + table + (DATA if record is DataSpec else "") + below


def strategies() -> str:
    """Return the table of strategies with their options."""
    lines = [
        f"| `{name}` | {e.summary} | {', '.join(f'`{k}: {v}`' for k, v in e.options.items()).lower() or '-'} |"
        for name, e in REGISTRY.items()
    ]
    return (
        "\n## Strategies\n\nOptions are written next to `strategy.name`.\n\n| name | what | options and defaults |\n|---|---|---|\n"
        + "\n".join(lines)
        + "\n"
    )


def text() -> str:
    """Return the page."""
    return HEAD + section(RunSpec, "") + strategies()


if __name__ == "__main__":
    Path(__file__).resolve().parent.parent.joinpath("docs", "spec.md").write_text(text())
