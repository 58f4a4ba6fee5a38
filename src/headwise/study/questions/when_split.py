"""Question: are the heads split before the projection or after it?"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.function import stages
from headwise.study import trace
from headwise.study.drawing import INK, SERIES, SOFT, Figure, Sheet
from headwise.study.implementations import HeadwiseAttention, TorchLayer
from headwise.study.measures import layer_error_budget
from headwise.study.question import Numbers, Progress

SIZES = {"batch": 1, "length": 12, "embed_dim": 512, "heads": 2}
OTHER_SIZES = {"batch": 3, "length": 5, "embed_dim": 28, "heads": 4}  # no two products the same


def measure(progress: Progress) -> dict[str, Any]:
    """Trace both layers, find the inputs of q, and compare with splitting x first."""
    main, other = trace_layers(SIZES), trace_layers(OTHER_SIZES)
    return {
        "asked": trace.sizes_with_head_dim(SIZES),
        "other": OTHER_SIZES,
        "shapes": main["shapes"],
        "by_axes": trace.expected_shapes_from_axis_names(SIZES),
        "other_shapes": other["shapes"],
        "other_by_axes": trace.expected_shapes_from_axis_names(OTHER_SIZES),
        "in_order": other["in_order"],
        "right": main["right"] and other["right"],
        **{key: value for key, value in main.items() if key == "fused" or key.startswith("cuts")},
        **compare_split_first(),
    }


def trace_layers(sizes: dict[str, int]) -> dict[str, Any]:
    embed_dim, heads = sizes["embed_dim"], sizes["heads"]
    x = torch.randn(sizes["batch"], sizes["length"], embed_dim)
    torch_layer, native = TorchLayer(embed_dim, heads), HeadwiseAttention(embed_dim, heads)
    native.load_weights(torch_layer.as_shared_weights())
    layers = {"torch": torch_layer, "native": native}
    steps = {name: trace.trace_operations(layer, x, layer) for name, layer in layers.items()}
    head_dim = embed_dim // heads
    tensors = {
        name: trace.stage_tensors(traced, head_dim=head_dim) for name, traced in steps.items()
    }
    shapes = {
        name: {stage: list(tensor.shape) for stage, tensor in by_stage.items()}
        for name, by_stage in tensors.items()
    }
    fused = [name for name, by_stage in shapes.items() if "weights" not in by_stage]
    for name in fused:  # the fused kernel returns no weights
        shapes[name]["weights"] = list(native.inner.matrix(x).dense().shape)
    as_called = shapes == trace.expected_shapes_from_axis_names(sizes)
    allowed = layer_error_budget(x, x, x, torch_layer.as_shared_weights(), num_heads=heads)
    returned = [by_stage["returned"].detach() for by_stage in tensors.values()]
    splits = [s for traced in steps.values() for s in trace.head_splits(traced, head_dim=head_dim)]
    return {
        "shapes": shapes,
        "fused": fused,
        "right": as_called and all(allowed.check(output).within for output in returned),
        "in_order": as_called
        and all(trace.has_axis_order(tensors[name], trace.AXES[name], sizes) for name in layers),
        "cuts": len(splits),
        "cuts_after_projection": sum(split.stage == trace.PROJECTED for split in splits),
        "cuts_that_are_views": sum(split.is_view for split in splits),
    }


def compare_split_first() -> dict[str, Any]:
    embed_dim, heads = SIZES["embed_dim"], SIZES["heads"]
    # Frozen, so that the Jacobian by x does not compute gradients of the weights.
    layer = HeadwiseAttention(embed_dim, heads).requires_grad_(False)
    blocks, width = copy.deepcopy(layer), embed_dim // heads
    for weight in blocks.as_shared_weights().matrices[:3]:
        weight.mul_(torch.block_diag(*torch.ones(heads, width, width)))
    counts = [
        sum(int(weight.count_nonzero()) for weight in each.as_shared_weights().matrices[:3])
        for each in (layer, blocks)
    ]
    x = torch.randn(SIZES["batch"], SIZES["length"], embed_dim)
    both = {"attention": layer, "split_first": blocks}
    reach = {name: nonzero_derivatives(each, x) for name, each in both.items()}
    head = slice(width)  # the entries of q in head 0
    output = layer(x)
    # Split x first, then project each part by its diagonal block.
    *projections, wo = layer.as_shared_weights().matrices
    cut = stages.split_heads(x, heads=heads)
    q, k, v = (cut @ diagonal_blocks(weight, heads).mT for weight in projections)
    first = F.linear(stages.merge_heads(stages.head_outputs(q, k, v)), wo)
    whole, parted = (
        layer_error_budget(x, x, x, each.as_shared_weights(), num_heads=heads)
        for each in (layer, blocks)
    )
    return {
        "reached": {name: int(r[head].sum()) for name, r in reach.items()},
        "pairs": reach["attention"][head].numel(),
        "inputs": {name: int(r[head].any(0).sum()) for name, r in reach.items()},
        "reach_map": {name: nonzero_share_by_block(r, heads) for name, r in reach.items()},
        "weights": counts[0],
        "weights_split_first": counts[1],
        "equal_to_blocks": parted.check(first).within and parted.check(blocks(x)).within,
        "equal_to_attention": whole.check(first).within,
        "difference": float((first - output).norm() / output.norm()),
    }


def diagonal_blocks(weight: Tensor, heads: int) -> Tensor:
    parts = enumerate(weight.chunk(heads))
    return torch.stack([rows.chunk(heads, dim=1)[head] for head, rows in parts])


def nonzero_derivatives(layer: HeadwiseAttention, x: Tensor) -> Tensor:
    def q(token: Tensor) -> Any:
        whole = torch.cat([x[:, :-1], token[None, None]], 1)
        return layer.inner.matrix(whole).q[0, :, -1].flatten()

    derivatives: Tensor = torch.autograd.functional.jacobian(q, x[0, -1], vectorize=True)
    return derivatives != 0


def nonzero_share_by_block(reach: Tensor, heads: int) -> list[list[float]]:
    return F.adaptive_avg_pool2d(reach.float()[None], heads)[0].tolist()


def facts(n: Numbers) -> dict[str, bool]:
    head_dim = n["asked"]["head_dim"]
    return {
        "shapes": n["shapes"] == n["by_axes"] and n["fused"] == ["native"],
        "axes": n["other_shapes"] == n["other_by_axes"] and n["in_order"],
        "outputs": n["right"],
        "splits": (
            n["cuts"] == 3 * len(n["shapes"])  # q, k and v in each layer
            and n["cuts"] == n["cuts_after_projection"] == n["cuts_that_are_views"]
        ),
        "inputs": (
            n["reached"] == {"attention": n["pairs"], "split_first": head_dim**2}
            and n["inputs"]["split_first"] == head_dim
        ),
        "blocks": (
            n["equal_to_blocks"] and n["weights_split_first"] * n["asked"]["heads"] == n["weights"]
        ),
        "whole": not n["equal_to_attention"],
    }


LEFT, FULL = 1.35, 3.35  # inches: where blocks begin, and the width of embed_dim
TOP, PITCH, THICK = 0.6, 0.55, 0.24  # of the first stage, from stage to stage, of a block
STAGES = (  # key, name, form of drawing, step to the next stage
    ("x", "x", "whole", "times wq: each entry of q uses all {asked[embed_dim]} inputs"),
    ("q", "q", "touching", "the split: a view, nothing is computed"),
    ("per_head", "per head", "apart", "softmax(q kᵀ / √{asked[head_dim]}); k is split like q"),
    ("weights", "attention weights", "square", "times v, which is split like q"),
    ("head_outputs", "head outputs", "apart", "concatenated"),
    ("merged", "concatenated", "touching", "times wo: each number uses all heads"),
    ("output", "output", "whole", ""),
)

GAP = 0.12  # between heads
SQUARE = 4.98  # top of the squares
COLUMNS = {"torch": 5.42, "native": 6.85}  # middles of the two columns of shapes


def draw(figure: Figure, n: Numbers) -> None:
    sheet = Sheet(figure, n, height=6.6)
    heads = (("PyTorch's layer", "length first from q on"), ("headwise.Attention", "batch first"))
    for x, (name, remark) in zip(COLUMNS.values(), heads, strict=True):
        sheet.head(x, 0.17, name, ha="center")
        sheet.write(x, 0.36, remark, ha="center")
    for row, (stage, name, form, then) in enumerate(STAGES):
        top = TOP + PITCH * row
        middle = top + THICK / 2
        sheet.write(LEFT - 0.12, middle, name, color=INK, ha="right")
        if form == "whole":
            sheet.block(LEFT, top, FULL, THICK, colour=SOFT, label="{asked[embed_dim]}")
        pitch = FULL / n["asked"]["heads"]
        wide = {"square": THICK, "touching": pitch, "apart": pitch - GAP}.get(form, 0.0)
        for head in range(n["asked"]["heads"] if wide else 0):  # a block in the head's colour
            left = LEFT + pitch * (head + 0.5) - wide / 2
            label = "" if form == "square" else f"head {head}: {{asked[head_dim]}}"
            sheet.block(left, top, wide, THICK, colour=SERIES[head], label=label)
        for layer, x in COLUMNS.items():
            shape = f"{{shapes[{layer}][{stage}]:shape}}"
            sheet.write(x, middle, shape, color=INK, ha="center")
            if stage == "weights" and layer in n["fused"]:
                sheet.write(x, middle + 0.19, "only in matrix(x)", ha="center")
        if then:
            x = LEFT + FULL * 0.06
            sheet.arrow((x, top + THICK + 0.03), (x, top + PITCH - 0.03), then)
    sheet.line(4.51)
    words = ("Project, then split", "Attention", "weights")
    draw_q_dependencies(sheet, 0.5, "attention", *words)
    words = ("Split, then project", "Another function", "weights_split_first")
    draw_q_dependencies(sheet, 4.2, "split_first", *words)


def draw_q_dependencies(
    sheet: Sheet, left: float, key: str, heading: str, name: str, weights: str
) -> None:
    """Draw a square, entries of q down and inputs across, coloured where q depends on x.

    A row is a head in its colour, with the share of the inputs as opacity.
    """
    top, side = SQUARE, 1.3
    right, bottom = left + side, top + side
    sheet.head(left, top - 0.17, heading)
    shares = sheet.n["reach_map"][key]
    small = side / len(shares)
    for head, row in enumerate(shares):
        for part, share in enumerate(row):
            box = (left + small * part, top + small * head, small, small)
            sheet.block(*box, colour=SERIES[head], alpha=share)
    across, down = [left, right, right, left, left], [top, top, bottom, bottom, top]
    sheet.axes.plot(across, down, color=SOFT, linewidth=0.8)
    sheet.write(left + side / 2, bottom + 0.13, "{asked[embed_dim]} inputs", ha="center")
    entries = "{asked[embed_dim]} entries of q"
    sheet.write(left - 0.13, top + side / 2, entries, ha="center", rotation=90.0)
    sheet.head(right + 0.14, top + 0.14, name)
    depends = ("each entry of q depends", f"on {{inputs[{key}]}} inputs")
    lines = (*depends, "", "wq, wk and wv have", f"{{{weights}:,}} parameters")
    for line, words in enumerate(lines, start=1):
        sheet.write(right + 0.14, top + 0.14 + 0.2 * line, words)
