"""Cases of `Attention`: options at random, its outputs and its gradients against the oracle."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise import Attention, Rotary
from headwise.function import Latent
from headwise.function.rotary import axes_of_sections
from headwise.function.scaling import (
    DynamicScaling,
    LinearScaling,
    LongScaling,
    ProportionalScaling,
)
from headwise.function.spec import DifferentialRule, TemperatureRule, ValueRule
from headwise.layers.distance import Alibi, DebertaBias, T5Bias
from headwise.layers.norm import QKNorm
from headwise.testing import Budget
from tests.fuzz import oracle_layers
from tests.fuzz.draw import DTYPES, Chance, Shaping, add_biases, add_masks, plain
from tests.fuzz.findings import DifferenceError, within
from tests.fuzz.matrix_cases import describing, tiled
from tests.fuzz.oracle import Array
from tests.layers import reference

MOSTLY_EXACT = (torch.float64, torch.float64, *DTYPES)


@dataclass
class Drawn:
    """A layer and the options that the oracle needs."""

    layer: Attention
    options: dict[str, Any]
    said: str
    given: dict[str, Any]  # to the constructor

    def parameters(self) -> dict[str, Array]:
        return {name: plain(x) for name, x in self.layer.state_dict().items()}


def draw_layer(
    chance: Chance, dtype: torch.dtype, *, decodes: bool = False, told: bool = False
) -> Drawn:
    """A layer with parameters none of which is 0 or 1.

    ``decodes``: no query sees a later key. ``told``: calls may be given positions.
    """
    kv_heads = chance.choose((1, 2, 3))
    heads, head_dim = kv_heads * chance.choose((1, 2, 3)), chance.choose((10, 8, 4))
    embed_dim = chance.choose((12, 20, 33))
    given: dict[str, Any] = {
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": chance.choose((None, 7, 16)),
        "out_dim": chance.choose((None, 17)),
        "scale": chance.choose((None, None, 0.2)),
        "softcap": chance.choose((None, None, 3.0)),
        "sink": chance.maybe(0.3),
        "output_gate": chance.choose((None, None, "head", "channel", "channel softplus")),
        "clip": chance.choose((None, None, None, 0.6)),
        **{f"{name}_bias": chance.maybe(0.7) for name in ("q", "k", "v", "out", "gate")},
    }
    options: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads}
    options |= {name: given[name] for name in ("scale", "softcap", "clip", "output_gate")}
    has_latent = chance.maybe(0.25)
    if has_latent:
        _draw_latent(chance, given, options)
    elif chance.maybe(0.3):
        eps, factor = chance.choose((None, 1e-6)), chance.choose((1.0, 0.7))
        given["values"], options["values"] = ValueRule(eps, factor), (eps, factor)
    _draw_outputs(chance, given, options)
    if not has_latent and not decodes and chance.maybe(0.25):
        given["source_dim"] = 15
    else:
        _places(chance, given, options, decodes=decodes, told=told)
    if not has_latent and chance.maybe(0.3):
        _draw_qk_norm(chance, given, options)
    torch.manual_seed(chance.between(0, 2**31))
    layer = Attention(embed_dim, heads, **given, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    layer = layer.to(dtype).train(chance.maybe())
    _numbers(layer, options)
    said = {name: value for name, value in given.items() if value not in (None, False)}
    return Drawn(layer, options, f"Attention({embed_dim}, {heads}, {said}) {dtype}", given)


def _draw_qk_norm(chance: Chance, given: dict[str, Any], options: dict[str, Any]) -> None:
    place = chance.choose(("before", "before", "after"))
    norm = {
        "kind": chance.choose(("rms", "rms", "layer")),
        "over": "head" if place == "after" else chance.choose(("head", "width")),
        "place": place,
        "one_plus": chance.maybe(),
        "eps": 1e-6,
        "has_weight": place == "before" or chance.maybe(),
    }
    given["qk_norm"], options["norm"] = QKNorm(**norm), norm


def _draw_outputs(chance: Chance, given: dict[str, Any], options: dict[str, Any]) -> None:
    """Differences of pairs of heads, and a norm of head outputs."""
    if given.get("num_kv_heads", 1) % 2 == 0 and chance.maybe():  # a latent has none
        rule = {"init": chance.choose((0.2, 0.36)), "eps": chance.choose((1e-5, 1e-2))}
        given["differential"], options["differential"] = DifferentialRule(**rule), rule
    if chance.maybe(0.3):
        kind, over = chance.choose((("rms", "width"), ("layer", "width"), ("rms", "head")))
        given["output_norm"] = QKNorm(kind, over, has_weight=over == "width")
        options["output_norm"] = {"kind": kind, "over": over, "one_plus": False, "eps": 1e-6}


def _draw_latent(chance: Chance, given: dict[str, Any], options: dict[str, Any]) -> None:
    """Keys and values from a latent; with a small rank each form is cheaper in some calls."""
    rule = {
        "rank": chance.choose((1, 3, 9)),
        "shared_width": chance.choose((2, 4) if given["head_dim"] > 4 else (2,)),
        "query_rank": chance.choose((None, 5)),
        "eps": chance.choose((1e-6, 1e-2)),
        "normed": chance.maybe(0.8),
        "scaled": chance.maybe(0.3),
    }
    given |= {"latent": Latent(**rule), "latent_bias": chance.maybe()}
    for name in ("num_kv_heads", "k_bias", "v_bias", "clip"):
        del given[name]
    options |= {"latent": rule, "kv_heads": options["heads"], "clip": None}


def _places(
    chance: Chance, given: dict[str, Any], options: dict[str, Any], *, decodes: bool, told: bool
) -> None:
    """Rotary, a bias by distance and a window, each in some layers."""
    if chance.maybe(0.4):
        given["rotary"] = Rotary(
            theta=chance.choose((10_000.0, 500.0)),
            width=None if "latent" in given else chance.choose((None, 4)),
            pairing=chance.choose(("half-split", "interleaved")),
            scaling=chance.choose((None, None, LinearScaling(2.0), ProportionalScaling(0.5))),
            backwards=chance.maybe(0.2),
        )
        turned = given["latent"].shared_width if "latent" in given else given["head_dim"]
        pairs = given["rotary"].rotated_width(turned) // 2
        if pairs > 1 and chance.maybe(0.3):
            axes = axes_of_sections((pairs - 1, 1), order=chance.choose(("blocks", "in turn")))
            given["rotary"] = replace(given["rotary"], axes=axes)
        if told and pairs > 1 and chance.maybe(0.3):
            given["rotary"] = _draw_by_length(chance, given["rotary"], pairs)
        elif told and "latent" not in given and given["head_dim"] % 4 == 0 and chance.maybe(0.2):
            order = chance.choose(("halves", "alternating", "parts"))
            given["rotary"] = Rotary.of_plane(100.0, given["head_dim"], order=order)
            options["plane"] = order
    if chance.maybe(0.25):
        kind = chance.choose(("steps", "smooth"))
        given["temperature"] = TemperatureRule(
            0.3, chance.choose((3, 5)), chance.between(0, 1), kind
        )
        rule = given["temperature"]
        options["temperature"] = (rule.factor, rule.length, rule.first, kind)
    if chance.maybe(0.4):
        given["score_bias"] = chance.choose(
            (Alibi(), Alibi(bias_max=4.0), T5Bias(8, 20, False), T5Bias(8, 9, True))
        )
        if given.keys().isdisjoint({"rotary", "latent"}) and chance.maybe(0.4):
            given["score_bias"] = DebertaBias(
                chance.choose((1, 3, 7)) if (apart := chance.maybe()) else chance.choose((4, 6)),
                max_distance=None if apart else 11,
                terms=chance.choose((("c2p", "p2c"), ("c2p",), ("p2c",))),
                is_shared=chance.maybe(),
                eps=chance.choose((None, 1e-7, 1e-2)),
            )
    if decodes or chance.maybe(0.3):
        right = 0 if decodes else chance.choose((0, 0, 2, None))
        given["window"] = (chance.choose((0, 1, 4, 30)), right)
        if decodes and chance.maybe():
            given["window"] = None
    options["window"] = given.get("window")


def _draw_by_length(chance: Chance, rotary: Rotary, pairs: int) -> Rotary:
    """Frequencies that change with the number of tokens, beyond a small one."""
    length = chance.choose((5, 12))
    if chance.maybe():
        return replace(rotary, scaling=DynamicScaling(3.0, length))
    short, many = ([1.0 + i / d for i in range(pairs)] for d in (7, 2))
    return replace(rotary, scaling=LongScaling((*short,), (*many,), length, 4.0))


def _numbers(layer: Attention, options: dict[str, Any], positions: Tensor | None = None) -> None:
    """The frequencies and slopes of a layer, which are float32, after a look at each."""
    if (rotary := layer.rotary) is not None:
        width = rotary.rotated_width(layer.head_dim)
        lengths = None if positions is None else positions.amax((0, 2))[:, None] + 1
        turns = plain(rotary.frequencies(layer.head_dim, length=lengths))
        exact = oracle_layers.frequencies(rotary.theta, width)
        if isinstance(rotary.scaling, LinearScaling):
            exact = exact / 2.0
        elif isinstance(rotary.scaling, ProportionalScaling):
            exact = np.where(np.arange(len(exact)) < len(exact) // 2, exact, 0.0)
        elif rotary.scaling is not None:
            rule = vars(rotary.scaling)
            reached = None if lengths is None else plain(lengths)
            exact = oracle_layers.frequencies_at(rotary.theta, width, rule, reached)
            options["amplitude"] = oracle_layers.amplitude(rule)
        if order := options.get("plane"):
            exact = oracle_layers.frequencies_of_plane(rotary.theta, width, order)
        _check_numbers("frequencies", turns, exact.reshape(turns.shape))
        pairing = "parts" if options.get("plane") == "parts" else rotary.pairing
        options |= {"turns": -turns if rotary.backwards else turns, "pairing": pairing}
        options["axes"] = rotary.axes
    bias = layer.score_bias
    if layer.place_tables is not None:
        options["places"] = vars(layer.place_tables.rule)
    elif bias is not None and hasattr(bias, "options"):
        t5 = bias.options
        options["t5"] = (t5.buckets, t5.max_distance, t5.bidirectional)
    elif bias is not None:
        numbers = plain(bias.numbers)
        low = -np.log2(numbers[2 ** int(np.log2(len(numbers))) - 1])
        _check_numbers("slopes", numbers, oracle_layers.slopes(len(numbers), round(float(low), 3)))
        options["alibi"] = numbers


def _check_numbers(name: str, found: Array, exact: Array) -> None:
    if not np.allclose(found, exact, rtol=8 * np.finfo(np.float32).eps, atol=0):
        raise DifferenceError(f"{name}: {found}, expected {exact}")


# ---- a call ------------------------------------------------------------------------------------


def layer_case(chance: Chance) -> str:
    """One call of a layer: the output, one reading, and in float64 the gradient."""
    dtype = chance.choose(MOSTLY_EXACT)
    drawn = draw_layer(chance, dtype, told=True)
    layer = drawn.layer
    batch, queries = chance.choose((1, 2, 3)), chance.between(1, 20)
    keys = chance.between(1, 20) if layer.source_dim != layer.embed_dim else queries
    inputs = draw_inputs(chance, layer, (batch, queries, keys), dtype)
    shaping, shape = Shaping(), (batch, layer.num_heads, queries, keys)
    add_masks(chance, shaping, shape, most=2)
    add_biases(chance, shaping, shape, dtype)
    positions = _draw_positions(chance, layer, batch, queries)
    drawn.options["positions"] = None if positions is None else plain(positions)
    if layer.rotary is not None and layer.rotary.depends_on_length:
        _numbers(layer, drawn.options, positions)
    shape = None if positions is None else tuple(positions.shape)
    said = f"{drawn.said} on {batch}x{queries}x{keys} {[*inputs]} positions={shape} {shaping.words}"
    with describing(said), tiled(chance):
        _check_call(chance, drawn, inputs, shaping, positions)
    return said


def draw_inputs(
    chance: Chance, layer: Attention, sizes: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of a call by name; those of keys and values are the input of queries or not."""
    batch, queries, keys = sizes

    def tokens(length: int, width: int) -> Tensor:
        return chance.laid_out(chance.normal(batch, length, width, dtype=dtype))

    inputs = {"x": tokens(queries, layer.embed_dim)}
    if layer.source_dim != layer.embed_dim:
        inputs["source"] = tokens(keys, layer.source_dim)
    if layer.latent is None and chance.maybe(0.25):
        inputs["value_source"] = tokens(keys, layer.source_dim)
    gate = chance.choose((None, None, (layer.num_heads,), (batch, layer.num_heads)))
    if gate is not None:
        inputs["gate"] = chance.normal(*gate, dtype=dtype)
    return inputs


