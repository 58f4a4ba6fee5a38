import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import ModernBertConfig, ModernBertModel


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


def config(**changed):
    fields = dict(hidden_size=48, num_attention_heads=4, num_hidden_layers=3, vocab_size=80, intermediate_size=64,
                  local_attention=6, layer_types=["full_attention", "sliding_attention", "sliding_attention"], pad_token_id=0,
                  bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, max_position_embeddings=64, attention_bias=True)
    fields.update(changed)
    cfg = ModernBertConfig(**fields)
    cfg._attn_implementation = "eager"
    return cfg


class Separate(nn.Module):
    """Three linear maps in place of Wqkv."""

    def __init__(self, old):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(48, 48) for _ in range(3))
        for part, w, b in zip((self.q, self.k, self.v), old.Wqkv.weight.chunk(3), old.Wqkv.bias.chunk(3)):
            part.weight.data.copy_(w)
            part.bias.data.copy_(b)
        self.out = old.Wo

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        heads = lambda t: t.unflatten(-1, (4, 12)).permute(0, 2, 1, 3)
        q, k, v = heads(self.q(hidden_states)), heads(self.k(hidden_states)), heads(self.v(hidden_states))
        cos, sin = (t[:, None, :, :6] for t in position_embeddings)
        turn = lambda t: torch.cat([t[..., :6] * cos - t[..., 6:] * sin, t[..., 6:] * cos + t[..., :6] * sin], -1)
        s = torch.matmul(turn(q), turn(k).transpose(-1, -2)) / 12 ** 0.5
        if attention_mask is not None:
            s = s.masked_fill(attention_mask < 0, -1e9)
        y = torch.matmul(s.softmax(dim=-1), v)
        return self.out(y.permute(0, 2, 1, 3).flatten(2)), None


def make():
    reference = draw(ModernBertModel(config()), 24, std=0.3)
    port = ModernBertModel(config()).eval()
    port.load_state_dict(reference.state_dict())
    for layer in port.layers:
        layer.attn = Separate(layer.attn).eval()
    torch.manual_seed(5)
    ids = torch.randint(3, 80, (2, 14))
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[1, 9:] = 0
    return port, reference, {"input_ids": ids, "attention_mask": mask}
