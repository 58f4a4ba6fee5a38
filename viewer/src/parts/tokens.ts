/** The tokens of one text, of which only the visible lines exist, with the lit ones and a minimap. */

import type { App } from "../app";
import { eachFrame, element, fitCanvas } from "../dom";
import { count, visible } from "../format";
import type { Direction } from "../state";
import type { Text } from "../text";
import { LineBreaker, type Lines, lineOf } from "./lines";
import type { Lights } from "../view";

const LINE = 26; // height of a line, in pixels
const GUTTER = 64; // width of the token indices
const STEPS = 10; // classes of colour, lit-1 to lit-10
const FONT = "14px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

/** What the tokens of a text are: both, or under cross attention queries alone or keys alone. */
export type Role = "both" | "queries" | "keys";

export class Tokens {
  readonly scroller = element("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "tokens: arrow keys move, Enter pins" });
  readonly root = element("div", { class: "pane" });
  private readonly sheet = element("div", { class: "sheet" });
  private readonly minimap = element("canvas", { class: "minimap", "data-part": "minimap", "aria-hidden": "true" });
  private readonly breaker = new LineBreaker(FONT);
  private role: Role = "both";
  private text: Text | null = null;
  private lines: Lines | null = null;
  private lights: Lights = { token: null, what: "keys", entries: [], exact: "none" };
  private cursor: number | null = null;
  private drawnText = "";
  private scrolledTo = "";
  private drawnRange = "";
  private spans: HTMLElement[] = [];

  constructor(private readonly app: App) {
    this.root.append(this.scroller, this.minimap);
    this.scroller.append(this.sheet);
    this.listen();
  }

  private listen(): void {
    const { app } = this;
    this.scroller.addEventListener("scroll", eachFrame(() => this.drawLines()));
    this.scroller.addEventListener("pointerover", (event) => {
      const token = tokenOf(event.target);
      if (token !== null && event.pointerType !== "touch") app.hover(token, this.direction);
    });
    this.scroller.addEventListener("pointerleave", () => app.hover(null));
    this.scroller.addEventListener("click", (event) => {
      const token = tokenOf(event.target);
      if (token === null) return;
      // The first click on a token that a search or an address pinned keeps it.
      const isPinned = app.state.token === token && app.state.direction === this.direction;
      const isFirst = this.cursor !== token;
      this.cursor = token;
      if (isPinned && isFirst) this.drawLines();
      else app.pin(token, this.direction);
    });
    this.scroller.addEventListener("keydown", (event) => this.keyed(event));
    this.minimap.addEventListener("pointerdown", (event) => this.jump(event));
    this.minimap.addEventListener("pointermove", (event) => {
      if (event.buttons) this.jump(event);
    });
    new ResizeObserver(eachFrame(() => this.layOut(true))).observe(this.scroller);
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

  private layOut(force: boolean): void {
    const { text } = this;
    const { report, sequence } = this.app.state;
    const width = this.scroller.clientWidth - GUTTER - 12;
    const key = [report, this.app.shown.scan, text?.stream.name, sequence, width].join("\0");
    if (!text?.isKnown) {
      this.drawnText = "";
      this.lines = null;
      this.drawnRange = "";
      this.sheet.replaceChildren(element("p", { class: "soft" }, text ? "…" : "The scan does not hold the text that was read."));
      return;
    }
    if (width <= 0 || (key === this.drawnText && !force)) return;
    if (key === this.drawnText && this.lines) return this.drawLines();
    this.drawnText = key;
    void this.breaker.lines(text, sequence, width, () => this.drawnText !== key).then((lines) => {
      if (!lines) return;
      this.lines = lines;
      this.sheet.style.height = `${lines.starts.length * LINE}px`;
      this.scrolledTo = "";
      this.drawnRange = "";
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

  /** Scroll to a token that was pinned elsewhere; in the other text, to the token that is lit most. */
  private follow(): void {
    const { token } = this.app.state;
    const target = this.holdsToken ? token : this.lights.token === token ? (this.lights.entries[0]?.first ?? null) : null;
    const key = [this.drawnText, this.lights.what, token, target].join("\0");
    if (!this.lines || token === null || target === null || key === this.scrolledTo) return;
    this.scrolledTo = key;
    this.scrollTo(target);
  }

  private scrollTo(token: number): void {
    if (!this.lines) return;
    const top = lineOf(this.lines, token) * LINE;
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop || top + LINE > scrollTop + clientHeight) {
      this.scroller.scrollTop = Math.max(0, top - clientHeight / 2);
    }
  }

  // ---- drawing ----------------------------------------------------------------------------------

  private drawLines(): void {
    const { lines, text } = this;
    if (!lines || !text) return;
    const { scrollTop, clientHeight } = this.scroller;
    const first = Math.max(0, Math.floor(scrollTop / LINE));
    const last = Math.min(lines.starts.length - 1, Math.ceil((scrollTop + clientHeight) / LINE));
    const from = lines.starts[first] ?? 0;
    const end = lines.starts[last + 1] ?? lines.length;
    const range = `${this.drawnText}\0${first}\0${last}`;
    if (range !== this.drawnRange) {
      this.drawnRange = range;
      this.makeRows(text, lines, first, last);
    }
    const classes = this.classesOf(from, end);
    for (const span of this.spans) span.className = `t ${classes[Number(span.dataset["t"]) - from] ?? ""}`;
    this.drawMinimap();
  }

  private makeRows(text: Text, lines: Lines, first: number, last: number): void {
    const { sequence } = this.app.state;
    this.spans = [];
    const rows: HTMLElement[] = [];
    for (let line = first; line <= last; line++) {
      const start = lines.starts[line] ?? 0;
      const row = element("div", { class: "row" }, element("span", { class: "soft number" }, count(start)));
      row.style.top = `${line * LINE}px`;
      for (let token = start; token < (lines.starts[line + 1] ?? lines.length); token++) {
        const span = element("span", { class: "t" }, visible(text.word(sequence, token)));
        span.dataset["t"] = String(token);
        this.spans.push(span);
        row.append(span);
      }
      rows.push(row);
    }
    this.sheet.replaceChildren(...rows);
  }

  private classesOf(from: number, end: number): string[] {
    const classes = new Array<string>(end - from).fill("");
    const { lights } = this;
    if (this.holdsEntries) {
      for (const { first, last, weight } of [...lights.entries].reverse()) {
        const level = Math.ceil(STEPS * Math.sqrt(Math.min(1, Math.abs(weight))));
        const name = `${weight < 0 ? "less" : "lit"}-${level}`;
        for (let at = Math.max(first, from); at <= Math.min(last, end - 1); at++) classes[at - from] = name;
      }
    }
    if (this.holdsToken && lights.token !== null && lights.token >= from && lights.token < end) {
      classes[lights.token - from] += " pinned";
    }
    if (this.cursor !== null && this.cursor >= from && this.cursor < end) classes[this.cursor - from] += " cursor";
    return classes;
  }

  private drawMinimap(): void {
    const { lines, lights } = this;
    const height = this.scroller.clientHeight;
    const context = fitCanvas(this.minimap, 28, height);
    if (!lines) return;
    const y = (token: number): number => (height * token) / Math.max(1, lines.length);
    const style = getComputedStyle(this.root);
    const whole = Math.max(1, lines.starts.length * LINE);
    context.fillStyle = style.getPropertyValue("--line");
    context.fillRect(0, (height * this.scroller.scrollTop) / whole, 28, Math.max(3, (height * height) / whole));
    if (this.holdsEntries) {
      for (const { first, last, weight } of lights.entries) {
        context.globalAlpha = 0.25 + 0.75 * Math.sqrt(Math.min(1, Math.abs(weight)));
        context.fillStyle = style.getPropertyValue(weight < 0 ? "--less" : "--lit");
        const size = Math.sqrt(Math.min(1, Math.abs(weight))) * 22;
        context.fillRect(3, y(first), size, Math.max(2, y(last + 1) - y(first)));
      }
    }
    context.globalAlpha = 1;
    if (this.holdsToken && lights.token !== null) {
      context.fillStyle = style.getPropertyValue("--accent");
      context.fillRect(0, y(lights.token) - 1, 28, 2);
    }
  }

  // ---- input ------------------------------------------------------------------------------------

  private jump(event: PointerEvent): void {
    if (!this.lines) return;
    const box = this.minimap.getBoundingClientRect();
    const share = (event.clientY - box.top) / box.height;
    this.scroller.scrollTop = share * this.lines.starts.length * LINE - this.scroller.clientHeight / 2;
  }

  private keyed(event: KeyboardEvent): void {
    const { lines } = this;
    if (!lines?.length) return;
    const pinned = this.holdsToken ? this.app.state.token : null;
    const at = this.cursor ?? pinned ?? lines.starts[Math.floor(this.scroller.scrollTop / LINE)] ?? 0;
    const line = lineOf(lines, at);
    const moved: Record<string, number> = {
      ArrowLeft: at - 1,
      ArrowRight: at + 1,
      ArrowUp: (lines.starts[line - 1] ?? 0) + at - (lines.starts[line] ?? 0),
      ArrowDown: (lines.starts[line + 1] ?? lines.length) + at - (lines.starts[line] ?? 0),
    };
    if (event.key === "Enter" || event.key === " ") {
      this.app.pin(at, this.direction);
    } else if (event.key === "Escape") {
      this.app.pin(null);
    } else {
      const next = moved[event.key];
      if (next === undefined) return;
      this.cursor = Math.min(lines.length - 1, Math.max(0, next));
      this.scrollTo(this.cursor);
      this.app.hover(this.cursor, this.direction);
      this.drawLines();
    }
    event.preventDefault();
    event.stopPropagation();
  }

  get lineCount(): number {
    return this.lines?.starts.length ?? 0;
  }
}

function tokenOf(target: EventTarget | null): number | null {
  const token = (target as HTMLElement | null)?.closest<HTMLElement>("[data-t]")?.dataset["t"];
  return token === undefined ? null : Number(token);
}
