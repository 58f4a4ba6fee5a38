"""Options of the layer and of a call, every pair of which is in some case."""

import random
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from headwise import Attention, Mask, Rotary, ScoreBias
from headwise.function import Latent
from headwise.function.scaling import LinearScaling, ProportionalScaling, YarnScaling
from headwise.function.spec import DifferentialRule, TemperatureRule, ValueRule
from headwise.layers.distance import Alibi, DebertaBias, T5Bias
from headwise.layers.norm import QKNorm

BATCH, QUERIES, KEYS, EMBED, SOURCE, HEADS = 3, 24, 29, 40, 33, 6

Case = dict[str, str]

LAYER: dict[str, dict[str, dict[str, Any]]] = {
    "kv_heads": {"6": {}, "2": {"num_kv_heads": 2}, "1": {"num_kv_heads": 1}},
    "widths": {"10, 7, 17": {"head_dim": 10, "value_dim": 7, "out_dim": 17}, "8": {"head_dim": 8}},
    "bias": {
        "all": {},
        "none": dict.fromkeys(["q_bias", "k_bias", "v_bias", "out_bias"], False),
        "q and out": {"k_bias": False, "v_bias": False},
    },
    "rotary": {
        "none": {},
        "half-split": {"rotary": Rotary()},
        "partial": {"rotary": Rotary(theta=500.0, width=6, scaling=LinearScaling(2.0))},
        "interleaved yarn": {
            "rotary": Rotary(pairing="interleaved", scaling=YarnScaling(4.0, original_length=12))
        },
        "backwards, proportional": {
            "rotary": Rotary(backwards=True, scaling=ProportionalScaling(0.5))
        },
    },
    "by distance": {
        "none": {},
        "alibi": {"score_bias": Alibi()},
        "t5": {"score_bias": T5Bias(buckets=8, max_distance=20)},
        "deberta": {"score_bias": DebertaBias(6, 12, eps=1e-7)},
        "deberta, shared": {"score_bias": DebertaBias(5, is_shared=True)},
    },
    "qk_norm": {
        "none": {},
        "head": {"qk_norm": QKNorm(one_plus=True)},
        "after": {"qk_norm": QKNorm(place="after")},
        "width": {"qk_norm": QKNorm(over="width")},
        "layer": {"qk_norm": QKNorm(kind="layer")},
        "no weight": {"qk_norm": QKNorm(place="after", has_weight=False)},
    },
    "temperature": {
        "none": {},
        "steps": {"temperature": TemperatureRule(0.3, 5)},
        "smooth": {"temperature": TemperatureRule(0.3, 5, first=1, kind="smooth")},
    },
    "clip": {"none": {}, "0.7": {"clip": 0.7}},
    "values": {
        "none": {},
        "norm": {"values": ValueRule(eps=1e-6)},
        "factor": {"values": ValueRule(factor=0.7)},
    },
    "output_norm": {
        "none": {},
        "width": {"output_norm": QKNorm(over="width")},
        "layer": {"output_norm": QKNorm("layer", over="width")},
        "head": {"output_norm": QKNorm(has_weight=False)},
    },
    "differential": {"none": {}, "pairs": {"differential": DifferentialRule(0.36, 1e-5)}},
    "window": {"none": {}, "past": {"window": (5, 0)}, "both": {"window": (3, 2)}},
    "scale": {"none": {}, "0.2": {"scale": 0.2}},
    "softcap": {"none": {}, "3": {"softcap": 3.0}},
    "sink": {"no": {}, "yes": {"sink": True}},
    "output_gate": {
        "none": {},
        "head": {"output_gate": "head"},
        "channel": {"output_gate": "channel", "gate_bias": False},
        "softplus": {"output_gate": "head softplus"},
    },
    "latent": {
        "none": {},
        "of both": {"latent": Latent(rank=11, shared_width=6, query_rank=13), "latent_bias": True},
        "of keys": {"latent": Latent(rank=3, shared_width=6, eps=1e-2, scaled=True)},
        "not normed": {"latent": Latent(rank=9, shared_width=6, query_rank=5, normed=False)},
    },
    "source": {"itself": {}, "another": {"source_dim": SOURCE}},
}
CALL: dict[str, tuple[str, ...]] = {
    "mask": ("none", "causal", "key lengths", "both lengths", "segments", "dense"),
    "score_bias": ("none", "dense", "alibi"),
    "gate": ("none", "heads", "batch heads"),
}
AXES: dict[str, tuple[str, ...]] = {**{name: tuple(v) for name, v in LAYER.items()}, **CALL}
ORDER = {name: place for place, name in enumerate(AXES)}


