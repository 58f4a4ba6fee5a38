/** Lines of a text: its words are measured once, and broken to a width. */

import { type Mark, type Written, isBoundary, lastAtMost } from "../written";

const SLICE_MS = 30; // of measuring before other work may run
const TAB = 8; // blanks, as in the style sheet
const MARK = 6; // the room around a mark, in pixels
const ROOM = 4; // around a word of a text that is made of words, in pixels
const MOST_KNOWN = 64; // characters of a word that is remembered
const EVERY = 512; // words, after which the clock is read
// Scripts that have no blanks between words: a line may end after each character, but not before
// what closes.
const ALONE = "\\p{sc=Han}\\p{sc=Hira}\\p{sc=Kana}\\p{sc=Hang}\\u3000-\\u303f\\uff01-\\uff60";
const CLOSES = "[\\p{M}\\p{Pe}\\p{Pf}、。，．！？：；]*";
const BLANK = " \\t\\u1680\\u2000-\\u2006\\u2008-\\u200a\\u205f";
const END = "\\n\\v\\f\\r\\u0085\\u2028\\u2029";
const ATOM = new RegExp(`\\r\\n|[${END}${BLANK}]|[${ALONE}]${CLOSES}|[^${END}${BLANK}${ALONE}]+`, "gu");
const IS_END = new RegExp(`^[${END}]`);
const IS_BLANK = new RegExp(`^[${BLANK}]$`);

/** Where each line of a sequence begins, in characters. */
export interface Lines {
  starts: number[];
}

/** Something that is not broken over two lines, unless it is longer than a line. */
interface Atom {
  atom: string;
  index: number;
  room: number;
}

/** Yield the words, blanks and ends of lines of a text; of one that is made of words, its pieces. */
function* atomsOf(written: Written): Generator<Atom> {
  const { text, cuts } = written;
  if (!written.isMade) {
    for (const { 0: atom, index } of text.matchAll(ATOM)) yield { atom, index, room: 0 };
    return;
  }
  for (let piece = 0; piece + 1 < cuts.length; piece++) {
    const index = cuts[piece] ?? 0;
    yield { atom: text.slice(index, cuts[piece + 1]), index, room: written.firstOf(piece) < 0 ? 0 : ROOM };
  }
}

/** A line that is being filled. */
interface Filling {
  starts: number[];
  used: number;
  width: number;
}

export class LineBreaker {
  private readonly widths = new Map<string, number>();
  private readonly context = document.createElement("canvas").getContext("2d");

  constructor(
    private readonly font: string,
    private readonly markFont: string,
  ) {}

  private measure(word: string, font: string = this.font): number {
    const known = this.widths.get(word);
    if (known !== undefined && font === this.font) return known;
    if (!this.context) return 8 * word.length;
    this.context.font = font;
    const { width } = this.context.measureText(word);
    if (font === this.font && word.length <= MOST_KNOWN) this.widths.set(word, width);
    return width;
  }

  /** Return the lines of a sequence; long texts are broken in slices of time. */
  async lines(written: Written, width: number, isStale: () => boolean): Promise<Lines | null> {
    const filling: Filling = { starts: [0], used: 0, width };
    let since = performance.now();
    let done = 0;
    let mark = 0;
    for (const { atom, index, room } of atomsOf(written)) {
      let marks = room;
      // What stands at the end of the text belongs to its last word.
      const end = index + atom.length === written.text.length ? Infinity : index + atom.length;
      for (; mark < written.marks.length && (written.marks[mark] as Mark).at < end; mark++) {
        marks += this.widthOf(written.marks[mark] as Mark);
      }
      this.place(filling, atom, index, marks);
      if (++done % EVERY || performance.now() - since < SLICE_MS) continue;
      await new Promise((resume) => setTimeout(resume));
      if (isStale()) return null;
      since = performance.now();
    }
    return { starts: filling.starts };
  }

  private widthOf({ label }: Mark): number {
    return this.measure(label, this.markFont) + MARK;
  }

  /** Put a word, a blank or the end of a line into the line, or into a new one. */
  private place(filling: Filling, atom: string, at: number, marks: number): void {
    const { starts, width } = filling;
    const begin = (position: number): void => {
      if (position > (starts[starts.length - 1] ?? 0)) starts.push(position);
      filling.used = 0;
    };
    if (IS_END.test(atom)) {
      begin(at + atom.length);
    } else if (IS_BLANK.test(atom)) {
      // One blank may hang over the end of a line.
      if (filling.used > width) begin(at);
      filling.used += (atom === "\t" ? this.tabFrom(filling.used) : this.measure(atom)) + marks;
    } else {
      const size = this.measure(atom) + marks;
      if (filling.used > 0 && filling.used + size > width) begin(at);
      if (size > width) this.breakWord(filling, atom, at, begin);
      else filling.used += size;
    }
  }

  /** Return the room of a tab: to the next stop that is not nearer than half a digit, as in CSS. */
  private tabFrom(used: number): number {
    const tab = TAB * this.measure(" ");
    const size = tab - (used % tab);
    return size < this.measure("0") / 2 ? size + tab : size;
  }

  /** Break a word that is longer than a line after any of its characters. */
  private breakWord(filling: Filling, word: string, at: number, begin: (position: number) => void): void {
    let from = 0;
    for (let to = 1; to <= word.length; to++) {
      if (to < word.length && !isBoundary(word, to)) continue;
      const size = this.measure(word.slice(from, to));
      if (filling.used > 0 && filling.used + size > filling.width) begin(at + from);
      filling.used += size;
      from = to;
    }
  }
}

/** Return the line of a position. */
export const lineOf = ({ starts }: Lines, position: number): number => lastAtMost(starts, position);
