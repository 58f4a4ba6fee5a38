"""Causes that move, change or drop rows of the projections: each is a move of `diagnosis.moves`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.projections import (
    STAGE_OF,
    apply_moves_to_model,
    find_projection_moves,
)
from headwise.diagnosis.moves.changes import ROUNDED, Rounded, format_dtype
from headwise.diagnosis.moves.maps import MapName
from headwise.diagnosis.moves.move import Move
from headwise.diagnosis.moves.state import extract_rows, replace_rows
from headwise.diagnosis.simulation.model import AttentionModel


class MovedProjectionsCause(Cause):
    """Rows of the projections are in the wrong places, or changed all alike."""

    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the moves of rows that have this name.

        The rows of q, k and v are their channels over all tokens. Each is looked up among the rows
        of the other layer. Moves of the output projection are tried on recorded head outputs.
        """
        for moves in find_projection_moves(evidence):
            # Moves of separate roles are causes of their own.
            for place, move in enumerate(moves):
                name = self._matching_name(move)
                if name is not None:
                    later = {role for after in moves[place + 1 :] for role in after.roles}
                    yield Variant(
                        apply_moves_to_model(evidence.model, (move,)),
                        _cause_parameters(name),
                        self.remedy(name),
                        is_step=not later.isdisjoint(move.roles),
                    )

    def exchange_weights_of_roles(
        self, model: AttentionModel, first: str, second: str
    ) -> Iterator[Variant]:
        """Yield the model with the weights of two roles exchanged, if they have one shape.

        In cross attention the rows of queries are channels over other tokens than those of keys,
        so that they cannot be looked up among them.
        """
        weights = model.weights
        if weights[f"w{first}"].shape != weights[f"w{second}"].shape:
            return
        pairs = [(f"{kind}{first}", f"{kind}{second}") for kind in "wb"]
        changes = {a: weights.get(b) for a, b in pairs} | {b: weights.get(a) for a, b in pairs}
        where = f"w{first}, w{second}"
        yield Variant(
            model.with_weights(**changes),
            {"roles": first + second},
            f"undo it in {where}: {self.name}",
        )

    def _matching_name(self, move: Move) -> MapName | None:
        return next((each for each in (move.name, *move.equals) if each.cause == self.name), None)


def _cause_parameters(name: MapName) -> dict[str, object]:
    return {"roles": "".join(name.roles), **dict(name.parameters)}


class QAndKExchangedCause(MovedProjectionsCause):
    """The queries have the rows of the keys, and the keys those of the queries.

    The scores are k @ q.T in place of q @ k.T. Each token attends to those that should attend to
    it.

    Repair:
        Exchange wq and wk, with their biases.

    Confused with:
        order of fused rows: if the file fuses the three.
        rotary axis: with positions from the end, scores are transposed as well.
    """

    name: ClassVar[str] = "q and k exchanged"
    symptom: ClassVar[str] = "The attention map looks transposed: queries and keys are swapped"
    stages: ClassVar[tuple[str, ...]] = ("q", "k")
    cost: ClassVar[float] = 1.0

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the moves of rows with this name; in cross attention, the exchanged weights."""
        yield from super().variants(evidence)
        if any(call.inputs.source is not None for call in evidence.calls):
            yield from self.exchange_weights_of_roles(evidence.model, "q", "k")


class QAndVExchangedCause(MovedProjectionsCause):
    """The queries have the rows of the values, and the values those of the queries.

    Files that name the projections in the order of the alphabet (k, out, q, v) have no order of
    use. Read tensors by name.

    Repair:
        Exchange wq and wv, with their biases.

    Confused with:
        order of fused rows: if the file fuses the three.
    """

    name: ClassVar[str] = "q and v exchanged"
    symptom: ClassVar[str] = (
        "Ported weights load, and only the keys agree: queries and values swapped"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "v")
    cost: ClassVar[float] = 1.0

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the moves of rows with this name; in cross attention, the exchanged weights."""
        yield from super().variants(evidence)
        if any(call.inputs.source is not None for call in evidence.calls):
            yield from self.exchange_weights_of_roles(evidence.model, "q", "v")


