/** The data of a page, as `headwise.reports` writes it. Indices count from 0. */

export type Kind = "weight" | "share" | "range";

export interface TextStream {
  name: string;
  lengths: number[];
  names: string[];
}

export interface Layer {
  name: string;
  kind: "self" | "cross";
  num_heads: number;
  heads: number[];
  query_text: number | null;
  key_text: number | null;
  map: [rows: number, cols: number] | null;
  /** Tokens of the longest sequence of the map; null where its blocks are shares of a text. */
  map_length: [queries: number, keys: number] | null;
  blank: number[];
  /** For each of `heads`: how many keys of every query are stored. */
  top: number[];
  /** Queries of a blob of top keys. */
  chunk: number;
  /** What the distances of its heads are, and on how many queries; or why there are none. */
  similar: string;
}

export interface Statistic {
  name: string;
  label: string;
  heading: string;
  unit: string;
  formula: string;
  excluded: string;
  source: string;
  kind: Kind;
  low: number;
  high: number;
  /** The least end of the scale of B − A. */
  least_change: number | null;
  first: boolean;
  /** True of the total change from A to B, which A alone has. */
  is_change: boolean;
  rows: (number | null)[][];
}

export interface Standout {
  layer: number;
  head: number;
  statistic: string;
  sentence: string;
  /** The value of the middle head, in words. */
  middle: string;
}

/** A head of the first scan that changed, and how: the second half of a sentence. */
export interface Change {
  layer: number;
  head: number;
  statistic: string;
  sentence: string;
}

export interface Scan {
  name: string;
  model: string;
  sequences: number;
  tokens: number;
  texts: TextStream[];
  layers: Layer[];
  ranks: number;
  reach: number | null;
  received: boolean;
  statistics: Statistic[];
  standouts: Standout[];
}

export interface Meta {
  version: 1;
  headwise: string;
  title: string;
  about: string;
  read: string;
  chosen: string;
  /** Whether headwise's layers are the model's own, in a sentence; "" if not measured. */
  same: string;
  notes: string[];
  missing: string[];
  rule: string;
  command: string | null;
  /** The file of each scan, as Python loads it. */
  files: string[];
  /** A, the one before, and B, the one after, if there are two. */
  scans: Scan[];
  /** The strongest link that is not trivial: what the token of this head looks at. */
  opening: { layer: number; head: number; token: number } | null;
  /** For each layer and head of the first scan its partner in the second; null if paired by number. */
  matched: number[][] | null;
  changes: Change[];
  /** How many heads changed by how much, of two scans. */
  headline: string;
}

/** A page holds one report, or several to choose from. */
export type PageMeta = Meta | { reports: Meta[] };

/**
 * The words of a text stream; `ids` index `words`, and are none where tokens are unknown. `written` has
 * each sequence as it was written, where that is known, with two numbers for each token in units of
 * UTF-16: how far it begins after the last character before it, and how long it is.
 */
export interface Words {
  words: string[];
  ids: number[];
  written?: ({ text: string; spans: number[] } | null)[];
}

/** For each layer and head: the keys that receive most, as [key, word, weight]. */
export type Received = [key: number, word: string, weight: number][][][];
