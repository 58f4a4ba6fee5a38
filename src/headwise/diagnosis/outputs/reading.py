"""Weights of projections, read from outputs by least squares.

The output of one token is x @ M + c, where M is the sum over heads of the products of the value
matrix and its part of the output projection, and c holds the biases. Where the heads have more
channels than the output, M does not tell the values; then the product of each head is read from
sequences of several tokens, by the weights that the model gives them.

With values and the output projection right, the output of the last of two tokens gives the weights
of each head by linear equations, one for each channel of the output. The logarithm of the ratio of
the two weights is the difference of two scores, linear in the query and in the first key. So the
queries follow from the right keys, and the keys from the right queries, but for their bias.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.diagnosis import watch
from headwise.diagnosis.outputs.runs import Runs, draw_tokens
from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall
from headwise.function.records import changed_values, output_gates
from headwise.function.rotary import rotate_by_rule
from headwise.function.stages import repeat_kv_heads
from headwise.function.weights import State

SMALLEST = 1e-9  # singular value, relative to the largest one, of unknowns that are determined


@dataclass(frozen=True)
class Read:
    """Weights of one role that make the outputs, where all other weights are the model's."""

    role: str
    weights: State  # canonical tensors, such as wq and bq
    noise: float  # of an entry, relative to the root mean square of the matrix


@dataclass(frozen=True)
class Solution:
    """The solution of equations."""

    x: Tensor  # (unknowns, columns)
    residual: float  # norm of what is left, relative to that of the right side
    noise: Tensor  # standard deviation of each unknown, by what is left, (unknowns,)


def solve(a: Tensor, b: Tensor) -> Solution | None:
    """Return the solution of a @ x = b for more equations than unknowns; None if it is open."""
    equations, unknowns = a.shape
    if equations <= unknowns:
        return None
    u, sizes, v = torch.linalg.svd(a, full_matrices=False)
    if float(sizes[-1]) <= SMALLEST * float(sizes[0]):
        return None
    x = v.T @ ((u.T @ b) / sizes[:, None])
    left = a @ x - b
    spread = left.square().sum(0).max() / (equations - unknowns)
    noise = (spread * (v.T / sizes).square().sum(1)).sqrt()
    return Solution(x, float(left.norm() / b.norm().clamp_min(1e-300)), noise)


def with_constant(x: Tensor) -> Tensor:
    """Return a matrix with a column of ones behind it."""
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)


MOST_UNKNOWN = 2500  # of one system of equations
SPARE = 1.3  # equations for each unknown


def read_output_projection(
    model: AttentionModel, call: RecordedCall, tolerance: float
) -> Read | None:
    """Return the output projection that makes the outputs of the model's head outputs."""
    heads = model.predict_stage("head outputs", RecordedCall(call.inputs, {}))[:, :, -1]
    solution = solve(with_constant(heads.flatten(1)), call.stages["output"][:, -1])
    if solution is None or solution.residual > tolerance:
        return None
    shape = model.weights["wo"].shape
    weights: State = {"wo": solution.x[:-1].view(shape)}
    if "bo" in model.weights:
        weights = {**weights, "bo": solution.x[-1]}
    if not weights["wo"].any():  # one token sees none, and its output is the bias
        return None
    return Read("o", weights, float(solution.noise[:-1].max() / _size(weights["wo"])))


def read_values(model: AttentionModel, call: RecordedCall, tolerance: float) -> Read | None:
    """Return the value projection that makes the outputs of sequences of one token."""
    if "sink" in model.weights or model.scales_values or model.settings.compressed:
        return None  # values of a latent are no products of tokens
    solution = solve(with_constant(call.inputs.key_source[:, 0]), call.stages["output"][:, -1])
    if solution is None or solution.residual > tolerance:
        return None
    kv_heads = len(model.weights["wv"])
    parts = model.weights["wo"].unflatten(0, (kv_heads, -1)).sum(1)
    products, noise = solution.x[:-1], float(solution.noise[:-1].max())
    matrix = _divide(products, parts.flatten(0, 1), tolerance)
    if matrix is None:
        return None
    wv = matrix.T.reshape(model.weights["wv"].shape)
    if not wv.any():
        return None
    weights: State = {"wv": wv, **_read_bias(model, solution.x[-1], parts)}
    return Read("v", weights, noise * _gain(parts.flatten(0, 1)) / _size(wv))


