/** The scale of the colours: beside the map as the map has them, and beside the text as the text does. */

import { css } from "../colours";
import { element, isDark } from "../dom";
import { percent } from "../format";
import { LEAST } from "../view";
import { colourOf } from "./map_image";

const WEIGHTS = [0, 0.01, 0.1, 0.5, 1];
const SHARES = [-1, -0.25, 0, 0.25, 1]; // of the largest difference
export const STEPS = 10; // classes of colour, lit-1 to lit-10

/** Return the step of a token's colour by the square root of its weight, 10 for `end`; below 0 for what is less. */
export const stepOf = (weight: number, end: number): number =>
  Math.sign(weight) * Math.round(STEPS * Math.sqrt(Math.min(1, Math.abs(weight) / end)));

export const classOf = (step: number): string => `${step < 0 ? "less" : "lit"}-${Math.abs(step)}`;

export class Legend {
  readonly root: HTMLElement;

  constructor(private readonly kind: "map" | "text") {
    this.root = element("p", { class: "legend", "data-part": `${kind}-legend` });
  }

  /** Draw the scale of weights up to 1, or of differences up to the largest. */
  update(isDifference: boolean, end: number): void {
    const values = isDifference ? SHARES.map((share) => share * end) : WEIGHTS;
    const shown = values.filter((value) => this.kind === "map" || Math.abs(value) >= LEAST);
    const [low, high] = isDifference ? ["A more, %", "B more"] as const : ["weight, %", ""] as const;
    const least = `${this.kind === "map" ? "no ring" : "no tint"} under ${100 * LEAST} %`;
    const soft = (words: string, name = ""): HTMLElement => element("span", { class: `soft ${name}` }, words);
    const stops = shown.map((value) => this.stop(value, isDifference, end));
    this.root.replaceChildren(soft(low), ...stops, soft(high), soft(least, "wide"));
  }

  private stop(value: number, isDifference: boolean, end: number): HTMLElement {
    const swatch = element("span", { class: "swatch" });
    if (this.kind === "map" || isDifference) swatch.style.background = css(colourOf(value, isDifference, end, isDark(this.root)));
    else swatch.classList.add(classOf(stepOf(value, end)));
    return element("span", { class: "stop" }, swatch, String(parseFloat(percent(Math.abs(value)))));
  }
}
