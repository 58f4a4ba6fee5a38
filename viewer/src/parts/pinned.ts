/** What can be asked of the pinned tokens: the same word in all heads, and the second token of a pair. */

import type { App } from "../app";
import { button, element } from "../dom";
import { count, inQuotes, visible } from "../format";
import { showsLinks } from "../state";
import type { Loaded, Part } from "../view";

export class Pinned implements Part {
  readonly root = element("div", { class: "pins", "data-part": "pinned" });
  // No tab stop: the key l and the order of the grid do the same.
  private readonly everyHead = button("", { "data-part": "every-head", tabindex: -1 }, () => this.app.toggleLinks());
  private readonly second = button("", {}, () => this.app.set({ second: null }));

  constructor(private readonly app: App) {
    this.root.append(this.everyHead, this.second);
  }

  update(loaded: Loaded | null): void {
    const { state } = this.app;
    this.everyHead.textContent = state.second === null ? "this word in all heads" : "this pair in all heads";
    this.everyHead.setAttribute("aria-pressed", String(showsLinks(state)));
    this.second.hidden = state.second === null;
    if (state.second === null) return;
    const text = state.direction === "keys" ? loaded?.keys : loaded?.queries;
    const word = text?.isKnown ? inQuotes(visible(text.word(state.sequence, state.second))) : `token ${count(state.second)}`;
    this.second.textContent = `× ${word}`;
    this.second.setAttribute("aria-label", `unpin ${word}, the second token`);
  }
}
