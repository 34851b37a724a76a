"""A small compiler: Python functions over int64 and float32 to machine code, through LLVM.

The CPU kernels need loops, branches, calls and arithmetic on two types, and nothing else of Python.
What they need is little enough to be written down here, and compiling it costs a tenth of what a
general compiler takes, because LLVM sees each function once.

    @kernel functions ──ast──▶ LLVM IR ──optimise──▶ object code ──▶ address of the entry

In a kernel `int` is int64, `float` is float32 and a `Table` is the address of int64 values. There
are assignments, if, while, for over range, return, calls of kernels and intrinsics, and expressions
of names, numbers, + - * / // %, comparisons, and, or, not, min, max, int() and float(). `//` and
`%` are for numbers that are not negative; both sides of `and`, `or` and a conditional expression
are computed. What an intrinsic gives may also be a vector of float32: + - * / go element by
element. Anything else raises TypeError with the line.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import llvmlite.binding as llvm
from llvmlite import ir

I1, I64, F32 = ir.IntType(1), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(F32, 32)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Table:
    """int64 values at an address: Table(address)[index]. For kernels alone."""

    def __init__(self, address: int) -> None:
        raise TypeError("a table is made inside a kernel")

    def __getitem__(self, index: int) -> int:
        raise TypeError("a table is read inside a kernel")


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """A few instructions. `build(builder, arguments)` writes them where they are called."""

    build: Callable[[Any, list[Any]], Any]
    kinds: tuple[Any, ...]

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError("an intrinsic is called inside a kernel")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Python function that is compiled when an entry needs it."""

    function: Callable[..., Any]
    is_inline: bool

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError("a kernel is called inside a kernel")


def kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """This function is compiled. The optimiser decides whether its calls are."""
    return cast("Callable[_P, _R]", Kernel(function, is_inline=False))


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """As `kernel`, and its body is copied to where it is called."""
    return cast("Callable[_P, _R]", Kernel(function, is_inline=True))


class _Module(ir.Module):  # type: ignore[misc]  # llvmlite has no types
    """An IR module that says which instructions its intrinsics may use."""

    def __init__(self, features: frozenset[str]) -> None:
        super().__init__(name="kernels")
        self.features = features


def translate(entry: Any, features: frozenset[str]) -> str:
    """LLVM IR of this kernel and all that it calls; the entry is exported by its name.

    `features` are what intrinsics may ask for: "vnni".
    """
    module = _Module(features)
    functions = _Functions(module)
    functions.of(entry).linkage = "external"
    return str(module)


def machine_code(text: str, cpu: str, features: str) -> bytes:
    """An object file for this kind of processor."""
    machine, module = _optimised(text, cpu, features)
    return cast("bytes", machine.emit_object(module))


def assembly(text: str, cpu: str, features: str) -> str:
    """As `machine_code`, for people and tests."""
    machine, module = _optimised(text, cpu, features)
    return cast("str", machine.emit_assembly(module))


def _optimised(text: str, cpu: str, features: str) -> tuple[Any, Any]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=2, reloc="pic", codemodel="jitdefault", jit=True
    )
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    # vectors are written by hand: what the compiler might reorder would reorder sums
    options.loop_vectorization = options.slp_vectorization = False
    options.loop_unrolling = False  # tiles use all registers as they are
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return machine, module


class Loaded:
    """Object code in this process. Addresses are valid while the value lives."""

    def __init__(self, code: bytes) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address_of(self, name: str) -> int:
        """Where the exported function begins."""
        return cast("int", self._engine.get_function_address(name))


# ------------------------------------------------------------------------------------ functions


