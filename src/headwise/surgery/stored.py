"""Pruning and regrouping of a stored model, on the lines of a text file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from headwise.checkpoints import transformers
from headwise.checkpoints.config import read_config
from headwise.checkpoints.conversion import require_usable_target
from headwise.checkpoints.source import open_source
from headwise.errors import OptionError
from headwise.models.text import read_sentences
from headwise.scanning.labels import RECORD
from headwise.support.progress import Progress
from headwise.support.text import describe_count
from headwise.surgery._prune import PruningPlan, plan_prune, require_share
from headwise.surgery._regroup import RegroupPlan, plan_regroup, require_fewer
from headwise.surgery.choice import By, Journal, Take
from headwise.surgery.costs import Costs
from headwise.surgery.cut import Cut, LayerCut, full_size
from headwise.surgery.fit import Repair, can_leave
from headwise.surgery.folders import (
    FolderPlan,
    StoredHeads,
    Wanted,
    Written,
    check_cut,
    plan_folder,
    write,
)
from headwise.surgery.maps import How
from headwise.surgery.memory import cut_model
from headwise.surgery.models import ModelHeads
from headwise.surgery.quality import describe_interval, interval

BATCH = 32  # lines that run together


@dataclass(frozen=True, eq=False)
class StoredSubject:
    """A stored model that will be cut, with the data to choose, fit and measure on."""

    folder: Path  # of the model
    target: Path  # the new folder
    form: Wanted  # of the target; see `headwise.surgery.write`
    stored: transformers.StoredModel  # the loaded model
    fit: list[dict[str, Tensor]]  # inputs to choose and fit on
    held_out: list[dict[str, Tensor]]  # inputs to measure on
    note: str  # the number of sequences of the text, as a sentence
    trust_remote_code: bool = False  # True if code in the folder may run
    fixed: Collection[str] = ()  # names of layers whose heads are zeroed, not taken out

    @property
    def journal(self) -> Path:
        """The file of effects that were measured, beside the target."""
        return self.target.with_name(f".{self.target.name}.headwise-effects.json")

    def plan_prune(
        self,
        keep: float,
        by: By,
        repair: Repair,
        progress: Progress,
        *,
        rounds: int = 1,
        take: Take | None = None,
    ) -> tuple[StoredSubject, PruningPlan]:
        """Return the plan of a pruning, and this with the form that it takes.

        The journal keeps effects. The form "auto" is "plain" where a config can state the plan with
        as many heads in each layer, and its loss is no more than that of the free plan may be.
        Without ``take`` whole groups go, or single heads where one group is more than may go.

        Raises:
            OptionError: no pruning of this size can be written in the end.
        """
        require_share(keep)
        heads = ModelHeads(self.stored.model)
        self, whole = self._with_fixed_layers(heads), heads.whole()
        shifted = whole
        if repair != "zero":
            widths = {name: heads.canonical(name)["wo"].shape[-1] for name in heads.specs}
            shifted = Cut({n: cut.shift(torch.ones(widths[n])) for n, cut in whole})
            self._require_bias(shifted)
        take = _choose_take(whole, keep, take, even=self.form == "plain")
        subject, obstacle = self, None
        if self.form == "auto":
            subject, obstacle = self._find_form(shifted, keep, take)
        if subject.form != "auto":
            subject._require_form(shifted, keep, take)
        plan = plan_prune(
            self.stored.model,
            self.fit,
            keep=keep,
            held_out=self.held_out,
            by=by,
            rounds=rounds,
            take=take,
            even=subject.form == "plain",
            repair=repair,
            journal=Journal(self.journal, self._identity(by, repair)),
            progress=progress,
        )
        if self.form == "auto":
            return subject._settle_form(plan, obstacle)
        return subject, plan

    def _with_fixed_layers(self, heads: ModelHeads) -> StoredSubject:
        """Return this with a note on the layers whose function allows no other number of heads."""
        if not (fixed := [name for name in heads.specs if not can_leave(heads, name)]):
            return self
        note = f"{self.note}\n{len(fixed)} of {len(heads.specs)} layers keep their size, such as "
        return replace(self, note=f"{note}{fixed[0]}: heads are zeroed there", fixed={*fixed})

    def _require_bias(self, shifted: Cut) -> None:
        try:
            self.plan_folder(shifted)
        except OptionError as error:
            raise OptionError(
                saw=f"the mean outputs of heads, for which {self.folder} has no place: {error.saw}",
                needed="an output projection with a bias",
                do="{repair} zero, or {form} code",
                parameter={"repair": (), "form": ()},
            ) from error

    def _find_form(
        self, whole: Cut, keep: float, take: Take
    ) -> tuple[StoredSubject, OptionError | None]:
        """Return this with the only form that is left, and the reason against the form "plain"."""
        plain, code = replace(self, form="plain"), replace(self, form="code")
        left = _count_units(whole, keep, take)[1]
        against_plain, against_code = (x._obstacle(whole, left, take) for x in (plain, code))
        if against_code is not None:
            return plain, against_plain
        return (self if against_plain is None else code), against_plain

    def _settle_form(
        self, plan: PruningPlan, obstacle: OptionError | None
    ) -> tuple[StoredSubject, PruningPlan]:
        """Return the plan of the form that is better, and this with that form and its reason."""
        why, even = "" if obstacle is None else obstacle.saw, plan
        with suppress(OptionError):
            even = plan.evenly()
        if even is plan:
            why = why or "as many heads of each layer are more than may go"
        quality, model = plan.quality, self.stored.model
        before = 1.0 if quality.is_likeness else quality.values(model, self.fit)
        free = plan.values_to_fit() - before
        same = free if even is plan else even.values_to_fit() - before
        losses = (
            f"quality on the sequences to choose on: {float(free.mean()):+.4f}, "
            f"{describe_interval(free)}; with the same number in each layer "
            f"{float(same.mean()):+.4f}"
        )
        form: Wanted = "code" if self.form == "auto" else self.form
        if why:
            why = f"plain transformers cannot state it: {why}"
        elif float(same.mean()) >= interval(free)[0]:
            form, why, plan = "plain", "the same number in each layer is within the interval", even
        else:
            why = "the same number in each layer loses more"
        return replace(self, form=form, note=f"{self.note}\n{losses}\nform {form}: {why}"), plan

    def plan_regroup(
        self, kv_heads: int, merge: How, progress: Progress
    ) -> tuple[StoredSubject, RegroupPlan]:
        """Return the plan of a regrouping, and this with the form that it takes.

        Raises:
            OptionError: no regrouping to this number can be written in the end.
        """
        heads = ModelHeads(self.stored.model)
        require_fewer(heads, kv_heads)
        merged = Cut({name: layer.merge(kv_heads) for name, layer in heads.whole()})
        form = self.plan_folder(merged).form
        options: dict[str, Any] = {"held_out": self.held_out, "progress": progress}
        plan = plan_regroup(self.stored.model, self.fit, kv_heads=kv_heads, merge=merge, **options)
        return replace(self, form=form), plan

    def plan_folder(self, cut: Cut) -> FolderPlan:
        """Return the files that a cut leads to."""
        trusted = self.trust_remote_code
        return plan_folder(cut, self.folder, form=self.form, trust_remote_code=trusted)

    def write(self, cut: Cut, progress: Progress) -> Written:
        """Write the folder, and remove the journal."""
        options: Any = {"form": self.form, "trust_remote_code": self.trust_remote_code}
        written = write(cut, self.folder, self.target, **options, progress=progress)
        self.journal.unlink(missing_ok=True)
        return written

    def measure_costs(self, heads: ModelHeads, cut: Cut, model: Any, written: Written) -> Costs:
        """Measure a run of the largest held-out input; ``model`` is the cut one."""
        if written.form == "full":
            model = cut_model(full_size(cut), self.stored.model, share=True)
        nbytes, models = (written.nbytes_before, written.nbytes), (self.stored.model, model)
        return Costs.measure(models, heads.specs, self.held_out[-1], nbytes)

    def check(self, cut: Cut) -> float:
        """Load the folder in a new process; return the largest difference of its outputs."""
        inputs = {name: x[:2] for name, x in self.held_out[0].items()}
        trusted, model = self.trust_remote_code, self.stored.model
        return check_cut(self.target, cut, model, inputs, trust_remote_code=trusted)

    def _identity(self, *options: str) -> str:
        digest = hashlib.sha256(open_source(self.folder).source_digest().encode())
        for given in (*self.fit, *self.held_out):
            for name in sorted(given):
                digest.update(name.encode() + given[name].numpy().tobytes())
        versions = [version(name) for name in ("headwise", "torch", "transformers")]
        digest.update(repr((options, versions, read_config(self.folder))).encode())
        return digest.hexdigest()

    def _require_form(self, whole: Cut, keep: float, take: Take) -> None:
        """Raise OptionError where no cut of this size can be written in the form.

        Some classes of transformers want a width that is a multiple of the heads, also where
        head_dim is stated: then only some numbers of heads can go.
        """
        units, left = _count_units(whole, keep, take)
        if (error := self._obstacle(whole, left, take)) is None:
            return
        if not (fits := [n for n in range(1, units) if self._obstacle(whole, n, take) is None]):
            raise error
        nearest = min(fits, key=lambda n: abs(n - left))
        grouped = any(len(_list_units(cut, take)[0]) > 1 for _, cut in whole)
        what = "groups of heads" if grouped else "heads"
        raise OptionError(
            saw=f"{{keep}} {keep:g}, with {left} of {units} {what} in each layer: {error.saw}",
            needed=f"{', '.join(map(str, fits))} of {units} {what}, which plain transformers can "
            "state",
            do=f"{{keep}} {nearest / units:g}; or {{form}} code",
            parameter={"keep": (), "form": ()},
        ) from error

    def _obstacle(self, whole: Cut, units: int, take: Take) -> OptionError | None:
        """Return the reason why so many units of each layer cannot be written alone."""
        kept = dict[str, LayerCut]()
        for name, cut in whole:
            parts, bare = _list_units(cut, take), replace(cut, steps=())
            stay, go = (sorted(chain(*some)) for some in (parts[:units], parts[units:]))
            kept[name] = (bare.zero(go) if name in self.fixed else bare.keep(stay)).then(*cut.steps)
        try:
            self.plan_folder(Cut(kept))
        except OptionError as error:
            return error
        return None


def _choose_take(whole: Cut, keep: float, take: Take | None, *, even: bool) -> Take:
    """Return what goes at once: whole groups, if none is named and the share takes one.

    Raises:
        OptionError: as many heads may not go.
    """
    total = sum(cut.num_heads for _, cut in whole)
    may_go = total - math.ceil(keep * total - 1e-9)
    least = dict[Take, int]()
    for way in get_args(Take):
        units = (_list_units(cut, way) for _, cut in whole)
        sizes = [len(each[0]) for each in units if len(each) > 1] or [0]
        least[way] = sum(sizes) if even else min(sizes)
    chosen: Take = take or ("groups" if least["groups"] <= may_go else "heads")
    if least[chosen] > may_go:
        raise OptionError(
            saw=f"{{keep}} {keep:g}, with which at most {describe_count(may_go, 'head')} may go",
            needed=f"at least {least[chosen]}: as many go at once",
            do="a smaller {keep}, {take} heads, or {form} code, in which layers may differ",
            parameter={"keep": (), "take": (), "form": ()},
        )
    return chosen


def _count_units(whole: Cut, keep: float, take: Take) -> tuple[int, int]:
    """Return the units of a layer that go together, and how many of them a share leaves."""
    units = min(len(_list_units(cut, take)) for _, cut in whole)
    return units, min(max(math.ceil(keep * units - 1e-9), 1), units - 1)


def _list_units(cut: LayerCut, take: Take) -> list[list[int]]:
    """Return the heads that go together: of a kv head, or one of each; see `Search`."""
    kv_heads, group = cut.num_kv_heads, cut.num_heads // cut.num_kv_heads
    starts = range(0, cut.num_heads, group)
    if group > 1 and (take == "heads" or kv_heads == 1):
        return [[start + place for start in starts] for place in range(group)]
    return [[*range(start, start + group)] for start in starts]


def open_for_cut(
    folder: Path,
    data: Path | None,
    target: Path,
    *,
    form: Wanted,
    length: int,
    call: str,
    trust_remote_code: bool = False,
) -> StoredSubject:
    """Load a model with a tokenizer, and the lines of a text, of at most ``length`` tokens each.

    Lines are dealt out in turns: to choose and fit on, and held out. Without ``data`` they are the
    sentences that ship with headwise. ``call`` does the same from Python, in `headwise.surgery`.

    Raises:
        OptionError: too little text, no tokenizer, or a model that cannot be cut; see
            `headwise.surgery.write`.
        CheckpointError: no complete model, or a target that exists.
    """
    require_usable_target(open_source(folder), target, "safetensors")
    lines = None if data is None else read_lines(data)
    halves = read_sentences() if lines is None else (lines[::2], lines[1::2])
    # what cannot be cut is refused before it is loaded
    StoredHeads(folder, trust_remote_code=trust_remote_code)
    stored = transformers.load(folder, trust_remote_code=trust_remote_code)
    if stored.tokenizer is None:
        raise OptionError(
            saw=f"{folder} has no tokenizer",
            needed="a tokenizer for the lines of the data",
            do="copy the tokenizer into the folder, or cut from Python with token ids: "
            f"result = headwise.surgery.{call}; "
            f"headwise.surgery.write(result.cut, {str(folder)!r}, {str(target)!r}, form={form!r})",
        )
    fit, held_out = (_batches(stored, half, length) for half in halves)
    if not (fit and held_out):
        use = "measure on" if fit else "choose and fit on"
        raise _too_few(data, f"without a line of two tokens to {use}")
    used, others = (sum(len(each["input_ids"]) for each in part) for part in (fit, held_out))
    note = f"{describe_count(used, 'sequence')} to choose and fit on, {others} held out, of "
    if data is None:
        note += "the sentences of headwise; --data names a text of yours"
    else:
        total = len(data.read_text("utf-8").splitlines())
        note += f"{describe_count(total, 'line')} of {data.name}"
        left = total - used - others
        note += f"; {left} empty, repeated or of one token alone" if left else ""
    if (folder / RECORD).is_file():
        note += f"\nnumbers of heads are those of {folder}; {RECORD} has those of the first model"
    return StoredSubject(folder, target, form, stored, fit, held_out, note, trust_remote_code)


def read_lines(data: Path) -> list[str]:
    """Return the different lines of a text file that are not empty.

    Raises:
        OptionError: no such file, another encoding, or fewer than four lines.
    """
    try:
        text = data.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            saw=f"{data}, which cannot be read: {error}",
            needed="a text file in UTF-8, a sequence on each line",
            do="name such a file",
        ) from error
    lines = list(dict.fromkeys(line for line in text.splitlines() if line.strip()))
    if len(lines) < 4:
        raise _too_few(data, f"with {describe_count(len(lines), 'line')} of text")
    return lines


def _too_few(data: Path | None, saw: str) -> OptionError:
    return OptionError(
        saw=f"{data or 'the sentences of headwise'} {saw}",
        needed="at least four different lines of two tokens or more: to choose and fit on, and "
        "held out; some hundred are better",
        do="name a file with more lines",
    )


def _batches(
    stored: transformers.StoredModel, lines: Sequence[str], length: int
) -> list[dict[str, Tensor]]:
    """Return inputs of lines of about one length, padded on the right."""
    assert stored.tokenizer is not None
    most = min(length, stored.positions or length)
    ids = sorted((stored.tokenizer.first_ids(line, most) for line in lines), key=len)
    ids = [each for each in ids if len(each) > 1]
    pad = stored.config.get("pad_token_id")
    filler = pad if isinstance(pad, int) and pad >= 0 else 0
    batches = []
    for some in (ids[start : start + BATCH] for start in range(0, len(ids), BATCH)):
        longest = max(map(len, some))
        rows = torch.tensor([each + [filler] * (longest - len(each)) for each in some])
        mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in some])
        batches.append({**stored.inputs(rows), "attention_mask": mask})
    return batches
