"""Temperature, clip, changes of values and norms of head outputs: closed forms and refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Attention, Mask, Rotary
from headwise.errors import OptionError
from headwise.function.spec import AttentionSpec, NormRule, TemperatureRule, ValueRule
from headwise.function.temperature import query_factors
from headwise.layers.norm import QKNorm

BATCH, HEADS, KV_HEADS, LENGTH, EMBED, HEAD_DIM, VALUE_DIM = 3, 6, 2, 24, 40, 10, 7


def layer(**options: Any) -> Attention:
    torch.manual_seed(0)
    sizes = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM}
    made = Attention(EMBED, HEADS, **sizes | options, dtype=torch.float64)
    with torch.no_grad():
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made.requires_grad_(False)


def tokens(length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, length, EMBED, generator=generator, dtype=torch.float64)


# ---- temperature -------------------------------------------------------------------------------

PLACES = torch.tensor([8190, 8191, 8192])


@pytest.mark.parametrize(
    ("rule", "factors"),
    [
        (TemperatureRule(0.1, 8192, first=1), (1.0, 1.069314718, 1.069314718)),
        (TemperatureRule(0.1, 8192), (1.0, 1.0, 1.069314718)),
        (TemperatureRule(0.1, 8192, first=1, kind="smooth"), (1.0, 1.0, 1.000012206)),
    ],
)
def test_factors_of_queries(rule: TemperatureRule, factors: tuple[float, ...]) -> None:
    found = query_factors(rule, PLACES, torch.float64)[:, 0].tolist()
    assert [round(x, 9) for x in found] == [*factors]


def test_a_temperature_is_a_scale_of_each_query() -> None:
    rule, x = TemperatureRule(0.4, 5), tokens()
    warm, plain = layer(temperature=rule).matrix(x), layer().matrix(x)
    factors = [1 + 0.4 * float(torch.tensor(1.0 + n // 5).log()) for n in range(LENGTH)]
    expected = plain.q * torch.tensor(factors, dtype=torch.float64)[:, None]
    torch.testing.assert_close(warm.q, expected, rtol=1e-7, atol=0)
    assert torch.equal(warm.k, plain.k)


def test_positions_count_and_not_columns() -> None:
    """A padded sequence has the queries that it has alone, and positions may be given."""
    made, x, lengths = layer(temperature=TemperatureRule(0.4, 5)), tokens(), [24, 3, 17]
    for side in ("left", "right"):
        counts = torch.tensor(lengths)
        mask = Mask.lengths(queries=counts, keys=counts, side=side) & Mask.causal()
        found = made(x, mask=mask)
        for row, n in enumerate(lengths):
            real = slice(LENGTH - n, LENGTH) if side == "left" else slice(0, n)
            alone = made(x[row : row + 1, real], mask=Mask.causal())
            torch.testing.assert_close(found[row : row + 1, real], alone, rtol=1e-12, atol=1e-14)
    late = made.matrix(x, positions=torch.arange(LENGTH) + 30)
    shifted = query_factors(made.temperature, torch.arange(LENGTH) + 30, torch.float64)
    assert torch.equal(late.q, layer().matrix(x).q * shifted)


def test_steps_with_a_cache_have_the_temperature_of_their_place() -> None:
    options = {"temperature": TemperatureRule(0.4, 5), "rotary": Rotary(), "clip": 0.5}
    made, x = layer(**options, values=ValueRule(1e-6, 0.7)), tokens()
    cache, whole = made.cache(batch=BATCH, length=LENGTH), made(x, mask=Mask.causal())
    parts = (slice(0, 13), slice(13, 14), slice(14, LENGTH))
    steps = [made(x[:, part], mask=Mask.causal(), cache=cache) for part in parts]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-12, atol=1e-14)


# ---- values ------------------------------------------------------------------------------------


def test_a_factor_of_values_is_one_of_head_outputs() -> None:
    x = tokens()
    found = layer(values=ValueRule(factor=0.707)).head_outputs(x)
    torch.testing.assert_close(found, 0.707 * layer().head_outputs(x), rtol=1e-12, atol=1e-15)


def test_normalised_values_have_a_root_mean_square_of_1() -> None:
    """A query that attends to one key has its value as its outputs."""
    x = tokens(1)
    found = layer(values=ValueRule(eps=1e-30)).head_outputs(x)
    ones = torch.ones(BATCH, HEADS, 1, dtype=torch.float64)
    torch.testing.assert_close(found.square().mean(-1), ones, rtol=1e-13, atol=0)
    stages = layer(values=ValueRule(eps=1e-6)).stages(x)
    assert torch.equal(stages["v"], layer().stages(x)["v"])  # as projected


def test_a_large_clip_is_no_clip_and_a_small_one_bounds_all() -> None:
    x, rotary = tokens(), Rotary()
    assert torch.equal(layer(clip=1e3, rotary=rotary)(x), layer(rotary=rotary)(x))
    made = layer(clip=0.25, rotary=rotary)
    stages = made.stages(x)
    for name in ("q after norm", "k after norm"):
        assert float(stages[name].abs().max()) == 0.25
    assert float(made.head_outputs(x).abs().max()) <= 0.25
    assert float(stages["q"].abs().max()) > 0.25


# ---- head outputs ------------------------------------------------------------------------------


def test_a_norm_of_head_outputs_is_over_all_heads() -> None:
    made, x = layer(output_norm=QKNorm(over="width", eps=1e-6)), tokens()
    merged = layer().head_outputs(x).transpose(1, 2).flatten(2)
    plain = layer()
    plain.load_state_dict({n: w for n, w in made.state_dict().items() if "o_norm" not in n})
    merged = plain.head_outputs(x).transpose(1, 2).flatten(2)
    root = (merged.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (merged / root * made.o_norm.weight).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    torch.testing.assert_close(made.head_outputs(x), expected, rtol=1e-12, atol=1e-14)
    total = made.contributions(x).sum(1) + made.out_proj.bias
    torch.testing.assert_close(total, made(x), rtol=1e-12, atol=1e-12)


def test_a_query_without_keys_has_outputs_of_0_under_a_layer_norm() -> None:
    made, x = layer(output_norm=QKNorm("layer", over="width")), tokens()
    lengths = torch.tensor([24, 0, 5])
    found = made(x, mask=Mask.lengths(queries=lengths, keys=lengths))
    assert torch.equal(found[1], made.out_proj.bias.expand(LENGTH, -1))
    assert torch.equal(found[2, 5:], made.out_proj.bias.expand(LENGTH - 5, -1))


@pytest.mark.parametrize("kind", ["head", "channel"])
def test_a_softplus_gate_of_zeros_is_the_logarithm_of_2(kind: str) -> None:
    made, x = layer(output_gate=f"{kind} softplus"), tokens()
    plain = layer()
    for parameter in made.gate_proj.parameters():
        parameter.zero_()
    plain.load_state_dict({n: w for n, w in made.state_dict().items() if "gate" not in n})
    halved = plain.head_outputs(x) * torch.tensor(2.0, dtype=torch.float64).log()
    torch.testing.assert_close(made.head_outputs(x), halved, rtol=1e-13, atol=0)


def test_a_norm_without_weight_has_no_parameters() -> None:
    made, x = layer(qk_norm=QKNorm(place="after", has_weight=False), rotary=Rotary()), tokens()
    assert not [name for name in made.state_dict() if "norm" in name]
    root = made.matrix(x).q.square().mean(-1).sqrt()
    torch.testing.assert_close(root, torch.ones_like(root), rtol=1e-4, atol=0)


# ---- descriptions and refusals -----------------------------------------------------------------


def test_words_of_a_description_are_read_back() -> None:
    spec = AttentionSpec(
        clip=8.0,
        values=ValueRule(eps=1e-6),
        output_norm=NormRule(over="width"),
        output_gate="head softplus",
        temperature=TemperatureRule(0.1, 8192),
    )
    words = spec.words()
    assert words["clip"] == "8"
    assert words["values"] == "rms over head"
    assert words["output_norm"] == "rms over width"
    assert words["output_gate"] == "head softplus"
    assert words["temperature"] == "by position"
    again = AttentionSpec.from_words(words).words()
    assert {name: again[name] for name in again if name != "temperature"} == {
        name: words[name] for name in words if name != "temperature"
    }
    assert again["temperature"] is None  # its numbers are those of the config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip": 0.0}, "clip=0.0"),
        ({"values": 0.7}, "a ValueRule"),
        ({"temperature": 0.1}, "a TemperatureRule"),
        ({"output_norm": QKNorm()}, "output_norm=QKNorm"),
        ({"output_gate": "softplus"}, '" softplus" behind it'),
        ({"source_dim": 33, "temperature": TemperatureRule(0.1, 5)}, "with source_dim=33"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Attention(EMBED, HEADS, head_dim=HEAD_DIM, **options)


def test_rules_out_of_range() -> None:
    with pytest.raises(OptionError, match="length=0"):
        TemperatureRule(0.1, 0)
    with pytest.raises(OptionError, match="kind="):
        TemperatureRule(0.1, 8, kind="linear")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="has_weight=False"):
        QKNorm(over="width", has_weight=False)
