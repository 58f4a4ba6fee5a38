/** The chosen layer in numbers: mean and spread of each statistic, beside the model's or another layer's. */

import type { App } from "../app";
import type { Scan, Statistic } from "../contract";
import { button, element, rovingFocus } from "../dom";
import { bare, labelWithUnit, long } from "../format";
import { type HeadValue, allHeads, nameOf, spreadOf, statisticOf, valueOf } from "../heads";
import type { HeadId } from "../maps";
import { type Dot, distributions } from "./dots";
import { spreadWords } from "./spread";

interface Side {
  scan: number;
  layer: number;
}

export class LayerFacts {
  readonly root = element("div", { class: "of-layer", "data-part": "layer" });
  private readonly title = element("h2");
  private readonly name = element("p", { class: "soft small" });
  private readonly opener = button("compare", { "data-part": "compare-layer" }, () => this.app.choosing(!this.app.isChoosing));
  private readonly table = element("div");
  private readonly heading = element("h3");
  private readonly rule = element("p", { class: "soft small" });
  private readonly list = element("div", { class: "pairs", role: "group", "aria-label": "heads of the layer" });

  constructor(private readonly app: App) {
    this.root.append(element("div", { class: "line" }, this.title, this.opener), this.name, this.heading, this.rule, this.list, this.table);
    rovingFocus(this.list, () => 1);
  }

  /** The layer that stands beside the chosen one: another, or that of the second scan. */
  private get other(): Side | null {
    const { meta, state } = this.app;
    if (state.against !== null) return { scan: 0, layer: state.against };
    return meta.scans[1]?.layers[state.layer]?.heads.length ? { scan: 1, layer: state.layer } : null;
  }

  update(): void {
    const { app, other } = this;
    const { state, statistic } = app;
    const own: Side = { scan: 0, layer: state.layer };
    this.opener.setAttribute("aria-pressed", String(app.isChoosing));
    const layers = state.against === null ? [state.layer] : [state.layer, state.against];
    this.title.textContent = other && state.against !== null ? `Layer ${layers.join(" and layer ")}` : `Layer ${state.layer}`;
    this.name.textContent = layers.map((layer) => nameOfLayer(app.scan, layer)).join("; ");
    this.table.replaceChildren(other ? this.distributions(own, other) : this.spreads());
    this.list.hidden = other !== null;
    if (!other) return this.listHeads(statistic);
    this.heading.textContent = "Every head of both";
    const names = app.meta.scans.map(({ name }) => name);
    this.rule.textContent = `${other.scan ? `A is ${names[0]}, B is ${names[1]}` : `Layer ${layers.join(" over layer ")}`}. A dot opens its head. The largest shift of the mean comes first.`;
  }

  // ---- one layer ----------------------------------------------------------------------------------

  private spreads(): HTMLElement {
    const { scan, state } = this.app;
    const head = ["mean, least to most", `layer ${state.layer}`, "all layers"].map((name) => element("th", { scope: "col" }, name));
    const rows = scan.statistics.map((statistic) => {
      const cells = [statistic.rows[state.layer] ?? [], statistic.rows.flat()].map((values) => {
        const spread = spreadOf(values);
        if (!spread) return element("td", { class: "soft" }, "no value");
        const [low, high] = [`${bare(statistic, spread.low)} to`, bare(statistic, spread.high)].map((end) => element("span", { class: "end" }, end));
        return element("td", {}, element("b", {}, bare(statistic, spread.mean)), element("br"), low ?? "", " ", high ?? "");
      });
      const isCurrent = statistic.name === state.statistic;
      return element("tr", { class: isCurrent ? "current" : null }, element("th", { scope: "row" }, labelWithUnit(statistic)), ...cells);
    });
    return element("table", { class: "changes spreads" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  }

  private listHeads(statistic: Statistic | null): void {
    const { scan, state } = this.app;
    const heads = allHeads(scan, statistic).filter(({ layer }) => layer === state.layer);
    const sorted = heads.sort((a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity));
    const spread = spreadOf(heads.map(({ value }) => value));
    this.heading.textContent = statistic ? `Heads by ${statistic.label}` : "Heads";
    this.rule.textContent = statistic ? `Layer ${state.layer}: ${spreadWords(statistic, spread)}.` : "";
    this.fill(sorted, (head) => (statistic ? long(statistic, head.value) : ""), (head) => this.app.choose(head));
  }

  // ---- two layers ---------------------------------------------------------------------------------

  /** Return the statistics of both layers, a dot for each head; that of a partner in the second scan opens the pair. */
  private distributions(own: Side, other: Side): HTMLElement {
    const { app } = this;
    const scan = app.meta.scans[other.scan] as Scan;
    const dotOf = (side: Side, head: number, name: string, open: () => void): Dot => ({
      name: app.shortName({ ...side, head }), value: valueOf(app.meta.scans[side.scan] as Scan, name, side.layer, head), open,
    });
    const sides = app.scan.statistics.filter(({ is_change, name }) => !is_change && statisticOf(scan, name)).map((statistic) => {
      const a = (app.scan.layers[own.layer]?.heads ?? []).map((head) => dotOf(own, head, statistic.name, () => app.choose({ layer: own.layer, head }, statistic.name)));
      const b = (scan.layers[other.layer]?.heads ?? []).map((head) => dotOf(other, head, statistic.name, () => this.open({ ...other, head }, statistic.name)));
      return { statistic, a, b };
    });
    return distributions(sides, other.scan ? ["A", "B"] : [own, other].map(({ layer }) => String(layer)));
  }

  /** Open a head of the other side: in the second scan that of its partner, with B shown. */
  private open({ scan, layer, head }: HeadId, statistic: string): void {
    const { app } = this;
    if (!scan) return app.choose({ layer, head }, statistic);
    const first = app.scan.layers[layer]?.heads.find((each) => app.partner({ layer, head: each })?.head === head);
    if (first === undefined) return;
    app.choose({ layer, head: first }, statistic);
    app.set({ mode: "B" }, "replace");
  }

  // ---- helpers ------------------------------------------------------------------------------------

  private fill<T extends HeadValue>(heads: T[], words: (head: T) => string, act: (head: T) => void): void {
    const choices = heads.map((head, n) => {
      const choice = button("", { tabindex: n ? -1 : 0 }, () => act(head));
      choice.append(element("b", {}, nameOf(head)), ` ${words(head)}`);
      return choice;
    });
    this.list.replaceChildren(...choices);
  }
}

function nameOfLayer(scan: Scan, layer: number): string {
  const record = scan.layers[layer];
  return `${record?.name ?? ""}${record?.kind === "cross" ? ", cross attention" : ""}`;
}
