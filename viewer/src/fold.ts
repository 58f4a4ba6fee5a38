/** Texts without case and accents, in which a search looks, with the places of their characters. */

/** A folded text; character k of it comes from character `places[k]`, and the last place is the end. */
export interface Folded {
  text: string;
  places: Uint32Array;
}

const LAST_ASCII = 127;
// Signs of Indic scripts and the voicing of kana are letters of their own, and stay.
const ACCENTS = /(?=\p{Mn})(?![\u3099\u309a])[\p{sc=Zinh}\p{sc=Hebr}\p{sc=Arab}]/gu;
const BLANK = /^\s$/;
const CHUNK = 8192; // characters that are joined at once

const known = new Map<string, string>();

/** Return a character without case and accents: several for "ß", none for an accent. */
function foldCharacter(character: string): string {
  const before = known.get(character);
  if (before !== undefined) return before;
  const plain = character.normalize("NFD").replace(ACCENTS, "");
  // First upper case: else "ς" and "σ" would differ, and "ß" and "ss".
  const folded = BLANK.test(character) ? " " : plain.toUpperCase().toLowerCase().replace(ACCENTS, "");
  known.set(character, folded);
  return folded;
}

/** Fold a text: no case, no accents, and one blank for each run of blanks and line ends. */
export function fold(text: string): Folded {
  const codes: number[] = [];
  const places: number[] = [];
  const add = (code: number, at: number): void => {
    if (code === 32 && codes[codes.length - 1] === 32) return;
    codes.push(code);
    places.push(at);
  };
  for (let at = 0; at < text.length; at++) {
    const code = text.charCodeAt(at);
    if (code <= LAST_ASCII) {
      add(code >= 65 && code <= 90 ? code + 32 : code === 32 || (code >= 9 && code <= 13) ? 32 : code, at);
      continue;
    }
    const character = String.fromCodePoint(text.codePointAt(at) ?? 0);
    for (const unit of foldCharacter(character).split("")) add(unit.charCodeAt(0), at);
    at += character.length - 1;
  }
  places.push(text.length);
  const parts: string[] = [];
  for (let from = 0; from < codes.length; from += CHUNK) {
    parts.push(String.fromCharCode(...codes.slice(from, from + CHUNK)));
  }
  return { text: parts.join(""), places: Uint32Array.from(places) };
}
