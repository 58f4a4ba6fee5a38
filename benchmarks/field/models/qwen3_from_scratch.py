"""Qwen3 with QK-norm and a window, from scratch: rasbt/LLMs-from-scratch, ch05/11_qwen3.

`Qwen3Model.forward(input_ids)` takes token ids of (batch, tokens) and returns logits.
"""

import torch
from torch import nn

PEER = (
    "Qwen3ForCausalLM",
    {
        "vocab_size": 71,
        "hidden_size": 56,
        "intermediate_size": 90,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
)

QWEN3_CONFIG = {
    "vocab_size": 71,
    "context_length": 64,
    "emb_dim": 56,
    "n_heads": 6,
    "n_layers": 4,
    "hidden_dim": 90,
    "head_dim": 14,
    "n_kv_groups": 2,
    "rope_base": 1_000_000.0,
    "sliding_window": 7,
    "max_window_layers": 2,
}


class RMSNorm(nn.Module):
    def __init__(self, emb_dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(emb_dim))

    def forward(self, x):
        input_dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(dim=-1, keepdim=True)
        norm_x = x * torch.rsqrt(variance + self.eps)
        return norm_x.to(input_dtype) * self.scale


def compute_rope_params(head_dim, theta_base, context_length):
    inv_freq = 1.0 / (theta_base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    positions = torch.arange(context_length).float()
    angles = positions[:, None] * inv_freq[None, :]
    angles = torch.cat([angles, angles], dim=1)
    return torch.cos(angles), torch.sin(angles)


def apply_rope(x, cos, sin):
    # x: (batch, heads, tokens, head_dim)
    _, _, seq_len, head_dim = x.shape
    x1 = x[..., : head_dim // 2]
    x2 = x[..., head_dim // 2 :]
    cos = cos[:seq_len, :].unsqueeze(0).unsqueeze(0)
    sin = sin[:seq_len, :].unsqueeze(0).unsqueeze(0)
    rotated = torch.cat((-x2, x1), dim=-1)
    return (x * cos) + (rotated * sin)


class FeedForward(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.fc1 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], bias=False)
        self.fc2 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], bias=False)
        self.fc3 = nn.Linear(cfg["hidden_dim"], cfg["emb_dim"], bias=False)

    def forward(self, x):
        x_fc1 = self.fc1(x)
        x_fc2 = self.fc2(x)
        return self.fc3(nn.functional.silu(x_fc1) * x_fc2)


class GroupedQueryAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.num_heads = cfg["n_heads"]
        self.num_kv_groups = cfg["n_kv_groups"]
        self.group_size = self.num_heads // self.num_kv_groups
        self.head_dim = cfg["head_dim"]
        self.d_out = self.num_heads * self.head_dim

        self.W_query = nn.Linear(cfg["emb_dim"], self.d_out, bias=False)
        self.W_key = nn.Linear(cfg["emb_dim"], self.num_kv_groups * self.head_dim, bias=False)
        self.W_value = nn.Linear(cfg["emb_dim"], self.num_kv_groups * self.head_dim, bias=False)
        self.out_proj = nn.Linear(self.d_out, cfg["emb_dim"], bias=False)
        self.q_norm = RMSNorm(self.head_dim)
        self.k_norm = RMSNorm(self.head_dim)

    def forward(self, x, mask, cos, sin):
        b, num_tokens, _ = x.shape
        queries = self.W_query(x).view(b, num_tokens, self.num_heads, self.head_dim)
        keys = self.W_key(x).view(b, num_tokens, self.num_kv_groups, self.head_dim)
        values = self.W_value(x).view(b, num_tokens, self.num_kv_groups, self.head_dim)

        queries = queries.transpose(1, 2)
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)

        queries = self.q_norm(queries)
        keys = self.k_norm(keys)

        queries = apply_rope(queries, cos, sin)
        keys = apply_rope(keys, cos, sin)

        keys = keys.repeat_interleave(self.group_size, dim=1)
        values = values.repeat_interleave(self.group_size, dim=1)

        attn_scores = queries @ keys.transpose(2, 3)
        attn_scores = attn_scores.masked_fill(mask, -torch.inf)
        attn_weights = torch.softmax(attn_scores / self.head_dim**0.5, dim=-1)

        context = (attn_weights @ values).transpose(1, 2).reshape(b, num_tokens, self.d_out)
        return self.out_proj(context)


