"""Causes of latent attention, named on faults that are made without them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Attention, Rotary, compare, verify
from headwise.function import Latent, LinearScaling, YarnScaling
from headwise.identify.results import Verdict
from tests.quick import others_extra, others_slow

EMBED, HEADS, PLAIN, SHARED = 40, 4, 10, 6
RULE = Latent(rank=11, shared_width=SHARED, query_rank=13)
ROTARY = Rotary(pairing="interleaved")
YARN = YarnScaling(40.0, 32, mscale=1.0, mscale_all_dim=0.5)
USUAL = (PLAIN + SHARED) ** -0.5


def scale_of(mscale: float) -> float:
    return USUAL * (0.1 * mscale * torch.tensor(40.0, dtype=torch.float64).log().item() + 1) ** 2


def layer(**options: Any) -> Attention:
    given: dict[str, Any] = {"latent": RULE, "rotary": ROTARY, **options}
    made = Attention(EMBED, HEADS, head_dim=PLAIN + SHARED, value_dim=7, **given)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(made.named_parameters()):
            drawn = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name
            parameter.copy_(1 + drawn / 4 if is_norm else 1.5 * drawn * parameter.shape[-1] ** -0.5)
    return made


YARNED = {"rotary": replace(ROTARY, scaling=YARN)}
# fault -> options of the right layer, of the wrong one, and the cause.
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "norm": ({}, {"latent": replace(RULE, normed=False)}, "latent norm missing"),
    "eps": ({}, {"latent": replace(RULE, eps=0.1)}, "latent norm eps"),
    "factor": ({"latent": replace(RULE, scaled=True)}, {}, "latent factor missing"),
    "no factor": ({}, {"latent": replace(RULE, scaled=True)}, "latent factor unexpected"),
    "pairing": ({}, {"rotary": Rotary()}, "rotary pairing"),
    "theta": ({}, {"rotary": replace(ROTARY, theta=500.0)}, "rotary theta"),
    "unrotated": ({}, {"rotary": None}, "rotary missing"),
    "mscale": ({**YARNED, "scale": scale_of(0.5)}, YARNED, "mscale missing"),
    "mscale too much": (YARNED, {**YARNED, "scale": scale_of(0.5)}, "mscale unexpected"),
    "mscale for all dim": (
        {**YARNED, "scale": scale_of(0.5)},
        {**YARNED, "scale": scale_of(1.0)},
        "mscale for mscale_all_dim",
    ),
    "scale": ({}, {"scale": 0.4}, "scale"),
    "scaling": ({}, {"rotary": replace(ROTARY, scaling=LinearScaling(2.0))}, "rotary scaling kind"),
}


def pair(fault: str) -> tuple[Attention, Attention]:
    right, wrong, _ = FAULTS[fault]
    first, second = layer(**wrong), layer(**right)
    state = second.state_dict()
    first.load_state_dict({name: state[name] for name in first.state_dict()})
    return first, second


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_of_two_layers_is_named(fault: str) -> None:
    first, second = pair(fault)
    diagnosis = compare(first, second)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert [each.name for each in diagnosis.function.causes] == [FAULTS[fault][2]], str(diagnosis)


@pytest.mark.parametrize("fault", ["norm", "factor", "pairing", "mscale", "mscale for all dim"])
def test_the_cause_of_a_function_is_named(fault: str) -> None:
    """Of which nothing but outputs is known."""
    first, second = pair(fault)

    def run(x: Tensor) -> Tensor:
        return first.double()(x.double())

    diagnosis = compare(run, second.double(), torch.randn(2, 12, EMBED))
    assert [each.name for each in diagnosis.function.causes] == [FAULTS[fault][2]], str(diagnosis)


def behind(layer: Attention) -> Attention:
    """The layer of code that takes the first channels of a head where the last ones turn."""
    rows = layer.q_proj.weight.detach().unflatten(0, (HEADS, -1))
    with torch.no_grad():
        layer.q_proj.weight.copy_(rows.roll(-SHARED, 1).flatten(0, 1))
    return layer


def test_rotated_channels_at_the_other_end_are_named() -> None:
    right, wrong = layer(q_bias=False), behind(layer(q_bias=False))
    diagnosis = compare(wrong, right)
    assert diagnosis.function.causes[0].name == "rotated channels behind the others", str(diagnosis)
    states = (each.to_layout("canonical", accept=["rotary"]) for each in (wrong, right))
    report = verify(
        *states,
        first_layout="canonical",
        second_layout="canonical",
        heads=HEADS,
        rotary_width=SHARED,
    )
    assert "rotated channels behind the others" in str(report)


@pytest.mark.parametrize(("width", "cause"), [(4, "rotary partial width")])
def test_a_shared_key_that_turns_in_part_is_named(width: int, cause: str) -> None:
    """A width of the shared key that the code takes for another."""
    right, wrong = layer(), layer()
    assert wrong.rotary is not None
    wrong.rotary = replace(wrong.rotary, width=width)
    diagnosis = compare(wrong, right)
    assert [each.name for each in diagnosis.function.causes] == [cause], str(diagnosis)


@pytest.mark.parametrize("scale", [None, USUAL], ids=["of the new width", "of the old"])
@pytest.mark.parametrize("shows", others_slow(["stages", "outputs"], "stages"))
def test_a_shared_key_of_which_a_part_is_read_is_named(shows: str, scale: float | None) -> None:
    """Slices by another rope width: both sides run on the same input."""
    right, width = layer(), SHARED - 2
    given: dict[str, Any] = {"latent": replace(RULE, shared_width=width), "rotary": ROTARY}
    wrong = Attention(EMBED, HEADS, head_dim=PLAIN + width, value_dim=7, scale=scale, **given)
    kept = [*range(width), *range(SHARED, PLAIN + SHARED)]
    state = right.state_dict()
    for name, x in state.items():
        if name.startswith("shared_k"):
            state[name] = x[:width]
        elif name.startswith("q_proj"):
            state[name] = x.unflatten(0, (HEADS, -1))[:, kept].flatten(0, 1)
    wrong.load_state_dict(state)
    side = wrong if shows == "stages" else (lambda x: wrong(x))
    diagnosis = compare(side, right)
    names = [each.name for each in diagnosis.function.causes]
    more = ["scale"] if scale and shows == "stages" else []
    assert names == ["width of the shared key", *more], str(diagnosis)
    assert diagnosis.function.causes[0].parameters["width"] == width


@pytest.mark.parametrize(
    "name",
    others_extra(["wa", "wc", "wr", "wk", "wv", "wq", "wo", "c_norm", "a_norm"], quick=["wr"]),
)
def test_weights_of_another_layer_are_of_their_stage(name: str) -> None:
    from headwise.layers.conversion import layer_state_dict_from_canonical, state_per_head

    right, wrong = layer(rotary=None), layer(rotary=None)
    state = state_per_head(right, right.state_dict())
    state[name] = state[name] + 0.3 * torch.randn_like(state[name])
    wrong.load_state_dict(layer_state_dict_from_canonical(state, wrong))
    diagnosis = compare(wrong, right)
    stages = {"wa": "q", "wq": "q", "a_norm": "q", "wc": "c", "c_norm": "c", "wr": "k_r"}
    stages |= {"wk": "k", "wv": "v", "wo": "output"}
    assert diagnosis.function is not None
    assert [each.stage for each in diagnosis.function.parted] == [stages[name]], str(diagnosis)
