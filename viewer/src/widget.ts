/** The model of a notebook's widget: traits in sync with Python, and exact rows from the kernel. */

import type { App } from "./app";
import type { PageMeta } from "./contract";
import { DARK } from "./dom";
import { type ExactRow, type RowAsker, Source } from "./source";

export interface WidgetModel {
  get(name: string): unknown;
  set(name: string, value: unknown): void;
  save_changes(): void;
  on(event: string, act: (...given: never[]) => void): void;
  send(content: unknown): void;
}

interface Reply extends Partial<ExactRow> {
  id: number;
  refused?: string;
}

/** Return the data of a widget: binary traits, and rows that the kernel computes. */
export function widgetSource(model: WidgetModel): Source {
  const blobs = model.get("blobs") as Record<string, DataView | undefined>;
  const read = (name: string): Uint8Array<ArrayBuffer> | null => {
    const view = blobs[name];
    return view ? new Uint8Array(view.buffer as ArrayBuffer, view.byteOffset, view.byteLength).slice() : null;
  };
  return new Source(model.get("meta") as PageMeta, read, rowAsker(model));
}

function rowAsker(model: WidgetModel): RowAsker | null {
  if (!model.get("computes_rows")) return null;
  const waiting = new Map<number, { answer: (row: ExactRow) => void; refuse: (why: Error) => void }>();
  // The kernel answers every view of the widget: each view counts from a number of its own.
  let last = Math.floor(Math.random() * 2 ** 48);
  model.on("msg:custom", (reply: Reply) => {
    const asked = waiting.get(reply.id);
    waiting.delete(reply.id);
    if (reply.keys && reply.weights) asked?.answer({ keys: reply.keys, weights: reply.weights });
    else asked?.refuse(new Error(reply.refused ?? "no row"));
  });
  return (...row) =>
    new Promise((answer, refuse) => {
      last += 1;
      waiting.set(last, { answer, refuse });
      model.send({ row, id: last });
    });
}

/** Keep the chosen head and `selected_head` the same. */
export function followWidget(model: WidgetModel, app: App): void {
  const chosen = (): [number, number] => [app.state.layer, app.state.head];
  const isHere = (head: unknown): boolean =>
    Array.isArray(head) && head[0] === app.state.layer && head[1] === app.state.head;
  app.onChange = () => {
    if (isHere(model.get("selected_head"))) return;
    model.set("selected_head", chosen());
    model.save_changes();
  };
  model.on("change:selected_head", () => {
    const head = model.get("selected_head");
    if (!Array.isArray(head) || isHere(head)) return;
    const [layer, number] = head as [number, number];
    if (app.scan.layers[layer]?.heads.includes(number)) app.choose({ layer, head: number });
  });
  const first = model.get("selected_head");
  // The page sends no head of its own at the start: Python may be about to choose another.
  if (Array.isArray(first) && !isHere(first)) app.choose({ layer: first[0] as number, head: first[1] as number });
}

/** Return the theme of the notebook, JupyterLab's or VS Code's; null if the system's is taken. */
function themeOf(body: HTMLElement): "light" | "dark" | null {
  const { jpThemeLight, vscodeThemeKind } = body.dataset;
  if (jpThemeLight) return jpThemeLight === "false" ? "dark" : "light";
  if (vscodeThemeKind) return vscodeThemeKind.endsWith("light") ? "light" : "dark";
  return null;
}

/** Give an element the theme and the keys of a notebook, and draw again in another; the returned function ends this. */
export function settle(root: HTMLElement, draw: () => void): () => void {
  // Else "x" would cut the cell.
  root.dataset["lmSuppressShortcuts"] = "true";
  root.addEventListener("keydown", (event) => event.stopPropagation());
  const follow = (): void => {
    const before = root.dataset["theme"];
    const theme = themeOf(document.body);
    if (theme) root.dataset["theme"] = theme;
    else delete root.dataset["theme"];
    if (root.dataset["theme"] !== before) draw();
  };
  const observer = new MutationObserver(follow);
  observer.observe(document.body, { attributes: true });
  DARK.addEventListener("change", draw);
  follow();
  return () => {
    observer.disconnect();
    DARK.removeEventListener("change", draw);
  };
}
