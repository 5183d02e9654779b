"""Runs in an environment with Jupyter, executes a notebook that downloads a model and generates, and prints the bars.

The kernel finds Caravan by PYTHONPATH. What the widgets show at the end is in the notebook's metadata.
"""

import json

import nbformat
from nbclient import NotebookClient

CELLS = [
    'from caravan import LLM, SamplingParams\nllm = LLM("hf:demo/tiny", ctx_size=512)',
    # Bars appear after a second, so the function makes each token take as long as that needs.
    """import time

def slowly(output_token_ids, logits):
    time.sleep(0.1)
    return logits

params = SamplingParams(max_tokens=6, ignore_eos=True, logits_processors=[slowly])
outputs = llm.generate(["One", "Two", "Three", "Four"], params)
print(len(outputs))""",
    "print(llm)\nllm.close()",
]


def shown(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Return the texts of the widgets that each cell displays."""
    models = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]

    def texts(model_id: str) -> list[str]:
        state = models[model_id]["state"]
        children = [text for child in state.get("children", ()) for text in texts(child.removeprefix("IPY_MODEL_"))]
        return children or ([str(state["value"])] if "value" in state else [])

    cells = []
    for cell in notebook.cells:
        views = [
            output["data"].get("application/vnd.jupyter.widget-view+json")
            for output in cell.outputs
            if "data" in output
        ]
        cells.append([" ".join(texts(view["model_id"])) for view in views if view])
    return cells


def main() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    # The default of what comes of a cell after its end is 4 s.
    NotebookClient(notebook, timeout=600, startup_timeout=240, iopub_timeout=240, kernel_name="python3").execute()
    texts = ["".join(o.get("text", "") for o in cell.outputs if o.get("name") == "stdout") for cell in notebook.cells]
    errors = ["".join(o.get("text", "") for o in cell.outputs if o.get("name") == "stderr") for cell in notebook.cells]
    print(json.dumps({"bars": shown(notebook), "printed": texts, "errors": errors}))


if __name__ == "__main__":
    main()
