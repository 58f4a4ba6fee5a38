"""An error as IPython prints it: the caller's lines and the message, without inner frames."""

from pathlib import Path
from textwrap import dedent

import pytest
from IPython.core.interactiveshell import InteractiveShell

MOST_LINES = 25

CELLS = {
    "an option": """
        import headwise
        headwise.Attention(40, heads=5)
    """,
    "the call of a module": """
        import torch, headwise
        layer = headwise.MultiheadAttention(40, 5)
        layer(torch.randn(2, 7, 41), torch.randn(2, 7, 40), torch.randn(2, 7, 40))
    """,
    "a caller's function": """
        import headwise

        def build(heads):
            return headwise.Attention(40, num_heads=heads, num_kv_heads=3)

        build(8)
    """,
    "a file": """
        import headwise
        headwise.detect("no/such/file.safetensors")
    """,
}


@pytest.mark.parametrize("cell", CELLS)
def test_an_error_in_a_notebook_is_short(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    shell = InteractiveShell.instance()
    shell.run_line_magic("colors", "nocolor")
    error = shell.run_cell(dedent(CELLS[cell])).error_in_exec
    lines = capsys.readouterr().out.rstrip()
    assert lines.endswith(f"{type(error).__name__}: {error}")
    assert len(lines.splitlines()) <= MOST_LINES
    assert dedent(CELLS[cell]).strip().splitlines()[-1] in lines
    assert "headwise/" not in lines
    assert "torch/" not in lines


def test_a_caller_in_a_folder_named_torch_is_not_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "torch" / "train.py"
    script.parent.mkdir()
    script.write_text("import headwise\nheadwise.Attention(40, heads=5)\n")
    InteractiveShell.instance().run_cell(f"import runpy\nrunpy.run_path({str(script)!r})")
    assert f'File "{script}", line 2' in capsys.readouterr().out
