/** The cells of the grid where they show one word in all heads: what it looks at, or the weight of a pair. */

import type { Answers, App } from "../app";
import { type RGB, css, diverging, ink, viridis } from "../colours";
import { element, isDark } from "../dom";
import { change, count, inQuotes, least, percent, visible } from "../format";
import { type HeadValue, allHeads, nameOf } from "../heads";
import type { Link } from "../links";
import { isList } from "../state";
import type { Text } from "../text";
import { LEAST } from "../view";

type Test = (head: HeadValue) => boolean;

/** What a cell says: a word or two, a share, both in a sentence, and a colour if it is marked. */
export interface LinkFacts {
  word: string;
  share: string;
  sentence: string;
  colour: RGB | null;
}

export class LinkCells {
  private epoch = 0;
  answers: Answers | null = null;
  /** The largest change, which ends the scale. */
  most = LEAST;

  constructor(
    private readonly app: App,
    private readonly cells: HTMLElement,
    private readonly unit: HTMLElement,
  ) {}

  /** Fill the cells with the answers to what is pinned. */
  async fill(buttons: Map<string, HTMLButtonElement>, test: Test | null): Promise<void> {
    const epoch = ++this.epoch;
    const { app } = this;
    const before = JSON.stringify(this.answers?.asked);
    const answers = await app.answers();
    if (epoch !== this.epoch) return;
    this.answers = answers;
    this.most = Math.max(LEAST, ...(answers?.links ?? []).map(({ weight }) => Math.abs(weight)));
    this.unit.textContent = this.unitLine();
    this.cells.toggleAttribute("data-moves", this.isChange && answers?.asked.other === null);
    const byName = this.byName();
    const dark = isDark(this.cells); // once: it computes styles
    for (const [name, cell] of buttons) {
      const [layer = 0, head = 0] = name.split(".").map(Number);
      const link = byName.get(name) ?? null;
      const value = link && link.bound !== "at most" ? link.weight : null;
      cell.classList.toggle("faint", test !== null && !test({ layer, head, value }));
      this.fillCell(cell, { layer, head }, link, dark);
    }
    if (app.state.order === "strongest") this.sort(buttons, byName);
    if (JSON.stringify(answers?.asked) !== before && isList(app.state)) this.cells.scrollTop = 0;
  }

  /** Forget what is being computed. */
  leave(): void {
    this.epoch++;
    this.answers = null;
  }

  private get isChange(): boolean {
    return this.app.linkMode === "diff";
  }

  byName(): Map<string, Link> {
    return new Map((this.answers?.links ?? []).map((link) => [nameOf(link), link]));
  }

  private fillCell(cell: HTMLElement, id: { layer: number; head: number }, link: Link | null, dark: boolean): void {
    const { word, share, sentence, colour } = this.facts(id.layer, link, dark);
    const isRow = this.app.state.order === "strongest";
    cell.setAttribute("aria-label", `layer ${id.layer}, head ${id.head}: ${sentence}`);
    cell.title = sentence;
    cell.style.background = colour && !isRow ? css(colour) : "";
    cell.style.color = colour && !isRow ? ink(colour) : "";
    cell.classList.toggle("dim", !colour);
    const text = this.otherText(id.layer);
    const place = isRow && word && link && !link.isEven && !link.moved && text?.isKnown ? ` at ${count(link.other)}` : "";
    const shown = [element("span", { class: "word" }, `${word}${place}`), element("span", { class: "share" }, share)];
    if (isRow) {
      const swatch = element("span", { class: "swatch" });
      if (colour) swatch.style.background = css(colour);
      cell.replaceChildren(swatch, element("b", {}, nameOf(id)), ...shown.reverse());
    } else cell.replaceChildren(...(word ? shown : shown.slice(1)));
  }

