"""Each initialisation is its source's: the same numbers where it has such a layer, else the same
distribution; and the same scores at any scale."""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model, T5Config, T5EncoderModel

from headwise import Attention
from headwise.errors import OptionError
from headwise.function import stages
from headwise.layers.base import Source, initialise_projections
from headwise.layers.distance import Alibi, PositionBias, T5Bias
from headwise.layers.norm import QKNorm

SOURCES: tuple[Source, ...] = get_args(Source)
NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")
EMBED, SOURCE, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, OUT = 240, 198, 6, 2, 30, 21, 170
SIZES: dict[str, Any] = {
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "value_dim": VALUE_DIM,
    "out_dim": OUT,
    "source_dim": SOURCE,
}
# A bound that a right draw misses once in a billion runs: of the distribution function
# (Dvoretzky, Kiefer and Wolfowitz), and of a mean, in its standard deviations.
MISS, DEVIATIONS = 1e-9, 6.0


def redrawn(layer: Attention) -> Attention:
    torch.manual_seed(5)
    layer.reset_parameters()
    return layer


def weights(layer: Attention) -> list[Tensor]:
    return [getattr(layer, name).weight for name in NAMES]


def biases(layer: Attention) -> list[Tensor]:
    return [getattr(layer, name).bias for name in NAMES]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


# ---- the same numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_torchs_packed_projection(bias: bool) -> None:
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(40, 4, bias=bias)
    after = torch.rand(3)
    options = dict.fromkeys(["q_bias", "k_bias", "v_bias", "out_bias"], bias)
    ours = redrawn(Attention(40, 4, init="torch-packed", **options))
    assert torch.equal(torch.rand(3), after)  # and no number more is drawn
    assert_equal(weights(ours), [*theirs.in_proj_weight.chunk(3), theirs.out_proj.weight])
    if bias:
        assert_equal(biases(ours), [*theirs.in_proj_bias.chunk(3), theirs.out_proj.bias])


def test_torchs_separate_projections() -> None:
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(40, 4, kdim=33, vdim=33)
    ours = redrawn(Attention(40, 4, source_dim=33, init="torch-separate"))
    inputs = [theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight]
    assert_equal(weights(ours), [*inputs, theirs.out_proj.weight])
    assert_equal(biases(ours), [*theirs.in_proj_bias.chunk(3), theirs.out_proj.bias])


def test_einops_page() -> None:
    torch.manual_seed(5)
    inputs = [nn.Linear(40, 6 * width) for width in (10, 10, 7)]
    for linear, width in zip(inputs, (10, 10, 7), strict=True):
        nn.init.normal_(linear.weight, std=(2 / (40 + width)) ** 0.5)
    fc = nn.Linear(6 * 7, 40)
    nn.init.xavier_normal_(fc.weight)
    ours = redrawn(Attention(40, 6, head_dim=10, value_dim=7, init="einops"))
    assert_equal(weights(ours), [linear.weight for linear in (*inputs, fc)])
    assert_equal(biases(ours), [linear.bias for linear in (*inputs, fc)])


def test_transformers_t5() -> None:
    model = T5EncoderModel(
        T5Config(d_model=40, num_heads=6, d_kv=10, d_ff=8, num_layers=1, vocab_size=11)
    )
    theirs = model.encoder.block[0].layer[0].SelfAttention
    torch.manual_seed(5)
    model._init_weights(theirs)
    assert theirs.scaling == 1.0
    ours = redrawn(Attention(40, 6, head_dim=10, scale=theirs.scaling, init="t5"))
    assert_equal(weights(ours), [getattr(theirs, name).weight for name in "qkvo"])
    assert not any(bias.any() for bias in biases(ours))


# ---- the same distribution ---------------------------------------------------------------------


