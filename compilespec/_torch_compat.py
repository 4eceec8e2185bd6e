"""Every private torch API that compilespec uses, behind one door.  Works on torch 2.11 to 2.15.

Nothing else in the package may import from a `torch._*` module.  Each function says which private
name it stands for, so that a torch release that moves one is repaired here and nowhere else.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import functools
import hashlib
import itertools
import logging
import re
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

functions_of_nn = torch._C._nn
"""Functions of `torch.nn.functional` as graphs name them."""

OLDEST, NEWEST = (2, 11), (2, 15)
"""The versions of torch between which the tests pass (`make test-versions`)."""

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


@functools.cache
def warn_if_untested() -> None:
    """Say, once in a process, that this torch is newer than any that was tested."""
    if VERSION > NEWEST:
        newest = ".".join(map(str, NEWEST))
        warnings.warn(
            f"torch {torch.__version__} is newer than {newest}, the newest that compilespec was "
            "tested with; it goes on",
            RuntimeWarning,
            stacklevel=3,
        )


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """`torch._dynamo.mark_dynamic`: this dimension becomes a symbol in the next capture."""
    torch._dynamo.mark_dynamic(tensor, dim)


def dynamo_errors() -> tuple[type[BaseException], ...]:
    """The exceptions with which Dynamo refuses a model (`torch._dynamo.exc`), or a model whose
    code fixes a symbolic size (`ConstraintViolationError`); that of an index, which passes through.
    """
    from torch._dynamo import exc
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    return (exc.TorchDynamoException, ConstraintViolationError, IndexError)


def dynamo_cause(error: BaseException) -> tuple[str, list[tuple[str, int, str]]]:
    """The first line of Dynamo's reason for refusing, and the user's frames as (file, line,
    function), outermost first.
    """
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    if isinstance(error, ConstraintViolationError):
        found = re.findall(r'File "(.+)", line (\d+), in (\w+)', str(error))
        said = "it works for one number of tokens alone, as a loop over tokens does"
        return said, [(name, int(line), function) for name, line, function in found]
    cause = str(getattr(error, "msg", "") or error).strip().splitlines()
    frames = getattr(error, "real_stack", None) or []
    if raised := raised_while_traced(error):
        cause = [": ".join(raised)]
    return (cause[0] if cause else type(error).__name__), [
        (f.filename, f.lineno or 0, f.name) for f in frames
    ]


def raised_while_traced(error: BaseException) -> tuple[str, str] | None:
    """The class and the first line of an exception that the traced code raised itself, or that an
    operation of it raised; None where Dynamo itself refuses.
    """
    text = str(getattr(error, "msg", ""))
    found = re.search(r"raised exception (\w+)\((.*)\)$", text, re.M) or re.search(
        r"^  Explanation: .*: got (\w+)\((.*)\)$", text, re.M
    )
    if found is None:
        return None
    try:
        said = ast.literal_eval(f"({found[2]},)")[0]
    except (SyntaxError, ValueError, IndexError):
        said = found[2]
    return found[1], (str(said).strip().splitlines() or [""])[0]


@contextlib.contextmanager
def capture_config() -> Iterator[None]:
    """Dynamo settings of a capture: static unless marked, no automatic dynamism, no cache of fake
    results, which costs more than it saves where sizes are symbols (`torch._dynamo.config`).  What
    `torch._guards` and fake tensors log of an error is raised, too: it is said once.
    """
    loggers = [
        logging.getLogger(f"torch.{name}") for name in ("_guards", "_subclasses.fake_tensor")
    ]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.CRITICAL)
    try:
        with torch._dynamo.config.patch(
            assume_static_by_default=True,
            automatic_dynamic_shapes=False,
            fake_tensor_cache_enabled=False,
        ):
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


def capture_settings() -> dict[str, Any]:
    """Dynamo's settings, but those that change no graph (`torch._dynamo.config`)."""
    config: Any = torch._dynamo.config
    ignored = set(getattr(config, "_compile_ignored_keys", ()))
    return {key: v for key, v in config.get_config_copy().items() if key not in ignored}


def has_modes() -> bool:
    """True where a mode that could change operations is active (`_get_current_function_mode_stack`,
    `_get_current_dispatch_mode_stack`).
    """
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return bool(_get_current_function_mode_stack() or _get_current_dispatch_mode_stack())