  /** Return what a cell says of the link of a head. */
  facts(layer: number, link: Link | null, dark: boolean): LinkFacts {
    const asked = this.answers?.asked;
    const sentence = this.words(layer, link);
    if (!link || !asked) return { word: "", share: "·", sentence, colour: null };
    const isLit = link.bound !== "at most" && Math.abs(link.weight) >= LEAST;
    const colour = !isLit ? null : this.isChange ? diverging(-link.weight / this.most, dark) : viridis(Math.sqrt(link.weight));
    return { word: asked.other === null ? this.word(layer, link) : "", share: this.share(link), sentence, colour };
  }

  private word(layer: number, link: Link): string {
    const { asked, texts } = this.answers as Answers;
    const name = (token: number, scan: number): string => wordOf(texts[scan]?.[this.textOf(layer) ?? -1] ?? null, asked.sequence, token);
    const shown = this.app.linkMode === "A" ? 0 : 1;
    if (!link.moved) return link.isEven ? "evenly" : name(link.other, shown);
    const { lost, gained } = link.moved;
    return [lost && name(lost[0], 0), gained ? name(gained[0], 1) : link.isEven && lost && "evenly"].filter(Boolean).join(" → ");
  }

  private share(link: Link): string {
    if (!this.isChange) return shortShare(link);
    const { weight, bound } = link;
    const points = Math.floor(100 * Math.abs(weight));
    if (bound === "at most" || (weight && Math.abs(weight) < LEAST)) return bound === "at least" ? signOf(weight) : `±<${Math.max(1, Math.ceil(100 * weight))}`;
    if (bound === "at least") return `${weight < 0 ? "≤−" : "≥+"}${points}`;
    return change(weight).replace(/ %$/, "");
  }

  private textOf(layer: number): number | null {
    const record = this.app.scan.layers[layer];
    return (this.answers?.asked.direction === "keys" ? record?.key_text : record?.query_text) ?? null;
  }

  /** Return the text of the tokens that are found in a layer. */
  private otherText(layer: number): Text | null {
    return this.answers?.texts[this.app.linkMode === "B" ? 1 : 0]?.[this.textOf(layer) ?? -1] ?? null;
  }

  /** Return the answer of a head as a sentence: “it” at 11 looks at “suitcase” at 9, 57 %. */
  private words(layer: number, link: Link | null): string {
    if (!this.answers) return "no token is pinned";
    const { asked, texts } = this.answers;
    const scan = this.app.linkMode === "B" ? 1 : 0;
    const name = (token: number): string => placed(this.otherText(layer), asked.sequence, token);
    const token = placed(texts[scan]?.[asked.text] ?? null, asked.sequence, asked.token);
    const isKeys = asked.direction === "keys";
    if (!link) return isKeys ? `nothing is known of ${token}` : `no stored link to ${token}`;
    const pairOf = (other: string): string => (isKeys ? `${token} looks at ${other}` : `${other} looks at ${token}`);
    if (this.isChange) {
      const amount = (weight: number): string => (link.bound === "at least" ? `at least ${change(Math.sign(weight) * least(Math.abs(weight)))}` : change(weight));
      if (!link.moved) return `${pairOf(name(link.other))}, from A to B ${link.bound === "at most" ? `by at most ±${percent(link.weight)}` : amount(link.weight)}`;
      const parts = [link.moved.lost, link.moved.gained].flatMap((each) => (each ? [`${name(each[0])} ${amount(each[1])}`] : []));
      return `${token}, ${isKeys ? "what it looks at" : "what looks at it"} from A to B: ${parts.join(", ") || "no change of 1 %"}${link.isEven ? ", now evenly" : ""}`;
    }
    if (link.isEven) return `${isKeys ? `${token} looks evenly at its tokens` : `tokens look evenly at ${token}`}, ${percent(link.weight)} each`;
    const share = { exact: percent(link.weight), "at least": `at least ${percent(least(link.weight))}`, "at most": `under ${percent(link.weight)}` }[link.bound];
    return `${pairOf(name(link.other))}, ${share}`;
  }

