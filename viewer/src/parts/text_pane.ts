/** The text with what a token looks at, in words; under cross attention the text of the queries and that of the keys. */

import type { App } from "../app";
import { button, element, rovingFocus, select, setOptions } from "../dom";
import { change, count, inQuotes, percent, range, visible } from "../format";
import { areEven, fewestOf } from "../links";
import type { Direction } from "../state";
import type { Place, Text } from "../text";
import type { Pinned } from "./pinned";
import type { Search } from "./search";
import { Legend } from "./legend";
import { Tokens } from "./tokens";
import { DARK, type Entry, type Lights, type Loaded, type Part, type Seen, marked } from "../view";

const MOST_NAMED = 4; // lit tokens that are named in words
const NOWHERE: Place[] = [];

export class TextPane implements Part {
  readonly root = element("section", { class: "text", "data-part": "text", "aria-label": "text" });
  private readonly summary = element("p", { class: "summary", role: "status" });
  private readonly direction = element("div", { class: "modes", role: "group", "aria-label": "direction", "data-follow": "" });
  private readonly sequences: HTMLSelectElement;
  private readonly main: Tokens;
  private readonly keys: Tokens; // under cross attention; the main ones are the queries then
  private readonly names = [element("h3", {}, "text of the queries"), element("h3", {}, "text of the keys")] as const;
  private readonly legend = new Legend("text");
  private lights: Lights = DARK;

  constructor(
    private readonly app: App,
    pinned: Pinned,
    private readonly search: Search,
  ) {
    this.main = new Tokens(app);
    this.keys = new Tokens(app);
    this.sequences = select("text", [], (value) => app.set({ sequence: Number(value), token: null }));
    for (const [what, words] of [["keys", "looks at"], ["queries", "is looked at by"]] as const) {
      const choice = button(words, {}, () => app.set({ direction: what as Direction }));
      choice.dataset["direction"] = what;
      this.direction.append(choice);
    }
    rovingFocus(this.direction, () => 1);
    const [queriesName, keysName] = this.names;
    this.root.append(
      element("div", { class: "line" }, element("h2", { class: "unseen" }, "A token"), this.direction, pinned.root, this.summary, pinned.ranking, this.sequences, search.root, pinned.second),
      element("div", { class: "panes" },
        element("div", { class: "side" }, queriesName, this.main.root),
        element("div", { class: "side" }, keysName, this.keys.root)),
      this.legend.root,
    );
  }

  private get isCross(): boolean {
    const layer = this.app.shownLayer;
    return layer !== null && layer.query_text !== layer.key_text;
  }

  update(loaded: Loaded | null): void {
    const { state } = this.app;
    const { isCross } = this;
    const stream = (loaded?.queries ?? loaded?.keys)?.stream;
    const names = stream?.names ?? [];
    const sizes = names.map((name, n) => `${name || `text ${n}`}, ${count(stream?.lengths[n] ?? 0)} tokens`);
    setOptions(this.sequences, sizes.map((name, n) => [String(n), name]));
    this.sequences.value = String(state.sequence);
    this.sequences.hidden = names.length < 2;
    for (const choice of this.direction.querySelectorAll("button")) {
      const isHere = choice.dataset["direction"] === state.direction;
      choice.setAttribute("aria-pressed", String(isHere));
      choice.tabIndex = isHere ? 0 : -1;
    }
    // Under cross attention the text says it: a query looks, a key is looked at.
    this.direction.hidden = isCross;
    for (const name of this.names) name.hidden = !isCross;
    (this.keys.root.parentElement as HTMLElement).hidden = !isCross;
    this.root.dataset["mode"] = state.mode;
    if (!loaded) return;
    this.legend.update(state.mode === "diff", this.app.light.end);
    this.main.update(isCross ? loaded.queries : (loaded.keys ?? loaded.queries), isCross ? "queries" : "both");
    this.keys.update(isCross ? loaded.keys : null, isCross ? "keys" : "both");
    this.main.find(isCross ? NOWHERE : this.search.places, this.search.here);
    this.keys.find(isCross ? this.search.places : NOWHERE, this.search.here);
  }

