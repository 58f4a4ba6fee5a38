"""The processor, read once: its vendor, and which float32 product of torch is faster on it."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from headwise.errors import OptionError
from headwise.support import private_torch

Product = Literal["onednn", "blas"]
VARIABLE = "HEADWISE_PRODUCT"
CPU_INFO = Path("/proc/cpuinfo")
_VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}


class ProductChoice(NamedTuple):
    """A product, and why: the same in every run on one machine."""

    product: Product
    why: str


def read_processor(text: str | None = None) -> tuple[str, bool]:
    """Return the vendor, "AMD", "Intel" or "" where it is hidden, and whether AMX is there.

    ``text`` is what Linux tells in /proc/cpuinfo. Other systems tell the vendor alone.
    """
    if text is None:
        text = CPU_INFO.read_text() if CPU_INFO.is_file() else platform.processor()
    vendor = next((name for word, name in _VENDORS.items() if word in text), "")
    return vendor, "amx_tile" in text


def choose_product(vendor: str, has_amx: bool, stated: str | None = None) -> ProductChoice:
    """Return the product for large float32 products of plain tensors on this processor.

    oneDNN's took 0.5 to 0.95 of the time of BLAS on AMD EPYC; BLAS was as fast or faster on an
    Intel Xeon with AMX (docs/log.md). Other processors were not measured.

    Raises:
        OptionError: another word than "onednn" or "blas" in the environment.
    """
    if stated:
        for product in get_args(Product):
            if stated == product:
                return ProductChoice(product, f"{VARIABLE}={stated}")
        raise OptionError(
            saw=f"{VARIABLE}={stated} in the environment",
            needed=" or ".join(get_args(Product)),
            do=f"unset {VARIABLE}, and the processor decides",
        )
    if vendor == "AMD":
        return ProductChoice("onednn", "AMD")
    if vendor == "Intel" and has_amx:
        return ProductChoice("blas", "Intel with AMX")
    return ProductChoice("blas", f"{vendor or 'a processor of an unknown vendor'}, not measured")


@cache
def product_here() -> ProductChoice:
    """Return the choice for this machine and this environment."""
    return choose_product(*read_processor(), os.environ.get(VARIABLE))


def may_use_onednn(*tensors: Tensor) -> bool:
    """True if nothing sees which product multiplies these: plain float32 tensors on the CPU."""
    return (
        bool(torch.backends.mkldnn.enabled)
        # has_torch_function is False for DTensor and other subclasses of torch.
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        and not torch.is_autocast_enabled("cpu")
        and not has_torch_function(tensors)
        and not private_torch.is_in_functorch(unknown=True)
        and not private_torch.is_in_forward_mode()
        and not private_torch.is_in_dispatch_mode()
    )
