"""Importance by ablation: by hand, what stands in for a head, and how results merge."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.models import planted
from headwise.scanning.importance import ablations, draw_partners, mean_outputs, outputs_of_partners
from headwise.scanning.result import HeadScan
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

WAYS = ("zero", "mean", "resample")


def setting() -> tuple[OwnToken, dict[str, Tensor], Tensor, Tensor]:
    """A model, padded inputs, where they are real, and the loss's gradient, 0 at padding."""
    model, lengths = OwnToken(), torch.tensor(REAL)
    real = torch.arange(LENGTH) < lengths[:, None]
    upstream = whole_numbers(BATCH, LENGTH, EMBED) * real[..., None]
    return model, {"x": whole_numbers(BATCH, LENGTH, EMBED), "lengths": lengths}, real, upstream


def test_zero_by_hand() -> None:
    model, inputs, _, upstream = setting()
    scan = ablations(model, inputs, loss=linear(upstream))
    assert (scan.sequences, scan.tokens) == (BATCH, sum(REAL))
    for layer, (outputs, gradient) in enumerate(model.by_hand(inputs["x"], upstream)):
        expected = -(outputs * gradient).sum((0, 2, 3)).double() / BATCH
        assert torch.equal(scan["ablation_zero"][layer], expected)


def test_mean_by_hand() -> None:
    model, inputs, real, upstream = setting()
    scan, means = ablations(model, inputs, by="mean", loss=linear(upstream)), []
    for layer, (outputs, gradient) in enumerate(model.by_hand(inputs["x"], upstream)):
        mean = (outputs * real[:, None, :, None]).sum((0, 2)).double() / sum(REAL)
        means.append(mean)
        moved = mean[None, :, None] - outputs
        expected = (moved * gradient).sum((0, 2, 3)) / BATCH
        assert torch.equal(scan["ablation_mean"][layer], expected)
    found = mean_outputs(model, inputs)
    assert list(found) == ["layers.0", "layers.1"]
    assert all(torch.equal(own, mean) for own, mean in zip(found.values(), means, strict=True))
    # Every real token counts alike, however the data is cut.
    rows = [{name: t[part] for name, t in inputs.items()} for part in ([2], [3, 0], [1])]
    cut = mean_outputs(model, rows)
    assert all(torch.equal(own, mean) for own, mean in zip(cut.values(), means, strict=True))


def test_resample_by_hand() -> None:
    """The i-th real token takes the i-th of the other sequence, around again where it ends."""
    model, inputs, _, upstream = setting()
    scan = ablations(model, inputs, by="resample", loss=linear(upstream), seed=7)
    partner = draw_partners(BATCH, torch.Generator().manual_seed(7))
    for layer, (outputs, gradient) in enumerate(model.by_hand(inputs["x"], upstream)):
        expected = torch.zeros(HEADS, dtype=torch.float64)
        for own, other in enumerate(partner.tolist()):
            for query in range(REAL[own]):
                moved = outputs[other, :, query % REAL[other]] - outputs[own, :, query]
                expected += (moved * gradient[own, :, query]).sum(-1)
        assert torch.equal(scan["ablation_resample"][layer], expected / BATCH)


def test_padding_on_the_left() -> None:
    """Which places are real is read from the mask, not counted from the first."""
    real = torch.tensor([[False, False, True, True, True], [False, True, True, True, True]])
    outputs = torch.arange(2 * 5.0).view(2, 5, 1).expand(2, 5, 3)
    found = outputs_of_partners(outputs, real, torch.tensor([1, 0]))[..., 0]
    assert found[0, 2:].tolist() == [6.0, 7.0, 8.0]
    assert found[1, 1:].tolist() == [2.0, 3.0, 4.0, 2.0]


@pytest.mark.parametrize("batch", [2, 3, 4, 9, 64])
def test_no_sequence_stands_in_for_itself(batch: int) -> None:
    for seed in range(50):
        partner = draw_partners(batch, torch.Generator().manual_seed(seed))
        assert sorted(partner.tolist()) == list(range(batch))
        assert not torch.any(partner == torch.arange(batch))


