"""Importance by gradients: by hand, against a hook, and what it must not depend on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwise import Attention
from headwise.errors import OptionError
from headwise.function.budget import Budget
from headwise.function.rounding import BACKWARD
from headwise.models import planted
from headwise.scanning._scan import scan
from headwise.scanning.importance import UNRECORDED, Gates, gradients
from headwise.scanning.record import record_attention
from headwise.scanning.result import HeadScan
from headwise.scanning.selection import SelectedLayers
from headwise.scanning.statistics.catalogue import IMPORTANCE
from headwise.scanning.statistics.statistic import TileStatistic
from tests.scanning.importance_cases import (
    BATCH,
    EMBED,
    HEADS,
    LENGTH,
    REAL,
    VALUE_DIM,
    Mixing,
    OwnToken,
    linear,
    squares,
    whole_numbers,
)

NAMES = ("gate_gradient", "gate_gradient_normalised", "taylor")


def test_by_hand() -> None:
    model, x = OwnToken(), whole_numbers(BATCH, LENGTH, EMBED)
    upstream = whole_numbers(BATCH, LENGTH, EMBED)
    scan = gradients(model, x, loss=linear(upstream))
    assert (scan.model, scan.layers) == ("OwnToken", ("layers.0", "layers.1"))
    assert (scan.sequences, scan.tokens) == (BATCH, BATCH * LENGTH)
    for layer, (outputs, gradient) in enumerate(model.by_hand(x, upstream)):
        of_queries = (outputs * gradient).sum(-1).double()
        michel = of_queries.sum(-1).abs().mean(0)
        assert torch.equal(scan["gate_gradient"][layer], michel)
        assert torch.equal(scan["taylor"][layer], of_queries.abs().sum(-1).mean(0))
        assert torch.equal(scan["gate_gradient_normalised"][layer], michel / michel.norm())
        # Sequences do not cancel, and queries do: the numbers show both.
        assert not torch.equal(michel, of_queries.sum((0, -1)).abs() / BATCH)
        assert not torch.equal(michel, scan["taylor"][layer])


def test_padding_by_hand() -> None:
    """What is padding has no part where the loss gives it none."""
    model, lengths = OwnToken(), torch.tensor(REAL)
    x, real = whole_numbers(BATCH, LENGTH, EMBED), torch.arange(LENGTH) < lengths[:, None]
    upstream = whole_numbers(BATCH, LENGTH, EMBED) * real[..., None]
    scan = gradients(model, {"x": x, "lengths": lengths}, loss=linear(upstream))
    assert (scan.sequences, scan.tokens) == (BATCH, sum(REAL))
    for layer, (outputs, gradient) in enumerate(model.by_hand(x, upstream)):
        expected = (outputs * gradient).sum((-1, -2)).double().abs().mean(0)
        assert torch.equal(scan["gate_gradient"][layer], expected)


def test_a_gate_is_what_a_hook_sees() -> None:
    """<O, dL/dO> of the input of the output projection, within the rounding of a sum."""
    model, x = Mixing().double(), torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].retain_grad()
        seen.append(args[0])

    handles = [m.out_proj.register_forward_pre_hook(keep) for m in (model.first, model.second)]
    squares(model(x), x).sum().backward()
    for handle in handles:
        handle.remove()
    scan = gradients(model, x, loss=squares)
    roundings = (VALUE_DIM + LENGTH + BATCH) * torch.finfo(torch.float64).eps
    for layer, merged in enumerate(seen):
        assert merged.grad is not None
        parts = (merged * merged.grad).detach().unflatten(-1, (HEADS, VALUE_DIM)).transpose(1, 2)
        allowed = roundings * parts.abs().sum((-1, -2)).mean(0)
        michel = parts.sum((-1, -2)).abs().mean(0)
        taylor = parts.sum(-1).abs().sum(-1).mean(0)
        assert torch.all((scan["gate_gradient"][layer] - michel).abs() <= allowed)
        assert torch.all((scan["taylor"][layer] - taylor).abs() <= allowed)
        assert torch.all(allowed < 1e-12 * michel)


def test_taylor_is_never_less() -> None:
    scan = gradients(Mixing(), torch.randn(BATCH, LENGTH, EMBED), loss=squares)
    assert torch.all(scan["taylor"] >= scan["gate_gradient"])
    assert torch.any(scan["taylor"] > scan["gate_gradient"])
    norms = scan["gate_gradient_normalised"].norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(2, dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_the_merge_of_its_sequences(name: str) -> None:
    """Each alone, without the padding that the others put on it."""
    model = Mixing()
    x = torch.randn(BATCH, LENGTH, EMBED)
    padded = {"x": x, "lengths": torch.tensor(REAL)}

    def alone(x: Tensor) -> Tensor:
        parts = [x[i : i + 1, :n].clone() for i, n in enumerate(REAL)]
        own = model.to(x.dtype)
        first, *others = [gradients(own, part, loss=squares) for part in parts]
        return first.merge(*others)[name]

    budget = Budget.for_function(alone, x, factor=BACKWARD, name=name)
    batch = gradients(model.float(), padded, loss=squares)
    assert (batch.sequences, batch.tokens) == (BATCH, sum(REAL))
    budget.assert_holds(batch[name].float())


def test_any_batches_merge_exactly() -> None:
    """One by one, in pairs, all at once, in another order: the same bits, in whole numbers."""
    model, x = OwnToken(), whole_numbers(BATCH, LENGTH, EMBED)
    upstream = whole_numbers(BATCH, LENGTH, EMBED)

    def measured(*parts: list[int]) -> HeadScan:
        inputs = [{"x": x[rows]} for rows in parts]
        wanted = iter(parts)
        loss = lambda output, given: (output * upstream[next(wanted)]).sum((1, 2))  # noqa: E731
        return gradients(model, inputs, loss=loss)

    whole = measured([0, 1, 2, 3])
    apart = measured([2]).merge(measured([0, 3], [1]))
    for found in (measured([3, 1, 0, 2]), measured([0], [1, 2, 3]), apart):
        assert found.sequences == BATCH
        for name in NAMES:
            assert torch.equal(found[name], whole[name])


def test_a_dead_head_is_worth_nothing() -> None:
    model, dead = Mixing(num_kv_heads=HEADS), 4
    rows = slice(dead * VALUE_DIM, (dead + 1) * VALUE_DIM)
    for part in (model.first.v_proj.weight, model.first.v_proj.bias):
        part.data[rows] = 0
    scan = gradients(model, torch.randn(BATCH, LENGTH, EMBED), loss=squares)
    for name in NAMES:
        assert scan[name][0, dead] == 0
        assert torch.all(scan[name].flatten()[[i for i in range(2 * HEADS) if i != dead]] > 0)


def test_a_dead_layer_is_zero_and_not_nan() -> None:
    model = Mixing()
    for part in (model.first.v_proj.weight, model.first.v_proj.bias):
        nn.init.zeros_(part)
    scan = gradients(model, torch.randn(BATCH, LENGTH, EMBED), loss=squares)
    for name in NAMES:
        assert torch.equal(scan[name][0], torch.zeros(HEADS, dtype=torch.float64))


def test_gradients_do_not_see_behind_a_sharp_softmax() -> None:
    """The planted previous-token head chooses what induction sees, by weights that are 0 or 1."""
    text = torch.stack([torch.randperm(planted.VOCABULARY - 2)[:12] + 2 for _ in range(3)])
    ids = torch.cat([torch.zeros(3, 1, dtype=torch.long), text, text], 1)

    def wrong(output: Tensor, given: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            output[:, 13:-1].mT, given[:, 14:], reduction="none"
        ).mean(-1)

    scan = gradients(planted.model().double(), ids, loss=wrong)
    induction = [head for layer in planted.NAMES for head in layer].index("induction")
    order = scan["gate_gradient"].flatten()
    assert order[induction] > 0
    # All other gradients are 0 but for float64's rounding, which differs between processors.
    others = order[torch.arange(len(order)) != induction]
    assert others.max() <= torch.finfo(torch.float32).eps * order[induction]


def test_gates_change_no_bit() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        model = Mixing().to(dtype).eval()
        x = torch.randn(BATCH, LENGTH, EMBED, dtype=dtype)
        gates = Gates(SelectedLayers(None), causal=False)
        with record_attention(model, lambda call: None):
            plain = model(x)
        with record_attention(model, gates, gradients=True):
            gated = model(x)
        assert torch.equal(plain, gated)
        gates.add_gradients_of_losses(squares(gated, x).double())
        for layer in gates.layers.selected_layers():
            assert torch.isfinite(layer.summaries["gate_gradient"]["sum"]).all()


def test_one_backward_pass_for_all() -> None:
    passes: list[int] = []

    def counted(output: Tensor, given: Tensor) -> Tensor:
        output.register_hook(lambda gradient: passes.append(len(gradient)))
        return squares(output, given)

    inputs = [torch.randn(n, LENGTH, EMBED) for n in (3, 1, 2)]
    scan = gradients(Mixing(), inputs, loss=counted)
    assert passes == [3, 1, 2]
    assert scan.sequences == 6
    assert [layer.calls for layer in scan.layer_scans] == [3, 3]


def test_a_layer_that_runs_twice() -> None:
    """Its second run is another layer, as in a scan."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attention(EMBED, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.layer(x))

    scan = gradients(Twice(), torch.randn(BATCH, LENGTH, EMBED), loss=squares)
    assert scan.layers == ("layer", "layer (2)")
    assert torch.all(scan["gate_gradient"] > 0)


