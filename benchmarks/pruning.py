"""Heads of all-MiniLM-L6-v2 taken out and merged in the plain way: ``make bench-pruning``.

This recipe of plain torch and transformers is the peer of `headwise.surgery`, which cuts the same
model in the same run. The recipe chooses heads by ablation on 200 sentences. It then compares the
embeddings of 200 other sentences with those of the original model, by their cosine. All tensors
keep their shapes: the columns of removed heads in the output projection are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, get_args

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.models.minilm import model_folder
from headwise.models.text import read_sentences
from headwise.surgery import ModelHeads, cut_model, fit
from headwise.surgery import prune as prune_by_headwise
from headwise.surgery.maps import How
from headwise.surgery.merge import merge_heads
from headwise.surgery.moments import record_products

Head = tuple[int, int]  # layer, head
Batches = list[Any]  # a tokenizer's: input_ids and attention_mask, (batch, length)
Repair = Callable[[nn.Linear, Tensor, Tensor], None]

BATCH, COUNTS, DRAWS, KV_HEADS = 16, (9, 18), 20, 6
RIDGE, RESAMPLES = 1e-3, 1000


def batches_of(sentences: Sequence[str], tokenizer: Any) -> Batches:
    """Batches of sentences by their number of tokens, so that little is padding."""
    ordered = sorted(sentences, key=lambda sentence: len(tokenizer.tokenize(sentence)))
    return [
        tokenizer(ordered[first : first + BATCH], padding=True, return_tensors="pt")
        for first in range(0, len(ordered), BATCH)
    ]


def embed(model: Any, batches: Batches) -> Tensor:
    """Embeddings (sentences, embed_dim): means over tokens without padding, of length 1."""
    means = []
    for batch in batches:
        real = batch["attention_mask"][..., None]
        means.append((model(**batch).last_hidden_state * real).sum(1) / real.sum(1))
    return F.normalize(torch.cat(means), dim=-1)


def projections(model: Any) -> list[nn.Linear]:
    """The output projection of each layer's attention."""
    return [layer.attention.output.dense for layer in model.encoder.layer]


def head_outputs(model: Any, batches: Batches) -> list[Tensor]:
    """What enters each output projection, (tokens, embed_dim), without padding."""
    rows: list[list[Tensor]] = [[] for _ in projections(model)]
    hooks = [
        dense.register_forward_pre_hook(lambda _, inputs, kept=kept: kept.append(inputs[0]))
        for dense, kept in zip(projections(model), rows, strict=True)
    ]
    for batch in batches:
        model(**batch)
        for kept in rows:
            kept[-1] = kept[-1][batch["attention_mask"].bool()]
    for hook in hooks:
        hook.remove()
    return [torch.cat(kept) for kept in rows]


def all_heads(model: Any) -> list[Head]:
    config = model.config
    layers, heads = range(config.num_hidden_layers), range(config.num_attention_heads)
    return [(layer, head) for layer in layers for head in heads]


# ---- repairs: an output projection, its removed columns, what enters it in the original ----------


def zeroed(dense: nn.Linear, removed: Tensor, _outputs: Tensor) -> None:
    dense.weight[:, removed] = 0


def mean(dense: nn.Linear, removed: Tensor, outputs: Tensor) -> None:
    """Zeroed, and the removed heads' mean output added to the bias."""
    dense.bias.add_(dense.weight[:, removed] @ outputs[:, removed].mean(0))
    dense.weight[:, removed] = 0


def refitted(dense: nn.Linear, removed: Tensor, outputs: Tensor) -> None:
    """Zeroed, and the kept columns and the bias fitted to the layer's output by ridge regression.

    The loss is the mean square error, and the squares of the kept columns times `RIDGE` of the mean
    variance of their inputs. The bias has no penalty.
    """
    middle = outputs.double().mean(0)
    centred, weight = outputs.double() - middle, dense.weight.double()
    kept = centred[:, ~removed]
    gram = kept.mT @ kept
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    fitted = torch.zeros_like(weight)
    fitted[:, ~removed] = torch.linalg.solve(gram, kept.mT @ (centred @ weight.mT)).mT
    dense.bias.add_((weight - fitted) @ middle)
    dense.weight.copy_(fitted)


PLAIN: dict[str, Repair] = {"zero": zeroed, "mean": mean, "refit": refitted}  # by ours


def prune(model: Any, heads: Sequence[Head], repair: Repair, outputs: Sequence[Tensor]) -> Any:
    """A copy of the model without these heads."""
    pruned = deepcopy(model)
    width = model.config.hidden_size // model.config.num_attention_heads
    for layer, dense in enumerate(projections(pruned)):
        removed = torch.zeros(model.config.num_attention_heads, dtype=torch.bool)
        removed[[head for at, head in heads if at == layer]] = True
        if removed.any():
            repair(dense, removed.repeat_interleave(width), outputs[layer])
    return pruned


