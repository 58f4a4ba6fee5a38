"""Statistics that read a weight, where the module around it is more than the weight.

A merged adapter gives the weight that the statistic has to be of. Of the adapted model it is the
same, or it is missing.
"""

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import headwise
from headwise import HeadwiseError, scan
from headwise.scanning import context

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

IDS = torch.randint(3, 60, (3, 23), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 61, "hidden_size": 60, "num_hidden_layers": 2, "intermediate_size": 56}
SHARP = {"initializer_range": 0.4, "max_position_embeddings": 40}
# All statistics that read the output projection or the unembedding.
OF_OUT_PROJ = ["contribution_norm", "relative_contribution", "value_weighted", "output_cosine"]
NAMES = [*OF_OUT_PROJ, "copying"]


def llama() -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**SIZES, **SHARP, **heads)
    return transformers.LlamaForCausalLM(config).eval()


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, **SHARP, num_attention_heads=6)
    return transformers.BertForMaskedLM(config).eval()


def adapted(model: Any, target: str, *, kind: Any = peft.LoraConfig, **options: Any) -> Any:
    """A model with an adapter that changes its outputs."""
    if kind is peft.LoraConfig:
        options = {"r": 4, "init_lora_weights": False, **options}
    given = kind(target_modules=target, **options)
    torch.manual_seed(1)
    changed = peft.get_peft_model(copy.deepcopy(model), given).eval()
    if kind is peft.IA3Config:
        with torch.no_grad():
            [p.uniform_(0.5, 2.0) for n, p in changed.named_parameters() if "ia3" in n]
    with torch.no_grad():
        assert not torch.allclose(changed(IDS).logits, model(IDS).logits, atol=1e-3)
    return changed


def measured(model: Any, names: list[str]) -> dict[str, Tensor]:
    """The named statistics that a scan of the model has; those that it lacks are left out."""
    found = {}
    for name in names:
        try:
            found[name] = scan(model, IDS, statistics=[name])[name]
        except HeadwiseError as error:
            if "a product with its weight alone" not in str(error):
                raise
    return found


def assert_none_is_of_the_base(model: Any, names: list[str], *, missing: set[str]) -> None:
    merged = measured(copy.deepcopy(model).merge_and_unload().eval(), names)
    got = measured(model, names)
    assert set(merged) == set(names)
    assert set(names) - set(got) == missing
    for name, value in got.items():
        torch.testing.assert_close(value, merged[name], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kind", [peft.LoraConfig, peft.IA3Config])
def test_an_adapter_around_the_unembedding(kind: Any) -> None:
    options = {"feedforward_modules": []} if kind is peft.IA3Config else {}
    model = adapted(llama(), r".*lm_head", kind=kind, **options)
    assert_none_is_of_the_base(model, NAMES, missing={"copying"})


@pytest.mark.parametrize(
    ("make", "target"), [(llama, r".*o_proj"), (bert, r".*attention\.output\.dense")]
)
def test_an_adapter_around_the_output_projection(make: Callable[[], Any], target: str) -> None:
    """Inside the attention module (Llama), and behind it (BERT)."""
    names = NAMES if make is llama else OF_OUT_PROJ
    assert_none_is_of_the_base(adapted(make(), target), names, missing=set(names))


def test_an_adapter_elsewhere() -> None:
    assert_none_is_of_the_base(adapted(llama(), r".*[qv]_proj"), NAMES, missing=set())


def test_an_adapter_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the base model, so all its statistics are known.

    No call is known by its place in memory, which a later call may get again.
    """
    monkeypatch.setattr(context, "id", lambda _: 0, raising=False)
    plain = bert()
    changed = adapted(plain, r".*attention\.output\.dense")
    changed.base_model.disable_adapter_layers()
    got, expected = measured(changed, OF_OUT_PROJ), measured(plain, OF_OUT_PROJ)
    assert got.keys() == expected.keys() == set(OF_OUT_PROJ)
    assert all(torch.equal(got[name], expected[name]) for name in got)


class Wrapped(nn.Module):
    """An adapter that people write: the projection, and two matrices beside it."""

    def __init__(self, base: nn.Linear, *, as_modules: bool) -> None:
        super().__init__()
        self.base = base
        a, b = torch.randn(base.in_features, 3) * 0.1, torch.randn(3, base.out_features) * 0.1
        self.as_modules = as_modules
        if as_modules:
            self.down, self.up = nn.Linear(*a.shape, bias=False), nn.Linear(*b.shape, bias=False)
        else:
            self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.up(self.down(x)) if self.as_modules else x @ self.a @ self.b
        whole: Tensor = self.base(x) + beside
        return whole


@pytest.mark.parametrize("as_modules", [False, True])
def test_an_adapter_of_ones_own(*, as_modules: bool) -> None:
    model = bert()
    for layer in model.bert.encoder.layer:
        part = layer.attention.output
        part.dense = Wrapped(part.dense, as_modules=as_modules)
    assert measured(model, OF_OUT_PROJ) == {}


class Drop(nn.Module):
    """A model around the drop-in, which calls its output projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(61, 42)
        self.attention = headwise.MultiheadAttention(42, 6, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        state: Tensor = x + self.attention(x, x, x, need_weights=False)[0]
        return state


def test_the_drop_in_with_an_adapter_or_a_hook() -> None:
    names = ["contribution_norm", "value_weighted"]
    expected = measured(Drop().eval(), names)
    assert set(expected) == set(names)
    adapted_layer, hooked = Drop().eval(), Drop().eval()
    projection: Any = adapted_layer.attention.out_proj
    adapted_layer.attention.out_proj = Wrapped(projection, as_modules=False)  # type: ignore[assignment]
    hooked.attention.out_proj.register_forward_hook(lambda _m, _x, output: 2 * output)
    assert measured(adapted_layer, names) == measured(hooked, names) == {}
