/** All heads of a scan: values, ranks, order and filter. */

import type { Scan, Statistic } from "./contract";
import { isShare } from "./format";
import { positionOf } from "./maps";

export interface HeadValue {
  layer: number;
  head: number;
  value: number | null;
}

export const nameOf = ({ layer, head }: { layer: number; head: number }): string =>
  `${layer}.${head}`;

export function statisticOf(scan: Scan, name: string): Statistic | null {
  return scan.statistics.find((statistic) => statistic.name === name) ?? null;
}

export function valueOf(scan: Scan, name: string, layer: number, head: number): number | null {
  const record = scan.layers[layer];
  const rows = statisticOf(scan, name)?.rows;
  return (record && rows?.[layer]?.[positionOf(record, head)]) ?? null;
}

/** Return every head with its value, in the order of layers. */
export function allHeads(scan: Scan, statistic: Statistic | null): HeadValue[] {
  return scan.layers.flatMap((layer, index) =>
    layer.heads.map((head, position) => ({
      layer: index,
      head,
      value: statistic?.rows[index]?.[position] ?? null,
    })),
  );
}

/** Return the values of B, or of B − A, for each head of A and its partner in B. */
export function compared(
  scans: [Scan, Scan],
  name: string,
  mode: "B" | "diff",
  partner: (head: HeadValue) => { layer: number; head: number } | null,
): HeadValue[] {
  return allHeads(scans[0], statisticOf(scans[0], name)).map((head) => {
    const other = partner(head);
    const there = other && valueOf(scans[1], name, other.layer, other.head);
    if (mode === "B") return { ...head, value: there };
    return { ...head, value: head.value === null || there === null ? null : there - head.value };
  });
}

/** Return the heads with the most first, or the largest change; heads without a value come last. */
export function ranked(heads: HeadValue[], isDifference: boolean): HeadValue[] {
  const size = (value: number | null): number => (value === null ? -Infinity : isDifference ? Math.abs(value) : value);
  return [...heads].sort((a, b) => size(b.value) - size(a.value));
}

/** Return the rank of a head from 1, and the number of heads with a value. */
export function rankOf(heads: HeadValue[], value: number): [rank: number, of: number] {
  const values = heads.flatMap((head) => (head.value === null ? [] : [head.value]));
  return [1 + values.filter((other) => other > value).length, values.length];
}

export interface Spread {
  mean: number;
  low: number;
  high: number;
}

/** Return the mean of the heads that have a value, the least and the most; null if none has one. */
export function spreadOf(values: (number | null)[]): Spread | null {
  const real = values.filter((value) => value !== null);
  if (!real.length) return null;
  const sum = real.reduce((total, value) => total + value, 0);
  return { mean: sum / real.length, low: Math.min(...real), high: Math.max(...real) };
}

/** Return the position of a value on the colour scale, from 0 to 1. */
export function scalePosition(statistic: Statistic, value: number): number {
  if (statistic.kind === "weight") return Math.sqrt(Math.max(0, value));
  const span = statistic.high - statistic.low;
  return span > 0 ? (value - statistic.low) / span : 0.5;
}

/**
 * Return a test of heads from what was typed: "3" is a layer, "3.7" a head, "*.7" head 7 of each
 * layer, "> 50" and "< 5" limit the value (in per cent for shares). Null if it cannot be read.
 */
export function filterOf(typed: string, statistic: Pick<Statistic, "kind"> | null): ((head: HeadValue) => boolean) | null {
  const text = typed.replace(/[\s%]/g, "");
  if (!text) return () => true;
  const limit = /^([<>])(-?\d*\.?\d+)$/.exec(text);
  if (limit) {
    const bound = Number(limit[2]) * (statistic && isShare(statistic) ? 0.01 : 1);
    return ({ value }) => value !== null && (limit[1] === ">" ? value > bound : value < bound);
  }
  const parts = text.split(",").filter(Boolean).map((part) => /^(\d+|\*)(?:\.(\d+|\*))?$/.exec(part));
  if (parts.some((part) => part === null)) return null;
  return ({ layer, head }) =>
    parts.some(
      (part) =>
        (part?.[1] === "*" || Number(part?.[1]) === layer) &&
        (part?.[2] === undefined || part[2] === "*" || Number(part[2]) === head),
    );
}
