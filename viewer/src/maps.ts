/** Maps of heads in blocks of tokens: values, ranges of tokens, differences, thumbnails. */

import type { Layer, Scan } from "./contract";
import { count, range } from "./format";
import type { Source } from "./source";

export interface HeadId {
  scan: number;
  layer: number;
  head: number;
}

export const sameHead = (a: HeadId, b: HeadId): boolean =>
  a.scan === b.scan && a.layer === b.layer && a.head === b.head;

/** A map of rows (blocks of queries) by columns (blocks of keys). */
export interface HeadMap {
  rows: number;
  cols: number;
  /** Tokens of the longest sequence; null where blocks are shares of a text. */
  length: [queries: number, keys: number] | null;
  /** Row by row: weights from 0 to 1, or differences from −1 to 1. */
  values: Float32Array;
  /** Of a difference: how far each of its values may be from the true one. */
  errors?: Float32Array;
}

export const positionOf = (layer: Layer, head: number): number => layer.heads.indexOf(head);

export const headsBefore = (scan: Scan, layer: number): number =>
  scan.layers.slice(0, layer).reduce((sum, each) => sum + each.heads.length, 0);

/** Weights of the 256 stored steps: a byte is the rounded square root. */
export const WEIGHTS = Float32Array.from({ length: 256 }, (_, step) => (step / 255) ** 2);

/** Return the least and the most that a stored weight stands for: half a step of its root. */
export function endsOf(weight: number): [low: number, high: number] {
  const step = Math.round(255 * Math.sqrt(weight));
  return [(Math.max(0, step - 0.5) / 255) ** 2, Math.min(1, ((step + 0.5) / 255) ** 2)];
}

/** Return the map of a head, or null if the scan has none. */
export async function loadMap(source: Source, report: number, id: HeadId): Promise<HeadMap | null> {
  const layer = source.reports[report]?.scans[id.scan]?.layers[id.layer];
  if (!layer?.map) return null;
  const [rows, cols] = layer.map;
  const position = positionOf(layer, id.head);
  if (position < 0 || layer.blank.includes(position)) return null;
  const bytes = await source.bytes(report, `${id.scan}/map/${id.layer}`);
  const size = rows * cols;
  const own = bytes.subarray(position * size, (position + 1) * size);
  if (own.length !== size) return null;
  return { rows, cols, length: layer.map_length, values: Float32Array.from(own, (b) => WEIGHTS[b] ?? 0) };
}

/** One side of a map: tokens in blocks, of which the last may have fewer. */
export class Axis {
  /** Tokens of a block: a power of two; a mean where blocks are shares of the text. */
  readonly size: number;

  constructor(
    readonly blocks: number,
    readonly length: number,
    byShares: boolean,
  ) {
    this.size = byShares ? length / blocks : Math.min(length, 2 ** Math.ceil(Math.log2(length / blocks)));
  }

  /** Return the first and the last token of a block. */
  tokens(block: number): [first: number, last: number] {
    return [Math.ceil(block * this.size), Math.min(this.length, Math.ceil((block + 1) * this.size)) - 1];
  }

  block(token: number): number {
    return Math.min(this.blocks - 1, Math.floor(token / this.size));
  }

  /** True for the last block, if it has fewer tokens than the others. */
  isShort(block: number): boolean {
    return Number.isInteger(this.size) && block === this.blocks - 1 && this.length < this.blocks * this.size;
  }

  /** The number of tokens in a block in words: "128", "128, the last of 7", or "2 to 3". */
  get words(): string {
    const least = Math.floor(this.size);
    const most = Math.ceil(this.size);
    const [first, last] = this.tokens(this.blocks - 1);
    const end = this.isShort(this.blocks - 1) ? `, the last of ${count(last - first + 1)}` : "";
    return least === most || least === 0 ? `${count(most)}${end}` : range(least, most);
  }
}

/** Return B − A over the tokens that both have, or null if the blocks are not the same. */
export function difference(a: HeadMap, b: HeadMap): HeadMap | null {
  const isSame = a.rows === b.rows && a.cols === b.cols && String(a.length) === String(b.length);
  // Half a step up is farther than half a step down.
  const errorOf = (...both: number[]): number => both.reduce((sum, each) => sum + endsOf(each)[1] - each, 0);
  if (isSame) {
    const values = a.values.map((value, at) => (b.values[at] ?? 0) - value);
    return { ...a, values, errors: a.values.map((value, at) => errorOf(value, b.values[at] ?? 0)) };
  }
  if (!a.length || !b.length) return null;
  const [down, across] = [commonBlocks(a.rows, a.length[0], b.rows, b.length[0]), commonBlocks(a.cols, a.length[1], b.cols, b.length[1])];
  if (!down || !across) return null;
  const [rows, cols] = [down.blocks, across.blocks];
  const at = (map: HeadMap, n: number): number => map.values[Math.floor(n / cols) * map.cols + (n % cols)] ?? 0;
  const cells = Array.from({ length: rows * cols }, (_, n) => n);
  const values = Float32Array.from(cells, (n) => at(b, n) - at(a, n));
  return { rows, cols, length: [down.length, across.length], values, errors: Float32Array.from(cells, (n) => errorOf(at(a, n), at(b, n))) };
}

const ends = new WeakMap<HeadMap, number>();

/** Return the largest difference of a map, which ends its scale. */
export function largest(map: HeadMap): number {
  const end = ends.get(map) ?? map.values.reduce((most, value) => Math.max(most, Math.abs(value)), 0.001);
  ends.set(map, end);
  return end;
}

/** Return the whole blocks that two axes have in common, or null if their blocks have other sizes. */
function commonBlocks(blocks: number, length: number, others: number, itsLength: number): Axis | null {
  const [one, two] = [new Axis(blocks, length, false), new Axis(others, itsLength, false)];
  if (one.size !== two.size) return null;
  if (length === itsLength) return one;
  const common = Math.floor(Math.min(length, itsLength) / one.size);
  return common ? new Axis(common, common * one.size, false) : null;
}

// ---- thumbnails ----------------------------------------------------------------------------------

export const THUMB = 16;
const CELLS = THUMB * THUMB;

/** The pooled maps of all heads of a scan, in the order of layers and heads: pictures, no measure. */
export class Thumbnails {
  constructor(
    private readonly scan: Scan,
    private readonly bytes: Uint8Array,
  ) {}

  /** Return 16 x 16 bytes, each a rounded square root of a weight; null without a map. */
  of(layer: number, head: number): Uint8Array | null {
    const record = this.scan.layers[layer];
    if (!record?.map) return null;
    const position = positionOf(record, head);
    if (position < 0 || record.blank.includes(position)) return null;
    const at = (headsBefore(this.scan, layer) + position) * CELLS;
    const own = this.bytes.subarray(at, at + CELLS);
    return own.length === CELLS ? own : null;
  }
}
