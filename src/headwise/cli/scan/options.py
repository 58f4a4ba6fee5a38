"""Options of ``headwise scan``, and their checks before anything is loaded."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from headwise.cli.processes import option_arguments, rank_count, require_one_launcher
from headwise.errors import OptionError

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """The options of ``headwise scan``, with the names in its help."""

    page: Path
    model_dir: Path | None = None
    demo: bool = False
    text: Sequence[Path] | None = None
    tokens: Path | None = None
    random_repeats: bool = False
    length: int | None = None
    stats: Sequence[str] | None = None
    layers: Sequence[str] | None = None
    skip_empty: bool = False
    device: str = "cpu"
    dtype: str | None = None
    out: Path | None = None
    top_keys: Sequence[str] | None = None
    map_cells: int | None = None
    trust_remote_code: bool = False
    force: bool = False
    processes: int | None = None
    timeout: float = 60.0

    @property
    def arguments(self) -> list[str]:
        """The options of the same scan as one of its processes gets them."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        place = options.pop("model_dir")
        del options["processes"]
        words = option_arguments(options, joined=("stats", "layers", "top_keys"))
        return [str(place), *words] if place is not None else words

    @property
    def command_with_top_keys(self) -> str:
        """The same command for single tokens of other heads, with {heads} for these."""
        words = ["headwise", "scan", "--demo" if self.demo else str(self.model_dir)]
        for path in self.text or ():
            words += ["--text", str(path)]
        words += ["--tokens", str(self.tokens)] if self.tokens is not None else []
        words += ["--random-repeats"] if self.random_repeats else []
        words += ["--length", str(self.length)] if self.length is not None else []
        words += ["--out", str(self.out)] if self.out is not None else []
        words += ["--skip-empty"] if self.skip_empty else []
        words += ["--device", self.device] if self.device != "cpu" else []
        words += ["--dtype", self.dtype] if self.dtype is not None else []
        words += ["--page", str(self.page), "--force"]
        return " ".join([*map(shlex.quote, words), "--top-keys", "{heads}"])

    @property
    def layer_patterns(self) -> tuple[str, ...] | None:
        """The patterns of ``--layers``; a number stands for layers with this number in the name."""
        if self.layers is None:
            return None
        return tuple(
            pattern
            for name in self.layers
            for pattern in (
                # A name may end with the number of the run or call in brackets.
                (f"*.{name}.*", f"*.{name}", f"*.{name} (*") if name.isdecimal() else (name,)
            )
        )

    def require_sense(self) -> None:
        """Raise OptionError if options contradict each other, are missing or misspelt."""
        if (self.model_dir is None) != self.demo:
            raise OptionError(
                saw="no MODEL_DIR" if not self.demo else f"{self.model_dir} and --demo",
                needed="one model: a folder, or the one that ships with headwise",
                do="headwise scan MODEL_DIR, or headwise scan --demo",
            )
        if self.page.is_file() and not self.force:
            raise OptionError(
                saw=f"--page {self.page}, which is there already",
                needed="a new file for the page of this scan",
                do="--page with another name, or --force to write over the earlier page",
            )
        if self.dtype not in (None, *DTYPES):
            raise OptionError(
                saw=f"--dtype {self.dtype}",
                needed=f"one of {', '.join(DTYPES)}",
                do="--dtype float32",
            )
        self._require_one_input()
        self._require_work_for_processes()
        sizes = [2**power for power in range(11)]
        if self.map_cells is not None and self.map_cells not in sizes:
            raise OptionError(
                saw=f"--map-cells {self.map_cells}",
                needed=f"a power of two from 1 to {sizes[-1]:,}",
                do="--map-cells 128",
            )
        if self.stats is not None:
            from headwise.scanning.statistics.catalogue import STANDARD, unknown_statistic_error

            known = [statistic.definition.name for statistic in STANDARD]
            if unknown := [name for name in self.stats if name not in known]:
                do = "choose from these"
                raise unknown_statistic_error(unknown[0], known, do=do, parameter="stats")

    def _require_one_input(self) -> None:
        """Raise OptionError for several inputs, or for a place that cannot hold their scans."""
        sources = {
            "--text": self.text,
            "--tokens": self.tokens,
            "--random-repeats": self.random_repeats,
        }
        inputs = [name for name, value in sources.items() if value]
        if len(inputs) > 1:
            raise OptionError(
                saw=" and ".join(inputs),
                needed="a single input",
                do=f"leave {inputs[1]} out, or scan twice",
            )
        texts = self.text or ()
        if self.out is None and (len(texts) > 1 or any(path.is_dir() for path in texts)):
            raise OptionError(
                saw="several texts, and no --out",
                needed="a folder for the scan of each text, in which the run can be resumed",
                do="--out DIR",
            )
        model, out = self.model_dir, self.out
        if model is not None and out is not None and out.resolve() == model.resolve():
            raise OptionError(
                saw=f"--out {out}, which is the folder of the model",
                needed="a folder for the scan alone: its .safetensors would be read as weights",
                do="--out with the path of another folder",
            )
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise OptionError(
                saw=f"--out {self.out}, which is a file",
                needed="a folder to write into",
                do="--out with the path of a folder",
            )

    def _require_work_for_processes(self) -> None:
        """Raise OptionError if several processes have no folder, or no second text, to work on."""
        require_one_launcher(self.processes)
        count = self.processes or rank_count()
        if count == 1:
            return
        if self.out is None:
            raise OptionError(
                saw=f"{count} processes without --out",
                needed="a folder, into which every process writes the scans of its texts",
                do="--out DIR, or a single process",
            )
        texts = self.text or ()
        if len(texts) < 2 and not any(path.is_dir() for path in texts):
            raise OptionError(
                saw=f"{count} processes for one text",
                needed="several texts, since a text is read by one process",
                do="--text with a folder or with several files, or a single process",
            )
