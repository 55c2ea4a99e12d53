"""docs/equations.md from the docstrings: which equation, from where, in which function, shown by
which test.

    python tools/equations.py          write the page again

A function is on the page if its docstring has a line "Test: file::name". Its equation is the block
that is set in behind the first paragraph, else the first sentence; "Source: ..." is where it comes
from.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent.parent
PAGE = HERE / "docs" / "equations.md"
FILES = ("losses.py", "data.py", "models.py", "resharding.py", "ulysses.py", "ppo_fsdp.py")
HEAD = """# Equations

Every equation of the program as its docstring writes it, where it was published, the function that
is this equation, and a test that computes the same number another way. The symbols are explained at
the top of `losses.py`; a "definition" needs no paper. `python tools/equations.py` writes this page,
and `test_repo.py` fails when it is stale.

| equation | source | function | test |
|---|---|---|---|
"""


def documented(file: str) -> Iterator[tuple[str, str]]:
    """(name, docstring) of each function and class of a file, methods as Class.method."""

    def visit(body: list, prefix: str) -> Iterator[tuple[str, str]]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield prefix + node.name, ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, node.name + ".")

    yield from visit(ast.parse((HERE / file).read_text()).body, "")


def equation(docstring: str) -> list[str]:
    """Its lines, without shapes."""
    first, *others = docstring.split("\n\n")
    if others and others[0].startswith("    "):
        return [line.strip() for line in others[0].splitlines()]
    return [re.split(r" -> |; |\.\n|\. |\.$", first.replace("\n", " "))[0]]


def tagged(docstring: str, tag: str) -> str:
    """What stands behind "Source:" or "Test:", or nothing."""
    found = re.search(rf"^{tag}: (.*?)\.?(?=\n\w+: |\n\n|\Z)", docstring, re.DOTALL | re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def page() -> str:
    rows = []
    for file in FILES:
        for name, docstring in documented(file):
            test = tagged(docstring, "Test")
            if test:
                lines = [re.sub(" {2,}", " | ", line) for line in equation(docstring)]
                code = "<br>".join(f"`{line}`" for line in lines).replace("|", r"\|")
                source = tagged(docstring, "Source") or "definition"
                rows.append(f"| {code} | {source} | `{file}: {name}` | `{test}` |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
