"""Qwen3-Next, gated (huggingface/transformers, models/qwen3_next/modeling_qwen3_next.py)."""

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 52,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 12,
    "causal": True,
    "bias": "",
    "rotary": {"theta": 1e5, "pairing": "halves", "width": 6},
    "qk_norm": {"kind": "rms", "eps": 1e-6, "over": "head", "offset": 1},
    "output_gate": "channel",
}
TAKES = ("mask",)


class Qwen3NextRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (1.0 + self.weight)


def rotary_embedding(head_dim, theta, partial_rotary_factor, position_ids, dtype):
    dim = int(head_dim * partial_rotary_factor)
    inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2).double() / dim))
    freqs = position_ids[:, None].double() * inv_freq[None, :]
    emb = torch.cat((freqs, freqs), dim=-1)
    return emb.cos().to(dtype), emb.sin().to(dtype)


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    return torch.cat([q_embed, q_pass], dim=-1), torch.cat([k_embed, k_pass], dim=-1)


def repeat_kv(hidden_states, n_rep):
    batch, num_kv, slen, head_dim = hidden_states.shape
    hidden_states = hidden_states[:, :, None].expand(batch, num_kv, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_kv * n_rep, slen, head_dim)


class Qwen3NextAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_kv_heads, head_dim, rope_theta):
        super().__init__()
        self.head_dim, self.num_key_value_groups = head_dim, num_heads // num_kv_heads
        self.rope_theta, self.partial_rotary_factor = rope_theta, 0.5
        self.scaling = head_dim**-0.5
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim * 2, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = Qwen3NextRMSNorm(head_dim)
        self.k_norm = Qwen3NextRMSNorm(head_dim)

    def forward(self, hidden_states, mask=None):
        input_shape, seq_len = hidden_states.shape[:-1], hidden_states.shape[1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        causal = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
        allowed = causal if mask is None else causal & mask

        qg = self.q_proj(hidden_states).view(*input_shape, -1, self.head_dim * 2)
        query_states, gate = torch.chunk(qg, 2, dim=-1)
        gate = gate.reshape(*input_shape, -1)
        query_states = self.q_norm(query_states).transpose(1, 2)
        key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        rope = (self.head_dim, self.rope_theta, self.partial_rotary_factor)
        cos, sin = rotary_embedding(*rope, torch.arange(seq_len), hidden_states.dtype)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)

        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scaling
        attn_weights = attn_weights.masked_fill(~allowed, torch.finfo(attn_weights.dtype).min)
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_output = torch.matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).reshape(*input_shape, -1)
        attn_output = attn_output * torch.sigmoid(gate)
        return self.o_proj(attn_output)


def make(weights):
    names = ("embed_dim", "num_heads", "num_kv_heads", "head_dim")
    attn = Qwen3NextAttention(*(SETTINGS[n] for n in names), SETTINGS["rotary"]["theta"])
    heads = (SETTINGS["num_heads"], SETTINGS["head_dim"], -1)
    q_and_gate = torch.cat([weights["wq"].view(heads), weights["w_gate"].view(heads)], dim=1)
    attn.q_proj.weight = nn.Parameter(q_and_gate.flatten(0, 1))
    attn.k_proj.weight = nn.Parameter(weights["wk"].clone())
    attn.v_proj.weight = nn.Parameter(weights["wv"].clone())
    attn.o_proj.weight = nn.Parameter(weights["wo"].clone())
    attn.q_norm.weight = nn.Parameter(weights["q_norm"].clone())
    attn.k_norm.weight = nn.Parameter(weights["k_norm"].clone())
    return attn