def deviations(source: Source) -> tuple[float, float, float, float]:
    """The standard deviations of the four weights, by the formulas of their sources."""
    q, k, v = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * VALUE_DIM
    merged = HEADS * VALUE_DIM

    def xavier(inner: int, outer: int) -> float:
        return math.sqrt(2 / (inner + outer))

    table: dict[Source, tuple[float, float, float, float]] = {
        "torch-packed": (
            xavier(EMBED, q + k + v),
            xavier(SOURCE, q + k + v),
            xavier(SOURCE, q + k + v),
            1 / math.sqrt(3 * merged),
        ),
        "torch-separate": (
            xavier(EMBED, q),
            xavier(SOURCE, k),
            xavier(SOURCE, v),
            1 / math.sqrt(3 * merged),
        ),
        "einops": (
            xavier(EMBED, HEAD_DIM),
            xavier(SOURCE, HEAD_DIM),
            xavier(SOURCE, VALUE_DIM),
            xavier(merged, OUT),
        ),
        "gpt2": (0.02, 0.02, 0.02, 0.02),
        "t5": (
            1 / math.sqrt(EMBED * HEAD_DIM),
            1 / math.sqrt(SOURCE),
            1 / math.sqrt(SOURCE),
            1 / math.sqrt(merged),
        ),
    }
    return table[source]


def scale_of(source: Source) -> float:
    return 1.0 if source == "t5" else HEAD_DIM**-0.5


def assert_normal(weight: Tensor, deviation: float) -> None:
    assert_distributed(weight, deviation, lambda x: torch.special.ndtr(x / deviation), 3.0)


def assert_uniform(weight: Tensor, deviation: float) -> None:
    bound = math.sqrt(3) * deviation
    assert weight.abs().max() <= bound * (1 + torch.finfo(torch.float32).eps)
    assert_distributed(weight, deviation, lambda x: (x / bound + 1).clamp(0, 2) / 2, 1.8)


def assert_distributed(
    weight: Tensor, deviation: float, cdf: Callable[[Tensor], Tensor], fourth_moment: float
) -> None:
    drawn = weight.detach().double().flatten().sort().values
    n = len(drawn)
    below = torch.arange(n) / n
    furthest = torch.maximum(cdf(drawn) - below, below + 1 / n - cdf(drawn)).max()
    assert furthest <= math.sqrt(math.log(2 / MISS) / (2 * n))
    off = (drawn / deviation).square().mean() - 1
    assert abs(off) <= DEVIATIONS * math.sqrt((fourth_moment - 1) / n)


@pytest.mark.parametrize("source", SOURCES)
def test_sizes_that_the_source_does_not_have(source: Source) -> None:
    layer = Attention(EMBED, HEADS, **SIZES, init=source, scale=scale_of(source))
    holds = assert_uniform if source.startswith("torch") else assert_normal
    for weight, deviation in zip(weights(layer), deviations(source), strict=True):
        holds(weight, deviation)
    if source == "einops":
        for name in NAMES:
            linear = getattr(layer, name)
            assert 0 < linear.bias.abs().max() <= linear.in_features**-0.5
    else:
        assert not any(bias.any() for bias in biases(layer))


def test_transformers_gpt2() -> None:
    config = GPT2Config(
        n_embd=240, n_head=6, n_layer=3, vocab_size=11, bos_token_id=None, eos_token_id=None
    )
    theirs = GPT2Model(config).h[1].attn
    ours = Attention(240, 6, init="gpt2")
    for weight in weights(ours):
        assert_normal(weight, 0.02)
    initialise_projections(ours, "gpt2", num_layers=config.n_layer)
    inputs, residual = (
        [theirs.c_attn.weight, *weights(ours)[:3]],
        [theirs.c_proj.weight, ours.out_proj.weight],
    )
    for weight in inputs:
        assert_normal(weight, config.initializer_range)
    for weight in residual:
        assert_normal(weight, config.initializer_range / math.sqrt(2 * config.n_layer))
    for bias in (theirs.c_attn.bias, theirs.c_proj.bias, *biases(ours)):
        assert not bias.any()


