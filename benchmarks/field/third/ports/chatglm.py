"""Attention of ChatGLM2 and 3, sequence first, with a cache (zai-org, modeling_chatglm.py)."""

import math

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 60,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "causal": True,
    "bias": "qkv",
    "rotary": {"theta": 10000.0, "pairing": "interleaved", "width": 12},
}
STEPS = True


def build_rope_cache(seq_len, n_elem, dtype, base=10000.0):
    theta = 1.0 / (base ** (torch.arange(0, n_elem, 2, dtype=torch.float64) / n_elem))
    idx_theta = torch.outer(torch.arange(seq_len, dtype=torch.float64), theta)
    return torch.stack([torch.cos(idx_theta), torch.sin(idx_theta)], dim=-1).to(dtype)


def apply_rotary_pos_emb(x, rope_cache):
    sq, _, np, _ = x.shape
    rot_dim = rope_cache.shape[-2] * 2
    x, x_pass = x[..., :rot_dim], x[..., rot_dim:]
    xshaped = x.reshape(sq, -1, np, rot_dim // 2, 2)
    rope_cache = rope_cache.view(sq, -1, 1, xshaped.size(3), 2)
    x_out2 = torch.stack(
        [
            xshaped[..., 0] * rope_cache[..., 0] - xshaped[..., 1] * rope_cache[..., 1],
            xshaped[..., 1] * rope_cache[..., 0] + xshaped[..., 0] * rope_cache[..., 1],
        ],
        -1,
    )
    return torch.cat((x_out2.flatten(3), x_pass), dim=-1)


class CoreAttention(nn.Module):
    def __init__(self, kv_channels, layer_number):
        super().__init__()
        self.coeff = max(1, layer_number)
        self.norm_factor = math.sqrt(kv_channels) * self.coeff

    def forward(self, query_layer, key_layer, value_layer, attention_mask):
        query_layer, key_layer, value_layer = (
            t.permute(1, 2, 0, 3) for t in (query_layer, key_layer, value_layer)
        )
        matmul_result = torch.matmul(query_layer / self.norm_factor, key_layer.transpose(-1, -2))
        attention_scores = matmul_result * self.coeff
        attention_scores = attention_scores.masked_fill(attention_mask, float("-inf"))
        attention_probs = nn.functional.softmax(attention_scores, dim=-1)
        context_layer = torch.matmul(attention_probs, value_layer)
        return context_layer.permute(2, 0, 1, 3).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self, hidden_size, heads, groups, kv_channels, layer_number):
        super().__init__()
        self.heads, self.groups, self.hn = heads, groups, kv_channels
        qkv_size = (heads + 2 * groups) * kv_channels
        self.query_key_value = nn.Linear(hidden_size, qkv_size, bias=True)
        self.core_attention = CoreAttention(kv_channels, layer_number)
        self.dense = nn.Linear(heads * kv_channels, hidden_size, bias=False)

    def forward(self, hidden_states, rotary_pos_emb, kv_cache=None):
        sq, b, _ = hidden_states.shape
        q_size, kv_size = self.heads * self.hn, self.groups * self.hn
        mixed_x_layer = self.query_key_value(hidden_states)
        query_layer, key_layer, value_layer = mixed_x_layer.split([q_size, kv_size, kv_size], -1)
        query_layer = query_layer.view(sq, b, self.heads, self.hn)
        key_layer = key_layer.view(sq, b, self.groups, self.hn)
        value_layer = value_layer.view(sq, b, self.groups, self.hn)

        past = 0 if kv_cache is None else kv_cache[0].size(0)
        query_layer = apply_rotary_pos_emb(query_layer, rotary_pos_emb[past : past + sq])
        key_layer = apply_rotary_pos_emb(key_layer, rotary_pos_emb[past : past + sq])
        if kv_cache is not None:
            key_layer = torch.cat((kv_cache[0], key_layer), dim=0)
            value_layer = torch.cat((kv_cache[1], value_layer), dim=0)
        kv_cache = (key_layer, value_layer)

        repeats = self.heads // self.groups
        key_layer = key_layer.unsqueeze(-2).expand(-1, -1, -1, repeats, -1).flatten(2, 3)
        value_layer = value_layer.unsqueeze(-2).expand(-1, -1, -1, repeats, -1).flatten(2, 3)

        full_attention_mask = torch.ones(sq, sq, dtype=torch.bool).tril()
        full_attention_mask = nn.functional.pad(full_attention_mask, (past, 0), value=True)
        context_layer = self.core_attention(
            query_layer, key_layer, value_layer, ~full_attention_mask
        )
        return self.dense(context_layer), kv_cache


class Port:
    def __init__(self, attention, rope):
        self.attention, self.rope = attention, rope

    def start(self, batch):  # noqa: ARG002
        return None

    def step(self, x, state):
        y, state = self.attention(x.transpose(0, 1), self.rope, kv_cache=state)
        return y.transpose(0, 1), state


def make(weights):
    attention = SelfAttention(60, 4, 2, kv_channels=24, layer_number=3).to(weights["wq"].dtype)
    order = ("q", "k", "v")
    state = {
        "query_key_value.weight": torch.cat([weights[f"w{role}"] for role in order]),
        "query_key_value.bias": torch.cat([weights[f"b{role}"] for role in order]),
        "dense.weight": weights["wo"],
    }
    attention.load_state_dict(state)
    return Port(attention.eval(), build_rope_cache(64, 24 // 2, weights["wq"].dtype))
