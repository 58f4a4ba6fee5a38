"""What changed between two scans, and heads that have changed places."""

import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.errors import MissingExtraError, OptionError
from headwise.layers.attention import Attention
from headwise.layers.hooks import attention_hook
from headwise.scanning.diff import ScanDiff
from headwise.scanning.result import HeadScan
from tests.scanning.scans import (
    BATCH,
    HEADS,
    LENGTH,
    STATISTICS,
    Own,
    changed,
    head_scan,
    layer_scan,
    matrix,
    random_scan,
    scalars,
    standard,
)

EMBED_DIM, HEAD_DIM = 40, 10
TURNED = ((2, 0, 5, 1, 4, 3), (1, 2, 3, 4, 5, 0))


def layers_of(seed: int) -> list[Attention]:
    torch.manual_seed(seed)
    layers = [
        Attention(EMBED_DIM, HEADS, head_dim=HEAD_DIM, value_dim=7, out_dim=EMBED_DIM)
        for _ in TURNED
    ]
    # Heads that differ in any text: each looks less widely than the one before.
    sharpness = torch.arange(1.0, HEADS + 1).repeat_interleave(HEAD_DIM)[:, None]
    for layer in layers:
        layer.q_proj.weight.data *= sharpness
    return layers


def turned(layer: Attention, order: Sequence[int]) -> Attention:
    """The same layer with its heads in another order: head h of it is head order[h] before."""
    with torch.no_grad():
        for projection, width in ((layer.q_proj, 10), (layer.k_proj, 10), (layer.v_proj, 7)):
            rows = torch.arange(HEADS * width).reshape(HEADS, width)[list(order)].flatten()
            projection.weight.copy_(projection.weight[rows])
            projection.bias.copy_(projection.bias[rows])
        columns = torch.arange(HEADS * 7).reshape(HEADS, 7)[list(order)].flatten()
        layer.out_proj.weight.copy_(layer.out_proj.weight[:, columns])
    return layer


def scan_of(layers: Sequence[Attention], x: Tensor) -> HeadScan:
    seen = []

    def watch(shown, values, outputs):  # type: ignore[no-untyped-def]
        seen.append(shown)
        return outputs

    with torch.no_grad(), attention_hook(watch):
        for layer in layers:
            layer(x)
    return head_scan(*(layer_scan([m], name=f"layer.{i}") for i, m in enumerate(seen)))


def read(seed: int) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, LENGTH, EMBED_DIM, generator=numbers)


def test_a_difference_is_the_other_less_this() -> None:
    one, two = random_scan(0), random_scan(1)
    diff = one.diff(two)
    assert isinstance(diff, ScanDiff)
    for name in ("entropy", "offset_profile", "map"):
        expected = two[name] - one[name]
        assert torch.equal(diff[name].nan_to_num(9), expected.nan_to_num(9))
    assert diff.assignment == (tuple(range(HEADS)),) * 2
    # Keys and tokens have names, and no difference.
    assert diff.names == one.names[:-2]
    with pytest.raises(
        OptionError, match="statistic 'own'\n  needed: a statistic that both scans have"
    ):
        diff["own"]


def test_the_distance_in_closed_form() -> None:
    one, two = scalars([0.0, 10.0], [0.0, 0.0]), scalars([1.0, 10.0], [0.0, 0.0])
    # All pairs: |0 - 1|, |0 - 10|, |10 - 1|, |10 - 10|, and four zeros: 20 / 8.
    torch.testing.assert_close(
        one.diff(two).apart,
        torch.tensor([[1 / 2.5, 0.0], [0.0, 0.0]], dtype=torch.float64),
        rtol=0,
        atol=0,
    )


def together(**rows: Sequence[float]) -> HeadScan:
    """A scan of one layer with the given numbers of several statistics."""
    scans = [scalars(row, name=name) for name, row in rows.items()]
    summaries = {
        name: part for scan in scans for name, part in scan.layer_scans[0].summaries.items()
    }
    layer = replace(scans[0].layer_scans[0], summaries=summaries)
    statistics = tuple(statistic for scan in scans for statistic in scan.statistics)
    return replace(scans[0], statistics=statistics, layer_scans=(layer,))


