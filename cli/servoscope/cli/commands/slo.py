"""``servoscope slo compile``: objectives → Prometheus rules, and the Alertmanager configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TextIO

from servoscope.alerts.alertmanager import EXAMPLE, Notify, compile_alertmanager
from servoscope.alerts.problems import shown
from servoscope.alerts.rules import compile_engine_rules, compile_rules, notes
from servoscope.alerts.settings import RuleSettings
from servoscope.alerts.spec import MAX_SPEC_CHARACTERS, Spec, SpecError, default_spec, load_spec
from servoscope.cli.ending import EXIT_CODES_AT_ONCE
from servoscope.cli.main import CommandError, UsageError
from servoscope.cli.settings import load_settings, unreadable

__all__ = ["HELP", "add_arguments", "execute"]

HELP = "compile objectives into Prometheus rules and an Alertmanager configuration"
_DEFAULTS = RuleSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.epilog = EXIT_CODES_AT_ONCE
    actions = parser.add_subparsers(dest="action", metavar="compile", required=True)
    build = actions.add_parser("compile", help="write rules/*.yaml and alertmanager.yaml")
    build.add_argument(
        "specs", nargs="*", metavar="SPEC", help="spec files (default: `slos` of the configuration)"
    )
    build.add_argument("--out", type=Path, required=True, metavar="DIRECTORY", help="where to")
    build.add_argument(
        "--runbooks",
        metavar="URL",
        default=_DEFAULTS.runbook_base_url,
        help="what the alerts' runbook links begin with (default: %(default)s, our collector)",
    )
    build.add_argument(
        "--dashboard",
        metavar="URL",
        default=_DEFAULTS.dashboard_url,
        help="the dashboard that the alerts link to (default: %(default)s)",
    )


def execute(args: argparse.Namespace, out: TextIO) -> int:
    """Compile; say what was adapted and what to do with the files."""
    links = RuleSettings(
        runbook_base_url=_link(args.runbooks, "--runbooks"),
        dashboard_url=_link(args.dashboard, "--dashboard"),
    )
    settings = load_settings(args.config)
    specs = _specs(args.specs or list(settings.slos))
    files = {"rules/engines.yaml": compile_engine_rules(links)}
    for name, spec in specs.items():
        files[f"rules/{name}.yaml"] = compile_rules(spec, links)
    receivers = EXAMPLE if settings.notify == Notify() else settings.notify
    files["alertmanager.yaml"] = compile_alertmanager(receivers)
    for name, text in files.items():
        path = args.out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror or error}") from error
        out.write(f"wrote {path}\n")
    for name, spec in specs.items():
        out.writelines(f"{name}: {note}\n" for note in notes(spec))
    if receivers is EXAMPLE:
        out.write("alertmanager.yaml has example receivers: write yours under `notify`\n")
    return 0


def _link(url: str, flag: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{flag}: {url!r} is not an http URL")
    return url.rstrip("/")


def _specs(names: list[str]) -> dict[str, Spec]:
    """File stem → spec; the built-in one when none is named."""
    if not names:
        return {"default": default_spec()}
    specs: dict[str, Spec] = {}
    taken = {"engines"}
    wrong: list[str] = []
    for name in names:
        path = Path(name).expanduser()
        if path.stem in taken:
            wrong.append(f"{name}: the name {path.stem} is taken; rename the file")
            continue
        taken.add(path.stem)
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(MAX_SPEC_CHARACTERS + 1)  # load_spec refuses what is too long
            specs[path.stem] = load_spec(text, path.name)
        except (OSError, UnicodeDecodeError) as error:
            wrong.append(unreadable(name, error))
        except SpecError as error:
            wrong += error.lines(name)
    if wrong:
        raise CommandError("\n  ".join(shown(wrong)))
    return specs
