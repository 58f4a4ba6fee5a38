import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


def draw(module, std, seed):
    """Weights wide enough that the softmax is not flat; biases and gains drawn too."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("sinks"):
                p.normal_(0.5, 1.0)
            elif p.dim() < 2 or "norm" in name:
                p.add_(torch.randn_like(p) * 0.3)
            else:
                p.normal_(0, std)
    return module.eval()

from transformers import T5Config, T5ForConditionalGeneration


def bucket(rel, both, n, far):
    base = torch.zeros_like(rel)
    if both:
        n = n // 2
        base = torch.where(rel > 0, n, 0)
        rel = rel.abs()
    else:
        rel = (-rel).clamp(min=0)
    exact = n // 2
    big = exact + (torch.log(rel.clamp(min=1).float() / exact) / math.log(far / exact) * (n - exact)).long()
    return base + torch.where(rel < exact, rel, big.clamp(max=n - 1))


class T5:
    """Functions over the checkpoint's tensors."""

    def __init__(self, sd, cfg):
        self.sd, self.cfg, self.h, self.d = sd, cfg, cfg.num_heads, cfg.d_kv

    def norm(self, x, name):
        return self.sd[name] * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.cfg.layer_norm_epsilon))

    def bias(self, side, q, k):
        rel = torch.arange(k)[None] - torch.arange(q)[:, None]
        b = bucket(rel, side == "encoder", self.cfg.relative_attention_num_buckets, self.cfg.relative_attention_max_distance)
        table = self.sd[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        return table[b].permute(2, 0, 1)

    def attend(self, x, memory, name, extra):
        lin = lambda t, n: (t @ self.sd[f"{name}.{n}.weight"].T).unflatten(-1, (self.h, self.d)).transpose(1, 2)
        q, k, v = lin(x, "q"), lin(memory, "k"), lin(memory, "v")
        scores = q @ k.transpose(2, 3) + extra
        y = scores.float().softmax(-1) @ v
        return y.transpose(1, 2).flatten(2) @ self.sd[f"{name}.o.weight"].T

    def ff(self, x, name):
        h = self.norm(x, f"{name}.layer_norm.weight")
        return x + torch.relu(h @ self.sd[f"{name}.DenseReluDense.wi.weight"].T) @ self.sd[f"{name}.DenseReluDense.wo.weight"].T

    def stack(self, x, side, memory=None, hide=None):
        T = x.shape[1]
        pos = self.bias(side, T, T)
        if side == "decoder":
            pos = pos.masked_fill(torch.ones(T, T).triu(1).bool(), -1e30)
        elif hide is not None:
            pos = pos + hide
        for i in range(self.cfg.num_layers):
            p = f"{side}.block.{i}.layer."
            h = self.norm(x, p + "0.layer_norm.weight")
            x = x + self.attend(h, h, p + "0.SelfAttention", pos)
            if memory is not None:
                h = self.norm(x, p + "1.layer_norm.weight")
                x = x + self.attend(h, memory, p + "1.EncDecAttention", hide)
            x = self.ff(x, p + ("2" if memory is not None else "1"))
        return self.norm(x, f"{side}.final_layer_norm.weight")

    def __call__(self, input_ids, attention_mask, decoder_input_ids):
        e = self.sd["shared.weight"]
        hide = torch.where(attention_mask[:, None, None] == 0, -1e30, 0.0)
        memory = self.stack(e[input_ids], "encoder", hide=hide)
        y = self.stack(e[decoder_input_ids], "decoder", memory, hide)
        return y * e.shape[1] ** -0.5 @ e.T


class Wrapped(nn.Module):
    def __init__(self, sd, cfg):
        super().__init__()
        self.keys = list(sd)
        self.tensors = nn.ParameterList(nn.Parameter(t.clone()) for t in sd.values())
        self.cfg = cfg

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        return T5(dict(zip(self.keys, self.tensors)), self.cfg)(input_ids, attention_mask, decoder_input_ids)


def make():
    cfg = T5Config(d_model=40, d_kv=12, num_heads=4, d_ff=64, num_layers=2, num_decoder_layers=2, vocab_size=70,
                   relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=0)
    reference = draw(T5ForConditionalGeneration(cfg), 0.2, 311)
    with torch.no_grad():
        for name, p in reference.named_parameters():
            if "relative_attention_bias" in name:
                p.normal_(0, 1.5)
            if "shared" in name:
                p.normal_(0, 1.0)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[1, 10:] = 0
    inputs = {"input_ids": torch.randint(2, 70, (2, 14)), "attention_mask": mask, "decoder_input_ids": torch.randint(2, 70, (2, 12))}
    return Wrapped(reference.state_dict(), cfg).eval(), reference, inputs
