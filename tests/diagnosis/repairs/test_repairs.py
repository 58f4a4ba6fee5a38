"""Each repair that a report prints, put into the code with the fault: it is right then."""

import pytest

from headwise import Rotary, compare
from headwise.diagnosis.repairs.lines import WORDS_ALONE
from headwise.function import LinearScaling, Llama3Scaling, TemperatureRule, YarnScaling
from headwise.identify.catalogue import CAUSES
from headwise.layers import Alibi
from tests.diagnosis.among import compare_among
from tests.diagnosis.repairs.further import BUCKETS, FURTHER, NORMED, RMS, T5
from tests.diagnosis.repairs.ports import CAUSAL, LLAMA, NUMPY, PLAIN, TORCH, Case
from tests.quick import others_extra

TURN = TORCH["turn"]
ALIBI = """
distance = torch.arange(scores.shape[-1])[None] - torch.arange(scores.shape[-2])[:, None]
slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
scores = scores + slopes[:, None, None] * -distance.abs()
"""
WINDOW = """
ahead = torch.arange(scores.shape[-1])[None] - torch.arange(scores.shape[-2])[:, None]
scores = scores.masked_fill((ahead > 0) | (ahead < -{}), -torch.inf)
"""
PADDING = TORCH["padding"]
SINK = """
column = sinks.view(1, -1, 1, 1).expand(len(x), -1, x.shape[1], 1)
weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
"""
GATED = TORCH["mix"] + " * split(x @ wg.mT, num_heads).sigmoid()"
WARMED = "\nq = q * (1 + 0.4 * torch.log1p(torch.arange(q.shape[2])[:, None] // 5))"
LINEAR = TORCH["frequencies"] + " / {}"
WINDOWED = {"window": (3, 0)}
HALF = {**LLAMA, "rotary": Rotary(width=4)}
HALF_PARTS = {
    "frequencies": "inv_freq = 1 / 10_000.0 ** (torch.arange(0, 4, 2).float() / 4)",
    "turn": """
def partner(y):
    return torch.cat((-y[..., 2:], y[..., :2]), -1)
q = torch.cat((q[..., :4] * cos + partner(q[..., :4]) * sin, q[..., 4:]), -1)
k = torch.cat((k[..., :4] * cos + partner(k[..., :4]) * sin, k[..., 4:]), -1)
""",
}
ROTATIONS = [
    Case("rotary theta", LLAMA, {"frequencies": TORCH["frequencies"].replace("10_000", "500")}),
    Case(
        "rotary exponent width",
        LLAMA,
        {"frequencies": TORCH["frequencies"].replace("/ 8)", "/ 16)")},
    ),
    Case("rotary missing", LLAMA, {"turn": ""}),
    Case("rotary direction", LLAMA, {"turn": TURN.replace("cos +", "cos -")}),
    Case("rotary applied twice", LLAMA, {"turn": TURN + "k = k * cos + partner(k) * sin"}),
    Case(
        "rotary pairing",
        LLAMA,
        {
            "tables": TORCH["tables"].replace(
                "torch.cat((angles, angles), -1)", "angles.repeat_interleave(2, -1)"
            ),
            "turn": TURN.replace(
                "torch.cat((-y[..., 4:], y[..., :4]), -1)",
                "torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2)",
            ),
        },
    ),
    Case(
        "rotary position offset",
        LLAMA,
        {
            "tables": TORCH["tables"] + "angles = angles + 3 * inv_freq",
            "turn": """
def partner(y):
    return torch.cat((-y[..., 4:], y[..., :4]), -1)
q = q * cos + partner(q) * sin
cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
k = k * cos + partner(k) * sin
""",
        },
    ),
    Case(
        "rotary axis",
        LLAMA,
        {
            "angles": "angles = torch.outer(torch.arange(num_heads).float(), inv_freq)[:, None]",
            "turn": TURN.replace("k * cos", "k * cos[:2]").replace("(k) * sin", "(k) * sin[:2]"),
        },
    ),
    Case(
        "rotary on some heads only",
        LLAMA,
        {
            "turn": """
def partner(y):
    return torch.cat((-y[..., 4:], y[..., :4]), -1)
q = torch.cat((q[:, :3] * cos + partner(q[:, :3]) * sin, q[:, 3:]), 1)
k = torch.cat((k[:, :1] * cos + partner(k[:, :1]) * sin, k[:, 1:]), 1)
"""
        },
    ),
    Case("rotary partial width", LLAMA, HALF_PARTS),
    Case(
        "rotary dtype",
        LLAMA,
        {"frequencies": TORCH["frequencies"] + "\ninv_freq = inv_freq.bfloat16().float()"},
    ),
    Case(
        "rotary pairs across the whole head",
        HALF,
        {
            "turn": """
def rotate(y):
    a, b = y[..., :2], y[..., 4:6]
    cos, sin = angles.cos(), angles.sin()
    parts = (a * cos - b * sin, y[..., 2:4], b * cos + a * sin, y[..., 6:])
    return torch.cat(parts, -1)
q, k = rotate(q), rotate(k)
"""
        },
        HALF_PARTS,
    ),
    Case(
        "temperature of queries",
        {**LLAMA, "temperature": TemperatureRule(0.4, 5)},
        {"turn": TORCH["turn"]},
        {"turn": TORCH["turn"] + WARMED},
    ),
    Case(
        "rotary scaling factor",
        {**LLAMA, "rotary": Rotary(scaling=LinearScaling(4.0))},
        {"frequencies": LINEAR.format("3")},
        {"frequencies": LINEAR.format("4")},
    ),
    Case(
        "rotary scaling kind",
        {**LLAMA, "rotary": Rotary(scaling=Llama3Scaling(8.0, 1.0, 4.0, 32))},
        {"frequencies": TORCH["frequencies"]},
        {
            "frequencies": TORCH["frequencies"]
            + """
smooth = ((32 * inv_freq / 6.283185307179586 - 1) / 3).clamp(0, 1)
inv_freq = (1 - smooth) * inv_freq / 8 + smooth * inv_freq
"""
        },
    ),
    Case(
        "rotary attention factor",
        {**LLAMA, "rotary": Rotary(width=4, scaling=YarnScaling(4.0, 64, attention_factor=1.3))},
        {"tables": TORCH["tables"]},
        {
            **HALF_PARTS,
            "frequencies": """
plain = 1 / 10_000.0 ** (torch.arange(0, 4, 2).float() / 4)
keep = 1 - torch.arange(2)
inv_freq = plain / 4 * (1 - keep) + plain * keep
""",
            "tables": TORCH["tables"]
            .replace(".cos()", ".cos() * 1.3")
            .replace(".sin()", ".sin() * 1.3"),
        },
    ),
    Case(
        "qk-norm kind",
        NORMED,
        {
            "norms": """
q = torch.nn.functional.layer_norm(q, (8,), q_norm, eps=1e-6)
k = torch.nn.functional.layer_norm(k, (8,), k_norm, eps=1e-6)
"""
        },
        {"norms": RMS},
    ),
    Case("qk-norm eps", NORMED, {"norms": RMS.replace("1e-6", "1e-3")}, {"norms": RMS}),
    Case(
        "norm weights of q and k exchanged",
        NORMED,
        {"norms": f"q_norm, k_norm = k_norm, q_norm\n{RMS}"},
        {"norms": RMS},
    ),
    Case(
        "norm weights missing",
        NORMED,
        {"norms": f"k_norm = torch.ones(8)\n{RMS}"},
        {"norms": RMS},
    ),
    Case(
        "norm weights in another order",
        NORMED,
        {
            "weights": "q_norm, k_norm = (w.reshape(2, 4).T.flatten() for w in (q_norm, k_norm))",
            "norms": RMS,
        },
        {"norms": RMS},
    ),
    Case(
        "rotary on other channels",
        HALF,
        {
            "turn": """
def partner(y):
    return torch.cat((-y[..., 2:], y[..., :2]), -1)
q = torch.cat((q[..., :4], q[..., 4:] * cos + partner(q[..., 4:]) * sin), -1)
k = torch.cat((k[..., :4], k[..., 4:] * cos + partner(k[..., 4:]) * sin), -1)
"""
        },
        HALF_PARTS,
    ),
    Case(
        "rotary over all heads at once",
        LLAMA,
        {
            "turn": """
def turned(y):
    size = y.shape[1] * 8
    angle = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
    a, b = y.transpose(1, 2).flatten(2).chunk(2, -1)
    both = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return torch.cat(both, -1).unflatten(2, (-1, 8)).transpose(1, 2)
q, k = turned(q), turned(k)
"""
        },
    ),
    Case("qk-norm place", NORMED, {"norms": "", "turn": TURN + RMS}, {"norms": RMS}),
    Case(
        "qk-norm weight offset",
        NORMED,
        {"norms": RMS.replace("q_norm", "(1 + q_norm)").replace("k_norm", "(1 + k_norm)")},
        {"norms": RMS},
    ),
]
SCORES = [
    Case("scale", CAUSAL, {"scores": "scores = q @ k.mT / 40**0.5"}),
    Case(
        "scale twice",
        CAUSAL,
        {"scores": "q = q * head_dim**-0.5\nscores = q @ k.mT * head_dim**-0.5"},
    ),
    Case("temperature by length", CAUSAL, {"scores": "scores = q @ k.mT / k.shape[2] ** 0.5"}),
    Case(
        "softcap",
        {"softcap": 2.0, **CAUSAL},
        {"softcap": ""},
        {"softcap": "scores = 2 * (scores / 2).tanh()"},
    ),
    Case(
        "distance bias coefficient",
        {"score_bias": Alibi(), **CAUSAL},
        {"bias": ALIBI.replace("-distance", "-2 * distance")},
        {"bias": ALIBI},
    ),
    Case(
        "distance bias slope rule",
        {"score_bias": Alibi(), **CAUSAL},
        {
            "bias": ALIBI.replace(
                "torch.tensor([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])",
                "2.0 ** -(8 * torch.arange(1, 7) / 6)",
            )
        },
        {"bias": ALIBI},
    ),
    Case(
        "relative bias buckets",
        T5,
        {"bias": BUCKETS.replace("16 / 2", "32 / 2")},
        {"bias": BUCKETS, "scores": "scores = q @ k.mT"},
    ),
    Case(
        "relative bias reversed",
        T5,
        {"bias": BUCKETS.replace("offset = ", "offset = -1 * ")},
        {"bias": BUCKETS, "scores": "scores = q @ k.mT"},
    ),
    Case(
        "relative bias reshaped",
        T5,
        {"bias": BUCKETS.replace("movedim(-1, 0)", "reshape(6, *offset.shape)")},
        {"bias": BUCKETS, "scores": "scores = q @ k.mT"},
    ),
    Case("sinks", {"sink": True, **CAUSAL}, {"softmax": TORCH["softmax"]}, {"softmax": SINK}),
    Case(
        "another column cut off",
        {"sink": True, **CAUSAL},
        {"softmax": SINK.replace("[..., :-1]", "[..., 1:]")},
        {"softmax": SINK},
    ),
    Case("softmax axis", PLAIN, {"softmax": "weights = torch.softmax(scores, dim=-2)"}),
    Case(
        "softmax dtype",
        PLAIN,
        {"softmax": "weights = torch.softmax(scores.bfloat16(), dim=-1).to(v.dtype)"},
    ),
    Case(
        "output gate missing",
        {"output_gate": "channel", "gate_bias": False, **CAUSAL},
        {"mix": TORCH["mix"]},
        {"mix": GATED},
    ),
    Case(
        "gate without sigmoid",
        {"output_gate": "channel", "gate_bias": False, **CAUSAL},
        {"mix": GATED.replace(".sigmoid()", "")},
        {"mix": GATED},
    ),
]
MASKS = [
    Case(
        "mask polarity",
        PLAIN,
        {"padding": PADDING.replace("mask.logical_not(), -torch.inf", "mask, -1e9")},
    ),
    Case("padding ignored", PLAIN, {"padding": ""}),
    Case("padding side", PLAIN, {"padding": PADDING.replace("mask.", "mask.flip(-1).")}),
    Case(
        "mask added as 0/1",
        PLAIN,
        {"padding": "if mask is not None:\n    scores = scores + mask"},
    ),
    Case(
        "mask along queries",
        PLAIN,
        {"padding": PADDING.replace("mask.logical_not(), -torch.inf", "~mask.mT, -1e9")},
    ),
    Case(
        "mask after the softmax",
        CAUSAL,
        {
            "mask": "",
            "softmax": """
past = torch.ones(scores.shape[-2:]).tril()
weights = torch.softmax(scores, dim=-1) * past
""",
        },
    ),
    Case(
        "window on the wrong side",
        WINDOWED,
        {"mask": WINDOW.format(3).replace("(ahead", "(-ahead")},
        {"mask": WINDOW.format(3)},
    ),
    Case("causal alignment", CAUSAL, {"mask": TORCH["mask"].replace("triu(1)", "triu(2)")}),
    Case("causal mask missing", CAUSAL, {"mask": ""}),
    Case("causal mask inverted", CAUSAL, {"mask": TORCH["mask"].replace("triu(1)", "tril(-1)")}),
    Case("window missing", WINDOWED, {"mask": TORCH["mask"]}, {"mask": WINDOW.format(3)}),
    Case("window off by one", WINDOWED, {"mask": WINDOW.format(4)}, {"mask": WINDOW.format(3)}),
    Case(
        "finite number for -inf",
        CAUSAL,
        {"mask": TORCH["mask"].replace("-torch.inf", "0.0")},
        arguments="x",
    ),
]
AXES = [
    Case("number of heads", PLAIN, {"sizes": "num_heads, head_dim = 12, 4"}),
    Case(
        "split without transpose",
        PLAIN,
        {
            "projections": TORCH["projections"]
            .replace(
                "count, head_dim).transpose(1, 2)", "head_dim).view(len(x), count, -1, head_dim)"
            )
            .replace("y.shape[1], head_dim", "-1, head_dim")
        },
    ),
    Case(
        "merge without transpose",
        PLAIN,
        {"output": TORCH["output"].replace(".transpose(1, 2)", "")},
    ),
    Case(
        "kv heads tiled instead of repeated",
        LLAMA,
        {"groups": "k, v = k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)"},
    ),
    Case(
        "batch and sequence exchanged",
        PLAIN,
        {
            "projections": "x = x.transpose(0, 1)"
            + TORCH["projections"].replace("view", "reshape"),
            "output": TORCH["output"] + "\noutput = output.transpose(0, 1)",
        },
        arguments="x",
    ),
    Case(
        "kv head of another group",
        {**LLAMA, "num_kv_heads": 3},
        {"groups": "k, v = k[:, [0, 0, 0, 1, 1, 1]], v[:, [0, 0, 0, 1, 1, 1]]"},
        {"sizes": "num_heads, num_kv_heads, head_dim = 6, 3, 8"},
    ),
    Case("weights transposed", PLAIN, {"mix": "outputs = weights.mT @ v"}),
    Case(
        "output projection missing",
        CAUSAL,
        {"output": TORCH["output"].partition(" @ ")[0]},
        width=48,
    ),
    Case(
        "gate merged without transpose",
        {"output_gate": "channel", "gate_bias": False, **CAUSAL},
        {"mix": GATED.replace("split(x @ wg.mT, num_heads)", "(x @ wg.mT).reshape(v.shape)")},
        {"mix": GATED},
    ),
    Case("residual inside", PLAIN, {"output": TORCH["output"] + " + x"}),
    Case(
        "bias missing",
        LLAMA,
        {"projections": TORCH["projections"].replace(" + bv", "")},
    ),
]
WEIGHTS = [
    Case("q and k exchanged", CAUSAL, {"weights": "wq, wk, bq, bk = wk, wq, bk, bq"}),
    Case("k and v exchanged", LLAMA, {"weights": "wk, wv, bk, bv = wv, wk, bv, bk"}),
    Case("q and v exchanged", CAUSAL, {"weights": "wq, wv, bq, bv = wv, wq, bv, bq"}),
    Case("sign", LLAMA, {"weights": "wq, bq = -wq, -bq"}),
    Case("factor", CAUSAL, {"weights": "wv, bv = 1.5 * wv, 1.5 * bv"}),
    Case("factor", CAUSAL, {"weights": "bo = 3 * bo"}),
    Case("factor", CAUSAL, {"mix": TORCH["mix"] + " / 0.9"}),
    Case(
        "heads permuted",
        CAUSAL,
        {"weights": "wv = wv.view(6, 8, -1)[[1, 0, 2, 3, 5, 4]].flatten(0, 1)"},
    ),
    Case(
        "heads interleaved",
        CAUSAL,
        {"weights": "wk = wk.view(6, 8, -1).transpose(0, 1).reshape(48, -1)"},
    ),
    Case("square matrix transposed", CAUSAL, {"weights": "wk = wk.mT"}, width=48),
    Case(
        "projection reshaped with exchanged axes", LLAMA, {"weights": "wq = wq.mT.reshape(48, 40)"}
    ),
    Case(
        "output projection reshaped with exchanged axes",
        LLAMA,
        {"weights": "wo = wo.mT.reshape(40, 48)"},
    ),
    Case(
        "output heads in another group order",
        LLAMA,
        {"weights": "wo = wo.view(40, 2, 3, 8).transpose(1, 2).reshape(40, 48)"},
    ),
    Case(
        "rotary permutation missing",
        LLAMA,
        {
            "weights": """
wq = wq.view(6, 2, 4, -1).transpose(1, 2).reshape(48, -1)
wk = wk.view(2, 2, 4, -1).transpose(1, 2).reshape(16, -1)
bq = bq.view(6, 2, 4).transpose(1, 2).flatten()
bk = bk.view(2, 2, 4).transpose(1, 2).flatten()
"""
        },
    ),
    Case(
        "rotary pairing",
        LLAMA,
        {
            "weights": """
wq = wq.view(6, 4, 2, -1).transpose(1, 2).reshape(48, -1)
wk = wk.view(2, 4, 2, -1).transpose(1, 2).reshape(16, -1)
bq = bq.view(6, 4, 2).transpose(1, 2).flatten()
bk = bk.view(2, 4, 2).transpose(1, 2).flatten()
"""
        },
    ),
    Case(
        "rotary permutation with a wrong number of heads",
        LLAMA,
        {
            "weights": """
wk = wk.view(2, 2, 4, -1).transpose(1, 2).reshape(16, -1)
wk = wk.view(1, 8, 2, -1).transpose(1, 2).reshape(16, -1)
bk = bk.view(2, 2, 4).transpose(1, 2).flatten()
bk = bk.view(1, 8, 2).transpose(1, 2).flatten()
"""
        },
    ),
    Case(
        "nesting of fused rows",
        CAUSAL,
        {
            "weights": """
wq, wk, wv = torch.cat((wq, wk, wv)).view(6, 3, 8, -1).transpose(0, 1).flatten(1, 2)
bq, bk, bv = torch.cat((bq, bk, bv)).view(6, 3, 8).transpose(0, 1).flatten(1)
"""
        },
    ),
    Case(
        "order of fused rows",
        LLAMA,
        {
            "weights": """
rows, biases = torch.cat((wk, wq, wv)), torch.cat((bk, bq, bv))
wq, wk, wv = rows[:48], rows[48:64], rows[64:]
bq, bk, bv = biases[:48], biases[48:64], biases[64:]
"""
        },
    ),
    Case(
        "kv groups of fused rows",
        LLAMA,
        {
            "weights": """
rows, biases = torch.cat((wq, wk, wv)).view(2, 5, 8, -1), torch.cat((bq, bk, bv)).view(2, 5, 8)
wq, wk, wv = rows[:, :3].flatten(0, 2), rows[:, 3].flatten(0, 1), rows[:, 4].flatten(0, 1)
bq, bk, bv = biases[:, :3].flatten(), biases[:, 3].flatten(), biases[:, 4].flatten()
"""
        },
    ),
]
CACHE = {
    "weights": """
kept_k, kept_v, past = cache or (torch.zeros(len(x), 2, 0, 8), torch.zeros(len(x), 2, 0, 8), 0)
past_k, past_v = kept_k.to(x.dtype), kept_v.to(x.dtype)
""",
    "angles": "angles = torch.outer(past + torch.arange(x.shape[1]).float(), inv_freq)",
    "cache": "k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)",
    "groups": "state = k, v, past + x.shape[1]" + TORCH["groups"],
    "mask": """
future = torch.ones(scores.shape[-2:]).triu(1 + scores.shape[-1] - scores.shape[-2]).bool()
scores = scores.masked_fill(future, -torch.inf)
""",
    "output": TORCH["output"] + "\noutput = output, state",
}
CACHED_WINDOW = """
ahead = torch.arange(scores.shape[-1])[None] - torch.arange(scores.shape[-2])[:, None] - past
scores = scores.masked_fill((ahead > 0) | (ahead < -3), -torch.inf)
"""
DECODING = [
    Case(*case, arguments=arguments)
    for *case, arguments in (
        (
            "position offset in decoding",
            LLAMA,
            {"angles": TORCH["angles"]},
            CACHE,
            "x, cache=None",
        ),
        (
            "window in decoding",
            {**LLAMA, "window": (3, 0)},
            {
                "mask": "if not past:"
                + CACHED_WINDOW.replace("\n", "\n    ")
                + "\nelse:"
                + CACHE["mask"].replace("\n", "\n    ")
            },
            {**CACHE, "mask": CACHED_WINDOW},
            "x, cache=None",
        ),
        (
            "evicted keys",
            LLAMA,
            {
                "cache": """
k = torch.cat([past_k[:, :, -2:], k], 2)
v = torch.cat([past_v[:, :, -2:], v], 2)
"""
            },
            CACHE,
            "x, cache=None",
        ),
        (
            "cached values lost",
            LLAMA,
            {"cache": CACHE["cache"].replace("past_v", "0 * past_v")},
            CACHE,
            "x, cache=None",
        ),
        (
            "cache joined in another order",
            LLAMA,
            {"cache": CACHE["cache"].replace("past_v, v", "v, past_v")},
            CACHE,
            "x, cache=None",
        ),
        *(
            (
                "left padding in decoding",
                LLAMA,
                {"padding": PADDING.replace("mask is not None", f"mask is not None and {when}")},
                CACHE,
                "x, cache=None, mask=None",
            )
            for when in ("not past", "(not past or x.shape[1] > 1)")
        ),
        (
            "scale",
            LLAMA,
            {
                "scores": TORCH["scores"].replace(
                    "head_dim**-0.5", "(0.2 if past else head_dim**-0.5)"
                )
            },
            CACHE,
            "x, cache=None",
        ),
    )
]
N_TURN = NUMPY["turn"]
IN_NUMPY = [
    Case(*case, language="numpy")
    for case in (
        ("scale", CAUSAL, {"scores": "scores = q @ k.swapaxes(2, 3)"}),
        ("rotary direction", LLAMA, {"turn": N_TURN.replace("cos +", "cos -")}),
        ("rotary theta", LLAMA, {"frequencies": "inv_freq = 99.0 ** (-np.arange(0, 8, 2) / 8)"}),
        ("causal mask missing", CAUSAL, {"mask": ""}),
        (
            "mask polarity",
            PLAIN,
            {"padding": NUMPY["padding"].replace("np.logical_not(mask), -np.inf", "mask, -1e9")},
        ),
        (
            "softmax axis",
            PLAIN,
            {"softmax": "weights = np.exp(scores) / np.exp(scores).sum(-2, keepdims=True)"},
        ),
        (
            "merge without transpose",
            PLAIN,
            {"output": NUMPY["output"].replace(".transpose(0, 2, 1, 3)", "")},
        ),
        (
            "kv heads tiled instead of repeated",
            LLAMA,
            {"groups": "k, v = (np.tile(y, (1, 3, 1, 1)) for y in (k, v))"},
        ),
        (
            "heads interleaved",
            CAUSAL,
            {"weights": "wk = wk.reshape(6, 8, -1).swapaxes(0, 1).reshape(48, -1)"},
        ),
    )
]
BESIDE = {"rotary pairing": ["rotary permutation doubled"]}  # one of which the lines repair
QUICK = ("scale, torch",)
EVERY = [*ROTATIONS, *SCORES, *MASKS, *AXES, *WEIGHTS, *DECODING, *FURTHER, *IN_NUMPY]


