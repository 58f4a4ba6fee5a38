"""gpt-oss's attention with sinks and a window, as in openai/gpt-oss, gpt_oss/torch/model.py."""
# ruff: noqa: N803, N806

import math

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 66,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 14,
    "causal": True,
    "bias": "qkvo",
    "window": 6,
    "sinks": True,
    "rotary": {"theta": 150000.0, "pairing": "halves"},
}
TAKES = ("mask",)


class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim, base):
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def _cos_sin(self, num_tokens, device):
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float, device=device)
        inv_freq = 1.0 / self.base ** (steps / self.head_dim)
        t = torch.arange(num_tokens, dtype=torch.float, device=device)
        freqs = torch.einsum("i,j->ij", t, inv_freq)
        return freqs.cos(), freqs.sin()

    def _turn(self, x, cos, sin):
        cos, sin = cos[:, None, None], sin[:, None, None]
        x1, x2 = torch.chunk(x, 2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)

    def forward(self, query, key):
        cos, sin = self._cos_sin(key.shape[1], key.device)
        return self._turn(query, cos, sin), self._turn(key, cos, sin)


def sdpa(Q, K, V, S, sm_scale, sliding_window, mask=None):
    """Attend for Q of (batch, tokens, kv heads, group, head_dim), K and V of one head per group."""
    bsz, n_tokens, n_kv, q_mult, _ = Q.shape
    K = K.expand(-1, -1, -1, q_mult, -1)
    V = V.expand(-1, -1, -1, q_mult, -1)
    S = S.reshape(1, n_kv, q_mult, 1, 1).expand(bsz, -1, -1, n_tokens, -1)
    blocked = torch.full((n_tokens, n_tokens), -float("inf"), dtype=Q.dtype, device=Q.device)
    bias = torch.triu(blocked, diagonal=1)
    bias = bias + torch.tril(blocked, diagonal=-sliding_window)
    QK = torch.einsum("bqhmd,bkhmd->bhmqk", Q, K)
    QK = QK * sm_scale
    QK = QK + bias
    if mask is not None:
        mask = mask.expand(bsz, n_kv * q_mult, -1, n_tokens).unflatten(1, (n_kv, q_mult))
        QK = QK.masked_fill(~mask, -float("inf"))
    QK = torch.cat([QK, S], dim=-1)
    W = torch.softmax(QK, dim=-1)
    W = W[..., :-1]
    attn = torch.einsum("bhmqk,bkhmd->bqhmd", W, V)
    return attn.reshape(bsz, n_tokens, -1)


class AttentionBlock(nn.Module):
    def __init__(self, hidden_size, heads, kv_heads, head_dim, sliding_window, base):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.sinks = nn.Parameter(torch.empty(heads))
        self.qkv = nn.Linear(hidden_size, head_dim * (heads + 2 * kv_heads))
        self.out = nn.Linear(head_dim * heads, hidden_size)
        self.sm_scale, self.sliding_window = 1 / math.sqrt(head_dim), sliding_window
        self.rope = RotaryEmbedding(head_dim, base)

    def forward(self, x, mask=None):
        bsz, n_tokens, _ = x.shape
        qkv = self.qkv(x)
        q_end = self.heads * self.head_dim
        k_end = q_end + self.kv_heads * self.head_dim
        q, k, v = qkv[..., :q_end], qkv[..., q_end:k_end], qkv[..., k_end:]
        q_mult = self.heads // self.kv_heads
        q = q.reshape(bsz, n_tokens, self.kv_heads, q_mult, self.head_dim)
        k = k.reshape(bsz, n_tokens, self.kv_heads, 1, self.head_dim)
        v = v.reshape(bsz, n_tokens, self.kv_heads, 1, self.head_dim)
        q, k = self.rope(q, k)
        t = sdpa(q, k, v, self.sinks, self.sm_scale, self.sliding_window, mask)
        return self.out(t)


def make(weights):
    s = SETTINGS
    block = AttentionBlock(
        s["embed_dim"],
        s["num_heads"],
        s["num_kv_heads"],
        s["head_dim"],
        s["window"],
        s["rotary"]["theta"],
    ).to(weights["wq"].dtype)
    state = {
        "qkv.weight": torch.cat([weights["wq"], weights["wk"], weights["wv"]], dim=0),
        "qkv.bias": torch.cat([weights["bq"], weights["bk"], weights["bv"]], dim=0),
        "out.weight": weights["wo"],
        "out.bias": weights["bo"],
        "sinks": weights["sinks"],
    }
    block.load_state_dict(state)
    return block.eval()
