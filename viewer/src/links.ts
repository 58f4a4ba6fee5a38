/** A token in every head: what it looks at, what looks at it, or the weight of a pair of tokens. */

import type { Layer, Scan } from "./contract";
import { type HeadId, WEIGHTS, positionOf } from "./maps";
import type { Source } from "./source";
import type { Direction } from "./state";
import { type Lit, type TopKeys, loadLayer, numbersOfChunks } from "./top_keys";
import { LEAST } from "./view";

const MOST_CELLS = 2 ** 26; // of all maps together, up to which they are read
const MOST_KEPT = 8; // answers: of some pinned words in both directions
const SLICE_MS = 40; // of work before other work may run
const RISE_FIRST = 0.9; // of a fall, from which a rise is named instead

/** The tokens that are asked for; `other` is the second of a pair. */
export interface Asked {
  /** The text that the token belongs to, and the sequence of it. */
  text: number;
  sequence: number;
  token: number;
  other: number | null;
  direction: Direction;
  /** True if special tokens are no answer. */
  isPlain: boolean;
}

/**
 * The link of a head. "at most": the pair is not among the stored keys. "at least": another query, of
 * which not all keys are stored, may give more to the key.
 */
export interface Link {
  layer: number;
  head: number;
  /** The token that was found, or the second of the pair. */
  other: number;
  /** Of a change from A to B: what it is more or less. */
  weight: number;
  bound: "exact" | "at least" | "at most";
  /** True if the token is one of many that have the same weight: none of them stands out. */
  isEven?: boolean;
  /** Of a change: the token that lost most and the one that gained most, where they reach 1 %. */
  moved?: { lost: Lit | null; gained: Lit | null };
}

type Answer = Omit<Link, "layer" | "head">;
/** True of the tokens of a text that may be answers. */
export type IsWord = (text: number, token: number) => boolean;

const found = new WeakMap<Source, Map<string, Promise<Link[] | null>>>();

/** Return the link of each head that has one, in the order of layers and heads; null if the scan holds none. */
export function linksOf(source: Source, report: number, scan: number, asked: Asked, isWord: IsWord): Promise<Link[] | null> {
  return kept(source, [report, scan, asked], async () => listLinks(await answersOf(source, report, scan, asked, isWord, ANSWER), source.reports[report]?.scans[scan]));
}

/**
 * Return what changed from the first scan to the second, for each head of the first: the weight of a pair, or
 * the token whose weight changed most. Of tokens that one side does not store, the least change is known.
 */
export function movesOf(
  source: Source, report: number, asked: Asked, isWord: IsWord, partner: (head: { layer: number; head: number }) => HeadId | null,
): Promise<Link[] | null> {
  return kept(source, [report, "moves", asked], async () => {
    const [a, b] = await Promise.all([0, 1].map((scan) => answersOf(source, report, scan, asked, isWord, KNOWN)));
    const [before, after] = source.reports[report]?.scans ?? [];
    if (!a || !b || !before || !after) return null;
    const moved = a.map((heads, layer) => heads?.map((known, position) => {
      const other = partner({ layer, head: before.layers[layer]?.heads[position] ?? 0 });
      const record = after.layers[other?.layer ?? -1];
      const there = other && record ? b[other.layer]?.[positionOf(record, other.head)] : null;
      return known && there ? move(known, there, asked.other) : null;
    }) ?? null);
    return listLinks(moved, before);
  });
}

function kept(source: Source, what: unknown, find: () => Promise<Link[] | null>): Promise<Link[] | null> {
  const answers = found.get(source) ?? new Map<string, Promise<Link[] | null>>();
  found.set(source, answers);
  const key = JSON.stringify(what);
  const links = answers.get(key) ?? find();
  answers.delete(key);
  answers.set(key, links);
  for (const oldest of answers.keys()) if (answers.size > MOST_KEPT) answers.delete(oldest);
  return links;
}

function listLinks(answers: ((Answer | null)[] | null)[] | null, record: Scan | undefined): Link[] | null {
  if (!record || !answers?.some(Boolean)) return null;
  return answers.flatMap((heads, layer) =>
    (heads ?? []).flatMap((answer, position) => (answer ? [{ layer, head: record.layers[layer]?.heads[position] ?? 0, ...answer }] : [])));
}

/** How an answer is read: from the map of a head, or from its stored keys. */
interface Reading<T> {
  /** True if the first stored key is not enough. */
  needsAll: boolean;
  ofMap: (bytes: Uint8Array, queries: number, keys: number, asked: Asked, isWord: (token: number) => boolean) => T | null;
  ofTop: (top: TopKeys, before: number, length: number, asked: Asked, isWord: (token: number) => boolean) => T | null;
}

