/** The heads by layer, as numbers or as small maps, or ranked by the statistic. */

import type { App } from "../app";
import type { Scan, Statistic } from "../contract";
import { type RGB, css, diverging, ink, viridis } from "../colours";
import { button, eachFrame, element, hasTabs, isDark, rovingFocus, select, setOptions } from "../dom";
import { isShare, long, short } from "../format";
import { type HeadValue, allHeads, compared, filterOf, nameOf, ranked, scalePosition, spreadOf } from "../heads";
import { THUMB, WEIGHTS } from "../maps";
import { type Order, isList, showsLinks } from "../state";
import { LinkCells } from "./link_cells";
import { colourOf } from "./map_image";
import { spreadEnds, spreadStrip, spreadWords } from "./spread";
import type { Loaded, Part } from "../view";

const EDGE = 26; // pixels of the numbers at the edges, which stay in place
const ROWS = "A row is a layer, a column a head.";
const MARGIN = 66; // pixels of the strips at the right edge

const ORDERS: [Order, string][] = [
  ["layers", "by layer"],
  ["maps", "as small maps"],
  ["value", "most first"],
  ["links", "word by layer"],
  ["strongest", "word by rank"],
];

export class Grid implements Part {
  readonly root = element("section", { class: "heads", "data-part": "grid", "aria-label": "heads" });
  private readonly statistics: HTMLSelectElement;
  private readonly orders: HTMLSelectElement;
  private readonly filter = element("input", {
    type: "text", "aria-label": "filter", placeholder: "filter: 3, > 50", title: "3: a layer; *.7: head 7 of each layer; > 50: values", autocomplete: "off", spellcheck: "false",
  });
  private readonly plain = element("input", { type: "checkbox" });
  private readonly plainLabel = element("label", { class: "small" }, this.plain, " without special tokens");
  private readonly unit = element("p", { class: "unit soft small" });
  private readonly asked = element("span", { role: "status" });
  private readonly hint = element("p", { class: "hint small" });
  private readonly cells = element("div", { class: "cells", role: "group", "aria-label": "heads of the model" });
  private readonly buttons = new Map<string, HTMLButtonElement>();
  private layers: HTMLButtonElement[] = [];
  private wasChoosing = false;
  private drawn = "";
  private revealed = "";
  private columns = 1;
  readonly links: LinkCells;
  most = 1; // the largest difference, which ends the scale

  constructor(private readonly app: App) {
    this.plain.addEventListener("change", () => app.set({ isPlain: this.plain.checked }, "replace"));
    this.statistics = select("statistic", [], (value) => app.set({ statistic: value }));
    this.orders = select("order", ORDERS, (value) => app.set({ order: value as Order }));
    this.filter.addEventListener("input", () => app.set({ filter: this.filter.value }, "replace"));
    this.hint.append(this.asked, button("cancel", {}, () => app.choosing(false)));
    this.root.append(
      element("div", { class: "line" }, this.statistics, this.orders, this.plainLabel, this.filter),
      this.hint,
      this.unit,
      this.cells,
    );
    this.links = new LinkCells(app, this.cells, this.unit);
    this.cells.addEventListener("keydown", (event) => this.crossed(event));
    rovingFocus(this.cells, () => this.columns, ".cell");
    rovingFocus(this.cells, () => 1, ".layer");
    this.cells.addEventListener("click", (event) => this.clicked(event));
    const tell = eachFrame(() => this.tellMore());
    this.cells.addEventListener("scroll", tell);
    new ResizeObserver(tell).observe(this.cells);
  }

  /** Fade the right edge where heads are out of sight. */
  private tellMore(): void {
    const { scrollLeft, scrollWidth, clientWidth } = this.cells;
    this.cells.toggleAttribute("data-more", scrollLeft + clientWidth < scrollWidth - 1);
  }

