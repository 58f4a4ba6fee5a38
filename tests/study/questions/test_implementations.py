"""Implementations: the verdict turns when one is filled wrongly, or all have one convention."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.study import conventions, encoder
from headwise.study.implementations import (
    GPT2,
    IMPLEMENTATIONS,
    Annotated,
    Bert,
    DropIn,
    EinopsPage,
    HeadwiseAttention,
    Implementation,
    Paper,
    SharedWeights,
    Tensor2Tensor,
    TorchLayer,
    XTransformers,
)
from headwise.study.questions import implementations as question
from tests.study.asking import ask
from tests.study.readings import small_reading
from tests.study.test_questions import documented

pytest.importorskip("transformers")
pytest.importorskip("x_transformers")

FACTS = {
    "random": 0,
    "biased": 1,
    "misread": 2,
    "float64": 3,
    "masks": 4,
    "dropout": 5,
    "blocks": 6,
    "one class": 7,
    "named": 8,
}


misread_causes = question.named_causes_of_misread_weights


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `compare` says is that of the record: the tests of all questions measure it."""
    reading, causes = small_reading(), documented()["implementations"]["numbers"]["misread_causes"]
    monkeypatch.setattr(encoder, "encoder_run", lambda *_: reading)
    monkeypatch.setattr(question, "named_causes_of_misread_weights", lambda _: causes)


def failed() -> set[str]:
    """The facts that do not hold, after asking again."""
    answer = ask("implementations")
    assert len(answer.facts) == len(FACTS)
    found = {name for name, place in FACTS.items() if not answer.facts[place][0]}
    assert answer.holds == (not found)
    assert all(answer.facts[FACTS[name]][1] in answer.verdict for name in found)
    assert answer.rows
    return found


# ---- filled wrongly ----------------------------------------------------------------------------


def held_as(
    change: Callable[[SharedWeights], SharedWeights],
) -> Callable[[type[Implementation]], Any]:
    """A ``held`` that takes the parameters for others."""

    def wrap(layer: type[Implementation]) -> Any:
        right = layer.as_shared_weights
        return lambda self: change(right(self))

    return wrap


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        (GPT2, lambda w: replace(w, out=w.out.mT)),
        pytest.param(Tensor2Tensor, lambda w: replace(w, v=w.v.mT), marks=pytest.mark.slow),
        pytest.param(TorchLayer, lambda w: replace(w, q=w.k, k=w.q), marks=pytest.mark.slow),
        pytest.param(Paper, lambda w: replace(w, out=w.out.flip(1)), marks=pytest.mark.slow),
    ],
)
def test_an_implementation_that_is_filled_wrongly(
    layer: type[Implementation],
    change: Callable[[SharedWeights], SharedWeights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer, "as_shared_weights", held_as(change)(layer))
    assert "random" in failed()


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Annotated, XTransformers, HeadwiseAttention])
def test_an_implementation_of_another_scale(
    layer: type[Implementation], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = layer.load_weights

    def colder(self: Implementation, given: SharedWeights) -> Implementation:
        scale = self.num_heads**-0.5  # that of one head as wide as all
        biases = given.biases and (scale * given.biases[0], *given.biases[1:])
        return fill(self, replace(given, q=scale * given.q, biases=biases))

    monkeypatch.setattr(layer, "load_weights", colder)
    assert "random" in failed()


def test_a_mask_of_the_other_polarity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Annotated, "convert_mask", lambda self, may_attend: ~may_attend)
    answer = ask("implementations")
    assert answer.numbers["largest_share"]["plain"] <= 1
    assert answer.numbers["largest_share"]["masked"] > 1
    assert not answer.facts[0][0]


@pytest.mark.slow
def test_biases_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(w: SharedWeights) -> SharedWeights:
        assert w.biases is not None
        q, k, v, out = w.biases
        return replace(w, biases=(q, v, k, out))

    monkeypatch.setattr(Bert, "as_shared_weights", held_as(swapped)(Bert))
    assert failed() == {"biased"}


