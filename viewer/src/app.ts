/** The page: what is chosen, the data of it, and the parts that draw it. */

import type { Layer, Meta, Received, Scan, Standout, Statistic } from "./contract";
import { allHeads, nameOf, statisticOf } from "./heads";
import { type Asked, type Link, blobsOfLinks, linksOf, movesOf } from "./links";
import { Light } from "./light";
import { type HeadId, Thumbnails, difference, loadMap, positionOf, sameHead } from "./maps";
import { Distances } from "./similar";
import { type Source, idle } from "./source";
import { type State, WHOLE, fromHash, showsLinks, toHash } from "./state";
import { Text } from "./text";
import { loadTopKeys } from "./top_keys";
import type { Lights, Loaded, Part, Seen, View } from "./view";

const MOST_LETTERS = 12; // of the name of a scan beside that of a head
const SLICE_MS = 40; // of drawing before other work may run

type Change = "push" | "replace";

/** The answers about the pinned tokens in all heads, with the texts of each scan. */
export interface Answers {
  asked: Asked;
  links: Link[] | null;
  texts: (Text | null)[][];
}

/** B, where A and B stand side by side: B's head and data, and all else as the page has it. */
class Beside implements Seen {
  loaded: Loaded | null = null;
  readonly light = new Light(this);
  /** What is lit here is drawn beside what is lit there. */
  readonly onLight = (): void => this.app.onLight(this.app.light.lights);

  constructor(private readonly app: App) {}

  get state(): State {
    return this.app.state;
  }

  get hovered(): View["hovered"] {
    return this.app.hovered;
  }

  get source(): Source {
    return this.app.source;
  }

  get scan(): Scan {
    return this.app.meta.scans[this.shown.scan] as Scan;
  }

  get shown(): HeadId {
    return this.app.state.other ?? this.app.chosen;
  }
}

export class App implements Seen {
  state: State;
  loaded: Loaded | null = null;
  /** The token under the pointer; it takes the place of the pinned one. */
  hovered: { token: number; direction: State["direction"] } | null = null;
  readonly light: Light;
  readonly beside = new Beside(this);
  readonly parts: Part[] = [];
  /** Told of each change of the state; the notebook's widget follows it. */
  onChange: () => void = () => undefined;
  /** Told when the lit tokens change, which may be at every move of the pointer. */
  onLight: (lights: Lights) => void = () => undefined;
  /** True while the next head or layer that is pointed out is the one to compare with. */
  isChoosing = false;
  /** True after the first drawing. */
  isDrawn = false;
  private epoch = 0;

  constructor(
    readonly source: Source,
    private readonly keepsAddress: boolean,
  ) {
    this.state = this.firstState(0, true);
    if (keepsAddress) {
      this.state = this.repaired(fromHash(location.hash));
      window.addEventListener("hashchange", () => {
        if (location.hash !== this.address) this.set(this.repaired(fromHash(location.hash)), "replace");
      });
    }
    this.light = new Light(this);
  }

  // ---- what is chosen ---------------------------------------------------------------------------

  get meta(): Meta {
    return this.source.reports[this.state.report] as Meta;
  }

  get scan(): Scan {
    return this.meta.scans[0] as Scan;
  }

  get layer(): Layer | null {
    return this.scan.layers[this.state.layer] ?? null;
  }

  get statistic(): Statistic | null {
    return statisticOf(this.scan, this.state.statistic);
  }

  get chosen(): HeadId {
    return { scan: 0, layer: this.state.layer, head: this.state.head };
  }

  /** The head whose tokens are lit: B in mode B, else A. */
  get shown(): HeadId {
    return this.state.mode === "B" && this.state.other ? this.state.other : this.chosen;
  }

  get shownLayer(): Layer | null {
    return this.meta.scans[this.shown.scan]?.layers[this.shown.layer] ?? null;
  }

