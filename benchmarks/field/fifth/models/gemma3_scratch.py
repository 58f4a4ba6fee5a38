import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import Gemma3ForCausalLM, Gemma3TextConfig


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


CFG = dict(emb=48, heads=4, groups=2, size=16, layers=3, vocab=80, window=5, local_base=10.0, global_base=1000.0, pre_scalar=64)
PATTERN = ["sliding_attention", "full_attention", "sliding_attention"]


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (self.weight + 1)


def rope_params(n, base, size):
    inv = 1.0 / base ** (torch.arange(0, size, 2)[: size // 2].float() / size)
    angles = torch.arange(n).float()[:, None] * inv[None, :]
    angles = torch.cat([angles, angles], dim=1)
    return torch.cos(angles), torch.sin(angles)


def apply_rope(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class GroupedQueryAttention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        c, self.kind = CFG, kind
        self.q_proj = nn.Linear(c["emb"], c["heads"] * c["size"], bias=False)
        self.k_proj = nn.Linear(c["emb"], c["groups"] * c["size"], bias=False)
        self.v_proj = nn.Linear(c["emb"], c["groups"] * c["size"], bias=False)
        self.o_proj = nn.Linear(c["heads"] * c["size"], c["emb"], bias=False)
        self.q_norm, self.k_norm = Norm(c["size"]), Norm(c["size"])
        self.scaling = c["pre_scalar"] ** -0.5

    def forward(self, x, cos, sin, mask):
        b, n, _ = x.shape
        queries = self.q_proj(x).view(b, n, CFG["heads"], CFG["size"]).transpose(1, 2)
        keys = self.k_proj(x).view(b, n, CFG["groups"], CFG["size"]).transpose(1, 2)
        values = self.v_proj(x).view(b, n, CFG["groups"], CFG["size"]).transpose(1, 2)
        queries = self.q_norm(queries)
        keys = self.k_norm(keys)
        queries, keys = apply_rope(queries, cos, sin), apply_rope(keys, cos, sin)
        times = CFG["heads"] // CFG["groups"]
        keys, values = keys.repeat_interleave(times, dim=1), values.repeat_interleave(times, dim=1)
        scores = (queries * self.scaling) @ keys.transpose(2, 3)
        scores = scores.masked_fill(mask, -torch.inf)
        context = (torch.softmax(scores, dim=-1) @ values).transpose(1, 2).reshape(b, n, -1)
        return self.o_proj(context)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        e = CFG["emb"]
        self.self_attn = GroupedQueryAttention(kind)
        self.mlp = nn.ModuleDict({"gate_proj": nn.Linear(e, 64, bias=False), "up_proj": nn.Linear(e, 64, bias=False), "down_proj": nn.Linear(64, e, bias=False)})
        self.input_layernorm, self.post_attention_layernorm = Norm(e), Norm(e)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = Norm(e), Norm(e)

    def forward(self, x, tables, masks):
        kind = self.self_attn.kind
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), *tables[kind], masks[kind]))
        h = self.pre_feedforward_layernorm(x)
        h = self.mlp["down_proj"](F.gelu(self.mlp["gate_proj"](h), approximate="tanh") * self.mlp["up_proj"](h))
        return x + self.post_feedforward_layernorm(h)


class Gemma(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(CFG["vocab"], CFG["emb"])
        self.layers = nn.ModuleList([Block(kind) for kind in PATTERN])
        self.norm = Norm(CFG["emb"])

    def forward(self, ids):
        n = ids.shape[1]
        tables = {"sliding_attention": rope_params(n, CFG["local_base"], CFG["size"]),
                  "full_attention": rope_params(n, CFG["global_base"], CFG["size"])}
        ahead = torch.ones(n, n, dtype=torch.bool).triu(1)
        far = torch.ones(n, n, dtype=torch.bool).tril(-CFG["window"])
        masks = {"sliding_attention": ahead | far, "full_attention": ahead}
        x = self.embed_tokens(ids) * CFG["emb"] ** 0.5
        for layer in self.layers:
            x = layer(x, tables, masks)
        return self.norm(x) @ self.embed_tokens.weight.T


def make():
    cfg = Gemma3TextConfig(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=3, vocab_size=80,
                           intermediate_size=64, sliding_window=5, query_pre_attn_scalar=64, layer_types=PATTERN, max_position_embeddings=64,
                           rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
                                            "full_attention": {"rope_type": "default", "rope_theta": 1000.0}},
                           pad_token_id=0, bos_token_id=1, eos_token_id=2)
    cfg._attn_implementation = "eager"
    reference = draw(Gemma3ForCausalLM(cfg), 53)
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.self_attn.q_norm.weight.add_(1.0)
    port = Gemma().eval()
    port.load_state_dict({n.removeprefix("model."): w for n, w in reference.state_dict().items() if n != "lm_head.weight"})
    torch.manual_seed(3)
    return port, reference, torch.randint(3, 80, (2, 14))
