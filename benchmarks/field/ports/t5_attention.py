"""T5's encoder attention (huggingface/transformers, src/transformers/models/t5/modeling_t5.py)."""

import math

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 60,
    "num_heads": 5,
    "head_dim": 14,
    "scale": 1.0,
    "bias": "",
    "relative_bias": {"buckets": 20, "max_distance": 30, "bidirectional": True},
}
TAKES = ("mask",)


class T5Attention(nn.Module):
    def __init__(self, d_model, d_kv, num_heads, num_buckets, max_distance, is_decoder=False):
        super().__init__()
        self.is_decoder = is_decoder
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.n_heads = num_heads
        self.key_value_proj_dim = d_kv
        self.inner_dim = num_heads * d_kv

        self.q = nn.Linear(d_model, self.inner_dim, bias=False)
        self.k = nn.Linear(d_model, self.inner_dim, bias=False)
        self.v = nn.Linear(d_model, self.inner_dim, bias=False)
        self.o = nn.Linear(self.inner_dim, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    @staticmethod
    def _relative_position_bucket(relative_position, bidirectional, num_buckets, max_distance):
        relative_buckets = torch.zeros_like(relative_position)
        if bidirectional:
            num_buckets //= 2
            relative_buckets += (relative_position > 0).long() * num_buckets
            relative_position = relative_position.abs()
        else:
            relative_position = -torch.clamp(relative_position, max=0)

        # half of the buckets hold one distance each, the others grow with the logarithm
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact
        if_large = (
            max_exact
            + (
                torch.log(relative_position.float() / max_exact)
                / math.log(max_distance / max_exact)
                * (num_buckets - max_exact)
            )
            .clamp(min=0)
            .long()
        )
        if_large = if_large.clamp(max=num_buckets - 1)
        return relative_buckets + torch.where(is_small, relative_position, if_large)

    def compute_bias(self, query_length, key_length):
        context_position = torch.arange(query_length)[:, None]
        memory_position = torch.arange(key_length)[None, :]
        buckets = self._relative_position_bucket(
            memory_position - context_position,
            bidirectional=not self.is_decoder,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        values = self.relative_attention_bias(buckets)
        return values.permute([2, 0, 1]).unsqueeze(0)

    def forward(self, hidden_states, mask=None):
        batch_size, seq_length = hidden_states.shape[:2]

        def shape(states):
            states = states.view(batch_size, -1, self.n_heads, self.key_value_proj_dim)
            return states.transpose(1, 2)

        query_states = shape(self.q(hidden_states))
        key_states = shape(self.k(hidden_states))
        value_states = shape(self.v(hidden_states))

        scores = torch.matmul(query_states, key_states.transpose(3, 2))
        position_bias = self.compute_bias(seq_length, seq_length)
        if mask is not None:
            position_bias = position_bias + (~mask).to(scores.dtype) * -1e9
        scores = scores + position_bias

        attn_weights = nn.functional.softmax(scores, dim=-1)
        attn_output = torch.matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).contiguous().view(batch_size, -1, self.inner_dim)
        return self.o(attn_output)


def make(weights):
    relative = SETTINGS["relative_bias"]
    port = T5Attention(
        d_model=SETTINGS["embed_dim"],
        d_kv=SETTINGS["head_dim"],
        num_heads=SETTINGS["num_heads"],
        num_buckets=relative["buckets"],
        max_distance=relative["max_distance"],
    ).to(weights["wq"].dtype)
    state_dict = {f"{role}.weight": weights[f"w{role}"] for role in "qkvo"}
    state_dict["relative_attention_bias.weight"] = weights["relative_bias"]
    port.load_state_dict(state_dict)
    return port.eval()