def test_these_bounds_can_fail() -> None:
    normal, uniform = torch.randn(12_000), torch.rand(12_000) * 2 - 1
    assert_normal(normal, 1.0)
    assert_uniform(uniform, 3**-0.5)
    for check, drawn, deviation in (
        (assert_normal, normal * 1.1, 1.0),
        (assert_normal, normal + 0.2, 1.0),
        (assert_normal, uniform * 3**0.5, 1.0),
        (assert_uniform, uniform * 0.9, 3**-0.5),
    ):
        with pytest.raises(AssertionError):
            check(drawn, deviation)


# ---- the same scores at another scale ----------------------------------------------------------


SCALES = (None, 1.0, 0.05, -0.3)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("source", SOURCES)
def test_another_scale_is_made_up_for_by_the_queries_alone(
    source: Source, scale: float | None
) -> None:
    theirs, ours = (
        redrawn(Attention(EMBED, HEADS, **SIZES, init=source, scale=s, dtype=torch.float64))
        for s in (scale_of(source), scale)
    )
    factor = scale_of(source) / (HEAD_DIM**-0.5 if scale is None else scale)
    for name in NAMES:
        own = factor if name == "q_proj" else 1.0
        expected = [parameter * own for parameter in getattr(theirs, name).parameters()]
        assert_equal(list(getattr(ours, name).parameters()), expected)
    x, y = (torch.randn(2, n, width, dtype=torch.float64) for n, width in ((5, EMBED), (7, SOURCE)))
    found, wanted = (scores(layer, x, y) for layer in (ours, theirs))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.abs_()
    # Every product and sum of a score, rounded; the factor of the queries is rounded once more.
    rounding = (EMBED + SOURCE + HEAD_DIM + 6) * torch.finfo(torch.float64).eps
    assert ((found - wanted).abs() <= rounding * scores(theirs, x.abs(), y.abs())).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("source", SOURCES)
def test_scores_of_unit_normal_tokens_are_as_wide_as_the_sources(
    source: Source, scale: float | None
) -> None:
    tokens, biased = 20_000, {"q_bias": False, "k_bias": False}
    layer = Attention(EMBED, HEADS, **SIZES, **biased, init=source, scale=scale)
    layer.requires_grad_(False)
    # One query and one key a sequence, so that every pair of tokens is a draw of its own.
    found = scores(layer, torch.randn(tokens, 1, EMBED), torch.randn(tokens, 1, SOURCE))
    of_q, of_k, *_ = deviations(source)
    variance = (scale_of(source) * of_q * of_k) ** 2 * EMBED * SOURCE * HEAD_DIM
    # A score is a product M of two normal tokens. What one draw of M's weights can differ by, in
    # all heads that do not share keys (|M|**2 of normal weights, whose fourth moment is largest):
    rows, columns = EMBED * HEAD_DIM, SOURCE * HEAD_DIM
    of_weights = variance * math.sqrt(2 * (SOURCE + HEAD_DIM + 1) / (rows * SOURCE) + 2 / columns)
    # ... and a mean of as many squared scores: their variance is 2 |M|**4 + 6 tr (M.T M)**2.
    matrices = layer.q_proj.weight.unflatten(0, (HEADS, -1)).mT @ stages.repeat_kv_heads(
        layer.k_proj.weight.unflatten(0, (1, KV_HEADS, -1)), heads=HEADS
    )
    gram = matrices.mT @ matrices
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    spread = (2 * size.square() + 6 * gram.square().sum((-2, -1))).sqrt()
    own = scale_of_layer(layer) ** 2
    of_tokens = float(own * spread.mean()) / math.sqrt(tokens)
    allowed = DEVIATIONS * (of_weights / math.sqrt(KV_HEADS) + of_tokens)
    assert abs(float(found.square().mean()) - variance) <= allowed
    assert allowed < variance / 4  # the bound says something: a factor of 1.13 in the scores fails


