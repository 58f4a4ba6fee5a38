/** What the page is of, and the heads that stand out: the ways in. */

import type { App } from "../app";
import { button, eachFrame, element, rovingFocus, select } from "../dom";
import { count, number } from "../format";
import { nameOf, valueOf } from "../heads";
import { thumbnail } from "./grid";
import type { Loaded, Part } from "../view";

const CARD = 290; // pixels of a card at least
const GAP = 6; // pixels between cards
const MOST_BUTTONS = 4; // reports up to which each has a button

export class Header implements Part {
  readonly root = element("div", { class: "top" });
  private readonly title = element("h1");
  private readonly about = element("p", { class: "soft" });
  private readonly more = element("details", { class: "about" });
  private readonly ways = element("div", {
    class: "ways", "data-part": "standouts", "data-follow": "", role: "group",
  });
  /** Shows all cards, over what is below; hidden where all are in sight. */
  private readonly all = button("", { class: "all", "data-part": "all-cards", tabindex: -1, "aria-expanded": "false" }, () => this.spread(!this.isSpread));
  /** The way back from a card to the total change of all heads. */
  private readonly total = button("", { class: "total", "data-part": "total-change" }, () => {
    const total = this.app.scan.statistics.find((each) => each.is_change);
    if (total) this.app.set({ statistic: total.name });
  });
  private readonly row = element("div", { class: "way-row" });
  private readonly reports: HTMLElement | null;
  private shownReport = -1;

  constructor(
    private readonly app: App,
    tools: HTMLElement,
  ) {
    this.reports = this.makeReports();
    this.row.append(this.total, this.ways, this.all);
    // The names of the reports are the title then.
    this.title.classList.toggle("unseen", this.reports !== null);
    this.root.append(element("div", { class: "line" }, this.title, this.reports, this.about, this.more, tools), this.row);
    rovingFocus(this.ways, () => 1);
    const tell = eachFrame(() => this.tellMore());
    this.ways.addEventListener("scroll", tell);
    new ResizeObserver(tell).observe(this.ways);
  }

  /** Return the choice of a report, or null if there is one alone. */
  private makeReports(): HTMLElement | null {
    const names = this.app.source.reports.map((meta) => meta.title);
    if (names.length < 2) return null;
    if (names.length > MOST_BUTTONS) {
      const options = names.map((name, n): [string, string] => [String(n), name]);
      const choice = select("model", options, (value) => this.app.chooseReport(Number(value)));
      choice.setAttribute("data-part", "report");
      return choice;
    }
    const group = element("div", { class: "modes reports", role: "group", "aria-label": "model", "data-part": "report", "data-follow": "" });
    group.append(...names.map((name, n) => button(name, {}, () => this.app.chooseReport(n))));
    rovingFocus(group, () => 1);
    return group;
  }

  update(loaded: Loaded | null): void {
    const { meta, scan, state } = this.app;
    if (this.shownReport !== state.report && loaded) {
      this.shownReport = state.report;
      const heads = scan.layers.reduce((sum, layer) => sum + layer.heads.length, 0);
      this.title.textContent = this.title.title = meta.title;
      const names = meta.scans.length > 1 ? ` · A is ${meta.scans[0]?.name}, B is ${meta.scans[1]?.name}` : "";
      this.about.textContent = this.about.title = `${count(heads)} heads${names} · ${meta.read}`;
      this.tellReport();
      this.fillWays(loaded);
      this.total.replaceChildren(element("b", {}, "Total change"), ` ${meta.headline}`);
    }
    this.total.hidden = !scan.statistics.some((each) => each.is_change);
    const isOn = this.app.statistic?.is_change ?? false;
    this.total.setAttribute("aria-pressed", String(isOn));
    this.total.tabIndex = isOn ? -1 : 0; // it leads to where the page is
    const ways = [...this.ways.querySelectorAll("button")].filter((way) => way.dataset["head"] === nameOf(state));
    // Under the total change a head's first card is that of its largest.
    const here = ways.find((way) => way.dataset["statistic"] === state.statistic) ?? (this.app.statistic?.is_change ? ways[0] : undefined);
    for (const way of this.ways.querySelectorAll("button")) {
      const isPressed = way.getAttribute("aria-pressed") === "true";
      way.setAttribute("aria-pressed", String(way === here));
      if (way === here && !isPressed) this.reveal(way);
    }
  }

  /** Close the cards or what is said about the page, and go to where it is opened; false if both are closed. */
  closeAbout(): boolean {
    const opener = this.isSpread ? this.all : this.more.open ? this.more.querySelector("summary") : null;
    this.spread(false);
    this.more.open = false;
    opener?.focus();
    return opener !== null;
  }

