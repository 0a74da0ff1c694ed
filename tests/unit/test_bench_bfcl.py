"""BFCL's tasks as a trace: `benchmarks/record_bfcl.py`, with a package like BFCL's."""

import json
import subprocess
import sys
from pathlib import Path

from kvloom_server.bench.traces import read_sessions, replayed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "record_bfcl.py"
TASK = {
    "id": "multi_turn_base_0",
    "question": [
        [{"role": "user", "content": "Into temp."}],
        [{"role": "user", "content": "And back."}],
    ],
    "initial_config": {"Files": {"here": "root"}},
    "involved_classes": ["Files"],
}
RIGHT = [["cd('temp')", "move(source='a', times=[1, 2])"], ["cd(folder='..')"]]
DOCS = [
    {
        "name": "cd",
        "description": "Go.",
        "parameters": {
            "type": "dict",
            "properties": {"folder": {"type": "string"}},
            "required": ["folder"],
        },
    },
    {
        "name": "move",
        "description": "Move.",
        "parameters": {
            "type": "dict",
            "properties": {
                "source": {"type": "string"},
                "times": {"type": "list", "items": {"type": "float"}},
            },
        },
    },
]
EXECUTE = """
counts = {}
def execute_multi_turn_func_call(
    func_call_list, initial_config, involved_classes, model_name, test_entry_id
):
    counts[test_entry_id] = counts.get(test_entry_id, 0) + 1
    here = initial_config["Files"]["here"]
    return [f"{here} {counts[test_entry_id]}: {func_call_list[0]}"], {}
"""


def package(root: Path) -> None:
    """What of the package is used."""
    here = root / "bfcl_eval"
    files = {
        "__init__.py": "",
        "constants/__init__.py": "",
        "constants/executable_backend_config.py": (
            'MULTI_TURN_FUNC_DOC_FILE_MAPPING = {"Files": "files.json"}'
        ),
        "eval_checker/__init__.py": "",
        "eval_checker/multi_turn_eval/__init__.py": "",
        "eval_checker/multi_turn_eval/multi_turn_utils.py": EXECUTE,
        "data/BFCL_v4_multi_turn_base.json": json.dumps(TASK),
        "data/possible_answer/BFCL_v4_multi_turn_base.json": json.dumps(
            {"id": TASK["id"], "ground_truth": RIGHT}
        ),
        "data/multi_turn_func_doc/files.json": "\n".join(map(json.dumps, DOCS)),
    }
    for name, text in files.items():
        file = here / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_tasks_become_sessions_with_results_of_tools_that_ran(tmp_path):
    """In order, with schemas that an engine takes."""
    package(tmp_path)
    out = tmp_path / "bfcl.jsonl"
    subprocess.run(
        [sys.executable, SCRIPT, out], check=True, env={"PYTHONPATH": str(tmp_path)}
    )
    [session] = read_sessions(out)
    assert session.session == TASK["id"]
    calls = [
        call["function"]
        for message in session.messages
        for call in message.get("tool_calls", ())
    ]
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == [
        ("cd", {"folder": "temp"}),
        ("move", {"source": "a", "times": [1, 2]}),
        ("cd", {"folder": ".."}),
    ]
    results = [m["content"] for m in session.messages if m["role"] == "tool"]
    assert results == [
        "root 1: cd('temp')",
        "root 2: move(source='a', times=[1, 2])",
        "root 3: cd(folder='..')",
    ]
    move = session.tools[1]["function"]["parameters"]
    assert move["type"] == "object"
    assert move["properties"]["times"] == {"type": "array", "items": {"type": "number"}}
    assert replayed(session).calls == (True, True, False, True, False)
