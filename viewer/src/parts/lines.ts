/** Lines of tokens: words are measured once, and broken to a width. */

import { visible } from "../format";
import type { Text } from "../text";

const SLICE_MS = 30; // of measuring before other work may run
const PADDING = 4; // of a token, left and right together, in pixels

/** The first token of each line of a sequence. */
export interface Lines {
  starts: number[];
  length: number;
}

export class LineBreaker {
  private readonly widths = new Map<string, number>();
  private readonly context = document.createElement("canvas").getContext("2d");

  constructor(private readonly font: string) {}

  private width(word: string): number {
    const known = this.widths.get(word);
    if (known !== undefined) return known;
    if (this.context) this.context.font = this.font;
    const measured = (this.context?.measureText(visible(word)).width ?? 8) + PADDING;
    this.widths.set(word, measured);
    return measured;
  }

  /** Return the lines of a sequence; long texts are broken in slices of time. */
  async lines(text: Text, sequence: number, width: number, isStale: () => boolean): Promise<Lines | null> {
    const length = text.lengthOf(sequence);
    const starts = length ? [0] : [];
    let used = 0;
    let since = performance.now();
    for (let token = 0; token < length; token++) {
      const word = text.word(sequence, token);
      const size = this.width(word);
      if (used + size > width && used > 0) {
        starts.push(token);
        used = 0;
      }
      used += size;
      if (word.includes("\n") && token + 1 < length) {
        starts.push(token + 1);
        used = 0;
      }
      if (token % 512 === 511 && performance.now() - since > SLICE_MS) {
        await new Promise((resume) => setTimeout(resume));
        if (isStale()) return null;
        since = performance.now();
      }
    }
    return { starts, length };
  }
}

/** Return the line of a token. */
export function lineOf({ starts }: Lines, token: number): number {
  let low = 0;
  let high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((starts[middle] ?? 0) <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}
