/** The statistic of all heads as a figure: a row for each layer, a column for each head. */

import { scaleLinear } from "d3-scale";
import type { App } from "../app";
import { css, diverging, ink, viridis } from "../colours";
import type { Statistic } from "../contract";
import { shape } from "../dom";
import { isShare, number, percent, short } from "../format";
import { type Grid, unitOf } from "../parts/grid";
import { type Drawing, INK, SIZE, type Scale, label, sheet, widthOf, withScale } from "./sheet";

const SIDE = 560; // pixels of all heads of a layer
const MOST_NUMBERED = 20; // heads of a layer up to which cells have their numbers
const CELL = [30, 22] as const; // pixels of a cell with its number
const MOST_NAMED = 24; // layers or heads up to which each has its number at the side

/** Return the grid that is shown as a figure, or null if there is no statistic. */
export function gridFigure(app: App, grid: Grid): SVGSVGElement | null {
  const { statistic, meta } = app;
  if (!statistic) return null;
  const { comparison } = grid;
  const names = meta.scans.map(({ name }) => name);
  const which = comparison === "diff" ? `, ${names[1]} (B) − ${names[0]} (A)` : comparison === "B" ? `, ${names[1]}` : "";
  const { drawing, top } = drawingOf(app, grid, statistic);
  return sheet(withScale(drawing, scaleOf(grid, statistic), top), {
    title: `${meta.title}: ${statistic.heading}${which}`,
    lines: [`${unitOf(statistic)}; ${statistic.formula}`],
    note: `Read: ${meta.read}. headwise ${meta.headwise}.`,
  });
}

function scaleOf(grid: Grid, statistic: Statistic): Scale {
  const words = isShare(statistic) ? percent : number;
  if (grid.comparison === "diff") {
    const stops = [-1, -0.5, 0, 0.5, 1].map((share): [number, string] => [(1 + share) / 2, words(share * grid.most)]);
    return { name: "B − A", colour: (position) => diverging(1 - 2 * position), stops };
  }
  if (statistic.kind === "weight") {
    const stops = [0, 0.01, 0.1, 0.25, 0.5, 1].map((share): [number, string] => [Math.sqrt(share), percent(share)]);
    return { name: statistic.label, colour: viridis, stops };
  }
  const place = scaleLinear([statistic.low, statistic.high], [0, 1]);
  const values = [statistic.low, ...place.ticks(4).filter((each) => each > statistic.low && each < statistic.high), statistic.high];
  return { name: statistic.label, colour: viridis, stops: values.map((value) => [place(value), words(value)]) };
}

function drawingOf(app: App, grid: Grid, statistic: Statistic): { drawing: Drawing; top: number } {
  const { layers } = app.scan;
  const columns = 1 + Math.max(0, ...layers.flatMap(({ heads }) => heads));
  const hasNumbers = columns <= MOST_NUMBERED;
  const [wide, high] = hasNumbers ? CELL : [SIDE / columns, Math.min(CELL[1], SIDE / columns)];
  const [left, top] = [2 * SIZE + 8 + widthOf(String(layers.length)), 3 * SIZE];
  const root = shape("g", { transform: `translate(${left},${top})` });
  for (const head of grid.values(statistic)) {
    const colour = grid.colour(head, statistic);
    const [x, y] = [head.head * wide, head.layer * high];
    root.append(shape("rect", { x, y, width: wide, height: high, fill: colour ? css(colour) : "#fff", stroke: "#fff", "stroke-width": 0.5 }));
    if (hasNumbers) {
      const words = short(statistic, head.value);
      root.append(label(words, x + wide / 2, y + high / 2, { "text-anchor": "middle", fill: colour ? ink(colour) : INK }));
    }
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