def allowed(case: Case) -> bool:
    """Whether the options chosen so far can be combined."""
    places = ("rotary", "by distance", "window", "temperature")
    if case.get("source") == "another" and any(case.get(n, "none") != "none" for n in places):
        return False
    if case.get("by distance", "none").startswith("deberta") and (
        case.get("rotary", "none") != "none" or case.get("latent", "none") != "none"
    ):
        return False
    if case.get("differential", "none") != "none" and (
        case.get("kv_heads", "6") == "1" or case.get("latent", "none") != "none"
    ):
        return False
    if case.get("latent", "none") != "none" and (
        case.get("kv_heads", "6") != "6"
        or case.get("qk_norm", "none") != "none"
        or case.get("source") == "another"
        or case.get("clip", "none") != "none"
        or case.get("values", "none") != "none"
    ):
        return False
    return not (case.get("source") == "another" and case.get("mask") == "segments")


def pairwise(seed: int = 0) -> list[Case]:
    """Cases that together hold every pair of options that can be combined (greedy)."""
    chance = random.Random(seed)
    missing = {
        ((a, x), (b, y))
        for a, b in combinations(AXES, 2)
        for x, y in product(AXES[a], AXES[b])
        if allowed({a: x, b: y})
    }
    cases = []
    while missing:
        best: tuple[int, Case] = (0, {})
        for _ in range(30):
            case = dict(chance.choice(sorted(missing)))
            for axis in chance.sample(sorted(AXES), len(AXES)):
                if axis not in case:
                    fitting = [x for x in AXES[axis] if allowed({**case, axis: x})]
                    gain = [
                        (_gained_by(missing, case, (axis, x)), chance.random(), x) for x in fitting
                    ]
                    case[axis] = max(gain)[2]
            best = max(best, (_gained(missing, case), case), key=lambda found: found[0])
        cases.append(best[1])
        missing -= _pairs(best[1])
    return cases


def _pairs(case: Case) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return {
        ((a, case[a]), (b, case[b])) for a, b in combinations(AXES, 2) if a in case and b in case
    }


def _gained(missing: set[Any], case: Case) -> int:
    return len(missing & _pairs(case))


def _gained_by(missing: set[Any], case: Case, added: tuple[str, str]) -> int:
    """Number of missing pairs of one more option with those of a case."""
    place = ORDER[added[0]]
    return sum(
        ((added, other) if place < ORDER[other[0]] else (other, added)) in missing
        for other in case.items()
    )


def layer_of(case: Case, dtype: torch.dtype = torch.float64) -> Attention:
    """The layer of a case; nothing in it is 0 or 1 by initialisation."""
    options: dict[str, Any] = {}
    for axis, choices in LAYER.items():
        options |= choices[case.get(axis, next(iter(choices)))]
    torch.manual_seed(3)
    layer = Attention(EMBED, HEADS, **options, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def inputs_of(
    case: Case, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], dict[str, Any]]:
    """x, and the source where there is one; and the options of the call."""
    torch.manual_seed(4)
    tensors = [torch.randn(BATCH, QUERIES, EMBED)]
    if case.get("source") == "another":
        tensors.append(torch.randn(BATCH, KEYS, SOURCE))
    keys = tensors[-1].shape[1]
    bias = torch.randn(HEADS, QUERIES, keys)
    bias[:, 3, ::2] = -torch.inf
    align = "bottom-right" if keys != QUERIES else None
    score_bias = {
        "none": None,
        "dense": ScoreBias.dense(bias.to(dtype), axes="heads queries keys"),
        "alibi": ScoreBias.alibi(torch.rand(HEADS).to(dtype), align=align),
    }
    gates = {"none": None, "heads": torch.rand(HEADS), "batch heads": torch.rand(BATCH, HEADS)}
    gate = gates[case.get("gate", "none")]
    options = {
        "mask": mask_of(case.get("mask", "none"), keys),
        "score_bias": score_bias[case.get("score_bias", "none")],
        "gate": None if gate is None else gate.to(dtype).requires_grad_(),
    }
    return [x.to(dtype).requires_grad_() for x in tensors], options


def mask_of(kind: str, keys: int) -> Mask | None:
    queries_real, keys_real = torch.tensor([24, 5, 0]), torch.tensor([keys, 5, 0])
    masks = {
        "none": None,
        "causal": Mask.causal(align=None if keys == QUERIES else "bottom-right"),
        "key lengths": Mask.lengths(keys=keys_real),
        "both lengths": Mask.lengths(queries=queries_real, keys=keys_real),
        "segments": Mask.segments(
            torch.tensor([[7] * 4 + [-1] * 3 + [0] * 17, [2] * 24, [-1] * 24])
        ),
        "dense": Mask.may_attend(torch.rand(BATCH, QUERIES, keys) > 0.4, axes="batch queries keys"),
    }
    return masks[kind]
