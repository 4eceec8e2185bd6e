"""Requests made of prompts and parameters, which are checked against the engine's sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import secrets
from collections.abc import Iterable, Sequence, Set
from typing import Any

from compilespec.errors import ContextExceeded, InvalidRequest, SpecError, is_integer
from compilespec.runtime.adapters import Adapters
from compilespec.runtime.blocks import num_blocks_for
from compilespec.runtime.detokenize import OutputText, Tokenizer, special_ids
from compilespec.runtime.embeds_prompt import EmbedsPrompt, content_ids, read_embeds
from compilespec.runtime.executor import Geometry
from compilespec.runtime.given_rows import all_rows
from compilespec.runtime.guides import Vocabulary
from compilespec.runtime.host_masks import make_follower
from compilespec.runtime.image_inputs import has_media
from compilespec.runtime.image_prompts import ImagePrompt, ImageReader, ReadPrompt
from compilespec.runtime.prompts import (
    as_prompt_list,
    check_choices,
    check_params,
    read_prompt,
    read_text,
)
from compilespec.runtime.request import Request, RequestState
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.runtime.sampling_rows import read_bias

Params = SamplingParams | Sequence[SamplingParams] | None
_END_OF_PROMPT = 16  # tokens after which a prediction is looked up


class Admission:
    """Makes an engine's requests; queues none.  Works from any thread.

    Args:
        tokenizer: None where prompts are token ids only.
        adapters: those that requests may ask for.
        eos_token_ids: ids that end every request that does not ignore them.
        images: reads prompts with images, where the model takes them.
    """

    def __init__(
        self,
        geometry: Geometry,
        tokenizer: Tokenizer | None,
        adapters: Adapters,
        eos_token_ids: Iterable[int],
        images: ImageReader | None = None,
    ) -> None:
        self._geometry, self._tokenizer, self._adapters = geometry, tokenizer, adapters
        self._images = images
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocabulary = Vocabulary(tokenizer, geometry.config.vocab_size)
        self._ids = itertools.count()

    def of_prompts(self, prompts: Any, params: Params) -> list[Request]:
        """The requests of one prompt or many, in order, `n` of each.

        Raises:
            SpecError: a single prompt cannot be served, or `params` shared by all cannot.  Of a
                list, a prompt that cannot be served gives requests that have ended with the error.
        """
        items, is_single = as_prompt_list(prompts)
        each = self._params_of_each(params, len(items))
        items = self._with_images(items)
        requests = []
        for item, item_params in zip(items, each, strict=True):
            try:
                requests += self._samples(item, item_params)
            except SpecError as error:
                if is_single:
                    raise
                known = item_params if isinstance(item_params, SamplingParams) else SamplingParams()
                requests += [self._refused(known, error) for _ in range(known.n)]
        return requests

    def single(self, prompt: Any, params: SamplingParams | None, priority: int) -> Request:
        """The request of one prompt that is sampled once.

        Raises: InvalidRequest (also where `n` is not 1), NotSupported.
        """
        samples = self.samples(prompt, params, priority)
        if len(samples) != 1:
            raise InvalidRequest(
                f"submit takes one sample, got n={len(samples)}; use generate, or submit the "
                "prompt once a sample with different seeds"
            )
        return samples[0]

    def samples(
        self, prompt: Any, params: SamplingParams | None, priority: int = 0
    ) -> list[Request]:
        """The requests of one prompt: `n`, of one seed.

        Raises: InvalidRequest, NotSupported.
        """
        if not is_integer(priority):
            raise InvalidRequest(f"priority: expected an integer, got {priority!r}")
        samples = self._samples(prompt, SamplingParams() if params is None else params)
        for sample in samples:
            sample.priority = priority
        return samples

    def _samples(self, prompt: Any, params: SamplingParams) -> list[Request]:
        check_params(params, self._tokenizer, self._geometry)
        params = dataclasses.replace(params)  # a copy, because the caller might change it
        self._adapters.find(params.adapter)
        read = self.read(prompt)
        ids = read.ids
        self._check_blocks(len(ids), params.max_new_tokens)
        eos = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        stop_ids = eos.union(params.stop_token_ids)
        check_choices(params, stop_ids, self._geometry.config.vocab_size)
        predicted: tuple[int, ...] = ()
        if params.prediction:
            told = read_text(params.prediction, self._tokenizer, self._geometry)
            predicted = (*ids[-_END_OF_PROMPT:], *told)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        bias = read_bias(params)
        requests = [
            Request(
                id=next(self._ids),
                prompt_token_ids=ids,
                params=params,
                bias=bias,
                seed=seed,
                sample=sample,
                stop_token_ids=stop_ids,
                given=read.rows,
                content_ids=read.content_ids,
                ahead=read.ahead,
                rope=read.rope,
                predicted=predicted,
                has_long_rope=self._outgrows_short_rope(len(ids) + params.max_new_tokens),
                guide=make_follower(params, self._vocabulary, end_ids=eos, stop_ids=stop_ids),
                output_text=OutputText(self._tokenizer, ids, params.stop, self._hidden(params))
                if self._tokenizer is not None
                else None,
            )
            for sample in range(params.n)
        ]
        self._adapters.assign(params.adapter, requests)
        return requests

    def _hidden(self, params: SamplingParams) -> Set[int] | None:
        return self._special_ids - set(params.shown_token_ids) if params.shown_token_ids else None

    @functools.cached_property
    def _special_ids(self) -> set[int]:
        return special_ids(self._tokenizer)

    def _outgrows_short_rope(self, num_tokens: int) -> bool:
        limit = self._geometry.config.short_rope_limit
        return limit is not None and min(num_tokens, self._geometry.config.max_seq_len) > limit

    def read(self, prompt: Any) -> ReadPrompt:
        """The parts of a request for this prompt.  Raises: InvalidRequest, NotSupported."""
        if isinstance(prompt, ReadPrompt):
            return prompt
        if isinstance(prompt, ImagePrompt) or has_media(prompt):
            return self._image_reader().read(prompt)
        ids = read_prompt(prompt, self._tokenizer, self._geometry)
        if not isinstance(prompt, EmbedsPrompt):
            return ReadPrompt(ids=ids)
        embeds = read_embeds(prompt, self._geometry)
        return ReadPrompt(ids=ids, rows=all_rows(embeds), content_ids=content_ids(embeds, ids))

    def _with_images(self, items: Sequence[Any]) -> list[Any]:
        """The prompts, with the images of all of them encoded together; errors of a prompt appear
        when it is read.
        """
        prepared = list(items)
        for index, item in enumerate(items):
            if has_media(item) and self._images is not None:
                with contextlib.suppress(SpecError):
                    prepared[index] = self._images.prepare(item)
        ready = [one for one in prepared if isinstance(one, ImagePrompt)]
        if ready:
            self._image_reader().encode(ready)
        return prepared

    def _image_reader(self) -> ImageReader:
        if self._images is None:
            raise InvalidRequest(
                "the prompt has images or sound and the model takes none: give text, or compile a "
                "model that takes them (such as AutoModelForImageTextToText loads), without "
                "tensor_parallel_size="
            )
        return self._images

    def _params_of_each(self, params: Params, count: int) -> list[SamplingParams]:
        params = SamplingParams() if params is None else params
        if isinstance(params, str) or not isinstance(params, Sequence):
            check_params(params, self._tokenizer, self._geometry)  # the call is at fault
            return [params] * count
        each = list(params)
        if len(each) != count:
            raise InvalidRequest(
                f"params: expected one SamplingParams or {count} (one per prompt), got {len(each)}"
            )
        return each

    def _check_blocks(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        sizes = self._geometry.config
        needed = num_blocks_for(self._geometry, num_prompt_tokens + max_new_tokens)
        if needed > sizes.num_blocks:
            raise ContextExceeded(
                f"the request needs {needed} cache blocks of {sizes.block_size} tokens and the "
                f"engine has {sizes.num_blocks}; lower max_new_tokens ({max_new_tokens}) or "
                f"compile with kv_cache_tokens of at least {needed * sizes.block_size}"
            )

    def _refused(self, params: SamplingParams, error: SpecError) -> Request:
        """A request that ended before it began."""
        return Request(
            id=next(self._ids),
            prompt_token_ids=(),
            params=params,
            seed=params.seed,
            stop_token_ids=frozenset(),
            state=RequestState.FINISHED,
            finish_reason="error",
            error=error,
        )
