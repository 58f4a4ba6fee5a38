/** What is chosen on the page, and its form in the address. */

import type { HeadId } from "./maps";

/** "links" and "strongest": what the pinned token looks at in each head, by layer or most first. */
export type Order = "layers" | "maps" | "value" | "links" | "strongest";
/** "both": A and B side by side. */
export type Mode = "A" | "B" | "both" | "diff";
/** "keys": what the pinned token looks at; "queries": the tokens that look at it. */
export type Direction = "keys" | "queries";
/** What the facts are of: the chosen head, or its layer. */
export type Subject = "head" | "layer";
export type Tab = "heads" | "map" | "facts" | "text";

/** The visible part of the map: a factor, and the first column and row as shares of the map. */
export type Zoom = [factor: number, left: number, top: number];

export interface State {
  report: number;
  statistic: string;
  layer: number;
  head: number;
  order: Order;
  filter: string;
  subject: Subject;
  /** The layer that the chosen one is compared with, of the same scan. */
  against: number | null;
  other: HeadId | null;
  mode: Mode;
  sequence: number;
  token: number | null;
  /** The second token of a pair: a key if the first one looks, else a query. */
  second: number | null;
  direction: Direction;
  /** True if special tokens are no answer about a word in all heads. */
  isPlain: boolean;
  zoom: Zoom;
  tab: Tab;
  search: string;
}

/** True if the grid shows one word in all heads. */
export const showsLinks = ({ order }: State): boolean => order === "links" || order === "strongest";

/** True if the grid is a list, which begins with the most. */
export const isList = ({ order }: State): boolean => order === "value" || order === "strongest";

export const WHOLE: Zoom = [1, 0, 0];

const ORDERS: readonly Order[] = ["layers", "maps", "value", "links", "strongest"];
const MODES: readonly Mode[] = ["A", "B", "both", "diff"];
const TABS: readonly Tab[] = ["heads", "map", "facts", "text"];

/** Return the address of a state: what differs from the first view of the report. */
export function toHash(state: State, first: State): string {
  const parts: [string, string][] = [];
  const add = (key: string, value: string, usual: string): void => {
    if (value !== usual) parts.push([key, value]);
  };
  add("r", String(state.report), "0");
  parts.push(["s", state.statistic], ["h", `${state.layer}.${state.head}`]);
  add("v", state.order, first.order);
  add("f", state.filter, "");
  const other = state.other ? `${state.other.scan}.${state.other.layer}.${state.other.head}` : "none";
  add("o", other, first.other ? "" : "none");
  add("m", state.mode, first.mode);
  add("l", state.subject, first.subject);
  if (state.against !== null) parts.push(["k", String(state.against)]);
  add("x", String(state.sequence), "0");
  if (state.token !== null) parts.push(["t", String(state.token)]);
  if (state.second !== null) parts.push(["u", String(state.second)]);
  add("d", state.direction, "keys");
  add("w", state.isPlain ? "1" : "", "");
  add("z", state.zoom.map((value) => Number(value.toFixed(4))).join(","), WHOLE.join(","));
  add("p", state.tab, first.tab);
  add("q", state.search, "");
  return `#${parts.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&")}`;
}

/** Return the parts of a state that an address names; what cannot be read is left out. */
export function fromHash(hash: string): Partial<State> {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const state: Partial<State> = {};
  const whole = (key: string): number | undefined => {
    const text = given.get(key);
    return text !== null && /^\d{1,9}$/.test(text) ? Number(text) : undefined;
  };
  const choice = <T extends string>(key: string, choices: readonly T[]): T | undefined =>
    choices.find((each) => each === given.get(key));
  const set = <K extends keyof State>(key: K, value: State[K] | undefined): void => {
    if (value !== undefined) state[key] = value;
  };
  set("report", whole("r"));
  set("statistic", given.get("s") ?? undefined);
  const head = /^(\d+)\.(\d+)$/.exec(given.get("h") ?? "");
  if (head) {
    set("layer", Number(head[1]));
    set("head", Number(head[2]));
  }
  set("order", choice("v", ORDERS));
  set("filter", given.get("f") ?? undefined);
  const other = /^([01])\.(\d+)\.(\d+)$/.exec(given.get("o") ?? "");
  if (given.get("o") === "none") set("other", null);
  if (other) set("other", { scan: Number(other[1]), layer: Number(other[2]), head: Number(other[3]) });
  set("mode", choice("m", MODES));
  set("subject", choice("l", ["head", "layer"] as const));
  set("against", whole("k"));
  set("sequence", whole("x"));
  set("token", given.get("t") === "none" ? null : whole("t"));
  set("second", whole("u"));
  set("direction", choice("d", ["keys", "queries"] as const));
  set("isPlain", given.get("w") === "1" || undefined);
  const zoom = (given.get("z") ?? "").split(",").map(Number);
  if (zoom.length === 3 && zoom.every((value) => Number.isFinite(value) && value >= 0)) {
    set("zoom", zoom as unknown as Zoom);
  }
  set("tab", choice("p", TABS));
  set("search", given.get("q") ?? undefined);
  return state;
}