  /** Go by the arrow keys from the first head of a layer to the layer's number, and back. */
  private crossed(event: KeyboardEvent): void {
    const from = event.target as HTMLElement;
    const row = from.closest(".row");
    const [number, first] = [row?.querySelector<HTMLElement>(".layer"), row?.querySelector<HTMLElement>("button.cell")];
    const isLeft = event.key === "ArrowLeft" && from === first;
    const next = isLeft ? number : event.key === "ArrowRight" && from === number ? first : null;
    if (!next) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    next.focus();
    if (!this.app.isChoosing) next.click();
  }

  private clicked(event: MouseEvent): void {
    const { app } = this;
    const [id, layer] = [idOf(event.target), layerOf(event.target)];
    const isCompared = event.shiftKey || app.isChoosing;
    const isPhone = hasTabs(this.root);
    if (id && isCompared) app.compareWith({ scan: 0, ...id });
    else if (id) app.choose(id);
    else if (layer !== null && isCompared) app.compareLayers(layer);
    else if (layer !== null) app.chooseLayer(layer);
    if (isPhone && layer !== null) app.set({ tab: "facts" }, "replace");
    if (isPhone && id && isCompared) app.set({ tab: "map" }, "replace");
  }

  /** Say what is chosen next, and go there; the arrow keys then move without choosing. */
  private tellChoosing(): void {
    const { isChoosing, state } = this.app;
    const isLayer = state.subject === "layer";
    const own = isLayer ? `layer ${state.layer}` : nameOf(state);
    // In the place of what the cells show, so that nothing moves.
    this.hint.hidden = !isChoosing;
    this.unit.hidden = isChoosing;
    this.asked.textContent = isChoosing ? `Choose a ${isLayer ? "layer" : "head"} to compare with ${own}.` : "";
    this.cells.toggleAttribute("data-follow", !isChoosing);
    this.cells.classList.toggle("choosing", isChoosing);
    if (isChoosing && !this.wasChoosing) {
      if (hasTabs(this.root)) this.app.set({ tab: "heads" }, "replace");
      const first = isLayer ? this.layers[state.layer] : this.buttons.get(nameOf(state));
      requestAnimationFrame(() => first?.focus());
    }
    this.wasChoosing = isChoosing;
  }

  update(loaded: Loaded | null): void {
    const { state, statistic, scan } = this.app;
    const key = [state.report, state.statistic, state.order, state.filter, this.comparison, this.app.linkMode, isDark(this.root)].join("\0");
    this.statistics.hidden = showsLinks(state);
    this.plainLabel.hidden = !showsLinks(state);
    this.plain.checked = state.isPlain;
    this.plain.disabled = state.second !== null;
    if (key !== this.drawn && loaded) {
      this.drawn = key;
      setOptions(this.statistics, statisticOptions(scan.statistics));
      this.statistics.value = state.statistic;
      this.orders.value = state.order;
      if (this.filter.value !== state.filter) this.filter.value = state.filter;
      this.draw(loaded, statistic);
    }
    if (showsLinks(state) && loaded) void this.links.fill(this.buttons, filterOf(state.filter, { kind: "share" }));
    const other = state.other;
    for (const [name, cell] of this.buttons) {
      const isChosen = name === nameOf(state);
      cell.setAttribute("aria-pressed", String(isChosen));
      cell.classList.toggle("other", other?.scan === 0 && name === nameOf(other));
      cell.tabIndex = isChosen ? 0 : -1;
    }
    this.layers.forEach((layer, index) => {
      const isChosen = index === state.layer;
      layer.setAttribute("aria-pressed", String(isChosen && state.subject === "layer"));
      layer.classList.toggle("other", index === state.against);
    });
    this.tellChoosing();
    requestAnimationFrame(() => {
      this.reveal();
      this.tellMore();
    });
  }

