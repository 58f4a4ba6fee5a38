/** The largest weights of every query of a head, and the queries that look at a key. */

import { WEIGHTS } from "./maps";
import type { Scan } from "./contract";
import type { HeadId } from "./maps";
import type { Source } from "./source";

/** A token with a weight. */
export type Lit = [token: number, weight: number];

const MANY_TOKENS = 65_536; // keys beyond this number take four bytes instead of two

export class TopKeys {
  private readonly keys: Uint32Array;
  private readonly shares: Uint8Array;

  constructor(
    bytes: Uint8Array,
    readonly ranks: number,
    readonly queries: number,
    longest: number,
  ) {
    const size = queries * ranks;
    const planes = longest > MANY_TOKENS ? 4 : 2;
    this.keys = new Uint32Array(size);
    for (let plane = 0; plane < planes; plane++) {
      const shift = 8 * plane;
      const from = plane * size;
      for (let at = 0; at < size; at++) this.keys[at]! |= (bytes[from + at] ?? 0) << shift;
    }
    this.shares = bytes.subarray(planes * size, (planes + 1) * size);
  }

  /** Return the stored keys of a query, the largest weight first. */
  keysOf(query: number): Lit[] {
    const lit: Lit[] = [];
    for (let at = query * this.ranks; at < (query + 1) * this.ranks; at++) {
      const share = this.shares[at];
      if (share) lit.push([this.keys[at] ?? 0, WEIGHTS[share] ?? 0]);
    }
    return lit;
  }

  /** Return the queries from `first` on that have a key among their stored keys, most first. */
  queriesOf(key: number, first: number, length: number): Lit[] {
    const lit: Lit[] = [];
    const end = (first + length) * this.ranks;
    for (let at = first * this.ranks; at < end; at++) {
      const share = this.shares[at];
      if (share && this.keys[at] === key) {
        lit.push([Math.floor(at / this.ranks) - first, WEIGHTS[share] ?? 0]);
      }
    }
    return lit.sort((a, b) => b[1] - a[1]);
  }
}

/** Return the top keys of every query of a head, or null if the page does not hold them. */
export async function loadTopKeys(source: Source, report: number, id: HeadId): Promise<TopKeys | null> {
  const scan = source.reports[report]?.scans[id.scan];
  const layer = scan?.layers[id.layer];
  if (!scan || !layer?.top.includes(id.head)) return null;
  const bytes = await source.bytes(report, `${id.scan}/top/${id.layer}.${id.head}`);
  const queries = lengths(scan, layer.query_text);
  const keys = lengths(scan, layer.key_text);
  if (!bytes.length || !queries.length) return null;
  const total = queries.reduce((sum, length) => sum + length, 0);
  return new TopKeys(bytes, scan.ranks, total, Math.max(...keys));
}

const lengths = (scan: Scan, text: number | null): number[] =>
  text === null ? [] : (scan.texts[text]?.lengths ?? []);
