"""Add to the site what its pages link to outside of docs/, with links as they are there.

MkDocs calls the functions (mkdocs.yml). Files of the repository (examples, benchmarks/README.md) get a copy in the
site, under their path; a link to a folder, or from such a copy to a file without one, becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = PurePosixPath("docs")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
PAGE_LIST: list[str] = []  # lines of llms.txt
PAGES = ("SECURITY.md", "CONTRIBUTING.md", "benchmarks/README.md")


def in_repository(page: PurePosixPath, target: str) -> PurePosixPath:
    """Return the path of a link's target, relative to the root of the repository."""
    return PurePosixPath(os.path.normpath(page.parent / target))


def site_path(path: PurePosixPath) -> PurePosixPath:
    """Return the path in the site of a file of the repository: pages of docs/ are at its root."""
    if path == PurePosixPath("README.md"):
        return PurePosixPath("index.md")
    return path.relative_to(DOCS) if path.is_relative_to(DOCS) else path


def on_files(files: Any, config: Any) -> Any:
    """Add the copies."""
    wanted = {PurePosixPath(page) for page in PAGES}
    for page in sorted((ROOT / DOCS).glob("*.md")):
        for _, _, target, _ in LINK.findall(page.read_text()):
            path = in_repository(DOCS / page.name, target)
            if not path.is_relative_to(DOCS) and (ROOT / path).is_file() and path != PurePosixPath("README.md"):
                wanted.add(path)
    for path in sorted(wanted):
        files.append(File.generated(config, str(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page."""
    source = page.file.src_uri
    here = PurePosixPath(source) if source in PAGES else DOCS / source

    def rewritten(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        site = site_path(in_repository(here, target))
        if files.get_file_from_path(str(site)) is None and not (ROOT / in_repository(here, target)).exists():
            return match[0]  # MkDocs reports it
        if files.get_file_from_path(str(site)) is None:
            return text
        return f"{image}[{text}]({os.path.relpath(site, site_path(here).parent)}{anchor or ''})"

    markdown = LINK.sub(rewritten, markdown)
    if "/" not in source:
        texts = (
            re.sub(r"\]\([^)]*\)|\[", "", p).replace("\n", " ")
            for p in markdown.split("\n\n")
            if p[:1].isalpha() or p[:1] == "`"
        )
        PAGE_LIST.append(f"- [{page.title}]({page.url}): {next(texts, '').partition('. ')[0].rstrip('.:')}")
    # GitHub needs the backslash in code within tables, Python-Markdown shows it
    return re.sub(
        r"^\|.*", lambda row: re.sub(r"`[^`]+`", lambda c: c[0].replace("\\|", "|"), row[0]), markdown, flags=re.M
    )


def on_post_build(*, config: Any) -> None:
    """Write llms.txt: the pages for programs that read them (llmstxt.org)."""
    text = f"# {config['site_name']}\n\n> {config['site_description']}\n\n## Pages\n\n" + "\n".join(PAGE_LIST) + "\n"
    (Path(config["site_dir"]) / "llms.txt").write_text(text)
