/**
 * Right-to-left text in lines that were broken apart.
 *
 * The browser orders the runs of a line; what stands at its end may depend on what follows in the
 * paragraph. Each line therefore has the direction of its paragraph, and an invisible mark for the
 * last letter before it and the first one after it (Unicode Standard Annex 9, rules N1 and W2).
 */

import { LINE_END, lastAtMost } from "./written";

const LEFT = "\u200e";
const RIGHT = "\u200f";
const ARABIC = "\u061c";
const RIGHT_TO_LEFT = /[\u0590-\u08ff\u200f\ufb1d-\ufdff\ufe70-\ufefe\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
const ARABIC_LETTER = /[\u0600-\u07bf\u0860-\u08ff\u061c\ufb50-\ufdff\ufe70-\ufefe]/u;
const LETTER = /[\p{L}\u200e\u200f\u061c]/u;

export interface Direction {
  dir: "ltr" | "rtl";
  /** What stands before and after the line, as a mark; empty if it is as the paragraph. */
  before: string;
  after: string;
}

const PLAIN: Direction = { dir: "ltr", before: "", after: "" };

/** The directions of the lines of a text. */
export class Directions {
  private readonly isNeeded: boolean;
  private readonly paragraphs: number[] = [0];

  constructor(private readonly text: string) {
    this.isNeeded = RIGHT_TO_LEFT.test(text);
    if (!this.isNeeded) return;
    for (const { index, 0: end } of text.matchAll(LINE_END)) this.paragraphs.push(index + end.length);
  }

  /** Return the direction of the line from one position to another, in one paragraph. */
  of(from: number, to: number): Direction {
    if (!this.isNeeded) return PLAIN;
    const paragraph = lastAtMost(this.paragraphs, from);
    const start = this.paragraphs[paragraph] ?? 0;
    const end = this.paragraphs[paragraph + 1] ?? this.text.length;
    const usual = (this.after(start, end) || LEFT) === LEFT ? LEFT : RIGHT;
    const other = (mark: string): string => (mark === usual ? "" : mark);
    return {
      dir: usual === LEFT ? "ltr" : "rtl",
      before: other(this.before(from, start)),
      after: other(this.after(to, end)),
    };
  }

  /** Return the mark of the first letter from a position on; empty if there is none. */
  private after(position: number, end: number): string {
    for (let at = position; at < end; at++) {
      const character = String.fromCodePoint(this.text.codePointAt(at) ?? 0);
      if (LETTER.test(character)) return markOf(character);
      at += character.length - 1;
    }
    return "";
  }

  /** Return the mark of the last letter before a position; empty if there is none. */
  private before(position: number, start: number): string {
    for (let at = position - 1; at >= start; at--) {
      const isPair = /[\udc00-\udfff]/.test(this.text.charAt(at)) && at > start;
      const character = this.text.slice(isPair ? at - 1 : at, at + 1);
      if (LETTER.test(character)) return markOf(character);
    }
    return "";
  }
}

/** Return the mark of a letter's direction. */
function markOf(letter: string): string {
  if (!RIGHT_TO_LEFT.test(letter) && letter !== ARABIC) return LEFT;
  return ARABIC_LETTER.test(letter) ? ARABIC : RIGHT;
}
