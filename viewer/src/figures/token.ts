/** The answer about a token as a figure: a bar for each token that it looks at, or that looks at it. */

import { scaleLinear } from "d3-scale";
import type { App } from "../app";
import { css, diverging } from "../colours";
import { shape } from "../dom";
import { change, count, inQuotes, percent, range, visible } from "../format";
import type { Text } from "../text";
import { type Entry, type Seen, marked } from "../view";
import { inRow, titleOf } from "./map";
import { type Drawing, INK, SIZE, SOFT, label, sheet, widthOf } from "./sheet";

const [MOST_BARS, FEW_BARS] = [16, 4];
const [BAR, ROW] = [14, 20]; // pixels of a bar, and from bar to bar
const WIDTH = 300; // of the longest bar
const [MORE, LESS] = [css(diverging(-0.8)), css(diverging(0.8))];
const ONE_COLOUR = "#1b716d";

/** Return the lit tokens as a figure, or null if there are none; of A and B side by side both answers. */
export function tokenFigure(app: App): SVGSVGElement | null {
  const { lights } = app.light;
  const isPair = app.state.mode === "both";
  const views: Seen[] = isPair ? [app, app.beside] : [app];
  if (lights.token === null || views.every((view) => !shownBars(view).length)) return null;
  const { queries = null, keys = null } = app.loaded ?? {};
  const subject = nameOf(app, { first: lights.token, last: lights.token, weight: 0 }, lights.what === "keys" ? queries : keys);
  const question = lights.what === "keys" ? `what ${subject} looks at` : `what looks at ${subject}`;
  const answers = views.map(({ light }, n) => `${isPair ? `${"AB"[n]}: ` : ""}${light.answer}`);
  const weights = views.flatMap((view) => shownBars(view).map(({ weight }) => weight)); // of one scale
  const drawings = views.map((view) => drawingOf(view, weights));
  return sheet(inRow(isPair ? drawings.map(below) : drawings), {
    title: `${titleOf(app)}: ${question}`,
    lines: [`${app.state.mode === "diff" ? "Weight of B less weight of A" : "Weight"}: ${answers.join("; ")}.`],
    note: `Read: ${app.meta.read}. headwise ${app.meta.headwise}.`,
  });
}

/** Return the lit tokens that have bars: the largest that are marked, or a few where none is. */
function shownBars(view: Seen): Entry[] {
  const { entries } = view.light.lights;
  const largest = marked(entries).slice(0, MOST_BARS);
  return largest.length ? largest : entries.slice(0, FEW_BARS);
}

function nameOf(view: Seen, { first, last }: Entry, text: Text | null): string {
  if (first !== last) return `tokens ${range(first, last)}`;
  return text?.isKnown ? `${inQuotes(visible(text.word(view.state.sequence, first)))} at ${count(first)}` : `token ${count(first)}`;
}

/** Leave room for a letter above a drawing. */
function below({ root, width, height }: Drawing): Drawing {
  return { root: shape("g", { transform: `translate(0,${2 * SIZE})` }, root), width, height: height + 2 * SIZE };
}

function drawingOf(view: Seen, weights: number[]): Drawing {
  const isDifference = view.state.mode === "diff";
  const bars = shownBars(view);
  const text = (view.light.lights.what === "keys" ? view.loaded?.keys : view.loaded?.queries) ?? null;
  const names = bars.map((bar) => nameOf(view, bar, text));
  const left = Math.max(0, ...names.map((name) => widthOf(name))) + 10;
  const x = scaleLinear([Math.min(0, ...weights), Math.max(0, ...weights)], [0, WIDTH]).nice(4);
  const height = bars.length * ROW;
  const root = shape("g", { transform: `translate(${left},0)` });
  bars.forEach(({ weight }, n) => {
    const y = n * ROW + (ROW - BAR) / 2;
    const [from, to] = [x(Math.min(0, weight)), x(Math.max(0, weight))];
    const fill = isDifference ? (weight < 0 ? LESS : MORE) : ONE_COLOUR;
    root.append(
      shape("rect", { x: from, y, width: to - from, height: BAR, fill, "data-weight": String(weight) }),
      label(names[n] ?? "", -6, (n + 0.5) * ROW, { "text-anchor": "end" }),
      label(isDifference ? change(weight) : percent(weight), to + 5, (n + 0.5) * ROW),
    );
  });
  root.append(shape("line", { x1: x(0), x2: x(0), y1: 0, y2: height, stroke: INK }));
  root.append(shape("line", { x1: 0, x2: WIDTH, y1: height, y2: height, stroke: INK, "stroke-width": 0.5 }));
  for (const tick of x.ticks(4)) {
    root.append(
      shape("line", { x1: x(tick), x2: x(tick), y1: height, y2: height + 4, stroke: INK, "stroke-width": 0.5 }),
      label(percent(tick), x(tick), height + 4 + SIZE, { "text-anchor": "middle" }),
    );
  }
  root.append(label(isDifference ? "B − A" : "weight", WIDTH / 2, height + 2.8 * SIZE, { "text-anchor": "middle", fill: SOFT }));
  return { root, width: left + WIDTH + 60, height: height + 3.6 * SIZE };
}
