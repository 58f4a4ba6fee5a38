/** The cells of the grid where they show one word in all heads: what it looks at, or the weight of a pair. */

import type { App } from "../app";
import { css, ink, viridis } from "../colours";
import { element } from "../dom";
import { count, inQuotes, percent, visible } from "../format";
import { type HeadValue, allHeads, nameOf } from "../heads";
import { type Asked, type Link, linksOf } from "../links";
import { isList } from "../state";
import type { Text } from "../text";
import { LEAST } from "../view";

type Test = (head: HeadValue) => boolean;

export class LinkCells {
  private epoch = 0;
  private shown: { asked: Asked | null; links: Link[] | null } = { asked: null, links: null };

  constructor(
    private readonly app: App,
    private readonly cells: HTMLElement,
    private readonly unit: HTMLElement,
  ) {}

  /** Fill the cells with the answers to what is pinned. */
  async fill(buttons: Map<string, HTMLButtonElement>, test: Test | null): Promise<void> {
    const epoch = ++this.epoch;
    const { app } = this;
    const asked = app.asked(app.state.direction);
    const links = asked && (await linksOf(app.source, app.state.report, 0, asked));
    const texts = await Promise.all(app.scan.texts.map((_, index) => app.loadText(0, index)));
    if (epoch !== this.epoch) return;
    this.unit.textContent = this.unitLine(asked, links, texts);
    const byName = new Map((links ?? []).map((link) => [nameOf(link), link]));
    for (const [name, cell] of buttons) {
      const [layer = 0, head = 0] = name.split(".").map(Number);
      const link = byName.get(name) ?? null;
      const value = link && link.bound !== "at most" ? link.weight : null;
      cell.classList.toggle("faint", test !== null && !test({ layer, head, value }));
      this.fillCell(cell, { layer, head }, link, asked, texts);
    }
    if (app.state.order === "strongest") this.sort(buttons, byName);
    if (JSON.stringify(asked) !== JSON.stringify(this.shown.asked) && isList(app.state)) this.cells.scrollTop = 0;
    this.shown = { asked, links };
  }

  /** Forget what is being computed. */
  leave(): void {
    this.epoch++;
    this.shown = { asked: null, links: null };
  }

  private fillCell(
    cell: HTMLElement, id: { layer: number; head: number }, link: Link | null, asked: Asked | null, texts: (Text | null)[],
  ): void {
    const share = link ? shortShare(link) : "·";
    const word = link && asked && asked.other === null ? wordOf(this.otherText(id.layer, asked, texts), asked.sequence, link.other) : "";
    const isLit = link !== null && link.bound !== "at most" && link.weight >= LEAST;
    const colour = isLit ? viridis(Math.sqrt(link.weight)) : null;
    const sentence = this.words(id.layer, link, asked, texts);
    cell.setAttribute("aria-label", `layer ${id.layer}, head ${id.head}: ${sentence}`);
    cell.title = sentence;
    const isRow = this.app.state.order === "strongest";
    const place = word && link && isRow && this.otherText(id.layer, asked as Asked, texts)?.isKnown ? ` at ${count(link.other)}` : "";
    cell.style.background = colour && !isRow ? css(colour) : "";
    cell.style.color = colour && !isRow ? ink(colour) : "";
    cell.classList.toggle("dim", !colour);
    const shown = [element("span", { class: "word" }, `${word}${place}`), element("span", { class: "share" }, share)];
    if (isRow) {
      const swatch = element("span", { class: "swatch" });
      if (colour) swatch.style.background = css(colour);
      cell.replaceChildren(swatch, element("b", {}, nameOf(id)), ...shown.reverse());
    } else cell.replaceChildren(...(word ? shown : shown.slice(1)));
  }

  /** Return the text of the tokens that are found in a layer. */
  private otherText(layer: number, { direction }: Asked, texts: (Text | null)[]): Text | null {
    const record = this.app.scan.layers[layer];
    return texts[(direction === "keys" ? record?.key_text : record?.query_text) ?? -1] ?? null;
  }

