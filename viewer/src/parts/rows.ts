/** A line of a text: its pieces as inline elements, so that the browser shapes and orders them as text. */

import type { Direction } from "../bidi";
import { element } from "../dom";
import { count } from "../format";
import type { Place } from "../text";
import { LINE_END, type Written, labelOf } from "../written";

/** An element that stands for tokens: several where they share what is read as one character. */
export interface Hit {
  span: HTMLElement;
  tokens: number[];
}

export interface Row {
  root: HTMLElement;
  /** The characters of the line. */
  from: number;
  to: number;
  hits: Hit[];
}

/** A line to draw: its characters, and the places in it that a search found. */
export interface Line {
  from: number;
  to: number;
  direction: Direction;
  /** True for the line with what stands at the end of the text. */
  isLast: boolean;
  places: Place[];
  /** The place that the search stands at. */
  here: Place | null;
}

/** Return the row of a line. Its text content is the text, and marks are no part of it. */
export function makeRow(written: Written, line: Line): Row {
  const { from, to, direction, isLast } = line;
  const run = element("div", {
    class: "run", dir: direction.dir,
    "data-before": direction.before || null, "data-after": direction.after || null,
  });
  const row: Row = { root: element("div", { class: "row" }, run), from, to, hits: [] };
  const marks = written.marks.filter(({ at, token }) => token !== null && at >= from && (at < to || isLast));
  const drawMarks = (upTo: number): void => {
    while (marks[0] && marks[0].at <= upTo) {
      const { token, label } = marks.shift() as { token: number; label: string };
      run.append(hitOf(row, [token], "", { "data-mark": label }));
    }
  };
  const places = line.places.filter((place) => place.from < to && place.to > from);
  const parts = partsOf(written, line, places);
  parts.forEach((begin, n) => {
    drawMarks(begin);
    const place = places.find((each) => each.from <= begin && each.to > begin);
    const found = place ? (place === line.here ? "here" : "found") : null;
    run.append(drawPart(written, row, begin, parts[n + 1] ?? to, found));
  });
  drawMarks(Infinity);
  const first = row.hits[0]?.tokens[0];
  if (first !== undefined) row.root.dataset["n"] = count(first);
  return row;
}

/** Return where the parts of a line begin: pieces, places, and what ends the line. */
function partsOf(written: Written, { from, to }: Line, places: Place[]): number[] {
  const parts = new Set<number>();
  const add = (at: number): void => {
    if (at >= from && at < to) parts.add(at);
  };
  add(from);
  for (let piece = written.pieceAt(from) + 1; (written.cuts[piece] ?? Infinity) < to; piece++) add(written.cuts[piece] ?? 0);
  for (const place of places) {
    add(place.from);
    add(place.to);
  }
  for (const { index } of written.text.slice(from, to).matchAll(LINE_END)) add(from + index);
  return [...parts].sort((a, b) => a - b);
}

/** Return the element of characters with tokens or in a place, or the bare text of others. */
function drawPart(written: Written, row: Row, from: number, to: number, found: string | null): Node {
  const characters = written.text.slice(from, to);
  const tokens = written.tokensOf(written.pieceAt(from));
  if (!tokens.length) return found ? element("span", { "data-found": found }, characters) : document.createTextNode(characters);
  const label = /^[\r\n]/.test(characters) ? "⏎" : labelOf(characters);
  const isRest = from > (written.cuts[written.pieceAt(from)] ?? 0);
  return hitOf(row, tokens, characters, { "data-mark": label || null, "data-found": found, "data-rest": isRest ? "" : null });
}

function hitOf(row: Row, tokens: number[], characters: string, attributes: Record<string, string | null>): HTMLElement {
  const span = element("span", { class: "t", "data-t": tokens[0] ?? 0, ...attributes }, characters);
  row.hits.push({ span, tokens });
  return span;
}
