"""`compare`: each verdict on layers and functions whose relation is known."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, Mask, Rotary, compare
from headwise.diagnosis.simulation.gaps import measure_gaps
from headwise.diagnosis.simulation.model import Inputs
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.errors import OptionError, ShapeError
from headwise.identify.results import Verdict
from headwise.layers.distance import Alibi
from headwise.testing import assert_same_function
from tests.diagnosis.test_stopped import interrupt_at
from tests.quick import others_extra, others_slow

WIDTH, HEADS = 40, 5


def layer(**options: object) -> Attention:
    torch.manual_seed(0)
    return Attention(WIDTH, HEADS, **options)  # type: ignore[arg-type]


def pair(mine: dict[str, object], theirs: dict[str, object]) -> tuple[Attention, Attention]:
    a, b = layer(**mine), layer(**theirs)
    b.load_state_dict(a.state_dict())
    return a, b


def torch_pair() -> tuple[nn.MultiheadAttention, Attention]:
    torch.manual_seed(0)
    original = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    state = original.state_dict()
    return original, Attention.from_layout(state, layout="torch-packed", num_heads=HEADS)


def test_a_copy_is_the_same() -> None:
    a = layer(rotary=Rotary())
    assert compare(a, copy.deepcopy(a)).verdict is Verdict.SAME


def test_interleaved_layers_keep_the_order_of_their_channels() -> None:
    """The data of a layer predict its own stages without any cause."""
    subject = NativeSubject(layer(rotary=Rotary(pairing="interleaved")))
    call = subject.record(Inputs(torch.randn(2, 7, WIDTH)))
    assert not measure_gaps(subject.model, [call]).cells_beyond_rounding


@pytest.mark.slow
def test_a_scale_that_was_folded_into_float32_weights_is_the_same_function() -> None:
    """A third is rounded in each weight, by more than the float64 run rounds."""
    a = layer()
    b = layer(scale=3 * a.head_dim**-0.5)
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        b.q_proj.weight.div_(3)
        b.q_proj.bias.div_(3)
    assert compare(a, b).verdict is Verdict.OTHER_WEIGHTS


def test_torchs_layer_and_its_port_are_the_same() -> None:
    assert compare(*torch_pair()).verdict in (Verdict.SAME, Verdict.TO_ROUNDING)


def test_another_theta_is_named_with_its_repair() -> None:
    diagnosis = compare(*pair({"rotary": Rotary(theta=5e5)}, {"rotary": Rotary()}))
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert cause.name == "rotary theta"
    assert cause.parameters["theta"] == pytest.approx(5e5, rel=1e-4)
    assert cause.repair == "Rotary(theta=10000)"
    assert Path(cause.page).name == "rotary-theta.md"
    assert Path(cause.page).is_file()
    assert cause.lines[-1] == f"  more: {cause.page}"
    assert [stage.stage for stage in diagnosis.function.parted] == [
        "q after rotary",
        "k after rotary",
    ]


@pytest.mark.slow
def test_a_function_is_known_by_its_outputs_alone() -> None:
    original, port = torch_pair()

    def black_box(x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows = (len(x), HEADS, x.shape[1], x.shape[1])
        hidden = None if mask is None else ~mask.expand(rows).flatten(0, 1)
        with torch.no_grad():
            output: Tensor = original(x, x, x, attn_mask=hidden)[0]
            return output

    assert compare(black_box, port).verdict is Verdict.TO_ROUNDING
    port.scale = 0.31
    diagnosis = compare(black_box, port)
    assert diagnosis.function is not None
    assert [cause.name for cause in diagnosis.function.causes] == ["scale"]


def test_permuted_heads_are_the_same_function_with_other_weights() -> None:
    a, b = pair({}, {})
    with torch.no_grad():
        order = torch.randperm(HEADS)
        for projection in (b.q_proj, b.k_proj, b.v_proj):
            projection.weight.copy_(
                projection.weight.unflatten(0, (HEADS, -1))[order].flatten(0, 1)
            )
            bias = projection.bias
            bias.copy_(bias.unflatten(0, (HEADS, -1))[order].flatten())
        columns = b.out_proj.weight.unflatten(1, (HEADS, -1))[:, order]
        b.out_proj.weight.copy_(columns.flatten(1))
    assert compare(a, b).verdict is Verdict.OTHER_WEIGHTS


@pytest.mark.slow
def test_one_token_cannot_show_another_scale() -> None:
    a, b = pair({"scale": 0.2}, {"scale": 0.9})
    diagnosis = compare(a, b, torch.randn(2, 1, WIDTH))
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert not diagnosis
    assert "one key" in str(diagnosis)
    assert compare(a, b).verdict is Verdict.DIFFERENT


def test_saturated_weights_cannot_show_another_scale() -> None:
    a, b = pair({}, {})
    a.scale, b.scale = 1e8, 2e8
    diagnosis = compare(a, b, torch.randn(1, 6, WIDTH))
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "saturated" in str(diagnosis)


@pytest.mark.parametrize(("width", "seed"), [(64, 3), pytest.param(512, 1, marks=pytest.mark.slow)])
def test_saturated_weights_that_hide_the_number_of_heads_are_named(width: int, seed: int) -> None:
    """Scores move the weights by less than float32 holds, and by more than float64 rounds."""
    layers = [nn.MultiheadAttention(width, heads, batch_first=True) for heads in (8, 1)]
    for each in layers:
        for name, parameter in each.named_parameters():
            nn.init.constant_(parameter, 0.0 if "bias" in name else 1.0)
    torch.manual_seed(seed)
    diagnosis = compare(*layers, torch.randn(1, 5, width))
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert diagnosis.function is not None
    assert diagnosis.function.blind.startswith("saturated: ")


@pytest.mark.slow
def test_a_window_longer_than_the_input_is_inconclusive() -> None:
    a, b = pair({"window": (7, 0)}, {"window": (8, 0)})
    diagnosis = compare(a, b, torch.randn(2, 6, WIDTH))
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "the window is 8 keys in the first and 9 keys in the second" in str(diagnosis)
    assert compare(a, b).verdict is Verdict.DIFFERENT
    a, b = pair({"window": (299, 0)}, {"window": (300, 0)})
    assert compare(a, b).verdict is Verdict.INCONCLUSIVE


@pytest.mark.slow
def test_inputs_are_longer_than_a_known_window() -> None:
    a, b = pair({"window": (63, 0)}, {"window": (64, 0)})
    diagnosis = compare(a, b)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert (cause.name, cause.parameters) == ("window off by one", {"window": 64})


@pytest.mark.parametrize(
    ("window", "without"),
    others_extra([((63, 0), (None, 0)), ((70, None), None), ((3, 12), (3, None))]),
)
def test_a_function_without_the_window_of_a_layer_differs(window: object, without: object) -> None:
    a, b = pair({"window": without}, {"window": window})
    for port in (a, b):
        with torch.no_grad():
            diagnosis = compare(lambda x, mask=None, port=port: port(x, mask=mask_of(mask)), b)
        assert diagnosis.verdict is (Verdict.SAME if port is b else Verdict.DIFFERENT), diagnosis


@pytest.mark.slow
def test_a_window_that_no_input_reaches_is_inconclusive_beside_a_function() -> None:
    b = layer(window=(4095, 0))
    diagnosis = compare(lambda x, mask=None: b(x, mask=mask_of(mask)), b)
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "the window is 4096 keys in the second, and inputs of 40 tokens" in str(diagnosis)


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (
            lambda w: w.unflatten(0, (3, HEADS, -1)).transpose(0, 1).flatten(0, 2),
            "nesting of fused rows",
        ),
        (lambda w: w.unflatten(0, (3, -1))[[1, 2, 0]].flatten(0, 1), "order of fused rows"),
    ],
)
def test_fused_rows_are_named_beside_an_input_with_a_source(
    rows: Callable[[Tensor], Tensor], name: str
) -> None:
    original, _ = torch_pair()
    port = copy.deepcopy(original)
    for parameter in (port.in_proj_weight, port.in_proj_bias):
        parameter.data = rows(parameter.data)
    diagnosis = compare(port, original)
    assert diagnosis.function is not None
    assert diagnosis.function.cause_names == [name]
    assert any("attend to 7 others" in probe for probe in diagnosis.function.probes)


def test_scores_that_overflow_the_dtype_of_one_layer_are_not_the_same() -> None:
    """Returned weights take a product of float16, and torch's fused kernel does not."""
    original, _ = torch_pair()
    original.in_proj_weight.data[: 2 * WIDTH] *= 100
    original = original.half()
    twin = Attention.from_layout(original.state_dict(), layout="torch-packed", num_heads=HEADS)
    diagnosis = compare(original, twin)
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "in float16, its own dtype, " in str(diagnosis)
    assert "outputs of the first are NaN on 11 random tokens, three times as large" in str(
        diagnosis
    )
    assert compare(original.float(), twin.float())