def test_each_statistic_has_the_same_say() -> None:
    def both(entropy: Sequence[float], maximum: Sequence[float]) -> HeadScan:
        return together(entropy=entropy, maximum=maximum)

    diff = both([0.0, 100.0], [0.5, 0.5]).diff(both([100.0, 100.0], [0.5, 0.75]))
    # entropy: 100, 100, 0, 0, mean 50; maximum: 0, 0.25, 0, 0.25, mean 0.125
    assert diff.apart.tolist() == [[(2 + 0) / 2, (0 + 2) / 2]]


def test_a_value_that_only_one_has_counts_as_the_average() -> None:
    nan = math.nan
    one, two = scalars([0.0, nan, nan, 2.0]), scalars([1.0, nan, 5.0, 2.0])
    distance = one.diff(two).apart[0]
    assert distance[1:3].tolist() == [0.0, 1.0]
    assert distance.isfinite().all()
    assert one.diff(two)["entropy"][0].isnan().tolist() == [False, True, True, False]


def test_equal_scans_are_at_no_distance() -> None:
    diff = random_scan(0).diff(random_scan(0), match=True)
    assert diff.assignment == (tuple(range(HEADS)),) * 2
    assert diff.apart.tolist() == [[0.0] * HEADS] * 2


def test_permuted_heads_are_found_back() -> None:
    x = read(0)
    before = scan_of(layers_of(3), x)
    after = scan_of([turned(*pair) for pair in zip(layers_of(3), TURNED, strict=True)], x)
    diff = before.diff(after, match=True)
    for found, order in zip(diff.assignment, TURNED, strict=True):
        assert [order[head] for head in found] == list(range(HEADS))
    # The same numbers in other places, but for the rounding of products of other shapes.
    assert float(diff.apart.max()) < 1e-4
    assert float(before.diff(after).apart.max()) > 0.5
    table = diff.table()
    assert [row["after"] for row in table[:HEADS]] == list(diff.assignment[0])


def test_pairs_of_heads_are_compared_with_the_same_pairs() -> None:
    order = TURNED[0]
    one = head_scan(layer_scan([matrix(0)]))
    two = head_scan(layer_scan([matrix(0)], heads=order))
    two = changed(two, heads=tuple(range(HEADS)))  # another layer, whose heads are called so
    diff = one.diff(two, match=True)
    assert [order[head] for head in diff.assignment[0]] == list(range(HEADS))
    # A product of other heads at once may round otherwise: a few float32 steps of a share.
    assert float(diff["total_variation"].abs().max()) < 24 * torch.finfo(torch.float32).eps
    assert float(one.diff(two)["total_variation"].abs().max()) > 0.01


def test_permuted_heads_are_found_back_in_another_text() -> None:
    before = scan_of(layers_of(3), read(0))
    after = scan_of([turned(*pair) for pair in zip(layers_of(3), TURNED, strict=True)], read(1))
    for found, order in zip(before.diff(after, match=True).assignment, TURNED, strict=True):
        assert [order[head] for head in found] == list(range(HEADS))


def test_matching_takes_the_least_total() -> None:
    # Head 0 is nearest to head 0 too, but then head 1 would pay for it.
    one, two = scalars([0.0, -1.0]), scalars([0.0, 1.1])
    assert one.diff(two, match=True).assignment == ((0, 1),)
    one, two = scalars([0.0, 4.0, 9.0]), scalars([9.0, 0.0, 4.0])
    diff = one.diff(two, match=True)
    assert diff.assignment == ((1, 2, 0),)
    assert diff["entropy"].tolist() == [[0.0, 0.0, 0.0]]


def test_heads_that_were_not_looked_at_are_in_no_match() -> None:
    one = head_scan(layer_scan([matrix(0)], heads=(4, 1)))
    diff = one.diff(one, match=True)
    assert diff.assignment == ((4, 1),)
    assert diff["entropy"][0, [1, 4]].tolist() == [0.0, 0.0]
    assert diff["entropy"][0, [0, 2, 3, 5]].isnan().all()
    assert [(row["head"], row["after"]) for row in diff.table()] == [(4, 4), (1, 1)]


