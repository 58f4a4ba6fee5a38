/** A sequence as it was written: its characters, and the tokens that stand for them. */

import { visible } from "./format";

const CONTINUES = "##"; // how WordPiece marks a token that continues a word
const BEGINS = /^[\s\u0120\u2581]/; // how tokens hold the blank before a word
const NO_TEXT = /[^\P{C}\n\t\u200c\u200d]/u;
const FIRST_BLANK = /^[ \u0120\u2581](?=.)/s;
const BLANK_NAMES = /[\u0120\u2581]/g;
const NEVER_FIRST = /^(?:\p{M}|\u200d|[\u{1f3fb}-\u{1f3ff}\u{e0020}-\u{e007f}])/u;
const INVISIBLE = /^[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]+$/u;
const BLANKS = /^[ \t]+$/;
const MOST_OF_NAME = 64; // characters
const LAST_PLAIN = 0x2ff; // below, no character belongs to the one before it

/** What ends a line. */
export const LINE_END = /\r\n|[\n\v\f\r\u0085\u2028\u2029]/g;

/** Something drawn that is no character of the text: a token without characters, or an invisible one. */
export interface Mark {
  at: number;
  /** The token without characters; null for characters of the text that cannot be seen. */
  token: number | null;
  label: string;
}

/**
 * The characters of a sequence in pieces: between two cuts the tokens are the same. A piece is never
 * a part of what is read as one character, so the tokens of an emoji or of an accent share a piece.
 */
export class Written {
  /** Where the pieces begin, and the end of the text. */
  readonly cuts: number[] = [];
  /** The first and the last token of each piece; −1 for characters that no token stands for. */
  private readonly firsts: number[] = [];
  private readonly lasts: number[] = [];
  /** In the order of their places. */
  readonly marks: Mark[] = [];

  constructor(
    readonly text: string,
    private readonly starts: Uint32Array,
    private readonly ends: Uint32Array,
    private readonly nameOf: (token: number) => string,
    /** True if the text is made of words, which then have some room around them. */
    readonly isMade = false,
  ) {
    this.cut();
    this.mark();
  }

  /** Return a text from its spans: two numbers a token, as `headwise.reports` writes them. */
  static fromSpans(text: string, spans: number[], nameOf: (token: number) => string): Written {
    const starts = new Uint32Array(spans.length / 2);
    const ends = new Uint32Array(spans.length / 2);
    let reached = 0;
    for (let token = 0; token < starts.length; token++) {
      starts[token] = reached + (spans[2 * token] ?? 0);
      ends[token] = (starts[token] ?? 0) + (spans[2 * token + 1] ?? 0);
      reached = Math.max(reached, ends[token] ?? 0);
    }
    return new Written(text, starts, ends, nameOf);
  }

  /** Return the text of tokens whose names hold its blanks; a special token has no characters. */
  static fromNames(names: string[], isSpecial: (token: number) => boolean, nameOf: (token: number) => string): Written {
    // The blank before a word is none of its characters, unless it is all that there is.
    const spans = names.flatMap((name, token) => {
      const blank = FIRST_BLANK.test(name) ? 1 : 0;
      return isSpecial(token) ? [0, 0] : [blank, name.length - blank];
    });
    const text = names.filter((_, token) => !isSpecial(token)).join("").replace(BLANK_NAMES, " ").replaceAll("\u010a", "\n");
    return Written.fromSpans(text, spans, nameOf);
  }

  /** Return a text made of the words of tokens whose characters are unknown, with blanks if they are apart. */
  static fromWords(words: string[], isApart: boolean, nameOf: (token: number) => string): Written {
    const starts = new Uint32Array(words.length);
    const ends = new Uint32Array(words.length);
    const parts: string[] = [];
    let at = 0;
    const add = (part: string): void => {
      parts.push(part);
      at += part.length;
    };
    words.forEach((word, token) => {
      const continues = isApart && word.startsWith(CONTINUES);
      if (token && isApart && !continues) add(" ");
      starts[token] = at;
      add(BLANKS.test(word) ? word : visible(continues ? word.slice(CONTINUES.length) : word));
      ends[token] = at;
      if (word.includes("\n")) add("\n");
    });
    return new Written(parts.join(""), starts, ends, nameOf, true);
  }

  get length(): number {
    return this.starts.length;
  }

  startOf(token: number): number {
    return this.starts[token] ?? 0;
  }

  endOf(token: number): number {
    return this.ends[token] ?? 0;
  }

  /** Return the characters of a token; empty for one without. */
  charactersOf(token: number): string {
    return this.text.slice(this.starts[token], this.ends[token]);
  }

  pieceAt(position: number): number {
    return lastAtMost(this.cuts, position);
  }

  firstOf(piece: number): number {
    return this.firsts[piece] ?? -1;
  }

