"""Multi-query attention with a fused c_attn, as in huggingface/transformers, GPTBigCode."""

import torch
from torch import nn

SETTINGS = {"embed_dim": 66, "num_heads": 6, "num_kv_heads": 1, "causal": True}
TAKES = ("mask",)


class GPTBigCodeAttention(nn.Module):
    """All query heads share one key head and one value head."""

    def __init__(self, embed_dim, num_heads, dtype, max_positions=64):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kv_dim = self.head_dim
        self.c_attn = nn.Linear(embed_dim, embed_dim + 2 * self.kv_dim, dtype=dtype)
        self.c_proj = nn.Linear(embed_dim, embed_dim, dtype=dtype)
        causal = torch.tril(torch.ones(max_positions, max_positions, dtype=torch.bool))
        self.register_buffer("bias", causal, persistent=False)

    def _attn(self, query, key, value, attention_mask):
        # query: (batch, tokens, heads * head_dim); key: (batch, head_dim, keys)
        batch, query_length = query.shape[:2]
        key_length = key.shape[-1]
        attn_shape = (batch, query_length, self.num_heads, key_length)
        # the heads are rows beside the tokens, so that one bmm does for all of them
        query = query.reshape(batch, query_length * self.num_heads, self.head_dim)
        scores = torch.bmm(query, key) * self.head_dim**-0.5
        scores = scores.view(attn_shape)
        mask_value = torch.finfo(scores.dtype).min
        scores = torch.where(attention_mask, scores, mask_value)
        attn_weights = torch.softmax(scores, dim=-1)
        attn_weights = attn_weights.view(batch, query_length * self.num_heads, key_length)
        return torch.bmm(attn_weights, value).view(batch, query_length, self.embed_dim)

    def forward(self, hidden_states, attention_mask=None):
        tokens = hidden_states.shape[1]
        fused = self.c_attn(hidden_states)
        query, key_value = fused.split((self.embed_dim, 2 * self.kv_dim), dim=2)
        key, value = key_value.split((self.head_dim, self.head_dim), dim=-1)
        # (1 or batch, queries, 1, keys)
        seen = self.bias[None, :tokens, None, :tokens]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :]
        attn_output = self._attn(query, key.transpose(-1, -2), value, seen)
        return self.c_proj(attn_output)


def convert(weights):
    """Map neutral weights to the names and the layout of the model."""
    return {
        "c_attn.weight": torch.cat([weights["wq"], weights["wk"], weights["wv"]]),
        "c_attn.bias": torch.cat([weights["bq"], weights["bk"], weights["bv"]]),
        "c_proj.weight": weights["wo"],
        "c_proj.bias": weights["bo"],
    }


def make(weights):
    """Load the converted weights."""
    attn = GPTBigCodeAttention(SETTINGS["embed_dim"], SETTINGS["num_heads"], weights["wq"].dtype)
    attn.load_state_dict(convert(weights))
    attn.eval()

    def port(x, mask=None):
        return attn(x, None if mask is None else mask[:, 0, 0])

    return port