  /** Scroll to the chosen head, once for each choice and each drawing; a list is drawn from its beginning. */
  private reveal(): void {
    const name = nameOf(this.app.state);
    const cell = this.buttons.get(name);
    const key = `${this.drawn}\0${name}`;
    if (!cell || key === this.revealed) return;
    const isDrawn = this.revealed.startsWith(`${this.drawn}\0`);
    this.revealed = key;
    if (isList(this.app.state) && !isDrawn) {
      this.cells.scrollTop = 0;
      return;
    }
    const [box, own] = [this.cells.getBoundingClientRect(), cell.getBoundingClientRect()];
    const isInside = (from: number, to: number, low: number, high: number): boolean => low <= from && to <= high;
    if (!isInside(own.top, own.bottom, box.top + EDGE, box.bottom)) {
      this.cells.scrollTop += own.top - box.top - box.height / 2;
    }
    if (!isInside(own.left, own.right, box.left + EDGE, box.right - MARGIN)) {
      this.cells.scrollLeft += own.left - box.left - box.width / 2;
    }
  }

  /** The mode in which all heads of two scans are compared, or null if one scan is shown. */
  get comparison(): "B" | "diff" | null {
    const { mode, other } = this.app.state;
    if (mode === "A" || other?.scan !== 1 || this.app.statistic?.is_change) return null;
    return mode === "B" ? "B" : "diff";
  }

  values(statistic: Statistic | null): HeadValue[] {
    const { meta, scan } = this.app;
    const second = meta.scans[1];
    const mode = this.comparison;
    if (!mode || !second || !statistic) return allHeads(scan, statistic);
    return compared([scan, second], statistic.name, mode, (head) => this.app.partner(head));
  }

  /** Return the small map of each head: of A, of its partner in B, or B − A. */
  private pictures({ thumbnails, others }: Loaded): (head: HeadValue) => HTMLCanvasElement | null {
    const { linkMode } = this.app;
    const bytesOf = (head: HeadValue): [Uint8Array | null, Uint8Array | null] => {
      const other = this.app.partner(head);
      return [thumbnails.of(head.layer, head.head), other && others ? others.of(other.layer, other.head) : null];
    };
    const differenceOf = (head: HeadValue): Float32Array | null => {
      const [a, b] = bytesOf(head);
      return a && b && Float32Array.from(a, (step, at) => (WEIGHTS[b[at] ?? 0] ?? 0) - (WEIGHTS[step] ?? 0));
    };
    if (linkMode !== "diff") {
      return (head) => {
        const bytes = bytesOf(head)[linkMode === "B" ? 1 : 0];
        return bytes && thumbnail(bytes);
      };
    }
    const most = allHeads(this.app.scan, null).reduce((end, head) => Math.max(end, ...(differenceOf(head) ?? []).map(Math.abs)), 0.01);
    const dark = isDark(this.root);
    return (head) => {
      const values = differenceOf(head);
      return values && picture([...values].map((value) => colourOf(value, true, most, dark)));
    };
  }

  private draw(loaded: Loaded, statistic: Statistic | null): void {
    const { scan, state } = this.app;
    const pictures = state.order === "maps" ? this.pictures(loaded) : null;
    const heads = this.values(statistic);
    this.most = Math.max(statistic?.least_change ?? 1, ...heads.map(({ value }) => Math.abs(value ?? 0)));
    const test = filterOf(state.filter, statistic);
    this.filter.setAttribute("aria-invalid", String(test === null));
    if (!showsLinks(state)) this.unit.textContent = this.unitLine(statistic);
    this.buttons.clear();
    this.layers = [];
    const cellOf = (head: HeadValue): HTMLButtonElement => {
      const cell = this.cell(head, statistic, pictures);
      cell.classList.toggle("faint", test !== null && !test(head));
      this.buttons.set(nameOf(head), cell);
      return cell;
    };
    this.cells.className = `cells ${state.order}`;
    if (!showsLinks(state)) this.links.leave();
    if (state.order === "strongest") {
      this.columns = 1;
      this.cells.replaceChildren(...heads.map(cellOf));
      return;
    }
    if (state.order === "value") {
      const kept = ranked(heads, this.comparison === "diff").filter((head) => test === null || test(head));
      this.columns = 1;
      this.cells.replaceChildren(...kept.map(cellOf));
      return;
    }
    const numbers = columnsOf(scan);
    this.columns = numbers?.length ?? Math.max(1, ...scan.layers.map((layer) => layer.heads.length));
    const rows = scan.layers.map((_, index) => {
      const own = heads.filter((head) => head.layer === index);
      const places = numbers?.map((number) => own.find(({ head }) => head === number)) ?? own;
      return element("div", { class: "row" }, ...this.margins(index, own, statistic), ...places.map((head) => (head ? cellOf(head) : gap())));
    });
    const labels = numbers ?? Array<string>(this.columns).fill("");
    this.cells.replaceChildren(headNumbers(labels, this.hasStrips ? this.ends(statistic) : ["", ""]), ...rows);
  }

