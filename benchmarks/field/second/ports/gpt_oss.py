"""gpt-oss, with positions interpolated plainly (openai/gpt-oss, gpt_oss/torch/model.py)."""

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 45,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 14,
    "causal": True,
    "rotary": {
        "theta": 150000.0,
        "pairing": "halves",
        "scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "window": 5,
    "sinks": True,
}
TAKES = ()


class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim, base, scaling_factor):
        super().__init__()
        self.head_dim, self.base, self.scaling_factor = head_dim, base, scaling_factor

    def _compute_cos_sin(self, num_tokens):
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        inv_freq = 1.0 / (self.base**exponents * self.scaling_factor)
        t = torch.arange(num_tokens, dtype=torch.float64)
        freqs = torch.einsum("i,j->ij", t, inv_freq)
        return freqs.cos(), freqs.sin()

    def _rotate(self, x, cos, sin):
        cos = cos.unsqueeze(-2).to(x.dtype)
        sin = sin.unsqueeze(-2).to(x.dtype)
        x1, x2 = torch.chunk(x, 2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)

    def forward(self, query, key):  # [n_tokens, heads, head_dim]
        cos, sin = self._compute_cos_sin(query.shape[0])
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)


def sdpa(Q, K, V, S, sm_scale, sliding_window=0):  # noqa: N803
    n_tokens, n_kv, q_mult, _ = Q.shape
    K = K[:, :, None, :].expand(-1, -1, q_mult, -1)  # noqa: N806
    V = V[:, :, None, :].expand(-1, -1, q_mult, -1)  # noqa: N806
    S = S.reshape(n_kv, q_mult, 1, 1).expand(-1, -1, n_tokens, -1)  # noqa: N806
    mask = torch.triu(Q.new_full((n_tokens, n_tokens), -float("inf")), diagonal=1)
    if sliding_window > 0:
        far = mask.new_full((n_tokens, n_tokens), -float("inf"))
        mask = mask + torch.tril(far, diagonal=-sliding_window)
    QK = torch.einsum("qhmd,khmd->hmqk", Q, K)  # noqa: N806
    QK = QK * sm_scale  # noqa: N806
    QK = QK + mask[None, None]  # noqa: N806
    QK = torch.cat([QK, S], dim=-1)  # noqa: N806
    W = torch.softmax(QK, dim=-1)  # noqa: N806
    W = W[..., :-1]  # noqa: N806
    attn = torch.einsum("hmqk,khmd->qhmd", W, V)
    return attn.reshape(n_tokens, -1)


class AttentionBlock(nn.Module):
    def __init__(self, config, layer_idx=0):
        super().__init__()
        self.head_dim = config["head_dim"]
        self.n_heads, self.n_kv = config["num_heads"], config["num_kv_heads"]
        self.sliding_window = config["window"] if layer_idx % 2 == 0 else 0
        self.sm_scale = 1 / self.head_dim**0.5
        rotary = config["rotary"]
        factor = rotary["scaling"]["factor"]
        self.rope = RotaryEmbedding(self.head_dim, rotary["theta"], factor)
        width = self.head_dim * (self.n_heads + 2 * self.n_kv)
        self.qkv = nn.Linear(config["embed_dim"], width)
        self.out = nn.Linear(self.head_dim * self.n_heads, config["embed_dim"])
        self.sinks = nn.Parameter(torch.empty(self.n_heads))

    def forward(self, x):  # [n_tokens, hidden_size]
        qkv = self.qkv(x)
        sizes = [self.head_dim * n for n in (self.n_heads, self.n_kv, self.n_kv)]
        q, k, v = qkv.split(sizes, dim=-1)
        q = q.reshape(-1, self.n_heads, self.head_dim)
        k = k.reshape(-1, self.n_kv, self.head_dim)
        v = v.reshape(-1, self.n_kv, self.head_dim)
        q, k = self.rope(q, k)
        q = q.reshape(-1, self.n_kv, self.n_heads // self.n_kv, self.head_dim)
        t = sdpa(q, k, v, self.sinks, self.sm_scale, self.sliding_window)
        return self.out(t)


def make(weights):
    block = AttentionBlock(SETTINGS)
    state = {
        "sinks": weights["sinks"],
        "qkv.weight": torch.cat([weights["wq"], weights["wk"], weights["wv"]]),
        "qkv.bias": torch.cat([weights["bq"], weights["bk"], weights["bv"]]),
        "out.weight": weights["wo"],
        "out.bias": weights["bo"],
    }
    block = block.to(weights["wq"].dtype)
    block.load_state_dict(state)
    return lambda x: torch.stack([block(row) for row in x])
