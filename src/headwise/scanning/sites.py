"""Attentions on the tape of a model, found by their products.

An attention is a product of two activations, the scores, that enters another product of two
activations, with the values. What lies between an operand and the projections before it, or
between the products and the projection after them, belongs to the attention.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from headwise.scanning.tape import ADDITIONS, MOVES, SCALINGS, SOFTMAXES, Node


@dataclass(frozen=True, eq=False)
class Products:
    """The two products of an attention, or of some of its heads."""

    scores: Node
    mixing: Node
    weights: Node  # the factor of the second that holds the first
    values: Node  # the other factor

    @property
    def queries(self) -> Node:
        """The factor of the scores that is on the side of the weights' rows."""
        return self.scores.factors[self.mixing.factors.index(self.weights)]

    @property
    def keys(self) -> Node:
        """The other factor of the scores."""
        return self.scores.factors[1 - self.mixing.factors.index(self.weights)]


@dataclass(frozen=True, eq=False)
class Site:
    """One attention of a run.

    Attributes:
        products: of the attention; one for each head where heads run one after the other.
        projection: the product with the output projection; None where there is none.
    """

    products: tuple[Products, ...]
    projection: Node | None

    @property
    def module(self) -> str:
        """The name of the module that attends, or else of that around the output projection."""
        name = self.products[0].mixing.module
        if name or self.projection is None:
            return name
        return self.projection.module.rpartition(".")[0]

    @cached_property
    def chains(self) -> dict[str, list[Node]]:
        """The tensors from the projection of q, k or v to the product, in the order of the run."""
        return {role: _walk_back(operands) for role, operands in self.operands.items()}

    @cached_property
    def sources(self) -> dict[str, list[Node]]:
        """The factors of the projections of q, k and v, the last first."""
        return {
            role: [node.projected for node in reversed(chain) if node.is_projection]
            for role, chain in self.chains.items()
        }

    @property
    def is_cross(self) -> bool:
        """True if keys are projected from another tensor than queries."""
        q, k = (self.sources[role][0].value if self.sources[role] else None for role in "qk")
        return q is None or k is None or q.shape != k.shape or not torch.equal(q, k)

    @cached_property
    def operands(self) -> dict[str, list[Node]]:
        """The factors of the products in the place of q, k and v."""
        roles = {"q": "queries", "k": "keys", "v": "values"}
        return {
            role: [getattr(each, name) for each in self.products] for role, name in roles.items()
        }

    def unscaled(self, role: str) -> list[Node]:
        """Return the factors of a role before a number multiplied them."""
        return [_unscale(node) for node in self.operands[role]]

    def projected(self, role: str) -> list[Node]:
        """Return the tensors of a role before anything but a bias or a scale changed them."""
        chain = self.chains[role]
        start = [node for node in chain if node.is_projection]
        return [*_follow_bias(start, {*chain})]

    def softmaxes(self) -> list[Node]:
        """Return what enters the last softmax, or exponential, of each pair of products."""
        entering = []
        for each in self.products:
            chain = _walk_back([each.weights])
            if softmax := [node for node in chain if node.operator in SOFTMAXES]:
                entering.append(next(x for x in softmax[-1].parents if x.is_activation))
        return entering

    def scores(self) -> list[list[Node]]:
        """Return the tensors from the first product to the second, for each pair."""
        return [_walk_back([each.weights]) for each in self.products]

    def outputs(self) -> list[Node]:
        """Return the output, before and after its bias."""
        start = self.products[0].mixing if self.projection is None else self.projection
        return [*_follow_bias([start], None)]

    def later(self) -> list[Node]:
        """Return the tensors after the output projection, up to the next products."""
        start = self.products[-1].mixing if self.projection is None else self.projection
        return list(_walk_on([start]))


def find_sites(nodes: Iterable[Node]) -> list[Site]:
    """Return the attentions, in the order in which they ran."""
    groups: dict[Node, list[Products]] = {}
    for node in nodes:
        if node.is_product and not node.is_projection and (products := _read_products(node)):
            after = next((x for x in _walk_on([node]) if x.is_product and x is not node), None)
            groups.setdefault(after if after is not None else node, []).append(products)
    return [
        Site(tuple(group), after if after.is_projection else None)
        for after, group in groups.items()
    ]


def _read_products(mixing: Node) -> Products | None:
    """Return the pair whose second product this is; None if it is no second one."""
    for weights, values in (mixing.factors, mixing.factors[::-1]):
        chain = _walk_back([weights])
        scores = [x for x in chain if x.is_product and not x.is_projection]
        if scores:
            return Products(scores[-1], mixing, weights, values)
    return None


def _walk_back(ends: Iterable[Node]) -> list[Node]:
    """Return the activations before some tensors, up to products, in the order of the run."""
    passed: dict[Node, None] = {}
    waiting = [*ends]
    while waiting:
        node = waiting.pop()
        if node in passed or not node.is_activation:
            continue
        passed[node] = None
        if not node.is_product:
            waiting += node.parents
    return sorted(passed, key=lambda node: node.order)


def _walk_on(starts: Iterable[Node]) -> Iterator[Node]:
    """Yield the tensors after some others, up to products, in the order of the run."""
    passed: set[Node] = set()
    waiting = [*starts]
    first = {*waiting}
    while waiting:
        node = min(waiting, key=lambda each: each.order)
        waiting.remove(node)
        if node in passed:
            continue
        passed.add(node)
        yield node
        if not node.is_product or node in first:
            waiting += node.children


def _is_scaled(node: Node) -> bool:
    return node.operator in SCALINGS and len(node.parents) == 1


def _unscale(node: Node) -> Node:
    before = node
    while node.operator in MOVES or _is_scaled(node):
        before = node.parents[0] if _is_scaled(node) else before
        [node] = node.parents
    return before


def _follow_bias(starts: Iterable[Node], within: set[Node] | None) -> Iterator[Node]:
    """Yield tensors, and what moves, biases and a scale make of them."""
    waiting = [*starts]
    while waiting:
        node = waiting.pop(0)
        if within is not None and node not in within:
            continue
        yield node
        for after in node.children:
            is_bias = after.operator in ADDITIONS and not all(
                x.is_activation for x in after.parents
            )
            if (after.operator in MOVES or is_bias or _is_scaled(after)) and not after.is_half:
                waiting.append(after)
