/** The chosen layer in numbers: mean and spread of each statistic, beside the model's or another layer's. */

import type { App } from "../app";
import type { Scan, Statistic } from "../contract";
import { button, element, rovingFocus } from "../dom";
import { bare, labelWithUnit, long, percent } from "../format";
import { type HeadValue, allHeads, nameOf, spreadOf, statisticOf, valueOf } from "../heads";
import type { HeadId } from "../maps";
import { type Sides, changeTable, sizeOf } from "./changes";
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
    this.table.replaceChildren(other ? this.changes(own, other) : this.spreads());
    if (other) this.listPairs(own, other);
    else this.listHeads(statistic);
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

  private changes(own: Side, other: Side): HTMLElement {
    const scan = this.scanOf(other);
    const sides = this.app.scan.statistics.filter(({ is_change }) => !is_change).map((statistic): Sides => ({
      statistic,
      a: spreadOf(statistic.rows[own.layer] ?? [])?.mean ?? null,
      b: spreadOf(statisticOf(scan, statistic.name)?.rows[other.layer] ?? [])?.mean ?? null,
    }));
    return changeTable(sides, [this.nameOf(own), this.nameOf(other)], (name) => !statisticOf(scan, name));
  }

  /** List the heads of one layer with their partners in the other, the largest change first. */
  private listPairs(own: Side, other: Side): void {
    const { app } = this;
    const heads = app.scan.layers[own.layer]?.heads ?? [];
    const pairs = heads.flatMap((head) => {
      const partner = this.partner(head, other);
      return partner ? [{ layer: own.layer, head, value: this.distance(head, own, partner), partner }] : [];
    });
    this.heading.textContent = "Pairs of heads";
    const alone = heads.length - pairs.length;
    const missing = alone ? ` ${alone === 1 ? "One head has" : `${alone} heads have`} no partner.` : "";
    const how = other.scan && app.meta.matched ? "as matched" : "by number";
    this.rule.textContent = `Paired ${how}; the mean change over the statistics, each as a part of its scale.${missing}`;
    const sorted = pairs.sort((a, b) => (b.value ?? -1) - (a.value ?? -1));
    const words = ({ partner, head, value }: (typeof sorted)[number]): string => {
      const isSame = partner.layer === own.layer && partner.head === head;
      return `${isSame ? "" : `and ${app.shortName(partner)} `}${value === null ? "no value" : percent(value)}`;
    };
    this.fill(sorted, words, (pair) => {
      app.choose(pair);
      app.compareWith(pair.partner);
    });
  }

  private partner(head: number, other: Side): HeadId | null {
    if (other.scan === 1) return this.app.partner({ layer: other.layer, head });
    return this.app.scan.layers[other.layer]?.heads.includes(head) ? { ...other, head } : null;
  }

  /** Return the mean over statistics of the change between two heads, as a part of the scale. */
  private distance(head: number, own: Side, partner: HeadId): number | null {
    const scan = this.scanOf(partner);
    const sizes = this.app.scan.statistics.flatMap((statistic) => {
      if (statistic.is_change || !statisticOf(scan, statistic.name)) return [];
      const a = valueOf(this.app.scan, statistic.name, own.layer, head);
      const b = valueOf(scan, statistic.name, partner.layer, partner.head);
      const size = sizeOf({ statistic, a, b });
      return size === null ? [] : [size];
    });
    return sizes.length ? sizes.reduce((sum, size) => sum + size, 0) / sizes.length : null;
  }

  // ---- helpers ------------------------------------------------------------------------------------

  private scanOf({ scan }: { scan: number }): Scan {
    return this.app.meta.scans[scan] as Scan;
  }

  private nameOf({ scan, layer }: Side): string {
    const { meta } = this.app;
    return meta.scans.length > 1 ? `layer ${layer} ${meta.scans[scan]?.name ?? ""}` : `layer ${layer}`;
  }

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
