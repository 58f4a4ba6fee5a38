"""The modules of a checkpoint find those of the model that holds them."""

import torch
from torch import Tensor, nn

from headwise.identify.running import is_over_sequences, pair_modules, record_first_calls
from headwise.layouts.modules import NamedModule, NamedPosition
from headwise.scanning.call import CapturedCall
from tests.scanning.models import BATCH, LENGTH, WIDTH, Caller

NAMES = ("deep.0", "deep.1", "side")
LOCAL = ("qkv.weight", "qkv.bias", "project.weight", "project.bias")
State = dict[str, Tensor]


class Parts(nn.Module):
    """Three layers, of which one runs before and after those that its name stands behind."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.ModuleList([Caller(), Caller()])
        self.side = Caller()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.side, *self.deep, self.side):
            x = x + layer(x)
        return x


def seen() -> tuple[State, list[CapturedCall]]:
    model = Parts()
    return model.state_dict(), record_first_calls(model, {"x": torch.randn(BATCH, LENGTH, WIDTH)})


def modules(state: State) -> list[NamedModule]:
    """Those of a file, in the order of their names."""
    prefixes = sorted({name.rpartition(".")[0].rpartition(".")[0] for name in state})
    return [
        NamedModule(
            NamedPosition(f"{prefix}.", ""),
            f"{prefix}.",
            {name: name.removeprefix(f"{prefix}.") for name in state if name.startswith(prefix)},
            (),
        )
        for prefix in prefixes
    ]


def names(state: State, found: list[CapturedCall]) -> dict[str, str]:
    pairs = pair_modules(modules(state), found, state)
    return {module.prefix.rstrip("."): own.layer for module, own in pairs}


def test_each_module_is_seen_once_with_what_it_was_given_first() -> None:
    model, x = Parts(), torch.randn(BATCH, LENGTH, WIDTH)
    found = record_first_calls(model, {"x": x})
    assert [one.layer for one in found] == ["side", "deep.0", "deep.1"]
    assert torch.equal(found[0].state, x)
    assert all(is_over_sequences(one) for one in found)


def test_a_module_that_runs_again_at_once_is_seen_with_its_first_input() -> None:
    """Its projection is not seen, so that the call is known to have ended only by the next one."""

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Caller()
            self.layer.project = Doubled()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(self.layer(x))
            return out

    x = torch.randn(BATCH, LENGTH, WIDTH)
    [one] = record_first_calls(Twice(), {"x": x})
    assert torch.equal(one.state, x)


def test_what_is_held_tells_whatever_it_is_called() -> None:
    state, found = seen()
    renamed = {f"z{9 - n}.{x}": state[f"{name}.{x}"] for n, name in enumerate(NAMES) for x in LOCAL}
    assert names(renamed, found) == {"z9": "deep.0", "z8": "deep.1", "z7": "side"}


def test_what_all_of_them_hold_tells_nothing() -> None:
    """Matrices that begin as zeros are the same in all layers; the others tell."""
    model = Parts()
    for layer in (*model.deep, model.side):
        nn.init.zeros_(layer.project.weight)
    found = record_first_calls(model, {"x": torch.randn(BATCH, LENGTH, WIDTH)})
    assert names(model.state_dict(), found) == {name: name for name in NAMES}


def test_of_other_weights_the_names_tell() -> None:
    """In a base model, too, whose names lack what stands in front."""
    state, found = seen()
    other = {name: x + 1 for name, x in state.items() if "deep.1" not in name}
    assert names(other, found) == {"deep.0": "deep.0", "side": "side"}
    under = {f"model.{name}": x for name, x in other.items()}
    assert names(under, found) == {"model.deep.0": "deep.0", "model.side": "side"}


def test_of_other_weights_in_other_names_the_order_tells() -> None:
    """If there are as many of both: another layout of the same model."""
    state, found = seen()
    other = {f"z{n}.{x}": state[f"{m}.{x}"] + 1 for n, m in enumerate(NAMES) for x in LOCAL}
    assert names(other, found) == {"z0": "side", "z1": "deep.0", "z2": "deep.1"}
    fewer = {name: x for name, x in other.items() if not name.startswith("z2")}
    assert names(fewer, found) == {}


def test_what_was_not_seen_has_no_pair() -> None:
    """Cross attention, such as it is: nobody knows the names, and the model has as many left."""
    state, found = seen()
    mixed = {name: x for name, x in state.items() if "side" not in name}
    mixed |= {f"cross.{x}": torch.randn_like(state[f"side.{x}"]) for x in LOCAL}
    assert names(mixed, found) == {"deep.0": "deep.0", "deep.1": "deep.1"}


def test_windows_of_a_picture_are_no_sequences() -> None:
    class Windows(Caller):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x.unflatten(1, (2, -1)).flatten(0, 1), mask)

    [one] = record_first_calls(nn.Sequential(Windows()), {"input": torch.randn(BATCH, 6, WIDTH)})
    assert not is_over_sequences(one)
    [one] = record_first_calls(nn.Sequential(Caller()), {"input": torch.randn(BATCH, 6, WIDTH)})
    assert is_over_sequences(one)
