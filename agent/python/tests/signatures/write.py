"""Writes down what a framework's abstract classes ask of a subclass: names, parameters and defaults, none of its code.

    write.py FILE ORIGIN > NAME.py

FILE is a module of the framework, ORIGIN says which: repository, path, version. Tests load what is written in place of
that module. The frameworks that are on PyPI are installed instead.
"""

import ast
import pathlib
import sys


def signatures(source, origin):
    """Every class of a module, without bodies, docstrings and whatever is not a method."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for each in classes:
        each.body = [node for node in each.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for method in each.body:
            method.body = [ast.Expr(ast.Constant(...))]
    head = f"# Made by agent/python/tests/signatures/write.py from\n# {origin}\n"
    head += "from __future__ import annotations\n\nfrom abc import ABC, abstractmethod\n"
    return "\n\n".join([head, *(ast.unparse(each) + "\n" for each in classes)])


if __name__ == "__main__":
    file, origin = sys.argv[1:]
    sys.stdout.write(signatures(pathlib.Path(file).read_text(), origin))