def test_the_seed_draws() -> None:
    model, inputs, _, upstream = setting()
    before = torch.get_rng_state()
    found = {
        tuple(
            ablations(model, inputs, by="resample", loss=linear(upstream), seed=seed)[
                "ablation_resample"
            ]
            .flatten()
            .tolist()
        )
        for seed in (0, 0, 0, 1, 2, 3)
    }
    assert 1 < len(found) <= 4
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("by", WAYS)
def test_a_dead_head_is_worth_nothing(by: Any) -> None:
    model, dead = Mixing(num_kv_heads=HEADS), 4
    rows = slice(dead * VALUE_DIM, (dead + 1) * VALUE_DIM)
    for part in (model.first.v_proj.weight, model.first.v_proj.bias):
        part.data[rows] = 0
    scan = ablations(model, torch.randn(BATCH, LENGTH, EMBED), by=by, loss=squares)
    effects = scan[f"ablation_{by}"].flatten()
    assert effects[dead] == 0
    assert torch.all(effects[[i for i in range(2 * HEADS) if i != dead]] != 0)


@pytest.mark.parametrize("by", ["mean", "resample"])
def test_a_head_that_always_says_the_same(by: Any) -> None:
    """By its mean or by another sequence, nothing changes; by zero, much does."""
    model, inputs, _, upstream = setting()
    model.layers[0].v_proj.weight.data[: 2 * VALUE_DIM] = 0
    # 11 real tokens: a sum that is divided by them is still exact.
    lengths = torch.tensor([5, 3, 2, 1])
    inputs = {**inputs, "lengths": lengths}
    upstream = upstream * (torch.arange(LENGTH) < lengths[:, None])[..., None]
    scan = ablations(model, inputs, by=by, loss=linear(upstream))
    zero = ablations(model, inputs, loss=linear(upstream))
    assert torch.equal(scan[f"ablation_{by}"][0, :2], torch.zeros(2, dtype=torch.float64))
    assert torch.all(scan[f"ablation_{by}"][0, 2:] != 0)
    assert torch.all(zero["ablation_zero"][0, :2] != 0)


def test_the_order_of_sequences_is_nothing() -> None:
    model, inputs, _, upstream = setting()
    for by in ("zero", "mean"):
        whole = ablations(model, inputs, by=by, loss=linear(upstream))
        order = [2, 0, 3, 1]
        moved = {name: t[order] for name, t in inputs.items()}
        again = ablations(model, moved, by=by, loss=linear(upstream[order]))
        assert torch.equal(whole[f"ablation_{by}"], again[f"ablation_{by}"])


@pytest.mark.slow
def test_parts_merge_exactly() -> None:
    model, inputs, _, upstream = setting()
    means = mean_outputs(model, inputs)
    parts = ([3, 1], [0], [2])

    def of(rows: list[int], by: Any) -> HeadScan:
        own = {name: t[rows] for name, t in inputs.items()}
        return ablations(model, own, by=by, loss=linear(upstream[rows]))

    for by, name in (("zero", "ablation_zero"), (means, "ablation_mean")):
        whole = of([0, 1, 2, 3], "mean" if by is means else by)
        first, *others = (of(rows, by) for rows in parts)
        merged = first.merge(*others)
        assert merged.sequences == BATCH
        assert merged.tokens == sum(REAL)
        assert torch.equal(merged[name], whole[name])


def test_means_of_other_data_do_not_merge() -> None:
    model, inputs, _, upstream = setting()
    parts = [
        ablations(
            model,
            {name: t[rows] for name, t in inputs.items()},
            by="mean",
            loss=linear(upstream[rows]),
        )
        for rows in (slice(0, 2), slice(2, 4))
    ]
    with pytest.raises(OptionError, match="different mean outputs"):
        parts[0].merge(parts[1])


def test_they_are_kept_and_read(tmp_path: Any) -> None:
    model, inputs, _, upstream = setting()
    for by in WAYS:
        scan = ablations(model, inputs, by=by, loss=linear(upstream))
        again = HeadScan.load(scan.save(tmp_path / by))
        assert torch.equal(again[f"ablation_{by}"], scan[f"ablation_{by}"])
        assert torch.equal(again.merge(scan)[f"ablation_{by}"], scan[f"ablation_{by}"])


def test_chosen_layers_and_heads() -> None:
    model, inputs, _, upstream = setting()
    for by in WAYS:
        name, loss = f"ablation_{by}", linear(upstream)
        whole = ablations(model, inputs, by=by, loss=loss)[name]
        some = ablations(model, inputs, by=by, loss=loss, layers=["*.1"], heads=[4, 2])
        assert some.layers == ("layers.1",)
        expected = torch.full((1, HEADS), torch.nan, dtype=torch.float64)
        expected[0, [4, 2]] = whole[1, [4, 2]]
        torch.testing.assert_close(some[name], expected, rtol=0, atol=0, equal_nan=True)


