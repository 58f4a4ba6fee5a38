"""T5's encoder (huggingface/transformers, src/transformers/models/t5/modeling_t5.py)."""

import math

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 40,
    "num_heads": 5,
    "head_dim": 12,
    "scale": 1.0,
    "bias": "",
    "relative_bias": {"buckets": 12, "max_distance": 20, "bidirectional": True},
}
TAKES = ("mask",)


class T5Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.is_decoder = config.get("is_decoder", False)
        self.relative_attention_num_buckets = config["num_buckets"]
        self.relative_attention_max_distance = config["max_distance"]
        self.d_model, self.key_value_proj_dim = config["d_model"], config["d_kv"]
        self.n_heads = config["num_heads"]
        self.inner_dim = self.n_heads * self.key_value_proj_dim
        self.q = nn.Linear(self.d_model, self.inner_dim, bias=False)
        self.k = nn.Linear(self.d_model, self.inner_dim, bias=False)
        self.v = nn.Linear(self.d_model, self.inner_dim, bias=False)
        self.o = nn.Linear(self.inner_dim, self.d_model, bias=False)
        buckets = self.relative_attention_num_buckets
        self.relative_attention_bias = nn.Embedding(buckets, self.n_heads)

    @staticmethod
    def _relative_position_bucket(position, bidirectional=True, num_buckets=32, max_distance=128):
        relative_buckets = 0
        if bidirectional:
            num_buckets //= 2
            relative_buckets += (position > 0).to(torch.long) * num_buckets
            position = torch.abs(position)
        else:
            position = -torch.min(position, torch.zeros_like(position))
        # half of the buckets are for exact distances
        max_exact = num_buckets // 2
        is_small = position < max_exact
        # the other half grow with the logarithm
        large = torch.log(position.clamp(min=1).double() / max_exact)
        large = large / math.log(max_distance / max_exact) * (num_buckets - max_exact)
        large = max_exact + large.to(torch.long)
        large = torch.min(large, torch.full_like(large, num_buckets - 1))
        return relative_buckets + torch.where(is_small, position, large)

    def compute_bias(self, query_length, key_length):
        context_position = torch.arange(query_length)[:, None]
        memory_position = torch.arange(key_length)[None, :]
        relative_position_bucket = self._relative_position_bucket(
            memory_position - context_position,
            bidirectional=(not self.is_decoder),
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        values = self.relative_attention_bias(relative_position_bucket)
        return values.permute([2, 0, 1]).unsqueeze(0)

    def shape(self, states):
        states = states.view(states.shape[0], -1, self.n_heads, self.key_value_proj_dim)
        return states.transpose(1, 2)

    def forward(self, hidden_states, mask=None):
        batch_size, seq_length = hidden_states.shape[:2]
        query_states = self.shape(self.q(hidden_states))
        key_states = self.shape(self.k(hidden_states))
        value_states = self.shape(self.v(hidden_states))
        scores = torch.matmul(query_states, key_states.transpose(3, 2))
        position_bias = self.compute_bias(seq_length, seq_length)
        if mask is not None:
            extended_mask = (1.0 - mask.to(scores.dtype)) * torch.finfo(scores.dtype).min
            position_bias = position_bias + extended_mask
        scores = scores + position_bias
        attn_weights = nn.functional.softmax(scores, dim=-1)
        attn_output = torch.matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).contiguous().view(batch_size, -1, self.inner_dim)
        return self.o(attn_output)


def make(weights):
    relative = SETTINGS["relative_bias"]
    config = {"d_model": SETTINGS["embed_dim"], "d_kv": SETTINGS["head_dim"]}
    config |= {"num_heads": SETTINGS["num_heads"], "num_buckets": relative["buckets"]}
    config |= {"max_distance": relative["max_distance"]}
    attn = T5Attention(config).to(weights["wq"].dtype)
    state_dict = {f"{name}.weight": weights[f"w{name}"].clone() for name in "qkvo"}
    state_dict["relative_attention_bias.weight"] = weights["relative_bias"]
    attn.load_state_dict(state_dict)
    return attn