/** Return what is read of each head of each layer; null for a layer that reads another text, or of which nothing is stored. */
async function answersOf<T>(
  source: Source, report: number, scan: number, asked: Asked, isWord: IsWord, reading: Reading<T>,
): Promise<((T | null)[] | null)[] | null> {
  const record = source.reports[report]?.scans[scan];
  if (!record) return null;
  let since = performance.now();
  const answer = (index: number): Promise<(T | null)[] | null> => readLayer(source, report, scan, index, record, asked, isWord, reading);
  // A query is in one blob of each layer, and all are inflated at once; the queries of a key are in all blobs.
  const isQuery = asked.direction === "keys" || asked.other !== null;
  const ahead = isQuery ? record.layers.map((_, index) => answer(index)) : null;
  const answers: ((T | null)[] | null)[] = [];
  for (const index of record.layers.keys()) {
    answers.push(await (ahead?.[index] ?? answer(index)));
    if (performance.now() - since < SLICE_MS) continue;
    await new Promise((resume) => setTimeout(resume));
    since = performance.now();
  }
  return answers;
}

async function readLayer<T>(
  source: Source, report: number, scan: number, index: number, record: Scan, asked: Asked, isAnswer: IsWord, { needsAll, ofMap, ofTop }: Reading<T>,
): Promise<(T | null)[] | null> {
  const { direction, sequence, token, other } = asked;
  const layer = record.layers[index];
  if (!layer) return null;
  if ((direction === "keys" ? layer.query_text : layer.key_text) !== asked.text) return null;
  const [queries, keys] = [layer.query_text, layer.key_text].map((text) => (text === null ? [] : (record.texts[text]?.lengths ?? [])));
  const [length, others] = [queries?.[sequence] ?? 0, keys?.[sequence] ?? 0];
  const isThere = direction === "keys" ? token < length && (other ?? 0) < others : token < others && (other ?? 0) < length;
  if (!isThere) return null;
  const answering = (direction === "keys" ? layer.key_text : layer.query_text) ?? 0;
  const isWord = (each: number): boolean => !asked.isPlain || isAnswer(answering, each);
  const isFirst = direction === "keys" && other === null && !needsAll && !asked.isPlain;
  const hasTop = layer.top.some((count) => count > 0);
  if (hasSingleTokens(record, layer) && !(isFirst && hasTop)) {
    const bytes = await source.bytes(report, `${scan}/map/${index}`);
    return layer.heads.map((_, position) =>
      layer.blank.includes(position) ? null : ofMap(bytes.subarray(position * length * others), length, others, asked, isWord));
  }
  if (!hasTop) return null;
  const before = (queries ?? []).slice(0, sequence).reduce((sum, each) => sum + each, 0);
  const query = direction === "keys" ? token : other;
  const range: [number, number] = query === null ? [before, before + length - 1] : [before + query, before + query];
  const heads = await loadLayer(source, report, scan, index, range);
  return heads.map((top) => top && ofTop(top, before, length, asked, isWord));
}

/** Return the names of the blobs that hold the answers of a scan, in parts of which each is quickly inflated. */
export function blobsOfLinks(record: Scan, scan: number): string[] {
  return record.layers.flatMap((layer, index) => {
    const chunks = layer.top.some((count) => count > 0) ? numbersOfChunks(record, layer) : [];
    const maps = hasSingleTokens(record, layer) ? [`${scan}/map/${index}`] : [];
    return [...chunks.map((number) => `${scan}/top/${index}/${number}`), ...maps];
  });
}

/** True if maps hold the weights of single tokens, and are small enough to be read. */
function hasSingleTokens(scan: Scan, layer: Layer): boolean {
  const lengthOf = (text: number | null): number | undefined => (text === null ? undefined : scan.texts[text]?.lengths[0]);
  const isSingle = layer.map?.[0] === lengthOf(layer.query_text) && layer.map?.[1] === lengthOf(layer.key_text);
  const cells = scan.layers.reduce((sum, { map, heads }) => sum + (map ? map[0] * map[1] * heads.length : 0), 0);
  return isSingle && scan.sequences === 1 && cells <= MOST_CELLS;
}

// ---- one scan ------------------------------------------------------------------------------------

const ANSWER: Reading<Answer> = {
  needsAll: false,
  ofMap: (bytes, queries, keys, asked, isWord) => {
    const { other } = asked;
    const at = stepsOf(bytes, keys, asked);
    if (other !== null) return { other, weight: WEIGHTS[at(other)] ?? 0, bound: "exact" };
    const tokens = Array.from({ length: asked.direction === "keys" ? keys : queries }, (_, each) => each).filter(isWord);
    const best = tokens.reduce((most, each) => (at(each) > at(most) ? each : most), tokens[0] ?? 0);
    const weight = tokens.length ? (WEIGHTS[at(best)] ?? 0) : 0;
    return weight ? { other: best, weight, bound: "exact", ...even(tokens.map(at), fewestOf(asked.direction)) } : null;
  },
  ofTop: (top, before, length, { direction, token, other }, isWord) => {
    const [query, key] = direction === "keys" ? [token, other] : [other, token];
    if (query === null) return mostGiven(top, key ?? 0, before, length, isWord);
    return key === null ? firstKey(top, before + query, isWord) : pair(top, before + query, key, other ?? 0);
  },
};

