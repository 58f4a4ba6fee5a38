"""What a report calls a fault: its name, its numbers, its place and what repairs it."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from headwise import Attention, Rotary, compare
from headwise.diagnosis import Inputs
from headwise.diagnosis.causes.evidence import Family, Variant
from headwise.diagnosis.explained import describe_matrix
from headwise.diagnosis.repairs.rows import write_form, write_weight_lines
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.diagnosis.subjects.parts import holds_modules
from headwise.identify.comparison import FoundCause
from headwise.identify.moves.find import find_state_moves
from headwise.identify.results import Diagnosis, Verdict
from tests.diagnosis.among import compare_among
from tests.quick import others_extra, others_slow

WIDTH, HEADS = 40, 4


def spread(**options: Any) -> Attention:
    torch.manual_seed(0)
    layer = Attention(WIDTH, HEADS, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def port_of(layer: Attention, change: Callable[[str, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return the formulas of a layer; ``change`` gets each stage by its name."""

    def heads(name: str, x: Tensor) -> Tensor:
        module = layer.get_submodule(f"{name}_proj")
        y = F.linear(x, module.weight.to(x), module.bias.to(x))  # type: ignore[arg-type, operator]
        return y.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)

    def port(x: Tensor) -> Tensor:
        q, k, v = (heads(name, x) for name in "qkv")
        k, v = (
            change(n, y.repeat_interleave(len(q[0]) // len(k[0]), 1))
            for n, y in zip("kv", (k, v), strict=True)
        )
        weights = change("weights", change("scores", q @ k.mT / layer.head_dim**0.5).softmax(-1))
        output = (weights @ v).transpose(1, 2).flatten(2)
        return F.linear(output, layer.out_proj.weight.to(x), layer.out_proj.bias.to(x))

    return port


def only_cause(diagnosis: Diagnosis) -> FoundCause:
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert not diagnosis.function.unexplained_places, str(diagnosis)
    return cause


def with_base(theta: float) -> Attention:
    return spread(rotary=Rotary(theta=theta), window=(None, 0))


@pytest.mark.parametrize(
    ("right", "wrong"),
    others_extra([(1e6, 1e4), (1e8, 1e4), (1e5, 1e4), (1e4, 5e5)], quick=[(1e6, 1e4)]),
)
def test_a_base_of_configs_is_named_before_a_width_that_nobody_uses(
    right: float, wrong: float
) -> None:
    cause = only_cause(compare(with_base(wrong), with_base(right)))
    assert (cause.name, cause.parameters) == ("rotary theta", {"theta": wrong})


@pytest.mark.parametrize("is_function", others_extra([False, True]))
def test_a_base_that_is_fitted_in_bfloat16_is_round(is_function: bool) -> None:
    torch.manual_seed(0)
    wrong, right = (
        Attention(64, 2, rotary=Rotary(theta=theta), window=(None, 0)) for theta in (1e4, 1e6)
    )
    wrong.load_state_dict(right.state_dict())
    wrong, right = wrong.bfloat16(), right.bfloat16()
    port = (lambda x: wrong(x.bfloat16())) if is_function else wrong
    assert only_cause(compare(port, right)).parameters == {"theta": 1e4}


def test_plain_numbers_near_a_fitted_one() -> None:
    family = Family(lambda _: Variant(None), (1.0,), forms=(40**-0.5,))  # type: ignore[arg-type]
    assert family.list_plain(9600.58) == [1e4, 9600.0]
    assert family.list_plain(0.1579) == [40**-0.5, 0.16, 0.158]


def test_a_rotation_that_is_too_much_is_unexpected() -> None:
    cause = only_cause(compare(with_base(1e4), spread(window=(None, 0))))
    assert cause.lines[0] == "rotary unexpected: rotary half-split, theta 10000 in the first"
    assert cause.repair == "leave out the rotation"
    cause = only_cause(compare(spread(window=(None, 0)), with_base(1e4)))
    assert cause.name == "rotary missing"


def hide(shift: int, name: str, x: Tensor) -> Tensor:
    ahead = torch.ones(x.shape[-2:]).triu(1 + shift).bool()
    return x.masked_fill(ahead, -torch.inf) if name == "scores" else x


def test_a_causal_mask_that_is_too_much_is_unexpected() -> None:
    layer = spread()
    cause = only_cause(compare_among(["causal alignment"], port_of(layer, partial(hide, 0)), layer))
    assert (cause.name, cause.parameters) == ("causal mask unexpected", {})
    assert cause.repair == "no causal mask"


def test_the_part_that_is_tiled_is_said() -> None:
    layer = spread(num_kv_heads=2)
    tiled = partial(lambda role, n, x: x[:, [0, 2, 1, 3]] if n == role else x, "v")
    cause = only_cause(
        compare_among(["kv heads tiled instead of repeated"], port_of(layer, tiled), layer)
    )
    assert cause.parameters_in_words == "kv_heads 2, of v alone"


def test_a_factor_of_dropout_is_said_with_its_places() -> None:
    layer = spread()
    port = port_of(layer, lambda name, x: x / 0.9 if name == "weights" else x)
    cause = only_cause(compare_among(["factor"], port, layer))
    assert cause.parameters["form"] == (
        "1 / (1 - 0.1), as of dropout, in the weights, v or the outputs of heads"
    )
    assert cause.repair.splitlines()[0] == "wv = wv / (1 / (1 - 0.1))"


def test_a_number_below_all_that_show_is_said_as_a_bound() -> None:
    layer, mask = spread(), torch.ones(2, 1, 7, 7).tril().bool()
    mask[:, :, 0] = False

    def port(x: Tensor, mask: Tensor) -> Tensor:
        add = lambda name, y: y - 100.0 * ~mask if name == "scores" else y  # noqa: E731
        return port_of(layer, add)(x)

    inputs = Inputs(torch.randn(2, 7, WIDTH), mask=mask)
    cause = only_cause(compare_among(["finite number for -inf"], port, layer, inputs))
    assert cause.parameters == {"added hidden keys": "-22 or less"}


@pytest.mark.slow
def test_a_side_that_is_causal_by_itself_is_no_plain_same() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=48, n_head=4, attn_implementation="eager")
    theirs = GPT2Attention(config, layer_idx=0).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = Attention.from_layout(theirs.state_dict(), layout="gpt2", num_heads=4)
    diagnosis = compare(ours, theirs)
    assert (diagnosis.verdict, bool(diagnosis)) == (Verdict.UNDER_MASK, True)
    said = "The second is causal by itself; pass `Mask.causal()` to the first."
    assert diagnosis.answer.endswith(said)
    causal = Attention.from_layout(theirs.state_dict(), layout="gpt2", num_heads=4)
    causal.window = (None, 0)
    assert compare(causal, theirs).verdict in (Verdict.SAME, Verdict.TO_ROUNDING)
    masked = Inputs(torch.randn(2, 7, 48), mask=torch.ones(7, 7).tril().bool())
    assert compare(ours, theirs, masked).verdict in (Verdict.SAME, Verdict.TO_ROUNDING)


def test_rows_are_ranges_and_lost_ones_are_loaded_again() -> None:
    right = spread()
    wrong = copy.deepcopy(right)
    with torch.no_grad():
        wrong.q_proj.weight[20:30] = 0
        wrong.q_proj.bias[20:30] = 0
    cause = only_cause(compare(wrong, right))
    assert cause.parameters_in_words == "projection q, head 2, rows 20 to 29"
    assert cause.repair == "load wq again: zero in head 2"


def test_a_factor_of_the_output_bias_is_undone_in_it() -> None:
    model = NativeSubject(spread()).model
    wrong = {**model.weights, "bo": 3 * model.weights["bo"]}
    [move] = find_state_moves(wrong, model.weights).moves
    assert move.name.repair == "undo it in bo: factor: 3"
    assert write_weight_lines(wrong, model.weights) == ("bo = bo / 3.0",)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (40**-0.5, "(1 / 40**0.5)"),
        (-(40**0.5), "-40**0.5"),
        (1 / 0.9, "(1 / (1 - 0.1))"),
        (0.25, "0.25"),
        (2.99999999, "3.0"),
        (0.1234567891, "0.1234567891"),
    ],
)
def test_numbers_in_code_have_their_closed_form(number: float, code: str) -> None:
    assert write_form(number, head_dim=10, width=40) == code
    assert eval(code) == pytest.approx(number, rel=1e-7)


FAULTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "heads permuted": lambda w: {"wq": w["wq"].view(4, 10, -1)[[1, 0, 3, 2]].flatten(0, 1)},
    "k and v exchanged": lambda w: {"wk": w["wv"], "wv": w["wk"], "bk": w["bv"], "bv": w["bk"]},
    "square matrix transposed": lambda w: {"wo": w["wo"].T},
    "factor": lambda w: {"wv": 40**0.5 * w["wv"], "bv": 40**0.5 * w["bv"]},
}
NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


@pytest.mark.parametrize("fault", others_slow(FAULTS))
def test_the_printed_lines_repair_the_weights_of_a_layer(fault: str) -> None:
    right = spread()
    wrong = copy.deepcopy(right)

    def read(layer: Attention) -> dict[str, Tensor]:
        state = layer.state_dict()
        kinds = {"w": "weight", "b": "bias"}
        return {f"{k}{r}": state[f"{NAMES[r]}.{kinds[k]}"].clone() for k in kinds for r in NAMES}

    def load(layer: Attention, names: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for role, module in NAMES.items():
                layer.get_submodule(module).weight.copy_(names[f"w{role}"])  # type: ignore[operator, union-attr]
                layer.get_submodule(module).bias.copy_(names[f"b{role}"])  # type: ignore[operator, union-attr]

    load(wrong, read(right) | FAULTS[fault](read(right)))
    cause = only_cause(compare(wrong, right))
    assert fault in (cause.name, *cause.equals)
    assert cause.place == "once, on the weights"
    names: dict[str, Any] = read(wrong)
    exec(cause.repair, {"torch": torch}, names)
    load(wrong, names)
    assert compare(wrong, right)


def test_weights_in_a_repair_are_those_of_the_right_layer() -> None:
    layer = spread()
    without = copy.deepcopy(layer)
    nn.init.zeros_(without.v_proj.bias)
    cause = only_cause(compare_among(["bias missing"], lambda x: without(x), layer))
    assert cause.repair.splitlines()[-1] == (
        "# wv, bv: of the right layer, as torch.nn.Linear stores them"
    )


def test_modules_to_record_are_asked_of_functions_that_hold_some() -> None:
    layer, number = spread(), 3
    assert holds_modules(layer)
    assert holds_modules(layer.forward)
    assert holds_modules(lambda x: layer(x))
    assert not holds_modules(lambda x: number * x)
    assert not holds_modules(torch.relu)


def test_the_rows_and_columns_of_an_unknown_change() -> None:
    right = torch.ones(4, 10, WIDTH)
    wrong = right.clone()
    wrong[1, 3] += 0.5
    assert describe_matrix("wk", wrong, right) == (
        "wk, read as a matrix, differs in row 13 and all 40 columns: by 0.079 of its size, in an "
        "entry by 0.5 at most"
    )
    assert "all 40 rows and column 13:" in describe_matrix("wo", wrong, right)


@pytest.mark.parametrize(
    ("role", "is_function"), others_extra([("k", False), ("q", True), ("v", True)])
)
def test_an_unknown_change_of_one_projection_is_read(role: str, is_function: bool) -> None:
    right = spread()
    wrong = copy.deepcopy(right)
    with torch.no_grad():
        wrong.get_submodule(f"{role}_proj").weight[13, 5:9] += torch.rand(4)  # type: ignore[index, operator]
    diagnosis = compare((lambda x: wrong(x)) if is_function else wrong, right)
    assert diagnosis.verdict is Verdict.UNKNOWN
    assert f"w{role}, read as a matrix, differs in row 13 and columns 5 to 8: " in str(diagnosis)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((288, 289, 290, 291), "288 to 291"),
        ((*range(64, 96), *range(288, 320)), "64 to 95, 288 to 319"),
        ((2, 0, 1), "2 0 1"),
        ((5, 9), "5 9"),
    ],
)
def test_runs_of_numbers_are_short(numbers: tuple[int, ...], says: str) -> None:
    given: dict[str, Any] = {"stages": (), "heads": None, "repair": "", "equals": (), "page": ""}
    cause = FoundCause(name="rows zero", parameters={"rows": numbers}, **given)
    assert cause.parameters_in_words == f"rows {says}"


def test_a_factor_of_some_heads_has_its_number() -> None:
    """Without it nobody can undo it."""
    model = NativeSubject(spread()).model
    weight = model.weights["wq"].clone()
    weight[1] *= 3
    [move] = find_state_moves({**model.weights, "wq": weight}, model.weights).moves
    assert move.name.repair == "undo it in wq: factor: 3, head 1"
