"""What a loss must be, the default loss, and that a model is left as it was found."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Mask
from headwise.errors import DTypeError, HeadwiseError, OptionError, ShapeError
from headwise.models import planted, tiny
from headwise.scanning.importance import ablations, gradients, mean_outputs, next_token
from tests.scanning.importance_cases import BATCH, EMBED, LENGTH, Mixing, squares

VOCABULARY = 17


def by_resampling(model: nn.Module, inputs: Any, **options: Any) -> Any:
    return ablations(model, inputs, by="resample", **options)


def by_mean(model: nn.Module, inputs: Any, **options: Any) -> Any:
    return ablations(model, inputs, by="mean", **options)


MEASURES: list[Callable[..., Any]] = [gradients, ablations, by_mean, by_resampling]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        (lambda o, i: o.square().mean(), ShapeError, "a single number"),
        (lambda o, i: o.square().mean(-1), ShapeError, r"gave \(4, 8\)"),
        (lambda o, i: o.tolist(), DTypeError, "gave list"),
        (lambda o, i: o.argmax(-1).sum(-1), DTypeError, "torch.int64"),
    ],
)
def test_a_loss_is_one_number_for_each_sequence(
    measure: Callable[..., Any], loss: Any, kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        measure(Mixing(), torch.randn(BATCH, LENGTH, EMBED), loss=loss)


def test_a_loss_for_gradients() -> None:
    model, x = Mixing(), torch.randn(BATCH, LENGTH, EMBED)
    with pytest.raises(OptionError, match="has no gradient"):
        gradients(model, x, loss=lambda o, i: squares(o.detach(), i))
    with pytest.raises(ShapeError, match="gave 32 numbers; first has a batch of 4"):
        gradients(model, x, loss=lambda o, i: o.square().mean(-1).flatten())


# ---- the default loss --------------------------------------------------------------------------


class Language(nn.Module):
    """Tokens in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(VOCABULARY, EMBED), Mixing()
        self.head = nn.Linear(EMBED, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        lengths = None if attention_mask is None else attention_mask.sum(-1)
        return SimpleNamespace(logits=self.head(self.body(self.tokens(input_ids), lengths)))


def words() -> dict[str, Tensor]:
    real = torch.arange(LENGTH) < torch.tensor([8, 5, 2, 3])[:, None]
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": ids, "attention_mask": real.long()}


def test_the_default_loss_by_hand() -> None:
    model, inputs = Language().double(), words()
    # What padding says is not read, be it infinite.
    output = model(**inputs)
    output.logits = output.logits.masked_fill(inputs["attention_mask"][..., None] == 0, torch.inf)
    found = next_token(output, inputs)
    ids, lengths = inputs["input_ids"], inputs["attention_mask"].sum(-1).tolist()
    for row, length in enumerate(lengths):
        log_p = output.logits[row, : length - 1].log_softmax(-1)
        each = [-log_p[i, ids[row, i + 1]] for i in range(length - 1)]
        torch.testing.assert_close(found[row], torch.stack(each).mean())


def test_padding_on_the_left_is_not_read() -> None:
    logits = torch.randn(2, 5, VOCABULARY)
    ids = torch.randint(VOCABULARY, (2, 5))
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    found = next_token({"logits": logits}, {"input_ids": ids, "attention_mask": real})
    alone = next_token({"logits": logits[:1, 2:]}, ids[:1, 2:])
    torch.testing.assert_close(found[:1], alone)


@pytest.mark.parametrize("measure", MEASURES)
def test_the_default_loss_is_taken(measure: Callable[..., Any]) -> None:
    model, inputs = Language().double(), words()
    default, said = measure(model, inputs), measure(model, inputs, loss=next_token)
    for name in default.names:
        assert torch.equal(default[name], said[name])
        assert torch.all(default[name] != 0)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("ahead", [1, None])
def test_a_model_that_sees_the_next_token_has_no_default(
    measure: Callable[..., Any], ahead: int | None
) -> None:
    class Sees(Language):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            x = self.tokens(input_ids)
            attended = self.body.second(x, mask=Mask.window(None, ahead, align="top-left"))
            return SimpleNamespace(logits=self.head(x + attended))

    model, inputs = Sees(), words()
    with pytest.raises(OptionError, match=r"body\.second attends to later tokens"):
        measure(model, inputs)
    measure(model, inputs, loss=next_token)  # whoever asks for it gets it


@pytest.mark.parametrize(
    ("output", "inputs", "message"),
    [
        (torch.randn(2, 5), torch.zeros(2, 5).long(), r"no logits: .* of shape \(2, 5\)"),
        ((None, torch.randn(2, 6, 3)), torch.zeros(2, 5).long(), r"tuple of None, .*\(2, 6, 3\)"),
        (torch.randn(2, 5, 3), torch.full((2, 5), 3), r"\(2, 5, 3\) for tokens from 3 to 3"),
        (torch.randn(2, 5, 3), (torch.zeros(2, 5).long(), torch.ones(2)), "without token ids"),
        ({"logits": torch.randn(2, 5, 3)}, {"pixels": torch.randn(2, 5)}, "without token ids"),
        ({"logits": torch.randn(2, 5, 3)}, torch.randn(2, 5), "without token ids"),
        ({"logits": torch.randn(2, 3)}, torch.zeros(2, 5).long(), r"\(2, 3\)"),
        ({"logits": torch.randn(2, 6, 3)}, torch.zeros(2, 5).long(), r"\(2, 6, 3\)"),
        ({"logits": torch.randn(2, 1, 3)}, torch.zeros(2, 1).long(), "sequence 0 .* 1 real"),
    ],
)
def test_what_has_no_default_loss(output: Any, inputs: Any, message: str) -> None:
    with pytest.raises((OptionError, ShapeError), match=message):
        next_token(output, inputs)


@pytest.mark.parametrize("measure", [gradients, ablations])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (None, x, x[:, :1])])
def test_logits_without_a_name(measure: Callable[..., Any], wrap: Callable[[Tensor], Any]) -> None:
    """They are told from a state by their width: the rows of the embedding that looked ids up."""

    class Plain(Language):
        def forward(self, ids: Tensor) -> Any:  # type: ignore[override]
            return wrap(super().forward(ids).logits)

    class States(Language):
        def forward(self, ids: Tensor) -> Any:  # type: ignore[override]
            return wrap(self.body(self.tokens(ids)))

    model, states, ids = Plain().double(), States().double(), words()["input_ids"]
    named = Language().double()
    named.load_state_dict(model.state_dict())
    found, expected = measure(model, ids), measure(named, ids)
    for name in expected.names:
        assert torch.equal(found[name], expected[name])
    with pytest.raises(OptionError, match=f"vocabulary {VOCABULARY}"):
        measure(states, ids)
    measure(states, ids % EMBED, loss=next_token)  # whoever asks for it gets it


