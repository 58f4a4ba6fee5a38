/** Where the data comes from: blobs in the page, or traits of a notebook's widget. */

import { fromBase85 } from "./base85";
import type { Meta, PageMeta, Received, Words } from "./contract";

/** The exact weights of one query: computed by the kernel of a notebook. */
export interface ExactRow {
  keys: number[];
  weights: number[];
}

export type RowAsker = (
  scan: number,
  layer: number,
  head: number,
  sequence: number,
  query: number,
) => Promise<ExactRow>;

const MOST_AHEAD = 2 ** 26; // bytes that are inflated before they are asked for

/** Returns the deflated bytes of a blob, or null if there is none. */
export type BlobReader = (name: string) => Uint8Array<ArrayBuffer> | null;

/** The reports of a page, with their blobs. Every blob is inflated once, when it is needed. */
export class Source {
  readonly reports: Meta[];
  private readonly several: boolean;
  private readonly inflated = new Map<string, Promise<Uint8Array>>();

  constructor(
    meta: PageMeta,
    private readonly read: BlobReader,
    readonly exactRow: RowAsker | null = null,
  ) {
    this.several = "reports" in meta;
    this.reports = "reports" in meta ? meta.reports : [meta];
  }

  bytes(report: number, name: string): Promise<Uint8Array> {
    const key = this.several ? `${report}:${name}` : name;
    const known = this.inflated.get(key);
    if (known) return known;
    const deflated = this.read(key);
    const bytes = deflated ? inflate(deflated) : Promise.resolve(new Uint8Array());
    this.inflated.set(key, bytes);
    return bytes;
  }

  /** Inflate blobs one by one while the page has nothing else to do, so that no answer waits for them. */
  async readAhead(report: number, names: string[]): Promise<void> {
    let held = 0;
    for (const name of names) {
      await idle();
      held += (await this.bytes(report, name)).length;
      if (held > MOST_AHEAD) return;
    }
  }

  async words(report: number, scan: number, text: number): Promise<Words> {
    return this.json<Words>(report, `${scan}/text/${text}`, { words: [], ids: [] });
  }

  async received(report: number, scan: number): Promise<Received> {
    return this.json<Received>(report, `${scan}/received`, []);
  }

  private async json<T>(report: number, name: string, empty: T): Promise<T> {
    const bytes = await this.bytes(report, name);
    return bytes.length ? (JSON.parse(new TextDecoder().decode(bytes)) as T) : empty;
  }
}

const MOST_WAIT = 500; // milliseconds: a busy page answers too

/** Wait until the browser is idle, but not for long; where it does not say so, until other work has run. */
export const idle = (): Promise<void> =>
  new Promise((resume) => ("requestIdleCallback" in window ? requestIdleCallback(() => resume(), { timeout: MOST_WAIT }) : setTimeout(resume, 20)));

async function inflate(deflated: Uint8Array<ArrayBuffer>): Promise<Uint8Array> {
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Return a reader of the page's `<script type="text/plain" data-blob>` elements. */
export function pageBlobs(page: Document): BlobReader {
  return (name) => {
    const element = page.querySelector(`script[data-blob="${name}"]`);
    return element ? fromBase85(element.textContent ?? "") : null;
  };
}
