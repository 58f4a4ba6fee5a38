/** The map of a head as a figure: the part that is in sight, with words or numbers at its sides. */

import { scaleLinear } from "d3-scale";
import type { App } from "../app";
import { type RGB, css, viridis } from "../colours";
import { element, shape } from "../dom";
import { count, percent, range, visible } from "../format";
import { type Axis, type HeadMap, largest } from "../maps";
import { colourOf, imageOf } from "../parts/map_image";
import type { Text } from "../text";
import type { Seen } from "../view";
import { type Drawing, INK, SIZE, type Scale, label, sheet, widthOf, withScale } from "./sheet";

const SIDE = 480; // pixels of the longer side
const MOST_OF_TOKEN = 24; // pixels of a token
const LEAST_OF_WORD = 9; // pixels of a token that has its word
const MOST_WORDS = 40; // tokens in sight up to which each has its word
const LETTERS = 12; // of a word
const FINE = 1440; // pixels of the image
const TICK = 4;
const SHORT = "#c43c00"; // beside a last block with fewer tokens
const BESIDE = 24; // between two maps
const BETWEEN = 56; // pixels from number to number

/** A side of a map: the blocks in sight, from first to last. */
export interface Side {
  axis: Axis;
  first: number;
  last: number;
}

/** Return the two sides of what is in sight of a map, in whole blocks; null without a map. */
export function inSight(view: Seen): { queries: Side; keys: Side } | null {
  const [factor, left, top] = view.state.zoom;
  const [queries, keys] = view.light.axes() ?? [];
  if (!queries || !keys) return null;
  const side = (from: number, axis: Axis): Side => {
    const first = Math.min(axis.blocks - 1, Math.max(0, Math.floor(from * axis.blocks + 1e-6)));
    const last = Math.max(first, Math.min(axis.blocks, Math.ceil((from + 1 / factor) * axis.blocks - 1e-6)) - 1);
    return { axis, first, last };
  };
  return { queries: side(top, queries), keys: side(left, keys) };
}

const blocksOf = ({ first, last }: Side): number => last - first + 1;

export const isWhole = (side: Side): boolean => blocksOf(side) === side.axis.blocks;

/** Return the first and the last token in sight. */
export const tokensOf = ({ axis, first, last }: Side): [first: number, last: number] => [axis.tokens(first)[0], axis.tokens(last)[1]];

/** Return the map that is shown as a figure, or null if there is none; A and B side by side are two maps. */
export function mapFigure(app: App): SVGSVGElement | null {
  const views: Seen[] = app.state.mode === "both" ? [app, app.beside] : [app];
  const maps = views.flatMap((view) => drawingOf(view) ?? []);
  const [first] = maps;
  if (!first) return null;
  const lines = [...new Set(maps.flatMap((each) => each.lines))];
  return sheet(withScale(inRow(maps), first.scale, first.top), {
    title: titleOf(app),
    lines,
    note: `Read: ${app.meta.read}. headwise ${app.meta.headwise}.`,
  });
}

/** Return the model and the head, or both heads that are compared. */
export function titleOf(app: App): string {
  const { other, mode } = app.state;
  const both = other ? [`${app.nameOf(app.chosen)} (A)`, `${app.nameOf(other)} (B)`] : [];
  const heads = mode === "diff" && other ? both.reverse().join(" − ") : mode === "both" && other ? both.join(" and ") : app.nameOf(app.shown);
  return `${app.meta.title}: ${heads}`;
}

/** Put drawings beside each other; two have the letters of A and B. */
export function inRow(drawings: Drawing[]): Drawing {
  if (drawings.length === 1) return drawings[0] as Drawing;
  const root = shape("g");
  let width = 0;
  drawings.forEach((drawing, n) => {
    root.append(shape("g", { transform: `translate(${width},0)` }, drawing.root, label("AB"[n] ?? "", 0, SIZE, { "font-weight": "bold" })));
    width += drawing.width + BESIDE;
  });
  return { root, width: width - BESIDE, height: Math.max(...drawings.map(({ height }) => height)) };
}

function meaning(view: Seen): string {
  const cells = `${view.light.resolution()}.`;
  if (view.state.mode === "diff") return `Weight of B less weight of A, from each query to each key; ${cells}`;
  return `Weight from each query to each key; ${cells}`;
}

