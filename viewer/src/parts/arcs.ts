/** Arcs over a text, from the token that looks to the ones that it looks at. */

const SVG = "http://www.w3.org/2000/svg";
const WIDEST = 4; // of a line, in pixels
const HIGHEST = 20; // of an arc over its line

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

  /** Draw arcs over the part of a text from `top` on that is `height` pixels high. */
  draw(arcs: Arc[], top: number, height: number): void {
    this.root.style.top = `${top}px`;
    this.root.style.height = `${height}px`;
    const box = this.root.getBoundingClientRect();
    this.root.replaceChildren(...arcs.map((arc) => pathOf(arc, box)));
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