def scores(layer: Attention, x: Tensor, source: Tensor) -> Tensor:
    matrix = layer.matrix(x, source)
    return stages.scores(matrix.q, matrix.k, scale=matrix.scale)


def scale_of_layer(layer: Attention) -> float:
    return HEAD_DIM**-0.5 if layer.scale is None else layer.scale


def test_a_scale_of_zero_is_left_alone() -> None:
    zero, one = (redrawn(Attention(40, 4, scale=s, init="t5")) for s in (0.0, 1.0))
    assert_equal(weights(zero), weights(one))


# ---- through the layer -------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, Alibi(), T5Bias(buckets=8, max_distance=20)])
@pytest.mark.parametrize("norm", [None, QKNorm(kind="layer"), QKNorm(over="width", one_plus=True)])
@pytest.mark.parametrize("source", ["torch-packed", "einops"])
def test_a_layer_made_on_the_meta_device(
    source: Source, norm: QKNorm | None, bias: PositionBias | None
) -> None:
    options: dict[str, Any] = {"init": source, "qk_norm": norm, "score_bias": bias, "sink": True}
    made = Attention(40, 4, **options, device="meta")
    assert all(parameter.is_meta for parameter in made.parameters())
    made = made.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(torch.nan)  # memory may hold anything
    whole = redrawn(Attention(40, 4, **options))
    state, expected = redrawn(made).state_dict(), whole.state_dict()
    assert list(state) == list(expected)
    assert_equal(list(state.values()), list(expected.values()))
    x = torch.randn(3, 24, 40)
    assert torch.equal(made(x), whole(x))


def test_reset_parameters_is_what_the_constructor_does() -> None:
    fresh = Attention(40, 4, sink=True, qk_norm=QKNorm(), score_bias=T5Bias())
    trained = Attention(40, 4, sink=True, qk_norm=QKNorm(), score_bias=T5Bias())
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.normal_()
    state = redrawn(trained).state_dict()
    assert_equal(list(state.values()), list(redrawn(fresh).state_dict().values()))
    assert torch.equal(fresh.q_norm.weight, torch.ones(10))
    assert not fresh.sink.any()
    assert not fresh.score_bias.relative_attention_bias.weight.any()


@pytest.mark.parametrize(
    ("source", "num_layers", "saw"),
    [
        ("xavier", None, r"init='xavier'\n"),
        ("t5", 12, "init='t5' with num_layers=12"),
        ("torch-packed", 3, "init='torch-packed' with num_layers=3"),
        ("gpt2", 0, "init='gpt2' with num_layers=0"),
        ("gpt2", -1, "init='gpt2' with num_layers=-1"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_what_is_no_initialisation_is_refused(source: Any, num_layers: Any, saw: str) -> None:
    layer = redrawn(Attention(40, 4))
    before = [parameter.clone() for parameter in layer.parameters()]
    with pytest.raises(OptionError, match=saw) as error:
        initialise_projections(layer, source, num_layers=num_layers)
    assert all(name in error.value.needed for name in SOURCES)
    assert_equal(list(layer.parameters()), before)


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_layer_of_no_initialisation_is_refused() -> None:
    with pytest.raises(OptionError, match="init='orthogonal'"):
        Attention(40, 4, init="orthogonal")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1e-39, torch.float32), (-1e-39, torch.float32), (1e-5, torch.float16), (1e9, torch.float16)],
)
def test_weights_at_an_extreme_scale_are_numbers(scale: float, dtype: torch.dtype) -> None:
    layer = Attention(EMBED, HEADS, **SIZES, scale=scale, dtype=dtype)
    assert all(p.isfinite().all() for p in layer.parameters())
    assert layer.q_proj.weight.ne(0).any()
    x, source = torch.randn(1, 3, EMBED).to(dtype), torch.randn(1, 5, layer.source_dim).to(dtype)
    assert layer(x, source).isfinite().all()