def read_values_by_head(model: AttentionModel, call: RecordedCall, tolerance: float) -> Read | None:
    """Return the value projection that makes the outputs by the weights of the model."""
    if model.scales_values or model.settings.compressed:
        return None
    weights = model.predict_stage("weights", RecordedCall(call.inputs, {}))[:, :, -1]
    x, (heads, _, out_dim) = call.inputs.key_source, model.weights["wo"].shape
    if weights.shape[1:] != (heads, x.shape[1]):
        return None
    features = torch.einsum("bht,btw->bhw", weights, x).flatten(1)
    if "sink" in model.weights:  # of which a part of the weight, and so of the bias, is lost
        features = torch.cat([features, weights.sum(2)], 1)
    solution = solve(with_constant(features), call.stages["output"][:, -1])
    if solution is None or solution.residual > tolerance:
        return None
    kv_heads, width = len(model.weights["wv"]), x.shape[2]
    products = solution.x[: heads * width].view(kv_heads, -1, width, out_dim)
    parts = model.weights["wo"].unflatten(0, (kv_heads, -1))
    rows = []
    for product, part in zip(products, parts, strict=True):  # the heads of a group side by side
        right = part.transpose(0, 1).flatten(1)
        matrix = _divide(product.transpose(0, 1).flatten(1), right, tolerance)
        if matrix is None:
            return None
        rows.append(matrix.T)
    wv = torch.stack(rows)
    read: State = {"wv": wv}
    if "sink" not in model.weights:
        read = {**read, **_read_bias(model, solution.x[-1], parts.sum(1))}
    gain = max(_gain(part.transpose(0, 1).flatten(1)) for part in parts)
    if not wv.any():
        return None
    return Read("v", read, float(solution.noise[: heads * width].max()) * gain / _size(wv))


def count_sequences(model: AttentionModel) -> int:
    """Return how many sequences tell the values by head; 0 where there would be too many."""
    heads, value_dim, _ = model.weights["wo"].shape
    unknown = heads * max(model.weights["wv"].shape[2] + 1, value_dim) + 1
    return int(SPARE * unknown) + 1 if unknown <= MOST_UNKNOWN else 0


def _read_bias(model: AttentionModel, constant: Tensor, parts: Tensor) -> State:
    bias = model.weights.get("bv")
    if bias is None:
        return {}
    constant = constant - model.weights.get("bo", torch.zeros_like(constant))
    right = parts.flatten(0, 1)
    left = constant - bias.flatten() @ right
    added = left @ torch.linalg.pinv(right)
    if float((left - added @ right).norm()) > 1e-6 * float(constant.norm()):
        return {}  # it is the bias of the output that parts
    return {"bv": bias + added.view_as(bias)}


def _divide(product: Tensor, right: Tensor, tolerance: float) -> Tensor | None:
    """Return x of x @ right = product; None where there is none, or more than one."""
    solution = solve(right.T, product.T) if right.shape[0] < right.shape[1] else None
    if right.shape[0] == right.shape[1] and _gain(right) < 1e6:
        inverse, is_singular = torch.linalg.inv_ex(right)  # of weights with a head of zeros
        return None if is_singular else product @ inverse
    if solution is None or solution.residual > 10 * tolerance:
        return None
    return solution.x.T


def _gain(right: Tensor) -> float:
    """Return by how much a division by a matrix enlarges noise, at most."""
    return float(torch.linalg.pinv(right).norm(dim=0).max())


def _size(matrix: Tensor) -> float:
    largest = matrix.abs().max()  # whose square may be 0 or infinite
    return float(largest * (matrix / largest).square().mean().sqrt())


