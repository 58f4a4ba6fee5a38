"""The plain recipe of taking heads out, on a small random encoder in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.table import Table
from scipy.stats import binom
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from benchmarks import pruning
from benchmarks.pruning import Head

LAYERS, HEADS, WIDTH, INNER, VOCABULARY = 3, 4, 5, 28, 50
LENGTHS = (13, 7, 2, 9)
ALL = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
    )
    encoder = transformers.BertModel(sizes).double().eval()
    for parameter in encoder.parameters():  # the class begins with biases of zero
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return encoder


def sentences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def batches() -> list[dict[str, Tensor]]:
    """Two batches of two sentences, both padded."""
    pairs = zip(sentences()[::2], sentences()[1::2], strict=True)
    return [
        {
            "input_ids": nn.utils.rnn.pad_sequence(pair, batch_first=True),
            "attention_mask": nn.utils.rnn.pad_sequence(
                [torch.ones_like(ids) for ids in pair], batch_first=True
            ),
        }
        for pair in map(list, pairs)
    ]


def embed_by_hand(model: Any) -> Tensor:
    """Each sentence alone, without padding."""
    means = [model(input_ids=ids[None]).last_hidden_state[0].mean(0) for ids in sentences()]
    return torch.stack([row / row.norm() for row in means])


def without(model: Any, head: Head) -> Tensor:
    """The embeddings with a head's outputs replaced by zeros as the model runs."""

    def hide(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        hidden = inputs[0].clone()
        hidden[..., head[1] * WIDTH : (head[1] + 1) * WIDTH] = 0
        return hidden

    hook = pruning.projections(model)[head[0]].register_forward_pre_hook(hide)
    embeddings = embed_by_hand(model)
    hook.remove()
    return embeddings


def make_constant(model: Any, head: Head) -> None:
    """Let a head put out its value bias at every token."""
    value = model.encoder.layer[head[0]].attention.self.value
    value.weight[head[1] * WIDTH : (head[1] + 1) * WIDTH] = 0


class Words:
    """A tokenizer of blanks."""

    def tokenize(self, sentence: str) -> list[str]:
        return sentence.split()

    def __call__(self, sentences: list[str], *, padding: bool, return_tensors: str) -> Any:
        assert (padding, return_tensors) == (True, "pt")
        return sentences


def test_batches_hold_each_sentence_once_in_the_order_of_length() -> None:
    texts = [" ".join("x" * (i * 7 % 41 + 1)) for i in range(41)]
    made = pruning.batches_of(texts, Words())
    assert [len(batch) for batch in made] == [16, 16, 9]
    assert [len(text.split()) for batch in made for text in batch] == [*range(1, 42)]


def test_padding_has_no_part_in_embeddings_and_head_outputs(model: Any) -> None:
    assert_close(pruning.embed(model, batches()), embed_by_hand(model))
    alone: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    for ids in sentences():
        single = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        for kept, outputs in zip(alone, pruning.head_outputs(model, [single]), strict=True):
            kept.append(outputs)
    for kept, outputs in zip(alone, pruning.head_outputs(model, batches()), strict=True):
        assert outputs.shape == (sum(LENGTHS), HEADS * WIDTH)
        assert_close(outputs, torch.cat(kept))


@pytest.mark.parametrize("head", [(0, 3), (2, 1)])
def test_a_zeroed_head_is_a_head_without_outputs(model: Any, head: Head) -> None:
    outputs = pruning.head_outputs(model, batches())
    pruned = pruning.prune(model, [head], pruning.zeroed, outputs)
    assert_close(embed_by_hand(pruned), without(model, head))


def test_the_mean_is_exact_for_constant_heads(model: Any) -> None:
    heads = [(1, 0), (1, 3), (2, 2)]
    for head in heads:
        make_constant(model, head)
    outputs = pruning.head_outputs(model, batches())
    pruned = pruning.prune(model, heads, pruning.mean, outputs)
    assert_close(embed_by_hand(pruned), embed_by_hand(model))
    for layer, head in heads:
        columns = pruning.projections(pruned)[layer].weight[:, head * WIDTH : (head + 1) * WIDTH]
        assert not columns.any()


def test_a_refit_is_where_the_gradient_of_its_loss_is_zero(model: Any) -> None:
    layer, removed = 1, torch.arange(HEADS * WIDTH) // WIDTH == 2
    original = pruning.projections(model)[layer]
    outputs = pruning.head_outputs(model, batches())
    pruned = pruning.prune(model, [(layer, 2)], pruning.refitted, outputs)
    dense, x = pruning.projections(pruned)[layer], outputs[layer]
    assert not dense.weight[:, removed].any()
    with torch.enable_grad():
        error = (F.linear(x, dense.weight, dense.bias) - original(x).detach()).square().sum(1)
        penalty = pruning.RIDGE * x[:, ~removed].var(0, correction=0).mean()
        loss = error.mean() + penalty * dense.weight.square().sum()
        weight, bias = torch.autograd.grad(loss, (dense.weight, dense.bias))
    nothing = torch.zeros_like(weight)
    assert_close(weight[:, ~removed], nothing[:, ~removed])
    assert_close(bias, torch.zeros_like(bias))
    assert weight[:, removed].abs().max() > 1e4 * weight[:, ~removed].abs().max()


@pytest.mark.parametrize("repair", [pruning.zeroed, pruning.mean, pruning.refitted])
def test_the_model_and_its_other_layers_are_as_they_were(
    model: Any, repair: Callable[..., None]
) -> None:
    outputs = pruning.head_outputs(model, batches())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = pruning.prune(model, [(1, 2)], repair, outputs).state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    names = {name for name, tensor in before.items() if not torch.equal(tensor, changed[name])}
    place = "encoder.layer.1.attention.output.dense."
    biased = set() if repair is pruning.zeroed else {f"{place}bias"}
    assert names == {f"{place}weight"} | biased


def test_ablation_orders_heads_by_what_their_removal_does(model: Any) -> None:
    make_constant(model, (1, 2))
    model.encoder.layer[1].attention.self.value.bias[2 * WIDTH : 3 * WIDTH] = 0
    original = embed_by_hand(model)
    likeness = [(without(model, head) * original).sum(-1).mean().item() for head in ALL]
    order = pruning.by_ablation(model, batches(), pruning.head_outputs(model, batches()))
    assert order == [ALL[i] for i in sorted(range(len(ALL)), key=likeness.__getitem__)[::-1]]
    assert order[0] == (1, 2)


def test_draws_have_no_head_twice_and_differ() -> None:
    draws = {tuple(pruning.draw(ALL, 5, seed)) for seed in range(20)}
    assert len(draws) == 20
    assert all(len({*heads}) == 5 and {*heads} <= {*ALL} for heads in draws)


def test_neighbours_share_the_mean_of_keys_and_values(model: Any) -> None:
    grouped = pruning.regroup(model, HEADS // 2)
    for before, after in zip(model.encoder.layer, grouped.encoder.layer, strict=True):
        for role in ("key", "value"):
            for name in ("weight", "bias"):
                old = getattr(getattr(before.attention.self, role), name).split(WIDTH)
                new = getattr(getattr(after.attention.self, role), name).split(WIDTH)
                for head in range(HEADS):
                    first = head // 2 * 2
                    assert torch.equal(new[head], (old[first] + old[first + 1]) / 2)
        assert torch.equal(before.attention.self.query.weight, after.attention.self.query.weight)
    again = pruning.regroup(grouped, HEADS // 2)
    assert torch.equal(embed_by_hand(again), embed_by_hand(grouped))


def test_the_interval_is_that_of_a_binomial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within three standard errors of so many draws of zeros and ones."""
    monkeypatch.setattr(pruning, "RESAMPLES", 20_000)
    ones, count = 60, 200
    values = torch.arange(count) < ones
    error = 3 * (0.025 * 0.975 / pruning.RESAMPLES) ** 0.5
    bounds = pruning.interval(values.double())
    for bound, level in zip(bounds, (0.025, 0.975), strict=True):
        low, high = binom.ppf([level - error, level + error], count, ones / count) / count
        assert low <= bound <= high


@pytest.mark.extra
def test_headwise_cuts_the_same_heads_by_the_same_measure(model: Any) -> None:
    count = 4
    outputs = pruning.head_outputs(model, batches())
    order = pruning.by_ablation(model, batches(), outputs)
    others = [{**batch, "input_ids": batch["input_ids"] + 1} for batch in batches()]
    for batch in others:
        batch["input_ids"] %= VOCABULARY
    cut = pruning.cut_by_headwise(model, batches(), others, count)
    assert cut.keys() == pruning.PLAIN.keys()
    sizes = [linear.in_features for linear in pruning.projections(cut["zero"])]
    gone = [sum(at == layer for at, _ in order[:count]) for layer in range(LAYERS)]
    assert sizes == [(HEADS - out) * WIDTH for out in gone]
    expected = pruning.prune(model, order[:count], pruning.zeroed, outputs)
    assert_close(embed_by_hand(cut["zero"]), embed_by_hand(expected))
    assert not torch.allclose(embed_by_hand(cut["mean"]), embed_by_hand(cut["zero"]))


def test_the_plain_mean_of_neighbours_is_that_of_the_recipe(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "KV_HEADS", HEADS // 2)
    made = pruning.merged_by_headwise(model, batches())
    assert [*made] == [
        f"{how}, {groups}"
        for how in ("mean", "aligned", "fitted")
        for groups in ("neighbours", "least loss")
    ]
    expected = pruning.regroup(model, pruning.KV_HEADS)
    assert_close(embed_by_hand(made["mean, neighbours"]), embed_by_hand(expected))


def test_a_row_compares_each_sentence_with_its_peer() -> None:
    table = Table(*map(str, range(5)))
    base = torch.linspace(0.5, 0.9, 40, dtype=torch.float64)
    pruning.add_row(table, "cut", "mean", base + 0.01, "zeroed", base)
    pruning.add_row(table, "cut", "zero", base)
    cells = [[*column.cells] for column in table.columns]
    assert cells[2] == ["0.7100", "0.7000"]
    assert cells[3] == ["zeroed", ""]
    assert cells[4] == ["+0.0100 to +0.0100", ""]  # paired: the sentences' spread has no part