class KAndVExchangedCause(MovedProjectionsCause):
    """The keys have the rows of the values, and the values those of the keys.

    Files that name k before v, or fuse [q, v, k], have been read in the usual order. CodeGen stores
    q, v, k.

    Wrong:
        q, k, v = fused.chunk(3)  # of rows stored as [q|v|k]

    Right:
        q, v, k = fused.chunk(3)

    Repair:
        Exchange wk and wv, with their biases.

    Confused with:
        order of fused rows: if the file fuses the three.
    """

    name: ClassVar[str] = "k and v exchanged"
    symptom: ClassVar[str] = (
        "Ported weights load without an error, and every output is wrong: keys and values swapped"
    )
    stages: ClassVar[tuple[str, ...]] = ("k", "v")
    cost: ClassVar[float] = 1.0


class FusedRowOrderCause(MovedProjectionsCause):
    """A fused projection is stored in one order of q, k and v, and read in another.

    Most files store [q|k|v]. CodeGen stores q, v, k in four blocks of heads.

    Wrong:
        q, k, v = fused.chunk(3)

    Right:
        k, v, q = fused.chunk(3)  # in the order of the file

    Repair:
        Name the layout of the file with `--from`, or exchange the blocks.

    Confused with:
        q and k exchanged: in separate projections, it is the same.
        k and v exchanged: likewise.
        nesting of fused rows: with one head.
    """

    name: ClassVar[str] = "order of fused rows"
    symptom: ClassVar[str] = (
        "Fused qkv weights load, and every output is wrong: another order of q, k and v"
    )
    cost: ClassVar[float] = 1.02


class FusedRowGroupsCause(MovedProjectionsCause):
    """A fused projection is stored by kv groups and read as [q|k|v], or the reverse.

    Megatron, Falcon-40B and InternLM2 store group by group: some query heads, their key head, their
    value head. The shape is the same as that of [q|k|v]. With one kv head the two orders are equal.

    Wrong:
        q, k, v = fused.split([heads * d, kv_heads * d, kv_heads * d])

    Right:
        by_group = fused.reshape(kv_heads, heads // kv_heads + 2, d, width)
        q, k, v = by_group[:, :-2], by_group[:, -2], by_group[:, -1]

    Repair:
        Name the layout of the file: `headwise convert MODEL OUT --from megatron --to llama`.
        `headwise detect MODEL` names the layouts that fit.

    Confused with:
        nesting of fused rows: with as many kv heads as heads, where groups are heads.
        shards joined in the wrong order: tensor-parallel shards of [q|k|v] look like groups.
    """

    name: ClassVar[str] = "kv groups of fused rows"
    symptom: ClassVar[str] = (
        "Grouped-query weights from Megatron, Falcon-40B or InternLM2 give gibberish"
    )
    cost: ClassVar[float] = 1.03


class FusedRowNestingCause(MovedProjectionsCause):
    """A fused projection is stored as (3, heads, d) and read as (heads, 3, d), or the like.

    GPT-NeoX, BLOOM and Falcon-RW store q, k and v of head 0, then those of head 1. GPT-2, MPT and
    timm store all of q, all of k, all of v. The shape is the same, and so are the first rows.

    Wrong:
        q, k, v = fused.reshape(3, heads, d, width)  # GPT-NeoX

    Right:
        q, k, v = fused.reshape(heads, 3, d, width).unbind(1)

    Repair:
        Name the layout of the file: `headwise convert MODEL OUT --from neox --to llama`.

    Confused with:
        kv groups of fused rows: with as many kv heads as heads.
        order of fused rows: with one head.
    """

    name: ClassVar[str] = "nesting of fused rows"
    symptom: ClassVar[str] = (
        "Fused qkv weights of GPT-NeoX, BLOOM or Falcon load, and only the first head of q agrees"
    )
    cost: ClassVar[float] = 1.03


