"""Stretched frequencies: what each method promises, and bit for bit as Hugging Face has them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headwise import Rotary
from headwise.errors import OptionError
from headwise.function.scaling import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Scaling,
    YarnScaling,
    unscaled_frequencies,
)
from tests.refusals import refusals

# ---- what each promises ------------------------------------------------------------------------

THETA, WIDTH = 10_000.0, 64
plain = unscaled_frequencies(THETA, WIDTH)
turns = 4096 * plain / (2 * math.pi)  # of each pair, within 4,096 tokens


def test_linear_divides_positions() -> None:
    assert torch.equal(LinearScaling(4.0).scaled_frequencies(THETA, WIDTH), plain / 4)


def test_ntk_keeps_the_fastest_and_divides_the_slowest() -> None:
    scaled = NTKScaling(4.0).scaled_frequencies(THETA, WIDTH)
    assert scaled[0] == plain[0] == 1.0
    # Powers, whose exponents are rounded and magnified by the logarithm of a theta of 41,829.
    bound = torch.finfo(torch.float32).eps * (math.log(41_829.0) + 3)
    assert abs(float(scaled[-1] / plain[-1]) * 4 - 1) <= bound
    assert torch.equal(scaled, unscaled_frequencies(THETA * 4.0 ** (64 / 62), WIDTH))


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_what_turns_often_and_divides_what_hardly_turns(truncate: bool) -> None:
    scaled = YarnScaling(8.0, 4096, truncate=truncate).scaled_frequencies(THETA, WIDTH)
    # Rounded to whole pairs, the ramp reaches up to one pair further.
    beyond = 10_000.0 ** (2 / WIDTH) if truncate else 1.0
    kept, divided = turns > 32 * beyond, turns < 1 / beyond
    assert kept.sum() >= 10
    assert divided.sum() >= 8
    assert torch.equal(scaled[kept], plain[kept])
    assert torch.equal(scaled[divided], plain[divided] / 8)  # a power of two: exact
    between = (scaled / plain)[~kept & ~divided]
    assert ((between[:-1] >= between[1:]) & (between[1:] >= 1 / 8) & (between[:-1] <= 1)).all()


def test_llama3_keeps_short_waves_and_divides_long_ones() -> None:
    scaled = Llama3Scaling(8.0, 1.0, 4.0, 4096).scaled_frequencies(THETA, WIDTH)
    kept, divided = turns > 4, turns < 1
    assert torch.equal(scaled[kept], plain[kept])
    assert torch.equal(scaled[divided], plain[divided] / 8)
    between = ~kept & ~divided
    share = (turns.double() - 1) / 3
    exact = plain.double() * ((1 - share) / 8 + share)
    # Turns are a quotient of quotients; then one difference, one product and one sum for each part.
    bound = torch.finfo(torch.float32).eps * 8 * plain.double()
    assert between.sum() >= 4
    assert ((scaled.double() - exact).abs() <= bound)[between].all()


@pytest.mark.parametrize(
    ("scaling", "amplitude"),
    [
        (LinearScaling(8.0), 1.0),
        (NTKScaling(8.0), 1.0),
        (Llama3Scaling(8.0, 1.0, 4.0, 4096), 1.0),
        (YarnScaling(8.0, 4096), 0.1 * math.log(8) + 1),
        (YarnScaling(0.5, 4096), 1.0),
        (YarnScaling(8.0, 4096, attention_factor=1.25), 1.25),
        (YarnScaling(8.0, 4096, mscale=0.7, mscale_all_dim=0.7), 1.0),
        (
            YarnScaling(8.0, 4096, mscale=1.0, mscale_all_dim=0.5),
            (0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1),
        ),
        (YarnScaling(8.0, 4096, mscale=0.7), 0.1 * math.log(8) + 1),
    ],
)
def test_amplitude(scaling: Scaling, amplitude: float) -> None:
    assert Rotary(scaling=scaling).amplitude == amplitude


# ---- bit for bit -------------------------------------------------------------------------------


def llama(**rope: Any) -> LlamaConfig:
    """A config with these rope parameters, for sizes in which no two coincide."""
    return LlamaConfig(
        hidden_size=240,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=rope.pop("head_dim"),
        max_position_embeddings=16_384,
        rope_parameters=rope,
    )


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
FAMILIES: dict[str, tuple[dict[str, Any], Scaling]] = {
    "linear": ({"rope_type": "linear", "factor": 3.0}, LinearScaling(3.0)),
    "llama3": (LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 4096)),
    "yarn": (YARN, YarnScaling(4.0, 4096)),
    "yarn, fractions": (YARN | {"truncate": False}, YarnScaling(4.0, 4096, truncate=False)),
    "yarn, trained on few tokens": (
        YARN | {"original_max_position_embeddings": 100},
        YarnScaling(4.0, 100),
    ),
    "yarn, other turns": (
        YARN | {"beta_fast": 20.0, "beta_slow": 2.0},
        YarnScaling(4.0, 4096, beta_fast=20.0, beta_slow=2.0),
    ),
    "yarn, a factor of its own": (
        YARN | {"attention_factor": 1.3},
        YarnScaling(4.0, 4096, attention_factor=1.3),
    ),
    "yarn, DeepSeek": (
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.6},
        YarnScaling(4.0, 4096, mscale=1.0, mscale_all_dim=0.6),
    ),
    "yarn, a step": (
        YARN | {"beta_fast": 3.0, "beta_slow": 3.0, "truncate": False},
        YarnScaling(4.0, 4096, beta_fast=3.0, beta_slow=3.0, truncate=False),
    ),
}


@pytest.mark.parametrize("theta", [500.0, 10_000.0, 500_000.0])
@pytest.mark.parametrize(("head_dim", "share"), [(10, 1.0), (64, 1.0), (80, 0.4), (128, 0.25)])
@pytest.mark.parametrize("name", FAMILIES)
def test_as_hugging_face_has_it(name: str, head_dim: int, share: float, theta: float) -> None:
    rope, scaling = FAMILIES[name]
    config = llama(rope_theta=theta, partial_rotary_factor=share, head_dim=head_dim, **rope)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    rotary = Rotary(theta, int(head_dim * share), scaling=scaling)
    assert torch.equal(rotary.frequencies(head_dim), frequencies)
    assert rotary.amplitude == factor


@pytest.mark.parametrize("head_dim", [10, 64, 80])
def test_ntk_is_hugging_faces_dynamic_scaling_at_one_length(head_dim: int) -> None:
    config = llama(rope_type="dynamic", factor=2.0, rope_theta=10_000.0, head_dim=head_dim)
    length = config.max_position_embeddings * 5 // 2  # 2 * 2.5 - (2 - 1) is 4
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    assert torch.equal(Rotary(scaling=NTKScaling(4.0)).frequencies(head_dim), frequencies)


def test_gpt_oss_as_published() -> None:
    config = GptOssConfig()
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    rotary = Rotary(150_000.0, scaling=YarnScaling(32.0, 4096, truncate=False))
    assert torch.equal(rotary.frequencies(64), frequencies)
    assert rotary.amplitude == factor


def test_deepseek_v3_as_published() -> None:
    rope = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope |= {"rope_theta": 10_000.0, "original_max_position_embeddings": 4096}
    config = DeepseekV3Config(rope_parameters=rope, max_position_embeddings=163_840)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    scaling = YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert torch.equal(Rotary(scaling=scaling).frequencies(64), frequencies)
    assert scaling.amplitude == factor == 1.0


# ---- refusals ----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Tensor | Scaling], list[str]]] = {
    "factor 0": (lambda: LinearScaling(0.0), ["LinearScaling(factor=0.0)", "positive"]),
    "factor negative": (lambda: NTKScaling(-2.0), ["NTKScaling(factor=-2.0)"]),
    "factor nan": (lambda: LinearScaling(math.nan), ["factor=nan"]),
    "factor inf": (lambda: YarnScaling(math.inf, 4096), ["factor=inf"]),
    "no number": (lambda: LinearScaling("4"), ["factor='4'"]),  # type: ignore[arg-type]
    "length 0": (lambda: YarnScaling(4.0, 0), ["original_length=0"]),
    "amplitude": (lambda: YarnScaling(4.0, 4096, attention_factor=-1.0), ["attention_factor=-1.0"]),
    "betas": (
        lambda: YarnScaling(4.0, 4096, beta_fast=1.0, beta_slow=32.0),
        ["beta_fast=1.0", "beta_slow=32.0", "beta_fast=32.0"],
    ),
    "bands": (
        lambda: Llama3Scaling(8.0, 4.0, 4.0, 8192),
        ["low_freq_factor=4.0", "high_freq_factor=4.0", "low_freq_factor=1.0"],
    ),
    "one pair": (lambda: NTKScaling(4.0).scaled_frequencies(1e4, 2), ["width of 2", "from 4"]),
    "theta": (lambda: YarnScaling(4.0, 4096).scaled_frequencies(1.0, 64), ["theta=1.0", "above 1"]),
    "short": (
        lambda: YarnScaling(4.0, 2).scaled_frequencies(1e4, 64),
        ["original_length=2", "32 pairs"],
    ),
}


test_what_cannot_be_meant_is_refused_with_its_numbers = refusals(REFUSED, kind=OptionError)
