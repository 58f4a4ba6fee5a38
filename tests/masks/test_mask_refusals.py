"""Masks that cannot be meant: each is refused in three lines, with the user's numbers."""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from headwise.errors import DeviceError, DTypeError, MaskError, OptionError
from headwise.masks.mask import Mask
from tests.refusals import refusals


def bind(mask: Mask) -> None:
    mask.bind(batch=3, heads=6, queries=24, keys=29, device=torch.device("cpu"))


def all_true(*sizes: int) -> Tensor:
    return torch.ones(sizes, dtype=torch.bool)


PADDING, LENGTHS = all_true(3, 29), torch.tensor([29, 0, 11])
IDS = torch.zeros(3, 24, dtype=torch.int64)
FLOAT_MASK = torch.tensor([[0.0, -1e9]])
META = torch.ones(24, 29, dtype=torch.bool, device="meta")
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "negative window": (
        lambda: Mask.window(-2, 0),
        OptionError,
        ["left=-2", "left: a whole number from 0"],
    ),
    "a list in torch's convention": (
        lambda: Mask.from_torch([True]),  # type: ignore[arg-type]
        DTypeError,
        ["mask of type list"],
    ),
    "no padding": (
        lambda: Mask.from_torch_padding(None),  # type: ignore[arg-type]
        DTypeError,
        ["mask of type NoneType"],
    ),
    "an array": (
        lambda: Mask.from_sdpa(numpy.ones((24, 29), bool)),  # type: ignore[arg-type]
        DTypeError,
        ["mask of type ndarray", "torch.as_tensor"],
    ),
    "a list that may attend": (
        lambda: Mask.may_attend([True], axes="keys"),  # type: ignore[arg-type]
        DTypeError,
        ["allowed of type list"],
    ),
    "a list of heads": (
        lambda: Mask.causal().of_heads([0]),  # type: ignore[arg-type]
        OptionError,
        ["heads of type list", "torch.tensor([0])"],
    ),
    "a sequence that is not there": (
        lambda: Mask.from_torch_padding(~PADDING).draw(3, batch=5),
        OptionError,
        ["draw(batch=5) of a mask for 3"],
    ),
    "a drawing of text": (
        lambda: Mask.causal().draw("a"),  # type: ignore[arg-type]
        OptionError,
        ["draw(queries='a')"],
    ),
    "a drawing of less than nothing": (
        lambda: Mask.causal().draw(-1),
        OptionError,
        ["draw(queries=-1)", "from 0"],
    ),
    "negative right": (lambda: Mask.window(None, -1), OptionError, ["right=-1", "right=1"]),
    "alignment": (
        lambda: Mask.causal(align="bottom_right"),  # type: ignore[arg-type]
        OptionError,
        ["align='bottom_right'", '"top-left", "bottom-right"'],
    ),
    "alignment missing": (
        lambda: bind(Mask.causal()),
        MaskError,
        ["causal over 24 queries and 29 keys", 'align="top-left"', "cache"],
    ),
    "integer mask": (
        lambda: Mask.may_attend(torch.ones(24, 29, dtype=torch.int64), axes="queries keys"),
        MaskError,
        ["torch.int64", "either polarity", "t == 0"],
    ),
    "uint8 from torch": (
        lambda: Mask.from_torch(torch.ones(24, 29, dtype=torch.uint8)),
        MaskError,
        ["torch.uint8"],
    ),
    "float mask": (
        lambda: Mask.from_torch(FLOAT_MASK),
        MaskError,
        ["torch.float32", "-1e+09", "ScoreBias.dense", "finfo.min does not block"],
    ),
    "NaN in a float mask": (
        lambda: Mask.from_sdpa(FLOAT_MASK * torch.nan),
        MaskError,
        ["e.g. nan"],
    ),
    "three axes without num_heads": (
        lambda: Mask.from_torch(all_true(6, 24, 29)),
        MaskError,
        ["(6, 24, 29)", "num_heads", "(batch, queries, keys)", "(heads, queries, keys)"],
    ),
    "three axes that do not divide": (
        lambda: Mask.from_torch(all_true(6, 24, 29), num_heads=4),
        MaskError,
        ["(6, 24, 29) and num_heads=4"],
    ),
    "three axes from sdpa": (
        lambda: Mask.from_sdpa(all_true(6, 24, 29)),
        MaskError,
        ["(6, 24, 29)", "may_attend"],
    ),
    "axes out of order": (
        lambda: Mask.may_attend(PADDING, axes="keys batch"),
        MaskError,
        ["axes='keys batch'", "in this order"],
    ),
    "an axis unknown": (
        lambda: Mask.may_attend(PADDING, axes="batch length"),
        MaskError,
        ["axes='batch length'", "'queries'"],
    ),
    "an axis unnamed": (
        lambda: Mask.may_attend(PADDING, axes="keys"),
        MaskError,
        ["(3, 29)", "axes='keys'", "1 axes"],
    ),
    "other sizes": (
        lambda: bind(Mask.may_attend(all_true(24, 28), axes="queries keys")),
        MaskError,
        ["queries 24, keys 28", "batch 3, heads 6, queries 24, keys 29"],
    ),
    "segments that are floats": (
        lambda: bind(Mask.segments(IDS.float(), torch.zeros(3, 29))),
        MaskError,
        ["torch.float32", "integers"],
    ),
    "segments of other sizes": (
        lambda: bind(Mask.segments(IDS)),
        MaskError,
        ["(3, 24) and dtype torch.int64 for the keys", "keys 29"],
    ),
    "lengths too long": (
        lambda: bind(Mask.lengths(keys=torch.tensor([30, 1, 2]))),
        MaskError,
        ["between 1 and 30 for 29 keys", "0 to 29"],
    ),
    "lengths below zero": (
        lambda: bind(Mask.lengths(queries=torch.tensor([3, -1, 2]))),
        MaskError,
        ["between -1 and 3 for 24 queries"],
    ),
    "lengths of other batch": (
        lambda: bind(Mask.lengths(keys=torch.tensor([3, 1]))),
        MaskError,
        ["(2,)", "batch 3"],
    ),
    "lengths that are floats": (
        lambda: bind(Mask.lengths(keys=torch.tensor([3.0, 1.0, 2.0]))),
        MaskError,
        ["torch.float32"],
    ),
    "lengths that do not meet": (
        lambda: bind(Mask.lengths(keys=torch.tensor([3, 1])) & Mask.lengths(keys=LENGTHS)),
        MaskError,
        ["(2,)", "(batch 3,)"],
    ),
    "another device": (
        lambda: bind(Mask.may_attend(META, axes="queries keys")),
        DeviceError,
        ["a mask on meta", "on cpu", 'mask.to("cpu")'],
    ),
}


test_what_cannot_be_meant_is_refused_with_its_numbers = refusals(REFUSED)
