/** A map as an image: a pixel for each cell, nothing in between. */

import { type RGB, diverging, viridis } from "../colours";
import { element } from "../dom";
import { type HeadMap, largest } from "../maps";

/** Differences are coloured by the signed square root of their share of the largest, on light or on dark paper. */
export function colourOf(value: number, isDifference: boolean, most: number, dark = false): RGB {
  if (!isDifference) return viridis(Math.sqrt(value));
  return diverging(-Math.sign(value) * Math.sqrt(Math.abs(value) / most), dark);
}

/** Return a map as an image with a pixel for each cell. */
export function imageOf(map: HeadMap, isDifference: boolean, dark = false): HTMLCanvasElement {
  const canvas = element("canvas", { width: map.cols, height: map.rows });
  const context = canvas.getContext("2d");
  const image = context?.createImageData(map.cols, map.rows);
  if (!context || !image) return canvas;
  const most = isDifference ? largest(map) : 1;
  map.values.forEach((value, at) => {
    const [red, green, blue] = colourOf(value, isDifference, most, dark);
    image.data[4 * at] = red;
    image.data[4 * at + 1] = green;
    image.data[4 * at + 2] = blue;
    image.data[4 * at + 3] = 255;
  });
  context.putImageData(image, 0, 0);
  return canvas;
}