MOST_INPUTS = 30_000_000  # entries of all tokens
MOST_ENTRIES = 4_000_000  # of contributions at a time
SPREAD, LINEAR = 0.8, 0.01  # standard deviation of the model's scores; below a softcap, in float64
LEAST = 1e-3  # a weight that is smaller says too little about its score
USUAL = 0.98  # the share of weights that are larger
SMALLER = (1.0, 0.5, 0.25)  # sizes of tokens that are tried
LIVE = 1e-6  # the contribution of a head that can be seen, relative to the largest
QUERIES, KEYS, FIXED = 11, 12, 13  # seeds


@dataclass(frozen=True)
class Pairs:
    """Differences of scores of queries and first keys, each beside one second key."""

    model: AttentionModel
    call: RecordedCall  # of (queries * keys) sequences
    counts: tuple[int, int]  # of queries and of keys
    differences: Tensor  # (queries, keys, heads): of the first key less the second
    certainty: Tensor  # likewise: the product of the two weights; 0 where they cannot be seen

    @property
    def queries(self) -> Tensor:
        """The tokens of the queries, (queries, width)."""
        return self.call.inputs.x[:: self.counts[1], -1]

    @property
    def keys(self) -> Tensor:
        """The tokens of the first keys, (keys, width)."""
        return self.call.inputs.key_source[: self.counts[1], 0]

    def predict(self, role: str) -> Tensor:
        """Return rotated queries, or first keys for each query head, (tokens, heads, head_dim)."""
        every = self.model.predict_stage(f"{role} after rotary", RecordedCall(self.call.inputs, {}))
        keys = every[: self.counts[1], :, :1]
        if role == "q":
            return every[:: self.counts[1], :, -1]
        return repeat_kv_heads(keys, heads=self.model.sizes["heads"])[:, :, 0]


def read_queries(
    model: AttentionModel, runs: Runs, tolerance: float, *, crosses: bool
) -> Read | None:
    """Return the query projection that makes the outputs of two tokens."""
    head_dim, width = model.sizes["head_dim"], model.sizes["embed_dim"]
    counts = int(1.25 * (width + 1)) + 4, int(1.6 * (head_dim + 1)) + 2
    pairs = _run_pairs(model, runs, counts, crosses=crosses)
    if pairs is None:
        return None
    turned = _rotation_matrix(model, "q", 0 if crosses else 1)
    features = model.settings.factor * pairs.predict("k") @ turned.T  # (keys, heads, head_dim)
    # The score of the second key is one more unknown of each query.
    features = torch.cat([features, torch.ones_like(features[..., :1])], 2).transpose(0, 1)
    certainty = pairs.certainty.transpose(1, 2)  # (queries, heads, keys)
    rows = _solve_each(features, pairs.differences.transpose(1, 2), certainty, tolerance)
    if rows is None:
        return None
    seen = pairs.certainty.flatten(0, 1).any(0)
    return _fit_projection(model, "q", with_constant(pairs.queries), rows[..., :-1], seen)


def read_keys(model: AttentionModel, runs: Runs, tolerance: float, *, crosses: bool) -> Read | None:
    """Return the key projection, without its bias, that makes the outputs of two tokens."""
    axes = ("kv_heads", "head_dim", "source_dim")
    kv_heads, head_dim, width = (model.sizes[axis] for axis in axes)
    group = model.sizes["heads"] // kv_heads
    counts = int(1.6 * head_dim / group) + 4, int(1.25 * width) + 5
    pairs = _run_pairs(model, runs, counts, crosses=crosses, is_from_zero=True)
    if pairs is None:
        return None

    def by_kv_head(x: Tensor) -> Tensor:
        """Return (keys, kv_heads, queries and heads of a group) of (queries, keys, heads)."""
        by_group: Tensor = x.unflatten(2, (kv_heads, group))
        return by_group.permute(1, 2, 0, 3).flatten(2)

    turned = model.settings.factor * pairs.predict("q") @ _rotation_matrix(model, "k", 0).T
    features = turned.unflatten(1, (kv_heads, group)).transpose(0, 1).flatten(1, 2)
    # Beside the key of the token 0, which is the bias, each key is a product alone.
    apart = (pairs.differences - pairs.differences[:, :1])[:, 1:]
    certainty = torch.minimum(pairs.certainty, pairs.certainty[:, :1])[:, 1:]
    rows = _solve_each(features, by_kv_head(apart), by_kv_head(certainty), tolerance)
    if rows is None:
        return None
    seen = by_kv_head(certainty).transpose(0, 1).flatten(1).any(1)
    return _fit_projection(model, "k", pairs.keys[1:], rows, seen)


