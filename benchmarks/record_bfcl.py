"""Writes a trace of BFCL's multi-turn tasks, whose tools it really runs.

    python -m venv bfcl && bfcl/bin/pip install bfcl-eval
    bfcl/bin/python benchmarks/record_bfcl.py bfcl.jsonl --tasks 20
    kvloom bench reuse --trace bfcl.jsonl

In an environment of its own, as ``bfcl-eval`` (Apache-2.0) pins what vLLM does not
want; needs nothing else. A task's users ask in turns; the calls are those that BFCL
holds for right, one at a time, and the results what its simulators say to them.
"""

import argparse
import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]

TASKS: Final = "BFCL_v4_multi_turn_base.json"
_EXECUTE: Final = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils"
_BACKENDS: Final = "bfcl_eval.constants.executable_backend_config"
_TYPES: Final = {"dict": "object", "float": "number", "tuple": "array", "list": "array"}
"""BFCL's names of types, as JSON schema has them."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="gets the trace, JSON lines")
    parser.add_argument("--tasks", type=int, default=20, help="so many, from the first")
    asked = parser.parse_args()
    package = Path(str(importlib.import_module("bfcl_eval").__file__)).parent
    with asked.out.open("w") as out:
        for task, right in list(_tasks(package / "data"))[: asked.tasks]:
            out.write(json.dumps(_session(task, right, package / "data")) + "\n")


def _tasks(data: Path) -> Iterator[tuple[Json, list[list[str]]]]:
    answers = {a["id"]: a for a in _lines(data / "possible_answer" / TASKS)}
    for task in _lines(data / TASKS):
        yield task, answers[task["id"]]["ground_truth"]


def _lines(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def _session(task: Json, right: list[list[str]], data: Path) -> Json:
    tools = _tools(task["involved_classes"], data)
    orders = {
        tool["function"]["name"]: list(tool["function"]["parameters"]["properties"])
        for tool in tools
    }
    messages: list[Json] = []
    for asked, calls in zip(task["question"], right, strict=True):
        messages += asked
        for call in calls:
            name = f"call_{len(messages)}"
            messages += [
                _called(call, name, orders),
                {"role": "tool", "tool_call_id": name, "content": _run(call, task)},
            ]
        messages.append({"role": "assistant", "content": "Done."})
    return {"session": task["id"], "messages": messages, "tools": tools}


def _run(call: str, task: Json) -> str:
    execute = importlib.import_module(_EXECUTE).execute_multi_turn_func_call
    # It keeps the simulators of a task for the next call.
    results, _ = execute(
        func_call_list=[call],
        initial_config=task["initial_config"],
        involved_classes=task["involved_classes"],
        model_name="recorded",
        test_entry_id=task["id"],
    )
    return str(results[0])


def _called(call: str, name: str, orders: dict[str, list[str]]) -> Json:
    """A Python call as a message with a tool call."""
    parsed = ast.parse(call, mode="eval").body
    if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name):
        raise ValueError(f"no call of a tool: {call}")
    tool = parsed.func.id
    named = dict(zip(orders[tool], parsed.args, strict=False))
    named |= {str(word.arg): word.value for word in parsed.keywords}
    arguments = {key: ast.literal_eval(value) for key, value in named.items()}
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": name, "type": "function", "function": function}],
    }


def _tools(classes: list[str], data: Path) -> list[Json]:
    files = importlib.import_module(_BACKENDS).MULTI_TURN_FUNC_DOC_FILE_MAPPING
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": _schema(tool["parameters"]),
            },
        }
        for name in classes
        for tool in _lines(data / "multi_turn_func_doc" / files[name])
    ]


def _schema(value: Any) -> Any:
    """A schema with JSON schema's names of types."""
    if isinstance(value, list):
        return [_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    schema = {key: _schema(each) for key, each in value.items()}
    if isinstance(kind := schema.get("type"), str):
        schema["type"] = _TYPES.get(kind, kind)
    return schema


if __name__ == "__main__":
    main()