def has_size_of_data(value: Any) -> bool:
    """True where a traced value, or one of its sizes, follows from the values of tensors
    (`free_unbacked_symbols`).
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    sized = isinstance(value, torch.Tensor | torch.SymInt | torch.SymBool | torch.SymFloat)
    return sized and bool(free_unbacked_symbols(value))


def traced_codes() -> list[types.CodeType]:
    """Inside a backend's call: the code objects that Dynamo went through
    (`TracingContext.get_traced_code`).
    """
    from torch._guards import TracingContext

    return list(dict.fromkeys(TracingContext.get_traced_code() or ()))


def size_guards() -> list[tuple[Any, str]]:
    """Inside a backend's call: the conditions on sizes that Dynamo met, as sympy expressions, each
    with the source line that asked (`ShapeEnv.guards`).
    """
    from torch._guards import TracingContext

    mode = TracingContext.get().fake_mode
    guards = mode.shape_env.guards if mode is not None and mode.shape_env else ()
    return [(guard.expr, str(guard.sloc.maybe_user_loc or "")) for guard in guards]


def fake_mode() -> Any:
    """A fresh `FakeTensorMode` with a shape environment that merges equal dynamic sizes into one
    symbol.

    Without its cache of results (`cache_enabled`): to rebuild a symbolic result from an entry
    costs more than to compute it, a fifth of a retrace.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=True), allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def is_fake(value: object) -> bool:
    """True where a value is a fake tensor, and no other subclass of tensors."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) is FakeTensor


def fake_tensor(mode: Any, tensor: torch.Tensor, dynamic_dims: Sequence[int] = ()) -> torch.Tensor:
    """`tensor` as a fake of `mode`: the named dimensions become symbols, all others stay static."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [
        DimDynamic.DYNAMIC if dim in dynamic_dims else DimDynamic.STATIC
        for dim in range(tensor.dim())
    ]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, symbolic_context=context)


@contextlib.contextmanager
def running_fakes(mode: Any) -> Iterator[None]:
    """Within, graphs run on fakes of `mode`, without gradients.  A symbol stays one: without
    `enable_python_dispatcher` operators such as `pad` make it the number that it stood for.
    """
    from torch._dispatch.python import enable_python_dispatcher

    with torch.no_grad(), mode, enable_python_dispatcher():
        yield


def retrace(gm: fx.GraphModule, fakes: Sequence[Any], mode: Any) -> fx.GraphModule:
    """Trace `gm` to ATen under `mode` (`make_fx`): node metadata are kept, and the graph's
    placeholders have their fakes as `meta["val"]`.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    def run(*args: Any) -> Any:
        return _Retracing(gm).run(*args)

    with running_fakes(mode), preserve_node_meta():
        traced = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    for node, fake in zip(traced.graph.find_nodes(op="placeholder"), fakes, strict=True):
        node.meta["val"] = fake
    return traced


class _Retracing(fx.Interpreter):
    """Runs a graph under `make_fx`.  An operation on tensors that look like those of an earlier
    one is not traced again: the ATen nodes of that one are copied, onto its own inputs.

    Layers are alike, so that two thirds of a graph are copies.  Private: `get_proxy_mode`,
    `get_proxy_slot`, `set_proxy_slot`, `snapshot_fake`, `_ProxyTensor`.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        from torch.fx.experimental import proxy_tensor

        super().__init__(gm)
        self._api: Any = proxy_tensor
        self._tracer: Any = proxy_tensor.get_proxy_mode().tracer  # type: ignore[union-attr]
        self._traced: dict[Any, _Stretch] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._run(super().call_function, target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._run(super().call_method, target, args, kwargs)

    def _run(self, trace: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, dict(kwargs)))
        looks, inputs = self._look_at(leaves)
        if looks is None:
            return trace(target, args, kwargs)
        key = (trace.__name__, target, str(form), looks)
        if key in self._traced:
            return self._copy(self._traced[key], inputs)
        last = next(iter(reversed(self._tracer.graph.nodes)))
        result = trace(target, args, kwargs)
        values, result_form = tree_flatten(result)
        made = list(
            itertools.takewhile(lambda n: n is not last, reversed(self._tracer.graph.nodes))
        )
        nodes = [self._node_of(value) for value in values]
        is_in_place = any(value is leaf for value in values for leaf in leaves)
        if not is_in_place and all(node in made for node in nodes):
            self._traced[key] = _Stretch(inputs, made[::-1], values, nodes, result_form)
        return result

    def _look_at(self, leaves: list[Any]) -> tuple[Any, list[fx.Node]]:
        """The facts that decide how an operation on `leaves` is traced, and the nodes of its
        tensors; no facts if more than shapes decide.
        """
        looks: list[Any] = []
        inputs: list[fx.Node] = []
        for leaf in leaves:
            look = look_of(leaf)
            if isinstance(leaf, torch.Tensor):
                node = self._node_of(leaf)
                if node is None:
                    return None, []
                inputs.append(node)
                look = (inputs.index(node), *look)  # a tensor given twice is not two
            if look is None:
                return None, []
            looks.append(look)
        return tuple(looks), inputs

    def _node_of(self, value: Any) -> fx.Node | None:
        """The node that made a tensor; None for one from outside, and for what is no tensor."""
        if not isinstance(value, torch.Tensor):
            return None
        slot = self._api.get_proxy_slot(value, self._tracer, None)
        return None if slot is None else slot.proxy.node

    def _copy(self, stretch: _Stretch, inputs: list[fx.Node]) -> Any:
        """Sizes among the nodes are what they were: only what makes tensors is copied."""
        env = dict(zip(stretch.inputs, inputs, strict=True))
        for node in stretch.nodes:
            if isinstance(node.meta.get("val"), torch.SymInt):
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env.get(n, n))
            copy = self._tracer.create_node(node.op, node.target, args, kwargs, node.name)
            for name in ("val", "tensor_meta"):
                if name in node.meta:
                    copy.meta[name] = node.meta[name]
            env[node] = copy
        values = []
        for value, made in zip(stretch.values, stretch.value_nodes, strict=True):
            copy = self._api.snapshot_fake(value)
            proxy = self._api._ProxyTensor(fx.Proxy(env[made], self._tracer), None)
            self._api.set_proxy_slot(copy, self._tracer, proxy)
            values.append(copy)
        return tree_unflatten(values, stretch.form)


