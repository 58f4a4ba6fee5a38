"""Values and the output projection, read from outputs.

The output of one token is x @ M + c, where M is the sum over heads of the products of the value
matrix and its part of the output projection, and c holds the biases. Where the heads have more
channels than the output, M does not tell the values; then the product of each head is read from
sequences of several tokens, by the weights that the model gives them.
"""

import torch
from torch import Tensor

from headwise.diagnosis.outputs.solving import Read, solve, with_constant
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall
from headwise.function.weights import State

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
    if "sink" in model.weights or model.scales_values:
        return None
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
    if model.scales_values:
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