def test_chosen_layers() -> None:
    model, x = Mixing(), torch.randn(BATCH, LENGTH, EMBED)
    whole = gradients(model, x, loss=squares)
    for layers in (["second"], ["s*"]):
        some = gradients(model, x, loss=squares, layers=layers)
        assert some.layers == ("second",)
        assert torch.equal(some["taylor"][0], whole["taylor"][1])
    with pytest.raises(OptionError, match=r"\['third'\][\s\S]*first"):
        gradients(model, x, loss=squares, layers=["third"])


def test_a_layer_without_a_say_is_noted() -> None:
    class Ends(Mixing):
        def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
            super().forward(x)
            return x + self.first(x)

    scan = gradients(Ends(), torch.randn(BATCH, LENGTH, EMBED), loss=squares)
    assert scan.notes == (
        "first: the loss does not depend on its heads",
        "second: the loss does not depend on its heads",
    )
    assert torch.all(scan["taylor"][scan.layers.index("first (2)")] > 0)
    assert torch.all(scan["taylor"][scan.layers.index("second")] == 0)


def test_sequences_that_do_not_stand_along_the_batch() -> None:
    """A layer over windows, folded into the batch, cannot tell sequences apart."""

    class Windows(Mixing):
        def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
            folded = x.unflatten(1, (2, -1)).flatten(0, 1)
            x = x + self.first(folded).unflatten(0, (-1, 2)).flatten(1, 2)
            return x + self.second(x)

    scan = gradients(Windows(), torch.randn(BATCH, LENGTH, EMBED), loss=squares)
    assert torch.all(scan["taylor"][0].isnan())
    assert torch.all(scan["taylor"][1] > 0)
    assert scan.layer_scans[0].missing == dict.fromkeys(NAMES, "a batch of 8 for 4 sequences")


