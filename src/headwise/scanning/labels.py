"""Original numbers of heads, as a folder of a cut model states them.

`headwise.surgery.write` makes such folders. The metadata of their weights names a form. The file
`RECORD` states for each layer the number of heads before, and the numbers of those that are left.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from headwise.checkpoints.source import CheckpointSource, open_source
from headwise.errors import CheckpointError, OptionError
from headwise.scanning.call import ORIGINAL, OriginalHeads
from headwise.support.files import parse_json_object

RECORD = "cut.json"
FORM = "headwise-surgery"  # the field of the form, in the metadata of the weights


def read_form(source: CheckpointSource) -> str | None:
    """Return the form of a cut model; None for weights that are not cut."""
    forms = {shard.metadata.get(FORM) for shard in source.shards}
    return forms.pop() if len(forms) == 1 else None


def require_loadable(folder: Path) -> None:
    """Raise OptionError for a cut model whose sizes plain transformers cannot load."""
    if (folder / RECORD).is_file() and read_form(open_source(folder)) == "headwise":
        raise OptionError(
            saw=f"{folder}, a cut model in the form headwise, whose sizes no config.json states",
            needed="a folder that plain transformers loads",
            do="scan it from Python, with the model's inputs: headwise.scan(headwise.surgery.load("
            f"{str(folder)!r}), inputs)",
        )


def describe_cuts(first: object, second: object) -> tuple[str, ...]:
    """Return a sentence for each of two models that is cut, as the record of its folder says.

    Args:
        first: a folder, a file in it, or a model of transformers that was loaded from one; anything
            else has no record.
        second: likewise.
    """
    sentences = []
    for side, given in (("first", first), ("second", second)):
        if isinstance(given, nn.Module):
            given = getattr(getattr(given, "config", None), "name_or_path", None)
        folder = Path(given) if isinstance(given, str | Path) and given else Path("cut")
        file = (folder if folder.is_dir() else folder.parent) / RECORD
        if file.is_file():
            layers = parse_json_object(file.read_bytes()).get("layers", {}).values()
            steps = dict.fromkeys(step["step"] for layer in layers for step in layer["steps"])
            left = sum(len({*layer["left"]} - {*layer["off"]}) for layer in layers)
            sentences.append(
                f"the {side} is a cut model, as {RECORD} says: {left} of "
                f"{sum(layer['heads'] for layer in layers)} heads of {len(layers)} layers are "
                f"left; steps: {', '.join(steps)}"
            )
    return tuple(sentences)


def label_model(model: nn.Module, folder: Path) -> None:
    """Let the attention modules of a cut model state the original numbers of their heads.

    A scan takes these as labels. A folder that is not cut changes nothing.

    Args:
        model: the loaded model.
        folder: its folder.

    Raises:
        CheckpointError: a record that cannot be read, or of another model.
    """
    file = folder / RECORD
    if not file.is_file() or read_form(open_source(folder)) is None:
        return
    try:
        for name, layer in parse_json_object(file.read_bytes())["layers"].items():
            heads = OriginalHeads(int(layer["heads"]), tuple(map(int, layer["left"])))
            vars(model.get_submodule(name.rstrip(".")))[ORIGINAL] = heads
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            saw=f"{file}, which is no record of this model's heads: {reason}",
            needed="the record that headwise.surgery.write made beside these weights",
            do="copy the folder again",
        ) from error
