"""Causes in a learned bias by distance: its buckets, its direction and the order of its axes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, key_query_distances
from headwise.function.distance import bucket_of_distances, count_unshared_distances
from headwise.function.spec import BucketRule
from headwise.identify.catalogue import SCORES

# From which distance on all share the last bucket, numbers that people choose first.
MAX_DISTANCES = (*(2**n for n in range(12)), *range(1, 400))

Buckets = Callable[[Tensor], Tensor]  # of distances, key less query
Bias = Callable[[Tensor, Tensor], Tensor]  # of distances (batch, queries, keys) and the table


def _bias_otherwise(evidence: Evidence, bias: Bias) -> AttentionModel:
    """Return the model with another bias, (batch, heads, queries, keys), in place of its own."""

    def score(forced: ForcedStage) -> Tensor:
        table = forced.model.weights.get("distances")
        if table is None:  # another cause has left the bias out
            return forced.usual_result()
        bare = forced.model.with_settings(score_bias=None).with_weights(distances=None)
        added = bias(key_query_distances(forced.call)[:, 0], table)
        return replace(forced, model=bare).usual_result() + added

    return evidence.replace_stages(SCORES, score)


def _look_up(buckets: Buckets, distances: Tensor, table: Tensor) -> Tensor:
    return table[buckets(distances)].permute(0, 3, 1, 2)


def _buckets_of_rule(rule: BucketRule, max_exact: int | None = None) -> Buckets:
    count, most = rule.buckets, rule.max_distance
    assert isinstance(count, int)
    assert isinstance(most, int)

    def buckets(distances: Tensor) -> Tensor:
        both = bool(rule.bidirectional)
        return bucket_of_distances(distances, count, most, bidirectional=both, max_exact=max_exact)

    return buckets


def _relative_bias_buckets(evidence: Evidence) -> Variants:
    rule = evidence.model.settings.buckets
    if rule is None:
        return
    reach = max(call.key_positions.shape[1] for call in evidence.calls)
    distances = torch.arange(1 - reach, reach)
    tried = {tuple(_buckets_of_rule(rule)(distances).tolist())}
    repair = f"buckets={rule.buckets}, max_distance={rule.max_distance}"
    repair = f"T5Bias({repair}, bidirectional={rule.bidirectional})"
    for words, buckets in _list_buckets(rule):
        numbers = tuple(buckets(distances).tolist())
        if numbers not in tried:
            tried.add(numbers)
            model = _bias_otherwise(evidence, partial(_look_up, buckets))
            yield Variant(model, words, repair)


def _list_buckets(rule: BucketRule) -> Iterator[tuple[dict[str, int], Buckets]]:
    count, most, both = rule.buckets, rule.max_distance, bool(rule.bidirectional)
    assert isinstance(count, int)
    assert isinstance(most, int)
    for is_two_sided in (both, not both):
        words = {} if is_two_sided == both else {"bidirectional": is_two_sided}
        turned = replace(rule, bidirectional=is_two_sided)
        for fewer in (count, *(2**n for n in range(1, count.bit_length()) if 2**n < count)):
            near = count_unshared_distances(fewer, bidirectional=is_two_sided)
            if 0 < near < most:
                number = {} if fewer == count else {"buckets": fewer}
                yield {**words, **number}, _buckets_of_rule(replace(turned, buckets=fewer))
        for exact in range(1, min((count // 2 if is_two_sided else count) + 1, most)):
            yield {**words, "max_exact": exact}, _buckets_of_rule(turned, exact)
        near = count_unshared_distances(count, bidirectional=is_two_sided)
        for distance in MAX_DISTANCES:
            if distance > near:
                changed = replace(turned, max_distance=distance)
                yield {**words, "max_distance": distance}, _buckets_of_rule(changed)


def _relative_bias_reversed(evidence: Evidence) -> Variants:
    rule = evidence.model.settings.buckets
    if rule is not None:
        usual = _buckets_of_rule(rule)
        bias = partial(_look_up, lambda distances: usual(-distances))
        repair = "relative_position = key_position[None, :] - query_position[:, None]"
        model = _bias_otherwise(evidence, bias)
        yield Variant(model, {"distance": "query less key"}, repair)
        model = evidence.model.with_weights(distances=evidence.model.weights["distances"].flip(1))
        yield Variant(model, {"heads": "in reverse order"}, "table.flip(1), (buckets, heads)")


def _relative_bias_reshaped(evidence: Evidence) -> Variants:
    rule = evidence.model.settings.buckets
    if rule is None:
        return
    table = evidence.model.weights["distances"]
    buckets, heads = table.shape
    tables = {
        "as if it were (heads, buckets)": table.reshape(heads, buckets).T,
        "transposed and read as (buckets, heads)": table.T.reshape(buckets, heads),
    }
    if buckets == heads:
        tables["transposed"] = table.T
    for words, other in tables.items():
        model = evidence.model.with_weights(distances=other.contiguous())
        repair = "the table is (buckets, heads): transpose it, do not reshape it"
        yield Variant(model, {"table": words}, repair)
    bias = partial(_reshape_bias, _buckets_of_rule(rule))
    repair = "bias.permute(2, 0, 1), from (queries, keys, heads), in place of a reshape"
    parameters = {"bias": "(queries, keys, heads), read as (heads, queries, keys)"}
    yield Variant(_bias_otherwise(evidence, bias), parameters, repair)


def _reshape_bias(buckets: Buckets, distances: Tensor, table: Tensor) -> Tensor:
    bias = table[buckets(distances)]
    batch, queries, keys, heads = bias.shape
    return bias.reshape(batch, heads, queries, keys)
