import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import MBartConfig, MBartForConditionalGeneration


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


E, HEADS, VOCAB = 48, 4, 90


class Heads(nn.Module):
    """Attention in the old fairseq way: batch and heads in one axis."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(E, E) for _ in range(4))

    def shape(self, t):
        B, T, _ = t.shape
        return t.view(B, T, HEADS, E // HEADS).transpose(1, 2).reshape(B * HEADS, T, E // HEADS)

    def forward(self, x, memory=None, pad=None, causal=False):
        source = x if memory is None else memory
        B, T, S = x.size(0), x.size(1), source.size(1)
        q = self.shape(self.q_proj(x) * (E // HEADS) ** -0.5)
        k = self.shape(self.k_proj(source))
        v = self.shape(self.v_proj(source))
        s = torch.bmm(q, k.transpose(1, 2))
        if causal:
            s = s.masked_fill(torch.ones(T, S).triu(1).bool(), float("-inf"))
        if pad is not None:
            s = s.view(B, HEADS, T, S).masked_fill(pad[:, None, None, :], float("-inf")).view(B * HEADS, T, S)
        y = torch.bmm(F.softmax(s, dim=-1), v)
        y = y.view(B, HEADS, T, -1).transpose(1, 2).reshape(B, T, E)
        return self.out_proj(y)


class Layer(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = Heads(), nn.LayerNorm(E)
        self.decoder = decoder
        if decoder:
            self.encoder_attn, self.encoder_attn_layer_norm = Heads(), nn.LayerNorm(E)
        self.fc1, self.fc2, self.final_layer_norm = nn.Linear(E, 64), nn.Linear(64, E), nn.LayerNorm(E)

    def forward(self, x, memory=None, pad=None):
        own = None if self.decoder else pad
        x = x + self.self_attn(self.self_attn_layer_norm(x), pad=own, causal=self.decoder)
        if self.decoder:
            x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), memory=memory, pad=pad)
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class Half(nn.Module):
    def __init__(self, decoder, n):
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(VOCAB, E), nn.Embedding(34, E)
        self.layernorm_embedding, self.layer_norm = nn.LayerNorm(E), nn.LayerNorm(E)
        self.layers = nn.ModuleList([Layer(decoder) for _ in range(n)])

    def forward(self, ids, memory=None, pad=None):
        x = self.embed_tokens(ids) * E ** 0.5 + self.embed_positions(torch.arange(2, ids.size(1) + 2))
        x = self.layernorm_embedding(x)
        for layer in self.layers:
            x = layer(x, memory, pad)
        return self.layer_norm(x)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Half(False, 2), Half(True, 2)
        self.register_buffer("final_logits_bias", torch.zeros(1, VOCAB))

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        pad = attention_mask == 0
        memory = self.encoder(input_ids, pad=pad)
        y = self.decoder(decoder_input_ids, memory=memory, pad=pad)
        return y @ self.decoder.embed_tokens.weight.T + self.final_logits_bias


def make():
    cfg = MBartConfig(vocab_size=VOCAB, d_model=E, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
                      decoder_attention_heads=HEADS, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
                      scale_embedding=True, pad_token_id=1, eos_token_id=2, bos_token_id=0, dropout=0.0)
    cfg._attn_implementation = "eager"
    reference = draw(MBartForConditionalGeneration(cfg), 44, std=0.3)
    port = Seq2Seq().eval()
    sd = {n.removeprefix("model."): w for n, w in reference.state_dict().items() if "shared" not in n and "lm_head" not in n}
    port.load_state_dict(sd)
    torch.manual_seed(4)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, 10:] = 0
    mask[1, 12:] = 0
    return port, reference, {"input_ids": torch.randint(3, VOCAB, (2, 13)), "attention_mask": mask,
                             "decoder_input_ids": torch.randint(3, VOCAB, (2, 11))}
