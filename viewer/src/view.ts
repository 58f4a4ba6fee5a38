/** What the parts of the page read: what is chosen, the data of it, and the lit tokens. */

import type { Received, Scan } from "./contract";
import type { Light } from "./light";
import type { HeadId, HeadMap, Thumbnails } from "./maps";
import type { Distances } from "./similar";
import type { Source } from "./source";
import type { Direction, State } from "./state";
import type { Text } from "./text";
import type { TopKeys } from "./top_keys";

/** Lit tokens from first to last, with a weight: of one token, or of a block of tokens. */
export interface Entry {
  first: number;
  last: number;
  weight: number;
  /** Of B − A: how far it may be from the true one. */
  error?: number;
}

/** The least weight that is marked: what is smaller has no tint, ring or line. */
export const LEAST = 0.01;

export interface Lights {
  /** The token that looks, or is looked at; null if none is pinned or under the pointer. */
  token: number | null;
  what: Direction;
  /** The largest first; of B − A, whatever their signs. */
  entries: Entry[];
  /**
   * "row": the largest weights, from the kernel; "map": all weights, from a map of single tokens;
   * "top": the stored largest; "block": blocks of tokens.
   */
  exact: "row" | "map" | "top" | "block" | "none";
  /** The weight that ends the scale of colours: 1, or of B − A the largest of the map. */
  end: number;
}

export const DARK: Lights = { token: null, what: "keys", entries: [], exact: "none", end: 1 };

/** Return the entries that are marked. */
export const marked = (entries: Entry[]): Entry[] => entries.filter(({ weight }) => Math.abs(weight) >= LEAST);

/** What is shown of the chosen head; null where the scan does not have it. */
export interface Loaded {
  a: HeadMap | null;
  b: HeadMap | null;
  /** A, B or B − A, as the mode says; A where both stand side by side. */
  map: HeadMap | null;
  top: TopKeys | null;
  queries: Text | null;
  keys: Text | null;
  received: Received;
  profiles: Float32Array;
  thumbnails: Thumbnails;
  /** Those of the second scan, if there is one. */
  others: Thumbnails | null;
  distances: Distances;
}

export interface Part {
  /** Draw the state; `loaded` is null while the data of another head is on its way. */
  update(loaded: Loaded | null): void;
}

/** The chosen head of the page with its data, as the light reads it. */
export interface View {
  readonly state: State;
  readonly loaded: Loaded | null;
  readonly hovered: { token: number; direction: Direction } | null;
  readonly source: Source;
  readonly scan: Scan;
  readonly shown: HeadId;
  readonly onLight: (lights: Lights) => void;
}

/** A view with its lit tokens. */
export interface Seen extends View {
  readonly light: Light;
}
