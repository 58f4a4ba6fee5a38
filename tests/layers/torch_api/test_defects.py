"""Every defect that was measured in torch 2.13's layer (CPU), as something this layer does right.

Where torch's own behaviour is stable enough to state, the test states it as well: it shows that
the test sees the defect. Those statements are about the release they were measured on.
"""

import itertools

import pytest
import torch
from torch import Tensor, nn

from headwise import MultiheadAttention, upgrade
from tests.honest import hides_a_whole_sequence
from tests.layers.torch_api.cases import BATCH, EMBED, HEADS, KEYS, QUERIES, causal, pair

MEASURED = torch.__version__.startswith(("2.13.", "2.14."))


def self_attention(batch: int = BATCH, length: int = QUERIES) -> Tensor:
    return torch.randn(batch, length, EMBED, dtype=torch.float64)


def first_sample_padded() -> Tensor:
    """Every key of sample 0 is padding."""
    padding = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    padding[0] = True
    return padding


def every_path(layer: nn.MultiheadAttention, x: Tensor, **options: object) -> list[Tensor]:
    """Outputs over need_weights, grad mode, train/eval, and the identity of q, k, v."""
    outputs = []
    for need_weights, grad, training, same in itertools.product([False, True], repeat=4):
        layer.train(training)
        inputs = (x, x, x) if same else (x, x.clone(), x.clone())
        with torch.set_grad_enabled(grad):
            outputs.append(layer(*inputs, need_weights=need_weights, **options)[0].detach())
    return outputs


# ---- rows that may attend to nothing ----------------------------------------------------------


@hides_a_whole_sequence
@pytest.mark.parametrize("num_heads", [6, 5])
def test_a_fully_padded_sample_gives_zeros_on_every_path(num_heads: int) -> None:
    ours = MultiheadAttention(EMBED, num_heads, batch_first=True, dtype=torch.float64)
    nn.init.normal_(ours.out_proj.bias)
    x, padding = self_attention(), first_sample_padded()
    alone = ours(x[1:], x[1:], x[1:])[0]
    for output in every_path(ours, x, key_padding_mask=padding):
        torch.testing.assert_close(output[0], ours.out_proj.bias.expand(QUERIES, EMBED))
        torch.testing.assert_close(output[1:], alone)  # other samples are untouched
    weights = ours(x, x, x, key_padding_mask=padding, average_attn_weights=False)[1]
    assert weights[0].eq(0).all()
    torch.testing.assert_close(weights[1:].sum(-1), torch.ones(2, num_heads, QUERIES).double())


@pytest.mark.skipif(not MEASURED, reason="documents torch 2.13")
def test_torch_gives_nan_for_a_fully_padded_sample_on_some_paths() -> None:
    theirs, _ = pair(batch_first=True)
    outputs = every_path(theirs, self_attention(), key_padding_mask=first_sample_padded())
    assert {bool(output.isnan().any()) for output in outputs} == {True, False}


@hides_a_whole_sequence
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_fully_padded_sample_has_finite_gradients(kind: str, need_weights: bool) -> None:
    _, ours = pair(batch_first=True)
    x, padding = self_attention().requires_grad_(), first_sample_padded()
    if kind == "float":
        padding = torch.zeros(padding.shape).double().masked_fill(padding, -torch.inf)
    output, weights = ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    loss = output.square().sum() + (weights.square().sum() if need_weights else 0)
    loss.backward()
    leaves = [x, *ours.parameters()]
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert x.grad[0].eq(0).all()  # nothing was read of sample 0
    assert x.grad[1:].ne(0).any()


@pytest.mark.parametrize("need_weights", [True, False])
def test_one_fully_masked_head_leaves_the_others(need_weights: bool) -> None:
    theirs, ours = pair(batch_first=True)
    x = self_attention()
    mask = torch.zeros(BATCH, HEADS, QUERIES, QUERIES, dtype=torch.bool)
    mask[:, 2] = True
    options = {"attn_mask": mask.flatten(0, 1), "need_weights": need_weights}
    output, weights = ours(x, x, x, **options, average_attn_weights=False)
    # The other heads' part of the output: head 2 taken out of the output projection.
    without = MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)
    without.load_state_dict(ours.state_dict())
    with torch.no_grad():
        without.out_proj.weight[:, 20:30] = 0
    torch.testing.assert_close(output, without(x, x, x)[0])
    if need_weights:
        assert weights[:, 2].eq(0).all()
        if MEASURED:
            assert theirs(x, x, x, **options)[0].isnan().all()


