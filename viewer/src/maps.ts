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
  /** Row by row: weights from 0 to 1, or differences from −1 to 1. */
  values: Float32Array;
}

export const positionOf = (layer: Layer, head: number): number => layer.heads.indexOf(head);

export const headsBefore = (scan: Scan, layer: number): number =>
  scan.layers.slice(0, layer).reduce((sum, each) => sum + each.heads.length, 0);

/** Weights of the 256 stored steps: a byte is the rounded square root. */
export const WEIGHTS = Float32Array.from({ length: 256 }, (_, step) => (step / 255) ** 2);

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
  return own.length === size ? { rows, cols, values: Float32Array.from(own, (b) => WEIGHTS[b] ?? 0) } : null;
}

/** Return A − B, or null if the blocks are not the same. */
export function difference(a: HeadMap, b: HeadMap): HeadMap | null {
  if (a.rows !== b.rows || a.cols !== b.cols) return null;
  return { ...a, values: a.values.map((value, at) => value - (b.values[at] ?? 0)) };
}

/** Return the first and the last of n tokens in a block: those i with floor(blocks * i / n) = block. */
export function tokensOfBlock(block: number, blocks: number, n: number): [number, number] {
  return [Math.ceil((block * n) / blocks), Math.ceil(((block + 1) * n) / blocks) - 1];
}

export const blockOfToken = (token: number, blocks: number, n: number): number =>
  Math.min(blocks - 1, Math.floor((token * blocks) / n));

/** Return the number of tokens in a block in words: "128", or "2 to 3". */
export function tokensPerBlock(blocks: number, n: number): string {
  const least = Math.floor(n / blocks);
  const most = Math.ceil(n / blocks);
  return least === most || least === 0 ? count(most) : range(least, most);
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
