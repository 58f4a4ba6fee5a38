"""Two faults in a function of which outputs alone are known."""

import math

import pytest
import torch
from torch import Tensor

from headwise import Attention, Rotary, compare
from headwise.identify.comparison import FunctionComparison
from headwise.identify.results import Verdict
from headwise.layers import QKNorm
from tests.diagnosis.among import compare_among
from tests.diagnosis.test_stopped import interrupt_at
from tests.quick import others_extra

WIDTH, HEADS, HEAD_DIM = 36, 3, 12
NAMES = (
    "factor",
    "k and v exchanged",
    "merge without transpose",
    "norm weights of q and k exchanged",
    "order of fused rows",
    "q and k exchanged",
    "qk-norm eps",
    "qk-norm kind",
    "qk-norm weight offset",
    "rotary direction",
    "rotary scaling factor",
    "rotary theta",
    "scale",
    "sign",
    "softcap",
    "temperature by length",
    "window missing",
    "window off by one",
)
THETA, WINDOW, GAIN = 10_000.0, 20, 0.4
IN_ONE_HEAD = HEAD_DIM**-0.5 * torch.tensor([1.0, 0.4, 1.0])[:, None, None]


def rotated(x: Tensor, theta: float) -> Tensor:
    """Turn channel i with channel i + 6."""
    half = HEAD_DIM // 2
    angles = torch.arange(x.shape[2])[:, None] / theta ** (torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def port_of(
    layer: Attention,
    *,
    theta: float = THETA,
    scale: float | Tensor = HEAD_DIM**-0.5,
    window: int = WINDOW,
    gain: float = 1.0,
    merged: bool = True,
    cap: float = math.inf,
    is_key_normed: bool = True,
    roles: str = "qkv",
    norms: str = "qk",
    is_residual: bool = False,
    is_interleaved: bool = False,
) -> object:
    """The layer in plain torch; a query sees ``window`` keys, and norms have ``gain + w``.

    ``roles`` are those whose weights are loaded as q, k and v, and ``norms`` those whose norms are
    loaded for q and k.
    """
    state = {name: x.detach() for name, x in layer.state_dict().items()}

    def heads(x: Tensor, name: str) -> Tensor:
        rows = x @ state[f"{name}.weight"].T + state[f"{name}.bias"]
        return rows.view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2)

    def normed(x: Tensor, name: str) -> Tensor:
        weight = state[f"{name}.weight"] + (gain - 1.0)
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def port(x: Tensor) -> Tensor:
        q, k, v = (heads(x, f"{role}_proj") for role in roles)
        if is_interleaved:  # a channel of every head, then the next one
            v = v.transpose(1, 2).flatten(2).unflatten(2, (HEAD_DIM, HEADS)).permute(0, 3, 1, 2)
        k = normed(k, f"{norms[1]}_norm") if is_key_normed else k
        q, k = rotated(normed(q, f"{norms[0]}_norm"), theta), rotated(k, theta)
        scores = q @ k.mT * scale
        scores = scores if math.isinf(cap) else cap * (scores / cap).tanh()
        ahead = torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]
        seen = (ahead <= 0) & (ahead > -window)
        mixed = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        mixed = mixed.transpose(1, 2) if merged else mixed
        joined = mixed.reshape(*x.shape[:2], WIDTH)
        return joined @ state["out_proj.weight"].T + state["out_proj.bias"] + is_residual * x

    return port


@pytest.fixture(scope="module")
def layer() -> Attention:
    torch.manual_seed(1)
    made = Attention(
        WIDTH,
        HEADS,
        rotary=Rotary(theta=THETA),
        window=(WINDOW - 1, 0),
        qk_norm=QKNorm("rms", eps=1e-6),
    )
    with torch.no_grad():
        for norm in (made.q_norm, made.k_norm):
            norm.weight.copy_(1 + GAIN * torch.randn(HEAD_DIM))
        for role in "qkv":
            getattr(made, f"{role}_proj").bias.normal_(std=0.3)
    return made


