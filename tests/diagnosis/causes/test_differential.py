"""The factor of differential attention, named on faults that are made without the search."""

import copy

import pytest
import torch

from headwise import Attention, Rotary, compare
from headwise.function import DifferentialRule
from headwise.function.differential import usual_init
from headwise.function.weights import LAMBDAS
from tests.quick import others_extra

NAME = "factor of a difference"


FAULTS, SHOWS = ("init", "alone", "lambda_q1", "lambda_k2"), ("stages", "outputs")


def layer(init: float = usual_init(1)) -> Attention:
    torch.manual_seed(5)
    rule = DifferentialRule(init=init, eps=1e-5)
    made = Attention(36, 6, num_kv_heads=2, head_dim=8, differential=rule, rotary=Rotary())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.4 if name in LAMBDAS else 0.2))
    return made


def spoilt(fault: str) -> Attention:
    """A layer with one of four faults."""
    if fault == "init":
        wrong = layer(usual_init(2))
        wrong.load_state_dict(layer().state_dict())
        return wrong
    wrong = copy.deepcopy(layer())
    with torch.no_grad():
        if fault == "alone":
            for name in LAMBDAS:
                getattr(wrong, name).zero_()
        else:
            getattr(wrong, fault).mul_(-0.7)
    return wrong


@pytest.mark.parametrize(
    ("fault", "shows"),
    others_extra(
        [(fault, shows) for shows in SHOWS for fault in FAULTS],
        ("init", "outputs"),
        quick=[(fault, "stages") for fault in FAULTS],
    ),
)
def test_a_wrong_factor_is_named_first(fault: str, shows: str) -> None:
    right, wrong = layer(), spoilt(fault)
    diagnosis = compare(wrong if shows == "stages" else (lambda x: wrong(x)), right)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert cause.name == NAME, str(diagnosis)
    dots = [(getattr(wrong, f"lambda_q{n}") * getattr(wrong, f"lambda_k{n}")).sum() for n in "12"]
    factor = (dots[0].exp() - dots[1].exp()).item() + usual_init(1)
    if fault == "init":
        assert cause.parameters["lambda_init"] == pytest.approx(usual_init(2), abs=1e-12)
    elif fault != "alone":
        assert cause.parameters["factor"] == pytest.approx(factor, rel=1e-3)


def test_a_layer_with_its_factor_is_the_same() -> None:
    assert compare(copy.deepcopy(layer()), layer())
