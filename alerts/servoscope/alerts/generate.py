"""``python -m servoscope.alerts.generate [--check]``: write, or compare, what is generated.

Every spec of alerts/slos becomes alerts/rules/<name>.yaml; alerts/rules/engines.yaml and
alerts/alertmanager.yaml need no spec. With ``--check`` nothing is written: the difference is
printed and the exit status is 1 where there is one.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from servoscope.alerts.alertmanager import compile_alertmanager
from servoscope.alerts.data import data_directory
from servoscope.alerts.rules import compile_engine_rules, compile_rules
from servoscope.alerts.spec import SpecError, load_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["generated", "main"]


class WrongSpecsError(ValueError):
    """Specs that cannot be accepted; the text has a line a problem, file and key first."""


def generated(root: Path) -> dict[Path, str]:
    """Every generated file below ``root`` (the alerts folder) and its text.

    Raises WrongSpecsError.
    """
    wrong: list[str] = []
    files: dict[Path, str] = {root / "rules" / "engines.yaml": compile_engine_rules()}
    for path in sorted((root / "slos").glob("*.yaml")):
        if path.stem == "engines":
            wrong.append(f"{path.name}: the name engines is taken; rename it")
            continue
        try:
            spec = load_spec(path.read_text(encoding="utf-8"), path.name)
        except SpecError as error:
            wrong += error.lines(path.name)
        else:
            files[root / "rules" / path.name] = compile_rules(spec)
    if wrong:
        raise WrongSpecsError("\n".join(wrong))
    files[root / "alertmanager.yaml"] = compile_alertmanager()
    return files


def main(argv: Sequence[str] | None = None, stdout: TextIO = sys.stdout) -> int:
    """Exit status: 0 written or equal, 1 different, 2 a spec that cannot be accepted."""
    parser = argparse.ArgumentParser(prog="python -m servoscope.alerts.generate")
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument(
        "--root", type=Path, default=None, help="the alerts folder (default: the installed one)"
    )
    arguments = parser.parse_args(argv)
    root: Path = arguments.root or data_directory("slos").parent
    try:
        wanted = generated(root)
    except WrongSpecsError as error:
        stdout.write(f"{error}\n")
        return 2
    known = set(wanted)
    stale = [path for path in sorted((root / "rules").glob("*.yaml")) if path not in known]
    if not arguments.check:
        for path, text in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for path in stale:
            path.unlink()
        return 0
    different = False
    for path, text in wanted.items():
        found = path.read_text(encoding="utf-8") if path.is_file() else ""
        lines = difflib.unified_diff(
            found.splitlines(True), text.splitlines(True), f"{path} (found)", f"{path} (generated)"
        )
        for line in lines:
            different = True
            stdout.write(line)
    for path in stale:
        different = True
        stdout.write(f"{path}: no spec makes this file\n")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