def explained(layer: Attention, **faults: object) -> FunctionComparison:
    diagnosis = compare_among(NAMES, port_of(layer, **faults), layer)  # type: ignore[arg-type]
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert diagnosis.function is not None
    return diagnosis.function


def test_the_port_without_a_fault(layer: Attention) -> None:
    assert compare(port_of(layer), layer).verdict is Verdict.TO_ROUNDING  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_of_them_shows_where_the_other_cannot(layer: Attention) -> None:
    """No window is shorter than a few tokens."""
    causes = explained(layer, window=12, theta=5e5).causes
    assert {cause.name for cause in causes} == {"window off by one", "rotary theta"}
    [theta] = [cause for cause in causes if cause.name == "rotary theta"]
    assert theta.parameters["theta"] == pytest.approx(5e5, rel=1e-3)


@pytest.mark.extra
def test_two_numbers_are_fitted_at_once(layer: Attention) -> None:
    causes = explained(layer, scale=0.2, theta=5e5).causes
    assert {cause.name for cause in causes} == {"scale", "rotary theta"}
    numbers = {**causes[0].parameters, **causes[1].parameters}
    assert numbers["scale"] == pytest.approx(0.2, rel=1e-3)
    assert numbers["theta"] == pytest.approx(5e5, rel=1e-3)
    assert causes[-1].output_left < 1e-5


@pytest.mark.parametrize(
    ("faults", "names"),
    others_extra(
        [
            ({"norms": "kq", "scale": 0.2}, {"norm weights of q and k exchanged", "scale"}),
            ({"gain": 2.0, "theta": 5e5}, {"qk-norm weight offset", "rotary theta"}),
            ({"merged": False, "scale": 0.2}, {"merge without transpose", "scale"}),
            ({"cap": 2.0, "theta": 5e5}, {"softcap", "rotary theta"}),
            ({"is_key_normed": False, "theta": 5e5}, {"qk-norm kind", "rotary theta"}),
            ({"roles": "kqv", "scale": 0.2}, {"q and k exchanged", "scale"}),
            ({"roles": "kqv", "scale": IN_ONE_HEAD}, {"q and k exchanged", "scale"}),
            ({"roles": "qvk", "scale": 0.2}, {"k and v exchanged", "scale"}),
        ]
    ),
)
def test_both_show_in_every_input(
    layer: Attention, faults: dict[str, object], names: set[str]
) -> None:
    first, second = explained(layer, **faults).causes
    assert {first.name, second.name} == names


@pytest.mark.extra
def test_a_residual_hides_how_near_another_cause_is(layer: Attention) -> None:
    """Among all causes many are nearer to the outputs than either of the two."""
    port = port_of(layer, is_interleaved=True, is_residual=True)
    diagnosis = compare(port, layer)  # type: ignore[arg-type]
    assert diagnosis.function is not None
    names = set(diagnosis.function.cause_names)
    assert names == {"heads interleaved", "residual inside"}


@pytest.mark.extra
def test_three_faults_are_not_forced_into_two(layer: Attention) -> None:
    faulty = port_of(layer, scale=0.2, theta=5e5, gain=2.0, cap=2.0)
    diagnosis = compare_among(NAMES, faulty, layer)
    assert diagnosis.verdict is Verdict.UNKNOWN


@pytest.mark.extra
def test_outputs_that_are_all_zero_are_compared(layer: Attention) -> None:
    """A cause explains the smallest input; the other inputs are gone."""
    port = port_of(layer, scale=0.2)

    def of_few_tokens(x: Tensor) -> Tensor:
        return port(x) * (x.shape[1] <= 2)  # type: ignore[operator, no-any-return]

    progress = interrupt_at("trying pairs with scale")
    diagnosis = compare(of_few_tokens, layer, progress=progress)
    assert diagnosis.function is not None
    assert diagnosis.function.stopped
    assert diagnosis.verdict is Verdict.UNKNOWN
