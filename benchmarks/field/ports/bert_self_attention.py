"""BERT's attention (huggingface/transformers, src/transformers/models/bert/modeling_bert.py)."""

import math

import torch
from torch import nn

SETTINGS = {"embed_dim": 66, "num_heads": 6}
TAKES = ("mask",)


class BertSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, attention_probs_dropout_prob=0.1):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.all_head_size = self.num_attention_heads * self.attention_head_size

        self.query = nn.Linear(hidden_size, self.all_head_size)
        self.key = nn.Linear(hidden_size, self.all_head_size)
        self.value = nn.Linear(hidden_size, self.all_head_size)
        self.dropout = nn.Dropout(attention_probs_dropout_prob)

    def transpose_for_scores(self, x):
        new_shape = (*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        return x.view(new_shape).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))

        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            attention_scores = attention_scores + attention_mask

        attention_probs = nn.functional.softmax(attention_scores, dim=-1)
        attention_probs = self.dropout(attention_probs)

        context_layer = torch.matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        return context_layer.view(*context_layer.size()[:-2], self.all_head_size)


class BertAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self = BertSelfAttention(config["embed_dim"], config["num_heads"])
        self.output = nn.ModuleDict({"dense": nn.Linear(config["embed_dim"], config["embed_dim"])})

    def get_extended_attention_mask(self, attention_mask, dtype):
        extended = attention_mask[:, None, None, :].to(dtype)
        return (1.0 - extended) * torch.finfo(dtype).min

    def forward(self, x, mask=None):
        if mask is not None:
            mask = self.get_extended_attention_mask(mask.squeeze(2).squeeze(1), x.dtype)
        return self.output["dense"](self.self(x, mask))


NAMES = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}


def make(weights):
    port = BertAttention(SETTINGS).to(weights["wq"].dtype)
    state_dict = {}
    for role, name in NAMES.items():
        state_dict[f"{name}.weight"] = weights[f"w{role}"]
        state_dict[f"{name}.bias"] = weights[f"b{role}"]
    port.load_state_dict(state_dict)
    return port.eval()
