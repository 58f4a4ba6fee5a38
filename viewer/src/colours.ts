/** Colour scales: viridis for weights, brown to teal around the colour of the paper for differences. */

import { interpolateBrBG, interpolateViridis } from "d3-scale-chromatic";

export type RGB = [red: number, green: number, blue: number];

const STEPS = 256;

function palette(interpolate: (position: number) => string): RGB[] {
  return Array.from({ length: STEPS }, (_, n) => parse(interpolate(n / (STEPS - 1))));
}

function parse(colour: string): RGB {
  if (colour.startsWith("#")) {
    return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)) as RGB;
  }
  return (colour.match(/\d+/g) ?? []).slice(0, 3).map(Number) as RGB;
}

const VIRIDIS = palette(interpolateViridis);
const DIVERGING = palette(interpolateBrBG);
const ON_DARK = palette(between(["#ffdca3", "#b87416", "#20252b", "#148a80", "#8ff0e2"].map(parse)));

/** Return the way through colours at equal distances, along straight lines. */
function between(colours: RGB[]): (position: number) => string {
  return (position) => {
    const at = position * (colours.length - 1);
    const first = Math.min(Math.floor(at), colours.length - 2);
    const [from, to] = [colours[first], colours[first + 1]] as [RGB, RGB];
    return css(from.map((channel, n) => Math.round(channel + (at - first) * ((to[n] ?? 0) - channel))) as RGB);
  };
}

const step = (position: number): number =>
  Math.round(Math.min(1, Math.max(0, position)) * (STEPS - 1));

/** Return the colour of a position from 0 to 1. */
export const viridis = (position: number): RGB => VIRIDIS[step(position)] as RGB;

/** Return the colour of a position from −1 to 1; 0 is near the colour of the paper, light or dark. */
export const diverging = (position: number, isDark = false): RGB => (isDark ? ON_DARK : DIVERGING)[step((position + 1) / 2)] as RGB;

export function css(colour: RGB): string {
  return `#${colour.map((channel) => channel.toString(16).padStart(2, "0")).join("")}`;
}

/** Return black or white, by the larger contrast (relative luminance of WCAG 2). */
export function ink(colour: RGB): "#000" | "#fff" {
  const [red, green, blue] = colour.map((channel) => {
    const part = channel / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  }) as RGB;
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return (luminance + 0.05) ** 2 > 0.05 * 1.05 ? "#000" : "#fff";
}
