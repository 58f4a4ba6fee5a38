/** The margin of the grid: mean and spread of the statistic in each layer, on the grid's scale. */

import type { Statistic } from "../contract";
import { element } from "../dom";
import { long } from "../format";
import type { Spread } from "../heads";

/** Return "mean 41 %, from 2 % to 93 %". */
export function spreadWords(statistic: Statistic, spread: Spread | null): string {
  if (!spread) return "no value";
  const { mean, low, high } = spread;
  return `mean ${long(statistic, mean)}, from ${long(statistic, low)} to ${long(statistic, high)}`;
}

/** Return a bar from the least to the most head, with a dot at the mean; `place` is from 0 to 1. */
export function spreadStrip(spread: Spread | null, place: (value: number) => number): HTMLElement {
  const strip = element("span", { class: "spread", "aria-hidden": "true" });
  if (!spread) return strip;
  const [mean, low, high] = [place(spread.mean), place(spread.low), place(spread.high)];
  const [bar, dot] = [element("span", { class: "bar" }), element("span", { class: "dot" })];
  bar.style.left = `${100 * low}%`;
  bar.style.width = `${100 * (high - low)}%`;
  dot.style.left = `${100 * mean}%`;
  strip.append(bar, dot);
  return strip;
}

/** Return the ends of the scale, over the strips. */
export const spreadEnds = (low: string, high: string): HTMLElement =>
  element("span", { class: "spread ends" }, element("span", {}, low), element("span", {}, high));