  lit(lights: Lights): void {
    this.lights = lights;
    const { app } = this;
    const isPair = app.state.mode === "both" && app.beside.light.lights.token !== null;
    const first = [...this.words(app), this.pair()];
    if (isPair) this.summary.replaceChildren(answer(...first, ". "), answer(...this.words(app.beside)));
    else this.summary.replaceChildren(...first);
    this.summary.title = this.summary.textContent ?? "";
    this.main.lit(lights);
    if (this.isCross) this.keys.lit(lights);
  }

  /** Return the answer in words: what the token looks at, or what looks at it. */
  private words(view: Seen): (string | HTMLElement)[] {
    const { token, what, entries, exact } = view.light.lights;
    const { loaded, state } = view;
    const { app } = this;
    const [from, to] = what === "keys" ? [loaded?.queries, loaded?.keys] : [loaded?.keys, loaded?.queries];
    if (token === null) return ["Choose a token of the text to see what it looks at."];
    const isDifference = state.mode === "diff";
    const verb = what === "keys" ? "looks at" : "is looked at by";
    const head = isDifference && state.other ? `${app.shortName(state.other)} − ${app.shortName(app.chosen)}` : app.shortName(view.shown);
    const subject = nameOf(token, from ?? null, state.sequence);
    const looker = exact === "block" ? `The block of ${subject}` : subject;
    const ranks = loaded?.top?.ranks ?? 0;
    const isFirst = exact === "top" && ranks === 1;
    const among = exact === "top" ? `, among ${what === "keys" ? "its" : "their"} top ${ranks}:` : "";
    if (exact === "none") return [`${head}: ${looker} ${verb} …`];
    const place = isFirst ? "the first key" : `among the top ${ranks}`;
    if (!entries.length && what === "queries" && among) return [`${head}: ${looker} is ${place} of no query`];
    if (!entries.length) return [`${head}: ${looker} ${verb} nothing`];
    // The second token of a pair is named after these.
    const most = state.second === null && state.mode !== "both" ? MOST_NAMED : 2;
    const named = (marked(entries).length ? marked(entries) : entries.slice(0, 1)).slice(0, most).map((entry, n, all) =>
      element("span", { class: "entry" }, element("b", {}, nameOfEntry(entry, to ?? null, state.sequence)),
        ` (${isDifference ? change(entry.weight) : percent(entry.weight)})${n + 1 < all.length ? ", " : ""}`));
    if (!isDifference && exact !== "block" && areEven(entries.map(({ weight }) => stored(weight)), fewestOf(what))) {
      const number = entries.filter(({ weight }) => stored(weight) === stored(entries[0]?.weight ?? 0)).length;
      const each = `(${percent(entries[0]?.weight ?? 0)} each)`;
      return [`${head}: ${looker} ${verb} ${exact === "top" ? `its top ${number}` : `${count(number)} tokens`} evenly `, element("span", { class: "entry" }, each)];
    }
    if (isFirst) return [`${head}: ${looker} ${what === "keys" ? "looks most at" : "is the first key of"} `, ...named];
    return [`${head}: ${looker} ${verb}${among} `, ...named];
  }

  /** Return what is known of the second token of a pair, in words. */
  private pair(): string {
    const { loaded, state } = this.app;
    const { token, what, entries, exact } = this.lights;
    const { second } = state;
    if (second === null || token !== state.token || !["row", "map", "top"].includes(exact)) return "";
    const entry = entries.find(({ first }) => first === second);
    const name = nameOf(second, (what === "keys" ? loaded?.keys : loaded?.queries) ?? null, state.sequence);
    if (entry) return `; ${name}: ${state.mode === "diff" ? change(entry.weight) : percent(entry.weight)}`;
    return `; ${name}: ${exact === "map" ? "0 %" : "not among these"}`;
  }

  dump(): object {
    return { summary: this.summary.textContent, lines: this.main.lineCount };
  }
}

const stored = (weight: number): number => Math.round(255 * Math.sqrt(weight));

/** Return an answer as two lines. */
const answer = (...words: (string | HTMLElement)[]): HTMLElement => element("span", { class: "answer" }, ...words);

function nameOf(token: number, text: Text | null, sequence: number): string {
  return text?.isKnown ? `${inQuotes(visible(text.word(sequence, token)))} at ${count(token)}` : `token ${count(token)}`;
}

const nameOfEntry = ({ first, last }: Entry, text: Text | null, sequence: number): string =>
  first === last ? nameOf(first, text, sequence) : range(first, last);
