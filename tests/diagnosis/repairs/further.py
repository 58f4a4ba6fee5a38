"""Ports with forms of causes that are rarer, for the tests of repairs."""

from headwise.layers import QKNorm, T5Bias
from tests.diagnosis.repairs.ports import CAUSAL, LLAMA, PLAIN, TORCH, Case

RMS = "\n".join(
    f"{r} = {r} * ({r}.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * {r}_norm" for r in "qk"
)
BUCKETS = """
offset = (torch.arange(scores.shape[-1])[None] - torch.arange(scores.shape[-2])[:, None])
size = offset.abs()
large = 2 + (torch.log(size.float() / 2) / math.log(16 / 2) * 2).to(torch.long)
large = torch.minimum(large, torch.full_like(large, 3))
which = (offset > 0) * 4 + torch.where(size < 2, size, large)
scores = scores + table[which].movedim(-1, 0)
"""
T5 = {"score_bias": T5Bias(8, 16), "scale": 1.0}
NORMED = {"qk_norm": QKNorm(), **LLAMA}
FURTHER = [
    Case(
        "rotary on some heads only",
        {**LLAMA, "num_kv_heads": 2},
        {
            "turn": """
def turned(y):
    a, b = y[:, :1].chunk(2, -1)
    one = torch.cat((a, b), -1) * cos + torch.cat((-b, a), -1) * sin
    return torch.cat((one, y[:, 1:]), 1)
q, k = turned(q), turned(k)
"""
        },
    ),
    Case("qk-norm eps", NORMED, {"norms": RMS.replace("1e-6", "0.1")}, {"norms": RMS}),
    Case(
        "temperature by length",
        CAUSAL,
        {"scores": "scores = q @ k.mT * head_dim**-0.5 / torch.tensor(k.shape[2]).log()"},
    ),
    Case(
        "relative bias buckets",  # of earlier keys alone, and of twice the distance
        T5,
        {
            "bias": BUCKETS.replace("size = offset.abs()", "size = -offset.clamp(max=0)")
            .replace("(offset > 0) * 4 + ", "")
            .replace("size < 2", "size < 4")
            .replace(
                "2 + (torch.log(size.float() / 2) / math.log(16 / 2) * 2)",
                "4 + (torch.log(size.float() / 4) / math.log(32 / 4) * 4)",
            )
            .replace("full_like(large, 3)", "full_like(large, 7)")
        },
        {"bias": BUCKETS, "scores": "scores = q @ k.mT"},
    ),
    Case(
        "relative bias reversed",
        T5,
        {"bias": BUCKETS.replace("movedim(-1, 0)", "movedim(-1, 0).flip(0)")},
        {"bias": BUCKETS, "scores": "scores = q @ k.mT"},
    ),
    Case(
        "mask after the softmax",
        PLAIN,
        {
            "padding": "",
            "softmax": """
weights = torch.softmax(scores, dim=-1)
if mask is not None:
    weights = weights.masked_fill(mask.logical_not(), -torch.inf)
""",
        },
    ),
    Case(
        "sign",
        CAUSAL,
        {
            "mask": TORCH["mask"].replace("-torch.inf", "-1e9"),
            "padding": TORCH["padding"].replace("-torch.inf", "-1e9"),
            "softmax": "weights = torch.softmax(-scores, dim=-1)",
        },
    ),
    Case("residual inside", PLAIN, {"output": TORCH["output"] + " + 2 * x"}),
]