@pytest.mark.slow
def test_an_encoder_that_gave_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = small_reading()
    call = replace(reading.calls[0], output=reading.calls[0].output * (1 + 1e-4))
    monkeypatch.setattr(encoder, "encoder_run", lambda *_: replace(reading, calls=(call,)))
    assert failed() == {"biased"}


@pytest.mark.slow
def test_a_check_that_lets_anything_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    loose = question.Budget.for_function

    def of(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Any:
        found = loose(function, *inputs, **options)
        return replace(found, allowed=found.allowed * 1e7)

    monkeypatch.setattr(question.Budget, "for_function", of)
    assert "misread" in failed()


@pytest.mark.slow
def test_weights_that_cannot_be_misread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question, "named_causes_of_misread_weights", misread_causes)
    one = torch.eye(question.EMBED_DIM)
    monkeypatch.setattr(
        SharedWeights, "random", lambda _, *, biased=False: SharedWeights(one, one, one, one)
    )
    monkeypatch.setattr(
        question,
        "make_implementations",
        lambda *_, **__: {"torch": made("torch")},
    )
    found = question.compare_random_weights()
    assert found["least_misread_share"] <= 1
    found = {**documented()["implementations"]["numbers"], **found}
    failed = {name for name, holds in question.facts(found).items() if not holds}
    assert {"misread", "causes"} <= failed


def made(key: str) -> Implementation:
    return IMPLEMENTATIONS[key](question.EMBED_DIM, question.NUM_HEADS).eval()


@pytest.mark.slow
def test_a_layer_that_rounds_what_is_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TorchLayer.forward

    def rounded(self: TorchLayer, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return forward(self, x, mask).float().to(x.dtype)

    monkeypatch.setattr(TorchLayer, "forward", rounded)
    assert failed() == {"float64"}


def test_two_that_are_off_to_either_side() -> None:
    allowed = question.output_error_budget(
        torch.randn(3, 4, 12), SharedWeights.random(12), num_heads=3
    )
    off = {"a": allowed.exact + 0.9 * allowed.allowed, "b": allowed.exact - 0.9 * allowed.allowed}
    assert question.all_pairs_agree(allowed, off)
    off["b"] -= 0.3 * allowed.allowed
    assert not question.all_pairs_agree(allowed, off)


# ---- one convention for all --------------------------------------------------------------------


@pytest.mark.slow
def test_all_read_masks_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def agree(layer: type[Implementation]) -> None:
        forward, spell = layer.forward, layer.convert_mask
        monkeypatch.setattr(
            layer,
            "forward",
            lambda self, x, mask=None: forward(
                self, x, None if mask is None else spell(self, mask.bool())
            ),
        )
        monkeypatch.setattr(layer, "convert_mask", lambda self, may_attend: may_attend)

    for layer in (*set(IMPLEMENTATIONS.values()) - {DropIn},):
        agree(layer)
    assert failed() == {"masks", "one class"}


@pytest.mark.slow
def test_nothing_is_dropped_but_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "dropout", lambda x, *_, **__: x)
    assert failed() == {"dropout"}


@pytest.mark.slow
def test_no_dropout_module_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in (Bert, GPT2):
        forward = layer.forward

        def busy(self: Any, x: Tensor, mask: Any = None, forward: Any = forward) -> Tensor:
            for module in self.modules():
                if isinstance(module, nn.Dropout):
                    module(x)
            result: Tensor = forward(self, x, mask)
            return result

        monkeypatch.setattr(layer, "forward", busy)
    assert failed() == {"dropout"}


@pytest.mark.slow
def test_a_block_that_forgets_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EinopsPage, "compute_block", lambda self, x: self.layer_norm(self(x)))
    assert failed() == {"blocks"}


@pytest.mark.slow
def test_weights_with_the_same_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_each_head(self: TorchLayer, x: Tensor) -> Tensor:
        weights: Tensor = self.inner(x, x, x, average_attn_weights=False)[1]
        return weights

    heads_first = EinopsPage.returned_attention_weights
    monkeypatch.setattr(TorchLayer, "returned_attention_weights", of_each_head)
    monkeypatch.setattr(
        EinopsPage,
        "returned_attention_weights",
        lambda self, x: heads_first(self, x).transpose(0, 1),
    )
    assert failed() == {"blocks"}