@dataclass(frozen=True)
class _Stretch:
    """The nodes that tracing one operation made."""

    inputs: list[fx.Node]
    nodes: list[fx.Node]
    values: list[Any]  # the tensors of its result
    value_nodes: list[Any]
    form: Any


_SCALARS = (
    int, float, bool, str, type(None), type(Ellipsis), torch.SymInt, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip


def look_of(value: Any) -> Any:
    """The facts that the shape and dtype of an operation's result depend on, comparable without a
    guard: for a tensor, a slice or a scalar; None for anything else.
    """
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        return (value.dtype, value.device, *map(_plain, sizes))
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        return (slice, *map(_plain, ends)) if all(isinstance(e, _SCALARS) for e in ends) else None
    return (type(value), _plain(value)) if isinstance(value, _SCALARS) else None


def _plain(value: Any) -> Any:
    """A size that can be compared without a guard."""
    return value.node.expr if isinstance(value, torch.SymInt) else value


def rename_placeholder(node: fx.Node, name: str) -> None:
    """Give a placeholder a telling name (`Node._rename`)."""
    node._rename(name)
    node.target = node.name


def storage_place(tensor: torch.Tensor) -> tuple[int, ...]:
    """The address of a tensor's elements; on the meta device, which has no addresses, the storage's
    identity (`UntypedStorage._cdata`).
    """
    if tensor.device.type == "meta":
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
    return (tensor.data_ptr(),)


def wrapper_tensor(cls: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass whose numbers are in its parts (`Tensor._make_wrapper_subclass`)."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def no_torch_function() -> contextlib.AbstractContextManager[Any]:
    """A context in which calls on tensors of subclasses go to their `__torch_dispatch__`."""
    return torch._C.DisableTorchFunctionSubclass()


def graph_module(graph: fx.Graph, root: torch.nn.Module | None = None) -> fx.GraphModule:
    """A module of a graph, whose Python code is written when it is called or printed, as those that
    are interpreted never are (`torch.fx._lazy_graph_module._LazyGraphModule`).
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(torch.nn.Module() if root is None else root, graph)


def size_expression(size: Any) -> Any:
    """A symbolic size as a sympy expression (`SymInt.node.expr`)."""
    return size.node.expr


def free_guards(mode: Any) -> list[str]:
    """Guards that tracing added on symbols: each would make the graph wrong for some batch."""
    return [str(guard.expr) for guard in mode.shape_env.guards]


def standalone_compile(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """`torch._inductor.standalone_compile` on an ATen graph, shapes taken from the graph;
    saveable.

    Inductor's own cache knows an operator by its name alone: code that was generated for an earlier
    signature would be found there, and crash.  Hence the tag.  From a graph, Inductor makes a
    fake mode that takes no inputs whose strides leave gaps: these bring their own as the context.
    """
    import torch._inductor
    from torch.compiler import config

    shapes: Any = "from_graph"
    context: Any = contextlib.nullcontext()
    gapped = next((one for one in inputs if is_fake(one) and not one.is_contiguous()), None)
    if gapped is not None:
        shapes = "from_tracing_context"
        context = torch._guards.tracing(torch._guards.TracingContext(gapped.fake_mode))
    tag = f"{config.cache_key_tag} {operators_digest()}"
    with torch.no_grad(), context, config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        return torch._inductor.standalone_compile(
            gm, list(inputs), dynamic_shapes=shapes, options={"config_patches": options}
        )


class Build:
    """The C++ function of a wrapper, on whose library a compiler may still be at work."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait
        """Returns the function; raises what the compiler says."""

    def __call__(self, handles: Any) -> Any:
        return self.wait()(handles)


_builds: contextvars.ContextVar[list[Build] | None] = contextvars.ContextVar("builds", default=None)


@contextlib.contextmanager
def compilers_in_background() -> Iterator[list[Build]]:
    """Within, in this thread, Inductor goes on while compilers are at work on its C++ wrappers: the
    list gets a `Build` for each.
    """
    _replace_loading_of_wrappers()
    builds: list[Build] = []
    token = _builds.set(builds)
    try:
        yield builds
    finally:
        _builds.reset(token)


@functools.cache
def _replace_loading_of_wrappers() -> None:
    """`CppWrapperCodeCache.load_pybinding`, which waits for the compiler; `AsyncCompile.submit`
    has it work on Inductor's threads, as on kernels that have no C++ wrapper.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppWrapperCodeCache

    own = CppWrapperCodeCache.load_pybinding
    begin: Callable[..., Any] = CppWrapperCodeCache.load_pybinding_async

    def load_pybinding(*args: Any, **kwargs: Any) -> Any:
        builds = _builds.get()
        if builds is None:
            return own(*args, **kwargs)
        builds.append(Build(begin(*args, submit_fn=AsyncCompile.submit, **kwargs)))
        return builds[-1]

    CppWrapperCodeCache.load_pybinding = load_pybinding  # type: ignore[method-assign]


@functools.cache
def operators_digest() -> str:
    """A digest of the signatures of our operators (`torch._C._jit_get_all_schemas`)."""
    schemas = torch._C._jit_get_all_schemas()
    ours = sorted(str(one) for one in schemas if one.name.startswith("compilespec::"))
    return hashlib.sha256("\n".join(ours).encode()).hexdigest()[:16]


def load_artifact(path: str) -> Any:
    """`torch._inductor.CompiledArtifact.load` in the single-file format."""
    import torch._inductor

    artifact: Any = getattr(torch._inductor, "CompiledArtifact")  # noqa: B009
    return artifact.load(path=path, format="binary")


HAS_CPP_ENTRIES = VERSION >= (2, 13)
"""True where `cpp_entry` knows how this torch wraps compiled graphs."""

_WRAPPERS = frozenset((
    "forward", "<lambda>", "runtime_wrapper", "_runtime_wrapper", "g",
    "record_runtime_wrapper_prologue_enter", "record_runtime_wrapper_prologue_exit",
))  # fmt: skip
_MARKS = re.compile(r"__builtins__|torch|_increment_version_|_mark_dynamic_|_dyn_dims_\d+")


def cpp_entry(artifact: Any) -> Path | None:
    """The library whose C++ function, `inductor_entry_impl`, is all that a compiled graph does;
    None where Python has a part in it, or this torch wraps it in another way than 2.13
    (`CompiledArtifact._compiled_fn`, the closures of AOTAutograd's wrappers,
    `CompiledFxGraph.current_callable`, `CppWrapperCodeCache`).
    """
    if not HAS_CPP_ENTRIES:
        return None
    waiting: list[Any] = [getattr(artifact, "_compiled_fn", None)]
    seen: list[Any] = []
    entries: list[Any] = []
    is_wrapped = False
    while waiting:
        one = waiting.pop()
        if any(one is other for other in seen):
            continue
        seen.append(one)
        if isinstance(one, Build):
            one = one.wait()
        if isinstance(one, types.BuiltinFunctionType):
            entries.append(one)
        elif isinstance(one, types.FunctionType):
            if one.__name__ not in _WRAPPERS or (one.__name__ == "g" and not _only_converts(one)):
                return None
            if one.__name__ == "_runtime_wrapper":  # names what it does to inputs and results
                is_wrapped = True
                if not all(map(_MARKS.fullmatch, one.__globals__)):
                    return None
            waiting += [cell.cell_contents for cell in one.__closure__ or ()]
        else:
            inner = (getattr(one, name, None) for name in ("compiled_fn", "current_callable"))
            waiting += [given for given in inner if given is not None]
    if not is_wrapped or [one.__name__ for one in entries] != ["inductor_entry_cpp"]:
        return None
    library: str | None = getattr(entries[0].__self__, "__file__", None)
    return None if library is None else Path(library)


def _only_converts(wrapper: types.FunctionType) -> bool:
    """True where Inductor's wrapper around its C++ function only makes handles of tensors."""
    code = wrapper.__code__
    return "constants_tensor" not in code.co_varnames and "item" not in code.co_names


def replace_isa_probe(
    replacement: Callable[[Callable[[], bool], str], bool],
) -> None:
    """Let `replacement` answer whether code for a vector instruction set can be built and loaded:
    it gets Inductor's own probe, which compiles (once) and starts a process, and the probe's name
    (`VecISA.check_build`).
    """
    from torch._inductor.cpu_vec_isa import VecISA

    own = VecISA.check_build

    def check_build(self: Any, code: str) -> bool:
        return replacement(lambda: own(self, code), f"{type(self).__name__} {self} {code}")

    VecISA.check_build = check_build  # type: ignore[method-assign]


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`torch._int_mm`: int8 [M, K] @ [K, N] to int32; on CUDA, M of 17 and more, K and N multiples
    of 8.
    """
    return torch._int_mm(a, b)


def count_compilations() -> int:
    """Graphs Inductor has compiled in this process (`torch._dynamo.utils.counters`)."""
    from torch._dynamo.utils import counters

    return int(
        counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]
    )


def end_allocating(device: torch.device, pool: Any) -> None:
    """End a capture's use of a graph pool that `capture_end` left open because it failed
    (`_cuda_endAllocateToPool`); harmless where it is closed.
    """
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)


def is_mutable(target: Callable[..., Any] | str) -> bool:
    """True where an operator overload writes one of its arguments (`OpOverload._schema`)."""
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


@functools.cache
def mutated_arguments(target: Callable[..., Any] | str) -> tuple[int, ...]:
    """Positions of the arguments that an operator overload writes."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return ()
    return tuple(
        index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def returns_alias(target: Callable[..., Any] | str) -> bool:
    """True where an operator overload returns a view of, or the same tensor as, its first
    argument.
    """
    schema = getattr(target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def example_of(size: Any) -> int:
    """The size that a symbol stood for when it was traced (`SymInt.node.hint`)."""
    return size if isinstance(size, int) else int(size.node.hint)


def example_of_symbol(size: Any, symbol: Any) -> int:
    """The size that one symbol of an expression stood for (`SymNode.shape_env`)."""
    values = getattr(size.node.shape_env, "backed_var_to_val", None)  # until 2.12: `var_to_val`
    return int((size.node.shape_env.var_to_val if values is None else values)[symbol])


def restored_fakes(hints: dict[str, int]) -> tuple[dict[str, Any], Callable[..., torch.Tensor]]:
    """Symbolic sizes of these names that stand for `hints`, and what makes fakes of a shape,
    strides, dtype and device with them (`ShapeEnv`, whose tables know symbols; `SymNode`).

    Nobody looks for the line of Python that made them (`ShapeEnv._get_user_frame`): to tell it from
    its own lines, torch would import its whole compiler.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.sym_node import SymNode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))  # equal sizes stay two symbols
    mode.cache_enabled = False
    env: Any = mode.shape_env
    env._get_user_frame = lambda: None
    example = torch.empty([*hints.values(), 0], device="meta")
    fake = fake_tensor(mode, example, range(len(hints)))
    tables = [one for one in vars(mode.shape_env).values() if isinstance(one, dict)]
    sizes: dict[str, Any] = {}
    known: list[tuple[dict[Any, Any], Any, Any]] = []
    for (name, hint), size in zip(hints.items(), fake.shape, strict=False):
        symbol = size_expression(size)
        named = type(symbol)(name, **symbol.assumptions0)
        known += [(one, named, one[symbol]) for one in tables if symbol in one]
        sizes[name] = torch.SymInt(SymNode(named, mode.shape_env, int, hint))
    for table, named, entry in known:
        table[named] = entry

    def make(shape: Any, strides: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with mode, torch.no_grad():
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return sizes, make
