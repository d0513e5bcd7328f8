"""Limits on size, for `make lint`: of the top of the package, of files, and of functions in lines and parameters."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "fewbits"
MODULES, PACKAGES = 7, 21  # at the top of the package
FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 8
# The verbs of the command line and of the package have an argument for every option. So has the value that they make of them.
VERBS = {
    "calibrate", "compare", "compare_files", "demo", "export", "fit", "formats", "inspect", "measure", "plan", "publish", "quantize",
    "report", "run", "serve", "verify",
}  # fmt: skip
VERBS_OF_BENCH = SOURCE / "cli"


def main() -> None:
    problems = [*_top(), *(problem for path in sorted(SOURCE.rglob("*")) for problem in _file(path))]
    print("\n".join(problems) or "sizes: within the limits")
    sys.exit(bool(problems))


def _top() -> Iterator[str]:
    modules = [path for path in SOURCE.glob("*.py") if path.name != "__init__.py"]
    packages = [path for path in SOURCE.iterdir() if (path / "__init__.py").is_file()]
    if len(modules) > MODULES or len(packages) > PACKAGES:
        yield f"{len(modules)} modules and {len(packages)} packages at the top; at most {MODULES} and {PACKAGES}"


def _file(path: Path) -> Iterator[str]:
    if path.suffix not in {".py", ".cc", ".h", ".inc"}:
        return
    text, name = path.read_text(), path.relative_to(SOURCE.parent.parent)
    if (lines := len(text.splitlines())) > FILE_LINES:
        yield f"{name}: {lines} lines, at most {FILE_LINES}"
    for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
        if isinstance(node, ast.FunctionDef):
            yield from (f"{name}:{node.lineno}: `{node.name}` has {problem}" for problem in _function(node, path))


def _function(node: ast.FunctionDef, path: Path) -> Iterator[str]:
    is_verb = node.name in VERBS or VERBS_OF_BENCH in path.parents
    first = node.body[0].lineno if is_verb else node.lineno
    if (lines := (node.end_lineno or 0) - first + 1) > FUNCTION_LINES:
        yield f"{lines} lines, at most {FUNCTION_LINES}"
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)] + [
        each.arg for each in (given.vararg, given.kwarg) if each
    ]
    count = len([name for name in names if name not in {"self", "cls"}])
    compiled = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)  # a GPU kernel takes every pointer and stride
    if count > PARAMETERS and not (is_verb or compiled):
        yield f"{count} parameters, at most {PARAMETERS}"


if __name__ == "__main__":
    main()
