/** The tokens that are lit: what a token looks at, or what looks at it, and how exactly. */

import { count, percent } from "./format";
import { Axis, largest } from "./maps";
import type { ExactRow } from "./source";
import type { Direction } from "./state";
import { DARK, type Entry, LEAST, type Lights, type View, marked } from "./view";

export class Light {
  lights: Lights = DARK;
  badge = "";
  private readonly rows = new Map<string, ExactRow | "waiting" | { refused: string }>();

  constructor(private readonly app: View) {}

  update(): void {
    const { app } = this;
    const token = app.hovered?.token ?? app.state.token;
    const what = app.hovered?.direction ?? app.state.direction;
    this.lights = token === null ? { ...DARK, what } : this.of(token, what);
    this.badge = this.words();
    app.onLight(this.lights);
  }

  private of(token: number, what: Direction): Lights {
    const { app } = this;
    const text = what === "keys" ? app.loaded?.queries : app.loaded?.keys;
    if (app.loaded && text && token >= text.lengthOf(app.state.sequence)) return { ...DARK, what };
    const row = what === "keys" ? this.exactRow(token) : null;
    if (row) return { token, what, entries: row, exact: "row", end: 1 };
    const fromMap = this.fromMap(token, what);
    if (fromMap?.exact === "map") return fromMap;
    return this.fromTopKeys(token, what) ?? fromMap ?? { ...DARK, token, what };
  }

  /** True if a cell of the map is the weight between two tokens. */
  get hasSingleTokens(): boolean {
    return this.app.scan.sequences === 1 && (this.axes()?.every(({ size }) => size === 1) ?? false);
  }

  /** The value that ends the scale of colours: 1, or of B − A the largest of the map. */
  get end(): number {
    const { loaded, state } = this.app;
    return state.mode === "diff" && loaded?.map ? largest(loaded.map) : 1;
  }

  private fromTopKeys(token: number, what: Direction): Lights | null {
    const { loaded, state } = this.app;
    if (!loaded?.top || !loaded.queries || state.mode === "diff") return null;
    const first = loaded.queries.first[state.sequence] ?? 0;
    const lit =
      what === "keys"
        ? loaded.top.keysOf(first + token)
        : loaded.top.queriesOf(token, first, loaded.queries.lengthOf(state.sequence));
    const entries = lit.map(([at, weight]) => ({ first: at, last: at, weight }));
    return { token, what, entries, exact: "top", end: 1 };
  }

  private fromMap(token: number, what: Direction): Lights | null {
    const { loaded } = this.app;
    const map = loaded?.map;
    const axes = this.axes();
    if (!map || !axes) return null;
    const isRow = what === "keys";
    const [own, others] = isRow ? axes : [axes[1], axes[0]];
    if (token >= own.length) return null;
    const block = own.block(token);
    const entries: Entry[] = [];
    for (let other = 0; other < others.blocks; other++) {
      const at = isRow ? block * map.cols + other : other * map.cols + block;
      const [weight, error] = [map.values[at] ?? 0, map.errors?.[at]];
      const [first, last] = others.tokens(other);
      if (weight !== 0 && last >= first) entries.push({ first, last, weight, ...(error === undefined ? {} : { error }) });
    }
    entries.sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
    return { token, what, entries, exact: this.hasSingleTokens ? "map" : "block", end: this.end };
  }

  /** Return every weight of a query if the kernel has sent it, and ask for it if not. */
  private exactRow(token: number): Entry[] | null {
    const { app } = this;
    const ask = app.source.exactRow;
    if (!ask || app.state.mode === "diff") return null;
    const { scan, layer, head } = app.shown;
    const key = this.keyOfRow(token);
    const known = this.rows.get(key);
    if (typeof known === "object" && "keys" in known) {
      return known.keys.map((at, n) => ({ first: at, last: at, weight: known.weights[n] ?? 0 }));
    }
    // Rows of hovered tokens would be asked for faster than they can be computed.
    if (known === undefined && token === app.state.token) {
      this.rows.set(key, "waiting");
      ask(scan, layer, head, app.state.sequence, token).then(
        (row) => {
          this.rows.set(key, row);
          this.update();
        },
        (why: Error) => {
          this.rows.set(key, { refused: why.message });
          this.update();
        },
      );
    }
    return null;
  }

