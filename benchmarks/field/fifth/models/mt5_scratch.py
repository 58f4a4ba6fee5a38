import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import MT5Config, MT5ForConditionalGeneration


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


D, H, K, V, BUCKETS, FAR = 48, 4, 8, 80, 8, 12


class Rms(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def bucket(distance, both_ways):
    """distance = key position - query position"""
    n, out = BUCKETS, torch.zeros_like(distance)
    if both_ways:
        n = n // 2
        out = torch.where(distance > 0, n, 0)
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = n // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(FAR / exact)
    coarse = (exact + (ratio * (n - exact)).long()).clamp(max=n - 1)
    return out + torch.where(distance < exact, distance, coarse)


class Mha(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, H * K, bias=False) for _ in range(3))
        self.o = nn.Linear(H * K, D, bias=False)

    def forward(self, x, y, bias):
        cut = lambda t: t.unflatten(-1, (H, K)).transpose(1, 2)
        scores = cut(self.q(x)) @ cut(self.k(y)).transpose(-1, -2)
        scores = scores + bias
        return self.o((scores.softmax(-1) @ cut(self.v(y))).transpose(1, 2).flatten(2))


class Part(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.self_norm, self.self_att = Rms(), Mha()
        if decoder:
            self.cross_norm, self.cross_att = Rms(), Mha()
        self.ff_norm = Rms()
        self.wi_0, self.wi_1, self.wo = nn.Linear(D, 64, bias=False), nn.Linear(D, 64, bias=False), nn.Linear(64, D, bias=False)

    def forward(self, x, bias, memory=None, cross=None):
        h = self.self_norm(x)
        x = x + self.self_att(h, h, bias)
        if memory is not None:
            x = x + self.cross_att(self.cross_norm(x), memory, cross)
        h = self.ff_norm(x)
        return x + self.wo(F.gelu(self.wi_0(h), approximate="tanh") * self.wi_1(h))


class Stack(nn.Module):
    def __init__(self, decoder, n=2):
        super().__init__()
        self.decoder = decoder
        self.relative = nn.Embedding(BUCKETS, H)
        self.parts = nn.ModuleList([Part(decoder) for _ in range(n)])
        self.last = Rms()

    def forward(self, x, pad, memory=None):
        t = torch.arange(x.shape[1])
        bias = self.relative(bucket(t[None, :] - t[:, None], not self.decoder)).permute(2, 0, 1)[None]
        cross = None
        if self.decoder:
            bias = bias + torch.full((len(t), len(t)), -1e9).triu(1)
            cross = pad[:, None, None, :] * -1e9
        else:
            bias = bias + pad[:, None, None, :] * -1e9
        for part in self.parts:
            x = part(x, bias, memory, cross)
        return self.last(x)


class Mt5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(V, D)
        self.encoder, self.decoder = Stack(False), Stack(True)
        self.lm_head = nn.Linear(D, V, bias=False)

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        pad = (attention_mask == 0).float()
        memory = self.encoder(self.shared(input_ids), pad)
        return self.lm_head(self.decoder(self.shared(decoder_input_ids), pad, memory))


def names(name):
    decoder = name.startswith("decoder")
    for old, new in [("block.0.layer.0.SelfAttention.relative_attention_bias", "relative"), ("block.", "parts."), ("layer.0.SelfAttention", "self_att"),
                     ("layer.0.layer_norm", "self_norm"), ("layer.1.EncDecAttention", "cross_att"), ("final_layer_norm", "last"),
                     ("layer.1.layer_norm", "cross_norm" if decoder else "ff_norm"), ("layer.2.layer_norm", "ff_norm"),
                     ("layer.1.DenseReluDense.", ""), ("layer.2.DenseReluDense.", "")]:
        name = name.replace(old, new)
    return name


def make():
    cfg = MT5Config(vocab_size=V, d_model=D, d_kv=K, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=H, pad_token_id=0, eos_token_id=1,
                    relative_attention_num_buckets=BUCKETS, relative_attention_max_distance=FAR, decoder_start_token_id=0)
    cfg._attn_implementation = "eager"
    reference = draw(MT5ForConditionalGeneration(cfg), 55, std=0.17)
    with torch.no_grad():
        for stack in (reference.encoder, reference.decoder):
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.normal_(0, 1.5)
    port = Mt5().eval()
    port.load_state_dict({names(n): w for n, w in reference.state_dict().items() if "embed_tokens" not in n})
    torch.manual_seed(5)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[1, 11:] = 0
    return port, reference, {"input_ids": torch.randint(2, V, (2, 14)), "attention_mask": mask, "decoder_input_ids": torch.randint(2, V, (2, 12))}
