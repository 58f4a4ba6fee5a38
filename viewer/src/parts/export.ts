/** The view as files: the map as PNG and SVG, numbers as CSV. */

import type { App } from "../app";
import { element, select } from "../dom";
import { allHeads, nameOf } from "../heads";
import type { MapPane } from "./map";

const SCALE = 2; // pixels of a picture for each pixel of the page

type Choice = "png" | "svg" | "map" | "heads" | "lit";

const CHOICES: [Choice, string][] = [
  ["png", "map as PNG"],
  ["svg", "map as SVG"],
  ["map", "map as CSV"],
  ["heads", "heads as CSV"],
  ["lit", "lit tokens as CSV"],
];

export class Export {
  readonly root: HTMLSelectElement;

  constructor(
    private readonly app: App,
    private readonly map: MapPane,
  ) {
    this.root = select("export", [["", "export …"], ...CHOICES], (value) => {
      this.root.value = "";
      void this.save(value as Choice);
    });
    this.root.setAttribute("data-part", "export");
  }

  private get name(): string {
    const { meta, state } = this.app;
    return `${meta.title}-${nameOf(state)}`.replace(/[^\w.-]+/g, "-");
  }

  private async save(choice: Choice): Promise<void> {
    if (choice === "png") download(`${this.name}.png`, await this.png());
    else if (choice === "svg") download(`${this.name}.svg`, new Blob([this.svg()], { type: "image/svg+xml" }));
    else download(`${this.name}-${choice}.csv`, new Blob([this.csv(choice)], { type: "text/csv" }));
  }

  /** Return the axes over the map as they are shown, as a picture of its own. */
  private svg(): string {
    const axes = this.map.axes.cloneNode(true) as SVGSVGElement;
    const canvas = this.map.canvas;
    const image = document.createElementNS("http://www.w3.org/2000/svg", "image");
    image.setAttribute("href", canvas.toDataURL("image/png"));
    image.setAttribute("x", String(canvas.offsetLeft));
    image.setAttribute("y", String(canvas.offsetTop));
    image.setAttribute("width", String(canvas.clientWidth));
    image.setAttribute("height", String(canvas.clientHeight));
    image.setAttribute("image-rendering", "pixelated");
    axes.prepend(image);
    axes.removeAttribute("aria-hidden");
    // The page's style does not travel with the picture.
    const ink = getComputedStyle(this.map.root).color;
    for (const text of axes.querySelectorAll("text")) text.setAttribute("fill", ink);
    axes.setAttribute("color", ink);
    axes.setAttribute("font-family", "sans-serif");
    axes.setAttribute("font-size", "11");
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = `${this.app.meta.title}, ${this.app.nameOf(this.app.shown)}. ${this.app.light.badge}`;
    axes.prepend(title);
    return new XMLSerializer().serializeToString(axes);
  }

  /** Return the same picture in pixels, on the page's paper. */
  private async png(): Promise<Blob> {
    const picture = new Image();
    const { width, height } = this.map.axes.getBoundingClientRect();
    picture.src = `data:image/svg+xml,${encodeURIComponent(this.svg())}`;
    await picture.decode();
    const canvas = element("canvas", { width: SCALE * width, height: SCALE * height });
    const context = canvas.getContext("2d");
    if (context) {
      context.fillStyle = getComputedStyle(this.map.root).getPropertyValue("--paper");
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    }
    return new Promise((resolve) => canvas.toBlob((blob) => resolve(blob ?? new Blob())));
  }

  private csv(choice: Exclude<Choice, "png" | "svg">): string {
    const { app } = this;
    const { map, queries, keys } = app.loaded ?? {};
    if (choice === "heads") {
      const columns = app.scan.statistics;
      const values = columns.map((statistic) => allHeads(app.scan, statistic).map(({ value }) => value ?? ""));
      const rows = allHeads(app.scan, null).map(({ layer, head }, n) => [layer, head, ...values.map((column) => column[n] ?? "")]);
      return table(["layer", "head", ...columns.map(({ name }) => name)], rows);
    }
    if (choice === "lit") {
      const text = app.light.lights.what === "keys" ? keys : queries;
      const rows = app.light.lights.entries.map(({ first, last, weight }) => [
        first, last, first === last ? (text?.word(app.state.sequence, first) ?? "") : "", weight,
      ]);
      return table(["first", "last", "token", "weight"], rows);
    }
    const [down, across] = app.light.axes() ?? [];
    if (!map || !down || !across) return "";
    const rows = Array.from({ length: map.rows * map.cols }, (_, at) => [
      ...down.tokens(Math.floor(at / map.cols)),
      ...across.tokens(at % map.cols),
      map.values[at] ?? 0,
    ]);
    const last = app.state.mode === "diff" ? "A - B" : "weight";
    return table(["first query", "last query", "first key", "last key", last], rows);
  }
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
