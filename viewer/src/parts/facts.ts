/** The chosen head in numbers: facts, place among all heads, offsets, definition, likeness. */

import { scaleLinear } from "d3-scale";
import type { App } from "../app";
import type { Scan, Statistic } from "../contract";
import { css, viridis } from "../colours";
import { button, element, fitCanvas, rovingFocus } from "../dom";
import { count, inQuotes, long, percent, visible } from "../format";
import { allHeads, nameOf, rankOf, scalePosition, statisticOf, valueOf } from "../heads";
import { type HeadId, headsBefore, positionOf } from "../maps";
import { changeTable } from "./changes";
import { thumbnail } from "./grid";
import { LayerFacts } from "./layer_facts";
import type { Loaded, Part } from "../view";

const SVG = "http://www.w3.org/2000/svg";
const PLACE_COLOUR = "#7b8590";
const ENDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1]; // of the axis of weights by offset
const PROFILE = { width: 264, height: 84, left: 4, bottom: 14 };

export class Facts implements Part {
  readonly root = element("section", { class: "facts", "aria-label": "the chosen head" });
  private readonly title = element("h2");
  private readonly list = element("div", { "data-part": "facts" });
  /** Of two heads, the first: what comes below is of it alone. */
  private readonly alone = element("h2");
  private readonly place = element("canvas", { class: "place", role: "img" });
  private readonly placeName = element("p", { class: "soft small place-name" });
  private readonly profile = element("div", { class: "profile", "data-part": "profile" });
  private readonly received = element("p", { class: "small", "data-part": "received" });
  private readonly similar = element("div", { class: "similar", "data-part": "similar", role: "group", "aria-label": "most similar heads" });
  private readonly compared = element("p", { class: "soft small", "data-part": "compared" });
  private readonly definition = element("div", { class: "small", "data-part": "definition" });
  private readonly ofHead = element("div", { class: "of-head" });
  private readonly ofLayer: LayerFacts;
  private drawn = "";

  constructor(private readonly app: App) {
    this.ofLayer = new LayerFacts(app);
    this.root.append(this.ofHead, this.ofLayer.root);
    const offsets = element("h3", {}, "Weight by offset");
    // Where there is width, three columns.
    this.ofHead.append(
      element("div", {}, this.title, this.list),
      element("div", {}, this.alone, this.placeName, this.place, offsets, this.profile, this.received),
      element("div", {}, element("h3", {}, "Most similar heads"), this.compared, this.similar, this.definition),
    );
    rovingFocus(this.similar, () => 1);
  }

  update(loaded: Loaded | null): void {
    const { state } = this.app;
    const isLayer = state.subject === "layer";
    this.root.setAttribute("aria-label", isLayer ? "the chosen layer" : "the chosen head");
    this.ofHead.hidden = isLayer;
    this.ofLayer.root.hidden = !isLayer;
    if (isLayer) {
      this.ofLayer.update();
      return;
    }
    const key = JSON.stringify([state.report, state.layer, state.head, state.statistic, state.other, state.mode]);
    if (loaded && key !== this.drawn) {
      this.drawn = key;
      this.draw(loaded);
    }
  }

  private draw(loaded: Loaded | null): void {
    if (!loaded) return;
    const { app } = this;
    const { state, statistic } = app;
    const [own, other] = [app.shortName(app.chosen), state.other && app.shortName(state.other)];
    this.title.textContent = other ? `${own} and ${other}` : `Layer ${state.layer}, head ${state.head}`;
    this.alone.textContent = app.letteredName(0, app.chosen);
    this.alone.hidden = !other;
    this.drawList();
    this.drawPlace(statistic);
    this.drawProfile(loaded);
    this.drawReceived(loaded);
    this.drawSimilar(loaded);
    this.drawDefinition(statistic);
  }

  // ---- numbers ----------------------------------------------------------------------------------

  private drawList(): void {
    if (this.app.state.other) this.drawChanges(this.app.state.other);
    else this.drawValues();
  }

  /** List how the statistics of two heads differ, the largest change first. */
  private drawChanges(other: HeadId): void {
    const { app } = this;
    const scan = app.meta.scans[other.scan] as Scan;
    const sides = app.scan.statistics.filter(({ is_change }) => !is_change).map((statistic) => ({
      statistic,
      a: valueOf(app.scan, statistic.name, app.state.layer, app.state.head),
      b: valueOf(scan, statistic.name, other.layer, other.head),
    }));
    this.list.replaceChildren(changeTable(sides, (name) => !statisticOf(scan, name)));
  }

