"""What every test starts from: one torch thread, fixed seeds, repeatable hypothesis."""

import gc
import importlib.util
import os
import random
from pathlib import Path

# One thread for each worker, here and in the subprocesses that tests start. Before torch loads.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Iterator

import hypothesis
import jaxtyping
import pytest
import torch

from tests import shapes
from tests.reports.browser import Chromium, chromium

torch.set_num_threads(1)
pytest.register_assert_rewrite("tests.refusals")

PACKAGE = importlib.util.find_spec("headwise")
SOURCE = Path(PACKAGE.origin).parent if PACKAGE and PACKAGE.origin else None


if SOURCE and not jaxtyping.config.jaxtyping_disable:
    shapes.check_shapes(SOURCE)

hypothesis.settings.register_profile(
    "headwise",
    deadline=None,  # no test asserts a wall-clock time
    derandomize=True,  # the same examples on every run, so a mutant's killer is a fact
    print_blob=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("headwise")
# What `make test` runs: only the first of the same examples.
hypothesis.settings.register_profile("quick", hypothesis.settings(max_examples=25))


def pytest_configure(config: pytest.Config) -> None:
    """The mutant runner says which copy of the source it expects to be imported."""
    expected = os.environ.get("HEADWISE_EXPECTED_SOURCE")
    if expected and not (SOURCE and SOURCE.is_relative_to(expected)):
        raise pytest.UsageError(f"headwise comes from {SOURCE}, not from {expected}")


def pytest_itemcollected(item: pytest.Item) -> None:
    """What is extra is slow, too: `-m "not slow"` leaves out both."""
    if item.get_closest_marker("extra"):
        item.add_marker("slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test comes first, so that no worker waits for it at the end."""
    items.sort(key=lambda item: "README.md" not in item.nodeid)


def pytest_collection() -> None:
    gc.disable()  # nothing of what is collected goes


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection of garbage walks over all modules and tests again
    gc.enable()


@pytest.fixture(autouse=True)
def _seed() -> None:
    shapes.begin_test()
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def shapes_unchecked() -> Iterator[None]:
    """Shape annotations are not checked, as for users: the library's own refusal speaks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """The one browser of a worker: Playwright refuses a second one in the same thread."""
    with chromium() as started:
        yield started
