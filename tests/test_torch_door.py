"""The door to private torch APIs: what each function stands on is there, and how it changed."""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from compilespec import _torch_compat

ROOT = Path(__file__).resolve().parent.parent
DOOR = ROOT / "compilespec" / "_torch_compat.py"
# Each private name of torch that the door uses: what it does there, and what changed since 2.11.
APIS = {
    "torch._C.DisableTorchFunctionSubclass": "no_torch_function",
    "torch._C._jit_get_all_schemas": "operators_digest",
    "torch._C._nn.linear": "functions_of_nn",
    "torch._dispatch.python.enable_python_dispatcher": "running_fakes",
    "torch._dynamo.config.patch": "capture_config",
    "torch._dynamo.config.assume_static_by_default": "capture_config",
    "torch._dynamo.config.automatic_dynamic_shapes": "capture_config",
    "torch._dynamo.config.fake_tensor_cache_enabled": "capture_config",
    "torch._dynamo.config.get_config_copy": "capture_settings",
    "torch._dynamo.exc.TorchDynamoException": "dynamo_errors",
    "torch._dynamo.mark_dynamic": "mark_dynamic",
    "torch._dynamo.utils.counters": "count_compilations",
    "torch._guards.TracingContext.get_traced_code": "traced_codes",
    "torch._guards.tracing": "standalone_compile",
    "torch._inductor.CompiledArtifact.load": "load_artifact",
    "torch._inductor.async_compile.AsyncCompile.submit": "compilers_in_background",
    "torch._inductor.codecache.CppWrapperCodeCache.load_pybinding": "compilers_in_background",
    "torch._inductor.codecache.CppWrapperCodeCache.load_pybinding_async": "compilers_in_background",
    "torch._inductor.cpu_vec_isa.VecISA.check_build": "replace_isa_probe",
    "torch._inductor.standalone_compile": "standalone_compile",
    "torch._int_mm": "int_mm",
    "torch._ops.OpOverload": "OpOverload",
    "torch._ops.OpOverloadPacket": "OpOverloadPacket",
    "torch._subclasses.fake_tensor.FakeTensor": "is_fake, restored_fakes",
    "torch._subclasses.fake_tensor.FakeTensorMode": "fake_mode",
    "torch.Tensor._make_wrapper_subclass": "wrapper_tensor",
    "torch.compiler.config.cache_key_tag": "standalone_compile",
    "torch.fx._lazy_graph_module._LazyGraphModule": "graph_module",
    "torch.fx.Node._rename": "rename_placeholder",
    "torch.fx.experimental.proxy_tensor._ProxyTensor": "_Retracing",
    "torch.fx.experimental.proxy_tensor.get_proxy_mode": "_Retracing",
    "torch.fx.experimental.proxy_tensor.get_proxy_slot": "_Retracing",
    "torch.fx.experimental.proxy_tensor.make_fx": "retrace",
    "torch.fx.experimental.proxy_tensor.set_proxy_slot": "_Retracing",
    "torch.fx.experimental.proxy_tensor.snapshot_fake": "_Retracing",
    "torch.fx.experimental.sym_node.SymNode": "restored_fakes",
    "torch.fx.experimental.symbolic_shapes.ConstraintViolationError": "dynamo_errors",
    "torch.fx.experimental.symbolic_shapes.DimDynamic": "fake_tensor",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv._get_user_frame": "restored_fakes",
    "torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext": "fake_tensor",
    "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols": "has_size_of_data",
    "torch.fx.traceback.preserve_node_meta": "retrace",
    "torch.overrides._get_current_function_mode_stack": "has_modes",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "has_modes",
    "torch.utils._pytree.tree_flatten": "_Retracing",
    "torch.utils._pytree.tree_leaves": "passes.graph.fakes",
    "torch.utils._pytree.tree_map": "tracing.gguf_tensors",
    "torch.utils._pytree.tree_unflatten": "_Retracing",
}
# Names that stand in a record of an instance, or on CUDA builds alone.
ELSEWHERE = {"torch._C._cuda_endAllocateToPool"}


def _resolve(name: str) -> Any:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


@pytest.mark.parametrize("name", APIS)
def test_what_the_door_stands_on_is_there(name: str) -> None:
    try:
        _resolve(name)
    except AttributeError as error:
        pytest.fail(f"torch {torch.__version__} has no {name}: mend {APIS[name]} ({error})")


def test_the_list_has_every_private_import_of_the_door() -> None:
    modules = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(DOOR.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.")
        for alias in node.names
    }
    known = {*APIS, *ELSEWHERE}
    missing = {
        one for one in modules if not any(n == one or n.startswith(f"{one}.") for n in known)
    }
    assert missing == set()


def _private(tree: ast.AST) -> set[str]:
    """The private modules that a file imports, and the private names that it reads from `torch`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return {name for name in found if re.match(r"torch\.(utils\.)?_[^_]", name)}


def test_no_other_file_uses_private_names() -> None:
    files = (path for path in (ROOT / "compilespec").rglob("*.py") if path != DOOR)
    found = {str(path): _private(ast.parse(path.read_text(encoding="utf-8"))) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_changed_in_2_12_the_table_of_what_symbols_stood_for() -> None:
    """`ShapeEnv.var_to_val` became `backed_var_to_val`."""
    fake = _torch_compat.fake_tensor(_torch_compat.fake_mode(), torch.zeros(7), (0,))
    size = fake.shape[0]
    assert _torch_compat.example_of_symbol(size, _torch_compat.size_expression(size)) == 7
    assert _torch_compat.example_of(size) == 7


def test_sizes_are_restored_with_what_they_stood_for() -> None:
    """`ShapeEnv`'s tables, which know symbols by any name."""
    sizes, make = _torch_compat.restored_fakes({"s7": 5, "s9": 6})
    fake = make((sizes["s7"], 3), (3, 1), torch.float32, torch.device("cpu"))
    assert str(fake.shape[0]) == "s7"
    assert _torch_compat.example_of(fake.shape[0]) == 5
    assert _torch_compat.example_of(sizes["s7"] * sizes["s9"]) == 30


def test_a_newer_torch_is_said_once_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _torch_compat.warn_if_untested.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _torch_compat.warn_if_untested()  # the torch that runs these tests is one of the tested
    _torch_compat.warn_if_untested.cache_clear()
    monkeypatch.setattr(_torch_compat, "VERSION", (_torch_compat.NEWEST[0], 99))
    with pytest.warns(RuntimeWarning, match="the newest that compilespec was tested with"):
        _torch_compat.warn_if_untested()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _torch_compat.warn_if_untested()
    _torch_compat.warn_if_untested.cache_clear()
