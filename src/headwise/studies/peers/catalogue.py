"""The implementations, in the order in which they appeared."""

from __future__ import annotations

from collections.abc import Mapping

from headwise.studies.peers.annotated import Annotated
from headwise.studies.peers.bert import Bert
from headwise.studies.peers.einops_page import EinopsPage
from headwise.studies.peers.gpt2 import GPT2
from headwise.studies.peers.paper import Paper
from headwise.studies.peers.peer import Peer
from headwise.studies.peers.tensor2tensor import Tensor2Tensor
from headwise.studies.peers.torch_layer import TorchLayer
from headwise.studies.peers.x_transformers import XTransformers

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
