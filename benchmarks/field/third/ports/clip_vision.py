"""Attention of CLIP and SigLIP, in both directions (transformers, clip/modeling_clip.py)."""

import torch
from torch import nn

SETTINGS = {"embed_dim": 55, "num_heads": 5, "bias": "qkvo"}
TAKES = ("mask",)


class CLIPAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, attention_dropout=0.1):
        super().__init__()
        self.embed_dim = hidden_size
        self.num_heads = num_attention_heads
        self.head_dim = self.embed_dim // self.num_heads
        if self.head_dim * self.num_heads != self.embed_dim:
            raise ValueError("embed_dim must be divisible by num_heads")
        self.scale = self.head_dim**-0.5
        self.dropout = attention_dropout
        self.k_proj = nn.Linear(self.embed_dim, self.embed_dim)
        self.v_proj = nn.Linear(self.embed_dim, self.embed_dim)
        self.q_proj = nn.Linear(self.embed_dim, self.embed_dim)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim)

    def forward(self, hidden_states, attention_mask=None):
        batch_size, seq_length, embed_dim = hidden_states.shape
        queries = self.q_proj(hidden_states)
        keys = self.k_proj(hidden_states)
        values = self.v_proj(hidden_states)

        queries = queries.view(batch_size, seq_length, -1, self.head_dim).transpose(1, 2)
        keys = keys.view(batch_size, seq_length, -1, self.head_dim).transpose(1, 2)
        values = values.view(batch_size, seq_length, -1, self.head_dim).transpose(1, 2)

        attn_weights = torch.matmul(queries, keys.transpose(-1, -2)) * self.scale
        if attention_mask is not None:
            attn_weights = attn_weights + attention_mask
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_weights = nn.functional.dropout(attn_weights, p=self.dropout, training=self.training)

        attn_output = torch.matmul(attn_weights, values)
        attn_output = attn_output.transpose(1, 2).contiguous()
        attn_output = attn_output.reshape(batch_size, seq_length, embed_dim)
        return self.out_proj(attn_output)


def prepare_4d_attention_mask(mask, dtype):
    """Turn ones for tokens to see and zeros for padding into an additive mask."""
    batch_size, _, _, src_len = mask.shape
    expanded = mask.expand(batch_size, 1, src_len, src_len).to(dtype)
    inverted = 1.0 - expanded
    return inverted.masked_fill(inverted.to(torch.bool), torch.finfo(dtype).min)


def copy_attn_layer(hf_attn, pt_attn):
    """Copy the fused projection of the first release into three layers."""
    q_proj, k_proj, v_proj = pt_attn["in_proj_weight"].chunk(3, dim=0)
    q_bias, k_bias, v_bias = pt_attn["in_proj_bias"].chunk(3, dim=0)
    hf_attn.q_proj.weight.data = q_proj
    hf_attn.q_proj.bias.data = q_bias
    hf_attn.k_proj.weight.data = k_proj
    hf_attn.k_proj.bias.data = k_bias
    hf_attn.v_proj.weight.data = v_proj
    hf_attn.v_proj.bias.data = v_bias
    hf_attn.out_proj.weight.data = pt_attn["out_proj.weight"]
    hf_attn.out_proj.bias.data = pt_attn["out_proj.bias"]


def make(weights):
    pt_attn = {
        "in_proj_weight": torch.cat([weights["wq"], weights["wk"], weights["wv"]]),
        "in_proj_bias": torch.cat([weights["bq"], weights["bk"], weights["bv"]]),
        "out_proj.weight": weights["wo"].clone(),
        "out_proj.bias": weights["bo"].clone(),
    }
    attention = CLIPAttention(55, num_attention_heads=5)
    copy_attn_layer(attention, pt_attn)
    attention.eval()

    def port(x, mask=None):
        if mask is not None:
            mask = prepare_4d_attention_mask(mask, x.dtype)
        return attention(x, attention_mask=mask)

    return port