@hides_a_whole_sequence
def test_an_encoder_layer_has_no_nan_in_any_mode() -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, batch_first=True, dtype=torch.float64).eval()
    x, padding = self_attention(), first_sample_padded()
    with torch.no_grad():
        before = layer(x, src_key_padding_mask=padding)
    upgrade(layer)
    with torch.no_grad():
        after = layer(x, src_key_padding_mask=padding)
    with_grad = layer(x, src_key_padding_mask=padding)
    assert after.isfinite().all()
    torch.testing.assert_close(after, with_grad)
    torch.testing.assert_close(after[1:], before[1:])
    if MEASURED:
        assert before[0].isnan().all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_positions_of_an_encoder_are_computed() -> None:
    # torch's nested path returns zeros there, in inference only.
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(EMBED, HEADS, batch_first=True, dtype=torch.float64), 2
    ).eval()
    x, padding = self_attention(), torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    padding[0, 10:] = True
    with torch.no_grad():
        before = encoder(x, src_key_padding_mask=padding)
        upgrade(encoder)
        after = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(after, encoder(x, src_key_padding_mask=padding))
    torch.testing.assert_close(after[~padding], before[~padding])
    if MEASURED:
        assert before[padding].eq(0).all()
        assert after[padding].ne(0).all()


# ---- the causal hint --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"batch_first": True}])
@pytest.mark.parametrize("num_heads", [6, 5])
def test_the_hint_without_a_mask_raises_on_every_path(
    num_heads: int, options: dict[str, bool]
) -> None:
    ours = MultiheadAttention(EMBED, num_heads, **options)
    x = self_attention().float()
    for training, grad, need_weights in itertools.product([False, True], repeat=3):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="Need attn_mask if"):
            ours.train(training)(x, x, x, is_causal=True, need_weights=need_weights)


@pytest.mark.skipif(not MEASURED, reason="documents torch 2.13")
def test_torch_ignores_the_hint_in_inference() -> None:
    theirs, _ = pair(batch_first=True)
    x = self_attention()
    with torch.no_grad():
        full, hinted = theirs.eval()(x, x, x)[0], theirs(x, x, x, is_causal=True)[0]
    assert torch.equal(full, hinted)


def test_an_encoder_layer_with_the_hint_alone_raises() -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, batch_first=True).eval()
    x = self_attention().float()
    upgrade(layer)
    with torch.no_grad(), pytest.raises(RuntimeError, match="Need attn_mask if"):
        layer(x, is_causal=True)


@pytest.mark.parametrize("slots", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_the_hint_leaves_appended_slots_open(slots: dict[str, bool]) -> None:
    theirs, ours = pair(batch_first=True, **slots)
    x, mask = self_attention(), causal(QUERIES)
    expected = ours(x, x, x, attn_mask=mask)[0]
    for output in every_path(ours, x, attn_mask=mask, is_causal=True):
        torch.testing.assert_close(output, expected)
    weights = ours(x, x, x, attn_mask=mask, is_causal=True)[1]
    assert weights.shape[-1] == QUERIES + 1
    assert weights[..., -1].gt(0).all()
    if MEASURED:
        outputs = [
            theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=n)[0] for n in (0, 1)
        ]
        assert (outputs[0] - outputs[1]).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["bottom-right", "block"])
def test_a_wrong_hint_changes_nothing(kind: str) -> None:
    theirs, ours = pair(batch_first=True)
    query = self_attention()
    key = torch.randn(BATCH, KEYS, EMBED).double() if kind == "bottom-right" else query
    mask = torch.ones(QUERIES, key.shape[1]).triu(1 + key.shape[1] - QUERIES).bool()
    if kind == "block":
        mask = ~torch.block_diag(torch.ones(10, 10), torch.ones(14, 14)).bool()
    options = {"attn_mask": mask, "is_causal": True}
    plain = ours(query, key, key, attn_mask=mask)[0]
    for need_weights in (True, False):
        hinted = ours(query, key, key, **options, need_weights=need_weights)[0]
        assert torch.equal(hinted, plain)
    if MEASURED:
        outputs = [theirs(query, key, key, **options, need_weights=n)[0] for n in (True, False)]
        assert (outputs[0] - outputs[1]).abs().max() > 0.01


