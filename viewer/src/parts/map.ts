/** The map of a head, with token axes, zoom, a cursor and the lit tokens. */

import { axisLeft, axisTop } from "d3-axis";
import { type ScaleLinear, scaleLinear } from "d3-scale";
import { type Selection, select as pick } from "d3-selection";
import { type D3ZoomEvent, type ZoomBehavior, zoom, zoomIdentity } from "d3-zoom";
import type { App } from "../app";
import { css, diverging, viridis } from "../colours";
import { eachFrame, element, fitCanvas, isDark } from "../dom";
import { count, visible } from "../format";
import type { Axis, HeadMap } from "../maps";
import { WHOLE, type Zoom } from "../state";
import { type Entry, LEAST, type Lights, type Loaded, type Seen, marked } from "../view";
import { imageOf } from "./map_image";

const MARGIN = { left: 68, top: 34, right: 24, bottom: 8 };
const SMALL = { ...MARGIN, left: 44, right: 12 }; // on a phone, and of two maps
const MOST_ROOM = 48; // pixels for longer words at the left, where the map does not need them
const LABEL = 11; // pixels of a letter at an axis
const GAP = 6; // pixels between labels
const [ACROSS, DOWN] = [62, 24]; // pixels from number to number
const TICK = 9; // pixels of a tick and the gap to its label
const FEWEST_TOKENS = 16; // across the map at the largest zoom
const SQUARE = 2; // pixels of a token from which single weights are drawn
const RING = 10; // radius in pixels of the ring of a weight of 1
const LEAST_RING = 3; // of the second token of a pair
const NARROW = 420; // pixels of a small box
const WORD_ROOM = 64; // pixels over a map with words at rest
const LEAST_OF_WORD = 12; // pixels of a token from which it has room for its word
const SINE = Math.SQRT1_2; // of the turn of words over the map, and its cosine

export interface Cell {
  row: number;
  col: number;
}

export interface CellFacts {
  queries: [number, number];
  keys: [number, number];
  value: number;
  /** True if the last block of queries, or of keys, is here and has fewer tokens than the others. */
  isShort: [queries: boolean, keys: boolean];
}

/** What a pane tells of the pointer and the keys; the maps share their cursor and their zoom. */
export interface Hands {
  point(pane: MapPane, cell: Cell | null): void;
  pin(pane: MapPane): void;
  zoomed(pane: MapPane): void;
}

export class MapPane {
  readonly root = element("div", { class: "box" });
  readonly canvas = element("canvas", {
    tabindex: 0, role: "application", "aria-roledescription": "map",
    "aria-label": "map: arrow keys move over the cells, Enter pins the query",
  });
  private readonly over = element("canvas", { class: "over", "aria-hidden": "true" });
  readonly axes = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  cursor: Cell | null = null;
  /** True if weights of single tokens are drawn over the blocks. */
  hasSquares = false;
  private image: HTMLCanvasElement | null = null;
  private size: [number, number] = [1, 1];
  private margin = MARGIN;
  private readonly behaviour: ZoomBehavior<HTMLCanvasElement, unknown>;
  private isSettingZoom = false;

  constructor(
    private readonly app: App,
    readonly view: Seen,
    private readonly hands: Hands,
  ) {
    this.axes.setAttribute("aria-hidden", "true");
    this.root.append(this.canvas, this.over, this.axes);
    this.behaviour = zoom<HTMLCanvasElement, unknown>()
      .on("zoom", (event: D3ZoomEvent<HTMLCanvasElement, unknown>) => this.zoomed(event))
      .on("end", () => this.keepZoom());
    pick(this.canvas).call(this.behaviour).on("dblclick.zoom", null);
    this.canvas.addEventListener("pointermove", eachFrame((event: PointerEvent) => hands.point(this, this.cellAt(event))));
    this.canvas.addEventListener("pointerleave", () => hands.point(this, null));
    this.canvas.addEventListener("click", (event) => this.clicked(event));
    this.canvas.addEventListener("dblclick", () => this.app.set({ zoom: WHOLE }));
    this.canvas.addEventListener("keydown", (event) => this.keyed(event));
    new ResizeObserver(eachFrame(() => this.draw())).observe(this.root);
  }

  // ---- geometry ---------------------------------------------------------------------------------

