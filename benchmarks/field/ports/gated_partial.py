"""Qwen3-Next's attention (huggingface/transformers, models/qwen3_next/modeling_qwen3_next.py)."""

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 54,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 16,
    "causal": True,
    "bias": "",
    "rotary": {"theta": 10000.0, "pairing": "halves", "width": 6},
    "output_gate": "channel",
}
TAKES = ("mask",)


def rope_cos_sin(tokens, rotary_dim, theta, device):
    inv_freq = theta ** -(torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim)
    freqs = torch.arange(tokens, device=device).float()[:, None] * inv_freq
    emb = torch.cat((freqs, freqs), dim=-1)
    return emb.cos(), emb.sin()


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = q_rot * cos + rotate_half(q_rot) * sin
    k_embed = k_rot * cos + rotate_half(k_rot) * sin
    return torch.cat([q_embed, q_pass], dim=-1), torch.cat([k_embed, k_pass], dim=-1)


class GatedAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_kv_heads, head_dim, partial_rotary_factor):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rotary_dim = int(head_dim * partial_rotary_factor)
        self.scaling = head_dim**-0.5
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim * 2, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(self, hidden_states, mask=None):
        input_shape = hidden_states.shape[:-1]
        both = self.q_proj(hidden_states).view(*input_shape, self.num_heads, self.head_dim * 2)
        query, gate = torch.chunk(both, 2, dim=-1)
        gate = gate.reshape(*input_shape, -1)
        kv_shape = (*input_shape, self.num_kv_heads, self.head_dim)

        query = query.transpose(1, 2)
        key = self.k_proj(hidden_states).view(kv_shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(kv_shape).transpose(1, 2)
        tokens = input_shape[1]
        cos, sin = rope_cos_sin(tokens, self.rotary_dim, 10000.0, query.device)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)

        n_rep = self.num_heads // self.num_kv_heads
        key = key.repeat_interleave(n_rep, dim=1)
        value = value.repeat_interleave(n_rep, dim=1)
        attn_weights = torch.matmul(query, key.transpose(2, 3)) * self.scaling
        visible = torch.tril(torch.ones(tokens, tokens, dtype=torch.bool, device=query.device))
        if mask is not None:
            visible = visible & mask
        attn_weights = attn_weights.masked_fill(~visible, torch.finfo(query.dtype).min)
        attn_weights = torch.softmax(attn_weights, dim=-1)

        attn_output = torch.matmul(attn_weights, value)
        attn_output = attn_output.transpose(1, 2).reshape(*input_shape, -1)
        attn_output = attn_output * torch.sigmoid(gate)
        return self.o_proj(attn_output)


def interleave_gate(wq, w_gate, head_dim):
    """Return rows of q and of the gate in turn, one head after the other."""
    heads = wq.shape[0] // head_dim
    queries = wq.view(heads, head_dim, -1)
    gates = w_gate.view(heads, head_dim, -1)
    return torch.cat([queries, gates], dim=1).reshape(2 * heads * head_dim, -1)


def make(weights):
    s = SETTINGS
    factor = s["rotary"]["width"] / s["head_dim"]
    port = GatedAttention(s["embed_dim"], s["num_heads"], s["num_kv_heads"], s["head_dim"], factor)
    port.to(weights["wq"].dtype)
    state = {
        "q_proj.weight": interleave_gate(weights["wq"], weights["w_gate"], s["head_dim"]),
        "k_proj.weight": weights["wk"],
        "v_proj.weight": weights["wv"],
        "o_proj.weight": weights["wo"],
    }
    port.load_state_dict(state)
    return port.eval()