class HeadsInterleavedCause(MovedProjectionsCause):
    """Rows are stored (head_dim, heads) and read (heads, head_dim), or the reverse.

    Both orders have heads * head_dim rows. With one head, or one channel a head, they are equal.

    Wrong:
        wq.reshape(head_dim, heads, width)  # of rows stored as (heads, head_dim)

    Right:
        wq.reshape(heads, head_dim, width)

    Repair:
        Read the rows in the order in which they are stored: `headwise layouts show LAYOUT` draws
        it.

    Confused with:
        heads permuted: if a head has one channel.
        rotary permutation with a wrong number of heads: with two heads, a permutation made for one.
    """

    name: ClassVar[str] = "heads interleaved"
    symptom: ClassVar[str] = (
        "Shapes fit, and every head holds some channels of all heads: (heads, head_dim) exchanged"
    )
    cost: ClassVar[float] = 1.04


class HeadsPermutedCause(MovedProjectionsCause):
    """Whole heads of a projection are in another order.

    The order of heads is free, if q, k, v and the columns of the output projection share it.
    `compare` then answers "same function, other weights". In a single projection, another order
    makes another function.

    Repair:
        Take the heads in the order that is reported, in every projection that has another one.

    Confused with:
        shards joined in the wrong order: shards hold whole heads.
        kv heads tiled instead of repeated: both permute the heads of q and of the output.
        output heads in another group order: a permutation that kv groups make.
    """

    name: ClassVar[str] = "heads permuted"
    symptom: ClassVar[str] = "All heads are there, in another order"
    cost: ClassVar[float] = 1.05


class OutputGroupOrderCause(MovedProjectionsCause):
    """The output projection takes heads as (group, kv_heads) that are (kv_heads, group).

    Head outputs are joined before the output projection. Code for grouped queries often has an axis
    for kv heads and an axis for the queries of a group. Their order is that of the columns of the
    output projection.

    Wrong:
        outputs.permute(0, 3, 2, 1, 4).flatten(2)  # (batch, length, group, kv_heads, d)

    Right:
        outputs.permute(0, 3, 1, 2, 4).flatten(2)  # (batch, length, kv_heads, group, d)

    Repair:
        Join kv heads first, then the queries of a group.

    Confused with:
        kv heads tiled instead of repeated: if q has the same order.
        heads permuted: the order is one of the permutations of heads.
    """

    name: ClassVar[str] = "output heads in another group order"
    symptom: ClassVar[str] = (
        "Head outputs agree and the output does not, in grouped-query attention"
    )
    cost: ClassVar[float] = 1.04


class OutputReshapedCause(MovedProjectionsCause):
    """The output projection is reshaped from (out_dim, heads, value_dim), axes exchanged.

    Flax, Keras and MaxText store the output projection with an axis for heads. A reshape to a
    matrix must keep the order of the axes; a permutation needs a transpose.

    Wrong:
        wo.reshape(out_dim, heads * d)  # of (heads, d, out_dim)

    Right:
        wo.reshape(heads * d, out_dim).T

    Repair:
        Transpose before the reshape, or name the layout of the file: `--from flax`.

    Confused with:
        square matrix transposed: with one head.
    """

    name: ClassVar[str] = "output projection reshaped with exchanged axes"
    symptom: ClassVar[str] = (
        "Head outputs agree and the output does not: the output projection was reshaped wrongly"
    )
    cost: ClassVar[float] = 1.05


class ShardOrderCause(MovedProjectionsCause):
    """Shards of a projection are joined in the wrong order.

    q, k and v are split by rows, the output projection by columns. A fused projection holds q, k
    and v of rank 0, then those of rank 1. File names in the order of the alphabet put rank 10
    before rank 2.

    Wrong:
        fused = torch.cat(shards)

    Right:
        parts = [shard.split([q_rows, kv_rows, kv_rows]) for shard in shards]
        fused = torch.cat([torch.cat(role) for role in zip(*parts)])

    Repair:
        Join the shards in the order of ranks, each of q, k and v by itself.

    Confused with:
        heads permuted: shards of one projection hold whole heads.
        kv groups of fused rows: with one kv head a rank.
    """

    name: ClassVar[str] = "shards joined in the wrong order"
    symptom: ClassVar[str] = (
        "A checkpoint merged from several tensor-parallel ranks gives gibberish"
    )
    cost: ClassVar[float] = 1.06


