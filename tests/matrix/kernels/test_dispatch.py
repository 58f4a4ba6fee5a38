"""Which kernel is chosen, and that neither writes queries x keys."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headwise.function import stages
from headwise.function.budget import Budget
from headwise.layers import linear
from headwise.layers.linear import apply_linear
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.kernels import dispatch, sdpa, tiles
from headwise.matrix.kernels.dispatch import KERNELS, choose_kernel
from headwise.matrix.kernels.kernel import Cost, Kernel, KernelResult, Task, result_of_outputs_only
from headwise.matrix.operator import AttentionMatrix
from headwise.support.processor import ProductChoice
from tests.memory import LargestTensor

LENGTHS = Mask.lengths(keys=torch.tensor([20, 7, 24]))
DENSE = Mask.may_attend(torch.rand(24, 24) > 0.3, axes="queries keys")
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("plain", {}, "sdpa"),
    ("causal", {"mask": Mask.causal()}, "sdpa"),
    ("key lengths", {"mask": LENGTHS}, "sdpa"),
    ("padding", {"mask": Mask.may_attend(torch.rand(3, 24) > 0.3, axes="batch keys")}, "sdpa"),
    ("dense", {"mask": DENSE}, "sdpa"),
    (
        "two key masks",
        {"mask": LENGTHS & Mask.may_attend(torch.rand(24) > 0.1, axes="keys")},
        "sdpa",
    ),
    ("a window wide enough", {"mask": Mask.window(30, 30)}, "sdpa"),
    (
        "dense bias",
        {"score_bias": ScoreBias.dense(torch.randn(6, 24, 24), axes="heads queries keys")},
        "sdpa",
    ),
    ("scale", {"scale": 0.2}, "sdpa"),
    ("softcap", {"softcap": 2.0}, "tiled"),
    ("sink", {"sink": torch.zeros(6)}, "tiled"),
    ("window", {"mask": Mask.window(3, 0)}, "tiled"),
    ("causal and lengths", {"mask": Mask.causal() & LENGTHS}, "tiled"),
    ("dense and lengths", {"mask": DENSE & LENGTHS}, "tiled"),
    ("segments", {"mask": Mask.segments(torch.zeros(3, 24, dtype=torch.long))}, "tiled"),
    (
        "query lengths",
        {"mask": Mask.lengths(keys=torch.tensor([20, 7, 24]), queries=torch.tensor([3, 7, 4]))},
        "tiled",
    ),
    ("alibi", {"score_bias": ScoreBias.alibi(torch.ones(6))}, "tiled"),
    (
        "a learned bias",
        {
            "score_bias": ScoreBias.dense(
                torch.randn(24, 24, requires_grad=True), axes="queries keys"
            )
        },
        "tiled",
    ),
]


@pytest.mark.parametrize(("options", "kernel"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_kernel_and_that_both_agree(
    options: dict[str, Any], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if a tile were small: what would be written down for the fused kernel is too large.
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 500)
    q, k = torch.randn(3, 6, 24, 10), torch.randn(3, 2, 24, 10)
    matrix = AttentionMatrix(q, k, **options)
    assert choose_kernel(Task(matrix._kernel_input(), k))[0].name == kernel
    torch.testing.assert_close(matrix @ k, matrix.dense() @ k.repeat_interleave(3, 1))


def test_a_mask_no_larger_than_a_tile_is_written_for_the_fused_kernel() -> None:
    q = torch.randn(3, 6, 24, 10)
    bias = ScoreBias.alibi(torch.rand(6))
    for options in (
        {"mask": Mask.causal() & LENGTHS},
        {"mask": Mask.window(3, 1), "score_bias": bias},
    ):
        matrix = AttentionMatrix(q, q, **options)
        assert choose_kernel(Task(matrix._kernel_input(), q))[0].name == "sdpa"
        torch.testing.assert_close(matrix @ q, matrix.dense() @ q)


@pytest.mark.parametrize(("value_dim", "head_dim"), [(5, 16), (16, 5), (8, 8)])
def test_other_value_widths_stay_on_the_fused_path(value_dim: int, head_dim: int) -> None:
    q, k = torch.randn(1, 2, 700, head_dim), torch.randn(1, 2, 700, head_dim)
    v = torch.randn(1, 2, 700, value_dim)
    with LargestTensor() as seen:
        out = AttentionMatrix(q, k, mask=Mask.causal()) @ v
    assert seen.bytes <= 2 * 700 * 16 * 4, seen.name
    torch.testing.assert_close(out, AttentionMatrix(q, k, mask=Mask.causal()).dense() @ v)


def test_torch_alone_would_leave_the_fused_path() -> None:
    # The reason for the padding; if this fails, torch has learnt it and the padding can go.
    q, v = torch.randn(1, 2, 700, 16), torch.randn(1, 2, 700, 5)
    with LargestTensor() as seen:
        scaled_dot_product_attention(q, q, v)
    assert seen.bytes >= 2 * 700 * 700 * 4


def test_masks_over_keys_alone_are_combined_without_queries() -> None:
    q = torch.randn(3, 6, 24, 10)
    mask = LENGTHS & Mask.may_attend(torch.rand(24) > 0.1, axes="keys")
    combined = sdpa.combine_mask_and_bias(AttentionMatrix(q, q, mask=mask)._kernel_input())
    assert combined is not None
    assert combined.shape == (3, 1, 1, 24)


@pytest.mark.parametrize("least", [0, 2**25])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_project_is_linear_on_both_of_its_paths(
    grad: bool, bias: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "PAYS_FROM", least)
    monkeypatch.setattr(linear, "product_here", lambda: ProductChoice("onednn", "AMD"))
    x = torch.randn(3, 24, 10, requires_grad=grad)
    weight, offset = torch.randn(7, 10), torch.randn(7) if bias else None
    exact = torch.nn.functional.linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    )
    out = apply_linear(x, weight, offset)
    assert out.requires_grad == grad
    # A sum of 10 products and a bias in float32.
    floor = 12 * 2**-24 * (x.abs() @ weight.abs().T + (0 if offset is None else offset.abs()))
    assert bool(((out - exact).abs() <= floor).all())


def test_a_table_by_distance_is_not_rounded_to_a_half_type() -> None:
    """Far keys alone: their biases are large, and differ by less than bfloat16 can say."""
    q, k, v = (torch.randn(1, 4, n, 16).bfloat16() for n in (1, 512, 512))
    far = Mask.may_attend(torch.arange(512) < 256, axes="keys")
    bias = ScoreBias.alibi(torch.tensor([0.5, 0.25, 0.7, 0.3]), align="bottom-right")
    matrix = AttentionMatrix(q, k, mask=far, score_bias=bias)
    budget = Budget.for_head_outputs(q, k, v, mask=far, score_bias=bias, factor=0.0)
    budget.assert_holds(matrix @ v)


def _wide(*shape: int) -> Tensor:
    return torch.randn(*shape)


PLAIN: dict[str, tuple[Tensor, Tensor, Tensor, float]] = {
    "usual": (_wide(3, 6, 24, 10), _wide(3, 6, 29, 10), _wide(3, 6, 29, 10), 0.3),
    "kv heads": (_wide(3, 6, 24, 10), _wide(3, 2, 29, 10), _wide(3, 2, 29, 10), 0.3),
    "value_dim": (_wide(3, 6, 24, 10), _wide(3, 6, 29, 10), _wide(3, 6, 29, 7), 0.3),
    "shared values": (_wide(3, 6, 24, 10), _wide(3, 6, 29, 10), _wide(1, 6, 29, 10), 0.3),
    "strided": (_wide(3, 6, 10, 24).mT, _wide(3, 6, 29, 10), _wide(3, 6, 29, 10), 0.3),
    "no keys": (_wide(3, 6, 24, 10), _wide(3, 6, 0, 10), _wide(3, 6, 0, 10), 0.3),
    "no queries": (_wide(3, 6, 0, 10), _wide(3, 6, 29, 10), _wide(3, 6, 29, 10), 0.3),
    "scale": (_wide(3, 6, 24, 10), _wide(3, 6, 29, 10), _wide(3, 6, 29, 10), -0.3),
}


@pytest.mark.parametrize("case", PLAIN)
def test_what_the_short_way_serves_is_the_fused_kernels(case: str) -> None:
    q, k, v, scale = PLAIN[case]
    matrix = AttentionMatrix(q, k, scale=scale)
    served = sdpa.head_outputs_without_options(q, k, v, scale=scale) is not None
    assert served == (case == "usual")
    if served:
        assert choose_kernel(Task(*matrix._kernel_input_and_values(v)))[0].name == "sdpa"
    Budget.for_head_outputs(q, k, v, scale=scale).assert_holds(matrix @ v)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": Mask.causal()},
        {"score_bias": ScoreBias.alibi(torch.arange(1.0, 7.0))},
        {"softcap": 3.0},
        {"sink": torch.ones(6)},
    ],
    ids=["mask", "bias", "softcap", "sink"],
)
def test_what_shapes_the_scores_goes_the_long_way(options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(3, 6, 24, 10) for _ in range(3))
    assert AttentionMatrix(q, k)._is_plain
    matrix = AttentionMatrix(q, k, **options)
    assert not matrix._is_plain
    Budget.for_head_outputs(q, k, v, **options).assert_holds(matrix @ v)


# ---- what is reported is what runs -------------------------------------------------------------


def kernels_told(matrix: AttentionMatrix, v: Tensor) -> dict[str, str]:
    return {line.reading: line.kernel for line in matrix.explain(v).lines}


def test_the_report_is_that_of_the_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager mode, while ONNX exports, and under torch.func: every line is what then runs."""
    q, k = torch.randn(3, 6, 24, 10), torch.randn(3, 2, 24, 10)
    matrix = AttentionMatrix(q, k, mask=Mask.causal(), softcap=3.0)
    ran: list[str] = []

    def noted(kind: type[Kernel]) -> None:
        run = kind.run

        def note(self: Kernel, task: Task) -> KernelResult:
            ran.append(self.name)
            return run(self, task)

        monkeypatch.setattr(kind, "run", note)

    for kernel in KERNELS:
        noted(type(kernel))

    def read_all(v: Tensor) -> Tensor:
        told = kernels_told(matrix, v)
        ran.clear()
        _ = matrix @ v, matrix.mT @ q, matrix.statistics(), matrix.head_average()
        assert ran == [told[name] for name in list(told)[:4]]
        return v.sum()

    read_all(k)
    assert set(ran) == {"tiled"}
    torch.func.grad(read_all)(k)
    assert set(ran) == {"dense"}
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    read_all(k)
    assert set(ran) == {"dense"}
    assert "ONNX" in str(matrix.explain(k))


