import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import BloomConfig, BloomForCausalLM


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


HEADS = 6


def config():
    cfg = BloomConfig(vocab_size=80, hidden_size=48, n_layer=2, n_head=HEADS, pad_token_id=3)
    cfg._attn_implementation = "eager"
    return cfg


def slopes(n):
    power = 2 ** math.floor(math.log2(n))
    main = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    more = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (n - power), 2)]
    return torch.tensor(main + more)


def forward(self, hidden_states, residual, alibi=None, attention_mask=None, layer_past=None, **kwargs):
    B, T, W = hidden_states.shape
    q, k, v = self.query_key_value(hidden_states).view(B, T, HEADS, 3, self.head_dim).permute(3, 0, 2, 1, 4)
    place = torch.arange(T)
    gap = (place[None, :] - place[:, None]).float()
    s = q @ k.mT * self.inv_norm_factor + slopes(HEADS)[:, None, None] * gap
    s = s.masked_fill(gap > 0, float("-inf"))
    y = (s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, W)
    return residual + self.dense(y), None


def make():
    reference = draw(BloomForCausalLM(config()), 26)
    port = copy.deepcopy(reference)
    for block in port.transformer.h:
        block.self_attention.forward = types.MethodType(forward, block.self_attention)
    torch.manual_seed(8)
    return port, reference, {"input_ids": torch.randint(4, 80, (2, 16)), "use_cache": False}
