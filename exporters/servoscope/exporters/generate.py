"""``python -m servoscope.exporters.generate [--check]``: docs/metrics.md from the catalogue."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from servoscope.exporters.catalog import render_markdown

__all__ = ["PAGE", "main"]

PAGE = Path("docs") / "metrics.md"


def main(argv: Sequence[str] | None = None, stdout: TextIO | None = None) -> int:
    """Write the page, or with ``--check`` say whether it is as it should be. Exit status."""
    parser = argparse.ArgumentParser(prog="python -m servoscope.exporters.generate")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when out of date")
    parser.add_argument("--root", type=Path, default=Path(), help="checkout (default: here)")
    options = parser.parse_args(argv)
    page = options.root / PAGE
    wanted = render_markdown()
    current = page.read_text(encoding="utf-8") if page.is_file() else None
    if current == wanted:
        print(f"{page} is up to date", file=stdout or sys.stdout)
        return 0
    if options.check:
        print(f"{page} is out of date: run make generate", file=sys.stderr)
        return 1
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(wanted, encoding="utf-8")
    print(f"{page} written", file=stdout or sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