def _solve_each(
    features: Tensor, right: Tensor, certainty: Tensor, tolerance: float
) -> Tensor | None:
    """Return the unknowns (tokens, heads, unknowns) of right sides (tokens, heads, equations).

    Features are (heads, equations, unknowns); None where the equations contradict each other.
    """
    a, b = certainty[..., None] * features, certainty * right
    solution: Tensor = torch.linalg.lstsq(a, b[..., None], driver="gelsd").solution
    left = (a @ solution)[..., 0] - b
    if float(left.norm()) > 100 * tolerance * float(b.norm()):
        return None
    return solution[..., 0]


def _fit_projection(
    model: AttentionModel, role: str, tokens: Tensor, rows: Tensor, seen: Tensor
) -> Read | None:
    """Return the projection that makes rows (tokens, heads, channels) of tokens.

    Heads that cannot be seen keep the model's numbers.
    """
    matrix, bias = model.weights[f"w{role}"], model.weights.get(f"b{role}")
    width = matrix.shape[2]
    solution = solve(tokens, rows.flatten(1))
    if solution is None or solution.residual > LINEAR:
        return None
    read = solution.x[:width].T.reshape(matrix.shape)
    size = float(read.square().mean().sqrt())
    if not size:  # scores that depend on no token
        return None
    weights = {f"w{role}": read.where(seen[:, None, None], matrix)}
    if bias is not None and len(solution.x) > width:
        weights[f"b{role}"] = solution.x[-1].view_as(bias).where(seen[:, None], bias)
    return Read(role, weights, float(solution.noise[:width].max()) / size)


def _rotation_matrix(model: AttentionModel, role: str, position: int) -> Tensor:
    """Return the matrix by which rows (..., head_dim) turn at a position."""
    head_dim, rule = model.sizes["head_dim"], model.settings.rotation
    unit = torch.eye(head_dim, dtype=torch.float64)
    if rule is None:
        return unit
    offset = rule.q_offset if role == "q" else rule.k_offset
    return rotate_by_rule(rule, unit[None, None], torch.full((1, head_dim), position + offset))[
        0, 0
    ]


def _run_pairs(
    model: AttentionModel,
    runs: Runs,
    counts: tuple[int, int],
    *,
    crosses: bool,
    is_from_zero: bool = False,
) -> Pairs | None:
    settings = model.settings
    is_capped = settings.cap is not None
    if settings.norm is not None or (is_capped and not runs.is_fine):
        return None
    inputs = _make_pairs(model, counts, crosses=crosses, is_from_zero=is_from_zero)
    if inputs.x.numel() > MOST_INPUTS:
        return None
    scores = model.predict_stage("scores", RecordedCall(inputs, {}))[:, :, -1]
    wanted = LINEAR if is_capped else SPREAD
    size = (wanted / max(float(scores.diff(dim=2).std()), 1e-12)) ** 0.5
    for share in SMALLER:
        call = _record_enlarged(runs, inputs, share * size)
        solved = read_two_weights(model, call, 10 * runs.tolerance)
        if solved is None:
            return None
        weights, seen = solved, solved[solved.isfinite()]
        if float((seen > LEAST).double().mean()) > USUAL:
            break
    logits = weights.clamp_min(LEAST).log().nan_to_num(0.0)
    certainty = weights.clamp_min(0).prod(2).nan_to_num(0.0)
    apart = logits[..., 0] - logits[..., 1]
    return Pairs(model, call, counts, apart.view(*counts, -1), certainty.view(*counts, -1))


