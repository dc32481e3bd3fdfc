"""The bearer token: made once, private, compared in constant time."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from servoscope.sidecar.control.token import TokenError, load_token, matches


def test_it_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "token"
    token = load_token(path)
    assert len(token) >= 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_token(path) == token


def test_a_token_that_others_can_read_is_refused_with_the_command(tmp_path: Path) -> None:
    path = tmp_path / "token"
    load_token(path)
    path.chmod(0o644)
    with pytest.raises(TokenError, match="chmod 600"):
        load_token(path)


def test_an_empty_token_opens_nothing(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    with pytest.raises(TokenError, match="empty"):
        load_token(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("secret")
    (tmp_path / "token").symlink_to(tmp_path / "real")
    with pytest.raises(TokenError):
        load_token(tmp_path / "token")


@pytest.mark.parametrize(
    ("header", "good"),
    [("Bearer abc", True), ("bearer abc ", True), ("Bearer abcd", False), ("Bearer ", False),
     ("Basic abc", False), ("abc", False), ("", False), (None, False), ("Bearer äöü", False),
     ("Bearer \udcff", False), ("\udcff abc", False)],
)  # fmt: skip
def test_matches(header: str | None, good: bool) -> None:
    assert matches("abc", header) is good
