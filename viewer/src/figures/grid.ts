/** The statistic of all heads as a figure: a row for each layer, a column for each head. */

import { scaleLinear } from "d3-scale";
import type { App } from "../app";
import { type RGB, css, diverging, ink, viridis } from "../colours";
import type { Statistic } from "../contract";
import { shape } from "../dom";
import { isShare, number, percent, short } from "../format";
import { allHeads, nameOf } from "../heads";
import { type Grid, unitOf } from "../parts/grid";
import type { LinkCells } from "../parts/link_cells";
import { cut } from "./map";
import { type Drawing, INK, SIZE, type Scale, label, sheet, widthOf, withScale } from "./sheet";

const SIDE = 560; // pixels of all heads of a layer
const MOST_NUMBERED = 20; // heads of a layer up to which cells have their numbers
const CELL = [30, 22] as const; // pixels of a cell with its number
const WORD_CELL = [76, 32] as const; // and of one with a word
const MOST_NAMED = 24; // layers or heads up to which each has its number at the side

/** Return the grid that is shown as a figure, or null if there is no statistic. */
export function gridFigure(app: App, grid: Grid): SVGSVGElement | null {
  const { statistic, meta } = app;
  if (!statistic) return null;
  const { comparison } = grid;
  const names = meta.scans.map(({ name }) => name);
  const which = comparison === "diff" ? `, ${names[1]} (B) − ${names[0]} (A)` : comparison === "B" ? `, ${names[1]}` : "";
  const cells = grid.values(statistic).map((head): FigureCell => ({ ...head, colour: grid.colour(head, statistic), lines: [short(statistic, head.value)] }));
  const { drawing, top } = drawingOf(app, cells, CELL);
  return sheet(withScale(drawing, scaleOf(grid, statistic), top), {
    title: `${meta.title}: ${statistic.heading}${which}`,
    lines: [`${unitOf(statistic)}; ${statistic.formula}`],
    note: `Read: ${meta.read}. headwise ${meta.headwise}.`,
  });
}

/** Return one word in all heads as a figure, or null if the grid does not show it. */
export function wordFigure(app: App, links: LinkCells): SVGSVGElement | null {
  const byName = links.byName();
  if (!byName.size) return null;
  const cells = allHeads(app.scan, null).map((head): FigureCell => {
    const { word, share, colour } = links.facts(head.layer, byName.get(nameOf(head)) ?? null, false);
    return { ...head, colour, lines: [...(word ? [cut(word)] : []), share] };
  });
  const { drawing, top } = drawingOf(app, cells, WORD_CELL);
  const isChange = app.linkMode === "diff";
  return sheet(withScale(drawing, isChange ? scaleOfChange(links.most, percent) : scaleOfWeights("weight"), top), {
    title: app.meta.title,
    lines: [links.unitLine()],
    note: `Read: ${app.meta.read}. headwise ${app.meta.headwise}.`,
  });
}

function scaleOfChange(most: number, words: (value: number) => string): Scale {
  const stops = [-1, -0.5, 0, 0.5, 1].map((share): [number, string] => [(1 + share) / 2, words(share * most)]);
  return { name: "B − A", colour: (position) => diverging(1 - 2 * position), stops };
}

const scaleOfWeights = (name: string): Scale =>
  ({ name, colour: viridis, stops: [0, 0.01, 0.1, 0.25, 0.5, 1].map((share): [number, string] => [Math.sqrt(share), percent(share)]) });

function scaleOf(grid: Grid, statistic: Statistic): Scale {
  const words = isShare(statistic) ? percent : number;
  if (grid.comparison === "diff") return scaleOfChange(grid.most, words);
  if (statistic.kind === "weight") return scaleOfWeights(statistic.label);
  const place = scaleLinear([statistic.low, statistic.high], [0, 1]);
  const values = [statistic.low, ...place.ticks(4).filter((each) => each > statistic.low && each < statistic.high), statistic.high];
  return { name: statistic.label, colour: viridis, stops: values.map((value) => [place(value), words(value)]) };
}

/** A head in a figure, with the lines of its cell. */
interface FigureCell {
  layer: number;
  head: number;
  colour: RGB | null;
  lines: string[];
}

function drawingOf(app: App, cells: FigureCell[], size: readonly [wide: number, high: number]): { drawing: Drawing; top: number } {
  const { layers } = app.scan;
  const columns = 1 + Math.max(0, ...layers.flatMap(({ heads }) => heads));
  const hasNumbers = columns <= MOST_NUMBERED;
  const [wide, high] = hasNumbers ? size : [SIDE / columns, Math.min(CELL[1], SIDE / columns)];
  const [left, top] = [2 * SIZE + 8 + widthOf(String(layers.length)), 3 * SIZE];
  const root = shape("g", { transform: `translate(${left},${top})` });
  for (const { layer, head, colour, lines } of cells) {
    const [x, y] = [head * wide, layer * high];
    root.append(shape("rect", { x, y, width: wide, height: high, fill: colour ? css(colour) : "#fff", stroke: "#fff", "stroke-width": 0.5 }));
    lines.forEach((words, n) => {
      const middle = y + high / 2 + (n - (lines.length - 1) / 2) * 1.1 * SIZE;
      if (hasNumbers) root.append(label(words, x + wide / 2, middle, { "text-anchor": "middle", fill: colour ? ink(colour) : INK }));
    });
  }
  const [width, height] = [columns * wide, layers.length * high];
  for (const head of numbered(columns)) root.append(label(String(head), (head + 0.5) * wide, -SIZE * 0.8, { "text-anchor": "middle" }));
  for (const layer of numbered(layers.length)) {
    const name = layers[layer]?.kind === "cross" ? `${layer}×` : String(layer);
    root.append(label(name, -6, (layer + 0.5) * high, { "text-anchor": "end" }));
  }
  root.append(
    label("head", width / 2, -2.2 * SIZE, { "text-anchor": "middle", "font-weight": "bold" }),
    label("layer", 0, 0, { transform: `translate(${SIZE - left},${height / 2}) rotate(-90)`, "text-anchor": "middle", "font-weight": "bold" }),
  );
  return { drawing: { root, width: left + width, height: top + height }, top };
}

/** Return the numbers of layers or heads that are written, at equal distances. */
function numbered(size: number): number[] {
  const step = Math.ceil(size / MOST_NAMED);
  return Array.from({ length: Math.ceil(size / step) }, (_, n) => n * step);
}