def _record_enlarged(runs: Runs, inputs: Inputs, size: float) -> RecordedCall:
    key = ("enlarged", size, *inputs.x.shape, inputs.source is not None, float(inputs.x[0, 0, 0]))
    call: RecordedCall = runs.remember(
        key, lambda: runs.record(inputs.map_tokens(lambda x: size * x))
    )
    return call


def _make_pairs(
    model: AttentionModel, counts: tuple[int, int], *, crosses: bool, is_from_zero: bool
) -> Inputs:
    widths = model.token_widths
    queries = draw_tokens((counts[0], widths[0]), QUERIES).repeat_interleave(counts[1], 0)
    keys = draw_tokens((counts[1], widths[1]), KEYS)
    if is_from_zero:
        keys[0] = 0
    keys = keys.repeat(counts[0], 1)
    if not crosses:
        return Inputs(torch.stack([keys, queries], 1))
    fixed = draw_tokens((1, widths[1]), FIXED).expand_as(keys)
    return Inputs(queries[:, None], torch.stack([keys, fixed], 1))


def read_two_weights(model: AttentionModel, call: RecordedCall, tolerance: float) -> Tensor | None:
    """Return the weights of the last query of two tokens, (sequences, heads, 2).

    They are NaN for heads whose values are 0. None is returned where no weights of the model's
    values make the outputs.
    """
    heads, out_dim = model.sizes["heads"], model.sizes["out_dim"]
    output = call.stages["output"][:, -1]
    if out_dim != output.shape[1] or out_dim <= 2 * heads:
        return None
    parts, apart = [], 0.0
    for chunk in torch.arange(len(output)).split(max(1, MOST_ENTRIES // (2 * heads * out_dim))):
        watch.look()
        inputs = call.inputs.map_tokens(lambda x: x[chunk])  # noqa: B023 (called at once)
        parts_of_heads = _contributions(model, RecordedCall(inputs, {}))
        weights, left = _solve_two_weights(model, parts_of_heads, output[chunk])
        parts.append(weights)
        apart += float(left.square().sum())
    return None if apart**0.5 > tolerance * float(output.norm()) else torch.cat(parts)


def _contributions(model: AttentionModel, call: RecordedCall) -> Tensor:
    """Return what each key adds to the output of the last query, (sequences, heads, 2, out_dim)."""
    forced = model.prepare_stage("head outputs", call)
    values = changed_values(forced, forced["v"])
    values = repeat_kv_heads(values, heads=model.sizes["heads"])
    if (gates := output_gates(forced)) is not None:
        values = values * gates[:, :, -1:]
    return torch.einsum("bhkd,hdo->bhko", values, model.projection("o")[0])


def _solve_two_weights(
    model: AttentionModel, parts: Tensor, output: Tensor
) -> tuple[Tensor, Tensor]:
    sizes = parts.abs().amax((0, 2, 3))
    live = sizes > LIVE * sizes.max()
    weights = torch.full(parts.shape[:3], torch.nan, dtype=parts.dtype)
    parts, output = parts[:, live], output - model.weights.get("bo", torch.zeros(()).double())
    if "sink" in model.weights:
        a, b = parts.flatten(1, 2).mT, output
    else:
        first, second = parts.unbind(2)
        a, b = (first - second).mT, output - second.sum(1)
    solution: Tensor = torch.linalg.lstsq(a, b[..., None], driver="gelsd").solution[..., 0]
    left = (a @ solution[..., None])[..., 0] - b
    pair = torch.stack([solution, 1 - solution], 2)
    weights[:, live] = pair if "sink" not in model.weights else solution.unflatten(1, (-1, 2))
    return weights, left