def mask_of(mask: Tensor | None) -> Mask | None:
    return None if mask is None else Mask.may_attend(mask[:, 0], axes="batch queries keys")


PORTS: dict[str, Callable[[Attention, Tensor, Tensor | None, Tensor | None], Tensor]] = {
    "right": lambda b, x, s, m: b(x, s, mask=mask_of(m)),
    "the mask ignored": lambda b, x, s, m: b(x, s),
    "causal in place of the mask": lambda b, x, s, m: b(
        x, s, mask=None if m is None else Mask.causal(align="top-left")
    ),
    "the mask of the first sequence for all": lambda b, x, s, m: b(
        x, s, mask=None if m is None else mask_of(m[:1].expand_as(m))
    ),
    "left padding alone": lambda b, x, s, m: b(
        x, s, mask=None if m is None or m[0, 0, -1, 0] else mask_of(m)
    ),
    "the source ignored": lambda b, x, s, m: b(x, None, mask=mask_of(m)),
}
SEARCHED = ("right", "the mask ignored")


@pytest.mark.parametrize(
    ("name", "is_searched"),
    [
        *((name, False) for name in PORTS),
        *others_extra([(name, True) for name in PORTS], *((name, True) for name in SEARCHED)),
    ],
)
def test_a_function_that_ignores_an_argument_differs(name: str, is_searched: bool) -> None:
    b = layer()

    def port(x: Tensor, source: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return PORTS[name](b, x, source, mask)

    diagnosis = compare(port, b, progress=None if is_searched else interrupt_at("trying"))
    assert diagnosis.verdict.is_same == (name == "right"), diagnosis
    causes = [] if diagnosis.function is None else diagnosis.function.cause_names
    is_named = is_searched and name == "the mask ignored"
    assert causes == (["padding ignored"] if is_named else [])


def test_arguments_that_a_function_does_not_take_are_listed() -> None:
    b = layer()
    diagnosis = compare(lambda x, other=None, **options: b(x), b)
    assert diagnosis.verdict is Verdict.SAME
    assert diagnosis.function is not None
    assert diagnosis.function.unprobed == (
        "a mask (the first has no argument mask)",
        "a source (the first has no argument source)",
    )
    assert "not probed: a mask (the first has no argument mask), and a source" in str(diagnosis)
    inputs = Inputs(torch.randn(2, 6, WIDTH), mask=torch.ones(6, 6, dtype=torch.bool))
    with pytest.raises(OptionError, match="inputs with a mask for function"):
        compare(lambda x, **options: b(x), b, inputs)


@pytest.mark.slow
def test_a_softcap_that_scores_do_not_reach_is_inconclusive() -> None:
    a, b = pair({}, {"softcap": 50.0})
    small = 0.02 * torch.randn(2, 6, WIDTH)
    assert compare(lambda x: b(x), b).verdict is Verdict.SAME
    assert not compare(lambda x: a(x), b).verdict.is_same
    diagnosis = compare(lambda x: a(x), b, small)
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "the softcap is 50 in the second, and inputs of 6 tokens do not show it" in str(
        diagnosis
    )


def test_other_settings_are_tried_on_other_inputs() -> None:
    a, b = pair({"softcap": 1e7}, {})
    diagnosis = compare(a, b, 0.1 * torch.randn(2, 6, WIDTH))
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "differ on those that headwise makes" in str(diagnosis)
    # One pair of channels turns by 1 for each theta.
    a, b = pair({"rotary": Rotary(width=2)}, {"rotary": Rotary(width=2, theta=5e5)})
    assert compare(a, b, torch.randn(2, 6, WIDTH)).verdict.is_same


def test_dropout_in_training_is_inconclusive() -> None:
    a = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dropout=0.2)
    b = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    b.load_state_dict(a.state_dict())
    diagnosis = compare(a, b)
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "dropout is 0.2 in the first and 0 in the second" in str(diagnosis)
    assert compare(a.eval(), b.eval()).verdict is Verdict.SAME


