"""Lets rows of a prompt be embeddings that the host gives, in place of those of token ids."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from compilespec.errors import NotSupported
from compilespec.passes.splice.builder import Splice, node_of
from compilespec.program import BufferSpec, ProgramConfig, module_path
from compilespec.tracing.structure import EMBEDDING, id_readers, is_float, shape_of


def read_embeds(step: Splice) -> int:
    """embedding(ids) -> merged(embedding(ids), given_T, embeds_PD), behind all that the embedding's
    module does (a scale, in Gemma): what transformers calls `inputs_embeds`.

    Returns: 1.  Raises: NotSupported where ids enter anything else.  Numerics: exact.  Torch IR.
    """
    embedded = _embedded(node_of(step.roles.ids))
    shape, dtype = embedded.meta["example"]
    given = step.batch("given_T")
    rows = step.buffer(embeds_rows(step.config, int(shape[-1]), dtype))
    step.wrap(embedded, merged, given, rows)
    return 1


def merged(embedded_1TD: Tensor, given_T: Tensor, embeds_PD: Tensor) -> Tensor:
    """Row `given_T` of what the host gave; -1: the embedding of the token's id."""
    own_TD = embeds_PD[given_T.clamp(min=0).long()]
    return torch.where((given_T >= 0).unsqueeze(-1), own_TD, embedded_1TD)


def embeds_rows(config: ProgramConfig, width: int, dtype: torch.dtype) -> BufferSpec:
    """The embeddings of a call's tokens, where they lie in it."""
    shape = (config.max_prefill_tokens, width)
    return BufferSpec(name="embeds_PD", kind="state", shape=shape, dtype=dtype, by_host=True)


def _embedded(ids: fx.Node) -> fx.Node:
    """The output of the module that embeds the token ids."""
    readers = id_readers(ids)
    embeddings = [node for node in readers if node.target in EMBEDDING]
    if len(embeddings) != 1 or len(readers) != 1 or shape_of(embeddings[0]) is None:
        named = ", ".join(f"{node.name} ({module_path(node) or 'top'})" for node in readers)
        raise NotSupported(
            f"prompt_embeds=True: the model's token ids enter {named or 'nothing'}; expected one "
            "embedding and nothing else, for which rows can be given: leave it out"
        )
    node = embeddings[0]
    module = module_path(node)
    while len(node.users) == 1:
        (user,) = node.users
        if module_path(user) != module or not is_float(user) or shape_of(user) is None:
            break
        node = user
    return node
