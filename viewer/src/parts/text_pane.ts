/** The text, of which only the visible lines exist, with the lit tokens and a minimap. */

import type { App } from "../app";
import { button, eachFrame, element, fitCanvas, rovingFocus, select, setOptions } from "../dom";
import { count, percent, visible } from "../format";
import type { Direction } from "../state";
import type { Text } from "../text";
import { LineBreaker, type Lines, lineOf } from "./lines";
import type { Entry, Lights, Loaded, Part } from "../view";

const LINE = 26; // height of a line, in pixels
const GUTTER = 64; // width of the token indices
const STEPS = 10; // classes of colour, lit-1 to lit-10
const FONT = "14px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

export class TextPane implements Part {
  readonly root = element("section", { class: "text", "data-part": "text", "aria-label": "text" });
  private readonly scroller = element("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "tokens: arrow keys move, Enter pins" });
  private readonly sheet = element("div", { class: "sheet" });
  private readonly minimap = element("canvas", { class: "minimap", "data-part": "minimap", "aria-hidden": "true" });
  private readonly summary = element("p", { class: "summary", role: "status" });
  private readonly direction = element("div", { class: "modes", role: "group", "aria-label": "direction", "data-follow": "" });
  private readonly sequences: HTMLSelectElement;
  private readonly side: HTMLButtonElement;
  private readonly breaker = new LineBreaker(FONT);
  private lines: Lines | null = null;
  private lights: Lights = { token: null, what: "keys", entries: [], exact: "none" };
  private cursor: number | null = null;
  private drawnText = "";
  private showsKeys = true;
  private scrolledTo = "";
  private drawnRange = "";
  private spans: HTMLElement[] = [];

  constructor(
    private readonly app: App,
    search: HTMLElement,
  ) {
    this.sequences = select("text", [], (value) => app.set({ sequence: Number(value), token: null }));
    this.side = button("", {}, () => {
      this.showsKeys = !this.showsKeys;
      this.update(app.loaded);
    });
    for (const [what, words] of [["keys", "looks at"], ["queries", "is looked at by"]] as const) {
      const choice = button(words, {}, () => app.set({ direction: what as Direction }));
      choice.dataset["direction"] = what;
      this.direction.append(choice);
    }
    rovingFocus(this.direction, () => 1);
    this.root.append(
      element("div", { class: "line" }, this.sequences, this.side, this.direction, search, this.summary),
      element("div", { class: "pane" }, this.scroller, this.minimap),
    );
    this.scroller.append(this.sheet);
    this.listen();
  }

  private listen(): void {
    const { app } = this;
    this.scroller.addEventListener("scroll", eachFrame(() => this.drawLines()));
    this.scroller.addEventListener("pointerover", (event) => {
      const token = tokenOf(event.target);
      if (token !== null && event.pointerType !== "touch") app.hover(token, this.directionHere);
    });
    this.scroller.addEventListener("pointerleave", () => app.hover(null));
    this.scroller.addEventListener("click", (event) => {
      const token = tokenOf(event.target);
      if (token === null) return;
      this.cursor = token;
      app.pin(token, this.directionHere);
    });
    this.scroller.addEventListener("keydown", (event) => this.keyed(event));
    this.minimap.addEventListener("pointerdown", (event) => this.jump(event));
    this.minimap.addEventListener("pointermove", (event) => {
      if (event.buttons) this.jump(event);
    });
    new ResizeObserver(eachFrame(() => this.layOut(true))).observe(this.scroller);
  }

  // ---- the text and its side ----------------------------------------------------------------------

  private get isCross(): boolean {
    const layer = this.app.shownLayer;
    return layer !== null && layer.query_text !== layer.key_text;
  }

  private get text(): Text | null {
    const { loaded } = this.app;
    return (this.isCross && !this.showsKeys ? loaded?.queries : loaded?.keys) ?? loaded?.queries ?? null;
  }

  /** Under cross attention, a token of the queries' text looks, one of the keys' text is looked at. */
  private get directionHere(): Direction {
    if (!this.isCross) return this.app.state.direction;
    return this.showsKeys ? "queries" : "keys";
  }

  update(loaded: Loaded | null): void {
    const { state } = this.app;
    const { text } = this;
    const names = text?.stream.names ?? [];
    setOptions(this.sequences, names.map((name, n) => [String(n), name || `text ${n}`]));
    this.sequences.value = String(state.sequence);
    this.sequences.hidden = names.length < 2;
    this.side.hidden = !this.isCross;
    this.side.textContent = this.showsKeys ? "show the queries' text" : "show the keys' text";
    for (const choice of this.direction.querySelectorAll("button")) {
      const isHere = choice.dataset["direction"] === state.direction;
      choice.setAttribute("aria-pressed", String(isHere));
      choice.tabIndex = isHere ? 0 : -1;
    }
    this.direction.hidden = this.isCross;
    if (loaded) this.layOut(false);
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
    this.summary.textContent = this.words();
    this.follow();
    this.drawLines();
  }

  /** Scroll to a token that was pinned elsewhere. */
  private follow(): void {
    const { token } = this.app.state;
    const key = `${this.drawnText}\0${token}`;
    if (!this.lines || token === null || key === this.scrolledTo) return;
    this.scrolledTo = key;
    this.scrollTo(token);
  }

  scrollTo(token: number): void {
    if (!this.lines) return;
    const top = lineOf(this.lines, token) * LINE;
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop || top + LINE > scrollTop + clientHeight) {
      this.scroller.scrollTop = Math.max(0, top - clientHeight / 2);
    }
  }

