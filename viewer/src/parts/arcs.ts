/** Arcs over a text, from the token that looks to the ones that it looks at. */

import { shape } from "../dom";
import { percent } from "../format";

const SVG = "http://www.w3.org/2000/svg";
const WIDEST = 4; // of a line, in pixels
const HIGHEST = 20; // of an arc over its line

const BAR = 16; // of the longest bar in the margin, in pixels
export const MOST_ARCS = 12;

/** An arc between two boxes of the page. */
export interface Arc {
  from: DOMRect;
  to: DOMRect;
  weight: number;
}

export class Arcs {
  readonly root = document.createElementNS(SVG, "svg");

  constructor() {
    this.root.setAttribute("class", "arcs");
    this.root.setAttribute("aria-hidden", "true");
  }

  /**
   * Draw arcs, the strongest first, over the part of a text from `top` on that is `height` pixels high. Those beyond
   * the most are a bar in the margin of their line, which draws the strongest of them under the pointer.
   */
  draw(arcs: Arc[], top: number, height: number): void {
    this.root.style.top = `${top}px`;
    this.root.style.height = `${height}px`;
    const box = this.root.getBoundingClientRect();
    const lines = new Map<number, Arc[]>();
    for (const arc of arcs.slice(MOST_ARCS)) lines.set(arc.to.top, [...(lines.get(arc.to.top) ?? []), arc]);
    const sums = [...lines].map(([, rest]): [Arc[], number] => [rest, rest.reduce((sum, { weight }) => sum + Math.abs(weight), 0)]);
    const most = Math.max(...sums.map(([, sum]) => sum));
    this.root.replaceChildren(...arcs.slice(0, MOST_ARCS).map((arc) => pathOf(arc, box)), ...sums.map(([rest, sum]) => this.bar(rest, sum, sum / most, box)));
  }

  private bar(rest: Arc[], sum: number, share: number, box: DOMRect): SVGElement {
    const [first] = rest as [Arc];
    const width = Math.max(2, BAR * share);
    const words = `and ${rest.length} more in this line, ${percent(sum)} together`;
    const bar = shape("rect", { class: "rest", x: box.width - width - 2, y: first.to.top - box.top + 4, width, height: first.to.height - 8 }, shape("title", {}, words));
    bar.addEventListener("pointerenter", () => {
      const path = pathOf(first, box);
      this.root.prepend(path);
      bar.addEventListener("pointerleave", () => path.remove(), { once: true });
    });
    return bar;
  }
}

function pathOf({ from, to, weight }: Arc, box: DOMRect): SVGPathElement {
  const path = document.createElementNS(SVG, "path");
  const [upper, lower] = from.top <= to.top ? [from, to] : [to, from];
  const middle = (rect: DOMRect): number => (rect.left + rect.right) / 2 - box.left;
  const [x1, x2] = [middle(upper), middle(lower)];
  const y2 = lower.top - box.top;
  if (lower.top - upper.top < lower.height / 2) {
    const high = Math.min(HIGHEST, 8 + Math.abs(x2 - x1) / 8);
    // Over the line; under the first one, which has no room above it.
    const [y, turn] = y2 < HIGHEST / 2 ? [lower.bottom - box.top, y2 + lower.height + high] : [y2, y2 - high];
    path.setAttribute("d", `M${x1} ${y}C${x1} ${turn} ${x2} ${turn} ${x2} ${y}`);
  } else {
    const y1 = upper.bottom - box.top;
    const bend = Math.min(HIGHEST, (y2 - y1) / 2 + 4);
    path.setAttribute("d", `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`);
  }
  path.setAttribute("stroke-width", String(1 + (WIDEST - 1) * Math.min(1, Math.abs(weight))));
  if (weight < 0) path.setAttribute("class", "less");
  return path;
}