  private drawValues(): void {
    const { app } = this;
    const { scan, statistic, layer } = app;
    const shown = scan.statistics.filter((each) => each.first || each === statistic);
    const rows = shown.flatMap((each) => {
      const value = valueOf(scan, each.name, app.state.layer, app.state.head);
      const row = element("dd", {}, long(each, value), this.rank(each, value));
      return [element("dt", { class: each === statistic ? "current" : "" }, each.label), row];
    });
    const name = `${layer?.name ?? ""}${layer?.kind === "cross" ? ", cross attention" : ""}`;
    this.list.replaceChildren(element("dl", {}, ...rows, element("dt", {}, "layer"), element("dd", { class: "soft" }, ...breakable(name))));
  }

  private rank(statistic: Statistic, value: number | null): HTMLElement | null {
    if (value === null) return null;
    const [rank, of] = rankOf(allHeads(this.app.scan, statistic), value);
    return of > 1 ? element("span", { class: "soft" }, ` · ${ordinal(rank)} of ${count(of)}`) : null;
  }

  /** Draw a line for each head at its value, and the chosen head's line over all. */
  private drawPlace(statistic: Statistic | null): void {
    const value = statistic && valueOf(this.app.scan, statistic.name, this.app.state.layer, this.app.state.head);
    this.place.hidden = this.placeName.hidden = !statistic || value === null;
    if (!statistic || value === null) return;
    const width = this.root.clientWidth || 280;
    const context = fitCanvas(this.place, width, 26);
    const x = (each: number): number => 3 + scalePosition(statistic, each) * (width - 6);
    // A grey for light and for dark paper: what is printed is drawn before.
    context.fillStyle = PLACE_COLOUR;
    context.globalAlpha = 0.6;
    for (const head of allHeads(this.app.scan, statistic)) {
      if (head.value === null) continue;
      context.fillRect(x(head.value), 10, 1, 14);
    }
    context.globalAlpha = 1;
    context.fillStyle = css(viridis(scalePosition(statistic, value)));
    context.fillRect(x(value) - 2.5, 2, 5, 24);
    context.strokeStyle = PLACE_COLOUR;
    context.strokeRect(x(value) - 2.5, 2.5, 5, 23);
    const [rank, of] = rankOf(allHeads(this.app.scan, statistic), value);
    this.place.setAttribute("aria-label", `${statistic.label} of all ${of} heads; this one is ${ordinal(rank)}`);
    this.placeName.textContent = `${statistic.label} of all ${count(of)} heads`;
  }

  // ---- offsets ----------------------------------------------------------------------------------

  private offsets(loaded: Loaded, layer: number, head: number): Float32Array | null {
    const { scan } = this.app;
    const record = scan.layers[layer];
    if (scan.reach === null || !record) return null;
    const size = 2 * scan.reach + 2;
    const at = (headsBefore(scan, layer) + positionOf(record, head)) * size;
    const values = loaded.profiles.subarray(at, at + size);
    return values.length === size && values.some((value) => !Number.isNaN(value)) ? values : null;
  }

