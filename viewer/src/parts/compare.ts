/** The tools over the map: the head's name, what it is compared with, and A, B or A − B. */

import type { App } from "../app";
import { button, element, rovingFocus, select } from "../dom";
import { percent } from "../format";
import { nameOf } from "../heads";
import { positionOf } from "../maps";
import type { Loaded, Part } from "../view";

export class Compare implements Part {
  readonly root = element("div", { class: "line compare", "data-part": "compare" });
  private readonly title = element("h2");
  private readonly modes = element("div", { class: "modes", role: "group", "aria-label": "shown", "data-follow": "" });
  private readonly opener = button("compare", { "data-part": "compare-with" }, () => this.app.choosing(!this.app.isChoosing));
  private readonly others: HTMLSelectElement;

  constructor(
    private readonly app: App,
    tools: HTMLElement,
  ) {
    this.others = select("compare with", [], (value) => this.chooseOther(value));
    for (const [mode, words] of [["A", "A"], ["B", "B"], ["both", "A and B"], ["diff", "A − B"]] as const) {
      const choice = button(words, {}, () => app.set({ mode }));
      choice.dataset["mode"] = mode;
      this.modes.append(choice);
    }
    rovingFocus(this.modes, () => 1);
    this.root.append(this.title, this.opener, this.modes, this.others, tools);
  }

  private chooseOther(value: string): void {
    const [scan = 0, layer = 0, head = 0] = value.split(".").map(Number);
    this.app.compareWith(value ? { scan, layer, head } : null);
  }

  update(loaded: Loaded | null): void {
    const { app } = this;
    const { other, mode } = app.state;
    this.opener.setAttribute("aria-pressed", String(app.isChoosing));
    const sign = { A: null, B: null, both: "and", diff: "−" }[mode];
    const isPair = sign !== null && other !== null;
    this.title.textContent = isPair ? `${app.shortName(app.chosen)} ${sign} ${app.shortName(other)}` : app.nameOf(app.shown);
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
      const heads = [app.chosen, other ?? app.chosen].map((head) => app.shortName(head));
      const words = { A: heads[0], B: heads[1], both: heads.join(" and "), diff: heads.join(" − ") };
      choice.setAttribute("aria-label", `${choice.textContent}: ${words[choice.dataset["mode"] as keyof typeof words]}`);
    }
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
