/** The keyboard: keys of the whole page, and the list of all keys. */

import type { App } from "../app";
import { button, element } from "../dom";
import type { Header } from "./header";
import type { Search } from "./search";

const KEYS: [keys: string, meaning: string][] = [
  ["← → ↑ ↓", "in the grid: other heads, and left of them their layer; in the map: other cells; in the text: other tokens"],
  ["Enter", "pin the query of the cell, or the token"],
  ["l", "this word in all heads, and back"],
  ["Shift and Enter, or Shift and a click", "in the text: a second token, for the weight of the pair"],
  ["Esc", "close what is open, leave a comparison, unpin"],
  ["[ and ]", "the head before, the next head"],
  ["d", "turn: what a token looks at, what looks at it"],
  ["c", "compare: then Enter or a click on a head, or on the number of a layer"],
  ["Shift and a click", "compare with this head, or with this layer"],
  ["x", "A, B, A and B, B − A"],
  ["+ − 0", "in the map: zoom; drag moves"],
  ["/", "search the text, or a token by #17"],
  ["n and N", "next place, place before"],
  ["?", "this list"],
];

export class Keys {
  readonly dialog = element("dialog", { "data-part": "keys", "aria-label": "keys" });
  readonly opener = button("keys ?", { class: "wide", tabindex: -1 }, () => this.dialog.showModal());

  constructor(
    private readonly app: App,
    private readonly search: Search,
    private readonly header: Header,
  ) {
    const list = element("dl");
    for (const [keys, meaning] of KEYS) list.append(element("dt", {}, keys), element("dd", {}, meaning));
    this.dialog.append(element("h2", {}, "Keys"), list, button("close", {}, () => this.dialog.close()));
  }

  /** Listen to the keys that reach an element and were not typed into a field. */
  listen(target: HTMLElement | Document): void {
    target.addEventListener("keydown", (event) => {
      const pressed = event as KeyboardEvent;
      const field = (pressed.target as HTMLElement).closest?.("input, select, textarea, dialog");
      if (field || pressed.ctrlKey || pressed.metaKey || pressed.altKey) return;
      if (this.act(pressed.key)) pressed.preventDefault();
    });
  }

  private act(key: string): boolean {
    const { app } = this;
    const { state } = app;
    const acts: Record<string, () => void> = {
      "/": () => this.search.focus(),
      n: () => this.search.go(1),
      N: () => this.search.go(-1),
      "?": () => this.dialog.showModal(),
      "[": () => this.step(-1),
      "]": () => this.step(1),
      l: () => app.toggleLinks(),
      d: () => app.set({ direction: state.direction === "keys" ? "queries" : "keys" }),
      x: () => app.set({ mode: state.other ? ({ A: "B", B: "both", both: "diff", diff: "A" } as const)[state.mode] : "A" }),
      c: () => app.choosing(true),
      Escape: () => this.header.closeAbout() || app.leave(),
    };
    const act = acts[key];
    act?.();
    return act !== undefined;
  }

  /** Choose the head before or after this one, over the ends of layers. */
  private step(by: number): void {
    const heads = this.app.scan.layers.flatMap((layer, index) => layer.heads.map((head) => ({ layer: index, head })));
    const { layer, head } = this.app.state;
    const at = heads.findIndex((each) => each.layer === layer && each.head === head);
    const next = heads[(at + by + heads.length) % heads.length];
    if (next) this.app.choose(next);
  }
}
