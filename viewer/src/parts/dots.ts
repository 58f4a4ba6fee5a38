/** Statistics of two sides as distributions: two rows of dots on one axis, a dot for each head. */

import type { Statistic } from "../contract";
import { element, rovingFocus, shape } from "../dom";
import { bare, labelWithUnit } from "../format";
import { spreadOf } from "../heads";
import { sizeOf } from "./changes";

const [WIDTH, PAD] = [264, 7]; // of a drawing, and at its ends
const [ROW, RADIUS] = [14, 4.5]; // from row to row, and of a dot

/** A head with its value; `open` shows it. */
export interface Dot {
  name: string;
  value: number | null;
  open: () => void;
}

export interface Sides {
  statistic: Statistic;
  a: Dot[];
  b: Dot[];
}

/** Return a drawing for each statistic that both sides have, the largest shift of the mean first; the rows have the names of the sides. */
export function distributions(all: Sides[], names: string[]): HTMLElement {
  const root = element("div", { class: "dots", role: "group", "aria-label": "heads of both layers" });
  const drawn = all.flatMap((sides) => {
    const [a, b] = [sides.a, sides.b].map((dots) => spreadOf(dots.map(({ value }) => value)));
    return a && b ? [{ sides, a, b, size: sizeOf({ statistic: sides.statistic, a: a.mean, b: b.mean }) ?? 0 }] : [];
  });
  drawn.sort((x, y) => y.size - x.size);
  for (const { sides, a, b } of drawn) {
    const { statistic } = sides;
    const [low, high] = [Math.min(a.low, b.low), Math.max(a.high, b.high)];
    const shift = bare(statistic, b.mean - a.mean);
    root.append(
      element("p", { class: "small" }, labelWithUnit(statistic), element("span", { class: "soft" }, ` ${bare(statistic, a.mean)} → ${bare(statistic, b.mean)} (${b.mean > a.mean ? "+" : ""}${shift})`)),
      drawing(sides, low, high, names),
      element("p", { class: "soft ends" }, element("span", {}, bare(statistic, low)), element("span", {}, bare(statistic, high))),
    );
  }
  const first = root.querySelector<SVGElement>("[role=button]");
  first?.setAttribute("tabindex", "0");
  rovingFocus(root, () => 1, "[role=button]");
  return root;
}

function drawing({ statistic, a, b }: Sides, low: number, high: number, names: string[]): SVGElement {
  const x = (value: number): number => PAD + (high > low ? (value - low) / (high - low) : 0.5) * (WIDTH - 2 * PAD);
  const rows = [a, b].flatMap((dots, row) => {
    const y = ROW * (row + 0.5);
    const line = shape("line", { x1: PAD, x2: WIDTH - PAD, y1: y, y2: y });
    return [line, shape("text", { x: 0, y: y + 3 }, names[row] ?? ""), ...dots.flatMap((dot) => (dot.value === null ? [] : [circle(dot, statistic, x(dot.value), y, row)]))];
  });
  return shape("svg", { viewBox: `-10 0 ${WIDTH + 10} ${2 * ROW}`, role: "group", "aria-label": labelWithUnit(statistic) }, ...rows);
}

function circle({ name, value, open }: Dot, statistic: Statistic, cx: number, cy: number, row: number): SVGElement {
  const words = `${name}: ${bare(statistic, value)}`;
  const dot = shape("circle", { cx, cy, r: RADIUS, class: row ? "b" : "a", role: "button", tabindex: -1, "aria-label": words }, shape("title", {}, words));
  dot.addEventListener("click", open);
  dot.addEventListener("keydown", (event) => {
    if ((event as KeyboardEvent).key === "Enter") open();
  });
  return dot;
}
