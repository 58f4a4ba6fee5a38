"""Self-attention of Megatron-LM's encoder, fed from a checkpoint."""

import math

import torch
from torch import nn

from headwise import Attention
from tests.diagnosis.sealed.weights import draw_weights


class ParallelSelfAttention(nn.Module):
    """Self-attention of the encoder, on one device."""

    def __init__(self, hidden_size, num_attention_heads, attention_dropout=0.0):
        super().__init__()
        if hidden_size % num_attention_heads:
            raise ValueError("hidden_size must be divisible by num_attention_heads")
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.hidden_size_per_attention_head = hidden_size // num_attention_heads
        self.norm_factor = math.sqrt(self.hidden_size_per_attention_head)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.attention_dropout = nn.Dropout(attention_dropout)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def split_projection(self, mixed_x_layer):
        # [b, s, 3 * h] --> three of [b, np, s, hn]
        b, s, _ = mixed_x_layer.shape
        np, hn = self.num_attention_heads, self.hidden_size_per_attention_head
        query, key, value = mixed_x_layer.chunk(3, dim=-1)
        return [t.reshape(b, s, np, hn).permute(0, 2, 1, 3) for t in (query, key, value)]

    def forward(self, hidden_states):
        # hidden_states: [b, s, h]
        mixed_x_layer = self.query_key_value(hidden_states)
        query_layer, key_layer, value_layer = self.split_projection(mixed_x_layer)

        # Raw attention scores. [b, np, s, s]
        norm_query_layer = query_layer / self.norm_factor
        attention_scores = torch.matmul(norm_query_layer, key_layer.transpose(-1, -2))

        # Attention probabilities. [b, np, s, s]
        attention_probs = torch.softmax(attention_scores, dim=-1)
        attention_probs = self.attention_dropout(attention_probs)

        # Context layer. [b, np, s, hn] --> [b, s, h]
        context_layer = torch.matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        new_context_layer_shape = (*context_layer.size()[:-2], self.hidden_size)
        context_layer = context_layer.view(*new_context_layer_shape)

        return self.dense(context_layer)


def load_checkpoint(module, checkpoint):
    """Copy one layer of a checkpoint into the module."""
    prefix = "attention."
    module.load_state_dict(
        {
            name[len(prefix) :]: tensor
            for name, tensor in checkpoint.items()
            if name.startswith(prefix)
        }
    )
    return module.eval()


def make():
    """Return the port and the layer that it should be."""
    layer = Attention(72, 6)
    draw_weights(layer, 11)
    parts = [layer.q_proj, layer.k_proj, layer.v_proj]
    weight = torch.stack([p.weight.detach().view(6, 12, 72) for p in parts], 1)
    bias = torch.stack([p.bias.detach().view(6, 12) for p in parts], 1)
    checkpoint = {
        "attention.query_key_value.weight": weight.reshape(216, 72),
        "attention.query_key_value.bias": bias.reshape(216),
        "attention.dense.weight": layer.out_proj.weight.detach().clone(),
        "attention.dense.bias": layer.out_proj.bias.detach().clone(),
    }
    return load_checkpoint(ParallelSelfAttention(72, 6), checkpoint), layer
