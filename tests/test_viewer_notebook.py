"""The notebook of the documentation, run by a kernel."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

from tests.root import ROOT

NOTEBOOK = ROOT / "docs" / "viewer.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_shows_the_widget() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    client = NotebookClient(notebook, timeout=120, kernel_name="python3")
    client.execute(cwd=str(ROOT))
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert "blocks.2.attention" in outputs[0][0]["data"]["text/plain"]
    view = outputs[1][0]["data"]["application/vnd.jupyter.widget-view+json"]
    state = client.widget_state[view["model_id"]]
    assert state["_model_module"] == "anywidget"
    assert state["meta"]["title"] == "tiny"
    assert state["selected_head"] == [2, 0]
    assert state["computes_rows"] is True
    assert "0/map/2" in str(client.widget_buffers[view["model_id"]])
    assert "<img" in outputs[3][0]["data"]["text/html"]
    assert "ScanDiff(" in outputs[4][0]["data"]["text/html"]
    assert "image/png" in outputs[5][0]["data"]
