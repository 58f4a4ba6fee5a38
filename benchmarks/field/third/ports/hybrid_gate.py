"""Heads with a gate, as in qiuzh20/gated_attention, modeling_qwen3.py; with sinks and a window."""

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 52,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 14,
    "causal": True,
    "bias": "",
    "rotary": {
        "theta": 1e4,
        "pairing": "halves",
        "scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "window": 5,
    "sinks": True,
    "output_gate": "head",
}
TAKES = ("mask",)


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class GatedAttention(nn.Module):
    def __init__(self, config, dtype):
        super().__init__()
        hidden, self.head_dim = config["embed_dim"], config["head_dim"]
        self.num_heads, self.num_kv_heads = config["num_heads"], config["num_kv_heads"]
        self.groups = self.num_heads // self.num_kv_heads
        self.scaling = self.head_dim**-0.5
        self.sliding_window = config["window"]
        # the rows of a kv group: its query heads, then a gate for each of them
        q_rows = self.num_heads * self.head_dim + self.num_heads
        kv_rows = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, q_rows, bias=False, dtype=dtype)
        self.k_proj = nn.Linear(hidden, kv_rows, bias=False, dtype=dtype)
        self.v_proj = nn.Linear(hidden, kv_rows, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(q_rows - self.num_heads, hidden, bias=False, dtype=dtype)
        self.sinks = nn.Parameter(torch.empty(self.num_heads, dtype=dtype))
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64)
        inv_freq = 1.0 / config["rotary"]["theta"] ** (steps / self.head_dim)
        self.inv_freq = inv_freq / config["rotary"]["scaling"]["factor"]

    def rotary(self, x):
        positions = torch.arange(x.shape[2], dtype=torch.float64)
        emb = torch.outer(positions, self.inv_freq).repeat(1, 2)
        return x * emb.cos().to(x.dtype) + rotate_half(x) * emb.sin().to(x.dtype)

    def forward(self, x, attention_mask=None):
        b, s, _ = x.shape
        q_and_gate = self.q_proj(x).view(b, s, self.num_kv_heads, -1)
        q, gate = q_and_gate.split([self.groups * self.head_dim, self.groups], dim=-1)
        q = q.reshape(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        gate = gate.reshape(b, s, self.num_heads, 1)
        k = self.k_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = self.rotary(q), self.rotary(k)
        k = k.repeat_interleave(self.groups, dim=1)
        v = v.repeat_interleave(self.groups, dim=1)

        logits = q @ k.transpose(2, 3) * self.scaling
        back = torch.arange(s)[:, None] - torch.arange(s)
        seen = (back >= 0) & (back < self.sliding_window)
        if attention_mask is not None:
            seen = seen & attention_mask
        logits = logits.masked_fill(~seen, float("-inf"))
        # a sink is one more column, which has no value
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, s, 1)
        probs = torch.cat([logits, sinks], dim=-1).softmax(dim=-1)
        scores = probs[..., :-1]
        out = (scores @ v).transpose(1, 2)
        out = out * torch.sigmoid(gate)
        return self.o_proj(out.reshape(b, s, -1))


def make(weights):
    """Nest the gates with the query heads of their kv group."""
    attn = GatedAttention(SETTINGS, weights["wq"].dtype)
    kv, hidden = SETTINGS["num_kv_heads"], SETTINGS["embed_dim"]
    wq = weights["wq"].view(kv, -1, hidden)
    w_gate = weights["w_gate"].view(kv, -1, hidden)
    state = {f"{role}_proj.weight": weights[f"w{role}"] for role in "kvo"}
    state["q_proj.weight"] = torch.cat([wq, w_gate], dim=1).flatten(0, 1)
    state["sinks"] = weights["sinks"]
    attn.load_state_dict(state)
    attn.eval()
    return lambda x, mask=None: attn(x, attention_mask=mask)
