"""A file is written whole or not at all."""

import os
from pathlib import Path

import pytest

from headwise.errors import OptionError
from headwise.support.files import write_whole


def test_folders_are_made_and_the_path_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = write_whole(Path("a/b/page.html"), "Grüße")
    assert written == tmp_path / "a" / "b" / "page.html"
    assert written.read_text("utf-8") == "Grüße"
    assert written.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in written.parent.iterdir()] == ["page.html"]


def test_a_page_that_was_there_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old and longer than the new one")
    write_whole(page, "new")
    assert page.read_text() == "new"


def test_what_fails_leaves_the_old_page_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OptionError, match="no space left"):
        write_whole(page, "new")
    assert page.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_folder_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as error:
        write_whole(tmp_path, "new")
    assert str(tmp_path) in error.value.saw
    assert error.value.do == "name a file in it"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    tmp_path.joinpath("file").touch()
    for path in ("file/page.html", "file/below/page.html"):
        with pytest.raises(OptionError, match="is a file or is below a file"):
            write_whole(tmp_path / path, "new")
