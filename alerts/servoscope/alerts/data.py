"""Files that ship with this part: specs, generated rules, runbooks.

They lie beside the source root (``alerts/slos``) in a checkout, and inside the package in a wheel.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["data_directory", "data_text"]

_FOLDERS = ("slos", "rules", "runbooks")


def data_directory(folder: str) -> Path:
    """The directory of ``slos``, ``rules`` or ``runbooks``.

    Raises FileNotFoundError when the installation lacks it, ValueError for another name.
    """
    if folder not in _FOLDERS:
        raise ValueError(f"{folder!r} is not one of {', '.join(_FOLDERS)}")
    package = Path(__file__).resolve().parent
    for base in (package, package.parents[1]):
        if (base / folder).is_dir():
            return base / folder
    raise FileNotFoundError(f"this installation of servoscope lacks its {folder} folder")


def data_text(folder: str, name: str) -> str:
    """The text of one shipped file. ``name`` is a plain file name."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a plain file name")
    return (data_directory(folder) / name).read_text(encoding="utf-8")