  /** Return the number of a layer, and its strip, which stands at the end of the row. */
  private margins(index: number, heads: HeadValue[], statistic: Statistic | null): HTMLElement[] {
    const record = this.app.scan.layers[index];
    const spread = spreadOf(heads.map(({ value }) => value));
    const words = statistic && this.hasStrips ? `: ${spreadWords(statistic, spread)}` : "";
    const number = button(record?.kind === "cross" ? `${index}×` : String(index), {
      class: "soft number layer", "aria-label": `layer ${index}${words}`, title: `layer ${index}${words}`, tabindex: -1, disabled: !heads.length,
    }, () => undefined);
    number.dataset["layer"] = String(index);
    this.layers.push(number);
    const place = (value: number): number => this.place(statistic, value);
    return statistic && this.hasStrips ? [number, spreadStrip(spread, place)] : [number];
  }

  /** True if the cells show the statistic, of which the strips are. */
  private get hasStrips(): boolean {
    return this.app.state.order === "layers";
  }

  /** Return where a value stands on the scale of the colours, from 0 to 1. */
  private place(statistic: Statistic | null, value: number): number {
    if (this.comparison === "diff") return (value / this.most + 1) / 2;
    return statistic ? Math.min(1, Math.max(0, scalePosition(statistic, value))) : 0;
  }

  private ends(statistic: Statistic | null): [low: string, high: string] {
    if (!statistic) return ["", ""];
    const end = short(statistic, this.most);
    return this.comparison === "diff" ? [`−${end}`, end] : endsOf(statistic);
  }

  dump(): object {
    return this.links.dump();
  }

  private unitLine(statistic: Statistic | null): string {
    const names = this.app.meta.scans.map(({ name }) => name);
    if (this.app.state.order === "maps") {
      const which = names.length > 1 ? { A: ` of A, ${names[0]}`, B: ` of B, ${names[1]}`, diff: `, ${names[1]} − ${names[0]}` }[this.app.linkMode] : "";
      return `Small maps${which}: queries down, keys across, in 16 × 16 parts. ${ROWS}`;
    }
    if (!statistic) return "";
    const isDifference = this.comparison === "diff";
    const [low, high] = this.ends(statistic);
    const order = this.app.state.order === "value" ? `The ${isDifference ? "largest change" : "most"} first.` : ROWS;
    const which = isDifference ? `, ${names[1]} − ${names[0]}` : this.comparison ? ` of B, ${names[1]}` : names.length > 1 && !statistic.is_change ? ` of A, ${names[0]}` : "";
    return `${statistic.heading}${which}: ${unitOf(statistic)}, colours from ${low} to ${high}. ${order}`;
  }

  colour({ value }: HeadValue, statistic: Statistic | null, dark = false): RGB | null {
    if (!statistic || value === null) return null;
    return this.comparison === "diff" ? diverging(-value / this.most, dark) : viridis(scalePosition(statistic, value));
  }

