/** The view as files: figures for print, numbers as CSV, and the lines of Python that draw the same. */

import type { App } from "../app";
import { button, element } from "../dom";
import { gridFigure, wordFigure } from "../figures/grid";
import { mapFigure } from "../figures/map";
import { toPng, toSvg } from "../figures/sheet";
import { tokenFigure } from "../figures/token";
import { type HeadValue, allHeads, compared, nameOf } from "../heads";
import { gridLines, mapLines, tokenLines } from "../python";
import { endsOf } from "../maps";
import type { Seen } from "../view";
import type { Grid } from "./grid";

type Format = "svg" | "png" | "csv";

const FORMATS: readonly Format[] = ["svg", "png", "csv"];
const STORED = "Numbers: each weight with the least and the most that it may be.";
const SAVED = "scan.save(path) writes the file that Python loads; headwise scan writes it with --out DIR, as DIR/scan.safetensors.";

/** Something that the page shows; without a figure there is nothing of it. */
interface Subject {
  name: string;
  title: string;
  figure: () => SVGSVGElement | null;
  numbers: () => string;
  python: () => string | null;
}

export class Export {
  readonly dialog = element("dialog", { class: "export", "data-part": "export", "aria-label": "export" });
  readonly opener = button("export", { "data-part": "export-opener" }, () => this.open());
  private readonly subjects: Subject[];

  constructor(
    private readonly app: App,
    private readonly grid: Grid,
  ) {
    this.subjects = [
      { name: "map", title: "The map", figure: () => mapFigure(app), numbers: () => this.mapNumbers(), python: () => mapLines(app) },
      {
        name: "heads", title: "All heads", figure: () => gridFigure(app, grid), numbers: () => this.headNumbers(),
        python: () => gridLines(app, grid.comparison),
      },
      {
        name: "word", title: "This word, all heads", figure: () => wordFigure(app, grid.links), numbers: () => this.wordNumbers(),
        python: () => null,
      },
      { name: "token", title: "The token", figure: () => tokenFigure(app), numbers: () => this.tokenNumbers(), python: () => tokenLines(app) },
    ];
  }

  /** List what is shown now; where there is nothing to draw, there is no choice. */
  private open(): void {
    const rows = this.subjects.flatMap((subject) => (subject.figure() ? [this.row(subject)] : []));
    const close = button("close", {}, () => this.dialog.close());
    const link = button("copy link", { "data-part": "copy-link" }, () => void navigator.clipboard?.writeText(this.app.link).then(() => (link.textContent = "copied")));
    this.dialog.replaceChildren(element("h2", {}, "Export"), ...rows,
      element("p", { class: "soft small" }, STORED), element("p", { class: "soft small" }, SAVED), element("div", { class: "line" }, close, link));
    this.dialog.showModal();
  }

  private row(subject: Subject): HTMLElement {
    const row = element("div", { class: "subject", "data-subject": subject.name });
    const files = FORMATS.map((format) =>
      button(format.toUpperCase(), { "data-format": format, "aria-label": `${subject.title} as ${format.toUpperCase()}` }, () => void this.save(subject, format)));
    row.append(element("div", { class: "line" }, element("h3", {}, subject.title), ...files));
    const lines = subject.python();
    if (lines) {
      const copy = button("copy", { "aria-label": `copy the Python of ${subject.title.toLowerCase()}` }, () => void navigator.clipboard?.writeText(lines));
      row.append(element("div", { class: "line python" }, element("code", {}, lines), copy));
    }
    return row;
  }

  private async save(subject: Subject, format: Format): Promise<void> {
    const { meta, shown } = this.app;
    const name = `${meta.title}-${nameOf(shown)}-${subject.name}`.replace(/[^\w.-]+/g, "-");
    const figure = subject.figure();
    if (format === "csv") download(`${name}.csv`, new Blob([subject.numbers()], { type: "text/csv" }));
    else if (figure && format === "svg") download(`${name}.svg`, new Blob([toSvg(figure)], { type: "image/svg+xml" }));
    else if (figure) download(`${name}.png`, await toPng(figure));
  }

  // ---- numbers ------------------------------------------------------------------------------------

