/** Numbers and tokens as text. */

import { format } from "d3-format";
import type { Statistic } from "./contract";

const grouped = format(",");
const MOST_SHOWN = 32; // characters of a token in the text

export const count = (value: number): string => grouped(value);

/** Put a minus sign for the hyphen; a rounded −0 is 0. */
const minus = (text: string): string => text.replace(/^-(?=[0.]*$)/, "").replace(/^-/, "−");

/** Format a share as per cent: 87 %, 3.4 %, 0.12 %, under 0.01 %. */
export function percent(share: number): string {
  const value = 100 * share;
  const size = Math.abs(value);
  if (size === 0) return "0 %";
  if (size < 0.01) return value < 0 ? "over −0.01 %" : "under 0.01 %";
  return minus(`${value.toFixed(size >= 9.95 ? 0 : size >= 0.995 ? 1 : 2)} %`);
}

/** Return a share rounded down to the two digits that are written of it, so that no more is promised. */
export function least(share: number): number {
  const step = 10 ** (Math.floor(Math.log10(Math.max(share, 1e-4))) - 1);
  return share < 1e-4 ? share : Math.floor(share / step + 1e-9) * step;
}

/** Format a change of a share with its sign. */
export const change = (share: number): string => (share >= 1e-4 ? `+${percent(share)}` : percent(share));

/** Format a number in three digits. */
export function number(value: number): string {
  const size = Math.abs(value);
  if (size !== 0 && size < 0.001) return minus(value.toExponential(1));
  return minus(size >= 1000 ? grouped(Math.round(value)) : String(Number(value.toPrecision(3))));
}

export const isShare = (statistic: Pick<Statistic, "kind">): boolean => statistic.kind !== "range";

/** Format a value for a sentence, with its unit. */
export function long(statistic: Statistic, value: number | null): string {
  const unit = value === null || isShare(statistic) ? "" : shortUnit(statistic);
  return unit ? `${bare(statistic, value)} ${unit}` : bare(statistic, value);
}

/** Format a value for a table, in which the unit stands beside the name. */
export function bare(statistic: Statistic, value: number | null): string {
  if (value === null) return "no value";
  return isShare(statistic) ? percent(value) : number(value);
}

/** Return the name of a statistic, with the unit of its numbers if they are no shares. */
export function labelWithUnit(statistic: Statistic): string {
  const unit = isShare(statistic) ? "" : shortUnit(statistic);
  return unit && !statistic.label.includes(unit) ? `${statistic.label}, ${unit}` : statistic.label;
}

/** Return the unit in a word, or nothing if it takes more. */
export function shortUnit(statistic: Statistic): string {
  const unit = (statistic.unit.split(/[,;(]/)[0] ?? "").trim();
  return /^(tokens|nats|keys|directions)$/.test(unit) ? unit : "";
}

/** Format a value in at most four characters, for a cell of the grid. */
export function short(statistic: Statistic, value: number | null): string {
  if (value === null) return "·";
  if (isShare(statistic)) return minus((100 * value).toFixed(0));
  const largest = Math.max(Math.abs(statistic.low), Math.abs(statistic.high), Math.abs(value));
  if (largest < 0.995) return minus(value.toFixed(2).replace("0.", "."));
  if (largest < 9.95) return minus(value.toFixed(1));
  return minus(Math.abs(value) < 999.5 ? value.toFixed(0) : `${(value / 1000).toFixed(0)}k`);
}

/** Format first to last, or the single one. */
export const range = (first: number, last: number): string =>
  first === last ? count(first) : `${count(first)} to ${count(last)}`;

/** Put a word into quotation marks: single ones around a word that has double ones. */
export const inQuotes = (word: string): string => (/["“”„]/.test(word) ? `‘${word}’` : `“${word}”`);

/** Return a token as it can be shown: what a reader would not see has a name. */
export function visible(word: string): string {
  const shown = Array.from(word.length > 4 * MOST_SHOWN ? word.slice(0, 4 * MOST_SHOWN) : word)
    .map(visibleCharacter)
    .join("");
  if (shown.length > MOST_SHOWN || word.length > 4 * MOST_SHOWN) {
    return `${Array.from(shown).slice(0, MOST_SHOWN).join("")}… (${count(word.length)} characters)`;
  }
  return shown === "" ? "∅" : shown.trim() === "" ? "␣".repeat(shown.length) : shown;
}

function visibleCharacter(character: string): string {
  if (character === "\n") return "⏎";
  if (character === "\t") return "⇥";
  const code = character.codePointAt(0) ?? 0;
  if (code < 0x20) return `\\x${code.toString(16).padStart(2, "0")}`;
  // Joiners belong to emoji and scripts; other format and control characters are invisible.
  if (/[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/u.test(character) && code !== 0x200d && code !== 0x200c) {
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  }
  return character;
}