@pytest.mark.parametrize(
    "case",
    others_extra(EVERY, *EVERY[::6], quick=[x for x in EVERY if str(x) in QUICK]),
    ids=str,
)
def test_the_printed_lines_repair_the_port(case: Case) -> None:
    layer = case.layer()
    diagnosis = compare_among([case.cause, *BESIDE.get(case.cause, ())], case.port(), layer)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert case.cause in (cause.name, *cause.equals), str(diagnosis)
    assert cause.place, str(diagnosis)
    again = compare(case.port(cause), layer)
    assert again, f"{diagnosis}\n{again}"


def test_every_cause_has_a_port_or_a_reason_for_words() -> None:
    named = {case.cause for case in EVERY}
    lacking = {cause.name for cause in CAUSES if cause not in WORDS_ALONE} - named
    assert lacking == {
        "rows without keys",  # no input of compare hides all keys of a query
        "rotary permutation doubled",  # outputs name it "rotary pairing", whose lines are on rows
        "rotary permutation of another width",  # rows, as those of the whole width
        "shards joined in the wrong order",  # rows, as those of fused projections
    }


# Cases of the same right port count once.
RIGHT = {str((x.options, x.parts, x.arguments, x.width)): x for x in EVERY}


@pytest.mark.parametrize("case", others_extra(RIGHT.values(), *[*RIGHT.values()][::3]), ids=str)
def test_the_port_without_the_fault_is_the_layer(case: Case) -> None:
    assert compare(case.function(case.parts), case.layer())
