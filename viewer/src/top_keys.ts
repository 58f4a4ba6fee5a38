/** The largest weights of every query: of a head, and of all heads of a layer. */

import { WEIGHTS, positionOf } from "./maps";
import type { Layer, Scan } from "./contract";
import type { HeadId } from "./maps";
import type { Source } from "./source";

/** A token with a weight. */
export type Lit = [token: number, weight: number];

const MANY_TOKENS = 65_536; // keys beyond this number take four bytes instead of two

// The ends of the weights that a stored step stands for.
const [LOW, HIGH] = [-0.5, 0.5].map((half) =>
  Float32Array.from({ length: 256 }, (_, step) => Math.max(0, Math.min(255, step + half) / 255) ** 2)) as [Float32Array, Float32Array];

/** The stored keys of some queries of a layer: a row for the first key of each head, then for each second one. */
class Chunk {
  private readonly size: number; // bytes of a plane

  constructor(
    private readonly bytes: Uint8Array,
    private readonly queries: number,
    private readonly planes: number, // of the keys; that of the shares follows
  ) {
    this.size = bytes.length / (planes + 1);
  }

  /** Return the stored byte of the weight, 0 where there is no key. */
  share(row: number, query: number): number {
    return this.bytes[this.planes * this.size + row * this.queries + query] ?? 0;
  }

  key(row: number, query: number): number {
    let key = 0;
    const at = row * this.queries + query;
    for (let plane = this.planes - 1; plane >= 0; plane--) key = key * 256 + (this.bytes[plane * this.size + at] ?? 0);
    return key;
  }

  /** Call `found` with each query from one to before another that has a key in a row, and with its share. */
  find(row: number, key: number, from: number, to: number, found: (query: number, share: number) => void): void {
    const { bytes } = this;
    const start = row * this.queries;
    const low = key & 255;
    // Of the keys with the same low byte only, the other planes are read.
    for (let query = from; query < to; query++) {
      if (bytes[start + query] !== low || this.key(row, query) !== key) continue;
      const share = this.share(row, query);
      if (share) found(query, share);
    }
  }
}

/** The stored keys of every query of a head. */
export class TopKeys {
  constructor(
    private readonly chunks: Chunk[],
    private readonly step: number, // queries of a chunk
    private readonly rows: number[], // of the head in each chunk, the largest weight first
    readonly queries: number,
  ) {}

  get ranks(): number {
    return this.rows.length;
  }

  /** Return the stored keys of a query, the largest weight first. */
  keysOf(query: number): Lit[] {
    const chunk = this.chunks[Math.floor(query / this.step)];
    const lit: Lit[] = [];
    for (const row of chunk ? this.rows : []) {
      const share = chunk!.share(row, query % this.step);
      if (share) lit.push([chunk!.key(row, query % this.step), WEIGHTS[share] ?? 0]);
    }
    return lit;
  }

  /** Return the queries from `first` on that have a key among their stored keys, most first. */
  queriesOf(key: number, first: number, length: number): Lit[] {
    const lit: Lit[] = [];
    for (const [chunk, start, from, to] of this.parts(first, length)) {
      for (const row of this.rows) {
        chunk.find(row, key, from, to, (at, share) => lit.push([start + at - first, WEIGHTS[share] ?? 0]));
      }
    }
    return lit.sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  }

  /** Return the first of these queries that gives the key most, or null if none stores it. */
  mostOf(key: number, first: number, length: number, isChosen: (query: number) => boolean): Lit | null {
    let [most, query] = [0, 0];
    for (const [chunk, start, from, to] of this.parts(first, length)) {
      for (const row of this.rows) {
        chunk.find(row, key, from, to, (at, share) => {
          const isFirst = share === most && start + at < query;
          if ((share > most || isFirst) && isChosen(start + at - first)) [most, query] = [share, start + at];
        });
      }
    }
    return most ? [query - first, WEIGHTS[most] ?? 0] : null;
  }

  /** Yield the chunks of some queries: the first query of each, and from where to where it holds them. */
  private *parts(first: number, length: number): Generator<[chunk: Chunk, start: number, from: number, to: number]> {
    const end = first + length;
    for (let number = Math.floor(first / this.step); number * this.step < end; number++) {
      const start = number * this.step;
      const chunk = this.chunks[number];
      if (chunk) yield [chunk, start, Math.max(0, first - start), Math.min(this.step, end - start)];
    }
  }

