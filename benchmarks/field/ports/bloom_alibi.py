"""BLOOM with ALiBi (huggingface/transformers, src/transformers/models/bloom/modeling_bloom.py)."""

import math

import torch
from torch import nn
from torch.nn import functional as F

SETTINGS = {"embed_dim": 84, "num_heads": 6, "causal": True, "alibi": True}
TAKES = ("mask",)


def build_alibi_tensor(attention_mask, num_heads, dtype):
    batch_size, seq_length = attention_mask.shape
    closest_power_of_2 = 2 ** math.floor(math.log2(num_heads))
    base = 2 ** (-(2 ** -(math.log2(closest_power_of_2) - 3)))
    powers = torch.arange(1, 1 + closest_power_of_2)
    slopes = torch.pow(torch.tensor(base, dtype=dtype), powers)

    if closest_power_of_2 != num_heads:
        extra_base = 2 ** (-(2 ** -(math.log2(2 * closest_power_of_2) - 3)))
        num_remaining_heads = min(closest_power_of_2, num_heads - closest_power_of_2)
        extra_powers = torch.arange(1, 1 + 2 * num_remaining_heads, 2)
        extra = torch.pow(torch.tensor(extra_base, dtype=dtype), extra_powers)
        slopes = torch.cat([slopes, extra], dim=0)

    # the position of a key is enough: a softmax does not see what a whole row has in common
    arange_tensor = ((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]
    alibi = slopes[..., None] * arange_tensor
    return alibi.reshape(batch_size * num_heads, 1, seq_length).to(dtype)


class BloomAttention(nn.Module):
    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = n_head
        self.head_dim = hidden_size // n_head
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.beta = 1.0
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def _split_heads(self, fused_qkv):
        batch_size, seq_length, _ = fused_qkv.shape
        fused_qkv = fused_qkv.view(batch_size, seq_length, self.num_heads, 3, self.head_dim)
        return fused_qkv[..., 0, :], fused_qkv[..., 1, :], fused_qkv[..., 2, :]

    def _merge_heads(self, x):
        batch_size = x.shape[0] // self.num_heads
        seq_length = x.shape[1]
        x = x.view(batch_size, self.num_heads, seq_length, self.head_dim)
        x = x.permute(0, 2, 1, 3)
        return x.reshape(batch_size, seq_length, self.num_heads * self.head_dim)

    def forward(self, hidden_states, alibi, attention_mask):
        batch_size, q_length, _ = hidden_states.shape
        query, key, value = self._split_heads(self.query_key_value(hidden_states))

        merged = batch_size * self.num_heads
        query = query.transpose(1, 2).reshape(merged, q_length, self.head_dim)
        key = key.permute(0, 2, 3, 1).reshape(merged, self.head_dim, q_length)
        value = value.transpose(1, 2).reshape(merged, q_length, self.head_dim)

        scores = alibi.baddbmm(query, key, beta=self.beta, alpha=self.inv_norm_factor)
        scores = scores.view(batch_size, self.num_heads, q_length, q_length)
        scores = scores.masked_fill(attention_mask, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1)

        probs = probs.view(merged, q_length, q_length)
        context = torch.bmm(probs, value)
        return self.dense(self._merge_heads(context))


class Bloom(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.self_attention = attention

    def _prepare_attn_mask(self, attention_mask, length):
        causal = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
        return causal[None, None] | ~attention_mask[:, None, None, :].bool()

    def forward(self, x, mask=None):
        batch_size, length, _ = x.shape
        if mask is None:
            mask = torch.ones(batch_size, length, dtype=torch.bool)
        mask = mask.reshape(batch_size, length).long()
        alibi = build_alibi_tensor(mask, self.self_attention.num_heads, x.dtype)
        return self.self_attention(x, alibi, self._prepare_attn_mask(mask, length))


def make(weights):
    hidden, heads = SETTINGS["embed_dim"], SETTINGS["num_heads"]
    attention = BloomAttention(hidden, heads).to(weights["wq"].dtype)
    # rows of the fused matrix: for each head its query, its key, its value
    fused = torch.stack([weights[f"w{r}"].view(heads, -1, hidden) for r in "qkv"], dim=1)
    fused_bias = torch.stack([weights[f"b{r}"].view(heads, -1) for r in "qkv"], dim=1)
    state_dict = {
        "query_key_value.weight": fused.reshape(3 * hidden, hidden),
        "query_key_value.bias": fused_bias.reshape(3 * hidden),
        "dense.weight": weights["wo"],
        "dense.bias": weights["bo"],
    }
    attention.load_state_dict(state_dict)
    return Bloom(attention)
