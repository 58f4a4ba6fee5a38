"""The widget of a notebook: its traits, rows from the kernel, and its script in a browser."""

import base64
import json
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise import scan
from headwise.checkpoints.transformers import find_tokenizer
from headwise.errors import OptionError
from headwise.models import minilm, tiny
from headwise.reports.page import read_viewer_asset, viewer_data
from headwise.reports.report import ScanReport
from headwise.scanning._scan import ExactRows
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import Map
from tests.reports.browser import Chromium, needs_a_browser

EPS = torch.finfo(torch.float32).eps
TEXT = "the quick brown fox jumps over the lazy dog. " * 3

# What anywidget gives to the script: a model with traits, and messages to the kernel.
HOST = """<!doctype html><meta charset="utf-8"><title>host</title><style>CSS</style>
<div id="cell"></div><div id="again"></div>
<script type="application/json" id="state">STATE</script>
<script type="module">
import widget from "data:text/javascript;base64,SCRIPT";
const traits = JSON.parse(document.getElementById("state").textContent);
for (const [name, text] of Object.entries(traits.blobs)) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  traits.blobs[name] = new DataView(bytes.buffer);
}
const heard = {};
window.sent = [];
window.model = {
  get: (name) => traits[name],
  set: (name, value) => { traits[name] = value; },
  save_changes: () => {},
  on: (event, act) => { (heard[event] ??= []).push(act); },
  send: (content) => window.sent.push(content),
  tell: (event, ...given) => (heard[event] ?? []).forEach((act) => act(...given)),
};
window.show = (cell) => widget.render({ model: window.model, el: document.getElementById(cell) });
window.show("cell");
</script>"""


ROOT_ELEMENT = "document.querySelector('.headwise')"
LIGHT, DARK = "rgb(251, 250, 247)", "rgb(20, 23, 27)"
THEMES = (
    ("data-jp-theme-light", "false", DARK),
    ("data-jp-theme-light", "true", LIGHT),
    ("data-vscode-theme-kind", "vscode-dark", DARK),
    ("data-vscode-theme-kind", "vscode-light", LIGHT),
)
BADGE = "document.querySelector('[data-part=badge]').textContent"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.load()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return tiny.encode(TEXT)[None]


@pytest.fixture(scope="module")
def read(model: Any, ids: torch.Tensor) -> HeadScan:
    return scan(model, ids, statistics=["standard", Map(64)])


@pytest.mark.slow
def test_traits(read: HeadScan, model: Any, ids: torch.Tensor) -> None:
    widget = read.view(title="tiny", height=500)
    meta, blobs = viewer_data(ScanReport.of(read, title="tiny"))
    assert widget.meta == meta
    assert widget.blobs == blobs
    first = meta["scans"][0]["standouts"][0]
    assert (widget.height, widget.computes_rows) == (500, False)
    assert widget.selected_head == [first["layer"], first["head"]]
    widget.selected_head = [2, 0]
    assert widget.get_state()["selected_head"] == [2, 0]
    assert read.view(model=model, inputs=ids).computes_rows
    two = read.view(other=read)
    assert len(two.meta["scans"]) == 2
    other = scan(model, tiny.encode("another text")[None], statistics=["standard", Map(64)])
    change = read.diff(other).top(n=1)[0]
    assert read.view(other=other).selected_head == [change.layer_index, change.head]
    assert [first["layer"], first["head"]] != [change.layer_index, change.head]


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_model_needs_its_inputs(read: HeadScan, model: Any) -> None:
    with pytest.raises(OptionError, match="model without inputs"):
        read.view(model=model)


