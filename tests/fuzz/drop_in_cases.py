"""Cases of the drop-in: torch's options and masks at random, against the oracle."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise import Mask, MultiheadAttention, ScoreBias
from headwise.function import stages
from headwise.testing import Budget
from tests.fuzz import oracle_layers
from tests.fuzz.draw import DTYPES, Chance, plain
from tests.fuzz.findings import within
from tests.fuzz.layer_cases import MOSTLY_EXACT, check_derivative
from tests.fuzz.matrix_cases import describing, tiled
from tests.fuzz.oracle import Array, Clause


@dataclass
class Masks:
    """torch's two masks, for the layer, for the oracle and for plain torch."""

    call: dict[str, Any] = field(default_factory=dict)
    clauses: list[Clause] = field(default_factory=list)
    parts: list[Clause] = field(default_factory=list)
    mask: Mask = field(default_factory=Mask)
    score_bias: ScoreBias = field(default_factory=ScoreBias)

    def __str__(self) -> str:
        named = {n: x for n, x in self.call.items() if isinstance(x, Tensor)}
        hint = ["is_causal"] if self.call.get("is_causal") else []
        return ", ".join([f"{n} {x.dtype} {tuple(x.shape)}" for n, x in named.items()] + hint)

    def add(self, name: str, given: Tensor, four: tuple[int, ...], slots: int) -> None:
        self.call[name] = given
        wide = pad(given, (0, slots)).reshape(*four[:3], four[3] + slots)
        if given.dtype == torch.bool:
            self.clauses.append(("allowed", ~plain(wide)))
            self.mask = self.mask & Mask.may_attend(~wide, axes="batch heads queries keys")
        else:
            self.parts.append(("dense", plain(wide)))
            self.score_bias = self.score_bias + ScoreBias.dense(
                wide, axes="batch heads queries keys"
            )