function partInSight(queries: Side, keys: Side): string[] {
  if ([queries, keys].every(isWhole)) return [];
  const words = (name: string, side: Side): string => `${name} ${range(...tokensOf(side))} of ${count(side.axis.length)}`;
  return [`In sight: ${words("queries", queries)}, ${words("keys", keys)}.`];
}

function scaleOf(map: HeadMap, isDifference: boolean): Scale {
  if (!isDifference) {
    const stops = [0, 0.01, 0.1, 0.25, 0.5, 1].map((weight): [number, string] => [Math.sqrt(weight), percent(weight)]);
    return { name: "weight", colour: viridis, stops };
  }
  const most = largest(map);
  const place = (share: number): number => (1 + Math.sign(share) * Math.sqrt(Math.abs(share))) / 2;
  const colour = (position: number): RGB => colourOf(Math.sign(position - 0.5) * (2 * position - 1) ** 2 * most, true, most);
  const stops = [-1, -0.25, 0, 0.25, 1].map((share): [number, string] => [place(share), percent(share * most)]);
  return { name: "B − A", colour, stops };
}

// ---- the drawing -----------------------------------------------------------------------------------

interface MapDrawing extends Drawing {
  /** Pixels above the map. */
  top: number;
  scale: Scale;
  /** What it shows, in words. */
  lines: string[];
}

function drawingOf(view: Seen): MapDrawing | null {
  const map = view.loaded?.map;
  const sides = inSight(view);
  if (!map || !sides) return null;
  const { queries, keys } = sides;
  const isDifference = view.state.mode === "diff";
  const [down, across] = [blocksOf(queries), blocksOf(keys)];
  const most = Math.max(down, across);
  const tokens = Math.max(...[queries, keys].map((side) => blocksOf(side) * side.axis.size));
  const cell = Math.min(SIDE, MOST_OF_TOKEN * tokens) / most;
  const { loaded } = view;
  const rows = new Labels(view, queries, loaded?.queries ?? null, cell);
  const cols = new Labels(view, keys, loaded?.keys ?? null, cell);
  const [left, top] = [rows.room + 2 * SIZE, (cols.hasWords ? cols.room : SIZE + TICK) + 2 * SIZE];
  const [width, height] = [across * cell, down * cell];
  const single = squares(view, rows, cols);
  const root = shape("g", { transform: `translate(${left},${top})` },
    imagePart(map, isDifference, queries, keys, cell),
    ...single,
    shape("rect", { width, height, fill: "none", stroke: INK, "stroke-width": 0.5 }),
    ...rows.labels((at, words) => [tickOf(-TICK, at, 0, at), label(words, -TICK - 3, at, { "text-anchor": "end" })]),
    ...cols.labels((at, words) => [tickOf(at, -TICK, at, 0), cols.hasWords
      ? label(words, 0, 0, { transform: `translate(${at},${-TICK - 3}) rotate(-90)` })
      : label(words, at, -TICK - 3 - SIZE / 2, { "text-anchor": "middle" })]),
    ...shortEnds(rows, cols, width, height),
    label("key", width / 2, SIZE - top, { "text-anchor": "middle", "font-weight": "bold" }),
    label("query", 0, 0, { transform: `translate(${SIZE - left},${height / 2}) rotate(-90)`, "text-anchor": "middle", "font-weight": "bold" }));
  const lines = [meaning(view), ...partInSight(queries, keys)];
  if (single.length) lines.push(`Squares: the ${loaded?.top?.ranks ?? 0} largest weights of each token.`);
  return { root, width: left + width, height: top + height, top, scale: scaleOf(map, isDifference), lines };
}

/** Return a line beside the last block of a side, if it is shorter than the others. */
function shortEnds(rows: Labels, cols: Labels, width: number, height: number): SVGElement[] {
  const [down, across] = [rows.shortEnd, cols.shortEnd];
  const line = { stroke: SHORT, "stroke-width": 2 };
  return [
    ...(across ? [shape("line", { x1: across[0], x2: across[1], y1: height + 3, y2: height + 3, ...line })] : []),
    ...(down ? [shape("line", { x1: width + 3, x2: width + 3, y1: down[0], y2: down[1], ...line })] : []),
  ];
}