def test_how_many_forward_passes_there_are() -> None:
    model, inputs, _, upstream = setting()
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    for by, before in (("zero", 0), ("mean", 2), ("resample", 0)):
        told: list[tuple[str, int, int]] = []

        def tell(stage: str, done: int, total: int, told: Any = told) -> None:
            told.append((stage, done, total))

        passes.clear()
        ablations(model, [inputs, inputs], by=by, loss=linear(upstream), progress=tell)
        total = before + 2 * (1 + 2 * HEADS)
        assert len(passes) == total + 1  # one tries to begin at the second layer
        assert told[0] == ("all heads", before + 1, total)
        assert told[1] == ("layers.0, head 0", before + 2, total)
        assert [done for _, done, _ in told] == list(range(before + 1, total + 1))
        assert {t for _, _, t in told} == {total}


class Aside(OwnToken):
    """The second layer also reads what the first one was given, beside its output."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        held: list[Tensor] = []
        handle = self.layers[0].q_proj.register_forward_hook(
            lambda *given: held.append(given[1][0])
        )
        x = x + self.layers[0](x)
        handle.remove()
        return x + self.layers[1](x + sum(held))


def test_layers_below_run_once_where_that_gives_the_same_losses() -> None:
    _, inputs, _, upstream = setting()
    for model, is_resumed in ((OwnToken(), True), (Aside(), False)):
        runs: list[int] = []
        model.layers[0].out_proj.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        both = ablations(model, inputs, loss=linear(upstream))["ablation_zero"]
        assert len(runs) == 1 + HEADS + (0 if is_resumed else HEADS)
        for layer, head in ((0, 1), (1, 3)):
            without = copy.deepcopy(model).requires_grad_(False)
            columns = slice(head * VALUE_DIM, (head + 1) * VALUE_DIM)
            without.layers[layer].out_proj.weight[:, columns] = 0
            lost = ((without(**inputs) - model(**inputs)) * upstream).sum() / BATCH
            assert float(both[layer, head]) == pytest.approx(float(lost.detach()), rel=1e-6)


def test_ablation_sees_what_a_gradient_does_not() -> None:
    """The planted previous-token head, by which the induction head finds its token."""
    text = torch.stack([torch.randperm(planted.VOCABULARY - 2)[:12] + 2 for _ in range(3)])
    ids = torch.cat([torch.zeros(3, 1, dtype=torch.long), text, text], 1)

    def wrong(output: Tensor, given: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            output[:, 13:-1].mT, given[:, 14:], reduction="none"
        ).mean(-1)

    scan = ablations(planted.model(), ids, loss=wrong)
    names = [head for layer in planted.NAMES for head in layer]
    effects = dict(zip(names, scan["ablation_zero"].flatten().tolist(), strict=True))
    assert [name for name, effect in effects.items() if effect != 0] == [
        "previous token",
        "induction",
    ]
    assert min(effects["previous token"], effects["induction"]) > 1


def test_windows_in_the_batch() -> None:
    """They are no sequences: none can be taken for another, but each can be silent."""

    class Windows(Mixing):
        def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
            folded = x.unflatten(1, (2, -1)).flatten(0, 1)
            x = x + self.first(folded).unflatten(0, (-1, 2)).flatten(1, 2)
            return x + self.second(x)

    model, x = Windows(), torch.randn(BATCH, LENGTH, EMBED)
    scan = ablations(model, x, by="resample", loss=squares)
    assert torch.all(scan["ablation_resample"][0].isnan())
    assert scan.layer_scans[0].missing == {"ablation_resample": "a batch of 8 for 4 sequences"}
    for by in ("zero", "mean"):
        assert torch.all(ablations(model, x, by=by, loss=squares)[f"ablation_{by}"] != 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "median"}, "by='median'"),
        ({"by": {"layers.0": torch.zeros(HEADS, VALUE_DIM)}}, "means of layers.1: none"),
        ({"by": {"layers.0": torch.zeros(HEADS, 9)}}, r"means of layers.0: \(6, 9\)"),
        ({"heads": [1, 6]}, r"heads \[1, 6\] of layers.0"),
        ({"heads": [-1]}, r"heads \[-1\]"),
        ({"heads": []}, r"heads=\[\]"),
        ({"layers": ["layers.7"]}, "layers.7"),
        ({"by": "mean", "layers": ["layers.7"]}, "layers.7"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_refusals(options: Any, message: str) -> None:
    model, inputs, _, upstream = setting()
    with pytest.raises(OptionError, match=message):
        ablations(model, inputs, loss=linear(upstream), **options)


def test_resample_needs_another_sequence() -> None:
    inputs = [torch.randn(n, LENGTH, EMBED) for n in (2, 1)]
    with pytest.raises(OptionError, match="a batch of 1 sequence"):
        ablations(Mixing(), inputs, by="resample", loss=squares)