def test_a_state_as_wide_as_the_vocabulary_is_not_taken_for_logits() -> None:
    class States(Language):
        def forward(self, ids: Tensor) -> Any:  # type: ignore[override]
            return self.body(self.tokens(ids))

    model = States().double()
    model.tokens = nn.Embedding(EMBED, EMBED).double()
    with pytest.raises(OptionError, match="vocabulary tokens"):
        gradients(model, words()["input_ids"] % EMBED)


def test_the_models_that_ship() -> None:
    text = tiny.encode("def f(x):\n    return f(x)\n" * 3)[None]
    assert bool((gradients(tiny.load(), text)["taylor"] > 0).all())
    ids = torch.randint(2, planted.VOCABULARY, (2, 9))
    model = planted.model()
    assert torch.equal(
        gradients(model, (ids,))["taylor"], gradients(model, ids, loss=next_token)["taylor"]
    )


# ---- the model is left as it was found ---------------------------------------------------------


class Odd(Mixing):
    """Modules in different modes, some parameters frozen, gradients of earlier steps."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.train()
        self.second.eval()
        self.first.q_proj.weight.requires_grad_(False)
        self.network.weight.grad = torch.full_like(self.network.weight, 2.0)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.dropout(super().forward(x, lengths))

    def state(self) -> list[Any]:
        found: list[Any] = [module.training for module in self.modules()]
        found += [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.modules()]
        for parameter in self.parameters():
            gradient = parameter.grad
            found += [parameter.requires_grad, None if gradient is None else gradient.tolist()]
            found += [parameter.tolist(), parameter._backward_hooks]
        return found


@pytest.mark.parametrize("measure", [*MEASURES, lambda m, x, loss: mean_outputs(m, x)])
def test_a_model_is_left_as_it_was_found(measure: Callable[..., Any]) -> None:
    model, x = Odd(), torch.randn(BATCH, LENGTH, EMBED)
    before = model.state()
    for outer in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with outer:
            grad = torch.is_grad_enabled()
            measure(model, x, loss=squares)
            assert torch.is_grad_enabled() == grad
            assert model.state() == before


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("passes", [0, 1, 3])
def test_a_model_is_left_as_it_was_found_after_an_error(
    measure: Callable[..., Any], passes: int
) -> None:
    model, left = Odd(), [passes]

    def fails(output: Tensor, given: Tensor) -> Tensor:
        if not left[0]:
            raise ZeroDivisionError
        left[0] -= 1
        return squares(output, given)

    before = model.state()
    inputs = [torch.randn(BATCH, LENGTH, EMBED) for _ in range(4)]
    with pytest.raises(ZeroDivisionError):
        measure(model, inputs, loss=fails)
    assert model.state() == before


@pytest.mark.parametrize("measure", MEASURES)
def test_a_graph_is_kept_for_gradients_alone(measure: Callable[..., Any]) -> None:
    seen: list[bool] = []

    def loss(output: Tensor, given: Tensor) -> Tensor:
        seen.append(output.requires_grad)
        return squares(output, given)

    with torch.set_grad_enabled(measure is not gradients):
        measure(Mixing(), torch.randn(BATCH, LENGTH, EMBED), loss=loss)
    assert set(seen) == {measure is gradients}


@pytest.mark.parametrize("measure", MEASURES)
def test_dropout_is_off(measure: Callable[..., Any]) -> None:
    model, x = Odd(), torch.randn(BATCH, LENGTH, EMBED)
    first, second = (measure(model, x, loss=squares) for _ in range(2))
    for name in first.names:
        assert torch.equal(first[name], second[name])


def test_no_attention() -> None:
    for measure in MEASURES:
        with pytest.raises(OptionError, match="the layers whose attention was captured"):
            measure(nn.Linear(EMBED, 3), torch.randn(BATCH, LENGTH, EMBED), loss=squares)
