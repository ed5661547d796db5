"""Small faults in the source, made by the operators of cosmic-ray: which places there are, and a sample of them.

A place is a position and a family of operators (numbers, comparisons, decorators, ...); of the faults that a family has
for a place one is taken. Places and faults are drawn by a hash of the seed and of the line's text within its function,
so an edit elsewhere leaves the rest of the sample as it was.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

WINGS = {
    "models": ("grade/models",),
    "gradients": ("grade/gradients",),
    "rewards": ("grade/rewards",),
    "training": ("grade/training",),
    "memory": tuple(f"grade/memory/{name}.py" for name in ("tracker", "live", "trace", "step")),
    "entropy": ("grade/entropy",),
}
"""The core, and the sources of each wing; of memory, what traces a step."""

KINDS = (set("+-*/%") | {"//", "**"}, set("|&^"), {"==", "!=", "<", "<=", ">", ">="}, {"is", "is not"})
"""Operators that stand in for one another. Others (a shift of floats, say) fail wherever a test runs the line."""

CHECKS = ("strict", "frozen")
"""Keywords that only guard against a programmer's mistake."""


@dataclass(frozen=True)
class Mutant:
    """A fault: file from the root, function, line, operator, the text before and after, the whole file with it."""

    wing: str
    file: str
    function: str
    line: int
    operator: str
    before: str
    after: str
    source: str

    @property
    def key(self) -> tuple[str, ...]:
        """What stays the same when lines move."""
        return self.file, self.function, self.before, self.after


def sample(root: Path, wing: str, size: int, seed: int) -> list[Mutant]:
    """Mutants of a wing, at different places, by file and line.

    Args:
        root: Folder of the project.
        wing: One of `WINGS`.
        size: How many places.
        seed: Seed of the draw.
    """
    places = sorted(_places(root, wing, seed), key=lambda place: place.rank)
    drawn = itertools.islice((mutant for place in places if (mutant := place.mutant())), size)
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.line))


def count(root: Path, wing: str) -> int:
    """Places of a wing."""
    return sum(1 for _ in _places(root, wing, 0))


def replaced(root: Path, wing: str, file: str, before: str, after: str) -> Mutant:
    """A mutant by hand: text that stands once in the file, and what replaces it."""
    source = (root / file).read_text(encoding="utf-8")
    if source.count(before) != 1:
        raise ValueError(f"{file}: {before!r} stands there {source.count(before)} times")
    line = source[: source.index(before)].count("\n") + 1
    function = _function(ast.parse(source), line)
    return Mutant(wing, file, function, line, "by hand", before.strip(), after.strip(), source.replace(before, after))


@dataclass(frozen=True)
class _Place:
    wing: str
    file: str
    function: str
    source: str
    rank: str
    faults: tuple[tuple[str, int], ...]  # operators with the number of this place among theirs

    def mutant(self) -> Mutant | None:
        """The fault that the rank picks, of those that Python parses; None: there is none."""
        made = [(name, _mutated(self.source, name, occurrence)) for name, occurrence in self.faults]
        made = [(name, source) for name, source in made if source]
        if not made:
            return None
        name, source = made[int(self.rank[:8], 16) % len(made)]
        old, new = self.source.splitlines(), source.splitlines()
        changed = [op for op in difflib.SequenceMatcher(None, old, new, False).get_opcodes() if op[0] != "equal"]
        start, end, start_new, end_new = changed[0][1], changed[-1][2], changed[0][3], changed[-1][4]
        before, after = (" ".join(line.strip() for line in lines) for lines in (old[start:end], new[start_new:end_new]))
        return Mutant(self.wing, self.file, self.function, start + 1, name, before, after, source)


@cache
def _operators() -> dict[str, tuple[str, object]]:
    """Operators of cosmic-ray by name, with their families."""
    from cosmic_ray.operators.provider import _OPERATORS as known

    families = {}
    for name, operator in known.items():
        if name.startswith("Variable"):
            continue  # they need to be told names
        words = name.split("_")
        pair = {"ReplaceBinaryOperator": _BINARY, "ReplaceComparisonOperator": _COMPARISONS}.get(words[0])
        if pair and not any({pair[words[1]], pair[words[2]]} <= kind for kind in KINDS):
            continue
        families[name] = (words[0], operator())
    return families


_BINARY = dict(
    Add="+", Sub="-", Mul="*", Div="/", FloorDiv="//", Mod="%", Pow="**", RShift=">>", LShift="<<", BitOr="|",
    BitAnd="&", BitXor="^",
)  # fmt: skip
_COMPARISONS = dict(
    Eq="==", NotEq="!=", Lt="<", LtE="<=", Gt=">", GtE=">=", Is="is", IsNot="is not",
)  # fmt: skip


def _places(root: Path, wing: str, seed: int) -> Iterator[_Place]:
    for source in WINGS[wing]:
        for path in [root / source] if source.endswith(".py") else sorted((root / source).rglob("*.py")):
            yield from _places_of(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix(), wing, seed)


def _places_of(source: str, file: str, wing: str, seed: int) -> Iterator[_Place]:
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes, lines, tree = list(ast_nodes(get_ast(source))), source.splitlines(), ast.parse(source)
    found: dict[tuple, list[tuple[str, int]]] = {}
    for name, (family, operator) in _operators().items():
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(positions):
            found.setdefault((start, family), []).append((name, occurrence))
    skipped, seen = list(_immaterial(tree)), {}
    for ((line, column), family), faults in sorted(found.items()):
        if any(first <= (line, column) < last for first, last in skipped):
            continue
        function = _function(tree, line)
        text = f"{seed}:{file}:{function}:{lines[line - 1].strip()}:{column}:{family}"
        seen[text] = seen.get(text, 0) + 1
        rank = hashlib.sha256(f"{text}:{seen[text]}".encode()).hexdigest()
        yield _Place(wing, file, function, source, rank, tuple(faults))


def _mutated(source: str, operator: str, occurrence: int) -> str | None:
    """The source with a fault, if it is one: Python parses it, and not as the same program."""
    from cosmic_ray.mutating import mutate_code

    try:
        mutated = mutate_code(source, _operators()[operator][1], occurrence)
        return mutated if ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)) else None
    except (SyntaxError, AttributeError):  # `*` alone among parameters; an exception named with its module
        return None


def _function(tree: ast.Module, line: int) -> str:
    """The innermost function or class around a line."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    around = [node for node in around if node.lineno <= line <= node.end_lineno]
    return max(around, key=lambda node: node.lineno).name if around else ""


def _immaterial(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans without effect on a result.

    Annotations, aliases of types, what an error says, `if TYPE_CHECKING`, and checks of the program on itself:
    `assert`, the `strict` of `zip` and the `frozen` of a dataclass.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield _span(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.returns:
            yield _span(node.returns)
        elif isinstance(node, ast.Raise | ast.Assert) or isinstance(node, ast.keyword) and node.arg in CHECKS:
            yield _span(node)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            yield _span(node)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr):
            yield _span(node)


def _span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