  private get map(): HeadMap | null {
    return this.view.loaded?.map ?? null;
  }

  /** Scales from blocks to CSS pixels of the canvas, under the zoom. */
  private scales(): { x: ScaleLinear<number, number>; y: ScaleLinear<number, number> } {
    const [factor, left, top] = this.app.state.zoom;
    const { rows, cols } = this.map ?? { rows: 1, cols: 1 };
    return {
      x: scaleLinear([left * cols, (left + 1 / factor) * cols], [0, this.size[0]]),
      y: scaleLinear([top * rows, (top + 1 / factor) * rows], [0, this.size[1]]),
    };
  }

  private cellAt(event: MouseEvent): Cell | null {
    const map = this.map;
    if (!map) return null;
    const box = this.canvas.getBoundingClientRect();
    const { x, y } = this.scales();
    const col = Math.floor(x.invert(event.clientX - box.left));
    const row = Math.floor(y.invert(event.clientY - box.top));
    return row < 0 || col < 0 || row >= map.rows || col >= map.cols ? null : { row, col };
  }

  facts({ row, col }: Cell): CellFacts | null {
    const map = this.map;
    const axes = this.view.light.axes();
    if (!map || !axes) return null;
    const [queries, keys] = axes;
    return {
      queries: queries.tokens(row),
      keys: keys.tokens(col),
      value: map.values[row * map.cols + col] ?? 0,
      isShort: [queries.isShort(row), keys.isShort(col)],
    };
  }

  /** Return the cell with a query and a key, or null if the map ends before them. */
  cellOf(query: number, key: number): Cell | null {
    const [queries, keys] = this.view.light.axes() ?? [];
    if (!queries || !keys || query >= queries.length || key >= keys.length) return null;
    return { row: queries.block(query), col: keys.block(key) };
  }

  // ---- input ------------------------------------------------------------------------------------

  private clicked(event: MouseEvent): void {
    if (event.defaultPrevented) return; // the end of a drag
    this.hands.point(this, this.cellAt(event));
    this.hands.pin(this);
  }

  private keyed(event: KeyboardEvent): void {
    const map = this.map;
    const steps: Record<string, [number, number]> = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
    };
    const step = steps[event.key];
    if (map && step) {
      const { row, col } = this.cursor ?? { row: 0, col: 0 };
      const within = (value: number, n: number): number => Math.min(n - 1, Math.max(0, value));
      this.hands.point(this, { row: within(row + step[0], map.rows), col: within(col + step[1], map.cols) });
    } else if (event.key === "Enter" || event.key === " ") this.hands.pin(this);
    else if (event.key === "+" || event.key === "=") this.zoomBy(2);
    else if (event.key === "-") this.zoomBy(0.5);
    else if (event.key === "0") this.app.set({ zoom: WHOLE });
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  private zoomBy(factor: number): void {
    this.behaviour.scaleBy(pick(this.canvas), factor);
    this.keepZoom();
  }

  private zoomed(event: D3ZoomEvent<HTMLCanvasElement, unknown>): void {
    if (this.isSettingZoom) return;
    const { k, x, y } = event.transform;
    const [width, height] = this.size;
    // Kept at once: what draws before the next frame takes the zoom from the state.
    this.app.state.zoom = [k, -x / (k * width), -y / (k * height)];
    this.drawZoom();
  }

  private readonly drawZoom = eachFrame(() => {
    this.drawView();
    this.hands.zoomed(this);
  });

  private keepZoom(): void {
    if (!this.isSettingZoom) this.app.set({ zoom: this.app.state.zoom }, "replace");
  }

  private applyZoom([factor, left, top]: Zoom): void {
    const [width, height] = this.size;
    this.isSettingZoom = true;
    const closest = Math.max(1, Math.max(...(this.view.light.axes() ?? []).map(({ length }) => length)) / FEWEST_TOKENS);
    this.behaviour.scaleExtent([1, closest]).extent([[0, 0], [width, height]]).translateExtent([[0, 0], [width, height]]);
    this.behaviour.transform(
      pick(this.canvas),
      zoomIdentity.translate(-left * factor * width, -top * factor * height).scale(factor),
    );
    this.isSettingZoom = false;
  }

  // ---- drawing ----------------------------------------------------------------------------------

