import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import Starcoder2Config, Starcoder2ForCausalLM


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


Q, J, D, W = 6, 2, 8, 48


def config():
    cfg = Starcoder2Config(hidden_size=W, num_attention_heads=Q, num_key_value_heads=J, num_hidden_layers=2, vocab_size=70,
                           intermediate_size=64, use_bias=True, sliding_window=None, max_position_embeddings=64)
    cfg._attn_implementation = "sdpa"
    return cfg


def export(model):
    """The checkpoint of a trainer that fuses rows by group: for each key head, its queries, then its key, then its value."""
    out = {}
    for name, t in model.state_dict().items():
        out[name] = t.clone()
    for i in range(2):
        at = f"model.layers.{i}.self_attn."
        for kind in ("weight", "bias"):
            q = out.pop(at + "q_proj." + kind)
            k = out.pop(at + "k_proj." + kind)
            v = out.pop(at + "v_proj." + kind)
            tail = q.shape[1:]
            rows = torch.cat([q.view(J, Q // J, D, *tail), k.view(J, 1, D, *tail), v.view(J, 1, D, *tail)], 1)
            out[at + "fused." + kind] = rows.reshape(-1, *tail)
    return out


def load(checkpoint):
    out = dict(checkpoint)
    for i in range(2):
        at = f"model.layers.{i}.self_attn."
        for kind in ("weight", "bias"):
            rows = out.pop(at + "fused." + kind)
            tail = rows.shape[1:]
            rows = rows.view(J, Q // J + 2, D, *tail)
            q, k, v = rows[:, :-2], rows[:, -2], rows[:, -1]
            out[at + "q_proj." + kind] = q.reshape(Q * D, *tail)
            out[at + "k_proj." + kind] = k.reshape(J * D, *tail)
            out[at + "v_proj." + kind] = v.reshape(J * D, *tail)
    return out


def make():
    reference = draw(Starcoder2ForCausalLM(config()), 15)
    port = Starcoder2ForCausalLM(config()).eval()
    port.load_state_dict(load(export(reference)))
    torch.manual_seed(3)
    return port, reference, {"input_ids": torch.randint(0, 70, (2, 12))}
