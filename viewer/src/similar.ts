/** How far the weights of two heads are from each other, as the scan measured it. */

import type { Scan } from "./contract";
import { headsBefore, positionOf } from "./maps";

const NONE = 65535; // the step of a pair without a distance; one less is a distance of 1
const MOST = 5; // heads that are named as most similar

export interface Similar {
  layer: number;
  head: number;
  /** The share of the weight that lies on other keys, from 0 to 1. */
  distance: number;
}

export class Distances {
  private readonly known = new Map<string, Similar[]>();

  /** `bytes` has two for each pair: a row for each head with those before it. */
  constructor(
    private readonly scan: Scan,
    private readonly bytes: Uint8Array,
  ) {}

  /** Return the heads with the least distance, the nearest first. */
  mostSimilar(layer: number, head: number): Similar[] {
    const name = `${layer}.${head}`;
    const similar = this.known.get(name) ?? this.all(layer, head).slice(0, MOST);
    this.known.set(name, similar);
    return similar;
  }

  private all(layer: number, head: number): Similar[] {
    const { scan } = this;
    const record = scan.layers[layer];
    const own = record && this.bytes.length ? headsBefore(scan, layer) + positionOf(record, head) : -1;
    const all: Similar[] = [];
    let place = 0;
    scan.layers.forEach((each, index) => {
      for (const other of each.heads) {
        const distance = own < 0 || place === own ? null : this.at(Math.max(own, place), Math.min(own, place));
        if (distance !== null) all.push({ layer: index, head: other, distance });
        place += 1;
      }
    });
    return all.sort((a, b) => a.distance - b.distance);
  }

  private at(row: number, column: number): number | null {
    const at = 2 * ((row * (row - 1)) / 2 + column);
    const step = (this.bytes[at] ?? 255) + 256 * (this.bytes[at + 1] ?? 255);
    return step === NONE ? null : step / (NONE - 1);
  }
}
