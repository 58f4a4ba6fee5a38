import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import SiglipVisionConfig, SiglipVisionModel


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


E, N = 48, 4


class Head(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(width, size), nn.Linear(width, size), nn.Linear(width, size)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        score = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
        return torch.bmm(torch.softmax(score, dim=2), v)


class MultiHead(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.heads = nn.ModuleList([Head(E, E // N) for _ in range(N)])
        self.output = nn.Linear(E, E)

    def forward(self, x):
        parts = [head(x) for head in self.heads]
        return self.output(torch.cat(parts, dim=-1))


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(E, eps=1e-6), nn.LayerNorm(E, eps=1e-6)
        self.attention = MultiHead(number)
        self.fc1, self.fc2 = nn.Linear(E, 64), nn.Linear(64, E)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(3 * 4 * 4, E)
        self.place = nn.Parameter(torch.zeros(12 * 12 // 16, E))
        self.blocks = nn.ModuleList([Block(i) for i in range(2)])
        self.last = nn.LayerNorm(E, eps=1e-6)

    def forward(self, pixel_values):
        tiles = F.unfold(pixel_values, 4, stride=4).transpose(1, 2)
        x = self.patch(tiles) + self.place
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def transfer(port, ref):
    with torch.no_grad():
        emb = ref.embeddings
        port.patch.weight.copy_(emb.patch_embedding.weight.flatten(1))
        port.patch.bias.copy_(emb.patch_embedding.bias)
        port.place.copy_(emb.position_embedding.weight)
        port.last.load_state_dict(ref.post_layernorm.state_dict())
        for block, layer in zip(port.blocks, ref.encoder.layers):
            block.norm1.load_state_dict(layer.layer_norm1.state_dict())
            block.norm2.load_state_dict(layer.layer_norm2.state_dict())
            block.fc1.load_state_dict(layer.mlp.fc1.state_dict())
            block.fc2.load_state_dict(layer.mlp.fc2.state_dict())
            block.attention.output.load_state_dict(layer.self_attn.out_proj.state_dict())
            for i, head in enumerate(block.attention.heads):
                rows = slice(i * E // N, (i + 1) * E // N)
                for mine, theirs in ((head.query, "q_proj"), (head.key, "k_proj"), (head.value, "v_proj")):
                    source = getattr(layer.self_attn, theirs)
                    mine.weight.copy_(source.weight[rows])
                    mine.bias.copy_(source.bias[rows])


def make():
    cfg = SiglipVisionConfig(hidden_size=E, num_attention_heads=N, num_hidden_layers=2, intermediate_size=64, image_size=12, patch_size=4)
    cfg.vision_use_head = False
    cfg._attn_implementation = "eager"
    reference = draw(SiglipVisionModel(cfg), 51)
    port = Tower().eval()
    transfer(port, reference)
    torch.manual_seed(1)
    return port, reference, {"pixel_values": torch.randn(2, 3, 12, 12)}
