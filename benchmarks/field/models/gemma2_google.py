"""Gemma 2 as Google wrote it in PyTorch: google/gemma_pytorch, gemma/model.py.

`GemmaForCausalLM.forward(input_ids)` takes token ids of (batch, tokens) and returns logits.
"""

import enum

import torch
from torch import nn
from torch.nn import functional as F

PEER = (
    "Gemma2ForCausalLM",
    {
        "vocab_size": 71,
        "hidden_size": 60,
        "intermediate_size": 92,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "query_pre_attn_scalar": 10,
        "sliding_window": 6,
        "attn_logit_softcapping": 6.0,
        "final_logit_softcapping": 5.0,
        "max_position_embeddings": 64,
        "initializer_range": 0.13,
    },
)


class AttentionType(enum.Enum):
    GLOBAL = 1
    LOCAL_SLIDING = 2


class GemmaConfig:
    vocab_size = 71
    max_position_embeddings = 64
    num_hidden_layers = 4
    num_attention_heads = 6
    num_key_value_heads = 2
    hidden_size = 60
    intermediate_size = 92
    head_dim = 12
    rms_norm_eps = 1e-6
    query_pre_attn_scalar = 10
    attn_types = (AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL) * 2
    sliding_window_size = 6
    attn_logit_softcapping = 6.0
    final_logit_softcapping = 5.0


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    freqs = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(x, freqs_cis):
    # x: (batch, tokens, heads, head_dim)
    x_ = torch.view_as_complex(torch.stack(torch.chunk(x.transpose(1, 2), 2, dim=-1), dim=-1))
    x_out = torch.view_as_real(x_ * freqs_cis).type_as(x)
    x_out = torch.cat(torch.chunk(x_out, 2, dim=-1), dim=-2)
    return x_out.reshape(*x_out.shape[:3], -1).transpose(1, 2)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6, add_unit_offset=True):
        super().__init__()
        self.eps = eps
        self.add_unit_offset = add_unit_offset
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        output = x.float()
        output = output * torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.add_unit_offset:
            output = output * (1 + self.weight.float())
        else:
            output = output * self.weight.float()
        return output.type_as(x)


class GemmaMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class GemmaAttention(nn.Module):
    def __init__(self, config, attn_type):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.num_queries_per_kv = self.num_heads // self.num_kv_heads
        self.head_dim = config.head_dim
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.scaling = config.query_pre_attn_scalar**-0.5
        self.qkv_proj = nn.Linear(config.hidden_size, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, config.hidden_size, bias=False)
        self.attn_type = attn_type
        self.attn_logit_softcapping = config.attn_logit_softcapping

    def forward(self, hidden_states, freqs_cis, mask, local_mask):
        batch_size, input_len, _ = hidden_states.shape
        qkv = self.qkv_proj(hidden_states)
        xq, xk, xv = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        xq = xq.view(batch_size, -1, self.num_heads, self.head_dim)
        xk = xk.view(batch_size, -1, self.num_kv_heads, self.head_dim)
        xv = xv.view(batch_size, -1, self.num_kv_heads, self.head_dim)

        xq = apply_rotary_emb(xq, freqs_cis)
        xk = apply_rotary_emb(xk, freqs_cis)

        key = torch.repeat_interleave(xk, self.num_queries_per_kv, dim=2)
        value = torch.repeat_interleave(xv, self.num_queries_per_kv, dim=2)

        q = xq.transpose(1, 2) * self.scaling
        k = key.transpose(1, 2)
        v = value.transpose(1, 2)

        scores = torch.matmul(q, k.transpose(2, 3))
        if self.attn_logit_softcapping is not None:
            scores = scores / self.attn_logit_softcapping
            scores = torch.tanh(scores)
            scores = scores * self.attn_logit_softcapping
        if self.attn_type == AttentionType.LOCAL_SLIDING:
            mask = local_mask
        scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(q)

        output = torch.matmul(scores, v)
        output = output.transpose(1, 2).contiguous().view(batch_size, input_len, -1)
        return self.o_proj(output)


class Gemma2DecoderLayer(nn.Module):
    def __init__(self, config, attn_type):
        super().__init__()
        self.self_attn = GemmaAttention(config, attn_type)
        self.mlp = GemmaMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, freqs_cis, mask, local_mask):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, freqs_cis, mask, local_mask)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.pre_feedforward_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        return residual + hidden_states


class GemmaModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(
            [Gemma2DecoderLayer(config, attn_type) for attn_type in config.attn_types]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, freqs_cis, mask, local_mask):
        for layer in self.layers:
            hidden_states = layer(hidden_states, freqs_cis, mask, local_mask)
        return self.norm(hidden_states)


class GemmaForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedder = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model = GemmaModel(config)
        self.freqs_cis = precompute_freqs_cis(config.head_dim, config.max_position_embeddings)

    def forward(self, input_ids):
        input_len = input_ids.shape[1]
        hidden_states = self.embedder(input_ids)
        hidden_states = hidden_states * self.config.hidden_size**0.5

        mask = torch.full((input_len, input_len), -2.3819763e38, dtype=hidden_states.dtype)
        mask = torch.triu(mask, diagonal=1)
        seen = torch.ones_like(mask).tril().triu(1 - self.config.sliding_window_size)
        local_mask = torch.where(seen == 1, mask, -2.3819763e38)

        hidden_states = self.model(hidden_states, self.freqs_cis[:input_len], mask, local_mask)
        logits = torch.matmul(hidden_states, self.embedder.weight.t())
        if self.config.final_logit_softcapping is not None:
            logits = logits / self.config.final_logit_softcapping
            logits = torch.tanh(logits)
            logits = logits * self.config.final_logit_softcapping
        return logits


def make(peer):
    config = GemmaConfig()
    sd = peer.state_dict()
    skipped = ("q_proj", "k_proj", "v_proj", "lm_head", "embed_tokens")
    state = {n: w for n, w in sd.items() if not any(part in n for part in skipped)}
    state["embedder.weight"] = sd["model.embed_tokens.weight"]
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}.self_attn."
        q, k, v = (sd[f"{prefix}{role}_proj.weight"] for role in "qkv")
        state[prefix + "qkv_proj.weight"] = torch.cat([q, k, v], dim=0)
    model = GemmaForCausalLM(config).to(peer.dtype)
    model.load_state_dict(state)
    return model


def inputs(generator):
    return {"input_ids": torch.randint(3, 71, (2, 22), generator=generator)}
