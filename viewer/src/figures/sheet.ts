/** A figure for print: white paper, a title, what is drawn, and a scale. Text stays text. */

import { type RGB, css } from "../colours";
import { element, shape } from "../dom";

export const SIZE = 11; // of letters, in pixels
export const INK = "#1d2126";
export const SOFT = "#5d656e";
const PAD = 16; // around everything
const LEAST_WIDTH = 420;
const TITLE_SIZE = 15;
const FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif";
const BAR = { gap: 22, width: 14, tick: 4, least: 130, slices: 32 };
const DENSITY = 3; // pixels of a picture for each pixel of the figure

export interface Drawing {
  root: SVGElement;
  width: number;
  height: number;
}

/** What a figure says beside its drawing. */
export interface Caption {
  title: string;
  lines: string[];
  /** What the model read. */
  note: string;
}

const pen = document.createElement("canvas").getContext("2d");

/** Return the width of a text in pixels. */
export function widthOf(text: string, size = SIZE, weight = "normal"): number {
  if (!pen) return 0.6 * size * text.length;
  pen.font = `${weight} ${size}px ${FONT}`;
  return pen.measureText(text).width;
}

/** Return a text of the figure; it is in the middle of its line. */
export function label(words: string, x: number, y: number, given: Record<string, string | number> = {}): SVGElement {
  return shape("text", { x, y, "dominant-baseline": "central", fill: INK, ...given }, words);
}

/** Return the figure: the title above the drawing, the note below it. */
export function sheet(drawing: Drawing, { title, lines, note }: Caption): SVGSVGElement {
  const inner = Math.max(LEAST_WIDTH, drawing.width);
  const written: SVGElement[] = [];
  let y = PAD;
  const write = (words: string, size: number, given: Record<string, string>): void => {
    for (const line of wrapped(words, inner, size, given["font-weight"])) {
      written.push(label(line, PAD, y + size / 2, { "font-size": size, ...given }));
      y += 1.4 * size;
    }
  };
  write(title, TITLE_SIZE, { "font-weight": "bold" });
  for (const line of lines) write(line, SIZE, {});
  y += SIZE;
  const body = shape("g", { transform: `translate(${PAD},${y})` }, drawing.root);
  y += drawing.height + SIZE;
  write(note, SIZE - 1, { fill: SOFT });
  const [width, height] = [Math.ceil(inner + 2 * PAD), Math.ceil(y + PAD)];
  return shape("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, "font-family": FONT, "font-size": SIZE,
  }, shape("title", {}, title), shape("rect", { width, height, fill: "#fff" }), ...written, body) as SVGSVGElement;
}

/** Break a text at spaces to a width. */
function wrapped(words: string, width: number, size: number, weight = "normal"): string[] {
  const lines: string[] = [];
  for (const word of words.split(" ").filter(Boolean)) {
    const longer = `${lines.at(-1) ?? ""} ${word}`;
    if (lines.length && widthOf(longer, size, weight) <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

export interface Scale {
  name: string;
  /** The colour at a position from 0, below, to 1. */
  colour: (position: number) => RGB;
  stops: [position: number, words: string][];
}

/** Return a drawing with a colour bar at its right. */
export function withScale(drawing: Drawing, { name, colour, stops }: Scale, top: number): Drawing {
  const [x, height] = [drawing.width + BAR.gap, Math.max(BAR.least, drawing.height - top)];
  const slices = Array.from({ length: BAR.slices + 1 }, (_, n) => n / BAR.slices).map((position) =>
    shape("stop", { offset: position, "stop-color": css(colour(position)) }));
  const gradient = shape("linearGradient", { id: "scale", x1: 0, y1: 1, x2: 0, y2: 0 }, ...slices);
  const bar = shape("g", { transform: `translate(${x},${top})`, "data-part": "scale" },
    shape("defs", {}, gradient),
    shape("rect", { width: BAR.width, height, fill: "url(#scale)", stroke: INK, "stroke-width": 0.5 }),
    ...stops.flatMap(([position, words]) => {
      const y = (1 - position) * height;
      return [
        shape("line", { x1: BAR.width, x2: BAR.width + BAR.tick, y1: y, y2: y, stroke: INK }),
        label(words, BAR.width + BAR.tick + 3, y),
      ];
    }),
    label(name, 0, height + 1.3 * SIZE, { fill: SOFT }));
  const beside = Math.max(BAR.width + BAR.tick + 3 + Math.max(...stops.map(([, words]) => widthOf(words))), widthOf(name));
  return {
    root: shape("g", {}, drawing.root, bar),
    width: x + beside,
    height: Math.max(drawing.height, top + height + 2 * SIZE),
  };
}

// ---- files -----------------------------------------------------------------------------------------

export const toSvg = (figure: SVGSVGElement): string => new XMLSerializer().serializeToString(figure);

/** Return a figure in pixels. */
export async function toPng(figure: SVGSVGElement): Promise<Blob> {
  const picture = new Image();
  picture.src = `data:image/svg+xml,${encodeURIComponent(toSvg(figure))}`;
  await picture.decode();
  const [width, height] = [figure.getAttribute("width"), figure.getAttribute("height")].map(Number);
  const canvas = element("canvas", { width: DENSITY * (width ?? 0), height: DENSITY * (height ?? 0) });
  const context = canvas.getContext("2d");
  if (context) context.imageSmoothingEnabled = false;
  context?.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve, refuse) => {
    canvas.toBlob((blob) => (blob ? resolve(blob) : refuse(new Error("this browser gives no PNG"))));
  });
}