def test_the_largest_differences() -> None:
    one, two = scalars([0.0, 5.0, 1.0]), scalars([0.5, 2.0, 1.0])
    diff = one.diff(two)
    assert [(head.head, head.value) for head in diff.top("entropy", 2)] == [(1, -3.0), (0, 0.5)]
    assert [(head.head, head.value) for head in diff.top("entropy", 2, lowest=True)] == [
        (2, 0.0),
        (0, 0.5),
    ]
    assert [head.head for head in diff.top(n=1)] == [1]
    assert diff.top() == diff.top("apart", 5)
    assert diff.top("apart", 1)[0].value == float(diff.apart.max())
    assert diff.top("apart", 1)[0].layer == "layer.0"
    assert diff.top("apart", 1, lowest=True)[0].value == float(diff.apart.min())
    diff = random_scan(0).diff(random_scan(1))
    with pytest.raises(OptionError, match="map, which has query_block x key_block numbers"):
        diff.top("map")
    with pytest.raises(OptionError) as error:
        diff.top("entropi")
    assert error.value.saw == "name='entropi', which is no statistic of this comparison"
    assert error.value.needed.startswith("'apart', or a statistic that both scans have: entropy,")


def test_a_scan_and_a_difference_are_iterated_by_names() -> None:
    one, two = random_scan(0), random_scan(1)
    assert list(one) == list(one.names)
    assert list(one.diff(two)) == list(one.diff(two).names)
    assert "entropy" in one
    assert "no statistic" not in one


def test_top_of_a_scan_and_of_a_difference_have_one_signature() -> None:
    of_scan = inspect.signature(HeadScan.top).parameters
    of_diff = inspect.signature(ScanDiff.top).parameters
    assert list(of_scan) == list(of_diff) == ["self", "name", "n", "lowest"]
    for name in ("n", "lowest"):
        assert of_scan[name] == of_diff[name]
    assert (of_scan["name"].kind, of_scan["name"].annotation) == (
        of_diff["name"].kind,
        of_diff["name"].annotation,
    )
    assert of_diff["name"].default == "apart"


# ---- changes in sentences ------------------------------------------------------------------------


def test_changes_are_sorted_by_their_part_of_the_scale() -> None:
    before = together(maximum=[0.87, 0.5], distance=[0.0, 10.0])
    after = together(maximum=[0.12, 0.5], distance=[20.0, 2.0])
    changes = before.diff(after).changes()
    # The distances of both scans run from 0 to 20 tokens.
    assert [(x.size, x.sentence) for x in changes] == [
        (1.0, "distance of layer 0, head 0: 0.00 tokens before, 20.0 tokens after"),
        (0.75, "maximum of layer 0, head 0: 87 % before, 12 % after"),
        (0.4, "distance of layer 0, head 1: 10.0 tokens before, 2.00 tokens after"),
    ]
    assert (changes[1].before.value, changes[1].after.value) == (0.87, 0.12)
    named = before.diff(after).changes(2, names=("fox", "Alice"))
    assert [x.sentence for x in named] == [
        "distance of layer 0, head 0: 0.00 tokens in fox, 20.0 tokens in Alice",
        "maximum of layer 0, head 0: 87 % in fox, 12 % in Alice",
    ]
    assert before.diff(after).changes(0) == before.diff(before).changes() == []


def test_the_sizes_do_not_depend_on_the_direction() -> None:
    one, two = random_scan(0), random_scan(1)
    there, back = one.diff(two).changes(20), two.diff(one).changes(20)
    key = [(x.statistic, x.before.layer_index, x.before.head, x.size) for x in there]
    assert key == [(x.statistic, x.after.layer_index, x.after.head, x.size) for x in back]
    sizes = [x.size for x in there]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < sizes[-1] <= sizes[0] <= 1
    for change in there:
        values = one[change.statistic], two[change.statistic]
        place = change.before.layer_index, change.before.head
        assert [change.before.value, change.after.value] == [float(x[place]) for x in values]


def test_a_value_on_one_side_alone_comes_last() -> None:
    nan = math.nan
    before, after = scalars([0.5, 0.2], [nan, 1.0]), scalars([nan, 0.7], [nan, nan])
    changes = before.diff(after).changes()
    # Layer 1 has no value at all in the second scan: nothing of it can be compared.
    assert [x.sentence for x in changes] == [
        "entropy of layer 0, head 1: 0.20 nats before, 0.70 nats after",
        "entropy of layer 0, head 0: 0.50 nats before, no value after",
    ]
    assert changes[1].size == 1
    assert math.isnan(changes[1].after.value)


def test_what_reads_the_same_is_no_change_and_equal_numbers_are_told_once() -> None:
    before = together(first_token=[0.2, 0.2], special=[0.2, 0.2])
    after = together(first_token=[0.6, 0.2001], special=[0.6, 0.2001])
    changes = before.diff(after).changes()
    assert [x.sentence for x in changes] == [
        "first token of layer 0, head 0: 20 % before, 60 % after"
    ]


