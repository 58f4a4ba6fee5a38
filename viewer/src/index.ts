/** The viewer: of a page that `headwise` wrote, or of a notebook's widget. */

import { App } from "./app";
import type { PageMeta } from "./contract";
import { DARK, button, element } from "./dom";
import { nameOf } from "./heads";
import { positionOf } from "./maps";
import { Compare } from "./parts/compare";
import { Export } from "./parts/export";
import { Facts } from "./parts/facts";
import { Grid } from "./parts/grid";
import { Header } from "./parts/header";
import { Keys } from "./parts/keys";
import { MapPart } from "./parts/map_part";
import { Pinned } from "./parts/pinned";
import { Search } from "./parts/search";
import { TextPane } from "./parts/text_pane";
import { Source, pageBlobs } from "./source";
import { type Tab, showsLinks } from "./state";
import { type WidgetModel, followWidget, settle, widgetSource } from "./widget";

const [HEAD_ROOM, HEAD_ROW] = [98, 28]; // pixels of what stands over the heads of a layer, and of these
const OTHERS = 420; // pixels of what stands over the heads of a page, and of the text under them
const MOST_HEADS = 12; // that are named as heads with single tokens
const TABS: [Tab, string][] = [["heads", "Heads"], ["map", "Map"], ["facts", "Facts"], ["text", "Text"]];

/** Build the app in an element. */
function mount(root: HTMLElement, app: App, keysOf: HTMLElement | Document): void {
  const role = keysOf === document ? "main" : null;
  const search = new Search(app);
  const tools = element("div", { class: "tools" });
  const header = new Header(app, tools);
  const keys = new Keys(app, search, header);
  const compare = new Compare(app);
  const map = new MapPart(app, compare.root, command(app));
  const grid = new Grid(app);
  const files = new Export(app, grid);
  tools.append(files.opener, keys.opener);
  const facts = new Facts(app);
  const pinned = new Pinned(app);
  const text = new TextPane(app, pinned, search);
  const tabs = tabList(app, root);
  const parts = [header.root, tabs.root, grid.root, map.root, text.root, facts.root, keys.dialog, files.dialog];
  root.replaceChildren(element("div", { class: "app", role }, ...parts));
  app.parts.push(header, tabs, grid, compare, map, facts, search, pinned, text);
  app.onLight = (lights) => {
    map.lit();
    text.lit(lights);
  };
  keys.listen(keysOf);
}

/** The heads of which the page holds single tokens, and the command that stores more. */
function command(app: App): HTMLElement {
  const code = element("code");
  const held = element("p", { class: "small" });
  const copy = button("copy", {}, () => void navigator.clipboard?.writeText(code.textContent ?? ""));
  const root = element("details", { class: "command" }, element("summary", {}, "Single tokens of this head"), held, code, copy);
  app.parts.push({
    update: () => {
      const { layer, meta, scan, state } = app;
      const here = layer?.top[positionOf(layer, state.head)] ?? 0;
      const whole = scan.layers.flatMap((each, index) =>
        each.heads.filter((_, at) => each.top[at] === scan.ranks).map((head) => nameOf({ layer: index, head })));
      root.hidden = !meta.command || !layer || here === scan.ranks || app.light.hasSingleTokens;
      const more = whole.length > MOST_HEADS ? ` and ${whole.length - MOST_HEADS} more` : "";
      const named = `${whole.slice(0, MOST_HEADS).join(", ")}${more}`;
      const most = `the ${scan.ranks} largest of heads ${named}`;
      held.textContent = here
        ? `This page holds the largest weight of every token for all heads${named ? `, and ${most}` : ""}. For all:`
        : `This page holds single tokens of ${named ? `heads ${named}` : "no head"}. For this head:`;
      code.textContent = meta.command?.replace("{heads}", here ? "all" : nameOf(state)) ?? "";
    },
  });
  return root;
}

function tabList(app: App, root: HTMLElement): { root: HTMLElement; update(): void } {
  const list = element("div", { class: "tabs", role: "group", "aria-label": "parts of the page" });
  for (const [tab, words] of TABS) {
    const choice = button(words, {}, () => app.set({ tab }, "replace"));
    choice.dataset["tab"] = tab;
    list.append(choice);
  }
  return {
    root: list,
    update: () => {
      // The text stays where the heads left it; a page that opens with one word has the height of numbers.
      const isLinks = showsLinks(app.state);
      const height = root.querySelector<HTMLElement>(".heads")?.getBoundingClientRect().height ?? 0;
      if (isLinks && !root.hasAttribute("data-links")) root.style.setProperty("--row", `${app.isDrawn ? height : Math.max(160, Math.min(HEAD_ROOM + HEAD_ROW * app.scan.layers.length, root.clientHeight - OTHERS))}px`);
      root.toggleAttribute("data-links", isLinks);
      root.dataset["tab"] = app.state.tab;
      root.toggleAttribute("data-pair", app.state.mode === "both" && app.state.subject === "head");
      root.toggleAttribute("data-list", app.state.order === "value");
      for (const choice of list.querySelectorAll("button")) {
        choice.setAttribute("aria-pressed", String(choice.dataset["tab"] === app.state.tab));
      }
    },
  };
}

// ---- a page ----------------------------------------------------------------------------------------

declare global {
  interface Window {
    headwise?: { state(): Record<string, unknown>; app: App };
  }
}

async function startPage(root: HTMLElement, meta: PageMeta): Promise<void> {
  const app = new App(new Source(meta, pageBlobs(document)), true);
  root.classList.add("page");
  mount(root, app, document);
  window.headwise = { state: () => app.dump(), app };
  // The empty parts appear first, and no task of the start is long.
  await new Promise((resume) => setTimeout(resume));
  await app.refresh();
  DARK.addEventListener("change", () => void app.refresh());
  performance.mark("headwise-ready");
}

const pageRoot = document.querySelector<HTMLElement>("#headwise");
const pageMeta = document.querySelector("#headwise-meta")?.textContent;
if (pageRoot && pageMeta) void startPage(pageRoot, JSON.parse(pageMeta) as PageMeta);

// ---- a notebook ------------------------------------------------------------------------------------

/** Called by anywidget for each view of the widget; the returned function, when the view is closed. */
function render({ model, el }: { model: WidgetModel; el: HTMLElement }): () => void {
  const app = new App(widgetSource(model), false);
  const root = element("div", { class: "headwise" });
  root.style.setProperty("--height", `${Number(model.get("height")) || 800}px`);
  el.append(root);
  mount(root, app, root);
  followWidget(model, app);
  void app.refresh();
  return settle(root, () => void app.refresh());
}

export default { render };
