"""The notebooks of the documentation, run by a kernel; and a kernel that answers the page."""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from tests.quick import others_extra
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


def outputs_without_numbers(notebook: Any) -> list[list[Any]]:
    """The text of each output, in which numbers may differ between machines, or its kinds."""
    return [
        [
            re.sub(r"(?m)[-+]?\d[\d.,]*|^.*\bmore: .*$", "#", each.get("text", ""))
            or sorted(each["data"].keys() - {"text/html"})
            for each in cell.outputs
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", others_extra(("look", "port", "smaller"), "look"))
def test_a_notebook_has_the_outputs_of_its_cells(name: str) -> None:
    text = ROOT.joinpath("docs", "notebooks", f"{name}.ipynb").read_text("utf-8")
    notebook = nbformat.reads(text, as_version=4)
    committed = outputs_without_numbers(notebook)
    assert all(committed), "a cell without an output"
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(ROOT))
    assert outputs_without_numbers(notebook) == committed


MOST_LINES = 25  # of an error
MOST_SECONDS = 120
WIDGET = """
import headwise
from headwise.models import tiny

model, ids = tiny.load(), tiny.encode("one text, one text")[None]
viewer = headwise.scan(model, ids).view(model=model, inputs=ids)
viewer.model_id
"""


class Kernel:
    """A kernel without a notebook: cells, and messages to a widget."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self.client = client

    def run(self, code: str) -> list[dict[str, Any]]:
        """Contents of what the kernel sends while it runs a cell."""
        return list(self._replies(self.client.execute(code, store_history=True)))

    def value(self, code: str) -> Any:
        (data,) = [
            content["data"]
            for content in self.run(code)
            if "execution_count" in content and "data" in content
        ]
        return ast.literal_eval(data["text/plain"])

    def tell(self, widget: str, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Contents of what the kernel sends after a message of the page to a widget."""
        message = self.client.session.msg("comm_msg", {"comm_id": widget, "data": data})
        self.client.shell_channel.send(message)
        return list(self._replies(message["header"]["msg_id"]))

    def _replies(self, question: str) -> Iterator[dict[str, Any]]:
        while True:
            message = self.client.get_iopub_msg(timeout=MOST_SECONDS)
            if message["parent_header"].get("msg_id") == question:
                yield message["content"]
                if message["content"].get("execution_state") == "idle":
                    return


@contextmanager
def kernel() -> Iterator[Kernel]:
    manager, client = start_new_kernel(cwd=str(ROOT))
    try:
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.slow
def test_a_kernel_answers_the_page_and_keeps_errors_short() -> None:
    with kernel() as running:
        widget = running.value(WIDGET)
        running.tell(widget, {"method": "update", "state": {"selected_head": [2, 0]}})
        assert running.value("viewer.selected_head") == [2, 0]

        row = {"row": [0, 1, 2, 0, 12], "id": 1}
        sent = running.tell(widget, {"method": "custom", "content": row})
        (answer,) = [content["data"]["content"] for content in sent if "data" in content]
        assert answer["id"] == 1
        assert answer["keys"][0] == 11  # a head that looks at the token before
        assert sum(answer["weights"]) == pytest.approx(1, abs=1e-6)

        (error,) = [c for c in running.run("viewer.selected_head = [9, 0]") if "traceback" in c]
        lines = "\n".join(error["traceback"]).splitlines()
        assert len(lines) <= MOST_LINES
        assert any("OptionError: selected_head=[9, 0]" in line for line in lines)