@pytest.mark.parametrize(
    "make", others_slow([torch_pair, lambda: pair({"dropout": 0.5}, {"dropout": 0.5})])
)
def test_a_layer_in_training_is_not_its_twin_in_evaluation(
    make: Callable[[], tuple[nn.Module, nn.Module]],
) -> None:
    a, _ = make()
    a.dropout = 0.5  # type: ignore[assignment] (of both kinds of layers)
    b = copy.deepcopy(a).eval()
    diagnosis = compare(a.train(), b)
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "dropout is 0.5 in the first and 0 in the second" in str(diagnosis)
    assert compare(b, a).verdict is Verdict.INCONCLUSIVE
    assert compare(a.eval(), b).verdict is Verdict.SAME


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    others_slow(
        [
            ({"num_heads": 6, "head_dim": 8}, {"num_heads": 5}, "q has 6 heads against 5"),
            (
                {"num_heads": 6, "head_dim": 7},
                {"num_heads": 3, "head_dim": 10},
                "q has 6 heads of 7 channels against 3 of 10",
            ),
            (
                {"num_heads": 5, "value_dim": 7},
                {"num_heads": 5},
                "v has 5 heads of 7 channels against 5 of 8",
            ),
            (
                {"num_heads": 5, "out_dim": 24},
                {"num_heads": 5},
                "output has 24 channels against 40",
            ),
        ]
    ),
)
def test_layers_of_other_sizes_are_told_by_their_sizes(
    mine: dict[str, int], theirs: dict[str, int], words: str
) -> None:
    """No weight of one fits the other, as in every pruned layer."""
    a, b = Attention(WIDTH, **mine), Attention(WIDTH, **theirs)
    diagnosis = compare(a, b)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert diagnosis.answer == f"Different: {words}."
    stage, _, first = words.partition(" has ")
    numbers = first.split(" against ")
    swapped = compare(b, a)
    assert swapped.verdict is Verdict.DIFFERENT
    assert all(number.split()[0] in swapped.answer for number in numbers)
    assert f"{stage} has {numbers[1].split()[0]}" in swapped.answer


