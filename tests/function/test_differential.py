"""Differential attention: the printed values, closed forms, and the class of transformers."""

import pytest
import torch
from transformers import DiffLlamaConfig
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from headwise import Attention, Mask
from headwise.errors import OptionError
from headwise.function import DifferentialRule, Latent
from headwise.function.differential import (
    difference_factor,
    pair_values,
    subtract_pairs,
    usual_init,
)
from headwise.surgery import LayerCut, cut_layer
from tests.refusals import refusals

HEADS, KV_HEADS, WIDTH = 8, 4, 6


def test_the_constant_of_a_layer() -> None:
    assert usual_init(0) == pytest.approx(0.2)
    assert usual_init(1) == pytest.approx(0.355509068, abs=5e-10)


def test_pairs_of_numbers() -> None:
    rule = DifferentialRule(0.5, 0.0)
    zero, ones = torch.zeros(3), torch.ones(3)
    assert difference_factor(rule, zero, ones, zero, ones) == 0.5
    assert difference_factor(rule, ones, ones, zero, ones) == pytest.approx(torch.e**3 - 0.5)
    v = torch.arange(4.0).reshape(1, 4, 1, 1)  # of heads 0 to 3: head p has those of p and p + 2
    assert pair_values(v)[0, :, 0].tolist() == [[0, 2], [1, 3], [0, 2], [1, 3]]
    outputs = torch.tensor([[9.0, 7.0], [1.0, 1.0], [2.0, 8.0], [4.0, 0.0]])[None, :, None]
    # 9 - 1 and 7 - 4, then 1 - 2 and 1 - 0, by their roots of the mean square, times 1 - 0.5
    found = subtract_pairs(rule, outputs, torch.tensor(0.5))
    expected = torch.tensor([8 / 36.5**0.5, 3 / 36.5**0.5, -1.0, 1.0]) / 2
    torch.testing.assert_close(found.flatten(), expected)


@pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS])
def test_the_layer_is_the_class(kv_heads: int) -> None:
    config = DiffLlamaConfig(
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=WIDTH,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = DiffLlamaAttention(config, layer_idx=1).double().eval()
    layer = Attention.from_layout(
        theirs.state_dict(),
        layout="diffllama",
        num_heads=HEADS,
        differential=DifferentialRule(usual_init(1), config.rms_norm_eps),
        accept=["rotary"],
    )
    x = torch.randn(2, 17, HEADS * WIDTH, dtype=torch.float64)
    turns = torch.ones(1, 17, WIDTH).double(), torch.zeros(1, 17, WIDTH).double()
    hidden = torch.full((17, 17), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        old, _ = theirs(x, turns, hidden)
        found = layer(x, mask=Mask.causal())
        torch.testing.assert_close(found, old, rtol=0, atol=1e-6)  # their factor is float32
        cache = layer.cache(batch=2, length=17)
        steps = [layer(s, mask=Mask.causal(), cache=cache) for s in x.split([5, 1, 11], 1)]
        torch.testing.assert_close(torch.cat(steps, 1), found)
        heads = layer.head_outputs(x, mask=Mask.causal())
        parts = layer.contributions(x, mask=Mask.causal()).sum(1)
    assert heads.shape == (2, HEADS, 17, WIDTH)
    torch.testing.assert_close(parts, found)
    back = layer.to_layout("diffllama", accept=["rotary"])
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())


RULE = DifferentialRule(0.2, 1e-5)
REFUSED = {
    "an odd number of kv heads": (
        lambda: Attention(24, 6, num_kv_heads=3, differential=RULE),
        OptionError,
        ["num_kv_heads=3", "an even number of kv heads"],
    ),
    "a latent": (
        lambda: Attention(24, 4, head_dim=8, latent=Latent(4, 2), differential=RULE),
        OptionError,
        ["no latent"],
    ),
    "another type": (
        lambda: Attention(24, 4, differential=0.2),
        OptionError,
        ["differential=0.2", "DifferentialRule"],
    ),
    "another order of heads": (
        lambda: cut_layer(LayerCut(4, 4).keep([1, 0, 2, 3]), Attention(24, 4, differential=RULE)),
        OptionError,
        ["differential attention, which is of pairs"],
    ),
    "tensors without the option": (
        lambda: Attention.from_layout(
            Attention(24, 4, differential=RULE).state_dict(),
            layout="headwise",
            num_heads=4,
            scale=None,
        ),
        OptionError,
        ["lambda_q1", "0.8 - 0.6 exp(-0.3 layer)"],
    ),
}
test_what_does_not_fit_is_refused = refusals(REFUSED)
