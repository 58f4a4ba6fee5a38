/** The lines of Python that draw what the page shows. */

import type { App } from "./app";
import { inSight, isWhole, tokensOf } from "./figures/map";
import type { HeadId } from "./maps";

const IMPORT = "from headwise.scanning import HeadScan\n";

const quoted = (text: string): string => JSON.stringify(text);

function load(app: App, scan: number): string {
  return `HeadScan.load(${quoted(app.meta.files[scan] ?? "")})`;
}

/** Return the lines of the map: of A and of B, where they are compared. */
export function mapLines(app: App): string | null {
  const { state } = app;
  const sides = inSight(app);
  if (!sides) return null;
  const part = Object.entries(sides).filter(([, side]) => !isWhole(side)).map(([name, side]) => {
    const [first, last] = tokensOf(side);
    return `, ${name}=range(${first}, ${last + 1})`;
  });
  const line = ({ scan, layer, head }: HeadId): string =>
    `${load(app, scan)}.plot("map", layer=${layer}, head=${head}${part.join("")})`;
  if (!(state.mode === "diff" || state.mode === "both") || !state.other) return IMPORT + line(app.shown);
  return `${IMPORT}${line(app.chosen)}  # A\n${line(state.other)}  # B`;
}

/** Return the line of the grid, or null if Python pairs the heads otherwise. */
export function gridLines(app: App, comparison: "B" | "diff" | null): string | null {
  const { meta, scan, statistic } = app;
  if (!statistic) return null;
  const draw = `plot("grid", statistic=${quoted(statistic.name)})`;
  if (statistic.is_change || comparison === "diff") {
    const match = meta.matched ? ", match=True" : "";
    return `${IMPORT}${load(app, 0)}.diff(${load(app, 1)}${match}).plot(${quoted(statistic.name)})`;
  }
  if (!comparison) return `${IMPORT}${load(app, 0)}.${draw}`;
  const isPaired = meta.matched?.every((heads, layer) => heads.every((head, at) => head === scan.layers[layer]?.heads[at]));
  return isPaired === false ? null : `${IMPORT}${load(app, 1)}.${draw}`;
}

/** Return the line of the answer about a token, or null if the scan alone does not give it. */
export function tokenLines(app: App): string | null {
  const { token, what, exact } = app.light.lights;
  const { mode, other, sequence } = app.state;
  if (token === null || mode === "diff" || !(exact === "map" || exact === "top")) return null;
  const direction = what === "queries" ? ', direction="queries"' : "";
  const of = sequence ? `, sequence=${sequence}` : "";
  const line = ({ scan, layer, head }: HeadId): string =>
    `${load(app, scan)}.plot("token", layer=${layer}, head=${head}, token=${token}${direction}${of})`;
  if (mode !== "both" || !other) return IMPORT + line(app.shown);
  return `${IMPORT}${line(app.chosen)}  # A\n${line(other)}  # B`;
}
