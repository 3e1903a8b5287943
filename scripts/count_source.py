"""Count the source for CONTRIBUTING.md: lines and files by package, functions, comments, long lines, empty names.

python scripts/count_source.py [ROOT]    another working tree, to compare with: git worktree add /tmp/before REVISION
"""

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
PACKAGE = ROOT / "src" / "allranks"
MAX_COLUMNS = 120
EMPTY_NAMES = ("found", "told", "asked", "here", "how")


def lines_of(files: list[Path]) -> int:
    """Return the lines of text files, as `wc -l` counts them."""
    return sum(file.read_text(encoding="utf-8").count("\n") for file in files)


def main() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    groups: dict[str, list[Path]] = {}
    for file in files:
        parts = file.relative_to(PACKAGE).parts
        groups.setdefault("/".join(parts[:2]) if parts[0] == "analysis" and len(parts) > 2 else parts[0], []).append(
            file
        )
    for name, members in sorted(groups.items()):
        print(f"{name:24} {len(members):4} files {lines_of(members):7,} lines")
    print(f"{'src':24} {len(files):4} files {lines_of(files):7,} lines")
    for name in ("tests", "benchmarks", "scripts"):
        members = sorted((ROOT / name).rglob("*.py"))
        print(f"{name:24} {len(members):4} files {lines_of(members):7,} lines")
    print(f"{'docs':24} {sum(file.suffix == '.md' for file in (ROOT / 'docs').rglob('*')):4} pages")

    lengths, single, bound = [], {}, Counter[str]()
    words = Counter(re.findall(r"\w+", "\n".join(texts.values())))
    for text in texts.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if len(body) == 1 and node.name.startswith("_") and not node.name.startswith("__"):
                    single[node.name] = words[node.name]
            if isinstance(node, ast.Name | ast.arg):
                name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node.ctx, ast.Store) else ""
                bound[name] += 1
    comments = sum(
        token.type == tokenize.COMMENT
        for text in texts.values()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    total = lines_of(files)
    long = sum(len(line) > MAX_COLUMNS for text in texts.values() for line in text.splitlines())
    median, p95 = statistics.median(lengths), sorted(lengths)[len(lengths) * 95 // 100]
    print(f"functions                {len(lengths):,}, lines: median {median:.0f}, p95 {p95}")
    print(
        f"private, one statement   {len(single):,}, of them used once {sum(count == 2 for count in single.values()):,}"
    )
    print(f"comments                 {comments:,}, {comments / total:.1%} of the lines")
    print(f"lines over {MAX_COLUMNS} columns   {long:,}")
    print("names that say nothing   " + ", ".join(f"{name} {bound[name]}" for name in EMPTY_NAMES))


if __name__ == "__main__":
    main()