def test_the_kernel_answers_with_exact_rows(read: HeadScan, model: Any, ids: torch.Tensor) -> None:
    widget = read.view(model=model, inputs=ids)
    sent: list[Any] = []
    widget.send = sent.append
    widget._msg_callbacks(widget, {"row": [0, 2, 0, 0, 100], "id": 7}, [])
    widget._msg_callbacks(widget, {"row": [0, 2, 0, 0, 10_000], "id": 8}, [])
    row = ExactRows(model, ids).row(read.layers[2], 0, sequence=0, query=100)
    assert sent[0]["id"] == 7
    assert len(sent[0]["keys"]) == 64
    for key, weight in zip(sent[0]["keys"], sent[0]["weights"], strict=True):
        assert weight == pytest.approx(float(row[key]), abs=EPS)
    assert sent[0]["weights"] == sorted(sent[0]["weights"], reverse=True)
    assert sent[1] == {"id": 8, "refused": "query 10000 of head 0"}


def test_rows_of_the_other_scan_are_not_those_of_the_model(
    read: HeadScan, model: Any, ids: torch.Tensor
) -> None:
    widget = read.view(model=model, inputs=ids, other=scan(model, tiny.encode("another")[None]))
    sent: list[Any] = []
    widget.send = sent.append
    widget._msg_callbacks(widget, {"row": [1, 2, 0, 0, 3], "id": 7}, [])
    assert sent == [{"id": 7, "refused": "the model is that of the first scan"}]


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_head_that_is_not_there_cannot_be_selected(read: HeadScan) -> None:
    widget = read.view()
    for head in ([4, 0], [0, 8], [1]):
        with pytest.raises(OptionError, match="4 layers and 32 heads"):
            widget.selected_head = head
    widget.selected_head = (3, 7)
    assert widget.selected_head == [3, 7]
    widget.selected_head = None


def host(read: HeadScan, folder: Path, *, selected_head: list[int] | None) -> Path:
    """A page that gives the script what anywidget gives it."""
    meta, blobs = viewer_data(ScanReport.of(read))
    traits = {
        "meta": meta,
        "blobs": {name: base64.b64encode(blob).decode() for name, blob in blobs.items()},
        "computes_rows": True,
        "height": 600,
        "selected_head": selected_head,
    }
    page = folder / "host.html"
    script = base64.b64encode(read_viewer_asset("viewer.js").encode()).decode()
    state = json.dumps(traits).replace("<", "\\u003c")
    html = HOST.replace("CSS", read_viewer_asset("viewer.css")).replace("STATE", state)
    page.write_text(html.replace("SCRIPT", script), "utf-8")
    return page


@needs_a_browser
def test_the_script_in_a_browser(browser: Chromium, read: HeadScan, tmp_path: Path) -> None:
    page = host(read, tmp_path, selected_head=[2, 0])
    with browser.open(page, waits=False) as opened:
        opened.poll("document.querySelector('[data-id=\"2.0\"][aria-pressed=true]') !== null")
        # Python chooses a head, then the reader does.
        opened.page.evaluate(
            "model.set('selected_head', [1, 2]); model.tell('change:selected_head')"
        )
        opened.poll("document.querySelector('[data-id=\"1.2\"][aria-pressed=true]') !== null")
        opened.page.click('[data-id="3.4"]')
        opened.poll("JSON.stringify(model.get('selected_head')) === '[3,4]'")
        opened.page.click('[data-t="20"]')
        opened.poll("sent.length === 1")
        asked = opened.page.evaluate("sent[0]")
        assert asked["row"] == [0, 3, 4, 0, 20]
        opened.page.evaluate(
            "model.tell('msg:custom', { id: sent[0].id, keys: [3, 5], weights: [0.7, 0.2] })"
        )
        opened.poll("document.querySelector('[data-t=\"3\"]').className.includes('lit-')")
        badge = opened.page.inner_text("[data-part=badge]")
        assert badge.endswith("its 2 largest weights, 90 % of all, computed by the kernel.")
        opened.page.click('[data-t="21"]')
        opened.poll("sent.length === 2 && sent[1].id === sent[0].id + 1")
        opened.page.evaluate(
            "model.tell('msg:custom', { id: sent[1].id, refused: 'no such query' })"
        )
        opened.poll(f"{BADGE}.includes('the kernel has no row: no such query')")
        # The kernel answers all views of a widget, so another view asks with other numbers.
        opened.page.evaluate("show('again')")
        opened.page.click('#again [data-t="22"]')
        opened.poll("sent.length === 3 && Math.abs(sent[2].id - sent[1].id) > 1")
        assert opened.complaints == []
        assert [address for address in opened.requests if not address.startswith("data:")] == [
            page.as_uri()
        ]