# ---- weights ----------------------------------------------------------------------------------


def test_weights_are_before_dropout() -> None:
    theirs, ours = (layer.train() for layer in pair(batch_first=True, dropout=0.5))
    x = self_attention()
    weights = ours(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(BATCH, HEADS, QUERIES).double())
    torch.testing.assert_close(weights, ours.eval()(x, x, x, average_attn_weights=False)[1])
    if MEASURED:
        sums = theirs(x, x, x, average_attn_weights=False)[1].sum(-1)
        assert (sums - 1).abs().max() > 0.1


def test_dropout_is_applied_and_does_not_depend_on_the_weights() -> None:
    _, ours = pair(batch_first=True, dropout=0.5)
    x, outputs = self_attention(), []
    for need_weights in (True, False):
        torch.manual_seed(3)
        outputs.append(ours.train()(x, x, x, need_weights=need_weights)[0])
    assert torch.equal(*outputs)
    assert (outputs[0] - ours.eval()(x, x, x)[0]).abs().max() > 0.01


# ---- parameters -------------------------------------------------------------------------------


def test_a_wrapper_of_out_proj_is_called_and_trains() -> None:
    class LowRank(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner, self.weight, self.bias = inner, inner.weight, inner.bias
            self.down, self.up = nn.Linear(EMBED, 2).double(), nn.Linear(2, EMBED).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.up(self.down(x))

    for layer, trains in zip(pair(), (not MEASURED, True), strict=True):
        x = self_attention()
        before = layer(x, x, x)[0]
        layer.out_proj = LowRank(layer.out_proj)
        after = layer(x, x, x)[0]
        after.sum().backward()
        assert (layer.out_proj.up.weight.grad is not None) is trains
        assert (not torch.equal(before, after)) is trains


def test_a_hook_on_out_proj_runs() -> None:
    for layer, expected in zip(pair(), (0 if MEASURED else 1, 1), strict=True):
        calls: list[int] = []
        layer.out_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        x = self_attention()
        layer(x, x, x)
        assert len(calls) == expected


def test_shapes_of_masks_that_torch_rejects_are_named() -> None:
    _, ours = pair(batch_first=True)
    x = self_attention()
    for shape, words in {
        (BATCH, QUERIES, QUERIES): "repeat_interleave(6, dim=0)",
        (HEADS, QUERIES, QUERIES): "repeat(3, 1, 1)",
        (1, QUERIES, QUERIES): "attn_mask[0]",
        (BATCH, BATCH): "batch_first=True",
        (BATCH, HEADS, QUERIES, QUERIES): "flatten(0, 1)",
    }.items():
        with pytest.raises((RuntimeError, AssertionError)) as error:
            ours(x, x, x, attn_mask=torch.zeros(shape, dtype=torch.bool))
        assert words in str(error.value)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_per_sample_gradients() -> None:
    _, ours = pair(batch_first=True)
    ours.train()
    parameters = {name: p.detach() for name, p in ours.named_parameters()}
    x, padding = self_attention(), torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    padding[1, 15:] = True

    def loss(parameters: dict[str, Tensor], x: Tensor, padding: Tensor) -> Tensor:
        inputs = (x[None],) * 3
        options = {"key_padding_mask": padding[None], "need_weights": False}
        output = torch.func.functional_call(ours, parameters, inputs, options)[0]
        return output.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, padding)
    for sample in range(BATCH):
        alone = torch.func.grad(loss)(parameters, x[sample], padding[sample])
        for name, gradient in alone.items():
            torch.testing.assert_close(each[name][sample], gradient, msg=name)


def test_rounding_is_that_of_torch_in_bfloat16() -> None:
    # Weights in bfloat16: rows sum to 1 within their own rounding, with weights and without.
    theirs, ours = pair(batch_first=True, dtype=torch.bfloat16)
    exact, _ = pair(batch_first=True)
    exact.load_state_dict({k: v.double() for k, v in ours.state_dict().items()})
    x = self_attention().bfloat16()
    reference = exact(x.double(), x.double(), x.double())[0]
    errors = [(layer(x, x, x)[0].double() - reference).abs().max() for layer in (theirs, ours)]
    assert errors[1] <= 2 * errors[0]