  private drawProfile(loaded: Loaded): void {
    const { state, scan } = this.app;
    const values = this.offsets(loaded, state.layer, state.head);
    const reach = scan.reach ?? 0;
    if (!values) {
      this.profile.replaceChildren(element("p", { class: "soft small" }, "No offsets: the scan has no profile of this head."));
      return;
    }
    const weights = [...values.subarray(0, 2 * reach + 1)];
    const most = Math.max(...weights.filter((value) => !Number.isNaN(value)), 0);
    // The least of these that holds the most, so that a bar can be read.
    const top = ENDS.find((end) => most <= end) ?? 1;
    const y = scaleLinear([0, top], [PROFILE.height - PROFILE.bottom, 2]);
    const step = (PROFILE.width - 2 * PROFILE.left) / weights.length;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${PROFILE.width} ${PROFILE.height}`);
    svg.setAttribute("role", "img");
    const best = weights.indexOf(most) - reach;
    svg.setAttribute("aria-label", `weight by offset; the most is ${percent(most)} at ${signed(best)}`);
    weights.forEach((value, n) => {
      if (Number.isNaN(value)) return;
      const bar = document.createElementNS(SVG, "rect");
      const size = Math.max(value > 0 ? 0.75 : 0, y(0) - y(value));
      attributes(bar, { x: PROFILE.left + n * step + 0.5, y: y(0) - size, width: step - 1, height: size });
      svg.append(bar);
    });
    const texts: [number, string, string][] = [
      [PROFILE.left, "start", signed(-reach)], [PROFILE.width / 2, "middle", "own position"], [PROFILE.width - PROFILE.left, "end", signed(reach)],
    ];
    for (const [x, anchor, words] of texts) svg.append(svgText(x, PROFILE.height - 2, anchor, words));
    svg.append(svgText(PROFILE.left, 10, "start", `${100 * top} %`));
    const outside = Math.max(0, 1 - (values[2 * reach + 1] ?? 0));
    const where = `Most: ${percent(most)} at ${signed(best)}. Outside these offsets: ${percent(outside)}.`;
    const far = `Most of the weight, ${percent(outside)}, is farther away. Here the most is ${percent(most)}, at ${signed(best)}.`;
    this.profile.replaceChildren(svg, element("p", { class: "small" }, outside > 0.5 ? far : where));
  }

  private drawReceived(loaded: Loaded): void {
    const { state, scan, layer } = this.app;
    const position = layer ? positionOf(layer, state.head) : -1;
    const keys = loaded.received[state.layer]?.[position] ?? [];
    const lengths = layer?.query_text == null ? [] : (scan.texts[layer.query_text]?.lengths ?? []);
    const queries = lengths.length === 1 ? lengths[0] : undefined;
    const amount = (weight: number): string =>
      queries ? percent(weight / queries) : `as much as ${Number(weight.toPrecision(3))} queries give`;
    this.received.replaceChildren(
      ...(keys.length ? [`Receive most${queries ? " of the weight of all queries" : ""}: `] : []),
      ...keys.slice(0, 4).flatMap(([key, word, weight], n) => [
        n ? ", " : "",
        element("b", {}, word ? inQuotes(visible(word)) : "token"),
        ` at ${count(key)} (${amount(weight)})`,
      ]),
    );
  }

  // ---- other heads and the definition -----------------------------------------------------------

  private drawSimilar(loaded: Loaded): void {
    const { state } = this.app;
    const similar = loaded.distances.mostSimilar(state.layer, state.head);
    this.similar.replaceChildren(
      ...similar.map(({ layer, head, distance }, n) => {
        const label = `layer ${layer}, head ${head}: ${percent(distance)} of the weight lies elsewhere`;
        const choice = button("", { "aria-label": label, tabindex: n ? -1 : 0 }, () => this.app.choose({ layer, head }));
        const bytes = loaded.thumbnails.of(layer, head);
        choice.append(...(bytes ? [thumbnail(bytes)] : []), element("b", {}, nameOf({ layer, head })), element("span", { class: "soft" }, percent(distance)));
        return choice;
      }),
    );
    this.compared.textContent = this.app.layer?.similar ?? "";
  }

  private drawDefinition(statistic: Statistic | null): void {
    if (!statistic) return;
    this.definition.replaceChildren(
      element("h3", {}, statistic.heading),
      element("p", { class: "formula" }, statistic.formula),
      element("p", { class: "soft" }, `Unit: ${statistic.unit}. Excluded: ${statistic.excluded}. Source: ${statistic.source}.`),
    );
  }
}

/** Return a name that breaks after its dots alone. */
const breakable = (name: string): Node[] => name.split(/(?<=\.)/).flatMap((part) => [document.createTextNode(part), element("wbr")]);

function ordinal(n: number): string {
  const tens = n % 100;
  const end = tens >= 11 && tens <= 13 ? "th" : (["th", "st", "nd", "rd"][n % 10] ?? "th");
  return `${count(n)}${end}`;
}

const signed = (offset: number): string => (offset === 0 ? "0" : offset > 0 ? `+${offset}` : `−${-offset}`);

function attributes(target: Element, given: Record<string, number>): void {
  for (const [name, value] of Object.entries(given)) target.setAttribute(name, value.toFixed(2));
}

function svgText(x: number, y: number, anchor: string, words: string): SVGTextElement {
  const text = document.createElementNS(SVG, "text");
  attributes(text, { x, y });
  text.setAttribute("text-anchor", anchor);
  text.textContent = words;
  return text;
}