  private sort(buttons: Map<string, HTMLButtonElement>, byName: Map<string, Link>): void {
    const rank = (name: string): number => rankOfLink(byName.get(name), this.isChange);
    const names = allHeads(this.app.scan, null).map(nameOf).filter((name) => buttons.has(name));
    names.sort((a, b) => rank(b) - rank(a));
    this.cells.replaceChildren(...names.map((name) => buttons.get(name) as HTMLElement));
  }

  /** Return what the cells show, in sentences. */
  unitLine(): string {
    const { meta, scan, linkMode } = this.app;
    if (!this.answers) return "Choose a token of the text: each head shows what it looks at most.";
    const { asked, links, texts } = this.answers;
    if (!links) return "This page holds no single tokens. A command below the map stores them.";
    const token = placed(texts[0]?.[asked.text] ?? null, asked.sequence, asked.token);
    const names = meta.scans.map(({ name }) => name);
    const sentences = [this.question(token)];
    if (this.isChange) sentences.push(`${asked.other === null ? "Lost most → gained most, and the larger change" : "Changes"} in points. Colours to ±${percent(this.most)}, none under 1 %.`);
    else sentences.push("Colours as in the map, none under 1 %.");
    if (links.some(({ bound }) => bound === "at most")) sentences.push("<: not among the stored keys.");
    if (links.some(({ bound }) => bound === "at least")) sentences.push("≥: another token may give more.");
    if (links.length < allHeads(scan, null).length) sentences.push(asked.direction === "keys" ? "·: not stored." : "·: no stored key.");
    if (names.length > 1) sentences.push({ A: `Heads of A, ${names[0]}.`, B: `Heads of B, ${names[1]}.`, diff: `B − A: ${names[1]} − ${names[0]}.` }[linkMode]);
    return sentences.join(" ");
  }

  private question(token: string): string {
    const { direction, other, sequence } = (this.answers as Answers).asked;
    const verb = this.isChange;
    if (other === null) return direction === "keys" ? `What ${token} looks at ${verb ? "more or less" : "most"}.` : `What looks at ${token} ${verb ? "more or less" : "most"}.`;
    const second = placed(this.otherText(this.app.state.layer), sequence, other);
    const [query, key] = direction === "keys" ? [token, second] : [second, token];
    return `How much ${verb ? "more " : ""}${query} looks at ${key}.`;
  }

  dump(): object {
    const { asked, links } = this.answers ?? { asked: null, links: null };
    return { links: { token: asked?.token ?? null, other: asked?.other ?? null, direction: asked?.direction ?? null, all: links } };
  }
}

/** Return where a link stands in a list that begins with the strongest, or with the largest change. */
export function rankOfLink(link: Link | undefined, isChange: boolean): number {
  if (!link) return -3;
  return (isChange ? Math.abs(link.weight) : link.weight) - (link.bound === "at most" ? 2 : 0);
}

const signOf = (weight: number): string => (weight < 0 ? "≤−0" : "≥+0");

export const wordOf = (text: Text | null, sequence: number, token: number): string =>
  text?.isKnown ? visible(text.word(sequence, token)).trim() : `#${token}`;

/** Return a weight for a cell: "57 %", "≥57 %", "≥0.8 %", "<12 %", or "<1 %" where it has no colour. */
export function shortShare({ weight, bound }: Link): string {
  if (bound === "at least") return `≥${weight < LEAST ? percent(least(weight)) : `${Math.floor(100 * weight)} %`}`;
  if (bound === "at most" || (weight > 0 && weight < LEAST)) return `<${Math.max(1, Math.ceil(100 * weight))} %`;
  return percent(weight);
}

/** Return a word with its place: “it” at 11. */
export const placed = (text: Text | null, sequence: number, token: number): string =>
  text?.isKnown ? `${inQuotes(wordOf(text, sequence, token))} at ${count(token)}` : `token ${count(token)}`;
