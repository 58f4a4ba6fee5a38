/** The tokens of one text as it was written, of which only the visible lines exist, and a minimap. */

import type { App } from "../app";
import { Directions } from "../bidi";
import { css, diverging, ink } from "../colours";
import { eachFrame, element, fitCanvas, isDark, onLongPress } from "../dom";
import type { Direction } from "../state";
import type { Place, Text } from "../text";
import type { Written } from "../written";
import { type Arc, Arcs } from "./arcs";
import { LineBreaker, type Lines, lineOf } from "./lines";
import { type Hit, type Row, makeRow } from "./rows";
import { STEPS, classOf, stepOf } from "./legend";
import { DARK, type Lights, marked } from "../view";

const LINE = 26; // height of a line, in pixels
const GUTTER = 48; // width of the token indices
const MARGIN = 20; // on the right, for what hangs over the end of a line
const FAMILY = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const MOST_TICKS = 2000; // found places that the minimap shows
const LEAST_ARC = 0.05; // weight of an arc, or of the second token of a pair any

/** What the tokens of a text are: both, or under cross attention queries alone or keys alone. */
export type Role = "both" | "queries" | "keys";

export class Tokens {
  readonly scroller = element("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "tokens: arrow keys move, Enter pins" });
  readonly root = element("div", { class: "pane" });
  private readonly sheet = element("div", { class: "sheet" });
  private readonly minimap = element("canvas", { class: "minimap", "data-part": "minimap", "aria-hidden": "true" });
  private readonly arcs = new Arcs();
  private readonly breaker = new LineBreaker(`14px ${FAMILY}`, `11px ${FAMILY}`);
  private role: Role = "both";
  private text: Text | null = null;
  private drawn: { written: Written; lines: Lines; directions: Directions } | null = null;
  private readonly rows = new Map<number, Row>();
  private lights: Lights = DARK;
  private places: Place[] = [];
  private here: Place | null = null;
  private cursor: number | null = null;
  private drawnText = "";
  private scrolledTo = "";

  constructor(private readonly app: App) {
    this.root.append(this.scroller, this.minimap);
    this.scroller.append(this.sheet, this.arcs.root);
    this.listen();
  }

  private listen(): void {
    const { app, scroller } = this;
    scroller.addEventListener("scroll", eachFrame(() => this.drawLines()));
    scroller.addEventListener("pointerover", (event) => {
      const hit = this.hitOf(event.target);
      if (hit && event.pointerType !== "touch") app.hover(this.tokenOf(hit), this.direction);
    });
    scroller.addEventListener("pointerleave", () => app.hover(null));
    // Shift and a click would select the text up to here.
    scroller.addEventListener("mousedown", (event) => {
      if (event.shiftKey && app.state.token !== null) event.preventDefault();
    });
    scroller.addEventListener("click", (event) => {
      if (!event.shiftKey || !this.pinSecond(event.target)) this.clicked(event.target);
    });
    onLongPress(scroller, (target) => this.pinSecond(target));
    scroller.addEventListener("keydown", (event) => this.keyed(event));
    scroller.addEventListener("copy", (event) => this.copied(event));
    this.minimap.addEventListener("pointerdown", (event) => this.jump(event));
    this.minimap.addEventListener("pointermove", (event) => {
      if (event.buttons) this.jump(event);
    });
    new ResizeObserver(eachFrame(() => this.layOut(true))).observe(scroller);
  }

  /** What a token of this text is asked for: a query looks, a key is looked at. */
  private get direction(): Direction {
    if (this.role === "both") return this.app.state.direction;
    return this.role === "queries" ? "keys" : "queries";
  }

  update(text: Text | null, role: Role): void {
    this.text = text;
    this.role = role;
    const name = { both: "tokens", queries: "tokens of the queries' text", keys: "tokens of the keys' text" }[role];
    this.scroller.setAttribute("aria-label", `${name}: arrow keys move, Enter pins`);
    this.layOut(false);
  }

  /** Mark the places that a search found, and the one that it stands at. */
  find(places: Place[], here: Place | null): void {
    if (places === this.places && here === this.here) return;
    this.places = places;
    this.here = here;
    this.clearRows();
    this.drawLines();
  }

  private clearRows(): void {
    this.rows.clear();
    this.sheet.replaceChildren();
  }

  private layOut(force: boolean): void {
    const { text } = this;
    const { report, sequence } = this.app.state;
    const width = this.scroller.clientWidth - GUTTER - MARGIN;
    const key = [report, this.app.shown.scan, text?.stream.name, sequence, width].join("\0");
    if (!text?.isKnown) {
      this.drawnText = "";
      this.drawn = null;
      this.clearRows();
      this.sheet.append(element("p", { class: "soft" }, text ? "…" : "The scan does not hold the text that was read."));
      return;
    }
    if (width <= 0 || (key === this.drawnText && !force)) return;
    if (key === this.drawnText && this.drawn) return this.drawLines();
    this.drawnText = key;
    const written = text.of(sequence);
    void this.breaker.lines(written, width, () => this.drawnText !== key).then((lines) => {
      if (!lines) return;
      this.drawn = { written, lines, directions: new Directions(written.text) };
      this.clearRows();
      this.sheet.classList.toggle("made", written.isMade);
      this.sheet.style.height = `${lines.starts.length * LINE}px`;
      this.scrolledTo = "";
      this.follow();
      this.drawLines();
    });
  }

  // ---- lit tokens -------------------------------------------------------------------------------

  lit(lights: Lights): void {
    this.lights = lights;
    this.follow();
    this.drawLines();
  }

  /** True if this text holds the token that looks or is looked at. */
  private get holdsToken(): boolean {
    return this.role === "both" || (this.lights.what === "keys") === (this.role === "queries");
  }

  /** True if this text holds the lit tokens. */
  private get holdsEntries(): boolean {
    return this.role === "both" || !this.holdsToken;
  }

  /**
   * Scroll to a token that was pinned elsewhere, and to the one that is lit most if there is room for
   * both; in the other text, to the latter.
   */
  private follow(): void {
    const { token } = this.app.state;
    const entry = this.lights.token === token ? this.lights.entries[0] : undefined;
    const lit = entry && entry.first === entry.last && this.holdsEntries ? entry.first : null;
    const target = this.holdsToken ? token : (entry?.first ?? null);
    const key = [this.drawnText, this.lights.what, token, lit].join("\0");
    if (!this.drawn || token === null || target === null || key === this.scrolledTo) return;
    this.scrolledTo = key;
    // A token that was chosen here is in sight, and the text stays where it is.
    this.scrollTo(target, this.holdsToken && token === this.cursor ? target : (lit ?? target));
  }

  /** Bring a token into sight, and another one if there is room for both. */
  private scrollTo(token: number, other: number = token): void {
    const { scrollTop, clientHeight } = this.scroller;
    const lines = [this.lineOfToken(token), this.lineOfToken(other)];
    const [top, bottom] = [Math.min(...lines) * LINE, (Math.max(...lines) + 1) * LINE];
    if (bottom - top > clientHeight) return this.scrollTo(token);
    if (top < scrollTop || bottom > scrollTop + clientHeight) {
      this.scroller.scrollTop = Math.max(0, (top + bottom - clientHeight) / 2);
    }
  }

  // ---- lines ------------------------------------------------------------------------------------

  get lineCount(): number {
    return this.drawn?.lines.starts.length ?? 0;
  }

  private startOfLine(line: number): number {
    return this.drawn?.lines.starts[line] ?? this.drawn?.written.text.length ?? 0;
  }

  private lineOfToken(token: number): number {
    return this.drawn ? lineOf(this.drawn.lines, this.drawn.written.startOf(token)) : 0;
  }

  /** Return the first token in a line or after it. */
  private tokenOfLine(line: number): number {
    return this.drawn?.written.firstFrom(this.startOfLine(line)) ?? 0;
  }

  private get topLine(): number {
    return Math.floor(this.scroller.scrollTop / LINE);
  }

  // ---- drawing ----------------------------------------------------------------------------------

  private drawLines(): void {
    if (!this.drawn) return;
    const { scrollTop, clientHeight } = this.scroller;
    const first = Math.max(0, this.topLine);
    const last = Math.min(this.lineCount - 1, Math.ceil((scrollTop + clientHeight) / LINE));
    this.dropRows(first, last);
    this.addRows(first, last);
    this.paint();
    this.drawArcs(first * LINE, (last - first + 1) * LINE);
    this.drawMinimap();
  }

  /** Draw the larger weights of the token, where it and what is lit are both in sight. */
  private drawArcs(top: number, height: number): void {
    const { token, entries } = this.lights;
    const from = this.role === "both" && token !== null ? this.boxOf(token) : null;
    const arcs: Arc[] = [];
    for (const { first, last, weight } of from ? entries : []) {
      if (Math.abs(weight) < LEAST_ARC && first !== this.app.state.second) continue;
      const to = first === last && first !== token ? this.boxOf(first) : null;
      if (from && to) arcs.push({ from, to, weight });
    }
    this.arcs.draw(arcs, top, height);
  }

  /** Return the box of a token that is in sight. */
  private boxOf(token: number): DOMRect | null {
    const row = this.rows.get(this.lineOfToken(token));
    return row?.hits.find((hit) => hit.tokens.includes(token))?.span.getClientRects()[0] ?? null;
  }

  /** Remove the rows that are out of sight, but those in which a selection begins or ends. */
  private dropRows(first: number, last: number): void {
    const selection = getSelection();
    for (const [line, { root }] of this.rows) {
      if (line >= first && line <= last) continue;
      if (selection && [selection.anchorNode, selection.focusNode].some((end) => root.contains(end))) continue;
      root.remove();
      this.rows.delete(line);
    }
  }

  private addRows(first: number, last: number): void {
    const { written, directions } = this.drawn as NonNullable<typeof this.drawn>;
    const { sequence } = this.app.state;
    const [begin, end] = [this.startOfLine(first), this.startOfLine(last + 1)];
    const near = (place: Place): boolean => place.sequence === sequence && place.from < end && place.to > begin;
    const places = this.places.filter(near);
    for (let line = first; line <= last; line++) {
      if (this.rows.has(line)) continue;
      const [from, to] = [this.startOfLine(line), this.startOfLine(line + 1)];
      const isLast = line === this.lineCount - 1;
      const row = makeRow(written, { from, to, isLast, direction: directions.of(from, to), places, here: this.here });
      row.root.style.top = `${line * LINE}px`;
      // In the order of the lines, so that a selection is one of the text.
      const below = [...this.rows].reduce((next, [other]) => (other > line && other < next ? other : next), Infinity);
      this.sheet.insertBefore(row.root, this.rows.get(below)?.root ?? null);
      this.rows.set(line, row);
    }
  }

  /** Give each piece the colour of its token, and the marks of what is pinned. */
  private paint(): void {
    const hits = [...this.rows.values()].flatMap((row) => row.hits);
    const levels = this.levels(hits);
    const dark = this.app.state.mode === "diff" ? isDark(this.root) : null;
    for (const { span, tokens } of hits) {
      let strongest = 0;
      for (const token of tokens) {
        const level = levels.get(token) ?? 0;
        if (Math.abs(level) > Math.abs(strongest)) strongest = level;
      }
      const shown = this.shownToken(tokens);
      let name = strongest ? `t ${classOf(strongest)}` : "t";
      if (this.holdsToken && shown === this.lights.token) name += " pinned";
      if (this.holdsEntries && tokens.includes(this.app.state.second ?? -1)) name += " second";
      if (shown === this.cursor) name += " cursor";
      if (span.className !== name) span.className = name;
      if (span.dataset["t"] !== String(shown)) span.dataset["t"] = String(shown);
      // The colours of B − A are those of the map.
      const tint = strongest && dark !== null ? diverging(-strongest / STEPS, dark) : null;
      if (!tint && !span.style.length) continue;
      span.style.background = tint ? css(tint) : "";
      span.style.color = tint ? ink(tint) : "";
    }
  }

  /** Return the token of a piece that is pinned or under the cursor, else its first. */
  private shownToken(tokens: number[]): number {
    const { token } = this.lights;
    if (this.holdsToken && token !== null && tokens.includes(token)) return token;
    if (this.cursor !== null && tokens.includes(this.cursor)) return this.cursor;
    return tokens[0] ?? 0;
  }

  /** Return the step of colour of each lit token in sight, below 0 for what is less. */
  private levels(hits: Hit[]): Map<number, number> {
    const levels = new Map<number, number>();
    if (!this.holdsEntries) return levels;
    const tokens = hits.flatMap((hit) => hit.tokens);
    const [first, last] = [Math.min(...tokens), Math.max(...tokens)];
    for (const entry of marked(this.lights.entries).reverse()) {
      const level = stepOf(entry.weight, this.lights.end);
      for (let at = Math.max(first, entry.first); at <= Math.min(last, entry.last); at++) levels.set(at, level);
    }
    return levels;
  }

  private drawMinimap(): void {
    const { lights, scroller } = this;
    const height = scroller.clientHeight;
    const context = fitCanvas(this.minimap, 28, height);
    if (!this.drawn) return;
    const { lines } = this.drawn;
    const y = (position: number): number => (height * lineOf(lines, position)) / this.lineCount;
    const yOf = (token: number): number => (height * this.lineOfToken(token)) / this.lineCount;
    const style = getComputedStyle(this.root);
    const whole = this.lineCount * LINE;
    context.fillStyle = style.getPropertyValue("--line");
    context.fillRect(0, (height * scroller.scrollTop) / whole, 28, Math.max(3, (height * height) / whole));
    if (this.holdsEntries) {
      for (const { first, last, weight } of marked(lights.entries)) {
        const root = Math.sqrt(Math.min(1, Math.abs(weight) / lights.end));
        context.fillStyle = style.getPropertyValue(weight < 0 ? "--less" : "--lit");
        context.fillRect(3, yOf(first), 22 * root, Math.max(2, yOf(last) - yOf(first)));
      }
    }
    context.fillStyle = style.getPropertyValue("--other");
    for (const place of this.places.slice(0, MOST_TICKS)) {
      if (place.sequence === this.app.state.sequence) context.fillRect(25, y(place.from), 3, 1);
    }
    if (this.holdsToken && lights.token !== null) {
      context.fillStyle = style.getPropertyValue("--accent");
      context.fillRect(0, yOf(lights.token) - 1, 28, 2);
    }
  }

  // ---- input ------------------------------------------------------------------------------------

  private hitOf(target: EventTarget | null): Hit | null {
    const span = (target as HTMLElement | null)?.closest<HTMLElement>("[data-t]");
    if (!span) return null;
    for (const { hits } of this.rows.values()) {
      const hit = hits.find((each) => each.span === span);
      if (hit) return hit;
    }
    return null;
  }

  private tokenOf(hit: Hit): number {
    return Number(hit.span.dataset["t"]);
  }

  /** Pin the token that was clicked; further clicks walk through the tokens of one character. */
  private clicked(target: EventTarget | null): void {
    const hit = this.hitOf(target);
    if (!hit || getSelection()?.isCollapsed === false) return;
    const { app } = this;
    const { token, direction } = app.state;
    const at = direction === this.direction && token !== null ? hit.tokens.indexOf(token) : -1;
    // The first click on a token that a search or an address pinned keeps it.
    const isKept = at >= 0 && this.cursor !== token;
    const next = hit.tokens[isKept ? at : at + 1] ?? token;
    this.cursor = next;
    if (isKept) this.drawLines();
    else app.pin(next, this.direction);
  }

  /** Pin the second token of a pair. Return false if the first is not pinned, or is the only one of this text. */
  private pinSecond(target: EventTarget | null): boolean {
    const hit = this.hitOf(target);
    return hit !== null && this.pinSecondToken(this.tokenOf(hit));
  }

  private pinSecondToken(token: number): boolean {
    const { state } = this.app;
    if (state.token === null || (this.role !== "both" && this.direction === state.direction)) return false;
    this.cursor = token;
    this.app.pinSecond(token);
    return true;
  }

  private jump(event: PointerEvent): void {
    const box = this.minimap.getBoundingClientRect();
    const share = (event.clientY - box.top) / box.height;
    this.scroller.scrollTop = share * this.lineCount * LINE - this.scroller.clientHeight / 2;
  }

  private keyed(event: KeyboardEvent): void {
    if (!this.drawn?.written.length) return;
    const { written } = this.drawn;
    const pinned = this.holdsToken ? this.app.state.token : null;
    const at = this.cursor ?? pinned ?? this.tokenOfLine(this.topLine);
    if (event.key === "Enter" || event.key === " ") {
      if (!event.shiftKey || !this.pinSecondToken(at)) this.app.pin(at, this.direction);
    } else if (event.key === "Escape") {
      this.app.leave();
    } else if (event.key === "a" && (event.ctrlKey || event.metaKey)) {
      this.selectAll();
    } else {
      const next = this.moved(at, event.key);
      if (next === null) return;
      this.cursor = Math.min(written.length - 1, Math.max(0, next));
      this.scrollTo(this.cursor);
      this.app.hover(this.cursor, this.direction);
      this.drawLines();
    }
    event.preventDefault();
    event.stopPropagation();
  }

  /** Return the token that an arrow key leads to; null for another key. */
  private moved(at: number, key: string): number | null {
    const { written, directions } = this.drawn as NonNullable<typeof this.drawn>;
    const line = this.lineOfToken(at);
    const forward = directions.of(written.startOf(at), written.endOf(at)).dir === "rtl" ? "ArrowLeft" : "ArrowRight";
    if (key === "ArrowLeft" || key === "ArrowRight") return at + (key === forward ? 1 : -1);
    if (key !== "ArrowUp" && key !== "ArrowDown") return null;
    const across = at - this.tokenOfLine(line);
    for (let other = line; ; ) {
      other += key === "ArrowUp" ? -1 : 1;
      if (other < 0 || other >= this.lineCount) return at;
      // Lines of which a token of this line is the nearest are passed over.
      const [first, next] = [this.tokenOfLine(other), this.tokenOfLine(other + 1)];
      if (this.lineOfToken(first) === other) return next > first ? Math.min(first + across, next - 1) : first + across;
    }
  }

  // ---- copying ----------------------------------------------------------------------------------

  /** Select the text from its first to its last line; those between need not exist. */
  private selectAll(): void {
    this.addRows(0, 0);
    this.addRows(this.lineCount - 1, this.lineCount - 1);
    const [first, last] = [this.rows.get(0)?.root, this.rows.get(this.lineCount - 1)?.root];
    if (first && last) getSelection()?.setBaseAndExtent(first, 0, last, last.childNodes.length);
  }

  /** Copy the characters of the selection: lines that were broken here are no lines of the text. */
  private copied(event: ClipboardEvent): void {
    const selection = getSelection();
    const range = selection?.rangeCount ? selection.getRangeAt(0) : null;
    if (!range || range.collapsed || !this.drawn || !event.clipboardData) return;
    const from = this.positionOf(range.startContainer, range.startOffset) ?? 0;
    const to = this.positionOf(range.endContainer, range.endOffset) ?? this.drawn.written.text.length;
    event.clipboardData.setData("text/plain", this.drawn.written.text.slice(from, to));
    event.preventDefault();
  }

  /** Return the position in the text of a place in the page; null for a place outside of the rows. */
  private positionOf(node: Node, offset: number): number | null {
    for (const { root, from } of this.rows.values()) {
      if (!root.contains(node)) continue;
      const before = document.createRange();
      before.setStart(root, 0);
      before.setEnd(node, offset);
      return from + before.toString().length;
    }
    return null;
  }
}
