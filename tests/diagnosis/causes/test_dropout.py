"""Dropout that is left on in a function: it is read off outputs, whatever draws it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import Attention, compare
from headwise.errors import OptionError
from headwise.identify.results import Verdict
from tests.quick import others_slow

WIDTH, HEADS = 40, 5
Drop = Callable[[Tensor], Tensor]


def port_of(layer: Attention, of_weights: Drop, of_output: Drop = lambda x: x) -> Drop:
    """The layer by hand, with what happens to its weights and to its output."""

    @torch.no_grad()
    def port(x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        k, v = (y.repeat_interleave(HEADS // y.shape[1], 1) for y in (k, v))
        weights = of_weights((q @ k.mT * (WIDTH // HEADS) ** -0.5).softmax(-1))
        return of_output(layer.out_proj((weights @ v).transpose(1, 2).flatten(2)))

    return port


@pytest.fixture(params=[HEADS, 1], ids=["all heads", "one kv head"])
def layer(request: pytest.FixtureRequest) -> Attention:
    torch.manual_seed(0)
    layer = Attention(WIDTH, HEADS, num_kv_heads=request.param)
    nn.init.normal_(layer.out_proj.bias)
    return layer


def drop_by_numpy(weights: Tensor) -> Tensor:
    kept = np.random.default_rng().random(tuple(weights.shape)) > 0.3
    return weights * torch.from_numpy(kept).float() / 0.7


WAYS = {
    "weights": ((lambda x: F.dropout(x, 0.1),), {"p": 0.1}),
    "numpy": ((drop_by_numpy,), {"p": 0.3}),
    "output": ((lambda x: x, lambda x: F.dropout(x, 0.2)), {"p of the output": 0.2}),
    "both": (
        (lambda x: F.dropout(x, 0.25), lambda x: F.dropout(x, 0.1)),
        {"p": 0.25, "p of the output": 0.1},
    ),
}


@pytest.mark.parametrize("way", others_slow(WAYS, "weights", "output"))
def test_dropout_of_a_function_is_named_with_its_rate(layer: Attention, way: str) -> None:
    drops, rates = WAYS[way]
    diagnosis = compare(port_of(layer, *drops), layer)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert cause.name == "dropout left on"
    assert cause.parameters == rates
    assert diagnosis.function.unprobed == ("longer inputs: compare again without dropout",)


def test_dropout_of_a_function_that_takes_a_mask(layer: Attention) -> None:
    """The runs that find how it reads masks are no second runs."""
    port = port_of(layer, *WAYS["output"][0])
    function = compare(lambda x, mask=None: port(x), layer).function
    assert function is not None
    assert function.cause_names == ["dropout left on"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "rates"), [("output", WAYS["output"][1]), ("both", {"p of both": 0.325})]
)
def test_rates_without_a_bias_that_tells_them_apart(
    layer: Attention, way: str, rates: dict[str, float]
) -> None:
    nn.init.zeros_(layer.out_proj.bias)
    function = compare(port_of(layer, *WAYS[way][0]), layer).function
    assert function is not None
    assert [cause.parameters for cause in function.causes] == [rates]


def test_the_generators_of_the_caller_are_left_as_they_were(layer: Attention) -> None:
    port = port_of(layer, lambda x: x + 0.01 * torch.randn_like(x))
    torch.manual_seed(3)
    np.random.seed(3)
    calls = [torch.get_rng_state()]
    with pytest.raises(OptionError, match=r"the same after torch\.manual_seed\(0\)"):
        compare(lambda x: calls.append(torch.get_rng_state()) or port(x), layer)
    expected = np.random.RandomState(3).random()
    assert np.random.random() == expected
    assert not torch.equal(calls[0], calls[2])


@pytest.mark.parametrize(
    "change",
    others_slow(
        [
            lambda x: x + 0.01 * torch.randn_like(x),  # noise
            lambda x: x * (torch.rand_like(x) > 0.1),  # without the factor of dropout
            lambda x: F.dropout(x, 0.1) ** 2,  # dropout, and another fault
        ]
    ),
)
def test_other_random_outputs_are_refused(layer: Attention, change: Drop) -> None:
    with pytest.raises(OptionError, match="random outputs: a second run") as error:
        compare(port_of(layer, change), layer)
    assert error.value.do.startswith("call eval() first")


def test_a_generator_that_no_seed_reaches_is_told(layer: Attention) -> None:
    generator = np.random.default_rng(0)

    def noisy(x: Tensor) -> Tensor:
        return x + float(generator.random())

    with pytest.raises(OptionError, match=r"after torch\.manual_seed\(0\) too"):
        compare(port_of(layer, noisy), layer)