  update(): void {
    const map = this.map;
    this.image = map ? imageOf(map, this.app.state.mode === "diff", isDark(this.root)) : null;
    this.draw();
  }

  draw(): void {
    const small = this.root.clientWidth < NARROW ? SMALL : MARGIN;
    const margin = this.hasWordsAtRest ? { ...small, top: WORD_ROOM } : small;
    const across = this.root.clientWidth - margin.left - margin.right;
    const down = this.root.clientHeight - margin.top - margin.bottom;
    if (across <= 0 || down <= 0) return;
    const { rows, cols } = this.map ?? { rows: 1, cols: 1 };
    const cell = Math.min(across / cols, down / rows);
    this.size = [Math.floor(cell * cols), Math.floor(cell * rows)];
    this.margin = { ...margin, left: margin.left + Math.min(MOST_ROOM, across - this.size[0]) };
    for (const canvas of [this.canvas, this.over]) {
      canvas.style.left = `${this.margin.left}px`;
      canvas.style.top = `${this.margin.top}px`;
      canvas.style.width = `${this.size[0]}px`;
      canvas.style.height = `${this.size[1]}px`;
    }
    this.applyZoom(this.app.state.zoom);
    this.drawView();
  }

  /** True for a text of so few tokens that the whole map has their words at its sides. */
  private get hasWordsAtRest(): boolean {
    const keys = this.view.light.axes()?.[1];
    return !!keys && keys.size === 1 && !!this.view.loaded?.keys?.isKnown && keys.length <= (this.root.clientWidth - MARGIN.left) / LEAST_OF_WORD && this.root.clientHeight > NARROW;
  }

  private drawView(): void {
    const [width, height] = this.size;
    const context = fitCanvas(this.canvas, width, height);
    const [factor, left, top] = this.app.state.zoom;
    if (this.image) {
      const { width: cols, height: rows } = this.image;
      context.drawImage(this.image, left * cols, top * rows, cols / factor, rows / factor, 0, 0, width, height);
      this.drawTopKeys(context);
    } else {
      context.fillStyle = getComputedStyle(this.root).color;
      context.font = "14px system-ui, sans-serif";
      context.fillText(this.view.loaded ? this.reason() : "…", 12, 24);
    }
    this.drawAxes();
    this.drawOver();
  }

  /** Draw the stored weights of single tokens over the blocks, as soon as a token has some pixels. */
  private drawTopKeys(context: CanvasRenderingContext2D): void {
    this.hasSquares = false;
    const { loaded, state, light } = this.view;
    const [queries, keys] = light.axes() ?? [];
    if (!queries || !keys || !loaded?.top || !loaded.queries || state.mode === "diff") return;
    const { x, y } = this.scales();
    const [across, down] = [(x(1) - x(0)) / keys.size, (y(1) - y(0)) / queries.size];
    if (Math.min(across, down) < SQUARE || light.hasSingleTokens) return;
    this.hasSquares = true;
    const first = Math.max(0, Math.floor(y.invert(0) * queries.size));
    const shown = Math.min(queries.length, loaded.queries.lengthOf(state.sequence));
    const last = Math.min(shown - 1, Math.ceil(y.invert(this.size[1]) * queries.size));
    const before = loaded.queries.first[state.sequence] ?? 0;
    context.strokeStyle = "rgb(255 255 255 / 60%)";
    context.lineWidth = 0.5;
    for (let query = first; query <= last; query++) {
      for (const [key, weight] of loaded.top.keysOf(before + query)) {
        const box = [x(key / keys.size), y(query / queries.size), across, down] as const;
        context.fillStyle = css(viridis(Math.sqrt(weight)));
        context.fillRect(...box);
        if (weight >= LEAST) context.strokeRect(...box);
      }
    }
  }

  private reason(): string {
    const { loaded, scan, shown, state } = this.view;
    if (state.mode === "diff" && loaded?.a && loaded.b) return "The two maps have other blocks.";
    if (!scan.layers[shown.layer]?.map) return "The scan has no maps: scan with the statistic map.";
    return "This head has no map: its weights are no numbers.";
  }