@needs_a_browser
def test_a_new_view_sends_nothing_and_contains_its_parts(
    browser: Chromium, read: HeadScan, tmp_path: Path
) -> None:
    # Python may have chosen a head that is still on its way: the page must not answer with its own.
    page = host(read, tmp_path, selected_head=None)
    with browser.open(page, waits=False, width=900) as opened:
        opened.poll("document.querySelector('[data-t=\"3\"]') !== null")
        assert opened.page.evaluate("model.get('selected_head')") is None
        whole, text = (opened.page.locator(part).bounding_box() for part in (".headwise", ".text"))
        assert whole is not None
        assert text is not None
        assert text["y"] + text["height"] <= whole["y"] + whole["height"]


@pytest.mark.slow
@needs_a_browser
def test_the_theme_and_the_keys_of_a_notebook(
    browser: Chromium, read: HeadScan, tmp_path: Path
) -> None:
    with browser.open(host(read, tmp_path, selected_head=[2, 0]), waits=False) as opened:
        page = opened.page
        opened.poll("document.querySelector('[data-id=\"2.0\"]') !== null")
        page.evaluate("document.addEventListener('keydown', () => { window.heard = true; })")
        page.focus('[data-id="2.0"]')
        page.keyboard.press("x")  # cuts a cell of JupyterLab
        page.keyboard.press("]")
        opened.poll("document.querySelector('[data-id=\"2.1\"][aria-pressed=true]') !== null")
        assert page.evaluate("window.heard === undefined")
        assert page.locator("[data-lm-suppress-shortcuts=true]").count() == 1
        for system, (attribute, value, background) in product(("light", "dark"), THEMES):
            page.emulate_media(color_scheme=system)
            page.evaluate(f"document.body.setAttribute({attribute!r}, {value!r})")
            opened.poll(f"getComputedStyle({ROOT_ELEMENT}).backgroundColor === {background!r}")
            page.evaluate(f"document.body.removeAttribute({attribute!r})")
            opened.poll(f"!{ROOT_ELEMENT}.dataset.theme")


def test_the_text_is_written_by_the_tokenizer_of_the_model() -> None:
    """Without names, by the model that transformers loaded; with names, as they say."""
    transformers = pytest.importorskip("transformers")
    folder = minilm.model_folder()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    text = "The trophy did not fit."
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    read = scan(model, {"input_ids": ids}, statistics=["entropy", "map"])
    widget = read.view(model=model, inputs={"input_ids": ids})
    fields = json.loads(zlib.decompress(widget.blobs["0/text/0"]))
    assert fields["written"][0]["text"].lower() == text.lower()
    assert sum(length > 0 for length in fields["written"][0]["spans"][1::2]) == ids.shape[1] - 2
    named = read.view(model=model, inputs={"input_ids": ids}, name_of=str)
    fields = json.loads(zlib.decompress(named.blobs["0/text/0"]))
    assert "written" not in fields
    assert str(int(ids[0, 1])) in fields["words"]


def test_a_model_without_a_tokenizer_has_numbers() -> None:
    ids = tiny.encode(TEXT)[None]
    widget = scan(tiny.load(), ids, statistics=["map"]).view()
    assert "written" not in json.loads(zlib.decompress(widget.blobs["0/text/0"]))
    assert find_tokenizer(tiny.load()) is None