def _draw_positions(chance: Chance, layer: Attention, batch: int, queries: int) -> Tensor | None:
    """(axes, batch, queries) for a layer that takes them."""
    rotary = layer.rotary
    is_told = rotary is not None and (rotary.depends_on_length or rotary.numbers is not None)
    if not is_told and (not layer.takes_positions or chance.maybe(0.6)):
        return None
    axes = 1 if rotary is None else rotary.axis_count
    return (10 * chance.normal(axes, batch, queries, dtype=torch.float64)).abs().long()


def _check_call(
    chance: Chance,
    drawn: Drawn,
    inputs: dict[str, Tensor],
    shaping: Shaping,
    positions: Tensor | None = None,
) -> None:
    layer = drawn.layer
    call: dict[str, Any] = {"mask": shaping.mask, "score_bias": shaping.score_bias}
    if positions is not None:
        call["positions"] = positions[0] if len(positions) == 1 else positions
    given = drawn.parameters() | {name: plain(x) for name, x in inputs.items()}
    _, outputs, expected = oracle_layers.attention(
        given, drawn.options, shaping.clauses, shaping.parts
    )
    graded = layer.q_proj.weight.dtype == torch.float64 and chance.maybe()
    for x in inputs.values():
        x.requires_grad_(graded)
    with torch.set_grad_enabled(graded or chance.maybe()):
        out = layer(**inputs, **call)
    tensors = {n: x.detach() for n, x in inputs.items()}
    within("output", _budget(layer, reference.output, tensors, call), out, expected)
    ungated = {n: x for n, x in tensors.items() if n != "gate"}
    with torch.no_grad():
        found = layer.head_outputs(**ungated, **call)
        within(
            "head_outputs", _budget(layer, reference.head_outputs, ungated, call), found, outputs
        )
    if graded:
        leaves = inputs | dict(layer.named_parameters())
        check_derivative(
            chance,
            out,
            leaves,
            lambda p: oracle_layers.attention(p, drawn.options, shaping.clauses, shaping.parts)[2],
            given,
        )


