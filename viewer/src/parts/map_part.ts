/** The map of the chosen head, or those of A and B side by side, with legend and readout. */

import type { App } from "../app";
import { element } from "../dom";
import { change, inQuotes, percent, range, visible } from "../format";
import { Legend } from "./legend";
import { type Cell, type CellFacts, MapPane } from "./map";
import type { Loaded, Part, Seen } from "../view";

export class MapPart implements Part {
  readonly root = element("section", { class: "map", "data-part": "map", "aria-label": "map of the head" });
  /** The map of A, of B or of B − A. */
  readonly main: MapPane;
  private readonly beside: MapPane; // that of B, where A stands in the other
  private readonly captions = [element("p", { class: "small" }), element("p", { class: "small" })] as const;
  private readonly badge = element("p", { class: "badge", "data-part": "badge", role: "status" });
  private readonly readout = element("p", { class: "readout", "aria-live": "polite" });
  private readonly legend = new Legend("map");

  constructor(
    private readonly app: App,
    tools: HTMLElement,
    under: HTMLElement,
  ) {
    this.main = new MapPane(app, app, this);
    this.beside = new MapPane(app, app.beside, this);
    this.beside.canvas.tabIndex = -1; // the keys move the cursor of both in the first
    const [first, second] = this.captions;
    const boxes = element("div", { class: "boxes" },
      element("div", { class: "frame" }, first, this.main.root),
      element("div", { class: "frame" }, second, this.beside.root));
    this.root.append(tools, boxes, element("div", { class: "line under" }, this.legend.root, under), this.readout, this.badge);
  }

  private get panes(): MapPane[] {
    return this.app.state.mode === "both" ? [this.main, this.beside] : [this.main];
  }

  // ---- what the panes tell ------------------------------------------------------------------------

  point(pane: MapPane, cell: Cell | null): void {
    const facts = cell && pane.facts(cell);
    for (const each of this.panes) {
      each.cursor = each === pane ? cell : facts && each.cellOf(facts.queries[0], facts.keys[0]);
    }
    const { direction, token } = this.app.state;
    if (!facts) this.app.hover(null);
    else if (token === null) this.app.hover(direction === "keys" ? facts.queries[0] : facts.keys[0]);
    this.tell();
    for (const each of this.panes) each.drawOver();
  }

  pin(pane: MapPane): void {
    const facts = pane.cursor && pane.facts(pane.cursor);
    if (!facts) return;
    const { direction } = this.app.state;
    this.app.pin(direction === "keys" ? facts.queries[0] : facts.keys[0], direction);
    this.tell();
  }

  zoomed(pane: MapPane): void {
    for (const each of this.panes) if (each !== pane) each.draw();
    this.tellResolution();
  }

  // ---- drawing ------------------------------------------------------------------------------------

  update(loaded: Loaded | null): void {
    const { app } = this;
    const isPair = app.state.mode === "both";
    const heads = [app.chosen, app.beside.shown];
    this.captions.forEach((caption, n) => {
      caption.hidden = !isPair;
      caption.textContent = isPair ? app.letteredName(n, heads[n] ?? app.chosen) : "";
    });
    (this.beside.root.parentElement as HTMLElement).hidden = !isPair;
    this.legend.root.hidden = !loaded?.map;
    this.legend.update(app.state.mode === "diff", app.light.end);
    for (const pane of this.panes) pane.update();
    this.tell();
    this.tellResolution();
  }

  lit(): void {
    this.tellResolution();
    for (const pane of this.panes) pane.drawOver();
  }

  /** Say how fine the map is: in the badge, which is always there. */
  private tellResolution(): void {
    const hasSquares = this.panes.some((pane) => pane.hasSquares);
    const ranks = this.app.loaded?.top?.ranks ?? 0;
    const squares = hasSquares ? ` Squares: the ${ranks > 1 ? `${ranks} largest weights` : "largest weight"} of each token.` : "";
    this.badge.textContent = this.badge.title = this.app.light.badge + squares;
  }

  /** Say the cell under the cursor: its queries, its keys, and its weight in each map. */
  private tell(): void {
    const told = this.panes.flatMap((pane) => {
      const facts = pane.cursor && pane.facts(pane.cursor);
      return facts ? [{ view: pane.view, facts }] : [];
    });
    const [first, second] = told;
    if (!first) {
      this.readout.textContent = "";
      return;
    }
    const place = placeOf(first.view, first.facts);
    const isPair = this.panes.length > 1;
    if (!isPair) this.readout.textContent = `${place}: ${(this.app.state.mode === "diff" ? change : percent)(first.facts.value)}`;
    else if (second && placeOf(second.view, second.facts) === place) {
      const weights = [first, second].map(({ view, facts }) => `${this.app.shortName(view.shown)} ${percent(facts.value)}`);
      this.readout.textContent = `${place}: ${weights.join(", ")}`;
    } else {
      this.readout.textContent = told
        .map(({ view, facts }) => `${this.app.shortName(view.shown)}, ${placeOf(view, facts)}: ${percent(facts.value)}`)
        .join("; ");
    }
  }

  dump(): object {
    const cells = this.panes.map((pane) => pane.cursor && pane.facts(pane.cursor));
    return { cell: cells[0], cells, readout: this.readout.textContent, resolution: this.badge.textContent };
  }
}

function placeOf(view: Seen, facts: CellFacts): string {
  const { loaded, state } = view;
  const words = (text: Loaded["keys"], [first, last]: [number, number]): string => {
    if (!text?.isKnown) return "";
    const word = (at: number): string => visible(text.word(state.sequence, at));
    return ` ${inQuotes(first === last ? word(first) : `${word(first)} … ${word(last)}`)}`;
  };
  const [queries, keys] = facts.isShort.map((isShort) => (isShort ? " (the last block, shorter)" : ""));
  const query = `query ${range(...facts.queries)}${queries}${words(loaded?.queries ?? null, facts.queries)}`;
  return `${query} → key ${range(...facts.keys)}${keys}${words(loaded?.keys ?? null, facts.keys)}`;
}