@pytest.mark.slow
def test_other_numbers_of_kv_heads_are_told() -> None:
    a, b = Attention(WIDTH, 4, num_kv_heads=2), Attention(WIDTH, 4, num_kv_heads=4)
    assert "k: 2 heads against 4" in str(compare(a, b))


@pytest.mark.slow
def test_what_the_inputs_could_not_have_shown_is_listed() -> None:
    a = layer(window=(7, 0), rotary=Rotary())
    diagnosis = compare(lambda x: a(x), a, 0.2 * torch.randn(2, 16, WIDTH))
    assert diagnosis.function is not None
    assert diagnosis.function.unseen == ("a softcap of 50",)
    assert "could not have shown a softcap of 50" in str(diagnosis)
    diagnosis = compare(lambda x: a(x), a)
    assert diagnosis.function is not None
    assert diagnosis.function.unseen == ()


@pytest.mark.slow
def test_noise_in_a_projection_has_no_known_cause() -> None:
    a, b = pair({}, {})
    with torch.no_grad():
        a.v_proj.weight += 0.1 * torch.randn_like(a.v_proj.weight)
    diagnosis = compare(a, b)
    assert diagnosis.verdict is Verdict.UNKNOWN
    assert diagnosis.function is not None
    assert [stage.stage for stage in diagnosis.function.parted] == ["v"]


def test_an_assertion_has_the_diagnosis_as_its_message() -> None:
    a, b = pair({"scale": 0.2}, {})
    assert_same_function(a, copy.deepcopy(a))
    with pytest.raises(AssertionError, match=r"scale 0\.2 in the first"):
        assert_same_function(a, b)


def test_functions_that_cannot_be_compared_are_refused() -> None:
    b = layer()
    drops = nn.Dropout(0.5)
    with pytest.raises(OptionError, match="random outputs: a second run"):
        compare(lambda x, mask=None: drops(x), b)
    with pytest.raises(OptionError, match="changes its input"):
        compare(lambda x, mask=None: x.mul_(2), b)
    with pytest.raises(OptionError, match="which are all NaN or infinite"):
        compare(lambda x, mask=None: x * torch.nan, b)
    with pytest.raises(OptionError, match="output of type str"):
        compare(lambda x, mask=None: "text", b)
    with pytest.raises(ShapeError, match="width 40, b of width 48"):
        compare(b, Attention(48, 4))
    with pytest.raises(OptionError, match="a of type int"):
        compare(3, b)  # type: ignore[arg-type]


def test_another_number_of_heads_is_named_with_a_bias_by_distance() -> None:
    torch.manual_seed(0)
    a, b = (Attention(48, heads, score_bias=Alibi()) for heads in (6, 4))
    b.load_state_dict(a.state_dict())
    diagnosis = compare(a, b)
    assert diagnosis.function is not None
    assert [cause.name for cause in diagnosis.function.causes] == ["number of heads"]


@pytest.mark.slow
def test_kv_heads_that_are_repeated_in_the_weights_are_the_same_function() -> None:
    torch.manual_seed(0)
    a, b = Attention(24, 6, num_kv_heads=2, head_dim=5), Attention(24, 6, head_dim=5)
    state = a.state_dict()
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        rows = state[name].unflatten(0, (2, 5))
        state[name] = rows.repeat_interleave(3, 0).flatten(0, 1)
    b.load_state_dict(state)
    x = torch.randn(2, 7, 24)  # without a source, so that norms of the input are fitted
    assert compare(a, b, x).verdict.is_same
    assert compare(b, a, x).verdict.is_same
