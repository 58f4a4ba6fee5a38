"""Pages of texts as they were written, with attention at random, and scripts that read them."""

from pathlib import Path

import torch
from torch.nn import functional as F

from headwise import scan as scan_model
from headwise.checkpoints.transformers import StoredTokenizer
from headwise.reports.page import save_scan_page
from headwise.reports.report import ScanReport
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery
from headwise.scanning.written import WrittenText
from tests.scanning.written_texts import tokenizer_of

HEADS, HEAD_DIM = 2, 7
# The rows of a text from its first to its last, while it is scrolled to its end.
DRAWN = """async () => {
  const scroller = document.querySelector(".scroller"), rows = new Map();
  const frame = () => new Promise((resume) => requestAnimationFrame(resume));
  for (let top = 0; top < scroller.scrollHeight; top += scroller.clientHeight) {
    scroller.scrollTop = top;
    await frame().then(frame);
    for (const row of scroller.querySelectorAll(".sheet .row")) {
      rows.set(parseFloat(row.style.top), row.textContent);
    }
  }
  return [...rows].sort(([a], [b]) => a - b).map(([, text]) => text);
}"""
# The widths of the pieces of each line, of the bare line, of it without the blanks at its end, and
# of the room for it.
LINES = """() => [...document.querySelectorAll(".sheet .row")].map((row) => {
  const run = row.firstChild, bare = run.cloneNode();
  for (const mark of run.querySelectorAll("[data-mark]")) delete mark.dataset.mark;
  bare.textContent = run.textContent;
  const widthOf = (node) => {
    const range = document.createRange();
    range.selectNodeContents(node);
    return range.getBoundingClientRect().width;
  };
  const pieces = widthOf(run), room = row.parentNode.clientWidth - 48;
  run.replaceWith(bare);
  const whole = widthOf(bare);
  bare.textContent = bare.textContent.trimEnd();
  return [pieces, whole, widthOf(bare), room];
})"""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def scan_of(*written: WrittenText) -> HeadScan:
    """A scan of causal attention at random, one input for each text."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, HEADS, len(text.spans), HEAD_DIM) for text in written]
    inputs = [tuple(3 * torch.randn(size, generator=generator) for _ in "qkv") for size in sizes]
    wanted = ["entropy", Map(512), TopKeysOfEveryQuery()]
    return scan_model(attend, inputs, statistics=wanted, written=list(written))


def tokenized(kind: str, text: str) -> WrittenText:
    spans = StoredTokenizer(tokenizer_of(kind)).spans(text, None)
    assert spans is not None
    return WrittenText(text, torch.tensor(spans))


def page_of(folder: Path, *written: WrittenText) -> Path:
    return save_scan_page(folder / "page.html", ScanReport.of(scan_of(*written)))