  /** Return the answer of a head as a sentence: “it” at 11 looks at “suitcase” at 9, 57 %. */
  private words(layer: number, link: Link | null, asked: Asked | null, texts: (Text | null)[]): string {
    if (!asked) return "no token is pinned";
    const token = placed(texts[asked.text] ?? null, asked.sequence, asked.token);
    if (!link) return asked.direction === "keys" ? `nothing is known of ${token}` : `no stored link to ${token}`;
    const other = placed(this.otherText(layer, asked, texts), asked.sequence, link.other);
    const [query, key] = asked.direction === "keys" ? [token, other] : [other, token];
    const share = { exact: "", "at least": "at least ", "at most": "under " }[link.bound] + percent(link.weight);
    return `${query} looks at ${key}, ${share}`;
  }

  private sort(buttons: Map<string, HTMLButtonElement>, byName: Map<string, Link>): void {
    const rank = (name: string): number => {
      const link = byName.get(name);
      return link ? link.weight - (link.bound === "at most" ? 2 : 0) : -3;
    };
    const names = allHeads(this.app.scan, null).map(nameOf).filter((name) => buttons.has(name));
    names.sort((a, b) => rank(b) - rank(a));
    this.cells.replaceChildren(...names.map((name) => buttons.get(name) as HTMLElement));
  }

  /** Return what the cells show, in sentences. */
  private unitLine(asked: Asked | null, links: Link[] | null, texts: (Text | null)[]): string {
    const { meta, scan } = this.app;
    if (!asked) return "Choose a token of the text: each head then shows what the token looks at most.";
    if (!links) return "This page holds no single tokens. Below the map stands the command that stores them.";
    const token = placed(texts[asked.text] ?? null, asked.sequence, asked.token);
    const sentences = [`${this.question(asked, token, texts)} Colours as in the map, none under 1 %.`];
    if (links.some(({ bound }) => bound === "at most")) sentences.push("<: not among the stored keys.");
    if (links.some(({ bound }) => bound === "at least")) sentences.push("≥: another token may give more.");
    if (links.length < allHeads(scan, null).length) sentences.push(asked.direction === "keys" ? "·: not stored." : "·: no stored key.");
    if (meta.scans.length > 1) sentences.push(`Heads of A, ${scan.name}.`);
    return sentences.join(" ");
  }

  private question(asked: Asked, token: string, texts: (Text | null)[]): string {
    const { direction, other, sequence } = asked;
    if (other === null) return direction === "keys" ? `What ${token} looks at most.` : `What looks at ${token} most.`;
    const second = placed(this.otherText(this.app.state.layer, asked, texts), sequence, other);
    const [query, key] = direction === "keys" ? [token, second] : [second, token];
    return `How much ${query} looks at ${key}.`;
  }

  dump(): object {
    const { asked, links } = this.shown;
    return { links: { token: asked?.token ?? null, other: asked?.other ?? null, direction: asked?.direction ?? null, all: links } };
  }
}

const wordOf = (text: Text | null, sequence: number, token: number): string =>
  text?.isKnown ? visible(text.word(sequence, token)).trim() : `#${token}`;

/** Return a weight for a cell: "57 %", "≥57 %", "<12 %", or "<1 %" where it has no colour. */
function shortShare({ weight, bound }: Link): string {
  if (bound === "at most" || (weight > 0 && weight < LEAST)) return `<${Math.max(1, Math.ceil(100 * weight))} %`;
  return bound === "at least" ? `≥${Math.floor(100 * weight)} %` : percent(weight);
}

/** Return a word with its place: “it” at 11. */
const placed = (text: Text | null, sequence: number, token: number): string =>
  text?.isKnown ? `${inQuotes(wordOf(text, sequence, token))} at ${count(token)}` : `token ${count(token)}`;