class _Functions:
    """The functions of one module, each translated when it is first called."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._done: dict[int, Any] = {}

    def of(self, kernel: Any) -> Any:
        if id(kernel) not in self._done:
            assert isinstance(kernel, Kernel)
            self._done[id(kernel)] = self._declare(kernel)
        return self._done[id(kernel)]

    def _declare(self, kernel: Kernel) -> Any:
        tree = _tree_of(kernel.function)
        kinds = [_kind_of(argument.annotation) for argument in tree.args.args]
        returns = _kind_of(tree.returns)
        name = kernel.function.__name__
        name = self.module.get_unique_name(name)
        function = ir.Function(self.module, ir.FunctionType(returns, kinds), name)
        function.linkage = "internal"
        if kernel.is_inline:
            function.attributes.add("alwaysinline")
        outer = inspect.getclosurevars(kernel.function).nonlocals
        scope = {**kernel.function.__globals__, **outer}
        _Body(self, function, scope, tree).translate()
        return function


def _tree_of(function: Callable[..., Any]) -> ast.FunctionDef:
    source = textwrap.dedent(inspect.getsource(function))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _kind_of(annotation: ast.expr | None) -> Any:
    name = "None" if annotation is None else ast.unparse(annotation)
    kinds = {"int": I64, "Table": I64, "float": F32, "None": ir.VoidType()}
    if name not in kinds:
        raise TypeError(f"a kernel has no type {name}")
    return kinds[name]


_INT_OPS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "udiv",
    ast.Mod: "urem",
}
_FLOAT_OPS: dict[type[ast.operator], str] = {
    ast.Add: "fadd",
    ast.Sub: "fsub",
    ast.Mult: "fmul",
    ast.Div: "fdiv",
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}


class _Body:
    """One function's statements. Locals are stack cells; LLVM turns them into registers."""

    def __init__(
        self, functions: _Functions, function: Any, scope: dict[str, Any], tree: ast.FunctionDef
    ) -> None:
        self._functions, self._function, self._scope, self._tree = functions, function, scope, tree
        self._entry = function.append_basic_block("entry")
        self._b = ir.IRBuilder(function.append_basic_block("begin"))
        self._cells: dict[str, Any] = {}
        self._loops: list[tuple[Any, Any]] = []  # where `continue` and `break` go

    def translate(self) -> None:
        for argument, value in zip(self._tree.args.args, self._function.args, strict=True):
            self._assign(argument.arg, value)
        self._block(self._tree.body)
        if not self._b.block.is_terminated:
            if self._function.ftype.return_type == ir.VoidType():
                self._b.ret_void()
            else:
                self._b.unreachable()
        ir.IRBuilder(self._entry).branch(self._function.blocks[1])

    # -------------------------------------------------------------------------- statements

    def _block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if self._b.block.is_terminated:
                return
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self._assign(name, self._value(value))
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for target, found in zip(names, [self._value(v) for v in values], strict=True):
                    assert isinstance(target, ast.Name)
                    self._assign(target.id, found)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                old = self._b.load(self._cells[name])
                self._assign(name, self._arithmetic(node, op, old, self._value(value)))
            case ast.If(test=test, body=body, orelse=orelse):
                self._branch(test, body, orelse)
            case ast.While(test=test, body=body):
                self._while(test, body)
            case ast.For(target=ast.Name(id=name), iter=ast.Call(args=bounds), body=body):
                self._for(name, bounds, body)
            case ast.Return(value=None):
                self._b.ret_void()
            case ast.Return(value=ast.expr() as value):
                self._b.ret(self._value(value))
            case ast.Continue():
                self._b.branch(self._loops[-1][0])
            case ast.Break():
                self._b.branch(self._loops[-1][1])
            case ast.Expr(value=ast.Constant()):
                pass  # a docstring
            case ast.Expr(value=ast.Call() as call):
                self._call(call)
            case _:
                raise self._refused(node)

    def _assign(self, name: str, value: Any) -> None:
        if value.type == I1:
            value = self._b.zext(value, I64)
        if name not in self._cells:
            self._cells[name] = ir.IRBuilder(self._entry).alloca(value.type, name=name)
        self._b.store(value, self._cells[name])

    def _branch(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        then, after = self._new_block("then"), self._new_block("after")
        other = self._new_block("else") if orelse else after
        self._b.cbranch(self._truth(test), then, other)
        for block, statements in ((then, body), (other, orelse)):
            if block is after:
                continue
            self._b.position_at_end(block)
            self._block(statements)
            if not self._b.block.is_terminated:
                self._b.branch(after)
        self._b.position_at_end(after)

    def _while(self, test: ast.expr, body: list[ast.stmt]) -> None:
        head, turn, after = (self._new_block(name) for name in ("head", "turn", "after"))
        self._b.branch(head)
        self._b.position_at_end(head)
        self._b.cbranch(self._truth(test), turn, after)
        self._turn(turn, body, again=head, leave=after)
        self._b.position_at_end(after)

    def _for(self, name: str, bounds: list[ast.expr], body: list[ast.stmt]) -> None:
        values = [self._value(bound) for bound in bounds]
        begin = values[0] if len(values) > 1 else ir.Constant(I64, 0)
        end = values[0] if len(values) == 1 else values[1]
        step = values[2] if len(values) == 3 else ir.Constant(I64, 1)
        head, turn, more, after = (
            self._new_block(label) for label in ("head", "turn", "more", "after")
        )
        self._assign(name, begin)
        self._b.branch(head)
        self._b.position_at_end(head)
        inside = self._b.icmp_signed("<", self._b.load(self._cells[name]), end)
        self._b.cbranch(inside, turn, after)
        self._turn(turn, body, again=more, leave=after)
        self._b.position_at_end(more)
        self._assign(name, self._b.add(self._b.load(self._cells[name]), step))
        self._b.branch(head)
        self._b.position_at_end(after)

    def _turn(self, block: Any, body: list[ast.stmt], again: Any, leave: Any) -> None:
        self._loops.append((again, leave))
        self._b.position_at_end(block)
        self._block(body)
        if not self._b.block.is_terminated:
            self._b.branch(again)
        self._loops.pop()

    # ------------------------------------------------------------------------- expressions

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=float(number)):
                return ir.Constant(F32, number)
            case ast.Constant(value=int(number)):
                return ir.Constant(I64, int(number))
            case ast.Name(id=name) if name in self._cells:
                return self._b.load(self._cells[name])
            case ast.Name() | ast.Attribute():
                return self._number(node)
            case ast.BinOp(left=left, op=op, right=right):
                return self._arithmetic(node, op, self._value(left), self._value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self._value(operand)
                return self._b.neg(value) if value.type == I64 else self._b.fneg(value)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._b.not_(self._truth(operand))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._comparison(node, op, self._value(left), self._value(right))
            case ast.BoolOp(op=op, values=values):
                return self._joined(op, values)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._b.select(self._truth(test), self._value(body), self._value(orelse))
            case ast.Subscript(value=table, slice=index):
                return self._element(self._value(table), self._value(index))
            case ast.Call():
                return self._call(node)
            case _:
                raise self._refused(node)

    def _joined(self, op: ast.boolop, values: list[ast.expr]) -> Any:
        truth = self._truth(values[0])
        for value in values[1:]:
            other = self._truth(value)
            joined = self._b.and_ if isinstance(op, ast.And) else self._b.or_
            truth = joined(truth, other)
        return truth

    def _number(self, node: ast.expr) -> Any:
        found = self._named(node)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self._refused(node)
        return ir.Constant(I64 if isinstance(found, int) else F32, found)

    def _named(self, node: ast.expr) -> Any:
        """What a name outside of the function stands for."""
        match node:
            case ast.Attribute(value=value, attr=attr):
                return getattr(self._named(value), attr)
            case ast.Name(id=name) if name in self._scope:
                return self._scope[name]
            case _:
                raise self._refused(node)

    def _arithmetic(self, node: ast.AST, op: ast.operator, left: Any, right: Any) -> Any:
        table = _INT_OPS if left.type == I64 else _FLOAT_OPS
        if left.type != right.type or type(op) not in table:
            raise self._refused(node)
        return getattr(self._b, table[type(op)])(left, right)

    def _comparison(self, node: ast.AST, op: ast.cmpop, left: Any, right: Any) -> Any:
        if left.type != right.type or type(op) not in _COMPARISONS:
            raise self._refused(node)
        compare = self._b.icmp_signed if left.type == I64 else self._b.fcmp_ordered
        return compare(_COMPARISONS[type(op)], left, right)

    def _truth(self, node: ast.expr) -> Any:
        value = self._value(node)
        if value.type == I1:
            return value
        return self._b.icmp_signed("!=", value, ir.Constant(I64, 0))

    def _element(self, table: Any, index: Any) -> Any:
        address = self._b.inttoptr(table, I64.as_pointer())
        return self._b.load(self._b.gep(address, [index]), align=8)

    def _call(self, node: ast.Call) -> Any:
        arguments = [self._value(argument) for argument in node.args]
        match node.func, arguments:
            case ast.Name(id="float"), [value]:
                return self._b.sitofp(value, F32)
            case ast.Name(id="int"), [value]:
                return self._b.fptosi(value, I64)
            case ast.Name(id="Table"), [value]:
                return value
            case ast.Name(id=("min" | "max") as name), [left, right]:
                op: ast.cmpop = ast.Lt() if name == "min" else ast.Gt()
                return self._b.select(self._comparison(node, op, left, right), left, right)
        called = self._named(node.func)
        if isinstance(called, Intrinsic):
            self._check(node, called.kinds, arguments)
            return called.build(self._b, arguments)
        if not isinstance(called, Kernel):
            raise self._refused(node)
        function = self._functions.of(called)
        self._check(node, tuple(function.ftype.args), arguments)
        return self._b.call(function, arguments)

    def _check(self, node: ast.Call, kinds: tuple[Any, ...], arguments: list[Any]) -> None:
        if tuple(argument.type for argument in arguments) != kinds:
            raise self._refused(node)

    def _new_block(self, name: str) -> Any:
        return self._function.append_basic_block(name)

    def _refused(self, node: ast.AST) -> TypeError:
        line = getattr(node, "lineno", 0)
        return TypeError(
            f"{self._function.name}, line {line}: `{ast.unparse(node)}` is not for kernels"
        )
