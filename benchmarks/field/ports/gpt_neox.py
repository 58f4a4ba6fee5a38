"""GPT-NeoX's attention, rows fused by head, a part of each head turned: EleutherAI/gpt-neox, megatron/model/transformer.py."""
# ruff: noqa: E501

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 54,
    "num_heads": 3,
    "causal": True,
    "rotary": {"theta": 10000.0, "pairing": "halves", "width": 6},
}
TAKES = ("mask",)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
        self.inv_freq = inv_freq

    def forward(self, x, seq_len):
        t = torch.arange(seq_len, dtype=self.inv_freq.dtype)
        freqs = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype)[None, None], emb.sin().to(x.dtype)[None, None]


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


class ParallelSelfAttention(nn.Module):
    def __init__(self, hidden_size=54, num_attention_heads=3, rotary_pct=0.34):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.head_size = hidden_size // num_attention_heads
        self.rotary_ndims = int(self.head_size * rotary_pct)
        self.norm_factor = self.head_size**0.5
        self.rotary_emb = RotaryEmbedding(self.rotary_ndims)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, ltor_mask):
        # [b, s, (np * 3 * hn)] --> [b, s, np, 3 * hn]
        qkv = self.query_key_value(hidden_states)
        qkv = qkv.view(*qkv.shape[:-1], self.num_attention_heads, 3 * self.head_size)

        # --> three times [b, np, s, hn]
        query = qkv[..., : self.head_size].permute(0, 2, 1, 3)
        key = qkv[..., self.head_size : 2 * self.head_size].permute(0, 2, 1, 3)
        value = qkv[..., 2 * self.head_size :].permute(0, 2, 1, 3)

        # rotary on the first rotary_ndims of a head
        query_rot, query_pass = query[..., : self.rotary_ndims], query[..., self.rotary_ndims :]
        key_rot, key_pass = key[..., : self.rotary_ndims], key[..., self.rotary_ndims :]
        cos, sin = self.rotary_emb(value, seq_len=key.shape[-2])
        query_rot, key_rot = apply_rotary_pos_emb(query_rot, key_rot, cos, sin)
        query_layer = torch.cat((query_rot, query_pass), dim=-1)
        key_layer = torch.cat((key_rot, key_pass), dim=-1)

        context = self.attention(query_layer, key_layer, value, ltor_mask)
        context = context.permute(0, 2, 1, 3).contiguous()
        return self.dense(context.view(*context.shape[:-2], -1))

    def attention(self, query, key, value, ltor_mask):
        b, np, sq, hn = query.shape
        sk = key.shape[2]
        query = query.reshape(b * np, sq, hn)
        key = key.reshape(b * np, sk, hn)
        empty = query.new_zeros(b * np, sq, sk)
        alpha = 1.0 / self.norm_factor
        matmul_result = torch.baddbmm(empty, query, key.transpose(1, 2), beta=0.0, alpha=alpha)
        attention_scores = matmul_result.view(b, np, sq, sk)
        # True is hidden
        attention_scores = attention_scores.masked_fill(ltor_mask, -torch.inf)
        attention_probs = torch.softmax(attention_scores, dim=-1)
        return torch.matmul(attention_probs, value)


def fuse(q, k, v, heads):
    """Rows of q, k and v of the first head, then those of the second ..."""
    by_head = [t.reshape(heads, -1, *t.shape[1:]) for t in (q, k, v)]
    return torch.cat(by_head, dim=1).flatten(0, 1)


def make(weights):
    layer = ParallelSelfAttention().to(weights["wq"].dtype)
    heads = layer.num_attention_heads
    state = {
        "query_key_value.weight": fuse(weights["wq"], weights["wk"], weights["wv"], heads),
        "query_key_value.bias": fuse(weights["bq"], weights["bk"], weights["bv"], heads),
        "dense.weight": weights["wo"],
        "dense.bias": weights["bo"],
    }
    layer.load_state_dict(state)

    def port(x, mask=None):
        s = x.shape[1]
        ltor_mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(diagonal=1)
        if mask is not None:
            ltor_mask = ltor_mask | ~mask
        return layer(x, ltor_mask)

    return port