def test_changes_of_matched_heads_name_both() -> None:
    one, two = scalars([0.0, 4.0, 9.0], name="distance"), scalars([9.5, 0.0, 4.0], name="distance")
    changes = one.diff(two, match=True).changes()
    assert [x.sentence for x in changes] == [
        "distance of layer 0, head 2 (head 0 after): 9.00 tokens before, 9.50 tokens after"
    ]
    assert (changes[0].before.head, changes[0].after.head) == (2, 0)


def test_changes_of_some_heads_are_those_of_their_numbers() -> None:
    def some(*numbers: float) -> HeadScan:
        return changed(scalars(numbers, name="distance"), heads=(4, 1), num_heads=6)

    changes = some(0.0, 5.0).diff(some(3.0, 5.0)).changes()
    assert [x.sentence for x in changes] == [
        "distance of layer 0, head 4: 0.00 tokens before, 3.00 tokens after"
    ]
    changes = some(0.0, 5.0).diff(some(5.0, 1.0), match=True).changes()
    assert [x.sentence for x in changes] == [
        "distance of layer 0, head 4 (head 1 after): 0.00 tokens before, 1.00 tokens after"
    ]
    assert (changes[0].before.head, changes[0].after.head) == (4, 1)


def test_maps_of_other_blocks_are_not_subtracted() -> None:
    one, two = random_scan(0), random_scan(1)
    summary = two.layer_scans[0].summaries["map"]
    halved = {"sum": summary["sum"][..., ::2, ::2], "count": summary["count"][..., ::2]}
    layers = [replace(x, summaries={**x.summaries, "map": halved}) for x in two.layer_scans]
    diff = one.diff(replace(two, layer_scans=tuple(layers)))
    assert "map" not in diff.names
    assert [name for name in one.diff(two).names if name != "map"] == list(diff.names)


def test_the_table_of_differences() -> None:
    one, two = scalars([0.0, 5.0], [1.0, 1.0]), scalars([0.5, 2.0], [1.0, 1.0])
    row = one.diff(two).table()[1]
    assert list(row) == ["layer", "layer_index", "head", "after", "apart", "entropy"]
    assert (row["layer"], row["head"], row["after"], row["entropy"]) == ("layer.0", 1, 1, -3.0)
    assert list(random_scan(0).diff(random_scan(1)).table()[0])[5:] == list(random_scan(0).scalars)


def test_layers_are_paired_in_order_whatever_they_are_called() -> None:
    one = random_scan(0, layers=1)
    other = replace(one, layer_scans=(replace(one.layer_scans[0], name="model.layer.0"),))
    assert one.diff(other).layers == ("layer.0",)


def test_only_what_both_have_is_compared() -> None:
    one, two = random_scan(0, statistics=(*STATISTICS, Own())), random_scan(1)
    assert one.diff(two).names == two.diff(one).names == two.diff(two).names
    with pytest.raises(OptionError, match="no statistic in common"):
        random_scan(0, statistics=(Own(),)).diff(two)
    cross = head_scan(layer_scan([matrix(0)], is_cross=True))
    assert "distance" not in random_scan(0, layers=1).diff(cross).names


def test_models_of_other_shapes_are_refused() -> None:
    otherwise = standard("entropy", formula="in bits", id="entropy-2")
    scan = random_scan(0)
    some = [replace(layer, heads=(0, 1)) for layer in scan.layer_scans]
    turned_about = [replace(layer, heads=layer.heads[::-1]) for layer in scan.layer_scans]
    for other, saw in (
        (random_scan(0, layers=3), "2 layers, and 3"),
        (random_scan(0, heads=5), "layer.0 with 6 of 6 heads scanned, and layer.0 with 5 of 5"),
        (replace(scan, layer_scans=tuple(some)), "layer.0 with 2 of 6"),
        (replace(scan, layer_scans=tuple(turned_about)), "[0, 1, 2, 3, 4, 5], and [5, 4, 3, 2"),
        (random_scan(0, statistics=(otherwise,)), "and as in bits (entropy-2)"),
    ):
        with pytest.raises(OptionError) as error:
            scan.diff(other)
        assert saw in error.value.saw
    with pytest.raises(OptionError, match="scans without layers"):
        head_scan().diff(head_scan())


def test_matching_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtraError) as error:
        random_scan(0).diff(random_scan(1), match=True)
    assert error.value.do == "pip install scipy"
    assert error.value.needed == "scipy, which assigns heads to heads"
