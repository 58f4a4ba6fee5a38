"""Packages that only some rooms need: quiet where they are, a pip line where they are not."""

import logging
import sys
import warnings
from pathlib import Path

import pytest

from headwise.errors import MissingExtraError
from headwise.support.lazy import require_package


def test_a_module_that_is_there() -> None:
    assert require_package("json.decoder", purpose="").JSONDecoder


def test_a_package_that_is_missing_is_named_with_its_pip_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "some_package", None)
    with pytest.raises(MissingExtraError) as error:
        require_package("some_package.part", purpose="which does it")
    assert error.value.saw == "some-package is not installed"
    assert error.value.needed == "some-package, which does it"
    assert error.value.do == "pip install 'headwise[demo]'"


def test_a_package_that_is_there_but_broken_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("broken_module.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        require_package("broken_module", purpose="")


def test_the_import_is_quiet_and_leaves_logging_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.joinpath("loud_module.py").write_text(
        "import logging, warnings\n"
        "logging.getLogger('loud').warning('no kernels')\n"
        "warnings.warn('old', DeprecationWarning)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_package("loud_module", purpose="")
    assert caplog.messages == []
    logging.getLogger("loud").warning("heard again")
    assert caplog.messages == ["heard again"]
