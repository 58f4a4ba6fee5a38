"""Kv heads that were merged: by their mean, turned towards each other, or by principal components.

The maps are those of `headwise.surgery.maps`: with F the new head is made, and with B it is read
back. Recorded keys and values show F, queries show the B of keys. The B of values follows from F
and the output projection, since it is the one that loses least.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.causes.heads import (
    CERTAIN,
    find_smallest_call,
    match_heads,
    narrowest_dtype,
    take,
    with_mean_gap_in_bias,
)
from headwise.diagnosis.simulation import gaps
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall
from headwise.function.rounding import default_tolerance
from headwise.function.weights import AXES

MEAN, TURNED = "by their mean", "by the mean of turned heads"
COMPONENTS = "by principal components"
# Axes of tensors that make keys or values, or read them -> the role of their maps.
MAKERS: Mapping[tuple[str, ...], str] = {
    ("kv_heads", "key_dim"): "k",
    ("kv_heads", "value_dim"): "v",
}
READERS: Mapping[tuple[str, ...], str] = {
    ("heads", "head_dim"): "k",
    ("heads", "value_dim"): "v",
}


@dataclass(frozen=True)
class _Merged:
    """Recorded heads, by the numbers of the model's.

    Attributes:
        heads: the model's head that each one is.
        groups: the model's kv heads that each different kv head is made of.
        copies: the number of equal kv heads that stand side by side.
        maps: by role, "k" or "v": of each of the model's kv heads F times the size of its group,
            and B, (2, kv_heads, channels, channels). A role without maps has a plain mean.
        way: the maps in words.
    """

    heads: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    copies: int
    maps: Mapping[str, Tensor] = field(default_factory=dict)
    way: str = ""

    def apply(self, model: AttentionModel) -> AttentionModel:
        first = [group[0] for group in self.groups for _ in range(self.copies)]
        taken = take(model, self.heads, tuple(first))
        dtype = torch.float64 if self.maps else narrowest_dtype(model.weights)
        changed: dict[str, Tensor] = {}
        for name, x in model.weights.items():
            axes = AXES[name]
            if axes[0] == "kv_heads":
                if (role := MAKERS.get(axes[:2], "")) in self.maps:
                    x = _apply_maps(self.maps[role][0], x)
                means = self.average(x).to(dtype).to(x)
                changed[name] = means.repeat_interleave(self.copies, 0)
            elif (role := READERS.get(axes[:2], "")) in self.maps:
                back = self.maps[role][1].mT[self.sources(model)]
                changed[name] = _apply_maps(back, taken.weights[name])
        return taken.with_weights(**changed)

    def sources(self, model: AttentionModel) -> Tensor:
        """Return the model's kv head that each head reads there, (heads,)."""
        return torch.tensor(self.heads).div(model.settings.group, rounding_mode="floor")

    def average(self, x: Tensor) -> Tensor:
        """Return the mean of each group of kv heads (kv_heads, ...)."""
        return torch.stack([x[list(group)].mean(0) for group in self.groups])

    def parameters(self, num_heads: int) -> dict[str, object]:
        stated: dict[str, object] = {
            "kv heads": ", ".join("+".join(map(str, group)) for group in self.groups)
        }
        if self.way:
            stated["merged"] = self.way
        if gone := sorted({*range(num_heads)} - {*self.heads}):
            stated["without heads"] = tuple(gone)
        if list(self.heads) != sorted(self.heads):
            stated["heads in the order"] = self.heads
        return stated