def regroup(model: Any, kv_heads: int) -> Any:
    """A copy in which neighbours share the mean of their key and value projections."""
    grouped = deepcopy(model)
    heads = model.config.num_attention_heads
    for layer in grouped.encoder.layer:
        for projection in (layer.attention.self.key, layer.attention.self.value):
            for tensor in (projection.weight, projection.bias):
                groups = tensor.view(kv_heads, heads // kv_heads, -1)
                groups.copy_(groups.mean(1, keepdim=True).expand_as(groups))
    return grouped


# ---- measurement -------------------------------------------------------------------------------


def cosines(model: Any, batches: Batches, original: Tensor) -> Tensor:
    """The cosine of each sentence's embedding with the original's."""
    return (embed(model, batches) * original).sum(-1)


def by_ablation(model: Any, batches: Batches, outputs: Sequence[Tensor]) -> list[Head]:
    """All heads, those first whose removal moves the embeddings least."""
    original = embed(model, batches)
    likeness = {
        head: cosines(prune(model, [head], zeroed, outputs), batches, original).mean().item()
        for head in track(all_heads(model), "ablation", transient=True)
    }
    return sorted(likeness, key=likeness.__getitem__, reverse=True)


def draw(heads: Sequence[Head], count: int, seed: int) -> list[Head]:
    """Some heads at random."""
    order = torch.randperm(len(heads), generator=torch.Generator().manual_seed(seed))
    return [heads[i] for i in order[:count]]


def interval(differences: Tensor) -> tuple[float, float]:
    """The middle 95 % of the mean, over `RESAMPLES` draws of as many sentences with replacement."""
    generator = torch.Generator().manual_seed(0)
    count = len(differences)
    rows = torch.randint(count, (RESAMPLES, count), generator=generator)
    means = differences.double()[rows].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    return low, high


# ---- the same by headwise ------------------------------------------------------------------------


def cut_by_headwise(model: Any, to_fit: Batches, held_out: Batches, count: int) -> dict[str, Any]:
    """The model without so many heads, by repair; headwise chooses the heads."""
    keep = 1 - count / len(all_heads(model))
    inputs = [dict(batch) for batch in to_fit]
    others = [dict(batch) for batch in held_out]
    return {
        repair: prune_by_headwise(model, inputs, held_out=others, keep=keep, repair=repair).model
        for repair in track(get_args(fit.Repair), "headwise", transient=True)
    }


def merged_by_headwise(model: Any, to_fit: Batches) -> dict[str, Any]:
    """The model with `KV_HEADS` kv heads in each layer, by the way they are merged."""
    heads = ModelHeads(model)
    products = record_products(heads, [dict(batch) for batch in to_fit])
    return {
        f"{how}, {'least loss' if alike else 'neighbours'}": cut_model(
            merge_heads(heads, products, KV_HEADS, how, alike=alike)[0], model
        )
        for how in get_args(How)[::-1]
        for alike in (False, True)
    }


# ---- the table ---------------------------------------------------------------------------------


def add_row(table: Table, cut: str, repair: str, kept: Tensor, *peer: Any) -> None:
    """Add a mean cosine, and how far it is above that of a peer: its name, its cosines."""
    compared = ("", "")
    if peer:
        low, high = interval(kept - peer[1])
        compared = peer[0], f"{low:+.4f} to {high:+.4f}"
    table.add_row(cut, repair, f"{kept.mean():.4f}", *compared)


@torch.no_grad()
def main() -> None:
    """Print one table: what the embeddings of held-out sentences keep."""
    import transformers

    folder = model_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    to_fit, held_out = (batches_of(half, tokenizer) for half in read_sentences())
    outputs, original = head_outputs(model, to_fit), embed(model, held_out)
    measure = partial(cosines, batches=held_out, original=original)
    order = by_ablation(model, to_fit, outputs)
    table = Table("cut", "repair", "mean cosine", "more than", "by, 95 %")
    plain = {
        (count, repair): measure(prune(model, order[:count], repair, outputs))
        for count in COUNTS
        for repair in PLAIN.values()
    }
    for (count, repair), kept in plain.items():
        base = () if repair is zeroed else ("zeroed", plain[count, zeroed])
        add_row(table, f"{count} by ablation", repair.__name__, kept, *base)
    most = COUNTS[-1]
    ours = {
        name: measure(made) for name, made in cut_by_headwise(model, to_fit, held_out, most).items()
    }
    for name, kept in ours.items():
        peer = PLAIN[name]
        add_row(table, f"{most} by headwise", name, kept, peer.__name__, plain[most, peer])
    for peer_name, peer_kept in (("mean", plain[most, mean]), ("mean by headwise", ours["mean"])):
        add_row(table, f"{most} by headwise", "refit", ours["refit"], peer_name, peer_kept)
    for repair in (zeroed, mean):
        draws = [draw(order, most, seed) for seed in range(DRAWS)]
        kept = torch.stack(
            [
                measure(prune(model, heads, repair, outputs)).mean()
                for heads in track(draws, "random draws", transient=True)
            ]
        )
        what = f"{most} at random, {DRAWS} draws"
        table.add_row(what, repair.__name__, f"{kept.min():.4f} to {kept.max():.4f}", "", "")
    mean_kept = measure(regroup(model, KV_HEADS))
    add_row(table, f"{KV_HEADS} kv heads", "mean of neighbours", mean_kept)
    for name, made in merged_by_headwise(model, to_fit).items():
        add_row(
            table, f"{KV_HEADS} by headwise", name, measure(made), "mean of neighbours", mean_kept
        )
    console = Console(width=max(100, Console().width))
    console.print(table)
    console.print("heads in order:", *(f"{layer}.{head}" for layer, head in order[:most]))


if __name__ == "__main__":
    main()
