/** What can be asked of the pinned tokens: the same word in all heads, a second token, and the strongest heads. */

import type { Answers, App } from "../app";
import { button, element } from "../dom";
import { change, count, inQuotes, percent, visible } from "../format";
import { nameOf } from "../heads";
import type { Link } from "../links";
import { idle } from "../source";
import { showsLinks } from "../state";
import { rankOfLink, shortShare, wordOf } from "./link_cells";
import type { Loaded, Part } from "../view";

const MOST_HEADS = 3; // that are named as strongest
const PAIR = `${matchMedia("(pointer: coarse)").matches ? "Long press" : "Shift+click"} another token: the pair in all heads.`;

export class Pinned implements Part {
  readonly root = element("div", { class: "pins", "data-part": "pinned" });
  /** The heads with the strongest links, in a line that is always there. */
  readonly ranking = element("p", { class: "ranking small", "data-part": "ranking" });
  // No tab stop: the key l and the order of the grid do the same.
  private readonly everyHead = button("", { "data-part": "every-head", tabindex: -1 }, () => this.app.toggleLinks());
  /** Beside the search, where it has room. */
  readonly second = button("", { class: "second-token", hidden: true }, () => this.app.set({ second: null }));
  private epoch = 0;

  constructor(private readonly app: App) {
    this.root.append(this.everyHead);
  }

  update(loaded: Loaded | null): void {
    const { state } = this.app;
    this.everyHead.textContent = state.second === null ? "this word in all heads" : "this pair in all heads";
    this.everyHead.setAttribute("aria-pressed", String(showsLinks(state)));
    this.second.hidden = state.second === null;
    void this.rank();
    if (state.second === null) return;
    const text = state.direction === "keys" ? loaded?.keys : loaded?.queries;
    const word = text?.isKnown ? inQuotes(visible(text.word(state.sequence, state.second))) : `token ${count(state.second)}`;
    this.second.textContent = `× ${word}`;
    this.second.setAttribute("aria-label", `unpin ${word}, the second token`);
  }

  private async rank(): Promise<void> {
    const epoch = ++this.epoch;
    if (this.app.state.token === null) this.ranking.textContent = PAIR;
    await idle();
    const answers = epoch === this.epoch ? await this.app.answers() : null;
    if (epoch !== this.epoch || !answers) return;
    const isChange = this.app.linkMode === "diff";
    const ranked = (answers.links ?? []).filter(({ bound, weight }) => bound !== "at most" && weight).sort((a, b) => rankOfLink(b, isChange) - rankOfLink(a, isChange));
    const heads = ranked.slice(0, MOST_HEADS).map((link) => this.choice(link, answers, isChange));
    this.ranking.replaceChildren(heads.length ? (isChange ? "changed: " : "strongest: ") : "", ...heads);
  }

  private choice(link: Link, { asked, texts }: Answers, isChange: boolean): HTMLElement {
    const layer = this.app.scan.layers[link.layer];
    const text = texts[this.app.linkMode === "A" ? 0 : 1]?.[(asked.direction === "keys" ? layer?.key_text : layer?.query_text) ?? -1] ?? null;
    const word = asked.other !== null ? "" : link.isEven ? "evenly" : wordOf(text, asked.sequence, link.other);
    const share = isChange ? change(link.weight) : link.weight < 0.01 ? percent(link.weight) : shortShare(link);
    const choice = button("", { tabindex: -1, "data-head": nameOf(link), title: `${nameOf(link)} ${word} ${share}` }, () => this.app.choose(link));
    choice.append(element("b", {}, nameOf(link)), word && element("span", { class: "word" }, word), share);
    return choice;
  }
}