  /**
   * Return the most that a key may have of a query if it is not stored: the smallest stored weight, and what the
   * stored ones leave; 0 where a query has fewer keys than are stored.
   */
  rest(query: number): number {
    const chunk = this.chunks[Math.floor(query / this.step)];
    return chunk ? this.restAt(chunk, query % this.step) : 0;
  }

  private restAt(chunk: Chunk, at: number): number {
    let left = 1;
    let last = 0;
    for (const row of this.rows) {
      last = chunk.share(row, at);
      left -= LOW[last] ?? 0;
    }
    return last ? Math.max(0, Math.min(HIGH[last] ?? 0, left)) : 0;
  }

  /** True if a query from `first` on may give more than a weight to a key that is not among its stored ones. */
  mayGiveMore(key: number, weight: number, first: number, length: number): boolean {
    const most = mostLeft(this.rows.length);
    const last = this.rows[this.rows.length - 1] ?? 0;
    if (Math.max(...most) <= weight) return false;
    for (const [chunk, , from, to] of this.parts(first, length)) {
      for (let at = from; at < to; at++) {
        if ((most[chunk.share(last, at)] ?? 0) <= weight || this.restAt(chunk, at) <= weight) continue;
        if (this.rows.every((row) => chunk.key(row, at) !== key)) return true;
      }
    }
    return false;
  }
}

/** Return the top keys of every query of a head, or null if the page does not hold them. */
export async function loadTopKeys(source: Source, report: number, id: HeadId): Promise<TopKeys | null> {
  const layer = source.reports[report]?.scans[id.scan]?.layers[id.layer];
  return (layer && (await loadLayer(source, report, id.scan, id.layer))?.[positionOf(layer, id.head)]) ?? null;
}

/**
 * Return the top keys of each head of a layer, null for a head without. With `queries`, from first to last,
 * only what holds these is inflated.
 */
export async function loadLayer(
  source: Source, report: number, scan: number, index: number, queries?: [first: number, last: number],
): Promise<(TopKeys | null)[]> {
  const record = source.reports[report]?.scans[scan];
  const layer = record?.layers[index];
  if (!record || !layer?.top.some((count) => count > 0)) return [];
  const total = sum(lengths(record, layer.query_text));
  const planes = Math.max(...lengths(record, layer.key_text)) > MANY_TOKENS ? 4 : 2;
  const step = layer.chunk;
  const [first, last] = queries ?? [0, total - 1];
  const chunks: Chunk[] = [];
  const load = async (number: number): Promise<void> => {
    const bytes = await source.bytes(report, `${scan}/top/${index}/${number}`);
    chunks[number] = new Chunk(bytes, Math.min(step, total - number * step), planes);
  };
  const numbers = numbersOfChunks(record, layer).filter((number) => number * step <= last && (number + 1) * step > first);
  await Promise.all(numbers.map(load));
  return rowsOfHeads(layer).map((rows) => (rows.length ? new TopKeys(chunks, step, rows, total) : null));
}

const leftOf = new Map<number, Float32Array>();

/** Return, for each step of the last of some stored weights, the most that a key beside them may have. */
function mostLeft(ranks: number): Float32Array {
  const most = leftOf.get(ranks) ?? LOW.map((low, step) => (step ? Math.max(0, Math.min(HIGH[step] ?? 0, 1 - ranks * low)) : 0));
  leftOf.set(ranks, most);
  return most;
}

/** Return the numbers of the chunks of a layer with top keys. */
export function numbersOfChunks(scan: Scan, layer: Layer): number[] {
  return Array.from({ length: Math.ceil(sum(lengths(scan, layer.query_text)) / layer.chunk) }, (_, number) => number);
}

/** Return the rows of each head in a chunk. */
function rowsOfHeads({ top }: Layer): number[][] {
  const rows: number[][] = top.map(() => []);
  let row = 0;
  for (let rank = 0; rank < Math.max(...top); rank++) {
    top.forEach((count, position) => {
      if (rank < count) rows[position]?.push(row++);
    });
  }
  return rows;
}

const lengths = (scan: Scan, text: number | null): number[] =>
  text === null ? [] : (scan.texts[text]?.lengths ?? []);

const sum = (values: number[]): number => values.reduce((total, value) => total + value, 0);
