"""The two domains of text the sample model reads: `code` and `docs`, both from the standard library's .py files.

In: the standard library of the Python that runs this. Out: bytes of UTF-8 per domain and split. What the model makes
of those bytes is not decided here. A file is in one split only, so held-out text comes from files never trained on.
"""

import ast
import hashlib
import inspect
import io
import re
import sysconfig
import tokenize
from pathlib import Path

DOMAINS = ("code", "docs")
HELD_OUT_SHARE = 0.1

# Tests and programs that are not part of every installation, packages of others, and two packages of tables
# (character maps, the language reference as one dict) that are neither code nor docstrings.
EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "encodings", "pydoc_data"}
# Made when Python is built: they hold the paths and compiler flags of one machine.
GENERATED = ("config-", "_sysconfigdata")


def standard_library_files() -> dict[str, Path]:
    """Return the usable .py files, keyed and sorted by their path relative to the standard library (with `/`)."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not EXCLUDED_FOLDERS.intersection(parts[:-1]) and not parts[0].startswith(GENERATED):
            files["/".join(parts)] = path
    return files


def is_held_out(relative_path: str) -> bool:
    """Say whether a file is kept from training; depends on its path alone, so all Python versions mostly agree."""
    return int(hashlib.sha256(relative_path.encode()).hexdigest()[:8], 16) < HELD_OUT_SHARE * 2**32


def _docstring_nodes(tree: ast.Module) -> list[ast.Expr]:
    nodes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                nodes.append(first)
    return nodes


def code_text(source: str) -> str:
    """Return the source with comments and docstrings cut out and the lines that held only those dropped.

    Everything else stays as written, by position: the tokens of f-strings differ between Python versions, their
    text does not.
    """
    lines: list[str | None] = list(io.StringIO(source, newline=""))
    cuts = []  # (first line, first character, last line, last character), lines from 0
    for node in _docstring_nodes(ast.parse(source)):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        # ast counts columns in bytes of UTF-8, tokenize in characters.
        start = len((lines[first] or "").encode()[: node.col_offset].decode())
        end = len((lines[last] or "").encode()[: node.end_col_offset].decode())
        cuts.append((first, start, last, end))
    cuts += [
        (token.start[0] - 1, token.start[1], token.end[0] - 1, token.end[1])
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for first, start, last, end in sorted(cuts, reverse=True):  # last cut first: earlier positions stay valid
        left = ((lines[first] or "")[:start] + (lines[last] or "")[end:]).rstrip()
        lines[first : last + 1] = [left + "\n" if left else None] + [None] * (last - first)
    kept = "".join(line for line in lines if line is not None)
    return re.sub(r"\n{4,}", "\n\n\n", kept).strip("\n")


def docs_text(source: str) -> str:
    """Return the docstrings of a module, its classes and its functions, dedented, a blank line between two."""
    texts = [inspect.cleandoc(ast.literal_eval(node.value)) for node in _docstring_nodes(ast.parse(source))]
    return "\n\n".join(text for text in texts if text)


def read_corpus() -> dict[str, dict[str, bytes]]:
    """Return the text as `corpus["train" or "held_out"]["code" or "docs"]`: files in path order, a blank line between.

    Raises:
        ValueError: a domain has under 100,000 bytes in either split.
    """
    extract = {"code": code_text, "docs": docs_text}
    texts: dict[str, dict[str, list[str]]] = {
        split: {domain: [] for domain in DOMAINS} for split in ("train", "held_out")
    }
    for relative_path, path in standard_library_files().items():
        with tokenize.open(path) as file:  # honours the encoding that the file declares
            source = file.read()
        split = "held_out" if is_held_out(relative_path) else "train"
        for domain in DOMAINS:
            text = extract[domain](source)
            if text:
                texts[split][domain].append(text)
    corpus = {
        split: {domain: "\n\n".join(parts).encode() for domain, parts in domains.items()}
        for split, domains in texts.items()
    }
    for split, domains in corpus.items():
        for domain, text_bytes in domains.items():
            if len(text_bytes) < 100_000:
                raise ValueError(
                    f"{sysconfig.get_path('stdlib')}: expected at least 100,000 bytes of {split} {domain}, "
                    f"found {len(text_bytes):,}. Run this with a Python that has its standard library as .py files."
                )
    return corpus
