/** The tools over the map: the head's name, what it is compared with, and A, B or B − A. */

import type { App } from "../app";
import { button, element, rovingFocus, select } from "../dom";
import { percent } from "../format";
import { nameOf } from "../heads";
import { type HeadId, positionOf } from "../maps";
import type { Mode } from "../state";
import type { Loaded, Part } from "../view";

export class Compare implements Part {
  readonly root = element("div", { class: "line compare", "data-part": "compare" });
  private readonly title = element("h2");
  private readonly modes = element("div", { class: "modes", role: "group", "aria-label": "shown", "data-follow": "" });
  private readonly opener = button("compare", { "data-part": "compare-with" }, () => this.app.choosing(!this.app.isChoosing));
  private readonly others: HTMLSelectElement;

  constructor(private readonly app: App) {
    this.others = select("compare with", [], (value) => this.chooseOther(value));
    for (const [mode, words] of [["A", "A"], ["B", "B"], ["both", "A and B"], ["diff", "B − A"]] as const) {
      const choice = button(words, {}, () => app.set({ mode }));
      choice.dataset["mode"] = mode;
      this.modes.append(choice);
    }
    rovingFocus(this.modes, () => 1);
    this.root.append(this.title, this.opener, this.modes, this.others);
  }

  private chooseOther(value: string): void {
    const [scan = 0, layer = 0, head = 0] = value.split(".").map(Number);
    this.app.compareWith(value ? { scan, layer, head } : null);
  }

  update(loaded: Loaded | null): void {
    const { app } = this;
    const { other, mode } = app.state;
    this.opener.setAttribute("aria-pressed", String(app.isChoosing));
    const names = other && this.names(other);
    this.title.textContent = names && (mode === "both" || mode === "diff") ? names[mode] : app.nameOf(app.shown);
    const options = this.options(loaded);
    const value = other ? `${other.scan}.${other.layer}.${other.head}` : "";
    if (other && !options.some(([each]) => each === value)) options.push([value, app.nameOf(other)]);
    this.others.replaceChildren(...options.map(([each, words]) => element("option", { value: each }, words)));
    this.others.value = value;
    this.modes.hidden = !other;
    for (const choice of this.modes.querySelectorAll("button")) {
      const isHere = choice.dataset["mode"] === mode;
      choice.setAttribute("aria-pressed", String(isHere));
      choice.tabIndex = isHere ? 0 : -1;
      if (names) choice.setAttribute("aria-label", `${choice.textContent}: ${names[choice.dataset["mode"] as Mode]}`);
    }
  }

  /** Return what each mode shows: one head or both, A first, or what B has more than A. */
  private names(other: HeadId): Record<Mode, string> {
    const [A, B] = [this.app.shortName(this.app.chosen), this.app.shortName(other)];
    return { A, B, both: `${A} and ${B}`, diff: `${B} − ${A}` };
  }

  private options(loaded: Loaded | null): [string, string][] {
    const { meta, state, layer } = this.app;
    const options: [string, string][] = [["", "with …"]];
    const second = meta.scans[1];
    if (second) {
      options.push([`1.${state.layer}.${state.head}`, `the same head, ${second.name}`]);
      const matched = layer ? meta.matched?.[state.layer]?.[positionOf(layer, state.head)] : undefined;
      if (matched !== undefined && matched !== state.head) {
        options.push([`1.${state.layer}.${matched}`, `the matched head ${matched}, ${second.name}`]);
      }
    }
    for (const each of loaded?.distances.mostSimilar(state.layer, state.head) ?? []) {
      options.push([`0.${nameOf(each)}`, `head ${nameOf(each)}, ${percent(each.distance)} elsewhere`]);
    }
    return options;
  }
}
