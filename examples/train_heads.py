"""Train a small model whose attention heads are divided over processes.

    torchrun --nproc-per-node=2 examples/train_heads.py

The task: a sequence of random tokens, twice; the second time can be predicted. Every process holds
the whole batch, and its share of the heads. At the end the same training runs on one process alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from headwise import Attention, Mask, Rotary
from headwise.layers import QKNorm
from headwise.sharding import clip_gradients, gather_state, heads_plan

TOKENS, WIDTH, HEADS, KV_HEADS, LENGTH, BATCH, STEPS = 32, 64, 8, 4, 24, 32, 60


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention(
            WIDTH, HEADS, num_kv_heads=KV_HEADS, rotary=Rotary(), qk_norm=QKNorm()
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), mask=Mask.causal())
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.unembedding = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.unembedding(self.blocks(self.embedding(tokens)))


def new_model() -> Model:
    torch.manual_seed(0)  # the same weights on every rank
    return Model().double()


def train(model: nn.Module) -> list[float]:
    generator = torch.Generator().manual_seed(1)  # the same batches on every rank
    # foreach=False, since some parameters are DTensors and others are not.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(STEPS):
        first = torch.randint(TOKENS, (BATCH, LENGTH // 2), generator=generator)
        tokens = torch.cat([first, first], dim=1)
        logits = model(tokens[:, :-1])[:, LENGTH // 2 :]
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, LENGTH // 2 + 1 :])
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(model.parameters(), max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = new_model()
    parallelize_module(model, mesh, heads_plan(model))
    part = model.blocks[0].attention.part
    print(f"rank {dist.get_rank()} computes {part} of {HEADS}", flush=True)
    losses = train(model)
    state = gather_state(model)  # on every rank, in the form of the unsharded model

    if dist.get_rank() == 0:
        for step in range(0, STEPS, 10):
            print(f"step {step:>2}: loss {losses[step]:.4f}")
        alone = new_model()
        pairs = zip(losses, train(alone), strict=True)
        apart = max(abs(first - second) for first, second in pairs)
        print(f"loss {losses[-1]:.4f}; one process alone: {apart:.1e} apart")
        weights = max(float((state[n] - x).abs().max()) for n, x in alone.state_dict().items())
        print(f"weights: {weights:.1e} apart")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
