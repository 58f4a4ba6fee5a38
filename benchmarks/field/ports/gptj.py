"""GPT-J's attention, rotary in pairs of neighbours: huggingface/transformers, models/gptj/modeling_gptj.py."""
# ruff: noqa: E501

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 60,
    "num_heads": 5,
    "causal": True,
    "bias": "",
    "rotary": {"theta": 10000.0, "pairing": "interleaved", "width": 8},
}
TAKES = ("mask",)


def create_sinusoidal_positions(num_pos, dim):
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
    sinusoid_inp = torch.einsum("i,j->ij", torch.arange(num_pos, dtype=torch.float64), inv_freq)
    return torch.cat((torch.sin(sinusoid_inp), torch.cos(sinusoid_inp)), dim=1)


def rotate_every_two(x):
    x1 = x[:, :, :, ::2]
    x2 = x[:, :, :, 1::2]
    x = torch.stack((-x2, x1), dim=-1)
    return x.flatten(-2)


def apply_rotary_pos_emb(tensor, sin, cos):
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return (tensor * cos) + (rotate_every_two(tensor) * sin)


class GPTJAttention(nn.Module):
    def __init__(self, hidden_size=60, num_heads=5, rotary_dim=8, max_positions=64):
        super().__init__()
        self.embed_dim = hidden_size
        self.num_attention_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.rotary_dim = rotary_dim
        self.scale_attn = float(self.head_dim) ** 0.5

        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.embed_positions = create_sinusoidal_positions(max_positions, rotary_dim)

    def _split_heads(self, tensor, rotary):
        tensor = tensor.view(*tensor.shape[:2], self.num_attention_heads, self.head_dim)
        if rotary:
            return tensor  # (batch, seq, heads, head_dim), until it is turned
        return tensor.permute(0, 2, 1, 3)

    def _merge_heads(self, tensor):
        tensor = tensor.permute(0, 2, 1, 3).contiguous()
        return tensor.view(*tensor.shape[:2], self.embed_dim)

    def _attn(self, query, key, value, attention_mask):
        attn_weights = torch.matmul(query, key.transpose(-1, -2))
        attn_weights = attn_weights / self.scale_attn
        attn_weights = attn_weights + attention_mask
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        return torch.matmul(attn_weights, value)

    def forward(self, hidden_states, attention_mask, position_ids):
        query = self._split_heads(self.q_proj(hidden_states), True)
        key = self._split_heads(self.k_proj(hidden_states), True)
        value = self._split_heads(self.v_proj(hidden_states), False)

        sincos = self.embed_positions[position_ids].to(hidden_states.dtype)
        sin, cos = torch.split(sincos, sincos.shape[-1] // 2, dim=-1)
        k_rot, k_pass = key[..., : self.rotary_dim], key[..., self.rotary_dim :]
        q_rot, q_pass = query[..., : self.rotary_dim], query[..., self.rotary_dim :]
        key = torch.cat([apply_rotary_pos_emb(k_rot, sin, cos), k_pass], dim=-1)
        query = torch.cat([apply_rotary_pos_emb(q_rot, sin, cos), q_pass], dim=-1)
        key = key.permute(0, 2, 1, 3)
        query = query.permute(0, 2, 1, 3)

        attn_output = self._attn(query, key, value, attention_mask)
        return self.out_proj(self._merge_heads(attn_output))


def make(weights):
    attn = GPTJAttention().to(weights["wq"].dtype).eval()
    names = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "out_proj": "wo"}
    attn.load_state_dict({f"{name}.weight": weights[w] for name, w in names.items()})

    def port(x, mask=None):
        tokens = x.shape[1]
        allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
        if mask is not None:
            allowed = allowed & mask
        attention_mask = torch.zeros(allowed.shape, dtype=x.dtype)
        attention_mask = attention_mask.masked_fill(~allowed, torch.finfo(x.dtype).min)
        position_ids = torch.arange(tokens)[None]
        return attn(x, attention_mask, position_ids)

    return port
