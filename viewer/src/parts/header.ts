/** What the page is of, and the heads that stand out: the ways in. */

import type { App } from "../app";
import { button, element, rovingFocus, select } from "../dom";
import { count } from "../format";
import { nameOf } from "../heads";
import type { Part } from "../view";

export class Header implements Part {
  readonly root = element("div", { class: "top" });
  private readonly title = element("h1");
  private readonly about = element("p", { class: "soft" });
  private readonly ways = element("div", { class: "ways", "data-part": "standouts", "data-follow": "" });
  private shownReport = -1;

  constructor(
    private readonly app: App,
    tools: HTMLElement,
  ) {
    const names = app.source.reports.map((meta, n): [string, string] => [String(n), meta.title]);
    const reports =
      names.length > 1
        ? select("model", names, (value) => app.chooseReport(Number(value)))
        : null;
    reports?.setAttribute("data-part", "report");
    this.reports = reports;
    this.root.append(
      element("div", { class: "line" }, this.title, reports, this.about, tools),
      this.ways,
    );
    rovingFocus(this.ways, () => 1);
  }

  private readonly reports: HTMLSelectElement | null;

  update(): void {
    const { meta, scan, state } = this.app;
    if (this.shownReport !== state.report) {
      this.shownReport = state.report;
      if (this.reports) this.reports.value = String(state.report);
      const heads = scan.layers.reduce((sum, layer) => sum + layer.heads.length, 0);
      this.title.textContent = meta.title;
      this.about.textContent = `${count(heads)} heads · ${meta.read}`;
      this.fillWays();
    }
    const isHere = (way: HTMLElement): boolean =>
      way.dataset["head"] === nameOf(state) && way.dataset["statistic"] === state.statistic;
    for (const way of this.ways.querySelectorAll("button")) {
      way.setAttribute("aria-pressed", String(isHere(way)));
    }
  }

  private fillWays(): void {
    const { scan, meta } = this.app;
    const ways = scan.standouts.map(({ layer, head, statistic, sentence }, n) => {
      const way = button("", { class: "way", tabindex: n ? -1 : 0 }, () =>
        this.app.choose({ layer, head }, statistic),
      );
      way.dataset["head"] = nameOf({ layer, head });
      way.dataset["statistic"] = statistic;
      way.append(element("b", {}, `Layer ${layer}, head ${head}`), ` ${sentence}`);
      return way;
    });
    const notes = [meta.about, meta.read, meta.chosen, meta.rule, ...meta.notes, ...meta.missing];
    this.ways.replaceChildren(
      ...(ways.length ? ways : [element("p", {}, "No head stands out.")]),
      element(
        "details",
        {},
        element("summary", {}, notesLabel(meta.notes.length)),
        ...notes.filter(Boolean).map((note) => element("p", { class: "small" }, note)),
      ),
    );
  }
}

const notesLabel = (count: number): string =>
  count ? `About this page, and ${count === 1 ? "a note" : `${count} notes`}` : "About this page";