  private cell(head: HeadValue, statistic: Statistic | null, pictures: ((head: HeadValue) => HTMLCanvasElement | null) | null): HTMLButtonElement {
    const cell = element("button", { type: "button", class: "cell", "data-id": nameOf(head) });
    if (showsLinks(this.app.state)) return cell;
    const words = statistic ? long(statistic, head.value) : "no value";
    cell.setAttribute("aria-label", `layer ${head.layer}, head ${head.head}: ${pictures ? "its map" : words}`);
    const colour = this.colour(head, statistic, isDark(this.root));
    if (pictures) {
      cell.append(pictures(head) ?? "·");
    } else if (this.app.state.order === "value") {
      const swatch = element("span", { class: "swatch" });
      if (colour) swatch.style.background = css(colour);
      cell.append(swatch, element("b", {}, nameOf(head)), ` ${words}`);
    } else {
      cell.textContent = statistic ? short(statistic, head.value) : "·";
      if (colour) {
        cell.style.background = css(colour);
        cell.style.color = ink(colour);
      }
    }
    return cell;
  }
}

function idOf(target: EventTarget | null): { layer: number; head: number } | null {
  const id = (target as Element | null)?.closest<HTMLElement>("[data-id]")?.dataset["id"]?.split(".").map(Number);
  return id ? { layer: id[0] ?? 0, head: id[1] ?? 0 } : null;
}

function layerOf(target: EventTarget | null): number | null {
  const layer = (target as Element | null)?.closest<HTMLElement>("[data-layer]")?.dataset["layer"];
  return layer === undefined ? null : Number(layer);
}

function statisticOptions(statistics: Statistic[]): [string, string][] {
  const order = [...statistics.filter(({ first }) => first), ...statistics.filter(({ first }) => !first)];
  return order.map(({ name, label }) => [name, label]);
}

/** Return the unit of a statistic, in per cent where it is a share. */
export function unitOf(statistic: Statistic): string {
  const [unit = ""] = statistic.unit.split(/,|;| \(/);
  return isShare(statistic) ? unit.replace("share", "per cent") : unit;
}

const endsOf = (statistic: Statistic): [low: string, high: string] =>
  isShare(statistic) ? ["0", "100"] : [short(statistic, statistic.low), short(statistic, statistic.high)];

/** Return the numbers of the heads that a layer or another has, or null where layers have them in other orders. */
function columnsOf({ layers }: Scan): number[] | null {
  const first = layers.find(({ heads }) => heads.length)?.heads ?? [];
  if (layers.every(({ heads }) => heads.join() === first.join())) return first;
  const isAscending = layers.every(({ heads }) => heads.every((head, at) => !at || head > (heads[at - 1] ?? 0)));
  return isAscending ? [...new Set(layers.flatMap(({ heads }) => heads))].sort((a, b) => a - b) : null;
}

/** Return the place of a head that a layer has not, as after a cut. */
const gap = (): HTMLElement => element("span", { class: "cell gap", "aria-hidden": "true" });

/** Return a row with the numbers of the heads, and the ends of the strips. */
function headNumbers(labels: (number | string)[], ends: [low: string, high: string]): HTMLElement {
  const numbers = labels.map((label) => element("span", { class: "column" }, String(label)));
  return element("div", { class: "row soft numbers", "aria-hidden": "true" }, element("span", { class: "number" }), spreadEnds(...ends), ...numbers);
}

/** Return a canvas with a pooled map; a byte is a position on the colour scale. */
export const thumbnail = (bytes: Uint8Array): HTMLCanvasElement => picture([...bytes].map((byte) => viridis(byte / 255)));

function picture(colours: RGB[]): HTMLCanvasElement {
  const canvas = element("canvas", { width: THUMB, height: THUMB, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const image = context?.createImageData(THUMB, THUMB);
  if (!context || !image) return canvas;
  colours.forEach((colour, at) => image.data.set([...colour, 255], 4 * at));
  context.putImageData(image, 0, 0);
  return canvas;
}
