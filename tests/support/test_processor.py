"""The product of each processor, by what Linux tells of it."""

from pathlib import Path

import pytest
import torch

from headwise import Attention
from headwise.errors import OptionError
from headwise.layers import linear
from headwise.support import processor
from headwise.support.processor import ProductChoice, choose_product, read_processor

AMD = "vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nflags\t: fpu avx2 avx512f\n"
INTEL = "vendor_id\t: GenuineIntel\nflags\t: fpu avx2 avx512f"
ARM = "CPU implementer\t: 0x41\nCPU architecture: 8\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AMD, ProductChoice("onednn", "AMD")),
        (f"{INTEL} amx_bf16 amx_tile\n", ProductChoice("blas", "Intel with AMX")),
        (INTEL, ProductChoice("blas", "Intel, not measured")),
        (ARM, ProductChoice("blas", "a processor of an unknown vendor, not measured")),
        ("", ProductChoice("blas", "a processor of an unknown vendor, not measured")),
    ],
)
def test_the_rule(text: str, expected: ProductChoice) -> None:
    assert choose_product(*read_processor(text)) == expected


def test_the_environment_decides_for_those_who_know_better() -> None:
    assert choose_product("AMD", False, "blas") == ProductChoice("blas", "HEADWISE_PRODUCT=blas")
    with pytest.raises(OptionError, match="HEADWISE_PRODUCT=mkl"):
        choose_product("AMD", False, "mkl")


def test_other_systems_tell_the_vendor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "CPU_INFO", Path("nowhere"))
    windows = "AMD64 Family 25 Model 80 Stepping 0, AuthenticAMD"
    monkeypatch.setattr(processor.platform, "processor", lambda: windows)
    assert read_processor() == ("AMD", False)


@pytest.mark.parametrize(
    "choice", [ProductChoice("onednn", "AMD"), ProductChoice("blas", "Intel with AMX")]
)
def test_explain_states_the_rule(choice: ProductChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "product_here", lambda: choice)
    monkeypatch.setattr(linear.private_torch, "HAS_ONEDNN_LINEAR", True)
    layer = Attention(512, 8)
    few, many = (layer.explain(torch.randn(2, n, 512)) for n in (4, 128))
    by = {"onednn": "oneDNN", "blas": "F.linear"}[choice.product]
    assert all(line.endswith(f", by {by}: {choice.why}") for line in many.projections)
    assert not any("by " in line for line in few.projections)