def test_dropout_asks_for_what_can_drop() -> None:
    q, k = torch.randn(3, 6, 24, 10), torch.randn(3, 2, 24, 10)
    for options, name in (({}, "sdpa"), ({"softcap": 3.0}, "dense")):
        task = Task(*AttentionMatrix(q, k, **options)._kernel_input_and_values(k), dropout_p=0.3)  # type: ignore[arg-type]
        assert choose_kernel(task)[0].name == name
    assert "dropout needs the weights" in choose_kernel(task)[1]


def test_a_kernel_is_one_class_and_one_place_in_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reference(Kernel):
        """A kernel for matrices without a mask, by the reference."""

        name = "reference"

        def refusal_reason(self, task: Task) -> str | None:
            return (
                None
                if task.values_if_only_product is not None and not task.problem.mask.clauses
                else "a mask"
            )

        def run(self, task: Task) -> KernelResult:
            assert task.v is not None
            return result_of_outputs_only(
                stages.head_outputs(task.problem.q, task.problem.k, task.v)
            )

        def cost(self, task: Task) -> Cost:
            return Cost(tiles.count_operations(task), 7)

    monkeypatch.setattr(dispatch, "KERNELS", (Reference(), *KERNELS))
    q, k, v = torch.randn(3, 6, 24, 10), torch.randn(3, 2, 24, 10), torch.randn(3, 2, 24, 7)
    line = AttentionMatrix(q, k).explain(v).lines[0]
    assert (line.kernel, line.memory) == ("reference", 7)
    assert torch.equal(AttentionMatrix(q, k) @ v, stages.head_outputs(q, k, v))
    assert AttentionMatrix(q, k, mask=Mask.causal()).explain(v).lines[0].kernel == "sdpa"