@pytest.fixture
def _no_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_fast_path")
def test_torch_without_its_fast_path() -> None:
    assert failed() == {"one class"}


@pytest.mark.slow
def test_kernels_that_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    make = GPT2.__init__
    monkeypatch.setattr(
        GPT2,
        "__init__",
        lambda self, *sizes, implementation="eager", **options: make(self, *sizes, **options),
    )
    assert failed() == {"one class"}


HIDES, KEEPS, ADDS, _ = conventions.KINDS["boolean"]
MEAN, WEIGHTS = "mean of all values", "attention weights"

# ---- the experiments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("annotated", (KEEPS, "−1.0 × 10⁹", MEAN, WEIGHTS, 1, 1, "nothing")),
        ("torch", (HIDES, "−∞", "NaN", WEIGHTS, 0, 0, "nothing")),
        ("einops", (HIDES, "−∞", "NaN", "output", 1, 1, "residual, norm")),
        ("bert", (ADDS, "−3.4 × 10³⁸", MEAN, "both", 2, 1, "residual, norm")),
        ("x_transformers", (KEEPS, "−3.4 × 10³⁸", "zeros", WEIGHTS, 1, 1, "nothing")),
        ("native", ("is refused", "–", "zeros", WEIGHTS, 0, 0, "nothing")),
    ],
)
def test_what_is_known_of_them_is_found(key: str, expected: tuple[Any, ...]) -> None:
    found = conventions.measure_conventions(IMPLEMENTATIONS[key])
    asked = ("boolean", "fill", "empty_row", "dropped", "dropout_modules", "dropout_modules_called")
    said = (found[what] for what in (*asked, "block"))
    plain = (what.replace("\u00a0", " ") if isinstance(what, str) else what for what in said)
    assert tuple(plain) == expected
    assert found["softmax_narrows"] == (key == "x_transformers")


class Odd(Annotated):
    """Adds its input, drops nothing, returns transposed weights, hides with a small number."""

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=0.0)

    def compute_block(self, x: Tensor) -> Tensor:
        return x + self(x)

    def returned_attention_weights(self, x: Tensor) -> Tensor | None:
        weights = super().returned_attention_weights(x)
        return None if weights is None else weights.mT

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and not mask.any(-1).all():
            return x
        return super().forward(x, None)


def test_what_is_odd_is_found() -> None:
    found = conventions.measure_conventions(Odd)
    assert found["block"] == "residual"
    assert found["dropped"] == "nothing"
    assert found["weights"] == "batch, heads, keys, queries"
    assert found["empty_row"] == "something else"
    assert found["boolean"] == ADDS  # the mask is not looked at
    peer = Odd(conventions.EMBED_DIM, conventions.NUM_HEADS)
    assert conventions.depends_on_token(peer, conventions.random_tokens(), -1, query=0)


def test_how_weights_are_initialised() -> None:
    start = conventions.initial_output_projection_std(Annotated, 96, 6)
    assert start == {"out": pytest.approx(96**-0.5, rel=0.02), "copies": True}  # Xavier's
    start = conventions.initial_output_projection_std(GPT2, 96, 6)
    assert start == {"out": pytest.approx(0.02 / 24**0.5, rel=0.02), "copies": False}


def test_sizes_are_written_shortly() -> None:
    assert [question.short_number(x) for x in (5.44e-7, 0.09, 0.69, 1.0)] == [
        "5.4\u00a0×\u00a010⁻⁷",
        "9.0\u00a0×\u00a010⁻²",
        "0.7",
        "1.0",
    ]


def test_hidden_scores_are_listed_with_who_uses_them() -> None:
    found = {"annotated": "−∞", "native": "–", "torch": "−1", "bert": "−∞"}
    assert (
        question.describe_masked_score_values(found)
        == "−∞ (Annotated Transformer, BERT), −1 (PyTorch's layer)"
    )
