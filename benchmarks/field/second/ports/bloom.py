"""BLOOM (huggingface/transformers, src/transformers/models/bloom/modeling_bloom.py)."""

import math

import torch
import torch.nn.functional as F
from torch import nn

SETTINGS = {"embed_dim": 60, "num_heads": 12, "causal": True, "alibi": True}
TAKES = ("mask",)


def build_alibi_tensor(attention_mask, num_heads, dtype):
    batch_size, seq_length = attention_mask.shape
    closest_power_of_2 = 2 ** math.floor(math.log2(num_heads))
    base = 2 ** (-(2 ** -(math.log2(closest_power_of_2) - 3)))
    powers = torch.arange(1, 1 + closest_power_of_2)
    slopes = torch.pow(torch.tensor(base, dtype=torch.float64), powers)
    if closest_power_of_2 != num_heads:
        extra_base = 2 ** (-(2 ** -(math.log2(2 * closest_power_of_2) - 3)))
        num_remaining_heads = min(closest_power_of_2, num_heads - closest_power_of_2)
        extra_powers = torch.arange(1, 1 + 2 * num_remaining_heads, 2)
        extra = torch.pow(torch.tensor(extra_base, dtype=torch.float64), extra_powers)
        slopes = torch.cat([slopes, extra])
    # positions of keys alone: what a whole row has in common falls out of the softmax
    arange_tensor = ((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]
    alibi = slopes[..., None] * arange_tensor
    return alibi.reshape(batch_size * num_heads, 1, seq_length).to(dtype)


class BloomAttention(nn.Module):
    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, n_head
        self.head_dim = hidden_size // n_head
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.beta = 1.0
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=True)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def _split_heads(self, fused_qkv):
        batch_size, seq_length, _ = fused_qkv.shape
        fused_qkv = fused_qkv.view(batch_size, seq_length, self.num_heads, 3, self.head_dim)
        return fused_qkv[..., 0, :], fused_qkv[..., 1, :], fused_qkv[..., 2, :]

    def _merge_heads(self, x, batch_size):  # [batch * heads, tokens, head_dim]
        x = x.view(batch_size, self.num_heads, -1, self.head_dim).permute(0, 2, 1, 3)
        return x.reshape(batch_size, -1, self.num_heads * self.head_dim)

    def forward(self, hidden_states, mask=None):
        batch_size, q_length, _ = hidden_states.shape
        kept = torch.ones(batch_size, q_length, dtype=torch.long)
        if mask is not None:
            kept = mask[:, 0, 0].long()
        alibi = build_alibi_tensor(kept, self.num_heads, hidden_states.dtype)
        hidden = torch.ones(q_length, q_length, dtype=torch.bool).triu(diagonal=1)
        hidden = hidden | (kept == 0)[:, None, None, :]

        fused_qkv = self.query_key_value(hidden_states)
        query, key, value = self._split_heads(fused_qkv)
        shape = (batch_size * self.num_heads, q_length, self.head_dim)
        query = query.transpose(1, 2).reshape(shape)
        key = key.permute(0, 2, 3, 1).reshape(-1, self.head_dim, q_length)
        value = value.transpose(1, 2).reshape(shape)

        scores = alibi.baddbmm(query, key, beta=self.beta, alpha=self.inv_norm_factor)
        scores = scores.view(batch_size, self.num_heads, q_length, q_length)
        scores = torch.masked_fill(scores, hidden, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1)
        probs = probs.view(batch_size * self.num_heads, q_length, q_length)
        context_layer = torch.bmm(probs, value)
        context_layer = self._merge_heads(context_layer, batch_size)
        return self.dense(context_layer)


def make(weights):
    attn = BloomAttention(SETTINGS["embed_dim"], SETTINGS["num_heads"])
    n_head = SETTINGS["num_heads"]
    kernels = [weights[f"w{r}"].unflatten(0, (n_head, -1)) for r in "qkv"]
    biases = [weights[f"b{r}"].unflatten(0, (n_head, -1)) for r in "qkv"]
    attn.query_key_value.weight = nn.Parameter(torch.stack(kernels, dim=1).flatten(0, 2))
    attn.query_key_value.bias = nn.Parameter(torch.stack(biases, dim=1).flatten())
    attn.dense.weight = nn.Parameter(weights["wo"].clone())
    attn.dense.bias = nn.Parameter(weights["bo"].clone())
    return attn