  private get isSpread(): boolean {
    return this.row.hasAttribute("data-all");
  }

  /** Show all cards, or one row of them; what is below keeps its place. */
  private spread(isSpread: boolean): void {
    if (isSpread === this.isSpread) return;
    this.row.style.minHeight = isSpread ? `${this.row.getBoundingClientRect().height}px` : "";
    this.row.toggleAttribute("data-all", isSpread);
    this.all.setAttribute("aria-expanded", String(isSpread));
    this.tellMore();
  }

  /** Give the cards widths with which none is cut, and offer all where some are out of sight. */
  private tellMore(): void {
    const { scrollLeft, scrollWidth, clientWidth } = this.ways;
    if (!this.isSpread) this.ways.style.setProperty("--cards", String(Math.max(1, Math.floor((clientWidth + GAP) / (CARD + GAP)))));
    this.all.textContent = this.isSpread ? "close" : `all ${this.ways.childElementCount}`;
    this.all.hidden = !this.isSpread && scrollWidth <= clientWidth + 1;
    this.ways.toggleAttribute("data-more", scrollLeft + clientWidth < scrollWidth - 1);
  }

  /** Scroll the sentences, which are one row on a phone, to the one that is shown. */
  private reveal(way: HTMLElement): void {
    const [box, own] = [this.ways.getBoundingClientRect(), way.getBoundingClientRect()];
    if (own.left < box.left || own.right > box.right) this.ways.scrollLeft += own.left - box.left;
    if (own.top < box.top || own.bottom > box.bottom) this.ways.scrollTop += own.top - box.top;
  }

  private tellReport(): void {
    const { report } = this.app.state;
    if (this.reports instanceof HTMLSelectElement) this.reports.value = String(report);
    this.reports?.querySelectorAll("button").forEach((choice, n) => {
      choice.setAttribute("aria-pressed", String(n === report));
      choice.tabIndex = n === report ? 0 : -1;
    });
  }

  private standouts(): HTMLElement[] {
    return this.app.scan.standouts.map((standout, n) => {
      const { layer, head, sentence, middle } = standout;
      return this.card(standout, n, [
        element("b", {}, `Layer ${layer}, head ${head}`),
        ` ${sentence} `,
        element("span", { class: "soft" }, `(middle head: ${middle})`),
      ]);
    });
  }

  /** Return a card for each head that changed: its map in A and in B, and what it does now. */
  private changes({ thumbnails, others }: Loaded): HTMLElement[] {
    const total = this.app.scan.statistics.find((each) => each.is_change);
    return this.app.meta.changes.map((change, n) => {
      const { layer, head, sentence } = change;
      const other = this.app.partner(change);
      const maps = [thumbnails.of(layer, head), other && others ? others.of(other.layer, other.head) : null];
      const value = total && valueOf(this.app.scan, total.name, layer, head);
      const words = element("span", {}, element("b", {}, nameOf(change)), ` ${sentence} `, element("span", { class: "soft" }, value == null ? "" : `(total ${number(value)})`));
      return this.card(change, n, [
        element("span", { class: "maps", "aria-hidden": "true" }, ...maps.map((bytes) => (bytes ? thumbnail(bytes) : element("span")))), words,
      ]);
    });
  }

  private card(
    { layer, head, statistic }: { layer: number; head: number; statistic: string },
    n: number,
    content: (Node | string)[],
  ): HTMLElement {
    const way = button("", { class: "way", tabindex: n ? -1 : 0 }, () => {
      this.spread(false);
      this.app.choose({ layer, head }, statistic);
    });
    way.dataset["head"] = nameOf({ layer, head });
    way.dataset["statistic"] = statistic;
    way.append(...content);
    return way;
  }

  private fillWays(loaded: Loaded): void {
    const { meta } = this.app;
    const isPair = meta.scans.length > 1;
    const ways = isPair ? this.changes(loaded) : this.standouts();
    this.ways.setAttribute("aria-label", isPair ? "what changed" : "heads that stand out");
    const notes = [meta.about, this.about.textContent, meta.same, meta.chosen, ...meta.notes, meta.rule, ...meta.missing];
    this.ways.replaceChildren(...(ways.length || isPair ? ways : [element("p", {}, "No head stands out.")]));
    this.ways.scrollLeft = 0;
    this.tellMore();
    this.more.replaceChildren(
      element("summary", {}, "About", element("span", { class: "wide" }, notesLabel(meta.notes.length))),
      element("div", { class: "notes", tabindex: 0, role: "group", "aria-label": "notes" }, ...notes.filter(Boolean).map((note) => element("p", { class: "small" }, note))),
    );
  }
}

const notesLabel = (count: number): string =>
  count ? ` this page, and ${count === 1 ? "a note" : `${count} notes`}` : " this page";
