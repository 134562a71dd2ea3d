"""How often the number of ranks is in a learning rate, read off a script's source; pure.

Multiplications and divisions by `hvd.size()` are followed through assignments, in the order of the source. Of branches
the larger count holds, what a function is called with counts as none, and sums, powers and roots forget it: what is
found twice is there twice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_RATES = {"lr", "learning_rate", "initial_lr"}
_SUBSCRIPT = "['lr']"  # of any group of parameters
Powers = dict[str, int]


def scaled_twice(source: str) -> Iterator[int]:
    """Yields the lines at which a learning rate is given that has the number of ranks in it twice or more.

    Args:
        source: a script's text; one that is no Python has no such line.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    reader = _Reader()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            reader.modules |= {its.asname or its.name for its in node.names if its.name.startswith("horovod")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod"):
            reader.named |= {its.asname or its.name for its in node.names if its.name == "size"}
    reader.block(tree.body, {})
    yield from sorted(reader.lines)


class _Reader:
    def __init__(self) -> None:
        self.modules: set[str] = set()  # names of Horovod's modules, and of their function `size`
        self.named: set[str] = set()
        self.lines: set[int] = set()

    def block(self, statements: list[ast.stmt], powers: Powers) -> None:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        for statement in statements:
            if not isinstance(statement, kinds):
                self._statement(statement, powers)
        for function in statements:  # called when the names outside have their values
            if not isinstance(function, kinds):
                continue
            inner = dict(powers)
            if not isinstance(function, ast.ClassDef):
                arguments = function.args
                for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    inner.pop(argument.arg, None)
            self.block(function.body, inner)

    def _statement(self, statement: ast.stmt, powers: Powers) -> None:
        branches = [getattr(statement, name, None) or [] for name in ("body", "orelse", "finalbody")]
        branches += [handler.body for handler in getattr(statement, "handlers", ())]
        within = {id(node) for body in branches for inner in body for node in ast.walk(inner)}
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and id(node) not in within:
                self._call(node, powers)
        value = getattr(statement, "value", None)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and value is not None:
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                self._assign(target, self._power(value, powers), powers)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.op, (ast.Mult, ast.Div)):
            sign = 1 if isinstance(statement.op, ast.Mult) else -1
            before = self._power(statement.target, powers)
            self._assign(statement.target, before + sign * self._power(statement.value, powers), powers)
        ends = []
        for body in branches:
            inner = dict(powers)
            self.block(body, inner)
            ends.append(inner)
        for inner in ends:
            for name, power in inner.items():
                powers[name] = max(power, powers.get(name, power))

    def _call(self, call: ast.Call, powers: Powers) -> None:
        for keyword in call.keywords:
            if keyword.arg in _RATES:
                self._rate(keyword.value, self._power(keyword.value, powers), powers)
        name = ast.unparse(call.func).rpartition(".")[2]
        for node in call.args if name == "LambdaLR" else ():
            if isinstance(node, ast.Lambda):  # a factor of the rate
                self._rate(node.body, self._power(node.body, powers) + powers.get(_SUBSCRIPT, 0), powers)
        if name[:1].isupper() and call.args and ("optim" in ast.unparse(call.func)):  # Keras takes the rate first
            self._rate(call.args[0], self._power(call.args[0], powers), powers)

    def _assign(self, target: ast.expr, power: int, powers: Powers) -> None:
        if isinstance(target, ast.Subscript) and _is_rate(target):
            self._rate(target, power, powers)
        elif isinstance(target, (ast.Name, ast.Attribute)):
            powers[ast.unparse(target)] = power

    def _rate(self, node: ast.expr, power: int, powers: Powers) -> None:
        powers[_SUBSCRIPT] = max(power, powers.get(_SUBSCRIPT, 0))
        if power > 1:
            self.lines.add(node.lineno)

    def _power(self, node: ast.expr, powers: Powers) -> int:
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
            sign = 1 if isinstance(node.op, ast.Mult) else -1
            return self._power(node.left, powers) + sign * self._power(node.right, powers)
        if isinstance(node, ast.IfExp):
            return max(self._power(node.body, powers), self._power(node.orelse, powers))
        if isinstance(node, ast.Call):
            function = node.func
            own = isinstance(function, ast.Name) and function.id in self.named
            if isinstance(function, ast.Attribute) and function.attr == "size":
                own = ast.unparse(function.value) in self.modules
            return 1 if own and not node.args else 0
        if isinstance(node, ast.Subscript):
            return powers.get(_SUBSCRIPT, 0) if _is_rate(node) else 0
        return powers.get(ast.unparse(node), 0) if isinstance(node, (ast.Name, ast.Attribute)) else 0


def _is_rate(node: ast.Subscript) -> bool:
    return isinstance(node.slice, ast.Constant) and node.slice.value == "lr"
