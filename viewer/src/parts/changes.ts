/** Statistics of two sides, heads or layers, with the largest change first. */

import type { Statistic } from "../contract";
import { element } from "../dom";
import { bare, isShare, labelWithUnit } from "../format";

export interface Sides {
  statistic: Statistic;
  a: number | null;
  b: number | null;
}

/**
 * Return a change as a part of the scale of its statistic: 1 for a share, else its range. A value
 * on one side alone has changed by the whole scale; null if neither side has one.
 */
export function sizeOf({ statistic, a, b }: Sides): number | null {
  if (a === null && b === null) return null;
  if (a === null || b === null) return 1;
  const span = isShare(statistic) ? 1 : statistic.high - statistic.low;
  return span > 0 ? Math.abs(a - b) / span : 0;
}

/** Return a table of the statistics that a side has; values that one side lacks come last, then statistics that one scan lacks. */
export function changeTable(sides: Sides[], isMissing: (name: string) => boolean): HTMLElement {
  const sized = sides.map((each) => ({ each, size: isMissing(each.statistic.name) ? -2 : each.a !== null && each.b !== null ? sizeOf(each) : sizeOf(each) && -1 }));
  const rows = sized.filter(({ size }) => size !== null).sort((x, y) => (y.size ?? 0) - (x.size ?? 0));
  const head = ["statistic", "A", "B", "change"].map((name) => element("th", { scope: "col" }, name));
  const body = rows.map(({ each: { statistic, a, b } }) => {
    const change = a === null || b === null ? "" : signed(statistic, b - a);
    const cells = [bare(statistic, a), bare(statistic, b), change].map((words) => element("td", {}, words));
    return element("tr", {}, element("th", { scope: "row" }, labelWithUnit(statistic)), ...cells);
  });
  return element("table", { class: "changes" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

function signed(statistic: Statistic, change: number): string {
  return change > 0 ? `+${bare(statistic, change)}` : bare(statistic, change);
}