  private mapNumbers(): string {
    const { app } = this;
    const map = app.loaded?.map;
    const [down, across] = app.light.axes() ?? [];
    if (!map || !down || !across) return "";
    const rows = Array.from({ length: map.rows * map.cols }, (_, at) => [
      ...down.tokens(Math.floor(at / map.cols)),
      ...across.tokens(at % map.cols),
      ...withEnds(map.values[at] ?? 0, map.errors?.[at]),
    ]);
    const last = app.state.mode === "diff" ? "B - A" : "weight";
    return table(["first query", "last query", "first key", "last key", last, ...ENDS], rows);
  }

  private headNumbers(): string {
    const { app } = this;
    const { scan, meta } = app;
    const second = meta.scans[1];
    const columns = scan.statistics.flatMap((statistic): [string, HeadValue[]][] => {
      const { name } = statistic;
      if (!second || statistic.is_change) return [[name, allHeads(scan, statistic)]];
      return [[`${name} A`, allHeads(scan, statistic)], [`${name} B`, compared([scan, second], name, "B", (head) => app.partner(head))]];
    });
    const rows = allHeads(scan, null).map(({ layer, head }, n) => [layer, head, ...columns.map(([, heads]) => heads[n]?.value ?? "")]);
    return table(["layer", "head", ...columns.map(([name]) => name)], rows);
  }

  private wordNumbers(): string {
    const { links } = this.grid;
    const isChange = this.app.linkMode === "diff";
    const rows = (links.answers?.links ?? []).map((link) => {
      const { word, sentence } = links.facts(link.layer, link, false);
      const [value, low, high] = isChange ? withEnds(link.weight, 2 * MOST_ERROR) : withEnds(link.weight, undefined);
      const isOpen = link.bound === "at least";
      const ends = link.bound === "at most" ? [isChange ? -high : 0, high] : [isOpen && link.weight < 0 ? -1 : low, isOpen && link.weight > 0 ? 1 : high];
      return [link.layer, link.head, word, value, ...ends, link.bound, sentence];
    });
    return table(["layer", "head", "word", isChange ? "B - A" : "weight", ...ENDS, "bound", "sentence"], rows);
  }

  private tokenNumbers(): string {
    const { app } = this;
    const isPair = app.state.mode === "both";
    const views: Seen[] = isPair ? [app, app.beside] : [app];
    const rows = views.flatMap(({ light: { lights }, loaded }, n) => {
      const text = lights.what === "keys" ? loaded?.keys : loaded?.queries;
      return lights.entries.map(({ first, last, weight, error }) => [
        ...(isPair ? ["AB"[n] ?? ""] : []),
        first, last, first === last ? (text?.word(app.state.sequence, first) ?? "") : "",
        ...withEnds(weight, lights.exact === "row" ? 0 : error),
      ]);
    });
    return table([...(isPair ? ["head"] : []), "first", "last", "token", app.state.mode === "diff" ? "B - A" : "weight", ...ENDS], rows);
  }
}

const ENDS = ["at least", "at most"];
const ROUNDING = 5e-5; // of five digits
const MOST_ERROR = 1 / 255; // of a stored weight, half a step of the root at 1

/** Return a value in the digits that it has, with the ends of what is known of it: a stored weight stands for half a step around. */
function withEnds(value: number, error: number | undefined): [value: number, low: number, high: number] {
  const [low, high] = error === undefined ? endsOf(value) : [value - error, value + error];
  // The ends are rounded outwards.
  const outward = (end: number, sign: number): number => Number((end + sign * ROUNDING * Math.abs(end)).toPrecision(5));
  return [Number(value.toPrecision(4)), outward(low, -1), outward(high, 1)];
}

function table(columns: string[], rows: (string | number)[][]): string {
  return [columns, ...rows].map((row) => row.map(quoted).join(",")).join("\n") + "\n";
}

/** Quote a cell as RFC 4180 has it. A text that a spreadsheet would run begins with an apostrophe. */
function quoted(cell: string | number): string {
  if (typeof cell === "number") return String(cell);
  const text = /^[=+\-@\t\r]/.test(cell) ? `'${cell}` : cell;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function download(name: string, blob: Blob): void {
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
