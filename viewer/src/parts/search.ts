/** Search over the text as it was written, and for a token by its index: "/" begins, "n" and "N" go on. */

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
  /** What was found, in the text of the keys. */
  places: Place[] = [];
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
    this.places = state.search ? (loaded.keys?.search(state.search, state.sequence) ?? []) : [];
    this.at = -1;
    this.tell();
  }

  /** Pin the next result, or the one before. */
  go(step: 1 | -1): void {
    const { places } = this;
    if (!places.length) return;
    this.at = (this.at + step + places.length + (this.at < 0 && step < 0 ? 1 : 0)) % places.length;
    const place = places[this.at] as Place;
    this.searched = [this.app.state.report, this.app.shown.scan, place.sequence, this.app.state.search].join("\0");
    // The text that is searched holds keys; under cross attention it holds no queries.
    const layer = this.app.shownLayer;
    const isCross = layer !== null && layer.query_text !== layer.key_text;
    this.app.set({ sequence: place.sequence, token: place.token, ...(isCross ? { direction: "queries" } : {}) });
    this.tell();
  }

  /** The place that was gone to. */
  get here(): Place | null {
    return this.places[this.at] ?? null;
  }

  private tell(): void {
    const { places, at } = this;
    const { search } = this.app.state;
    const number = `${count(places.length)} ${places.length === 1 ? "place" : "places"}`;
    if (!search) this.status.textContent = "";
    else if (!places.length) this.status.textContent = "not in the text";
    else this.status.textContent = at < 0 ? `${number}, Enter goes on` : `${count(at + 1)} of ${number}`;
  }

  dump(): object {
    return { results: this.places.length, at: this.at };
  }
}