class RotaryPermutationMissingCause(MovedProjectionsCause):
    """Rows of queries or keys keep the order of the pairing that they were stored for.

    Meta's weights are for interleaved pairs, those of Hugging Face for half-split ones. The
    conversion permutes the rows of wq and wk in every head.

    Wrong:
        state["q_proj.weight"] = meta["wq.weight"]

    Right:
        rows = meta["wq.weight"].reshape(heads, d // 2, 2, width)
        state["q_proj.weight"] = rows.transpose(1, 2).reshape(heads * d, width)

    Repair:
        `headwise convert MODEL OUT --from llama-meta --to llama`.

    Confused with:
        rotary pairing: the same outputs, by the code of the rotation in place of the rows.
        rotary permutation doubled: with four channels a head, the permutation is its own inverse.
    """

    name: ClassVar[str] = "rotary permutation missing"
    symptom: ClassVar[str] = (
        "A Llama checkpoint of Meta gives gibberish in Hugging Face: q and k rows are not permuted"
    )
    cost: ClassVar[float] = 1.01


class RotaryPermutationDoubledCause(MovedProjectionsCause):
    """Rows are permuted to another pairing though they had it, or are values, which do not rotate.

    `convert_llama_weights_to_hf` and llama.cpp's `permute` expect rows of one pairing. Files of
    both pairings have the same names in torchtune and in Hugging Face. Rows of values stay in
    their places in every conversion.

    Repair:
        Convert the original file once, with the layout that it has: `--from llama-meta` for Meta's.

    Confused with:
        rotary permutation missing: with four channels a head, the permutation is its own inverse.
        rotary permutation with a wrong number of heads: for some numbers of heads.
    """

    name: ClassVar[str] = "rotary permutation doubled"
    symptom: ClassVar[str] = (
        "A Llama checkpoint that was already converted gives gibberish after a second conversion"
    )
    cost: ClassVar[float] = 1.01


class RotaryPermutationHeadsCause(MovedProjectionsCause):
    """Rows of queries or keys are permuted as if there were another number of heads.

    The permutation of the rotation is done in every head. Keys have kv_heads heads, fewer than
    queries.

    Wrong:
        permute(wk, heads)

    Right:
        permute(wk, kv_heads)

    Repair:
        Permute wk with the number of kv heads.

    Confused with:
        rotary permutation missing: for some sizes.
        heads interleaved: with two heads, a permutation made for one.
    """

    name: ClassVar[str] = "rotary permutation with a wrong number of heads"
    symptom: ClassVar[str] = (
        "A Llama with grouped queries gives gibberish after a conversion: k permuted for all heads"
    )
    cost: ClassVar[float] = 1.02


class MatrixTransposedCause(MovedProjectionsCause):
    """A square projection is stored as its transpose.

    GPT-2's Conv1D, Flax and Keras store (in, out), `torch.nn.Linear` stores (out, in). A square
    matrix raises no error.

    Wrong:
        linear.weight.copy_(conv1d.weight)

    Right:
        linear.weight.copy_(conv1d.weight.T)

    Repair:
        Transpose the matrix that is reported, or name the layout of the file: `--from gpt2`.

    Confused with:
        output projection reshaped with exchanged axes: with one head.
    """

    name: ClassVar[str] = "square matrix transposed"
    symptom: ClassVar[str] = (
        "Weights of GPT-2's Conv1D load into Linear without an error, and c_proj is wrong"
    )
    cost: ClassVar[float] = 1.02

    def remedy(self, name: MapName) -> str:
        """See `Cause.remedy`."""
        return f"transpose {', '.join(f'w{role}' for role in name.roles)}: weight.mT"


class ProjectionRowsZeroCause(MovedProjectionsCause):
    """Rows of a projection were never loaded, and are zero.

    A loader that makes empty tensors and finds no name for them leaves zeros. Shards that were not
    read do the same for some heads.

    Repair:
        Load the tensors that are reported, and use `load_state_dict(..., strict=True)`.

    Confused with:
        bias missing: of biases alone.
        weights at their initial values: loaders that make usual initial values in place of zeros.
    """

    name: ClassVar[str] = "rows zero"
    symptom: ClassVar[str] = (
        "Some heads, or the whole attention output, are zero: weights that were never loaded"
    )
    cost: ClassVar[float] = 1.07


