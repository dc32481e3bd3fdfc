"""``python -m servoscope.exporters.generate [--check]``: pages that are made from tables.

docs/metrics.md from the catalogue; the matrix of releases in docs/engines.md from the engines'
tables and the texts that tests replay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from servoscope.exporters.catalog import render_markdown
from servoscope.exporters.engines import ENGINES, parser_for
from servoscope.exporters.matrix import Release, render_matrix, with_matrix

__all__ = ["ENGINES_PAGE", "PAGE", "main", "releases"]

PAGE = Path("docs") / "metrics.md"
ENGINES_PAGE = Path("docs") / "engines.md"
TEXTS = Path("tests") / "fixtures" / "engines"


def main(argv: Sequence[str] | None = None, stdout: TextIO | None = None) -> int:
    """Write the pages, or with ``--check`` say whether they are as they should be. Exit status."""
    parser = argparse.ArgumentParser(prog="python -m servoscope.exporters.generate")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when out of date")
    parser.add_argument("--root", type=Path, default=Path(), help="checkout (default: here)")
    options = parser.parse_args(argv)
    wanted = {PAGE: render_markdown()}
    hand_written = options.root / ENGINES_PAGE
    if hand_written.is_file():
        page = hand_written.read_text(encoding="utf-8")
        tables = [parser_for(engine, None).table for engine in ENGINES]
        wanted[ENGINES_PAGE] = with_matrix(page, render_matrix(tables, releases(options.root)))
    out = stdout or sys.stdout
    return max(
        _one(options.root, name, text, check=options.check, out=out)
        for name, text in wanted.items()
    )


def releases(root: Path) -> dict[str, list[Release]]:
    """Releases of which ``root`` has a text, by engine."""
    return {
        engine: [
            Release(folder.name, any(folder.rglob("metrics*.txt")))
            for folder in sorted((root / TEXTS / engine).glob("*/"))
            if any(folder.rglob("*.txt"))
        ]
        for engine in ENGINES
    }


def _one(root: Path, name: Path, wanted: str, *, check: bool, out: TextIO) -> int:
    page = root / name
    current = page.read_text(encoding="utf-8") if page.is_file() else None
    if current == wanted:
        print(f"{name} is up to date", file=out)
        return 0
    if check:
        print(f"{name} is out of date: run make generate", file=sys.stderr)
        return 1
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(wanted, encoding="utf-8")
    print(f"{name} written", file=out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
