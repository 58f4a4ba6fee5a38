"""BART as in fairseq, on torch's MultiheadAttention: facebookresearch/fairseq, fairseq/models/bart.

`BARTModel.forward(input_ids, attention_mask, decoder_input_ids)` takes ids of the source, their 0/1
mask and ids of the target, all of (batch, tokens), and returns logits for each token of the target.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

PEER = (
    "BartForConditionalGeneration",
    {
        "vocab_size": 71,
        "d_model": 60,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 5,
        "decoder_attention_heads": 6,
        "encoder_ffn_dim": 88,
        "decoder_ffn_dim": 92,
        "max_position_embeddings": 40,
        "scale_embedding": True,
        "init_std": 0.2,
    },
)

ARGS = {
    "vocab": 71,
    "encoder_embed_dim": 60,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 6,
    "encoder_ffn_embed_dim": 88,
    "decoder_ffn_embed_dim": 92,
    "max_positions": 40,
}
PADDING_IDX = 1


class LearnedPositionalEmbedding(nn.Embedding):
    """Positions begin after the padding symbol."""

    def __init__(self, num_embeddings, embedding_dim, padding_idx):
        super().__init__(num_embeddings + padding_idx + 1, embedding_dim)
        self.first = padding_idx + 1

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1)) + self.first
        return super().forward(positions)


class TransformerEncoderLayer(nn.Module):
    def __init__(self, args):
        super().__init__()
        dim = args["encoder_embed_dim"]
        self.self_attn = nn.MultiheadAttention(dim, args["encoder_attention_heads"])
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, args["encoder_ffn_embed_dim"])
        self.fc2 = nn.Linear(args["encoder_ffn_embed_dim"], dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, x, encoder_padding_mask):
        # x: T x B x C
        residual = x
        x, _ = self.self_attn(x, x, x, key_padding_mask=encoder_padding_mask, need_weights=False)
        x = self.self_attn_layer_norm(residual + x)

        residual = x
        x = self.fc2(F.gelu(self.fc1(x)))
        return self.final_layer_norm(residual + x)


class TransformerDecoderLayer(nn.Module):
    def __init__(self, args):
        super().__init__()
        dim = args["encoder_embed_dim"]
        heads = args["decoder_attention_heads"]
        self.self_attn = nn.MultiheadAttention(dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.encoder_attn = nn.MultiheadAttention(dim, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, args["decoder_ffn_embed_dim"])
        self.fc2 = nn.Linear(args["decoder_ffn_embed_dim"], dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, x, encoder_out, encoder_padding_mask, self_attn_mask):
        residual = x
        x, _ = self.self_attn(x, x, x, attn_mask=self_attn_mask, need_weights=False)
        x = self.self_attn_layer_norm(residual + x)

        residual = x
        x, _ = self.encoder_attn(
            x, encoder_out, encoder_out, key_padding_mask=encoder_padding_mask, need_weights=False
        )
        x = self.encoder_attn_layer_norm(residual + x)

        residual = x
        x = self.fc2(F.gelu(self.fc1(x)))
        return self.final_layer_norm(residual + x)


class TransformerEncoder(nn.Module):
    def __init__(self, args, embed_tokens):
        super().__init__()
        dim = args["encoder_embed_dim"]
        self.embed_tokens = embed_tokens
        self.embed_scale = math.sqrt(dim)
        self.embed_positions = LearnedPositionalEmbedding(args["max_positions"], dim, PADDING_IDX)
        self.layernorm_embedding = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(
            [TransformerEncoderLayer(args) for _ in range(args["encoder_layers"])]
        )

    def forward(self, src_tokens, encoder_padding_mask):
        x = self.embed_scale * self.embed_tokens(src_tokens) + self.embed_positions(src_tokens)
        x = self.layernorm_embedding(x)
        x = x.transpose(0, 1)  # B x T x C -> T x B x C
        for layer in self.layers:
            x = layer(x, encoder_padding_mask)
        return x


class TransformerDecoder(nn.Module):
    def __init__(self, args, embed_tokens):
        super().__init__()
        dim = args["encoder_embed_dim"]
        self.embed_tokens = embed_tokens
        self.embed_scale = math.sqrt(dim)
        self.embed_positions = LearnedPositionalEmbedding(args["max_positions"], dim, PADDING_IDX)
        self.layernorm_embedding = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(
            [TransformerDecoderLayer(args) for _ in range(args["decoder_layers"])]
        )

    def buffered_future_mask(self, x):
        future = torch.full((x.size(0), x.size(0)), float("-inf"), dtype=x.dtype)
        return torch.triu(future, 1)

    def forward(self, prev_output_tokens, encoder_out, encoder_padding_mask):
        x = self.embed_scale * self.embed_tokens(prev_output_tokens)
        x = x + self.embed_positions(prev_output_tokens)
        x = self.layernorm_embedding(x)
        x = x.transpose(0, 1)
        self_attn_mask = self.buffered_future_mask(x)
        for layer in self.layers:
            x = layer(x, encoder_out, encoder_padding_mask, self_attn_mask)
        x = x.transpose(0, 1)
        return F.linear(x, self.embed_tokens.weight)


class BARTModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        embed_tokens = nn.Embedding(args["vocab"], args["encoder_embed_dim"], PADDING_IDX)
        self.encoder = TransformerEncoder(args, embed_tokens)
        self.decoder = TransformerDecoder(args, embed_tokens)

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        encoder_padding_mask = attention_mask.eq(0)  # true where nothing is
        encoder_out = self.encoder(input_ids, encoder_padding_mask)
        return self.decoder(decoder_input_ids, encoder_out, encoder_padding_mask)


def fuse(state, prefix):
    """Return the three projections of one attention as torch's fused ones."""
    fused = {}
    for part in ("weight", "bias"):
        rows = [state[f"{prefix}.{role}_proj.{part}"] for role in ("q", "k", "v")]
        fused[f"{prefix}.in_proj_{part}"] = torch.cat(rows)
        fused[f"{prefix}.out_proj.{part}"] = state[f"{prefix}.out_proj.{part}"]
    return fused


def make(peer):
    state = {
        name.removeprefix("model."): tensor
        for name, tensor in peer.state_dict().items()
        if "shared" not in name and name not in ("final_logits_bias", "lm_head.weight")
    }
    model = BARTModel(ARGS).to(peer.dtype)
    converted = {name: tensor for name, tensor in state.items() if "_attn." not in name}
    for name, part in model.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            converted.update(fuse(state, name))
    model.load_state_dict(converted)
    return model


def inputs(generator):
    return {
        "input_ids": torch.randint(2, 71, (2, 18), generator=generator),
        "attention_mask": (torch.arange(18) < torch.tensor([16, 12])[:, None]).long(),
        "decoder_input_ids": torch.randint(2, 71, (2, 15), generator=generator),
    }