def drop_in_case(chance: Chance) -> str:
    """One call of the layer: output, weights, and in float64 the gradient."""
    dtype = chance.choose(MOSTLY_EXACT)
    heads, width = chance.choose((1, 2, 3)), chance.choose((1, 4, 7))
    options: dict[str, Any] = {
        "bias": chance.maybe(0.7),
        "add_bias_kv": chance.maybe(0.25),
        "add_zero_attn": chance.maybe(0.25),
        "batch_first": chance.maybe(),
        "kdim": chance.choose((None, None, 5)),
        "vdim": chance.choose((None, None, 6)),
    }
    torch.manual_seed(chance.between(0, 2**31))
    layer = MultiheadAttention(heads * width, heads, **options, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    layer = layer.to(dtype).train(chance.maybe())
    batch, queries, keys = chance.choose((1, 2, 3)), chance.between(1, 16), chance.between(1, 16)
    inputs, kind = _inputs(chance, layer, batch, queries, keys)
    keys = inputs["key"].shape[1]
    masks = _masks(chance, layer, (batch, heads, queries, keys), dtype)
    unbatched = batch == 1 and chance.maybe()
    said = (
        f"MultiheadAttention({heads * width}, {heads}, {options}) {dtype} {kind} {batch}x{queries}x"
        f"{keys} unbatched={unbatched} "
        f"{masks}"
    )
    with describing(said), tiled(chance):
        _check(chance, layer, inputs, masks, unbatched=unbatched)
    return said


def _inputs(
    chance: Chance, layer: MultiheadAttention, batch: int, queries: int, keys: int
) -> tuple[dict[str, Tensor], str]:
    """Query, key and value, batch first: one object, two, or three, where the widths allow."""
    dtype = layer.out_proj.weight.dtype
    kinds = ["three"]
    if layer.kdim == layer.vdim:
        kinds.append("key is value")
    if layer.kdim == layer.vdim == layer.embed_dim:
        kinds += ["self", "self"]
    kind = chance.choose(kinds)
    query = chance.laid_out(chance.normal(batch, queries, layer.embed_dim, dtype=dtype))
    if kind == "self":
        return {"query": query, "key": query, "value": query}, kind
    key = chance.laid_out(chance.normal(batch, keys, layer.kdim, dtype=dtype))
    value = chance.normal(batch, keys, layer.vdim, dtype=dtype)
    return {"query": query, "key": key, "value": key if kind == "key is value" else value}, kind


def _masks(
    chance: Chance, layer: MultiheadAttention, shape: tuple[int, ...], dtype: torch.dtype
) -> Masks:
    batch, heads, queries, keys = shape
    slots = int(layer.bias_k is not None) + int(layer.add_zero_attn)
    masks = Masks()
    if chance.maybe(0.6):
        sizes = chance.choose(((queries, keys), (batch * heads, queries, keys)))
        four = (1, 1, queries, keys) if len(sizes) == 2 else shape
        blocked = chance.bools(0.3, *sizes)
        if chance.maybe(0.3) and queries == keys:
            blocked = torch.ones(queries, keys, dtype=torch.bool).triu(1).expand(sizes).clone()
            masks.call["is_causal"] = len(sizes) == 2 and chance.maybe()
        masks.add("attn_mask", chance.laid_out(_kind(chance, blocked, dtype)), four, slots)
    if chance.maybe(0.5):
        blocked = chance.bools(0.3, batch, keys)
        given = chance.laid_out(_kind(chance, blocked, dtype))
        masks.add("key_padding_mask", given, (batch, 1, 1, keys), slots)
    return masks


def _kind(chance: Chance, blocked: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as bool, as floats of 0 and -inf, or as floats that shift scores too."""
    kind = chance.choose(("bool", "bool", "zero", "shift"))
    if kind == "bool":
        return blocked
    own = chance.choose((dtype, *DTYPES))
    values = torch.zeros(blocked.shape, dtype=own)
    if kind == "shift":
        values = chance.normal(*blocked.shape, dtype=own)
    return values.masked_fill(blocked, -torch.inf)


def _check(
    chance: Chance,
    layer: MultiheadAttention,
    inputs: dict[str, Tensor],
    masks: Masks,
    *,
    unbatched: bool,
) -> None:
    graded = layer.out_proj.weight.dtype == torch.float64 and chance.maybe()
    for x in inputs.values():
        x.requires_grad_(graded)
    average, wanted = chance.maybe(), chance.maybe(0.7)
    with torch.set_grad_enabled(graded or chance.maybe()):
        views = _as_given(layer, inputs, unbatched=unbatched)
        call = dict(masks.call)
        if unbatched and "key_padding_mask" in call:
            call["key_padding_mask"] = call["key_padding_mask"][0]
        out, weights = layer(*views, **call, need_weights=wanted, average_attn_weights=average)
    if unbatched:
        out, weights = out[None], None if weights is None else weights[None]
    elif not layer.batch_first:
        out = out.transpose(0, 1)
    given = {name: plain(x) for name, x in layer.state_dict().items()}
    given |= {name: plain(x) for name, x in inputs.items()}

    def truth(p: dict[str, Array]) -> tuple[Array, Array]:
        return oracle_layers.multihead(
            p, layer.num_heads, layer.add_zero_attn, masks.clauses, masks.parts
        )

    expected, dense = truth(given)
    within("output", _budget(layer, inputs, masks, 0), out, expected)
    if wanted:
        assert weights is not None
        budget = _budget(layer, inputs, masks, 2 if average else 1)
        within("weights", budget, weights, dense.mean(1) if average else dense)
    if graded:
        leaves = inputs | dict(layer.named_parameters())
        distinct = {id(x): name for name, x in reversed(leaves.items())}
        own = {name: leaves[name] for name in distinct.values()}

        def along(p: dict[str, Array]) -> Array:
            same = {n: p[distinct[id(x)]] for n, x in leaves.items()}
            return truth(p | same)[0]

        check_derivative(chance, out, own, along, given)


def _as_given(
    layer: MultiheadAttention, inputs: dict[str, Tensor], *, unbatched: bool
) -> list[Tensor]:
    """The inputs with the axes that the layer takes; one object stays one."""
    views: dict[int, Tensor] = {}
    for x in inputs.values():
        view = x[0] if unbatched else (x if layer.batch_first else x.transpose(0, 1))
        views.setdefault(id(x), view)
    return [views[id(x)] for x in inputs.values()]


def _budget(
    layer: MultiheadAttention, inputs: dict[str, Tensor], masks: Masks, which: int
) -> Budget:
    """The budget of plain torch: the output, the weights or their average."""
    parameters = dict(layer.named_parameters())
    names = [*inputs, *parameters]

    def function(*given: Tensor) -> Tensor:
        return _plain(layer, dict(zip(names, given, strict=True)), masks)[which]

    tensors = [x.detach() for x in (*inputs.values(), *parameters.values())]
    budget = Budget.for_function(function, *tensors)
    sums = 4 * layer.embed_dim + 80
    unit = torch.finfo(torch.promote_types(tensors[0].dtype, torch.float32)).eps
    floor = sums * unit * max(1.0, float(budget.exact.abs().max()))
    return Budget(budget.name, budget.dtype, budget.exact, budget.allowed + floor, budget.axes)


def _plain(layer: MultiheadAttention, p: dict[str, Tensor], masks: Masks) -> tuple[Tensor, ...]:
    if "in_proj_weight" in p:
        projections = list(p["in_proj_weight"].chunk(3))
    else:
        projections = [p[f"{x}_proj_weight"] for x in "qkv"]
    biases = p["in_proj_bias"].chunk(3) if "in_proj_bias" in p else [p["query"].new_zeros(1)] * 3
    heads = layer.num_heads
    q, k, v = (
        stages.split_heads(p[name] @ w.mT + b, heads=heads)
        for name, w, b in zip(("query", "key", "value"), projections, biases, strict=True)
    )
    rows = [(p["bias_k"], p["bias_v"])] if "bias_k" in p else []
    if layer.add_zero_attn:
        rows.append((q.new_zeros(1, 1, layer.embed_dim),) * 2)
    for row in rows:
        k, v = (
            torch.cat([x, stages.split_heads(r, heads=heads).expand(len(x), -1, -1, -1)], 2)
            for x, r in zip((k, v), row, strict=True)
        )
    weights = stages.weights(q, k, mask=masks.mask, score_bias=masks.score_bias)
    out = stages.merge_heads(weights @ v) @ p["out_proj.weight"].mT
    return out + p.get("out_proj.bias", 0.0), weights, weights.mean(1)
