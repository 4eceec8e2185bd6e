"""Finds the images and sounds of a prompt, and lets the model's processor make tensors of them."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from compilespec.errors import InvalidRequest, MissingDependency, NotSupported
from compilespec.runtime.chat import chat_options, check_names
from compilespec.runtime.texts import check_unicode
from compilespec.tracing.media import IMAGES, MEDIA, SOUND, Medium

_VIDEOS = ("video_", "pixel_values_videos")
_INPUTS = tuple(start for medium in MEDIA for start in medium.inputs)
_INSIDE = ("image", "audio", "url", "image_url")  # keys of a part that may hold the medium


def belongs(name: str, medium: Medium) -> bool:
    """True where a tensor of a processor's output is of this medium."""
    return name.startswith(medium.inputs) and not name.startswith(_VIDEOS)


def has_media(prompt: Any) -> bool:
    """True where a prompt holds images or sound: beside text, in messages, or as a processor's
    output.
    """
    if not isinstance(prompt, Mapping):
        return False
    if "messages" in prompt:
        return any(_parts_of(prompt["messages"], medium) for medium in MEDIA)
    names = [str(name) for name in prompt]
    keys = {medium.key for medium in MEDIA}
    return not keys.isdisjoint(names) or any(n.startswith(_INPUTS + _VIDEOS) for n in names)


def process(
    prompt: Mapping[str, Any], processor: Any, medium: Medium = IMAGES
) -> Mapping[str, Any]:
    """The processor's output for a prompt; a prompt that is such an output is returned unchanged.

    Args:
        medium: the medium that the model takes beside text.
    Raises: InvalidRequest (no processor, an image of another form, or input that the processor
        refuses), NotSupported (another medium), MissingDependency (Pillow, for encoded images).
    """
    if "messages" in prompt:
        made = _process_chat(prompt, processor, medium)
    elif medium.key in prompt:
        made = _process_text(prompt, processor, medium)
    else:
        made = prompt
    others = {*_INPUTS, *_VIDEOS, *(one.key for one in MEDIA)}.difference(medium.inputs)
    if other := next((name for name in made if str(name).startswith(tuple(others))), None):
        raise NotSupported(
            f"the prompt has {other}: expected text and {medium.one}s alone, which the model "
            "takes; leave it out"
        )
    if "input_ids" not in made:
        raise InvalidRequest(
            f"the prompt has {', '.join(map(str, made))} without input_ids: expected what the "
            f"model's processor returns for text and {medium.one}s"
        )
    return made


def _process_text(prompt: Mapping[str, Any], processor: Any, medium: Medium) -> Mapping[str, Any]:
    key = medium.key
    text, given = prompt.get("prompt"), prompt[key]
    check_unicode("the prompt", text)
    if others := [name for name in prompt if name not in ("prompt", key)]:
        raise InvalidRequest(
            f"the prompt has {others[0]!r} beside prompt and {key}: expected those two alone"
        )
    if not isinstance(text, str) or not isinstance(given, Sequence) or not given:
        raise InvalidRequest(
            f'expected {{"prompt": text, "{key}": [one, ...]}}, got a prompt of '
            f"{type(text).__name__} and {key} of {type(given).__name__}"
        )
    _check_processor(processor, medium)
    opened = [_OPEN[medium.one](one) for one in given]
    return _call(lambda: processor(text=text, return_tensors="pt", **{key: opened}), medium)


def _process_chat(prompt: Mapping[str, Any], processor: Any, medium: Medium) -> Mapping[str, Any]:
    check_names(prompt)
    _check_processor(processor, medium)
    options = chat_options(prompt, processor)
    check_unicode("the conversation", prompt["messages"])
    messages = [_opened(message, medium) for message in prompt["messages"]]
    return _call(
        lambda: processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True,
            return_tensors="pt", **options,
        ),
        medium,
    )  # fmt: skip


def _call(make: Any, medium: Medium) -> Mapping[str, Any]:
    try:
        made: Mapping[str, Any] = make()
        return made
    except Exception as error:  # processors and templates raise any error
        why = (str(error).splitlines() or ["no message"])[0]
        raise InvalidRequest(
            f"the model's processor refuses the prompt ({type(error).__name__}: {why}); name every "
            f"{medium.one} once in the text or messages, in the way of its chat template"
        ) from error


def _check_processor(processor: Any, medium: Medium) -> None:
    if processor is None:
        pillow = "; Pillow must be installed" if medium is IMAGES else ""
        raise InvalidRequest(
            f"the prompt has {medium.one}s and the engine has no processor: compile a checkpoint "
            f"that has one beside it (preprocessor_config.json{pillow}), give it as "
            f"tokenizer=, or pass what it returns, input_ids and {medium.main}"
        )


def _opened(message: Any, medium: Medium) -> Any:
    """A message whose images or sounds are ready for the processor."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if content is None or isinstance(content, str):
        return message
    return {**message, "content": [_opened_part(part, medium) for part in content]}


def _opened_part(part: Any, medium: Medium) -> Any:
    if _is_part(part, medium):
        kind = medium.parts[0]
        return {"type": kind, kind: _OPEN[medium.one](_inside(part))}
    if isinstance(part, Mapping) and part.get("type") == "text":
        return part
    raise InvalidRequest(
        f"a part of a message is {part!r:.60}: expected text or {medium.one}, which the model "
        "takes; nothing else is read"
    )


def _inside(part: Mapping[str, Any]) -> Any:
    held = next((part[name] for name in _INSIDE if part.get(name) is not None), None)
    return held.get("url") if isinstance(held, Mapping) else held


def open_image(image: Any) -> Any:
    """An image for the processor: an object of Pillow, an array or a tensor as it is; a `data:` URL
    decoded.  Raises: InvalidRequest, MissingDependency.
    """
    if image is not None and not isinstance(image, str | bytes):
        return image
    if not isinstance(image, str) or not image.startswith("data:image/"):
        raise InvalidRequest(
            f"an image is {image!r:.60}: expected an image of Pillow, an array, or a data: URL "
            "(data:image/png;base64,...); nothing is downloaded or opened here"
        )
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency(
            "images in data: URLs need Pillow: pip install 'compilespec[images]'"
        ) from error
    try:
        data = base64.b64decode(image.partition(",")[2], validate=True)
        return Image.open(io.BytesIO(data)).convert("RGB")
    except Exception as error:  # Pillow's readers raise any error
        raise InvalidRequest(
            f"an image's data: URL cannot be decoded ({type(error).__name__}): expected base64 of "
            "a PNG, JPEG or another image that Pillow reads"
        ) from error


def open_sound(sound: Any) -> Any:
    """Samples for the processor, an array of one dimension.  Raises: InvalidRequest."""
    samples: Any = None
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        samples = numpy.asarray(sound, dtype=numpy.float32)
    if samples is None or samples.ndim != 1 or not samples.size:
        raise InvalidRequest(
            f"a sound is {sound!r:.60}: expected its samples, an array of one dimension at the "
            "processor's rate; nothing is downloaded, opened or decoded here"
        )
    if not numpy.isfinite(samples).all():
        raise InvalidRequest("a sound holds NaN or infinity: expected finite samples")
    return samples


_OPEN = {IMAGES.one: open_image, SOUND.one: open_sound}


def _parts_of(messages: Any, medium: Medium) -> list[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return []
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)]
    return [
        part
        for content in contents
        if isinstance(content, Sequence) and not isinstance(content, str)
        for part in content
        if _is_part(part, medium)
    ]


def _is_part(part: Any, medium: Medium) -> bool:
    return isinstance(part, Mapping) and part.get("type") in medium.parts