class ProjectionSignCause(MovedProjectionsCause):
    """Rows of a projection have the other sign.

    Repair:
        Multiply the rows that are reported by -1.

    Confused with:
        factor: a factor of -1.
    """

    name: ClassVar[str] = "sign"
    symptom: ClassVar[str] = "A projection has the right size and the wrong sign"
    cost: ClassVar[float] = 1.07


class ProjectionFactorCause(MovedProjectionsCause):
    """Rows of a projection are multiplied by a number.

    MaxText stores queries that are divided by sqrt(head_dim) already. A quantised file read without
    its scales, and an adapter merged with another alpha / rank, differ by a factor as well.

    Repair:
        Divide the rows by the number that is reported, or set `scale` accordingly if they are those
        of q or k alone.

    Confused with:
        scale: a factor of all queries gives the same scores as a factor of the scale.
        sign: a factor of -1.
        rows zero: a factor of 0.
    """

    name: ClassVar[str] = "factor"
    symptom: ClassVar[str] = (
        "Queries, keys or values are too large or too small by the same factor everywhere"
    )
    cost: ClassVar[float] = 1.08


class RoundedWeightsCause(Cause):
    """The weights were stored in another dtype once.

    A cast to bfloat16 keeps 8 bits of each weight. A cast back to float32 does not bring the others
    back.

    Repair:
        Load the weights from the file in the wider dtype.

    Confused with:
        softmax dtype: in the outputs alone, of about the same size.
    """

    name: ClassVar[str] = "dtype's rounding of weights"
    symptom: ClassVar[str] = (
        "Outputs differ by some parts in a thousand everywhere: weights were saved in bfloat16"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")
    cost: ClassVar[float] = 1.0

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the models after a rounding of the projections that parted."""
        rows = extract_rows(evidence.model.weights)
        roles = tuple(
            role for role in rows.roles if evidence.parted_calls_and_heads(STAGE_OF[role])
        )
        for dtype in ROUNDED:
            for parts in (("weights", "biases"), ("weights",)):
                rounded = Rounded(roles, dtype, parts).apply(rows)
                weights = replace_rows(evidence.model.weights, rounded)
                if "bo" in weights and "biases" in parts and "o" in roles:
                    weights["bo"] = weights["bo"].to(dtype).to(weights["bo"].dtype)
                yield Variant(
                    evidence.model.with_weights(**weights),
                    {"roles": "".join(roles), "dtype": str(dtype)},
                    _wider_dtype_advice(format_dtype(dtype)),
                )

    def remedy(self, name: MapName) -> str:
        """See `Cause.remedy`."""
        return _wider_dtype_advice(name.text)


def _wider_dtype_advice(dtype: str) -> str:
    return f"load the weights in a wider dtype than {dtype}"


class MissingBiasesCause(Cause):
    """Projections lack their biases, or the biases are zero.

    Qwen2 and GLM have biases in q, k and v, and none in the output projection. Whisper has none in
    k. A loader that ignores unexpected names drops them silently. A bias of k cancels in the
    softmax if keys are neither rotated nor normalised: the two are then the same function.

    Repair:
        Load the biases that are reported, and use `load_state_dict(..., strict=True)`.

    Confused with:
        rows zero: if the weights are missing as well.
    """

    name: ClassVar[str] = "bias missing"
    symptom: ClassVar[str] = (
        "Outputs are off by a constant: biases of the checkpoint (Qwen2, GPT-2) were not loaded"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")
    cost: ClassVar[float] = 1.0

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the models without the biases of the stages that parted, all and each."""
        parted = {
            f"b{role}": stage
            for role, stage in STAGE_OF.items()
            if evidence.parted_calls_and_heads(stage) and f"b{role}" in evidence.model.weights
        }
        for names in dict.fromkeys((tuple(parted), *((name,) for name in parted))):
            if names:
                model = evidence.model.with_weights(**dict.fromkeys(names))
                roles = "".join(name[1:] for name in names)
                yield Variant(model, {"roles": roles}, _bias_loading_advice(roles))

    def remedy(self, name: MapName) -> str:
        """See `Cause.remedy`."""
        return _bias_loading_advice(name.roles)


def _bias_loading_advice(roles: Iterable[str]) -> str:
    return f"load the biases {', '.join(f'b{role}' for role in roles)}"