const tickOf = (x1: number, y1: number, x2: number, y2: number): SVGElement => shape("line", { x1, y1, x2, y2, stroke: INK, "stroke-width": 0.5 });

/** Return the blocks in sight as an image, each of whole pixels. */
function imagePart(map: HeadMap, isDifference: boolean, queries: Side, keys: Side, cell: number): SVGElement {
  const [down, across] = [blocksOf(queries), blocksOf(keys)];
  const pixels = Math.max(1, Math.floor(FINE / Math.max(down, across)));
  const canvas = element("canvas", { width: across * pixels, height: down * pixels });
  const context = canvas.getContext("2d");
  if (context) {
    context.imageSmoothingEnabled = false;
    context.drawImage(imageOf(map, isDifference), keys.first, queries.first, across, down, 0, 0, canvas.width, canvas.height);
  }
  return shape("image", {
    href: canvas.toDataURL("image/png"), width: across * cell, height: down * cell, preserveAspectRatio: "none", "image-rendering": "pixelated",
  });
}

/** Return the stored weights of single tokens, where the map on the page shows them over its blocks. */
function squares(view: Seen, rows: Labels, cols: Labels): SVGElement[] {
  const { loaded, state } = view;
  if (!loaded?.top || !loaded.queries || state.mode === "diff" || view.light.hasSingleTokens) return [];
  if (Math.min(rows.step, cols.step) < 2) return [];
  const before = loaded.queries.first[state.sequence] ?? 0;
  const [first, last] = tokensOf(rows.side);
  const [from, to] = tokensOf(cols.side);
  const drawn: SVGElement[] = [];
  for (let query = first; query <= last; query++) {
    for (const [key, weight] of loaded.top.keysOf(before + query)) {
      if (key < from || key > to) continue;
      const box = { x: cols.at(key), y: rows.at(query), width: cols.step, height: rows.step };
      drawn.push(shape("rect", { ...box, fill: css(viridis(Math.sqrt(weight))), stroke: "#fff", "stroke-width": 0.4 }));
    }
  }
  return drawn;
}

/** The tokens at a side of the map: words where few are in sight, else numbers. */
class Labels {
  readonly hasWords: boolean;
  /** Pixels of a token. */
  readonly step: number;
  /** Pixels that the labels take away from the map. */
  readonly room: number;
  private readonly ticks: [at: number, words: string][];

  constructor(view: Seen, readonly side: Side, text: Text | null, private readonly cell: number) {
    const [first, last] = tokensOf(side);
    this.step = cell / side.axis.size;
    const number = last - first + 1;
    this.hasWords = number <= MOST_WORDS && this.step >= LEAST_OF_WORD && view.scan.sequences === 1 && !!text?.isKnown;
    const tokens = this.hasWords
      ? Array.from({ length: number }, (_, n) => first + n)
      : scaleLinear([first, last], [0, 1]).ticks((number * this.step) / BETWEEN).filter(Number.isInteger);
    const wordOf = (token: number): string => (this.hasWords ? cut(visible(text?.word(view.state.sequence, token) ?? "")) : count(token));
    this.ticks = tokens.map((token) => [this.at(token + 0.5), wordOf(token)]);
    this.room = TICK + 3 + Math.max(0, ...this.ticks.map(([, words]) => widthOf(words)));
  }

  /** Return where a token begins, in pixels. */
  at(token: number): number {
    return (token / this.side.axis.size - this.side.first) * this.cell;
  }

  /** Return where the last block stands, if it has fewer tokens than the others, else null. */
  get shortEnd(): [from: number, to: number] | null {
    const { axis, first, last } = this.side;
    return axis.isShort(last) ? [(last - first) * this.cell, (last - first + 1) * this.cell] : null;
  }

  labels(draw: (at: number, words: string) => SVGElement[]): SVGElement[] {
    return this.ticks.flatMap(([at, words]) => draw(at, words));
  }
}

export function cut(word: string): string {
  const letters = Array.from(word);
  return letters.length > LETTERS ? `${letters.slice(0, LETTERS - 1).join("")}…` : word;
}