class TransformerBlock(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.att = GroupedQueryAttention(cfg)
        self.ff = FeedForward(cfg)
        self.norm1 = RMSNorm(cfg["emb_dim"])
        self.norm2 = RMSNorm(cfg["emb_dim"])

    def forward(self, x, mask, cos, sin):
        shortcut = x
        x = self.norm1(x)
        x = self.att(x, mask, cos, sin)
        x = x + shortcut

        shortcut = x
        x = self.norm2(x)
        x = self.ff(x)
        return x + shortcut


class Qwen3Model(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.tok_emb = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])
        self.trf_blocks = nn.ModuleList([TransformerBlock(cfg) for _ in range(cfg["n_layers"])])
        self.final_norm = RMSNorm(cfg["emb_dim"])
        self.out_head = nn.Linear(cfg["emb_dim"], cfg["vocab_size"], bias=False)
        cos, sin = compute_rope_params(cfg["head_dim"], cfg["rope_base"], cfg["context_length"])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, input_ids):
        x = self.tok_emb(input_ids)
        i = torch.arange(x.shape[1])[:, None]
        j = torch.arange(x.shape[1])[None, :]
        mask_global = j > i
        mask_local = mask_global | (i - j >= self.cfg["sliding_window"])

        for idx, block in enumerate(self.trf_blocks):
            mask = mask_local if idx >= self.cfg["max_window_layers"] else mask_global
            x = block(x, mask, self.cos, self.sin)
        x = self.final_norm(x)
        return self.out_head(x)


def load_weights_into_qwen(model, param_config, params):
    def assign(left, right):
        if left.shape != right.shape:
            raise ValueError(f"Shape mismatch. Left: {left.shape}, Right: {right.shape}")
        return nn.Parameter(right.clone().detach())

    model.tok_emb.weight = assign(model.tok_emb.weight, params["model.embed_tokens.weight"])
    for i in range(param_config["n_layers"]):
        block = model.trf_blocks[i]
        att, ff = block.att, block.ff
        hf = f"model.layers.{i}."
        att.W_query.weight = assign(att.W_query.weight, params[hf + "self_attn.q_proj.weight"])
        att.W_key.weight = assign(att.W_key.weight, params[hf + "self_attn.k_proj.weight"])
        att.W_value.weight = assign(att.W_value.weight, params[hf + "self_attn.v_proj.weight"])
        att.out_proj.weight = assign(att.out_proj.weight, params[hf + "self_attn.o_proj.weight"])
        att.q_norm.scale = assign(att.q_norm.scale, params[hf + "self_attn.q_norm.weight"])
        att.k_norm.scale = assign(att.k_norm.scale, params[hf + "self_attn.k_norm.weight"])
        ff.fc1.weight = assign(ff.fc1.weight, params[hf + "mlp.gate_proj.weight"])
        ff.fc2.weight = assign(ff.fc2.weight, params[hf + "mlp.up_proj.weight"])
        ff.fc3.weight = assign(ff.fc3.weight, params[hf + "mlp.down_proj.weight"])
        block.norm1.scale = assign(block.norm1.scale, params[hf + "input_layernorm.weight"])
        block.norm2.scale = assign(
            block.norm2.scale, params[hf + "post_attention_layernorm.weight"]
        )
    model.final_norm.scale = assign(model.final_norm.scale, params["model.norm.weight"])
    model.out_head.weight = assign(model.out_head.weight, params["lm_head.weight"])


def make(peer):
    model = Qwen3Model(QWEN3_CONFIG).to(peer.dtype)
    load_weights_into_qwen(model, QWEN3_CONFIG, peer.state_dict())
    return model


def inputs(generator):
    return {"input_ids": torch.randint(0, 71, (2, 21), generator=generator)}