  private keyOfRow(token: number): string {
    const { scan, layer, head } = this.app.shown;
    return [this.app.state.report, scan, layer, head, this.app.state.sequence, token].join();
  }

  /** The queries and the keys of the map in their blocks, or null without a map. */
  axes(): [queries: Axis, keys: Axis] | null {
    const { loaded, state, scan } = this.app;
    const map = loaded?.map;
    if (!map) return null;
    const [queries, keys] = map.length ?? [];
    const mean = scan.sequences ? Math.round(scan.tokens / scan.sequences) : 0;
    return [
      new Axis(map.rows, queries ?? loaded.queries?.lengthOf(state.sequence) ?? mean, queries === undefined),
      new Axis(map.cols, keys ?? loaded.keys?.lengthOf(state.sequence) ?? mean, keys === undefined),
    ];
  }

  /** Return what one cell of the map is, in words: "blocks of 128 tokens". */
  resolution(): string {
    const axes = this.axes();
    if (!axes) return "no map of this head";
    const { scan, state, loaded } = this.app;
    const mean = scan.sequences > 1 ? `, mean of ${scan.sequences} sequences` : "";
    const isPart = state.mode === "diff" && String(loaded?.a?.length) !== String(loaded?.b?.length);
    const part = isPart ? `, of the first ${count(axes[0].length)} tokens of both` : "";
    if (axes.every(({ size }) => size === 1)) return `one token a cell${mean}${part}`;
    const [down, across] = axes.map(({ words }) => words);
    const size = down === across ? `${down?.replace(/(?=,|$)/, " tokens")}` : `${down} queries by ${across} keys`;
    return `blocks of ${size}${mean}${part}`;
  }

  private words(): string {
    const { lights } = this;
    const map = `Map: ${this.resolution()}.`;
    if (lights.token === null || lights.exact === "none") return map;
    return `${map} Token: ${this.answer}.`;
  }

  /** How exact the answer about the token is, and how much of all weight it shows. */
  get answer(): string {
    return this.lights.exact === "block" ? `its block, since ${this.reason()}` : this.extent();
  }

  /** Return how much of all weight is shown, in words: "its 6 largest weights, 93 % of all". */
  private extent(): string {
    const { exact, what, entries } = this.lights;
    const ranks = this.app.loaded?.top?.ranks ?? 0;
    if (exact === "top" && what === "queries") return `the queries that have it ${ranks > 1 ? `among their top ${ranks}` : "as their first key"}`;
    const shown = exact === "top" ? entries : marked(entries);
    const part = total(shown);
    if (exact === "top" && ranks === 1) return `its first key, ${percent(part)} of all`;
    if (exact === "top") return `${inWords(shown.length)} among its top ${ranks}, ${percent(part)} of all`;
    const isDifference = this.app.state.mode === "diff";
    const name = isDifference ? "change" : "weight";
    if (!shown.length) return `none of its ${name}s reaches ${100 * LEAST} %`;
    const all = exact === "row" ? 1 : total(entries);
    const whole = isDifference ? "all change" : what === "keys" ? "all" : "all that it receives";
    const sum = isDifference || what === "queries" ? part / all : part;
    const source = exact === "row" ? ", computed by the kernel" : "";
    return `${inWords(shown.length, name)}, ${percent(sum)} of ${whole}${source}`;
  }

  /** Return why a block answers for its token. */
  private reason(): string {
    const { scan, state } = this.app;
    if (scan.sequences > 1 && state.mode === "diff") return "the maps are means of several sequences";
    if (state.mode === "diff") return "the maps hold blocks of tokens";
    const row = this.rows.get(this.keyOfRow(this.lights.token ?? 0));
    const isRefused = typeof row === "object" && "refused" in row && this.lights.what === "keys";
    return isRefused ? `the kernel has no row: ${row.refused}` : "this page holds no single tokens of this head";
  }
}

const total = (entries: Entry[]): number => entries.reduce((sum, { weight }) => sum + Math.abs(weight), 0);

const inWords = (number: number, name = "weight"): string =>
  `its ${number === 1 ? `largest ${name}` : `${number} largest ${name}s`}`;
