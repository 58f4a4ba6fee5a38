"""On an accelerator nothing mixes devices, and nothing reads a value where docs/paths.md has none.

The build of torch for CUDA runs the cases on its own device too.
"""

import pytest
import torch

from tests.apart import assert_passed_apart
from tests.contract import accelerator, on_device
from tests.root import ROOT

PATH = ROOT / "tests" / "contract" / "accelerator.py"
DEVICES = ("card", "cuda") if torch.version.cuda else ("card",)


# "card" stays registered in a process, so each device has its own.
@pytest.mark.extra
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_mixes_devices_or_reads_a_value(device: str) -> None:
    assert_passed_apart(PATH, count=accelerator.COUNT[device], chosen=f"on_{device}")


def test_the_contract_on_a_device_holds_on_the_cpu() -> None:
    on_device.test_products_and_gradients(1, torch.float32)
    on_device.test_readings(1)
    on_device.test_layer()


@pytest.mark.slow
def test_masks_and_statistics_mix_no_devices() -> None:
    chosen = "on_card and (masks or statistics or reads)"
    assert_passed_apart(PATH, count=4, chosen=chosen)


def test_the_page_names_the_statistics_that_read() -> None:
    text = (ROOT / "docs" / "paths.md").read_text("utf-8")
    listed = text.partition("- Some statistics")[2]
    assert listed.split("`")[1::2] == accelerator.READING
