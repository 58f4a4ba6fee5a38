"""Operands whose last stride is not 1: the same result, without queries x keys."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headwise.function.budget import Budget
from headwise.masks.clauses import segments
from headwise.masks.mask import Mask
from headwise.matrix.kernels import sdpa, varlen
from headwise.matrix.kernels.dispatch import choose_kernel
from headwise.matrix.kernels.kernel import Task
from headwise.matrix.operator import AttentionMatrix
from tests.memory import LargestTensor

LENGTH, HEAD_DIM = 400, 16
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[..., :1].expand_as(x),
    "heads last": lambda x: x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1),
}


def operands(length: int = LENGTH) -> dict[str, Tensor]:
    return {name: torch.randn(1, 2, length, HEAD_DIM) for name in "qkv"}


def product(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
    return AttentionMatrix(q, k, mask=mask or Mask.causal()) @ v


def outputs_and_gradients(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    leaves = {name: tensor.requires_grad_() for name, tensor in x.items()}
    out = product(**leaves)
    return out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_a_strided_operand_is_read_as_its_copy_is(operand: str, layout: str) -> None:
    x = operands()
    x[operand] = LAYOUTS[layout](x[operand])
    assert x[operand].stride(-1) != 1
    plain = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in x.items()
    }
    with LargestTensor() as seen:
        found = outputs_and_gradients({name: tensor.detach() for name, tensor in x.items()})
    assert seen.bytes <= 2 * x[operand].untyped_storage().nbytes() + 2**18, seen.name
    assert seen.bytes < 4 * LENGTH * LENGTH  # or the test could not fail
    for a, b in zip(found, outputs_and_gradients(plain), strict=True):
        assert torch.equal(a, b)


def test_torch_alone_would_leave_the_fused_path() -> None:
    # The reason for the copy; if this fails, torch has learnt it and the copy can go.
    x = operands()
    with LargestTensor() as seen:
        scaled_dot_product_attention(LAYOUTS["transposed"](x["q"]), x["k"], x["v"])
    assert seen.bytes >= 2 * 4 * LENGTH * LENGTH


def test_the_pieces_of_a_batch_write_no_matrix_either(monkeypatch: pytest.MonkeyPatch) -> None:
    # A dispatch mode, which watches the memory, also keeps lengths from being read.
    monkeypatch.setattr(segments, "may_read_values", lambda _: True)
    monkeypatch.setattr(varlen, "CALL", 1)
    x = {name: LAYOUTS["transposed"](tensor) for name, tensor in operands().items()}
    mask = Mask.segments((torch.arange(LENGTH) >= 350)[None].long())
    assert AttentionMatrix(x["q"], x["k"], mask=mask).explain(x["v"]).lines[0].memory == (
        3 * 2 * 350 * HEAD_DIM * 4
    )
    with LargestTensor() as seen:
        found = product(**x, mask=mask)
    assert seen.bytes < 4 * 350 * 350, seen.name
    Budget.for_head_outputs(x["q"], x["k"], x["v"], mask=mask).assert_holds(found)


@pytest.mark.parametrize("strided", ["k", "v"])
@pytest.mark.parametrize("group", [1, 3])
def test_a_step_with_a_transposed_cache_copies_no_cache(strided: str, group: int) -> None:
    x = operands()
    x[strided] = LAYOUTS["transposed"](x[strided])
    q = torch.randn(1, 2 * group, 1, HEAD_DIM)
    matrix = AttentionMatrix(q, x["k"])
    assert "few queries" in str(matrix.explain(x["v"]))
    with LargestTensor() as seen:
        found = matrix @ x["v"]
    if strided == "k":  # whose layout is that of the tiles
        assert seen.bytes <= max(t.untyped_storage().nbytes() for t in x.values()), seen.name
    Budget.for_head_outputs(q, x["k"], x["v"]).assert_holds(found)


def test_the_kernel_by_the_number_of_queries() -> None:
    x = operands()
    k = LAYOUTS["transposed"](x["k"])
    for queries, heads, kernel in (
        (16, 2, "tiled"),
        (17, 2, "sdpa"),
        (8, 4, "tiled"),
        (9, 4, "sdpa"),
    ):
        problem = AttentionMatrix(torch.randn(1, heads, queries, HEAD_DIM), k)._kernel_input()
        assert choose_kernel(Task(problem, x["v"]))[0].name == kernel
    # Queries of their own are copied in any case: the copy is as large as the result.
    few = LAYOUTS["transposed"](x["q"][:, :, :3])
    assert (
        choose_kernel(Task(AttentionMatrix(few, x["k"])._kernel_input(), x["v"]))[0].name == "sdpa"
    )


def test_explain_says_what_is_copied() -> None:
    x = operands()
    matrix = AttentionMatrix(LAYOUTS["transposed"](x["q"]), x["k"])
    line = matrix.explain(LAYOUTS["every other"](x["v"])).lines[0]
    assert line.kernel == "sdpa"
    assert "after a copy of q, v: the last stride is not 1" in line.why
    assert line.memory == 2 * (2 * LENGTH * HEAD_DIM * 4)
    plain = AttentionMatrix(x["q"], x["k"]).explain(x["v"]).lines[0]
    assert (plain.why, plain.memory) == ("the fused kernel takes this mask", 0)
    # Narrow values are padded to the width of the queries, and so is the output.
    narrow = AttentionMatrix(x["q"], x["k"]).explain(x["v"][..., :5]).lines[0]
    assert narrow.memory == 2 * LENGTH * 4 * (HEAD_DIM + HEAD_DIM - 5)


def test_a_mask_is_laid_out_where_the_device_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []

    def taken(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor, **_: object) -> Tensor:
        given.append(attn_mask)
        return torch.empty(*q.shape[:-1], v.shape[-1], device=q.device)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", taken)
    for device in ("cpu", "meta"):
        allowed = torch.ones(29, 24, dtype=torch.bool, device=device).T
        q, k = (torch.empty(3, 2, n, 10, device=device) for n in (24, 29))
        product(q, k, k, mask=Mask.may_attend(allowed, axes="queries keys"))
    assert [mask.stride(-1) for mask in given] == [24, 1]