def test_they_are_kept_and_read(tmp_path: Any) -> None:
    scan = gradients(Mixing(), torch.randn(BATCH, LENGTH, EMBED), loss=squares)
    again = HeadScan.load(scan.save(tmp_path / "importance"))
    for name in NAMES:
        assert torch.equal(again[name], scan[name])
        assert again.definition(name) == scan.definition(name)
    best = scan.top("gate_gradient", 1)[0]
    assert best.value == scan["gate_gradient"].max()
    assert len(scan.table()) == 2 * HEADS


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("statistic", IMPORTANCE, ids=lambda s: s.definition.name)
def test_no_pass_over_the_weights_can_tell(statistic: Any) -> None:
    assert not isinstance(statistic, TileStatistic)
    with pytest.raises(OptionError, match=r"gradients or \.ablations"):
        scan(Mixing(), torch.randn(BATCH, LENGTH, EMBED), statistics=[statistic])


class Checkpointed(nn.Module):
    """Two layers whose activations are computed again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(EMBED, HEADS, head_dim=VALUE_DIM) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def test_activations_that_are_computed_again_are_refused() -> None:
    x = torch.randn(BATCH, LENGTH, EMBED)
    with pytest.raises(OptionError, match=r"layers\.1, which is computed again"):
        gradients(Checkpointed(reentrant=False), x, loss=squares)


def test_a_pass_that_is_not_recorded_is_missing() -> None:
    x = torch.randn(BATCH, LENGTH, EMBED, requires_grad=True)
    scan = gradients(Checkpointed(reentrant=True), x, loss=squares)
    for layer in scan.layer_scans:
        assert layer.missing == dict.fromkeys(NAMES, UNRECORDED)
