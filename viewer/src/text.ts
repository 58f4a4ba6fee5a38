/** The texts of a stream, one for each sequence, with a search over what was written. */

import type { TextStream, Words } from "./contract";
import { type Folded, fold } from "./fold";
import { Written, areApart, areText } from "./written";

const SPECIAL = /^(?:\[.*\]|<.*>)$/s; // as headwise.scanning.links has it

/** A place of a text: its characters from one position to another, and the first of its tokens. */
export interface Place {
  sequence: number;
  token: number;
  from: number;
  to: number;
}

export class Text {
  /** The first token of each sequence, counted over the stream. */
  readonly first: number[];
  readonly length: number;
  private readonly sequences = new Map<number, Written>();
  private readonly folded = new Map<number, Folded>();
  private readonly areApart: boolean;

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
    this.areApart = areApart(words.words);
  }

  get isKnown(): boolean {
    return this.words.ids.length > 0 || this.words.written !== undefined;
  }

  lengthOf(sequence: number): number {
    return this.stream.lengths[sequence] ?? 0;
  }

  /** Return a sequence as it was written; where that is unknown, the words of its tokens. */
  of(sequence: number): Written {
    const made = this.sequences.get(sequence) ?? this.make(sequence);
    this.sequences.set(sequence, made);
    return made;
  }

  private make(sequence: number): Written {
    const nameOf = (token: number): string => this.nameOf(sequence, token);
    const written = this.words.written?.[sequence];
    if (written) return Written.fromSpans(written.text, written.spans, nameOf);
    const words = Array.from({ length: this.lengthOf(sequence) }, (_, token) => nameOf(token));
    if (!this.areApart && areText(this.words.words)) return Written.fromNames(words, (token) => SPECIAL.test(nameOf(token).trim()), nameOf);
    return Written.fromWords(words, this.areApart, nameOf);
  }

  /** Return the word of a token's id, which may differ from what was written. */
  private nameOf(sequence: number, token: number): string {
    const id = this.words.ids[(this.first[sequence] ?? 0) + token];
    return id === undefined ? "" : (this.words.words[id] ?? "");
  }

  /** True for a token such as [SEP] or <s>, which stands for no characters of the text. */
  isSpecial(sequence: number, token: number): boolean {
    const name = this.nameOf(sequence, token).trim();
    return SPECIAL.test(name) && !(this.words.written?.[sequence] && this.of(sequence).charactersOf(token));
  }

  /** Return a token as it was written; the word of its id where it has no characters. */
  word(sequence: number, token: number): string {
    if (token >= this.lengthOf(sequence)) return "";
    const name = this.nameOf(sequence, token);
    return this.words.written?.[sequence] ? this.of(sequence).charactersOf(token) || name : name;
  }

  /** Return the places of a phrase in all sequences, without regard to case and accents; "#17" is token 17. */
  search(wanted: string, sequence: number): Place[] {
    const index = /^\s*#(\d+)\s*$/.exec(wanted);
    if (index) return this.tokenPlace(sequence, Number(index[1]));
    const needle = fold(wanted).text;
    if (!needle.trim()) return [];
    return this.stream.lengths.flatMap((_, each) => this.searchIn(each, needle));
  }

  private tokenPlace(sequence: number, token: number): Place[] {
    if (token >= this.lengthOf(sequence)) return [];
    const written = this.of(sequence);
    return [{ sequence, token, from: written.startOf(token), to: written.endOf(token) }];
  }

  private searchIn(sequence: number, needle: string): Place[] {
    const written = this.of(sequence);
    const folded = this.folded.get(sequence) ?? fold(written.text);
    this.folded.set(sequence, folded);
    const { text, places } = folded;
    const found: Place[] = [];
    for (let at = text.indexOf(needle); at >= 0; at = text.indexOf(needle, at + needle.length)) {
      const from = places[at] ?? 0;
      const word = places[at + needle.length - needle.trimStart().length] ?? from;
      found.push({ sequence, token: written.tokenFrom(word), from, to: places[at + needle.length] ?? from });
    }
    return found;
  }
}