  /** Return the tokens of a piece, which may be several. */
  tokensOf(piece: number): number[] {
    const [from, to] = [this.cuts[piece] ?? 0, this.cuts[piece + 1] ?? 0];
    const tokens: number[] = [];
    if (this.firstOf(piece) < 0) return tokens;
    for (let token = this.firstOf(piece); token <= (this.lasts[piece] ?? -1); token++) {
      if (this.startOf(token) < to && this.endOf(token) > from) tokens.push(token);
    }
    return tokens;
  }

  /** Return the first token from a position on, also one without characters. */
  firstFrom(position: number): number {
    const token = this.tokenFrom(position);
    const mark = this.marks.find((each) => each.token !== null && each.at >= position);
    return Math.min(token, mark?.token ?? Infinity);
  }

  /** Return the token of the first characters from a position on; the last token if there are none. */
  tokenFrom(position: number): number {
    for (let piece = this.pieceAt(position); piece < this.firsts.length; piece++) {
      if (this.firstOf(piece) >= 0) return this.firstOf(piece);
    }
    return Math.max(0, this.length - 1);
  }

  /** Cut the text where a token begins or ends, but never within what is read as one character. */
  private cut(): void {
    const { text, starts, ends } = this;
    const wanted = new Uint8Array(text.length + 1);
    for (let token = 0; token < this.length; token++) {
      if (ends[token] === starts[token]) continue;
      wanted[starts[token] ?? 0] = 1;
      wanted[ends[token] ?? 0] = 1;
    }
    wanted[0] = 1;
    for (let at = 0; at < text.length; at++) {
      if (wanted[at] && isBoundary(text, at)) this.cuts.push(at);
    }
    this.firsts.length = this.lasts.length = this.cuts.length;
    this.firsts.fill(-1);
    this.lasts.fill(-1);
    this.cuts.push(text.length);
    for (let token = 0; token < this.length; token++) {
      if (ends[token] === starts[token]) continue;
      for (let piece = this.pieceAt(this.startOf(token)); (this.cuts[piece] ?? Infinity) < this.endOf(token); piece++) {
        if (this.firstOf(piece) < 0) this.firsts[piece] = token;
        this.lasts[piece] = token;
      }
    }
  }

  private mark(): void {
    const { text, cuts } = this;
    for (let token = 0; token < this.length; token++) {
      if (this.endOf(token) > this.startOf(token)) continue;
      this.marks.push({ at: this.startOf(token), token, label: visible(this.nameOf(token)) });
    }
    for (let piece = 0; piece + 1 < cuts.length; piece++) {
      const [from, to] = [cuts[piece] ?? 0, cuts[piece + 1] ?? 0];
      if (this.firstOf(piece) < 0 || text.charCodeAt(from) === 32) continue;
      const label = labelOf(text.slice(from, to));
      if (label) this.marks.push({ at: from, token: null, label });
    }
    this.marks.sort((a, b) => a.at - b.at || (a.token ?? Infinity) - (b.token ?? Infinity));
  }
}

/** True if names can stand for the characters of their tokens: none is long, and none would not be seen. */
export const areText = (names: string[]): boolean => !names.some((name) => name.length > MOST_OF_NAME || NO_TEXT.test(name));

/** True if no word of a vocabulary holds the blank before it, as WordPiece's do not. */
export const areApart = (vocabulary: string[]): boolean => !vocabulary.some((word) => BEGINS.test(word));

/** Return the name of characters that cannot be seen; empty for others, and for what ends a line. */
export const labelOf = (characters: string): string =>
  INVISIBLE.test(characters) && !/[\t\n]/.test(characters) ? visible(characters) : "";

/** Return the last place of a sorted list with a value of at most this. */
export function lastAtMost(values: ArrayLike<number>, value: number): number {
  let low = 0;
  let high = values.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((values[middle] ?? 0) <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** True if a character begins at a position: no accent, no half of a pair, no rest of an emoji. */
export function isBoundary(text: string, at: number): boolean {
  const code = text.charCodeAt(at);
  const before = text.charCodeAt(at - 1);
  if (code <= LAST_PLAIN) return !(code === 10 && before === 13);
  if (isLow(code) && isHigh(before)) return false;
  if (before === 0x200d) return false;
  const character = text.slice(at, at + 2);
  if (NEVER_FIRST.test(character)) return false;
  return !isFlag(character) || flagsBefore(text, at) % 2 === 0;
}

const isHigh = (code: number): boolean => code >= 0xd800 && code < 0xdc00;
const isLow = (code: number): boolean => code >= 0xdc00 && code < 0xe000;
/** True for one of the two letters of a flag. */
const isFlag = (character: string): boolean => /^[\u{1f1e6}-\u{1f1ff}]/u.test(character);

function flagsBefore(text: string, at: number): number {
  let count = 0;
  while (isFlag(text.slice(Math.max(0, at - 2 * count - 2), at - 2 * count))) count++;
  return count;
}