def check_derivative(
    chance: Chance, out: Tensor, leaves: dict[str, Tensor], truth: Any, given: dict[str, Array]
) -> None:
    """The derivative along one random direction of all leaves together, in float64."""
    g = chance.normal(*out.shape)
    grads = torch.autograd.grad(out, list(leaves.values()), g, allow_unused=True)
    along = {name: chance.normal(*leaf.shape).numpy() for name, leaf in leaves.items()}
    terms = {
        name: plain(grad) * along[name]
        for name, grad in zip(leaves, grads, strict=True)
        if grad is not None
    }
    found = sum(float(x.sum()) for x in terms.values())
    expected = float((oracle_layers.derivative(truth, given, along) * plain(g)).sum())
    size = sum(float(np.abs(x).sum()) for x in terms.values()) + np.abs(plain(g)).sum()
    # A wrong term is visible at any share of the sum; rounding in float64 is far below this one.
    if not abs(found - expected) <= 2**-30 * size:
        raise DifferenceError(
            f"derivative: {found:.9g}, expected {expected:.9g}, of terms of {size:.3g}"
        )


def _budget(layer: Attention, read: Any, inputs: dict[str, Tensor], call: dict[str, Any]) -> Budget:
    """The budget of the layer written by hand, in the dtype of the layer."""
    names = list(inputs)

    def function(*given: Tensor) -> Tensor:
        wide = copy.deepcopy(layer).to(given[0].dtype)
        with torch.no_grad():
            for parameter, value in zip(wide.parameters(), given[len(names) :], strict=True):
                parameter.copy_(value)
            return read(wide, **dict(zip(names, given[: len(names)], strict=True)), **call)

    parameters = [p.detach() for p in layer.parameters()]
    budget = Budget.for_function(function, *inputs.values(), *parameters)
    # Rounding of every sum in a row of the layer, each as long as it is.
    sums = layer.embed_dim + layer.source_dim + 4 * layer.head_dim + 160 + layer.out_dim
    sums += layer.num_heads * layer.value_dim
    unit = torch.finfo(torch.promote_types(parameters[0].dtype, torch.float32)).eps
    floor = sums * unit * max(1.0, float(budget.exact.abs().max()))
    return Budget(budget.name, budget.dtype, budget.exact, budget.allowed + floor, budget.axes)
