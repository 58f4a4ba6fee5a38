import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import Olmo2Config, Olmo2ForCausalLM


def draw(net, seed, std=0.25):
    """Weights large enough that no softmax is flat; gains spread about their start; biases drawn."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() == 1 and "norm" in name.lower() and name.endswith("weight"):
                p.add_(0.3 * torch.randn_like(p))
            elif p.dim() == 1:
                p.copy_(0.4 * torch.randn_like(p))
            else:
                p.copy_(std * torch.randn_like(p))
    return net.eval()


def config():
    cfg = Olmo2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, vocab_size=90,
                      intermediate_size=80, max_position_embeddings=64, pad_token_id=0)
    cfg._attn_implementation = "sdpa"
    return cfg


def spin(t, cos, sin):
    half = t.size(-1) // 2
    a, b = t[..., :half], t[..., half:]
    c, s = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def patched(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
    B, T, _ = hidden_states.shape
    heads = lambda t: t.reshape(B, T, -1, self.head_dim).transpose(1, 2)
    q = self.q_norm(self.q_proj(hidden_states))
    k = self.k_norm(self.k_proj(hidden_states))
    v = self.v_proj(hidden_states)
    q, k, v = heads(q), heads(k), heads(v)
    q, k = spin(q, *position_embeddings), spin(k, *position_embeddings)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None)
    y = y.transpose(1, 2).reshape(B, T, -1)
    return self.o_proj(y), None


def make():
    reference = draw(Olmo2ForCausalLM(config()), 12)
    port = copy.deepcopy(reference)
    for layer in port.model.layers:
        layer.self_attn.forward = types.MethodType(patched, layer.self_attn)
    torch.manual_seed(1)
    ids = torch.randint(3, 90, (2, 13))
    return port, reference, {"input_ids": ids}