  private drawAxes(): void {
    const { x, y } = this.scales();
    const [queries, keys] = this.view.light.axes() ?? [];
    const { left, right } = this.margin;
    this.axes.setAttribute("width", String(Math.max(this.size[0] + left + right, this.root.clientWidth)));
    this.axes.setAttribute("height", String(this.size[1] + this.margin.top + this.margin.bottom));
    const root = pick(this.axes);
    root.selectAll("*").remove();
    if (!queries || !keys) return;
    const [across, down] = [tokensOf(x, keys), tokensOf(y, queries)];
    const { loaded } = this.view;
    const group = (name: string) => root.append("g").attr("transform", `translate(${left},${this.margin.top})`).attr("class", name);
    const family = getComputedStyle(this.axes).fontFamily;
    const isTurned = isRoomy(across) && !!loaded?.keys?.isKnown;
    const end = Math.max(this.size[0] + right, this.root.clientWidth - left);
    const keyRoom = (at: number): number => isTurned ? Math.min(end - across(at) - LABEL / 2, this.margin.top - TICK - LABEL / 2) / SINE : MOST_ROOM + left - TICK;
    const ofKey = (at: number): string => cutTo(this.tick(at, loaded?.keys ?? null, across), keyRoom(at), family);
    const ofQuery = (at: number): string => cutTo(this.tick(at, loaded?.queries ?? null, down), left - TICK, family);
    const columns = apart(ticksOf(across, ACROSS, keys.length), across, (at) => (isTurned ? 0 : widthOf(ofKey(at), family)), [-left, this.size[0] + right]);
    const rows = apart(ticksOf(down, DOWN, queries.length), down, () => LABEL, [-this.margin.top, Infinity]);
    group("axis").call(axisTop(across).tickSizeOuter(0).tickValues(columns).tickFormat((at) => ofKey(Number(at)))).classed("turned", isTurned);
    group("axis").call(axisLeft(down).tickSizeOuter(0).tickValues(rows).tickFormat((at) => ofQuery(Number(at))));
    root.append("text").attr("class", "axis-name").attr("x", Math.max(left + 4, 62)).attr("y", 10).text("keys →");
    root.append("text").attr("class", "axis-name").attr("x", 2).attr("y", 10).text("queries ↓");
    this.markShortEnd(group("short").append("path"), queries, keys);
  }

  /** Draw a line beside the last block of an axis, if it is shorter than the others. */
  private markShortEnd(path: Selection<SVGPathElement, unknown, null, undefined>, queries: Axis, keys: Axis): void {
    const { x, y } = this.scales();
    const [width, height] = this.size;
    const ends = [
      [keys, x, width, (from: number, to: number) => `M${from},${height + 3}H${to}`],
      [queries, y, height, (from: number, to: number) => `M${width + 3},${from}V${to}`],
    ] as const;
    const lines = ends.map(([axis, scale, size, line]) => {
      const last = axis.blocks - 1;
      const [from, to] = [Math.max(0, scale(last)), Math.min(size, scale(axis.blocks))];
      return axis.isShort(last) && from < to ? line(from, to) : "";
    });
    path.attr("d", lines.join(""));
  }

  /** Return the label of a token at an axis: its word where there is room, else its index. */
  private tick(at: number, text: Loaded["keys"], scale: ScaleLinear<number, number>): string {
    const token = Math.floor(at);
    const word = isRoomy(scale) && text?.isKnown ? visible(text.word(this.app.state.sequence, token)) : "";
    return word || count(token);
  }

  drawOver(): void {
    const { lights } = this.view.light;
    const [width, height] = this.size;
    const context = fitCanvas(this.over, width, height);
    const map = this.map;
    if (!map) return;
    const { x, y } = this.scales();
    const axes = this.view.light.axes();
    const isKeys = lights.what === "keys";
    const own = isKeys ? axes?.[0] : axes?.[1];
    if (lights.token !== null && own && lights.token < own.length) {
      const block = own.block(lights.token);
      const scale = isKeys ? y : x;
      const [from, size] = [scale(block), Math.max(2, scale(block + 1) - scale(block))];
      context.strokeStyle = this.view.state.mode === "diff" && !isDark(this.root) ? "#000" : "#fff";
      context.lineWidth = 1;
      if (isKeys) context.strokeRect(-1, from - 0.5, width + 2, size + 1);
      else context.strokeRect(from - 0.5, -1, size + 1, height + 2);
      if (lights.exact !== "block") this.drawRings(context, lights, from + size / 2);
    }
    if (this.cursor) {
      const { row, col } = this.cursor;
      context.strokeStyle = "#ff4d00";
      context.lineWidth = 2;
      context.strokeRect(x(col) - 1, y(row) - 1, x(col + 1) - x(col) + 2, y(row + 1) - y(row) + 2);
    }
  }