/** Return the stored step of the weight between the asked token and each other one. */
const stepsOf = (bytes: Uint8Array, keys: number, { direction, token }: Asked) =>
  (each: number): number => bytes[direction === "keys" ? token * keys + each : each * keys + token] ?? 0;

/** Keys of a query are even from two on; of a key, two queries may each give it all that they have. */
export const fewestOf = (direction: Direction): number => (direction === "keys" ? 2 : 4);

/** True if most of the weights that are not 0 are the largest one, as they are stored. */
export function areEven(weights: number[], fewest = 2): boolean {
  const most = weights.reduce((largest, each) => Math.max(largest, each), 0);
  const equal = weights.filter((each) => each > 0 && each === most).length;
  return equal >= fewest && 2 * equal > weights.filter((each) => each > 0).length;
}

const even = (weights: number[], fewest = 2): { isEven?: boolean } => (areEven(weights, fewest) ? { isEven: true } : {});

function firstKey(top: TopKeys, query: number, isWord: (token: number) => boolean): Answer | null {
  const stored = top.keysOf(query).filter(([key]) => isWord(key));
  const [first] = stored;
  return first ? { other: first[0], weight: first[1], bound: "exact", ...even(stored.map(([, weight]) => weight)) } : null;
}

function pair(top: TopKeys, query: number, key: number, other: number): Answer {
  const stored = top.keysOf(query).find(([each]) => each === key);
  if (stored) return { other, weight: stored[1], bound: "exact" };
  const weight = top.rest(query);
  return { other, weight, bound: weight > 0 ? "at most" : "exact" };
}

function mostGiven(top: TopKeys, key: number, first: number, length: number, isWord: (token: number) => boolean): Answer | null {
  const most = top.mostOf(key, first, length, isWord);
  if (!most) return null;
  const isLess = top.mayGiveMore(key, most[1], first, length);
  return { other: most[0], weight: most[1], bound: isLess ? "at least" : "exact" };
}

// ---- from the first scan to the second -------------------------------------------------------------

/** The weights of a token in a head, and the most that another may have. */
interface Known {
  weights: Map<number, number>;
  rest: (token: number) => number;
}

const KNOWN: Reading<Known> = {
  needsAll: true,
  ofMap: (bytes, queries, keys, asked, isWord) => {
    const at = stepsOf(bytes, keys, asked);
    const weights = new Map<number, number>();
    for (let each = 0; each < (asked.direction === "keys" ? keys : queries); each++) {
      if (at(each) && isWord(each)) weights.set(each, WEIGHTS[at(each)] ?? 0);
    }
    return { weights, rest: () => 0 };
  },
  ofTop: (top, before, length, { direction, token, other }, isWord) => {
    const lit = direction === "keys" ? top.keysOf(before + token)
      : other === null ? top.queriesOf(token, before, length)
      : top.keysOf(before + other).flatMap(([key, weight]): Lit[] => (key === token ? [[other, weight]] : []));
    const rest = (each: number): number => top.rest(before + (direction === "keys" ? token : each));
    return { weights: new Map(lit.filter(([each]) => isWord(each))), rest };
  },
};

/** Return how a weight changed, and if one side does not store it, the least that it did. */
function changeOf(a: Known, b: Known, token: number): [change: number, isExact: boolean] {
  const [from, to] = [a, b].map(({ weights }) => weights.get(token));
  if (from !== undefined && to !== undefined) return [to - from, true];
  const [low, high] = [a, b].map(({ rest }) => rest(token)) as [number, number];
  if (from === undefined && to === undefined) return [0, low + high === 0];
  return to === undefined ? [Math.min(0, high - (from ?? 0)), high === 0] : [Math.max(0, to - low), low === 0];
}

function move(a: Known, b: Known, other: number | null): Answer | null {
  if (other !== null) {
    const [weight, isExact] = changeOf(a, b, other);
    const most = Math.max(a.rest(other), b.rest(other));
    return isExact || weight ? { other, weight, bound: isExact ? "exact" : "at least" } : { other, weight: most, bound: "at most" };
  }
  let [lost, gained]: [Lit, Lit] = [[-1, 0], [-1, 0]];
  let areExact = true;
  for (const token of new Set([...a.weights.keys(), ...b.weights.keys()])) {
    const [change, isExact] = changeOf(a, b, token);
    areExact &&= isExact;
    if (change < lost[1]) lost = [token, change];
    if (change > gained[1]) gained = [token, change];
  }
  const isEven = areExact && areEven([...b.weights.values()], fewestOf("queries"));
  // A rise is named before a fall that is about as large; of tokens that are even now none is named.
  const [token, weight] = lost[0] < 0 || (!isEven && gained[1] >= RISE_FIRST * -lost[1]) ? gained : lost;
  if (token < 0) return areExact ? { other: 0, weight: 0, bound: "exact", moved: { lost: null, gained: null } } : null;
  const named = (each: Lit): Lit | null => (Math.abs(each[1]) >= LEAST ? each : null);
  return { other: token, weight, bound: areExact ? "exact" : "at least", moved: { lost: named(lost), gained: isEven ? null : named(gained) }, ...(isEven ? { isEven } : {}) };
}
