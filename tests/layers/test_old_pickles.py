"""Whole layers that an earlier version pickled are refused by name, with the way to load them."""

import io
import pickle
import re
import sys
from types import ModuleType

import pytest
import torch

from headwise import Attention, MultiheadAttention

OLD = {"headwise.layer.attention": Attention, "headwise.drop_in.layer": MultiheadAttention}


@pytest.mark.parametrize(("module", "kind"), OLD.items(), ids=OLD)
def test_a_pickle_that_names_an_old_module(module: str, kind: type) -> None:
    with pytest.raises(ModuleNotFoundError, match="state_dict") as error:
        pickle.loads(f"c{module}\n{kind.__name__}\n.".encode())
    assert str(error.value).startswith(f"{module.rpartition('.')[0]} is a module of an earlier")


@pytest.mark.parametrize(("module", "kind"), OLD.items(), ids=OLD)
def test_a_file_of_a_whole_layer(module: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    with monkeypatch.context() as patch:
        for name in (module.rpartition(".")[0], module):
            patch.setitem(sys.modules, name, ModuleType(name))
        old = type(kind.__name__, (kind,), {"__module__": module})
        patch.setattr(sys.modules[module], kind.__name__, old, raising=False)
        torch.save(old(48, 6), file)
    with pytest.raises(ModuleNotFoundError, match="named by a pickle of a layer"):
        torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    with pytest.raises(pickle.UnpicklingError, match=re.escape(module)):
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_other_missing_modules_are_missing_as_before() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        pickle.loads(b"cheadwise.layers.other\nAttention\n.")


def test_a_layer_without_the_options_of_later_versions_runs() -> None:
    layer, x = Attention(12, 3), torch.randn(2, 5, 12)
    output = layer(x)
    for name in ("temperature", "clip", "values", "output_norm"):
        del layer.__dict__[name]
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(x), output)
    assert again.spec == layer.spec
