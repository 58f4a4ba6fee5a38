/** Small helpers for elements: attributes, canvases in device pixels, waiting for a frame. */

type Attributes = Record<string, string | number | boolean | null>;
type Child = Node | string | null;

/** Return an element with attributes and children; null and false leave an attribute out. */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Return an element of SVG with attributes and children. */
export function shape(tag: string, attributes: Record<string, string | number> = {}, ...children: (Node | string)[]): SVGElement {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, typeof value === "number" ? String(Number(value.toFixed(3))) : value);
  }
  made.append(...children);
  return made;
}

export function button(label: string, attributes: Attributes, act: () => void): HTMLButtonElement {
  const made = element("button", { type: "button", ...attributes }, label);
  made.addEventListener("click", act);
  return made;
}

/** Return a labelled select; `options` are [value, label]. */
export function select(
  label: string,
  options: [value: string, label: string][],
  act: (value: string) => void,
): HTMLSelectElement {
  const made = element("select", { "aria-label": label });
  setOptions(made, options);
  made.addEventListener("change", () => act(made.value));
  return made;
}

export function setOptions(target: HTMLSelectElement, options: [string, string][]): void {
  target.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
}

/** Fit a canvas to its box in device pixels, and return a context in CSS pixels. */
export function fitCanvas(
  canvas: HTMLCanvasElement,
  width: number,
  height: number,
): CanvasRenderingContext2D {
  const ratio = window.devicePixelRatio || 1;
  const across = Math.max(1, Math.round(width * ratio));
  const down = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
  }
  const context = canvas.getContext("2d");
  if (!context) throw new Error("this browser gives no 2d canvas");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.imageSmoothingEnabled = false;
  return context;
}

/** The scheme of the system, which may change. */
export const DARK = matchMedia("(prefers-color-scheme: dark)");

/** True on dark paper, of the system or of a notebook. */
export const isDark = (within: Element): boolean => getComputedStyle(within).getPropertyValue("--is-dark") === "1";

/** Return a function that runs `act` at most once a frame, with the last arguments. */
export function eachFrame<A extends unknown[]>(act: (...given: A) => void): (...given: A) => void {
  let last: A | null = null;
  return (...given) => {
    if (last === null) {
      requestAnimationFrame(() => {
        const now = last;
        last = null;
        if (now) act(...now);
      });
    }
    last = given;
  };
}

/** True on a phone, where one part of the page is shown at a time. */
export const hasTabs = (within: HTMLElement): boolean =>
  within.closest(".headwise")?.querySelector(".tabs")?.checkVisibility() ?? false;

const LONG_MS = 500; // of a long press
const STILL = 10; // pixels that a finger may move in it

/** Call `act` with what a finger rests on; if it returns true, the press is no click. */
export function onLongPress(target: HTMLElement, act: (on: EventTarget | null) => boolean): void {
  let timer = 0;
  let from = [0, 0];
  let isDone = false;
  const stop = (): void => window.clearTimeout(timer);
  target.addEventListener("pointerdown", (event) => {
    stop();
    isDone = false;
    if (event.pointerType !== "touch") return;
    from = [event.clientX, event.clientY];
    timer = window.setTimeout(() => {
      isDone = act(event.target);
    }, LONG_MS);
  });
  target.addEventListener("pointermove", (event) => {
    if (Math.hypot(event.clientX - (from[0] ?? 0), event.clientY - (from[1] ?? 0)) > STILL) stop();
  });
  for (const end of ["pointerup", "pointercancel"]) target.addEventListener(end, stop);
  for (const kind of ["click", "contextmenu"]) {
    target.addEventListener(kind, (event) => {
      if (!isDone) return;
      event.preventDefault();
      event.stopImmediatePropagation();
    }, true);
  }
}

/** Move the focus among the buttons of a group by arrow keys, so that the group is one tab stop. */
export function rovingFocus(group: HTMLElement, columns: () => number, kind = "button"): void {
  group.addEventListener("keydown", (event) => {
    const from = (event.target as Element).closest<HTMLButtonElement>(kind);
    if (!from) return;
    const steps: Record<string, number> = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -columns(),
      ArrowDown: columns(),
    };
    const step = steps[event.key];
    if (step === undefined) return;
    const buttons = [...group.querySelectorAll<HTMLButtonElement>(`${kind}:not([disabled])`)];
    let at = buttons.indexOf(from) + step;
    while (buttons[at]?.classList.contains("gap")) at += step;
    const next = buttons[at];
    if (!next) return;
    event.preventDefault();
    event.stopPropagation();
    if (from.tabIndex === 0) for (const each of buttons) each.tabIndex = each === next ? 0 : -1;
    next.focus();
    if (group.dataset["follow"] !== undefined) next.click();
  });
}