def _apply_maps(maps: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("hcd,hd...->hc...", maps, x)


def _kv_heads_merged(evidence: Evidence) -> Variants:
    stages = [evidence.shown_stages[role] for role in "qkv"]
    if not evidence.parted_calls_and_heads(*stages[1:]):
        return
    for merged in _list_merges(evidence, stages):
        model, shown = merged.apply(evidence.model), stages
        if merged.maps:  # which change outputs, and the bias where that is all else
            model = with_mean_gap_in_bias(model, evidence.calls) or model
            shown = [*stages, "output"]
        # All of them, or none: keys alone may be anything, where values are not merged too.
        if not gaps.measure_gaps(model, evidence.calls, shown).cells_beyond_rounding:
            repair = "put these kv heads back, from the weights of the other one: a merge does not"
            parameters = merged.parameters(evidence.model.settings.num_heads)
            yield Variant(model, parameters, f"{repair} tell what it was made of")
            return


def _list_merges(evidence: Evidence, stages: Sequence[str]) -> Iterator[_Merged]:
    """Yield the heads with kv heads that stand for several of the model's: as means, and by maps.

    Recorded queries tell which of the model's heads each one is, and so which of its kv heads a
    recorded kv head stands for.
    """
    settings, call = evidence.model.settings, find_smallest_call(evidence, stages)
    if call is None:
        return
    copies = _count_copies(evidence.model, call)
    different = call.stages["v"].shape[1] // copies
    if different >= settings.num_kv_heads or call.stages[stages[0]].shape[1] % different:
        return
    heads = match_heads(evidence.model, call, stages[0])
    is_equal = heads is not None
    if (heads := heads or _match_mapped_heads(evidence, stages[0])) is None:
        return
    merged = _Merged(heads, (), copies)
    runs = merged.sources(evidence.model).reshape(different, -1).tolist()
    merged = replace(merged, groups=tuple(tuple(sorted({*run})) for run in runs))
    if all(len(group) == 1 for group in merged.groups):  # none were merged
        return
    if is_equal:
        yield merged
    if (mapped := _fit_maps(evidence, stages, merged)) is not None:
        yield mapped


def _rows(evidence: Evidence, stage: str) -> tuple[Tensor, Tensor]:
    """Return a recorded stage, and the model's, over all tokens, (heads, tokens, channels)."""
    calls = [call for call in evidence.calls if stage in call.stages]
    pairs = [(call.stages[stage], evidence.model.predict_stage(stage, call)) for call in calls]
    mine, theirs = (
        torch.cat([x.transpose(0, 1).flatten(1, 2) for x in side], 1)
        for side in zip(*pairs, strict=True)
    )
    return mine, theirs


def _match_mapped_heads(evidence: Evidence, stage: str) -> tuple[int, ...] | None:
    """Return the model's heads of which the recorded ones are nearest to linear maps."""
    recorded, predicted = _rows(evidence, stage)
    if recorded.shape[2] != predicted.shape[2] or recorded.shape[1] <= recorded.shape[2]:
        return None
    basis, matched = torch.linalg.qr(predicted).Q, list[int]()
    for head in recorded:
        left = (head - basis @ (basis.mT @ head)).flatten(1).norm(dim=1)
        left[matched] = torch.inf
        if not float(left.min()) <= CERTAIN * float(head.norm()):  # it may be NaN
            return None
        matched.append(int(left.argmin()))
    return tuple(matched)


def _fit_maps(evidence: Evidence, stages: Sequence[str], merged: _Merged) -> _Merged | None:
    """Return the merge by fitted maps of keys, of values or of both; None where there are none.

    What B reads back makes the new head again: the sum of F B over a group is 1.
    """
    if len({*map(len, merged.groups)}) > 1 or evidence.model.settings.compressed:
        return None
    maps, ways = dict[str, Tensor](), list[str]()
    for role, stage in zip("kv", stages[1:], strict=True):
        if (to := _fit_to(evidence, stage, merged)) is None:
            return None
        unit = torch.eye(to.shape[-1], dtype=to.dtype)
        if bool((to == unit).all()):
            ways.append(MEAN)
            continue
        is_turned = _is_near(to @ to.mT, unit)
        ways.append(TURNED if is_turned else COMPONENTS)
        if role == "k":
            back = _read_back_from_queries(evidence, stages[0], merged)
        else:
            back = to.mT if is_turned else _read_back_from_outputs(evidence.model, merged, to)
        again = merged.average(to @ back)
        if not _is_near(again, unit):
            return None
        for group, factor in zip(merged.groups, again, strict=True):  # which a fit may hide
            to[list(group)] = torch.linalg.inv(factor) @ to[list(group)]
        maps[role] = torch.stack([to, back])
    keys, values = ways
    way = keys if keys == values else f"keys {keys}, values {values}"
    return replace(merged, maps=maps, way=way) if maps else None


def _is_near(maps: Tensor, unit: Tensor) -> bool:
    return float((maps - unit).abs().max()) <= CERTAIN


def _fit_to(evidence: Evidence, stage: str, merged: _Merged) -> Tensor | None:
    """Return the maps (kv_heads, channels, channels) of which a new head is the mean."""
    recorded, predicted = _rows(evidence, stage)
    wanted, count, width = recorded[:: merged.copies], len(merged.groups[0]), recorded.shape[2]
    given = torch.stack([predicted[list(group)] for group in merged.groups])
    if given.shape[2:] != wanted.shape[1:]:
        return None
    to = torch.eye(width, dtype=given.dtype).repeat(len(predicted), 1, 1)
    tolerance = default_tolerance(evidence.calls[0].dtype)
    if float((given.mean(1) - wanted).norm()) <= tolerance * float(wanted.norm()):
        return to
    if given.shape[2] <= count * width:  # any other heads would fit
        return None
    given = given.transpose(1, 2).flatten(2)
    parts = torch.linalg.lstsq(given, wanted, driver="gelsd").solution.unflatten(1, (count, width))
    to[torch.tensor(merged.groups).flatten()] = count * parts.mT.flatten(0, 1)
    return to


def _read_back_from_queries(evidence: Evidence, stage: str, merged: _Merged) -> Tensor:
    """Return the maps B of keys, (kv_heads, channels, channels)."""
    recorded, predicted = _rows(evidence, stage)
    sources, heads = merged.sources(evidence.model), torch.tensor(merged.heads)
    back = recorded.new_zeros(evidence.model.settings.num_kv_heads, *[recorded.shape[2]] * 2)
    for kv in sources.unique():
        given, wanted = predicted[heads[sources == kv]], recorded[sources == kv]
        pair = given.flatten(0, 1), wanted.flatten(0, 1)
        back[kv] = torch.linalg.lstsq(*pair, driver="gelsd").solution
    return back


def _read_back_from_outputs(model: AttentionModel, merged: _Merged, to: Tensor) -> Tensor:
    """Return the maps B of values, (kv_heads, channels, channels), that lose least of outputs."""
    (wo, _), sources = model.projection("o"), merged.sources(model)
    products, back = wo @ wo.mT, torch.zeros_like(to)
    for kv in sources.unique():
        weights = products[torch.tensor(merged.heads)[sources == kv]].sum(0)
        back[kv] = torch.linalg.pinv(weights) @ to[kv].mT / len(merged.groups[0])
    return back


def _count_copies(model: AttentionModel, call: RecordedCall) -> int:
    values, bound = call.stages["v"], gaps.allowed_difference(model.prepare_stage("v", call)).amax()
    count = values.shape[1]
    for copies in range(count, 1, -1):
        if count % copies == 0:
            runs = values.unflatten(1, (-1, copies))
            if bool(((runs - runs[:, :, :1]).abs() <= bound).all()):
                return copies
    return 1
