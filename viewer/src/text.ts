/** The words of a text stream, by sequence, with a search over words and token indices. */

import type { TextStream, Words } from "./contract";

const CONTINUES = "##"; // how WordPiece marks a token that continues a word

/** A token of a stream. */
export interface Place {
  sequence: number;
  token: number;
}

export class Text {
  /** The first token of each sequence, counted over the stream. */
  readonly first: number[];
  readonly length: number;
  private searchable: { text: string; starts: Uint32Array } | null = null;

  constructor(
    readonly stream: TextStream,
    private readonly words: Words,
  ) {
    let total = 0;
    this.first = stream.lengths.map((length) => {
      const first = total;
      total += length;
      return first;
    });
    this.length = total;
  }

  get isKnown(): boolean {
    return this.words.ids.length > 0;
  }

  lengthOf(sequence: number): number {
    return this.stream.lengths[sequence] ?? 0;
  }

  word(sequence: number, token: number): string {
    const id = this.words.ids[(this.first[sequence] ?? 0) + token];
    return id === undefined ? "" : (this.words.words[id] ?? "");
  }

  placeOf(token: number): Place {
    let sequence = this.first.length - 1;
    while (sequence > 0 && (this.first[sequence] ?? 0) > token) sequence--;
    return { sequence, token: token - (this.first[sequence] ?? 0) };
  }

  /** Return the tokens that hold a text, ignoring case; "#17" and "17" also mean token 17. */
  search(wanted: string, sequence: number): Place[] {
    const results: Place[] = [];
    const index = /^#?(\d+)$/.exec(wanted.trim());
    if (index && Number(index[1]) < this.lengthOf(sequence)) {
      results.push({ sequence, token: Number(index[1]) });
    }
    if (wanted.startsWith("#") && index) return results;
    const { text, starts } = (this.searchable ??= this.join());
    const needle = wanted.toLowerCase();
    if (!needle.trim()) return results;
    for (let at = text.indexOf(needle); at >= 0; at = text.indexOf(needle, at + needle.length)) {
      results.push(this.placeOf(tokenAt(starts, at + leadingSpaces(needle))));
    }
    return results;
  }

  /** Join the tokens to a text, with the position at which each begins. */
  private join(): { text: string; starts: Uint32Array } {
    const { words, ids } = this.words;
    const isPieces =
      words.some((word) => word.startsWith(CONTINUES)) && !words.some((word) => word.startsWith(" "));
    const lower = words.map((word) => {
      const plain = word.toLowerCase();
      if (!isPieces) return plain;
      return plain.startsWith(CONTINUES) ? plain.slice(CONTINUES.length) : ` ${plain}`;
    });
    const starts = new Uint32Array(ids.length);
    let at = 0;
    const parts = ids.map((id, token) => {
      starts[token] = at;
      const part = lower[id] ?? "";
      at += part.length;
      return part;
    });
    return { text: parts.join(""), starts };
  }
}

const leadingSpaces = (text: string): number => text.length - text.trimStart().length;

/** Return the last token that begins at or before a position. */
function tokenAt(starts: Uint32Array, position: number): number {
  let low = 0;
  let high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((starts[middle] ?? 0) <= position) low = middle;
    else high = middle - 1;
  }
  return low;
}
