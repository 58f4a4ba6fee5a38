/** A token in every head: what it looks at, what looks at it, or the weight of a pair of tokens. */

import type { Layer, Scan } from "./contract";
import { WEIGHTS } from "./maps";
import type { Source } from "./source";
import type { Direction } from "./state";
import { type TopKeys, loadLayer, numbersOfChunks } from "./top_keys";

const MOST_CELLS = 2 ** 26; // of all maps together, up to which they are read
const MOST_KEPT = 8; // answers: of some pinned words in both directions
const SLICE_MS = 40; // of work before other work may run

/** The tokens that are asked for; `other` is the second of a pair. */
export interface Asked {
  /** The text that the token belongs to, and the sequence of it. */
  text: number;
  sequence: number;
  token: number;
  other: number | null;
  direction: Direction;
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
  weight: number;
  bound: "exact" | "at least" | "at most";
}

type Answer = Omit<Link, "layer" | "head">;

const found = new WeakMap<Source, Map<string, Promise<Link[] | null>>>();

/** Return the link of each head that has one, in the order of layers and heads; null if the scan holds none. */
export function linksOf(source: Source, report: number, scan: number, asked: Asked): Promise<Link[] | null> {
  const kept = found.get(source) ?? new Map<string, Promise<Link[] | null>>();
  found.set(source, kept);
  const key = JSON.stringify([report, scan, asked.text, asked.sequence, asked.token, asked.other, asked.direction]);
  const links = kept.get(key) ?? findLinks(source, report, scan, asked);
  kept.delete(key);
  kept.set(key, links);
  for (const oldest of kept.keys()) if (kept.size > MOST_KEPT) kept.delete(oldest);
  return links;
}

async function findLinks(source: Source, report: number, scan: number, asked: Asked): Promise<Link[] | null> {
  const record = source.reports[report]?.scans[scan];
  const links: Link[] = [];
  let isKnown = false;
  let since = performance.now();
  if (!record) return null;
  const answer = (index: number): ReturnType<typeof answersOf> => answersOf(source, report, scan, index, record, asked);
  // A query is in one blob of each layer, and all are inflated at once; the queries of a key are in all blobs.
  const isQuery = asked.direction === "keys" || asked.other !== null;
  const ahead = isQuery ? record.layers.map((_, index) => answer(index)) : null;
  for (const [index, layer] of record.layers.entries()) {
    const answers = await (ahead?.[index] ?? answer(index));
    if (!answers) continue;
    isKnown = true;
    answers.forEach((answer, position) => {
      if (answer) links.push({ layer: index, head: layer.heads[position] ?? 0, ...answer });
    });
    if (performance.now() - since < SLICE_MS) continue;
    await new Promise((resume) => setTimeout(resume));
    since = performance.now();
  }
  return isKnown ? links : null;
}

/** Return the answer of each head of a layer; null where it reads another text, or where nothing is stored. */
async function answersOf(
  source: Source, report: number, scan: number, index: number, record: Scan, asked: Asked,
): Promise<(Answer | null)[] | null> {
  const { direction, sequence, token, other } = asked;
  const layer = record.layers[index];
  if (!layer) return null;
  if ((direction === "keys" ? layer.query_text : layer.key_text) !== asked.text) return null;
  const [queries, keys] = [layer.query_text, layer.key_text].map((text) => (text === null ? [] : (record.texts[text]?.lengths ?? [])));
  const [length, others] = [queries?.[sequence] ?? 0, keys?.[sequence] ?? 0];
  const isThere = direction === "keys" ? token < length && (other ?? 0) < others : token < others && (other ?? 0) < length;
  if (!isThere) return null;
  const isFirst = direction === "keys" && other === null;
  const hasTop = layer.top.some((count) => count > 0);
  if (hasSingleTokens(record, layer) && !(isFirst && hasTop)) {
    const bytes = await source.bytes(report, `${scan}/map/${index}`);
    return layer.heads.map((_, position) =>
      layer.blank.includes(position) ? null : fromMap(bytes.subarray(position * length * others), length, others, asked));
  }
  if (!hasTop) return null;
  const before = (queries ?? []).slice(0, sequence).reduce((sum, each) => sum + each, 0);
  const [query, key] = direction === "keys" ? [token, other] : [other, token];
  const range: [number, number] = query === null ? [before, before + length - 1] : [before + query, before + query];
  const heads = await loadLayer(source, report, scan, index, range);
  return heads.map((top) => {
    if (!top) return null;
    if (query === null) return mostGiven(top, key ?? 0, before, length);
    return key === null ? firstKey(top, range[0]) : pair(top, range[0], key, other ?? 0);
  });
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

function fromMap(bytes: Uint8Array, queries: number, keys: number, { direction, token, other }: Asked): Answer | null {
  const isRow = direction === "keys";
  const at = (each: number): number => bytes[isRow ? token * keys + each : each * keys + token] ?? 0;
  let best = other ?? 0;
  for (let each = 0; other === null && each < (isRow ? keys : queries); each++) if (at(each) > at(best)) best = each;
  const weight = WEIGHTS[at(best)] ?? 0;
  return weight === 0 && other === null ? null : { other: best, weight, bound: "exact" };
}

function firstKey(top: TopKeys, query: number): Answer | null {
  const [first] = top.keysOf(query);
  return first ? { other: first[0], weight: first[1], bound: "exact" } : null;
}

function pair(top: TopKeys, query: number, key: number, other: number): Answer {
  const stored = top.keysOf(query).find(([each]) => each === key);
  if (stored) return { other, weight: stored[1], bound: "exact" };
  const weight = top.rest(query);
  return { other, weight, bound: weight > 0 ? "at most" : "exact" };
}

function mostGiven(top: TopKeys, key: number, first: number, length: number): Answer | null {
  const most = top.mostOf(key, first, length);
  if (!most) return null;
  const isLess = top.mayGiveMore(key, most[1], first, length);
  return { other: most[0], weight: most[1], bound: isLess ? "at least" : "exact" };
}
