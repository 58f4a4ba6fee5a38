"""The implementations, in the order in which they appeared."""

from __future__ import annotations

from collections.abc import Mapping

from headwise.peers.annotated import Annotated
from headwise.peers.bert import Bert
from headwise.peers.einops_page import EinopsPage
from headwise.peers.gpt2 import GPT2
from headwise.peers.paper import Paper
from headwise.peers.peer import Peer
from headwise.peers.tensor2tensor import Tensor2Tensor
from headwise.peers.torch_layer import TorchLayer
from headwise.peers.x_transformers import XTransformers

PEERS: Mapping[str, type[Peer]] = {
    "paper": Paper,
    "tensor2tensor": Tensor2Tensor,
    "annotated": Annotated,
    "torch": TorchLayer,
    "einops": EinopsPage,
    "gpt2": GPT2,
    "bert": Bert,
    "x_transformers": XTransformers,
}