  /** Return a head's name, with the scan's where there are two. */
  nameOf(id: HeadId): string {
    const name = `layer ${id.layer}, head ${id.head}`;
    return this.meta.scans.length > 1 ? `${name}, ${this.meta.scans[id.scan]?.name ?? ""}` : name;
  }

  /** Return a head's name for a heading with two: "5.3", or "5.3 before" where there are two scans; "5.3 A" for a long name. */
  shortName(id: HeadId): string {
    const { scans } = this.meta;
    const isShort = scans.every(({ name }) => name.length <= MOST_LETTERS);
    return scans.length > 1 ? `${nameOf(id)} ${isShort ? scans[id.scan]?.name : "AB"[id.scan]}` : nameOf(id);
  }

  /** Return a head's name after its letter: "A: 5.3 before", and "A: 5.3" for a long name. */
  letteredName(side: number, id: HeadId): string {
    const letter = "AB"[side] ?? "";
    return `${letter}: ${this.shortName(id).replace(new RegExp(` ${letter}$`), "")}`;
  }

  /** Return the head of the second scan that a head is compared with: the matched, or the same. */
  partner({ layer, head }: { layer: number; head: number }, report: number = this.state.report): HeadId | null {
    const meta = this.source.reports[report];
    const here = meta?.scans[0]?.layers[layer];
    const there = meta?.scans[1]?.layers[layer];
    if (!here || !there) return null;
    const other = meta?.matched?.[layer]?.[positionOf(here, head)] ?? head;
    return there.heads.includes(other) ? { scan: 1, layer, head: other } : null;
  }

  /**
   * Return the first view: of two scans the largest change, else the head with the strongest link, which
   * is lit; without `opens` or such a link, the first head that stands out.
   */
  private firstState(report: number, opens = false): State {
    const meta = this.source.reports[report];
    const scan = meta?.scans[0];
    const opening = (opens && meta?.opening) || null;
    const isIt = (each: Standout): boolean => each.layer === opening?.layer && each.head === opening.head;
    const standout = scan?.standouts.find(isIt) ?? scan?.standouts[0];
    const first = meta?.changes[0] ?? (opening && { statistic: standout?.statistic, ...opening }) ?? standout;
    const layer = first?.layer ?? Math.max(0, scan?.layers.findIndex((each) => each.heads.length) ?? 0);
    const head = first?.head ?? scan?.layers[layer]?.heads[0] ?? 0;
    const other = this.partner({ layer, head }, report);
    const total = scan?.statistics.find((each) => each.is_change);
    return {
      report,
      statistic: total?.name ?? first?.statistic ?? scan?.statistics[0]?.name ?? "",
      layer,
      head,
      order: "layers",
      filter: "",
      subject: "head",
      against: null,
      other,
      mode: other ? "both" : "A",
      sequence: 0,
      token: opening?.token ?? null,
      second: null,
      direction: "keys",
      isPlain: false,
      zoom: WHOLE,
      tab: "map",
      search: "",
    };
  }

  /** Return a whole state from the parts of an address; what the report does not have is left out. */
  private repaired(given: Partial<State>): State {
    const report = given.report !== undefined && this.source.reports[given.report] ? given.report : 0;
    // An address that names a head or a token is that of a view, not of the page.
    const first = this.firstState(report, given.layer === undefined && given.token === undefined);
    const { layer = first.layer, head = first.head } = given;
    const state = { ...first, other: this.partner({ layer, head }, report), ...given, report };
    const scans = this.source.reports[report]?.scans ?? [];
    const has = (id: HeadId): boolean => !!scans[id.scan]?.layers[id.layer]?.heads.includes(id.head);
    if (!has({ scan: 0, layer: state.layer, head: state.head })) {
      state.layer = first.layer;
      state.head = first.head;
    }
    if (!scans[0] || !statisticOf(scans[0], state.statistic)) state.statistic = first.statistic;
    if (state.other && !has(state.other)) state.other = null;
    if (state.against !== null && !scans[0]?.layers[state.against]?.heads.length) state.against = null;
    if (!state.other) state.mode = "A";
    state.zoom = state.zoom[0] >= 1 ? state.zoom : WHOLE;
    return state;
  }

