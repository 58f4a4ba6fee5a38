/** Bytes from text, four for five characters: as `headwise/reports/base85.py` writes them. */

const LEFT_OUT = "<>&\"'\\`/-";
const BASE = 85;
const LAST = "~"; // the last digit, with which a group is filled
const DIGITS = new Uint8Array(127);
let next = 0;
for (let code = 33; code < 127; code++) {
  if (!LEFT_OUT.includes(String.fromCharCode(code))) DIGITS[code] = next++;
}

/** Return the bytes of a text. A last group of k + 1 characters has k bytes. */
export function fromBase85(text: string): Uint8Array<ArrayBuffer> {
  const bytes = new Uint8Array(Math.floor((text.length * 4) / 5));
  const whole = text.padEnd(Math.ceil(text.length / 5) * 5, LAST);
  for (let from = 0, to = 0; from < whole.length; from += 5, to += 4) {
    let group = 0;
    for (let at = from; at < from + 5; at++) group = group * BASE + DIGITS[whole.charCodeAt(at)]!;
    bytes[to] = group >>> 24;
    bytes[to + 1] = group >>> 16;
    bytes[to + 2] = group >>> 8;
    bytes[to + 3] = group;
  }
  return bytes;
}