  /** Draw a ring at each marked token, on the line of the token that looks or is looked at. */
  private drawRings(context: CanvasRenderingContext2D, { what, entries, end }: Lights, line: number): void {
    const [queries, keys] = this.view.light.axes() ?? [];
    if (!queries || !keys) return;
    const { x, y } = this.scales();
    const [isDifference, dark] = [this.view.state.mode === "diff", isDark(this.root)];
    const colours = ({ weight }: Entry): [outer: string, inner: string] =>
      isDifference ? [dark ? "#000" : "#fff", css(diverging(-Math.sign(weight), dark))] : ["#000", "#ff4d00"];
    // The second token of a pair has its ring under 1 % too.
    const second = entries.find(({ first, weight }) => first === this.view.state.second && Math.abs(weight) < LEAST);
    for (const entry of [...marked(entries), ...(second ? [second] : [])]) {
      const middle = entry.first + 0.5;
      const place = what === "keys" ? [x(middle / keys.size), line] as const : [line, y(middle / queries.size)] as const;
      drawRing(context, place, radiusOf(entry, end), colours(entry));
    }
  }
}

/** Return the radius of a ring in pixels: its area is as the weight. */
const radiusOf = ({ weight }: Entry, end: number): number => Math.abs(weight) < LEAST ? LEAST_RING : RING * Math.sqrt(Math.min(1, Math.abs(weight) / end));

/** Draw a ring that can be seen on every colour of the map. */
function drawRing(context: CanvasRenderingContext2D, [x, y]: readonly [number, number], radius: number, [outer, inner]: [string, string]): void {
  for (const [width, colour] of [[3, outer], [1.5, inner]] as const) {
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke();
  }
}

/** Return a scale from tokens instead of blocks. */
const tokensOf = (scale: ScaleLinear<number, number>, axis: Axis): ScaleLinear<number, number> =>
  scale.copy().domain(scale.domain().map((block) => block * axis.size));

const pen = document.createElement("canvas").getContext("2d");

/** Return the width of a label at an axis in pixels. */
function widthOf(label: string, family: string): number {
  if (!pen) return 0.6 * LABEL * label.length;
  pen.font = `${LABEL}px ${family}`;
  return pen.measureText(label).width;
}

/** Return as many letters of a label as fit into some pixels. */
function cutTo(label: string, room: number, family: string): string {
  const letters = Array.from(label);
  let [shown, size] = [label, letters.length];
  while (size > 1 && widthOf(shown, family) > room) shown = `${letters.slice(0, --size).join("")}…`;
  return shown;
}

/** True if a token has room for its word. */
const isRoomy = (scale: ScaleLinear<number, number>): boolean => scale(1) - scale(0) >= LEAST_OF_WORD;

/** Return a tick about each `pixels`, at round numbers; where tokens have their words, the middle of each. */
function ticksOf(scale: ScaleLinear<number, number>, pixels: number, length: number): number[] {
  const [from = 0, to = 0] = scale.range();
  const [first = 0, last = 0] = scale.domain();
  if (!isRoomy(scale)) {
    const ticks = scale.ticks(Math.max(2, Math.floor(Math.abs(to - from) / pixels)));
    return [...new Set(ticks.map(Math.floor))].filter((at) => at < length);
  }
  const tokens = Array.from({ length: Math.min(length, Math.ceil(last)) - Math.floor(first) }, (_, n) => Math.floor(first) + n + 0.5);
  return tokens.filter((at) => first <= at && at <= last);
}

/** Return the ticks whose labels, as long as `size` along the axis, lie within two ends and do not touch. */
function apart(
  ticks: number[], scale: ScaleLinear<number, number>, size: (at: number) => number, [first, last]: [number, number],
): number[] {
  let end = first;
  return ticks.filter((at) => {
    const [from, to] = [scale(at) - size(at) / 2, scale(at) + size(at) / 2];
    if (from < end || to > last) return false;
    end = to + GAP;
    return true;
  });
}