  /** The address of what is shown; without one of its own, that of a page of this name. */
  get link(): string {
    return location.href.replace(/#.*$/, "") + this.address;
  }

  private get address(): string {
    return toHash(this.state, this.firstState(this.state.report));
  }

  // ---- changes ----------------------------------------------------------------------------------

  /** Change the state, draw it, and put it into the address. */
  set(change: Partial<State>, how: Change = "push"): void {
    const before = this.state;
    this.state = { ...before, ...change };
    if (this.state.other && sameHead(this.state.other, this.chosen)) this.state.other = null;
    if (!this.state.other) this.state.mode = "A";
    if (this.state.token === null) this.state.second = null;
    this.hovered = null;
    if (this.keepsAddress && this.address !== location.hash) {
      // Unlike an assignment to location.hash, this neither lays out the page nor scrolls.
      if (how === "push") history.pushState(null, "", this.address);
      else history.replaceState(null, "", this.address);
    }
    void this.refresh();
    this.onChange();
  }

  choose(id: { layer: number; head: number }, statistic: string = this.state.statistic): void {
    const layer = this.scan.layers[id.layer];
    const isOtherText = layer?.query_text !== this.layer?.query_text;
    const change: Partial<State> = { ...id, statistic, zoom: WHOLE, subject: "head", against: null };
    if (isOtherText) Object.assign(change, { token: null, sequence: 0 });
    if (this.state.other?.scan === 1) change.other = this.partner(id);
    this.set(change);
  }

  compareWith(other: HeadId | null): void {
    const isItself = other !== null && sameHead(other, this.chosen);
    this.isChoosing = false;
    this.set({
      other: isItself ? null : other, mode: other && !isItself ? "diff" : "A", zoom: WHOLE, subject: "head", against: null,
    });
  }

  /** Choose a layer, with the head of it that has the number of the chosen one, else its first. */
  chooseLayer(layer: number): void {
    const heads = this.scan.layers[layer]?.heads ?? [];
    const head = heads.includes(this.state.head) ? this.state.head : heads[0];
    if (head === undefined) return;
    if (layer !== this.state.layer) this.choose({ layer, head });
    this.set({ subject: "layer", against: null }, "replace");
  }

  compareLayers(against: number): void {
    if (!this.scan.layers[against]?.heads.length) return;
    this.isChoosing = false;
    this.set({ subject: "layer", against: against === this.state.layer ? null : against });
  }

  /** Leave the choice of what to compare with, else a comparison within the scan, else the pinned token. */
  leave(): void {
    const { state } = this;
    const other = this.partner(this.chosen);
    if (this.isChoosing) this.choosing(false);
    else if (state.against !== null) this.set({ against: null });
    else if (state.other?.scan === 0) this.set({ other, mode: other ? "both" : "A", zoom: WHOLE });
    else this.pin(null);
  }

  /** Begin or leave the choice of what to compare with. */
  choosing(isChoosing: boolean): void {
    if (isChoosing === this.isChoosing) return;
    this.isChoosing = isChoosing;
    void this.refresh();
  }

  /** Choose another report: the address is that of its first view. */
  chooseReport(report: number): void {
    this.set(this.firstState(report, true));
  }

  /** Pin a token of the sequence, or unpin it if it is pinned. */
  pin(token: number | null, direction: State["direction"] = this.state.direction): void {
    const isSame = token === this.state.token && direction === this.state.direction;
    this.set({ token: isSame ? null : token, second: null, direction });
  }

  /** Pin the second token of a pair, or unpin it; the grid then shows the pair in all heads. */
  pinSecond(token: number): void {
    const { state } = this;
    const second = token === state.second ? null : token;
    const isShown = second === null || showsLinks(state);
    this.set({ second, order: isShown ? state.order : "links", tab: second === null || state.tab === "text" ? state.tab : "heads" });
  }

  /** Turn the grid to one word in all heads, or back. */
  toggleLinks(): void {
    const isShown = showsLinks(this.state);
    this.set(isShown ? { order: "layers", second: null } : { order: "links", tab: "heads" });
  }

  /** Preview a token; null goes back to the pinned one. */
  hover(at: number | null, direction: State["direction"] = this.state.direction): void {
    // Over the second token the pair stays lit.
    const token = at === this.state.second ? null : at;
    if (this.hovered?.token === (token ?? undefined) && this.hovered?.direction === direction) return;
    this.hovered = token === null ? null : { token, direction };
    this.updateLight();
  }

  private updateLight(): void {
    if (this.state.mode === "both") this.beside.light.update();
    this.light.update();
  }

  // ---- data -------------------------------------------------------------------------------------

  async refresh(): Promise<void> {
    const epoch = ++this.epoch;
    // What is cached arrives within a few microtasks; draw once then.
    const [loaded, beside] = await Promise.all([
      this.load(), this.state.mode === "both" ? this.loadTokens(this.beside.shown) : null,
    ]);
    if (epoch !== this.epoch) return;
    this.loaded = loaded;
    this.beside.loaded = beside && { ...loaded, ...beside, map: loaded.b };
    // The first drawing of many heads takes several tasks, so that none is long.
    let since = performance.now();
    for (const part of this.parts) {
      part.update(loaded);
      if (performance.now() - since < SLICE_MS) continue;
      await new Promise((resume) => setTimeout(resume));
      if (epoch !== this.epoch) return;
      since = performance.now();
    }
    this.isDrawn = true;
    this.updateLight();
    void this.lookAhead(epoch);
  }

  private readonly ahead = new Map<number, Promise<void>>();

  /** While the page is idle inflate what answers about a word in all heads, and find the answers to the pinned one. */
  private async lookAhead(epoch: number): Promise<void> {
    const { report } = this.state;
    const read = this.ahead.get(report) ?? this.source.readAhead(report, this.meta.scans.flatMap(blobsOfLinks));
    this.ahead.set(report, read);
    await read;
    for (const direction of ["keys", "queries"] as const) {
      await idle();
      if (epoch === this.epoch) await this.answers(direction);
    }
  }

  /** What answers about a word in all heads show where two scans are compared. */
  get linkMode(): "A" | "B" | "diff" {
    const { mode, other } = this.state;
    return other?.scan !== 1 || mode === "A" ? "A" : mode === "B" ? "B" : "diff";
  }

  /** Return the answers about the pinned tokens in all heads of A; those of their partners in B, or the changes. */
  async answers(direction: State["direction"] = this.state.direction): Promise<Answers | null> {
    const { source, linkMode, meta } = this;
    const { report } = this.state;
    const asked = this.asked(direction);
    if (!asked) return null;
    const texts = await Promise.all(meta.scans.map(({ texts }, scan) => Promise.all(texts.map((_, text) => this.loadText(scan, text)))));
    const isWord = (text: number, token: number): boolean => texts.every((each) => !each[text]?.isSpecial(asked.sequence, token));
    if (linkMode === "A") return { asked, texts, links: await linksOf(source, report, 0, asked, isWord) };
    if (linkMode === "diff") return { asked, texts, links: await movesOf(source, report, asked, isWord, (head) => this.partner(head, report)) };
    const found = await linksOf(source, report, 1, asked, isWord);
    const byName = new Map(found?.map((link) => [nameOf(link), link]));
    const links = found && allHeads(meta.scans[0] as Scan, null).flatMap(({ layer, head }) => {
      const other = this.partner({ layer, head }, report);
      const link = other && byName.get(nameOf(other));
      return link ? [{ ...link, layer, head }] : [];
    });
    return { asked, texts, links };
  }

  /** Return the question about the pinned tokens in all heads, or null if none is pinned. */
  asked(direction: State["direction"]): Asked | null {
    const { token, second: other, sequence, isPlain } = this.state;
    const text = direction === "keys" ? this.layer?.query_text : this.layer?.key_text;
    return token === null || text === null || text === undefined ? null : { text, sequence, token, other, direction, isPlain };
  }

  private async load(): Promise<Loaded> {
    const { source, state } = this;
    const { report, other } = state;
    const [a, b, of, received, profile, thumbs, distances, second] = await Promise.all([
      loadMap(source, report, this.chosen),
      other ? loadMap(source, report, other) : null,
      this.loadTokens(this.shown),
      this.scan.received ? source.received(report, 0) : ([] as Received),
      this.scan.reach === null ? new Uint8Array() : source.bytes(report, "0/profile"),
      source.bytes(report, "0/thumbs"),
      source.bytes(report, "0/distances"),
      this.meta.scans[1] ? source.bytes(report, "1/thumbs") : null,
    ]);
    const map = { A: a, B: b, both: a, diff: a && b ? difference(a, b) : null }[state.mode];
    const profiles = new Float32Array(profile.slice().buffer);
    return { a, b, map, ...of, received, profiles, ...this.allHeadsOf(report, thumbs, distances, second) };
  }

  /** Return the single tokens of a head: what is stored of them, and their words. */
  private async loadTokens(id: HeadId): Promise<Pick<Loaded, "top" | "queries" | "keys">> {
    const layer = this.meta.scans[id.scan]?.layers[id.layer];
    const [top, queries, keys] = await Promise.all([
      loadTopKeys(this.source, this.state.report, id),
      this.loadText(id.scan, layer?.query_text ?? null),
      this.loadText(id.scan, layer?.key_text ?? null),
    ]);
    return { top, queries, keys };
  }

  private readonly ofAllHeads = new Map<number, Pick<Loaded, "thumbnails" | "others" | "distances">>();

  private allHeadsOf(
    report: number, thumbs: Uint8Array, distances: Uint8Array, second: Uint8Array | null,
  ): Pick<Loaded, "thumbnails" | "others" | "distances"> {
    const [scan, other] = (this.source.reports[report] as Meta).scans as [Scan, Scan?];
    const made = this.ofAllHeads.get(report) ?? {
      thumbnails: new Thumbnails(scan, thumbs),
      others: other && second ? new Thumbnails(other, second) : null,
      distances: new Distances(scan, distances),
    };
    this.ofAllHeads.set(report, made);
    return made;
  }

  private readonly texts = new Map<string, Promise<Text>>();

  loadText(scan: number, index: number | null): Promise<Text | null> {
    const stream = index === null ? undefined : this.meta.scans[scan]?.texts[index];
    if (!stream || index === null) return Promise.resolve(null);
    const key = `${this.state.report}/${scan}/${index}`;
    let text = this.texts.get(key);
    if (!text) {
      text = this.source.words(this.state.report, scan, index).then((words) => new Text(stream, words));
      this.texts.set(key, text);
    }
    return text;
  }

  // ---- for tests and for a reader of the console --------------------------------------------------

  /** Return what the page shows, as plain data. */
  dump(): Record<string, unknown> {
    const { lights } = this.light;
    return {
      ...this.state,
      chosen: this.nameOf(this.chosen),
      shown: this.nameOf(this.shown),
      heads: allHeads(this.scan, this.statistic).length,
      badge: this.light.badge,
      lit: { what: lights.what, exact: lights.exact, entries: lights.entries },
      parts: Object.assign({}, ...this.parts.map((part) => ("dump" in part ? (part.dump as () => object)() : {}))),
    };
  }
}