  private words(): string {
    const { token, what, entries, exact } = this.lights;
    const { loaded, state } = this.app;
    const from = what === "keys" ? loaded?.queries : loaded?.keys;
    if (token === null) return "Point at a token to see what it looks at; click to pin it.";
    const word = `“${from?.isKnown ? visible(from.word(state.sequence, token)) : ""}” at ${count(token)}`;
    const verb = what === "keys" ? "looks at" : "is looked at by";
    const to = what === "keys" ? loaded?.keys : loaded?.queries;
    const names = entries.slice(0, 4).map((entry) => nameOfEntry(entry, to ?? null, state.sequence));
    if (!names.length) return `${word} ${verb} ${exact === "none" ? "…" : "nothing that is stored"}`;
    return `${word} ${verb} ${names.join(", ")}`;
  }

  /** Whether the shown text holds the token that looks, the lit ones, or both. */
  private get holds(): { token: boolean; entries: boolean } {
    if (!this.isCross) return { token: true, entries: true };
    const tokenIsKey = this.lights.what === "queries";
    return { token: tokenIsKey === this.showsKeys, entries: tokenIsKey !== this.showsKeys };
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
    const { holds, lights } = this;
    if (holds.entries) {
      for (const { first, last, weight } of [...lights.entries].reverse()) {
        const level = Math.ceil(STEPS * Math.sqrt(Math.min(1, Math.abs(weight))));
        const name = `${weight < 0 ? "less" : "lit"}-${level}`;
        for (let at = Math.max(first, from); at <= Math.min(last, end - 1); at++) classes[at - from] = name;
      }
    }
    if (holds.token && lights.token !== null && lights.token >= from && lights.token < end) {
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
    if (this.holds.entries) {
      for (const { first, last, weight } of lights.entries) {
        context.globalAlpha = 0.25 + 0.75 * Math.sqrt(Math.min(1, Math.abs(weight)));
        context.fillStyle = style.getPropertyValue(weight < 0 ? "--less" : "--lit");
        const size = Math.sqrt(Math.min(1, Math.abs(weight))) * 22;
        context.fillRect(3, y(first), size, Math.max(2, y(last + 1) - y(first)));
      }
    }
    context.globalAlpha = 1;
    if (this.holds.token && lights.token !== null) {
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
    const at = this.cursor ?? this.app.state.token ?? lines.starts[Math.floor(this.scroller.scrollTop / LINE)] ?? 0;
    const line = lineOf(lines, at);
    const moved: Record<string, number> = {
      ArrowLeft: at - 1,
      ArrowRight: at + 1,
      ArrowUp: (lines.starts[line - 1] ?? 0) + at - (lines.starts[line] ?? 0),
      ArrowDown: (lines.starts[line + 1] ?? lines.length) + at - (lines.starts[line] ?? 0),
    };
    if (event.key === "Enter" || event.key === " ") {
      this.app.pin(at, this.directionHere);
    } else if (event.key === "Escape") {
      this.app.pin(null);
    } else {
      const next = moved[event.key];
      if (next === undefined) return;
      this.cursor = Math.min(lines.length - 1, Math.max(0, next));
      this.scrollTo(this.cursor);
      this.app.hover(this.cursor, this.directionHere);
      this.drawLines();
    }
    event.preventDefault();
    event.stopPropagation();
  }

  dump(): object {
    return { summary: this.summary.textContent, lines: this.lines?.starts.length ?? 0 };
  }
}

function tokenOf(target: EventTarget | null): number | null {
  const token = (target as HTMLElement | null)?.closest<HTMLElement>("[data-t]")?.dataset["t"];
  return token === undefined ? null : Number(token);
}

function nameOfEntry({ first, last, weight }: Entry, text: Text | null, sequence: number): string {
  const word = (at: number): string => (text?.isKnown ? `“${visible(text.word(sequence, at))}”` : "");
  if (first === last) return `${word(first)} at ${count(first)} (${percent(weight)})`;
  return `${count(first)} to ${count(last)} (${percent(weight)})`;
}
