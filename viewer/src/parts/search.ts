/** Search over the text and over token indices: "/" begins, "n" and "N" go on. */

import type { App } from "../app";
import { element } from "../dom";
import { count } from "../format";
import type { Place } from "../text";
import type { Part } from "../view";

export class Search implements Part {
  readonly root = element("div", { class: "search", "data-part": "search" });
  private readonly input = element("input", {
    type: "search", "aria-label": "search the text, or #token", placeholder: "search / or #17", autocomplete: "off", spellcheck: "false",
  });
  private readonly status = element("span", { class: "soft small", role: "status" });
  private results: Place[] = [];
  private at = -1;
  private searched = "";

  constructor(private readonly app: App) {
    this.root.append(this.input, this.status);
    this.input.addEventListener("input", () => app.set({ search: this.input.value }, "replace"));
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.go(event.shiftKey ? -1 : 1);
      else if (event.key === "Escape") this.input.blur();
      else return;
      event.preventDefault();
    });
  }

  focus(): void {
    this.input.focus();
    this.input.select();
  }

  update(): void {
    const { state, loaded, shown } = this.app;
    if (this.input.value !== state.search) this.input.value = state.search;
    const key = [state.report, shown.scan, state.sequence, state.search].join("\0");
    if (key === this.searched || !loaded) return;
    this.searched = key;
    this.results = state.search ? (loaded.keys?.search(state.search, state.sequence) ?? []) : [];
    this.at = -1;
    this.tell();
  }

  /** Pin the next result, or the one before. */
  go(step: 1 | -1): void {
    const { results } = this;
    if (!results.length) return;
    this.at = (this.at + step + results.length + (this.at < 0 && step < 0 ? 1 : 0)) % results.length;
    const place = results[this.at] as Place;
    this.searched = [this.app.state.report, this.app.shown.scan, place.sequence, this.app.state.search].join("\0");
    // The text that is searched holds keys; under cross attention it holds no queries.
    const layer = this.app.shownLayer;
    const isCross = layer !== null && layer.query_text !== layer.key_text;
    this.app.set({ ...place, ...(isCross ? { direction: "queries" } : {}) });
    this.tell();
  }

  private tell(): void {
    const { results, at } = this;
    const { search } = this.app.state;
    if (!search) this.status.textContent = "";
    else if (!results.length) this.status.textContent = "not in the text";
    else this.status.textContent = at < 0 ? `${count(results.length)} places, Enter goes on` : `${count(at + 1)} of ${count(results.length)}`;
  }

  dump(): object {
    return { results: this.results.length, at: this.at };
  }
}
